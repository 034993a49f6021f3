"""Times attention by several schemes, forward and backward, between processes.

    python benchmarks/cluster.py --nodes 16 --devices 1 --port 100Mbit/s -- \\
        python benchmarks/schemes.py ring ulysses startrail-2 --distributed
    python benchmarks/cluster.py --nodes 8 --devices 1 --port 20Mbit/s -- \\
        python benchmarks/schemes.py every --seq-len 256 --heads 8 --rounds 1 --distributed

Schemes are ring, all-gather, ulysses, head-U (LoongTrain, USP), startrail-C, published-C (StarTrail
as in its paper), team-A, or degrees such as "group=2,ring=4,team=2", with options of attention
after a colon ("ring:inner=4", "ring:layout=contiguous,balance=exchange"). "every" is every legal
setting: all degrees, double rings, and orders of the axes that differ in which devices share a
node. The order of the others is that of train.py: the fewest bytes through the busiest port.

Results are compared with dense attention in float64, and programs timed in turn. Columns: median
seconds of the slowest process, spread of the rounds, time of the first row over that of this one,
MB that the busiest port received by the kernel's count, MB by `st.communication`, and the largest
error, relative to the largest value of each result. The exit status is 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
from jax.experimental import multihost_utils

import startrail_jax as st
from startrail_jax import testing
from startrail_jax.devices.degrees import SEQUENCE_ROLES
from startrail_jax.devices.nodes import node_grid, nodes_of
from startrail_jax.errors import InputError
from startrail_jax.traffic.algorithms import GLOO
from startrail_jax.traffic.cost import communication
from startrail_jax.traffic.ports import cheapest_order, messages, orders_to_try
from startrail_jax.traffic.settings import legal_degrees
from trainer.config import Distributed
from trainer.processes import together
from trainer.run.exit import exit_on_user_errors

NAMED: dict[str, Callable[[int, int], st.Degrees]] = {
    "ring": lambda n, _: st.Degrees.ring_attention(n),
    "all-gather": lambda n, _: st.Degrees.all_gather(n),
    "ulysses": lambda n, _: st.Degrees.ulysses(n),
    "head-U": lambda n, u: st.Degrees.loongtrain(n, head=u),
    "published-C": lambda n, c: st.Degrees.startrail(n, c=c),
    "startrail-C": lambda n, c: st.Degrees.startrail(n, c=c),
    "team-A": lambda n, a: st.Degrees(team=a, ring=n // a),
}
OPTIONS: dict[str, Any] = {"inner": int} | dict.fromkeys(
    ("gradient_dtype", "exchange", "layout", "balance"), str
)
BFLOAT16_FLAG = "--xla_disable_hlo_passes=float-normalization-bf16"
"""Without it XLA's CPU backend sends bfloat16 as float32."""
RESULTS = ("out", "dq", "dk", "dv")


@dataclass
class Scheme:
    """A setting, and what was measured of it."""

    name: str
    degrees: st.Degrees
    options: dict[str, Any] = field(default_factory=dict)
    order: tuple[str, ...] | None = None
    run: Callable[[], Any] = lambda: None
    expected: float = math.nan
    error: float = math.nan
    seconds: list[float] = field(default_factory=list)
    received: list[float] = field(default_factory=list)


def read_scheme(text: str, num_devices: int) -> Scheme:
    """A scheme by its name, or by its degrees.

    Raises:
        InputError: if there is no such scheme, or none for so many devices.
    """
    base, colon, words = text.partition(":")
    options = _read_pairs("Options of a scheme", words, OPTIONS) if colon else {}
    if "=" in base:
        roles: dict[str, Any] = dict.fromkeys(SEQUENCE_ROLES, int)
        degrees = st.Degrees(**_read_pairs("Degrees of a scheme", base, roles))
    else:
        name, _, number = base.rpartition("-") if base[-1:].isdigit() else (base, "", "0")
        full = next((x for x in NAMED if re.sub("-[A-Z]$", "", x) == name), None)
        if full is None or (full == name) != (int(number) == 0):
            raise InputError(
                f"A scheme must be every, degrees, or one of {', '.join(NAMED)}; got {text!r}. "
                "Correct the name."
            )
        degrees = NAMED[full](num_devices, int(number))
        options |= {"published": True} if name == "published" else {}
    if degrees.sequence != num_devices:
        raise InputError(
            f"The product of the degrees must be the number of devices; got {text}, which has "
            f"{degrees.sequence}, for {num_devices} devices. Change a degree, or the devices."
        )
    return Scheme(text, degrees, options)


def _read_pairs(what: str, text: str, known: dict[str, Callable[[str], Any]]) -> dict[str, Any]:
    pairs = [part.partition("=") for part in text.split(",")]
    try:
        values = {name: known[name](value) for name, _, value in pairs}
    except (KeyError, ValueError):
        values = {}
    if len(values) < len(pairs):
        raise InputError(
            f"{what} must be values of {', '.join(known)}, each at most once; got {text!r}. Write "
            "for example group=2,ring=4,team=2 or ring:inner=4."
        )
    return values


def every_scheme(nodes: Sequence[int], call: dict[str, Any]) -> Iterator[Scheme]:
    """Every legal setting; "r4t2i2@tr": ring 4, team 2, inner cycles of 2, teams across nodes."""
    for degrees in legal_degrees(len(nodes), **call):
        sizes = {role: getattr(degrees, role) for role in SEQUENCE_ROLES}
        name = "".join(f"{role[0]}{size}" for role, size in sizes.items() if size > 1)
        inners = [x for x in range(1, degrees.ring) if degrees.ring % x == 0] or [1]
        kinds = set()
        for order in orders_to_try(degrees):
            kind = node_grid(degrees, order, nodes).tobytes()
            axes = "".join(role[0] for role in order if sizes.get(role, 1) > 1)
            for inner in inners if kind not in kinds else ():
                label = f"{name}{f'i{inner}' if inner > 1 else ''}@{axes}"
                yield Scheme(label, degrees, {"inner": inner} if inner > 1 else {}, order)
            kinds.add(kind)


class Problem:
    """An attention call, its inputs, and what is right."""

    def __init__(self, args: argparse.Namespace, nodes: Sequence[int]) -> None:
        self._nodes = nodes
        sizes: dict[str, Any] = dict(
            batch=1, seq_len=args.seq_len, heads=args.heads, kv_heads=args.kv_heads
        )
        self._mask = st.masks.Full() if args.full else st.masks.Causal()
        self._layout = "contiguous" if args.full else "zigzag"
        self.call: dict[str, Any] = sizes | dict(mask=self._mask, layout=self._layout)
        self._types: dict[str, Any] = dict(head_dim=args.head_dim, dtype=args.dtype)
        self._inputs = testing._draw_inputs(
            np.random.default_rng(0),
            query=(1, args.seq_len, args.heads, args.head_dim),
            key=(1, args.seq_len, args.kv_heads, args.head_dim),
            value_head_dim=args.head_dim,
            dtype=args.dtype,
            segment_ids=None,
        )
        self._right, self.tolerance = {}, testing.FLOAT32_TOLERANCE

    def prepare(self, scheme: Scheme) -> None:
        """Compiles a scheme, counts its bytes and compares its results with the reference."""
        options: dict[str, Any] = {"layout": self._layout} | scheme.options
        call = self.call | self._types | options
        sent = communication(scheme.degrees, **call).total.transfers
        order = scheme.order or cheapest_order(scheme.degrees, self._nodes, [sent], GLOO)
        grid = node_grid(scheme.degrees, order, self._nodes).ravel()
        scheme.expected = messages(scheme.degrees, sent, GLOO).through(grid).port_received_bytes
        mesh = st.make_mesh(scheme.degrees, axis_type="auto", order=order)
        attention = st.Attention(mesh, mask=self._mask, **options)
        given = self._inputs
        arrays = attention.shard(given.query, given.key, given.value, given.dout)

        @jax.jit
        def both_passes(q: Any, k: Any, v: Any, dout: Any) -> tuple[Any, ...]:
            out, pull = jax.vjp(attention, q, k, v)
            return out, *pull(dout)

        program = both_passes.lower(*arrays).compile()
        scheme.run = lambda: jax.block_until_ready(program(*arrays))
        scheme.error = self._error(attention, scheme.run())

    def _error(self, attention: st.Attention, results: tuple[Any, ...]) -> float:
        """The largest error of any process."""
        if not self._right:
            given = replace(self._inputs, dlse=np.zeros_like(self._inputs.dlse))
            problem = given, testing._visible(attention, given), given.query.shape[-1] ** -0.5
            self._right = testing._reference(*problem)
            if given.query.dtype != np.float32:
                rounded = testing._reference(*problem, dtype=given.query.dtype)
                errors = [_relative(rounded[x], self._right[x], self._right[x]) for x in RESULTS]
                self.tolerance = testing.NARROW_ERROR_RATIO * max(errors)
        worst = 0.0
        for name, result in zip(RESULTS, results, strict=True):
            right = attention.layout.permute(self._right[name])
            for shard in result.addressable_shards:
                worst = max(worst, _relative(np.asarray(shard.data), right[shard.index], right))
        return largest([worst])[0]


def _relative(found: np.ndarray, right: np.ndarray, whole: np.ndarray) -> float:
    return float(np.abs(found.astype(np.float64) - right).max() / np.abs(whole).max())


def largest(values: Sequence[float]) -> list[float]:
    """The largest of each value over all processes."""
    rows = multihost_utils.process_allgather(np.asarray(values, np.float32))
    return np.asarray(rows).reshape(-1, len(values)).max(0).tolist()


def received_bytes() -> float:
    """Bytes that the port of an emulated node has received; NaN under other launchers."""
    counts = Path("/proc/net/dev").read_text(encoding="utf-8")
    found = re.search(r"^ *eth0: *(\d+)", counts, re.MULTILINE)
    return float(found[1]) if found and "JAX_COORDINATOR_BIND_ADDRESS" in os.environ else math.nan


def time_once(run: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of one run, and the bytes that came meanwhile."""
    before = received_bytes()
    multihost_utils.sync_global_devices("go")
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    multihost_utils.sync_global_devices("done")
    return seconds, received_bytes() - before


def time_all(schemes: Sequence[Scheme], rounds: int) -> None:
    """Times all schemes in turn, back and forth, so that a drift of the machine favours none."""
    idle = statistics.median(time_once(lambda: None)[1] for _ in range(3))
    for number in range(rounds):
        for scheme in schemes if number % 2 == 0 else schemes[::-1]:
            seconds, received = time_once(scheme.run)
            scheme.seconds.append(seconds)
            scheme.received.append(received - idle)
    for scheme in schemes:
        scheme.seconds, scheme.received = largest(scheme.seconds), largest(scheme.received)


def table(schemes: Sequence[Scheme], tolerance: float) -> list[str]:
    """Rows in Markdown."""
    titles = "scheme", "s", "spread", "x first", "MB counted", "MB expected", "error"
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    first = statistics.median(schemes[0].seconds)
    for x in schemes:
        median = statistics.median(x.seconds)
        spread = (max(x.seconds) - min(x.seconds)) / median
        received = statistics.median(x.received) / 1e6
        cells = [x.name, f"{median:.3f}", f"{spread:.0%}", f"{first / median:.2f}",
                 f"{received:.3f}", f"{x.expected / 1e6:.3f}",
                 f"{x.error:.1e}{' WRONG' if not x.error <= tolerance else ''}"]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.dtype == "bfloat16":
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {BFLOAT16_FLAG}"
    with together(Distributed(on=args.distributed, timeout=120)):
        nodes = nodes_of(sorted(jax.devices(), key=lambda x: (x.process_index, x.id)))
        problem = Problem(args, nodes)
        every = list(every_scheme(nodes, problem.call)) if "every" in args.schemes else []
        schemes = [read_scheme(x, len(nodes)) for x in args.schemes if x != "every"] + every
        for scheme in schemes:
            problem.prepare(scheme)
        time_all(schemes, args.rounds)
        if jax.process_index() == 0:
            print("\n".join(table(schemes, problem.tolerance)), flush=True)
    return int(any(not scheme.error <= problem.tolerance for scheme in schemes))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("schemes", nargs="+", help="see above")
    add("--distributed", action="store_true", help="for several processes")
    add("--seq-len", type=int, default=1024, help="tokens; default: 1024")
    add("--heads", type=int, default=16, help="query heads; default: 16")
    add("--kv-heads", type=int, help="key heads; default: as many as query heads")
    add("--head-dim", type=int, default=64, help="channels of a head; default: 64")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--full", action="store_true", help="no causal mask")
    add("--rounds", type=int, default=7, help="rounds, each of which times all; default: 7")
    args = parser.parse_args(argv)
    args.kv_heads = args.kv_heads or args.heads
    return args


if __name__ == "__main__":
    with exit_on_user_errors():
        sys.exit(main())
