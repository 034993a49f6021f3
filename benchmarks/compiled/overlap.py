"""Shows which communication overlaps with which kernels, compiled on a machine that has no GPU.

    pip install --no-deps jax-cuda13-pjrt==<version of jax>
    python benchmarks/compiled/overlap.py                    # 8, 16 and 64 of A100, H100, H200
    python benchmarks/compiled/overlap.py --targets h100 --devices 8 --rows "Ring.*query" --details
    python benchmarks/compiled/overlap.py --xla-defaults     # without st.compiler_options
    python benchmarks/compiled/overlap.py --compile-times

For Ring Attention, for a double ring, and for StarTrail where it leaves a ring, the benchmark
compiles attention forward, forward and backward with either side travelling, and the training step
of a GPT layer, and reads the scheduled programs. A ring hop is overlapped if it is asynchronous and
attention runs between its start and its end. With --details, one line for each collective says
which kernels run during it. The columns of a line:

    hops      messages round the ring that are overlapped, of all; a message into which XLA combined
              several arrays counts once
    home      among the others, those that bring a travelling gradient home after the last round
    copies    kernels that only copy a buffer of --copies-from MiB or more, in a round of the ring
    slices    the same inside the attention of a round, where it may be one of several cases: parts
              of operands that are cut out, and results that are padded
    compile   seconds to lower and to compile

Programs are read, not run: the benchmark says that a message can be hidden, not how long it lasts.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import startrail_jax as st
from benchmarks.compiled.deviceless import gpu_topology, target_names
from benchmarks.compiled.schedule import (
    BACKWARD,
    ENTRY,
    Copy,
    Kernel,
    ScheduledCollective,
    read_copies,
    read_overlap,
)
from models.gpt import GPT

MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One program: a step of one setting."""

    name: str
    mesh: Mesh
    step: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Reading:
    """What a compiled program holds."""

    row: Row
    transfers: tuple[ScheduledCollective, ...]
    copies: tuple[Copy, ...]
    lower_seconds: float
    compile_seconds: float

    @property
    def hops(self) -> list[ScheduledCollective]:
        """Permutes along the ring."""
        return [x for x in self.transfers if is_hop(x, self.row.mesh)]

    def copies_a_round(self, *, in_branches: bool) -> float:
        """Copies in a round of the ring, in those branches of its conditionals that copy most."""
        rounds = (1 if "forward" in self.row.name else 2) * self.row.mesh.shape["ring"]
        counts: dict[str, Counter[str]] = {}
        for copy in self.copies:
            if copy.in_rounds and bool(copy.conditional) == in_branches:
                place = copy.conditional or copy.computation
                counts.setdefault(place, Counter())[copy.computation] += copy.runs
        return sum(max(by_branch.values()) for by_branch in counts.values()) / rounds


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    if args.compile_times:
        compile_times(args)
        return
    print(
        f"jax {jax.__version__}; {args.tokens} tokens of a device, {args.heads} heads "
        f"({args.kv_heads} key heads) of {args.head_dim}, bfloat16, causal, {args.backend}"
    )
    print(f"{'':<44}{'hops':>8}{'home':>9}{'copies':>8}{'slices':>8}{'compile':>14}")
    for target in args.targets:
        for num_devices in args.devices:
            devices = gpu_topology(target, num_devices).devices
            for row in rows(args, devices):
                reading = read(args, row)
                print(summary(f"{target} x {num_devices}, {row.name}", reading), flush=True)
                if args.details:
                    print("\n".join(details(args, reading)), flush=True)


def rows(args: argparse.Namespace, devices: list[Any]) -> Iterator[Row]:
    """Every program of every setting with a ring that `args.rows` finds."""
    settings = {"Ring": (st.Degrees.ring_attention(len(devices)), 1)}
    if len(devices) % 4 == 0:
        settings["Double ring, inner 4"] = (st.Degrees.ring_attention(len(devices)), 4)
    for c in (2, 4):
        if len(devices) % c**2 == 0:
            settings[f"StarTrail C={c}"] = (st.Degrees.startrail(len(devices), c=c), 1)
    for setting, (degrees, inner) in settings.items():
        for program, build in PROGRAMS.items():
            name = f"{setting}, {program}"
            if degrees.ring > 1 and re.search(args.rows, name):
                yield build(args, name, degrees, devices, inner=inner)


def op(
    args: argparse.Namespace,
    name: str,
    degrees: st.Degrees,
    devices: list[Any],
    backward: str,
    *,
    inner: int = 1,
) -> Row:
    """Attention on its own, and with `backward` its gradients for a given cotangent."""
    mesh = st.make_mesh(degrees, devices=devices)
    attention = st.Attention(
        mesh, layout="zigzag", backend=args.backend, backward=backward or "auto", inner=inner
    )
    seq_len = args.tokens * len(devices)

    def struct(heads: int, spec: P) -> jax.ShapeDtypeStruct:
        shape = (1, seq_len, heads, args.head_dim)
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    def step(q: jax.Array, k: jax.Array, v: jax.Array, *dout: jax.Array) -> Any:
        if not dout:
            return attention(q, k, v)
        out, transpose = jax.vjp(attention, q, k, v)
        return out, transpose(*dout)

    q = struct(args.heads, attention.query_spec(args.heads))
    k = struct(args.kv_heads, attention.key_spec(args.kv_heads))
    return Row(name, mesh, step, (q, k, k, q) if backward else (q, k, k))


def gpt(
    args: argparse.Namespace,
    name: str,
    degrees: st.Degrees,
    devices: list[Any],
    *,
    inner: int = 1,
) -> Row:
    """One step of gradient descent on a GPT of one layer."""
    mesh = st.make_mesh(degrees, axis_type="auto", devices=devices)
    attention = st.Attention(mesh, layout="zigzag", backend=args.backend, inner=inner)
    width = args.heads * args.head_dim

    def make_model() -> GPT:
        return GPT(
            vocab_size=1024, width=width, layers=1, heads=args.heads, kv_heads=args.kv_heads,
            head_dim=args.head_dim, mlp_width=3 * width, attention_fn=attention,
            dtype=jnp.bfloat16, rngs=nnx.Rngs(0),
        )  # fmt: skip

    graph, parameters = nnx.split(nnx.eval_shape(make_model))

    def step(parameters: Any, tokens: jax.Array, positions: jax.Array, targets: jax.Array) -> Any:
        def loss(parameters: Any) -> jax.Array:
            logits = nnx.merge(graph, parameters)(tokens, positions)
            likely = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)
            return -likely.mean()

        value, gradients = jax.value_and_grad(loss)(parameters)
        return value, jax.tree.map(lambda p, g: p - 1e-3 * g, parameters, gradients)

    replicated, sharded = (NamedSharding(mesh, x) for x in (P(), attention.sequence_spec))
    parameters = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), parameters
    )
    tokens = jax.ShapeDtypeStruct((1, args.tokens * len(devices)), jnp.int32, sharding=sharded)
    return Row(name, mesh, step, (parameters, tokens, tokens, tokens))


PROGRAMS: dict[str, Callable[..., Row]] = {
    "forward": lambda *setting, inner: op(*setting, backward="", inner=inner),
    "query mode": lambda *setting, inner: op(*setting, backward="query", inner=inner),
    "kv mode": lambda *setting, inner: op(*setting, backward="kv", inner=inner),
    "GPT layer": gpt,
}


def read(args: argparse.Namespace, row: Row) -> Reading:
    """Compiles a program and reads it."""
    start = time.perf_counter()
    lowered = jax.jit(row.step).lower(*row.arguments)
    middle = time.perf_counter()
    options: Any = {} if args.xla_defaults else st.compiler_options(row.mesh)
    compiled = lowered.compile(compiler_options=options | dict(args.option))
    end = time.perf_counter()
    text = compiled.as_text() or ""
    copies = read_copies(text, at_least=int(args.copies_from * MIB))
    return Reading(row, read_overlap(text), copies, middle - start, end - middle)


def axes(transfer: ScheduledCollective, mesh: Mesh) -> set[str]:
    """The mesh axes along which a collective moves data."""
    places = np.stack(np.unravel_index(range(mesh.size), mesh.devices.shape), axis=1)
    moved = [np.ptp(places[list(group)], axis=0) > 0 for group in transfer.groups]
    return {name for name, moves in zip(mesh.axis_names, np.any(moved, 0), strict=True) if moves}


def is_hop(transfer: ScheduledCollective, mesh: Mesh) -> bool:
    """Whether a collective is a message round the ring."""
    return transfer.kind == "collective_permute" and axes(transfer, mesh) == {"ring"}


def is_homecoming(hop: ScheduledCollective) -> bool:
    """Whether a hop of the backward pass starts after the last round."""
    return BACKWARD in hop.op_name and hop.computation == ENTRY and hop.after == hop.of


def summary(name: str, reading: Reading) -> str:
    hops = reading.hops
    exposed = [x for x in hops if not x.overlapped]
    home = sum(x.runs for x in exposed if is_homecoming(x))
    copies, slices = (reading.copies_a_round(in_branches=x) for x in (False, True))
    compiled = f"{reading.lower_seconds:.1f} + {reading.compile_seconds:.1f} s"
    line = f"{name:<44}{_runs(hops) - _runs(exposed):>4} of {_runs(hops):<4}{home:>5}"
    line += f"{copies:>8.1f}{slices:>8.1f}{compiled:>14}"
    for hop in exposed:
        what = "homecoming of a gradient" if is_homecoming(hop) else f"{_pass(hop.op_name)} hop"
        line += f"\n    not overlapped: {what}, {hop.runs} x {hop.received_bytes / MIB:.1f} MiB"
        line += "" if hop.asynchronous else ", synchronous"
        line += _listed(hop.products)
    if "GPT" in reading.row.name:
        for gather in query_gathers(reading):
            line += f"\n    all_gather of the queries, {gather.received_bytes / MIB:.1f} MiB: "
            line += f"beneath it {len(gather.attention)} attention{_listed(gather.products)}"
    return line


def query_gathers(reading: Reading) -> list[ScheduledCollective]:
    """The gathers of the forward pass over the team, which bring it its queries."""
    return [
        x
        for x in reading.transfers
        if x.kind == "all_gather"
        and axes(x, reading.row.mesh) == {"team"}
        and _pass(x.op_name) == "forward"
    ]


def details(args: argparse.Namespace, reading: Reading) -> Iterator[str]:
    """One line for each collective, and one for each computation with copies."""
    for x in reading.transfers:
        where = ", ".join(sorted(axes(x, reading.row.mesh)))
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


def compile_times(args: argparse.Namespace) -> None:
    """Prints seconds to lower and compile forward + backward, by ring degree."""
    print(f"{'target':<8}{'ring':>6}{'lower s':>10}{'compile s':>11}")
    for target in args.targets:
        for degree in (2, 4, 8, 16, 32, 64):
            devices = gpu_topology(target, degree).devices
            row = op(args, "", st.Degrees.ring_attention(degree), devices, args.backward)
            reading = read(args, row)
            seconds = f"{reading.lower_seconds:>10.2f}{reading.compile_seconds:>11.2f}"
            print(f"{target:<8}{degree:>6}{seconds}", flush=True)


def _option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name.lstrip("-"), json.loads(value)
    except json.JSONDecodeError:
        return name.lstrip("-"), value


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line of the benchmark; see --help."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    targets = target_names()
    parser.add_argument("--targets", nargs="+", choices=targets, default=targets, help="GPUs")
    parser.add_argument(
        "--devices", nargs="+", type=int, default=[8, 16, 64], help="numbers of them"
    )
    parser.add_argument("--rows", default="", help="regular expression: only the rows it finds")
    parser.add_argument("--details", action="store_true", help="one line for each collective")
    parser.add_argument("--compile-times", action="store_true", help="by ring degree, instead")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of one device")
    parser.add_argument("--heads", type=int, default=32, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=8, help="key heads")
    parser.add_argument("--head-dim", type=int, default=128, help="channels of a head")
    parser.add_argument("--backend", default="auto", help="block kernel")
    parser.add_argument(
        "--backward", default="kv", choices=("query", "kv"), help="for compile times"
    )
    parser.add_argument("--copies-from", type=float, default=1, help="MiB")
    parser.add_argument("--xla-defaults", action="store_true", help="without st.compiler_options")
    parser.add_argument(
        "--option", action="append", type=_option, default=[], metavar="NAME=VALUE",
        help="another compiler option, such as xla_gpu_enable_pipelined_collectives=true",
    )  # fmt: skip
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
