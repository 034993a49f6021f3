"""Compiles a training step, or attention alone, for GPUs on a machine without one, and reads it.

    pip install --no-deps jax-cuda13-pjrt==<version of jax>
    python benchmarks/compiled/run.py llama3_8b --target h100 --devices 8 --seq-len 1048576 \\
        --mesh.c 2 --attention.head-chunks 4              # a recipe, with any flag of train.py
    python benchmarks/compiled/run.py llama3_8b --model.layers 1 --details          # one layer
    python benchmarks/compiled/run.py gpt_7b --zero 1 --memory      # only how much memory it takes
    python benchmarks/compiled/run.py gpt_7b --zero 1 --arithmetic  # the same, nothing is compiled
    python benchmarks/compiled/run.py attention --mesh.ring 16 --inner 4   # forward and backward

Degrees that flags leave open are those of train.py on one node of such GPUs. The command prints

* the memory of one device in GiB: `state` are weights, optimizer and batch, `rest` is everything
  else that the step needs at a time, `host` waits in the host's memory, and `peak` is needed in
  all; `formula` is the closed form (`trainer.planner.memory`), which estimates the peak.
  NCCL, cuDNN's workspaces and gaps of the allocator come on top, so that a peak should be at most
  92 % of the memory (XLA_PYTHON_CLIENT_MEM_FRACTION=.92);
* a roofline (`roofline.py`): kernels of attention, matrices and others with their bytes, FLOPs and
  seconds, what is waited for the link, how many FLOPs are recomputed, and the ten kernels that move
  most bytes;
* the hops of the ring that attention hides: a hop is overlapped if it is asynchronous and attention
  runs between its start and its end. The last one brings a gradient home when no attention is left.

With --details, one line for each collective says which kernels run meanwhile. Programs are read,
not run. `deviceless.py` says what is missing.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
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
from benchmarks.compiled.roofline import BACKWARD, Collective, Roofline, read_roofline
from startrail_jax.devices.degrees import SEQUENCE_ROLES
from train import read_command_line
from trainer.config import TrainConfig
from trainer.mesh import new_degrees
from trainer.parallel.abstract_step import AbstractStep
from trainer.parallel.checks import make_attention
from trainer.parallel.step import Program
from trainer.planner.hardware import GPUS
from trainer.planner.here import jax_share
from trainer.planner.quantities import GIB
from trainer.run.exit import exit_on_user_errors
from trainer.tasks import TASKS

MIB = 2**20
ATTENTION = "attention"
GPU_OF_TARGET = {"a100": "a100_80"}
"""Names that the planner has for targets, where they differ."""

# Recipe: target, devices.
HARDWARE = {
    "gpt_7b": ("h200", 64),
    "gpt_3b": ("a100", 32),
    "llama3_8b": ("h200", 64),
    "llama3_8b_1m": ("h100", 8),
    "qwen3_8b_1m": ("h100", 8),
    "qwen3_30b_a3b_1m": ("h100", 8),
    "gpt_oss_20b_128k": ("h100", 8),
    "moonlight_16b_128k": ("h100", 8),
    "kimi_linear_48b_1m": ("h100", 64),
    "dit_1b": ("a100", 32),
}


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
    objective = TASKS[config.kind].make_objective(config)
    limit = int(jax_share() * GPUS[GPU_OF_TARGET.get(target, target)].memory_bytes)
    degrees = new_degrees(config, objective, num_devices, limit=limit)
    # Raises what train.py would raise on such a mesh.
    abstract = AbstractStep.of_degrees(config, objective, degrees, limit)
    remat, formula = abstract.remat, abstract.memory()
    config = replace(config, remat=remat)
    print(
        f"{args.program}, {config.num_tokens} tokens, {num_devices} x {target}: "
        f"{describe(degrees)}; remat {remat}"
    )
    if args.arithmetic:
        state = formula.state_bytes + formula["batch"]
        sizes = (state, formula.device_bytes - state, formula.host_bytes, formula.device_bytes)
    else:
        mesh, lowered = lowered_step(config, degrees, gpu_topology(target, num_devices).devices)
        compiled = timed_compile(lowered)
        sizes = memory_of(compiled)
    print(f"{'':<5}{'state':>8}{'rest':>8}{'host':>8}{'peak':>8}{'formula':>9}")
    columns = "".join(f"{size / GIB:>8.2f}" for size in sizes)
    print(f"{'GiB':<5}{columns}{formula.device_bytes / GIB:>9.2f}", flush=True)
    if args.details:
        print(formula.table())
    if not (args.memory or args.arithmetic):
        report(compiled.as_text(), mesh, target, details=args.details)


def run_attention(args: argparse.Namespace, sizes: argparse.Namespace) -> None:
    """Compiles and reads a call of attention, forward and backward."""
    degrees = st.Degrees(**{role: getattr(sizes, role) for role in SEQUENCE_ROLES})
    target = args.target or "h100"
    print(
        f"attention, {sizes.tokens} tokens of a device, {sizes.heads} heads ({sizes.kv_heads} key "
        f"heads) of {sizes.head_dim}, bfloat16, causal, {degrees.sequence} x {target}: "
        f"{describe(degrees)}"
    )
    mesh, lowered = lowered_attention(
        sizes, degrees, gpu_topology(target, degrees.sequence).devices
    )
    text = timed_compile(lowered, dict(st.compiler_options(mesh))).as_text()
    report(text, mesh, target, details=args.details)


def lowered_step(config: TrainConfig, degrees: st.Degrees, devices: list[Any]) -> tuple[Mesh, Any]:
    """The mesh of some devices, and the whole training step of a run, lowered for it."""
    mesh = st.make_mesh(degrees, axis_type="auto", devices=devices)
    objective = TASKS[config.kind].make_objective(config)
    program = Program(config, make_attention(mesh, config, objective), objective)
    step: Any = program.train_step
    return mesh, step.lower(program.state_shapes, program.batch_shapes)


def lowered_attention(
    sizes: argparse.Namespace, degrees: st.Degrees, devices: list[Any]
) -> tuple[Mesh, Any]:
    """The same for attention and its gradients for a given cotangent."""
    mesh = st.make_mesh(degrees, devices=devices)
    attend = st.Attention(
        mesh, causal=True, layout="zigzag", backward=sizes.backward, inner=sizes.inner
    )

    def struct(heads: int, spec: P) -> jax.ShapeDtypeStruct:
        shape = (1, sizes.tokens * len(devices), heads, sizes.head_dim)
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    def step(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Any:
        out, transpose = jax.vjp(attend, q, k, v)
        return out, transpose(dout)

    q = struct(sizes.heads, attend.query_spec(sizes.heads))
    k = struct(sizes.kv_heads, attend.key_spec(sizes.kv_heads))
    return mesh, jax.jit(step).lower(q, k, k, q)


def timed_compile(lowered: Any, options: dict[str, Any] | None = None) -> Any:
    """Compiles a program, and prints how long that took."""
    start = time.perf_counter()
    compiled = lowered.compile(compiler_options=options)
    print(f"compiled in {time.perf_counter() - start:.1f} s")
    return compiled


def memory_of(compiled: Any) -> tuple[int, int, int, int]:
    """What XLA says of a compiled step, in bytes of one device: state, rest, host and peak."""
    memory: Any = compiled.memory_analysis()
    arguments, rest = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    # Where more waits on the host than on the device, XLA's peak is that of the host.
    peak = min(memory.peak_memory_in_bytes, arguments + results + rest)
    host = memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes
    return arguments, rest, host, peak


def describe(degrees: st.Degrees) -> str:
    """The degrees above 1."""
    return ", ".join(f"{name} {n}" for name, n in vars(degrees).items() if n > 1)


def report(text: str, mesh: Mesh, target: str, *, details: bool) -> None:
    gpu = GPUS[GPU_OF_TARGET.get(target, target)]
    print(
        f"\nroofline: memory {gpu.memory_rate / 1e12:.2f} TB/s, matrices "
        f"{gpu.peak_flops * gpu.matrix_efficiency / 1e12:.0f} TFLOP/s, link "
        f"{gpu.inside_rate / 1e9:.0f} GB/s"
    )
    roofline = read_roofline(text, gpu)
    print(roofline.table(), flush=True)
    print(f"\n{overlap(roofline.hops(mesh))}")
    for line in each_collective(roofline, mesh) if details else ():
        print(line)


def overlap(hops: list[Collective]) -> str:
    """How many hops of the ring are beneath attention, and which are not."""
    exposed = [x for x in hops if not x.overlapped]
    count, shown = (sum(x.runs for x in some) for some in (hops, exposed))
    text = f"{count - shown:g} of {count:g} ring hops are overlapped"
    for hop in exposed:
        what = "homecoming of a gradient" if hop.is_homecoming else f"{_pass(hop.op_name)} hop"
        text += f"\n    not overlapped: {what}, {hop.runs:g} x {hop.received_bytes / MIB:.1f} MiB"
        text += "" if hop.asynchronous else ", synchronous"
        text += _listed(hop)
    return text


def each_collective(roofline: Roofline, mesh: Mesh) -> Iterator[str]:
    for x in roofline.collectives:
        where = ", ".join(sorted(x.axes(mesh)))
        yield (
            f"    {_pass(x.op_name):<9}{f'{x.kind}, {where}':<39}{x.runs:>3g} x "
            f"{x.received_bytes / MIB:>6.1f} MiB {'async' if x.asynchronous else 'sync':<6}"
            f"beneath: {len(x.attention)} attention{_listed(x)}"
        )


def _listed(collective: Collective) -> str:
    """The matrix products beneath a collective, by the shapes of their results."""
    found = (re.findall(r"\[([\d,]*)\]", x.result)[0] for x in collective.products)
    shapes = [shape.replace(",", "x") for shape in found]
    return f", {len(shapes)} products ({', '.join(shapes)})" if shapes else ""


def _pass(op_name: str) -> str:
    return "backward" if BACKWARD in op_name else "forward"


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
    args, others = parser.parse_known_args(argv)
    if args.program == ATTENTION and (args.memory or args.arithmetic):
        parser.error(
            "--memory and --arithmetic are for steps; got one of them for attention. Leave it out."
        )
    return args, others


def parse_attention(argv: Sequence[str] = ()) -> argparse.Namespace:
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
