"""Imports a synthetic model in several processes: time, memory of each process, the same bits.

    python benchmarks/import_model.py                 # 0.2 billion parameters; 1, 2, 4 processes
    python benchmarks/import_model.py --size 1b --processes 2 --lora-rank 16
    python benchmarks/import_model.py --size 8b --only-read 8      # 16 GB; 1/8 of it in memory

The benchmark writes a Llama of random bfloat16 weights in files of 2 GB, as a download would lie
there, and removes it at the end. `python -m trainer.gpt.pretrained` imports it over 8
simulated devices: the weights are read, split over all devices and saved as a checkpoint. With
--lora-rank they stay bfloat16; else they become float32. The line of an import has

    share       the weights of a process's devices
    anonymous   the largest memory of a process that belongs to it alone: the share, as devices are
                simulated here, and the parts of it that are being read or compressed for the
                checkpoint
    resident    the largest memory in all, with the pages of files that are mapped into it

and of both, in brackets, in shares, how much larger it is than in an import of a few weights.

With --only-read N, one process reads what the first of N devices would, and does not save it. So a
model can be read that fits no memory here. The checksums of all arrays must be the same for any
number of processes, and resident memory must grow by at most 1.3 shares; otherwise, the benchmark
exits with status 1.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from tests.faults.failures import IMPORT, Processes
from tests.faults.run_folders import REPOSITORY, CheckFailed, environment
from trainer.checkpoints.checksums import Checksums
from trainer.gpt.config import GPTConfig
from trainer.gpt.pretrained.families import to_values
from trainer.gpt.pretrained.tensors import INDEX

GB, GIB = 10**9, 2**30
DEVICES = 8
MOST_SHARES = 1.3
"""By how much resident memory may grow."""
BLOCK = (1 << 24) - 3
"""Random numbers that are made: no multiple of any size of a model."""
POLL_SECONDS = 0.05
HANGS_AFTER_SECONDS = 3600


def _llama(vocab_size: int, width: int, layers: int, mlp_width: int, heads: int) -> GPTConfig:
    return GPTConfig(
        vocab_size=vocab_size,
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=max(heads // 4, 1),
        head_dim=width // heads,
        mlp_width=mlp_width,
        norm_eps=1e-5,
        dtype="bfloat16",
    )


SIZES = {
    "few": _llama(256, 64, 2, 128, 4),
    "200m": _llama(32_000, 1024, 12, 2816, 16),
    "1b": _llama(128_256, 2048, 16, 8192, 32),
    "8b": _llama(128_256, 4096, 32, 14_336, 32),
}
"""Models by name; "1b" and "8b" have the sizes of Llama 3, with a head of their own."""


def tensors_of(model: GPTConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors of a Llama."""
    width, vocabulary = model.width, (model.vocab_size, model.width)
    queries, keys = (n * model.head_dim for n in (model.heads, model.kv_heads))
    yield "model.embed_tokens.weight", vocabulary
    for layer in range(model.layers):
        for name, shape in (
            ("input_layernorm", (width,)),
            ("self_attn.q_proj", (queries, width)),
            ("self_attn.k_proj", (keys, width)),
            ("self_attn.v_proj", (keys, width)),
            ("self_attn.o_proj", (width, queries)),
            ("post_attention_layernorm", (width,)),
            ("mlp.gate_proj", (model.mlp_width, width)),
            ("mlp.up_proj", (model.mlp_width, width)),
            ("mlp.down_proj", (width, model.mlp_width)),
        ):
            yield f"model.layers.{layer}.{name}.weight", shape
    yield "model.norm.weight", (width,)
    yield "lm_head.weight", vocabulary


def write_model(model: GPTConfig, folder: Path) -> int:
    """Writes a model of random weights; returns the number of its parameters."""
    folder.mkdir(parents=True)
    # Random signs and mantissas; the exponents make all magnitudes about 1/50. Every tensor begins
    # elsewhere in one block, since random numbers for all would take minutes.
    block = np.random.default_rng(0).integers(0, 1 << 16, BLOCK, np.uint16)
    block = (block & 0x807F) | 0x3C80
    files: dict[str, str] = {}
    total = 0

    def tensor(shape: tuple[int, ...]) -> Any:
        begin = (total * 7919) % (BLOCK // 2)
        part = block[begin : begin + math.prod(shape)]
        return np.resize(part, shape).view(ml_dtypes.bfloat16)

    def flush(part: dict[str, Any]) -> None:
        name = f"model-{len(set(files.values())) + 1:05}.safetensors"
        save_file(part, folder / name, metadata={"format": "pt"})
        files.update(dict.fromkeys(part, name))
        part.clear()

    part: dict[str, Any] = {}
    for name, shape in tensors_of(model):
        part[name] = tensor(shape)
        total += part[name].size
        if sum(x.nbytes for x in part.values()) > 2 * GB:
            flush(part)
    flush(part)
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    values = to_values(model, length=8192, dtype="bfloat16")
    (folder / "config.json").write_text(json.dumps(values))
    return total


@dataclass
class Memory:
    """The largest memory of a process so far, in bytes."""

    anonymous: int = 0
    resident: int = 0

    def look(self, pid: int) -> None:
        """Looks at a process, which may have ended."""
        try:
            text = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return
        fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        if "RssAnon" in fields:
            self.anonymous = max(self.anonymous, _bytes(fields["RssAnon"]))
            self.resident = max(self.resident, _bytes(fields["VmHWM"]))


def _bytes(field: str) -> int:
    return int(field.split()[0]) * 1024


def import_model(
    folder: Path, scratch: Path, processes: int, flags: list[str]
) -> tuple[float, list[Memory], dict[str, Any]]:
    """Imports a model; returns seconds, the memory of each process, and all checksums."""
    run_dir = scratch / "run"
    command = [str(folder), "--run-dir", str(run_dir), *flags]
    command += ["--devices", str(DEVICES), "--no-tensorboard", "--checkpoint.keep", "1"]
    memory = [Memory() for _ in range(processes)]
    start = time.monotonic()
    with Processes(processes, command, folder=scratch, program=IMPORT) as running:
        while any(running.is_running(index) for index in range(processes)):
            for index, found in enumerate(memory):
                found.look(running.pid(index))
            if time.monotonic() - start > HANGS_AFTER_SECONDS:
                raise CheckFailed(f"An import must end.\n{running.outputs()}")
            time.sleep(POLL_SECONDS)
        if any(running.wait()):
            raise CheckFailed(f"An import must succeed.\n{running.outputs()}")
    seconds = time.monotonic() - start
    found = {}
    for part in ("checkpoints", "frozen"):
        if (run_dir / part / "0").exists():
            checksums = Checksums.read(run_dir / part / "0")
            assert checksums is not None, "every checkpoint has some"
            found |= checksums.arrays
    shutil.rmtree(run_dir)
    return seconds, memory, found


READ = """
import sys, time
from dataclasses import replace
from pathlib import Path
import jax
from flax import nnx
import startrail_jax as st
from trainer.gpt.pretrained.defaults import pretrained
from trainer.gpt.config import LoraConfig
from trainer.gpt.objective import NextToken
from trainer.gpt.pretrained.initial import open_pretrained
from trainer.parallel.partition import path_name
from trainer.parallel.step import Program, make_attention

folder, devices, rank = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
config = pretrained(folder)
if rank:
    config = replace(config, lora=LoraConfig(rank=rank))
objective = NextToken(config)
mesh = st.make_mesh(st.Degrees(ring=devices), "auto", jax.devices()[:devices])
shapes = Program(config, make_attention(mesh, config, objective), objective).state_shapes.base
first = mesh.devices.flat[0]
with open_pretrained(config, shapes) as initial:
    start, parts = time.monotonic(), []
    for path, x in jax.tree_util.tree_leaves_with_path(shapes):
        index = x.sharding.devices_indices_map(x.shape)[first]
        parts.append(initial._part(initial.places[path_name(path)], index, x.dtype))
    seconds = time.monotonic() - start
print(seconds, sum(part.nbytes for part in parts))
"""
"""Reads the part of a model that is the first device's: folder, devices, rank."""


def read_share(folder: Path, scratch: Path, devices: int, rank: int) -> tuple[float, int, Memory]:
    """Reads the share of one device; returns seconds, its bytes, and the memory of the process."""
    variables = environment(scratch / "compiled") | {"JAX_NUM_CPU_DEVICES": str(devices)}
    memory = Memory()
    process = subprocess.Popen(
        [sys.executable, "-c", READ, str(folder), str(devices), str(rank)],
        cwd=REPOSITORY,
        env=variables,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        while process.poll() is None:
            memory.look(process.pid)
            time.sleep(POLL_SECONDS)
        output = process.communicate()[0]
    finally:
        process.kill()
    if process.returncode:
        raise CheckFailed("Reading must succeed.")
    seconds, size = output.split()[-2:]
    return float(seconds), int(size), memory


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="200m")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--lora-rank", type=int, default=0, help="0 for none")
    parser.add_argument(
        "--only-read", type=int, metavar="N", help="read the share of 1 of N devices"
    )
    parser.add_argument(
        "--folder", type=Path, help="where to write; the default is a temporary one"
    )
    options = parser.parse_args()
    flags = ["--lora.rank", str(options.lora_rank)] if options.lora_rank else []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        scratch = Path(name)
        write_model(SIZES["few"], scratch / "few")
        start = time.monotonic()
        total = write_model(SIZES[options.size], scratch / "model")
        print(
            f"{total / 1e9:.2f} billion parameters in bfloat16, {2 * total / GB:.2f} GB, written "
            f"in {time.monotonic() - start:.0f} s"
        )
        if options.only_read:
            few = read_share(scratch / "few", scratch, options.only_read, options.lora_rank)[2]
            seconds, share, memory = read_share(
                scratch / "model", scratch, options.only_read, options.lora_rank
            )
            _report(f"1 of {options.only_read} devices", seconds, share, [memory], few)
            return
        size = total * (2 if options.lora_rank else 4)
        expected = None
        for count in options.processes:
            few = max(
                import_model(scratch / "few", scratch, count, flags)[1], key=lambda x: x.resident
            )
            seconds, memory, found = import_model(scratch / "model", scratch, count, flags)
            _report(f"{count} processes", seconds, size // count, memory, few)
            if expected is not None and found != expected:
                raise CheckFailed(f"All processes must import the same; {count} of them differ.")
            expected = found
        print(f"the same checksums of {len(expected or ())} arrays")


def _report(what: str, seconds: float, share: int, memory: list[Memory], few: Memory) -> None:
    """Prints the line of an import, with that process that has grown most.

    Raises:
        CheckFailed: if it has grown too much.
    """
    most = max(memory, key=lambda x: x.resident)
    own = (most.anonymous - few.anonymous) / share
    grown = (most.resident - few.resident) / share
    print(
        f"{what}: {seconds:.1f} s; share {share / GIB:.2f} GiB, anonymous "
        f"{most.anonymous / GIB:.2f} GiB ({own:.2f} x), resident {most.resident / GIB:.2f} GiB "
        f"({grown:.2f} x)",
        flush=True,
    )
    if grown > MOST_SHARES:
        raise CheckFailed(f"Resident memory must grow by at most {MOST_SHARES} shares.")


if __name__ == "__main__":
    try:
        main()
    except CheckFailed as error:
        sys.exit(str(error))
