"""Compiles a training step, or attention alone, for GPUs on a machine without one, and reads it.

    pip install --no-deps jax-cuda13-pjrt==<version of jax>
    python benchmarks/compiled/run.py gpt_8b_gqa --target h100 --devices 8 --seq-len 1048576 \\
        --mesh.team 2 --attention.head-chunks 4           # a recipe, with any flag of train.py
    python benchmarks/compiled/run.py gpt_8b_gqa --model.layers 1 --details          # one layer
    python benchmarks/compiled/run.py gpt_7b --zero 1 --memory      # only how much memory it takes
    python benchmarks/compiled/run.py gpt_7b --zero 1 --arithmetic  # the same, nothing is compiled
    python benchmarks/compiled/run.py attention --mesh.ring 16 --inner 4   # forward and backward

The mesh is the one that train.py takes for these flags. The command prints

* the memory of one device in GiB: `state` are weights, optimizer and batch, `rest` is everything
  else that the step needs at a time, `host` waits in the host's memory, and `peak` is needed in
  all; `formula` is the closed form (`startrail_jax.planner.memory`), which estimates the peak.
  NCCL, cuDNN's workspaces and gaps of the allocator come on top, so that a peak should be at most
  92 % of the memory (XLA_PYTHON_CLIENT_MEM_FRACTION=.92);
* a roofline (`roofline.py`): kernels of attention, matrices and others with their bytes, FLOPs and
  seconds, what is waited for the link, how many FLOPs are recomputed, and the ten kernels that move
  most bytes;
* the hops of the ring that attention hides (`schedule.py`): a hop is overlapped if it is
  asynchronous and attention runs between its start and its end. The last one brings a gradient home
  when no attention is left. Of attention alone, `copies` are kernels in a round of the ring that
  only copy a buffer of a MiB or more; `slices` are those inside of one of several cases of a round.

With --details, one line for each collective says which kernels run meanwhile. Programs are read,
not run. `deviceless.py` says what is missing.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

# For a checkout that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import startrail_jax as st
from benchmarks.compiled.deviceless import gpu_topology, target_names
from benchmarks.compiled.roofline import read_roofline
from benchmarks.compiled.schedule import (
    BACKWARD,
    ENTRY,
    Copy,
    Kernel,
    ScheduledCollective,
    axes,
    read_copies,
    read_overlap,
)
from benchmarks.compiled.step import describe, formula_of, lowered_step, read_memory
from startrail_jax.devices.degrees import SEQUENCE_ROLES
from startrail_jax.planner.hardware import GPUS
from startrail_jax.planner.quantities import GIB
from train import read_command_line
from trainer.config import TrainConfig
from trainer.parallel.degrees import choose_degrees
from trainer.run.exit import exit_on_user_errors

MIB = 2**20
ATTENTION = "attention"
GPU_OF_TARGET = {"a100": "a100_80"}
"""Names that the planner has for targets, where they differ."""

# Recipe: target, devices.
HARDWARE = {
    "gpt_7b": ("h200", 64),
    "gpt_3b": ("a100", 32),
    "gpt_8b_gqa": ("h200", 64),
    "llama3_8b_1m": ("h100", 8),
    "qwen3_8b_1m": ("h100", 8),
    "dit_1b": ("a100", 32),
}


@dataclass(frozen=True)
class Reading:
    """A compiled program."""

    mesh: Mesh
    compiled: Any
    lower_seconds: float
    compile_seconds: float

    @cached_property
    def text(self) -> str:
        """The scheduled program."""
        return self.compiled.as_text() or ""

    @cached_property
    def transfers(self) -> tuple[ScheduledCollective, ...]:
        """All collectives."""
        return read_overlap(self.text)

    @cached_property
    def copies(self) -> tuple[Copy, ...]:
        """Kernels that only copy a MiB or more."""
        return read_copies(self.text, at_least=MIB)

    @property
    def hops(self) -> list[ScheduledCollective]:
        """Permutes along the ring."""
        return [
            x
            for x in self.transfers
            if x.kind == "collective_permute" and axes(x, self.mesh) == {"ring"}
        ]

    def copies_a_round(self, *, in_branches: bool) -> float:
        """Copies in a round of the ring, in those branches of its conditionals that copy most."""
        counts: dict[str, Counter[str]] = {}
        for copy in self.copies:
            if copy.in_rounds and bool(copy.conditional) == in_branches:
                place = copy.conditional or copy.computation
                counts.setdefault(place, Counter())[copy.computation] += copy.runs
        rounds = 2 * self.mesh.shape["ring"]
        return sum(max(by_branch.values()) for by_branch in counts.values()) / rounds


def main(argv: Sequence[str] | None = None) -> None:
    jax.config.update("jax_platforms", "cpu")
    args, others = parse_args(argv)
    if args.program == ATTENTION:
        run_attention(args, parse_attention(others))
    else:
        run_step(args, read_command_line([args.program, *others]).settings)


def run_step(args: argparse.Namespace, config: TrainConfig) -> None:
    """Compiles and reads the step of a run."""
    target, num_devices = HARDWARE.get(args.program, ("h100", 8))
    target, num_devices = args.target or target, config.devices or num_devices
    degrees = choose_degrees(config.mesh, num_devices, config.attention_call)
    formula = formula_of(config, degrees)
    print(
        f"{args.program}, {config.num_tokens} tokens, {num_devices} x {target}: {describe(degrees)}"
    )
    if args.arithmetic:
        state = formula.state_bytes + formula["batch"]
        sizes = (state, formula.device_bytes - state, formula.host_bytes, formula.device_bytes)
    else:
        devices = gpu_topology(target, num_devices).devices
        mesh = st.make_mesh(degrees, axis_type="auto", devices=devices)
        reading = compiled(mesh, lambda: lowered_step(config, degrees, devices), {})
        memory = read_memory(reading.compiled)
        sizes = (memory.arguments, memory.temporary, memory.host, memory.peak)
    print(f"{'':<5}{'state':>8}{'rest':>8}{'host':>8}{'peak':>8}{'formula':>9}")
    columns = "".join(f"{size / GIB:>8.2f}" for size in sizes)
    print(f"{'GiB':<5}{columns}{formula.device_bytes / GIB:>9.2f}", flush=True)
    if args.details:
        print(formula.table())
    if not (args.memory or args.arithmetic):
        report(args, reading, target)


def run_attention(args: argparse.Namespace, sizes: argparse.Namespace) -> None:
    """Compiles and reads a call of attention, forward and backward."""
    degrees = st.Degrees(**{role: getattr(sizes, role) for role in SEQUENCE_ROLES})
    target = args.target or "h100"
    devices = gpu_topology(target, degrees.sequence).devices
    print(
        f"attention, {sizes.tokens} tokens of a device, {sizes.heads} heads ({sizes.kv_heads} key "
        f"heads) of {sizes.head_dim}, bfloat16, causal, {degrees.sequence} x {target}: "
        f"{describe(degrees)}"
    )
    reading = attention(sizes, degrees, devices, xla_defaults=args.xla_defaults)
    report(args, reading, target)
    if degrees.ring > 1:
        copies, slices = (reading.copies_a_round(in_branches=x) for x in (False, True))
        print(f"in a round of the ring: {copies:.1f} copies, {slices:.1f} slices")


def attention(
    sizes: argparse.Namespace, degrees: st.Degrees, devices: list[Any], *, xla_defaults: bool
) -> Reading:
    """Attention and its gradients for a given cotangent, compiled."""
    mesh = st.make_mesh(degrees, devices=devices)
    attend = st.Attention(mesh, layout="zigzag", backward=sizes.backward, inner=sizes.inner)

    def struct(heads: int, spec: P) -> jax.ShapeDtypeStruct:
        shape = (1, sizes.tokens * len(devices), heads, sizes.head_dim)
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    def step(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Any:
        out, transpose = jax.vjp(attend, q, k, v)
        return out, transpose(dout)

    q = struct(sizes.heads, attend.query_spec(sizes.heads))
    k = struct(sizes.kv_heads, attend.key_spec(sizes.kv_heads))
    options = {} if xla_defaults else st.compiler_options(mesh)
    return compiled(mesh, lambda: jax.jit(step).lower(q, k, k, q), dict(options))


def compiled(mesh: Mesh, lower: Any, options: dict[str, Any]) -> Reading:
    """Lowers and compiles a program."""
    start = time.perf_counter()
    lowered = lower()
    middle = time.perf_counter()
    done = lowered.compile(compiler_options=options) if options else lowered.compile()
    return Reading(mesh, done, middle - start, time.perf_counter() - middle)


def report(args: argparse.Namespace, reading: Reading, target: str) -> None:
    """Prints what a compiled program does."""
    print(f"lowered in {reading.lower_seconds:.1f} s, compiled in {reading.compile_seconds:.1f} s")
    gpu = GPUS[GPU_OF_TARGET.get(target, target)]
    print(
        f"\nroofline: memory {gpu.memory_rate / 1e12:.2f} TB/s, matrices "
        f"{gpu.peak_flops * gpu.matrix_efficiency / 1e12:.0f} TFLOP/s, link "
        f"{gpu.inside_rate / 1e9:.0f} GB/s"
    )
    print(read_roofline(reading.text, gpu).table(), flush=True)
    print(f"\n{overlap(reading)}")
    if args.details:
        print("\n".join(details(reading)))


def is_homecoming(hop: ScheduledCollective) -> bool:
    """Whether a hop of the backward pass starts after the last round."""
    return BACKWARD in hop.op_name and hop.computation == ENTRY and hop.after == hop.of


def overlap(reading: Reading) -> str:
    """How many hops of the ring are beneath attention, and which are not."""
    hops = reading.hops
    exposed = [x for x in hops if not x.overlapped]
    hidden, count = _runs(hops) - _runs(exposed), _runs(hops)
    text = f"{hidden} of {count} ring hops are overlapped"
    for hop in exposed:
        what = "homecoming of a gradient" if is_homecoming(hop) else f"{_pass(hop.op_name)} hop"
        text += f"\n    not overlapped: {what}, {hop.runs} x {hop.received_bytes / MIB:.1f} MiB"
        text += "" if hop.asynchronous else ", synchronous"
        text += _listed(hop.products)
    return text


def details(reading: Reading) -> Iterator[str]:
    """One line for each collective, and one for each computation with copies."""
    for x in reading.transfers:
        where = ", ".join(sorted(axes(x, reading.mesh)))
        yield (
            f"    {_pass(x.op_name):<9}{f'{x.kind}, {where}':<39}{x.runs:>3} x "
            f"{x.received_bytes / MIB:>6.1f} MiB {'async' if x.asynchronous else 'sync':<6}"
            f"beneath: {len(x.attention)} attention{_listed(x.products)}"
        )
    for (place, counts), times in Counter(_copied(reading.copies)).items():
        yield f"    copies {place}, {times} times: {counts}"


def _copied(copies: tuple[Copy, ...]) -> Iterator[tuple[str, str]]:
    """For each computation that copies: what it is, and the sizes of what it copies in one run."""
    for computation in dict.fromkeys(x.computation for x in copies):
        here = [x for x in copies if x.computation == computation]
        for in_rounds in sorted({x.in_rounds for x in here}):
            sizes = [x.written_bytes for x in here if x.in_rounds == in_rounds]
            place = "in the rounds" if in_rounds else "before or after the rounds"
            if here[0].conditional:
                place = "in a branch"
            runs = f" of {here[0].runs} runs" if here[0].runs > 1 else ""
            yield place + runs, " + ".join(f"{size / MIB:.0f}" for size in sizes) + " MiB"


def _listed(products: tuple[Kernel, ...]) -> str:
    """Matrix products by the shapes of their results."""
    shapes = [re.findall(r"\[([\d,]*)\]", x.result)[0].replace(",", "x") for x in products]
    return f", {len(shapes)} products ({', '.join(shapes)})" if shapes else ""


def _pass(op_name: str) -> str:
    return "backward" if BACKWARD in op_name else "forward"


def _runs(transfers: list[ScheduledCollective]) -> int:
    return sum(x.runs for x in transfers)


def parse_args(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The flags of this command, and the others: see --help."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("program", help=f"a recipe or a config.json of train.py, or {ATTENTION}")
    parser.add_argument("--target", choices=target_names(), help="GPU; by default the recipe's")
    parser.add_argument("--memory", action="store_true", help="no more than the memory of a step")
    parser.add_argument("--arithmetic", action="store_true", help="its closed form alone")
    parser.add_argument("--details", action="store_true", help="one line for each collective")
    parser.add_argument("--xla-defaults", action="store_true", help="without st.compiler_options")
    args, others = parser.parse_known_args(argv)
    step_only, attention_only = args.memory or args.arithmetic, args.xla_defaults
    if step_only if args.program == ATTENTION else attention_only:
        parser.error(
            "--memory and --arithmetic are for steps, and --xla-defaults for attention; got them "
            f"for {args.program}. Leave them out."
        )
    return args, others


def parse_attention(argv: Sequence[str] = ()) -> argparse.Namespace:
    """The sizes of attention alone."""
    parser = argparse.ArgumentParser(prog=f"run.py {ATTENTION}", allow_abbrev=False)
    for role in SEQUENCE_ROLES:
        parser.add_argument(f"--mesh.{role}", dest=role, type=int, default=1)
    parser.add_argument("--inner", type=int, default=1, help="devices of an inner cycle")
    parser.add_argument("--backward", default="auto", choices=("auto", "query", "kv"))
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of one device")
    parser.add_argument("--heads", type=int, default=32, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=8, help="key heads")
    parser.add_argument("--head-dim", type=int, default=128, help="channels of a head")
    return parser.parse_args(argv)


if __name__ == "__main__":
    with exit_on_user_errors():
        main()
