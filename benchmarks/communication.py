"""Prints the bytes that every scheme moves: forward, backward, and the log-sum-exp apart.

    python benchmarks/communication.py --devices 64 --heads 64

prints one line for each setting of the scheme table that the device and head counts allow, and for
each other setting the reason why they do not. Of all settings that are possible, in the table or
not, the last lines name the one of fewest bytes. The figures are closed forms
(`startrail_jax.communication`), which the tests compare with compiled programs, byte for byte. The
benchmark therefore takes a second and needs no accelerator.

Expected for 64 devices, as many key heads as query heads, and a causal forward pass: 126 units for
Ring Attention, 44 for StarTrail as published (C = 4 or 8), 38 (C = 4) and 30 (C = 8) for StarTrail
here, and 28 for team 8, ring 8, group 1, the fewest that are possible without splitting heads. One
unit is the device's share of one query-sized tensor.

Reference: StarTrail, https://arxiv.org/abs/2407.00611.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, get_args

import startrail_jax as st
from startrail_jax.analysis.cost import Communication
from startrail_jax.analysis.settings import legal_degrees, refusal
from startrail_jax.devices.degrees import SEQUENCE_ROLES
from startrail_jax.options import GradientDtype

HEADER = (
    *("scheme", "ring", "group", "team", "head"),
    *("fwd units", "bwd units", "total units"),
    *("fwd MB", "bwd MB", "total MB", "of it lse MB", "bwd sends"),
)


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """One row of the scheme table, with all its settings for a number of devices."""

    name: str
    settings: list[st.Degrees]
    needs: str = ""
    """What must hold for the number of devices, shown where there is no setting."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of `startrail_jax.communication` that belong to the scheme."""


def schemes(num_devices: int) -> list[Scheme]:
    """The scheme table of the design, with every degree that divides `num_devices`."""
    p = num_devices
    parts = [part for part in range(2, p) if p % part == 0]
    squares = [c for c in range(2, math.isqrt(p) + 1) if p % (c * c) == 0]
    products = [(u, c) for u in parts for c in squares if p % (u * c * c) == 0]
    startrail = [st.Degrees.startrail(p, c=c) for c in squares]
    part, square = f"a divisor between 1 and {p}", f"a C > 1 whose square divides {p}"
    return [
        Scheme(name="Ring Attention", settings=[st.Degrees.ring_attention(p)]),
        Scheme(name="all-gather context parallelism", settings=[st.Degrees.all_gather(p)]),
        Scheme(name="Ulysses", settings=[st.Degrees.ulysses(p)]),
        Scheme(
            name="LoongTrain 2D-Attention, USP",
            settings=[st.Degrees.loongtrain(p, head=u) for u in parts],
            needs=part,
        ),
        Scheme(
            name="StarTrail as published",
            settings=startrail,
            needs=square,
            options={"published": True},
        ),
        Scheme(name="StarTrail", settings=startrail, needs=square),
        Scheme(
            name="teams, group 1",
            settings=[st.Degrees(team=a, ring=p // a) for a in parts],
            needs=part,
        ),
        Scheme(
            name="2-D tiles, no ring",
            settings=[st.Degrees(team=a, group=p // a) for a in parts],
            needs=part,
        ),
        Scheme(
            name="StarTrail x Ulysses",
            settings=[st.Degrees.startrail(p, c=c, head=u) for u, c in products],
            needs=f"C > 1 and U > 1 with U * C^2 dividing {p}",
        ),
    ]


def table(args: argparse.Namespace) -> list[str]:
    """Lines of the table, then the settings that are not possible and those of fewest bytes."""
    cells: list[tuple[str, ...]] = []
    impossible: list[str] = []
    for scheme in schemes(args.devices):
        if not scheme.settings:
            impossible.append(f"{scheme.name}: needs {scheme.needs} devices")
        for degrees in scheme.settings:
            if reason := refusal(degrees, **_call(args)):
                impossible.append(f"{scheme.name} ({_name(degrees)}): {reason.split('. ')[0]}")
                continue
            report = _report(degrees, scheme.options, args)
            cells.append(_cells(scheme.name, degrees, report))
    lines = _aligned([HEADER, *cells])
    if impossible:
        lines += ["", "not possible:", *(f"  {line}" for line in impossible)]
    return [*lines, "", *_fewest(args)]


def _fewest(args: argparse.Namespace) -> Iterator[str]:
    """Names the settings of fewest bytes among all that are possible, in the table or not."""
    settings = legal_degrees(args.devices, **_call(args))
    without_head = [degrees for degrees in settings if degrees.head == 1]
    for among, some in (
        (f"all {len(settings)} settings", settings),
        ("those without head", without_head),
    ):
        best = fewest_bytes(some, args)
        size = _report(best, {}, args).total.received_bytes
        yield (f"fewest bytes of {among}, forward and backward: {_name(best)}, {size / 1e6:.1f} MB")


def fewest_bytes(settings: list[st.Degrees], args: argparse.Namespace) -> st.Degrees:
    """The setting that receives the fewest bytes, forward and backward."""
    return min(settings, key=lambda degrees: _report(degrees, {}, args).total.received_bytes)


def _call(args: argparse.Namespace) -> dict[str, Any]:
    """The sizes on which it depends whether a setting is possible."""
    return {
        "batch": args.batch,
        "seq_len": args.seq_len,
        "heads": args.heads,
        "kv_heads": args.heads // args.head_ratio,
        "causal": not args.full,
        "layout": "contiguous" if args.full else "zigzag",
    }


def _report(
    degrees: st.Degrees, options: dict[str, str], args: argparse.Namespace
) -> Communication:
    choices: dict[str, Any] = {"backward": args.backward} | options
    return st.communication(
        degrees,
        **_call(args),
        head_dim=args.head_dim,
        dtype=args.dtype,
        packed=args.packed,
        gradient_dtype=args.gradient_dtype,
        keep_gathered=args.keep_gathered,
        **choices,
    )


def _cells(scheme: str, degrees: st.Degrees, report: Communication) -> tuple[str, ...]:
    passes = (report.forward, report.backward, report.total)
    return (
        scheme,
        *map(str, (degrees.ring, degrees.group, degrees.team, degrees.head)),
        *(f"{traffic.units:.2f}" for traffic in passes),
        *(f"{traffic.received_bytes / 1e6:.1f}" for traffic in passes),
        f"{report.total.row_bytes / 1e6:.1f}",
        report.backward_mode if degrees.ring > 1 else "-",
    )


def _name(degrees: st.Degrees) -> str:
    return ", ".join(f"{role} {getattr(degrees, role)}" for role in SEQUENCE_ROLES)


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Columns of equal width, the first one aligned left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line of the benchmark; see --help."""
    parser = argparse.ArgumentParser(
        description="Bytes that one device receives in one attention call, by scheme.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--devices", type=int, default=64, help="P, that share one sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--seq-len", type=int, default=65536, help="tokens of a sequence")
    parser.add_argument("--heads", type=int, default=32, help="query heads")
    parser.add_argument("--head-ratio", type=int, default=1, help="query heads per key head")
    parser.add_argument("--head-dim", type=int, default=128, help="channels of a head")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--full", action="store_true", help="no causal mask")
    parser.add_argument("--packed", action="store_true", help="with segment ids")
    parser.add_argument("--backward", default="auto", choices=("auto", "query", "kv"))
    parser.add_argument("--gradient-dtype", default="float32", choices=get_args(GradientDtype))
    parser.add_argument("--keep-gathered", action="store_true", help="units for the backward pass")
    args = parser.parse_args(argv)
    for name, size, degree in (
        ("--seq-len", args.seq_len, args.devices),
        # Of a causal call, each device has an early and a late part (zigzag).
        ("--seq-len", args.seq_len, args.devices * (1 if args.full else 2)),
        ("--heads", args.heads, args.head_ratio),
    ):
        if degree < 1 or size < 1 or size % degree:
            parser.error(f"{name} {size} must be a positive multiple of {degree}; choose another.")
    return args


def main(argv: list[str] | None = None) -> None:
    """Prints the table."""
    args = parse_args(argv)
    g = 1 / args.head_ratio
    mask = "full" if args.full else "causal"
    print(
        f"{args.devices} devices, {args.batch} x {args.seq_len} tokens, {args.heads} query heads, "
        f"{args.heads // args.head_ratio} key heads of {args.head_dim}, {args.dtype}, {mask}"
        f"{', packed' if args.packed else ''}"
    )
    print("received per device; unit: one device's share of the query; lse: with delta and ids")
    print()
    print("\n".join(table(args)))
    bound = 4 * math.sqrt(g * args.devices) - 2 - 2 * g
    print(f"no setting without head has fewer units forward, all pairs visible, than {bound:.2f}")
    best = fewest_bytes(legal_degrees(args.devices, **_call(args)), args)
    flags = " ".join(f"--mesh.{role} {getattr(best, role)}" for role in SEQUENCE_ROLES)
    print(
        "next, whether a step fits so: python benchmarks/compiled/run.py RECIPE --arithmetic "
        f"--devices {args.devices} {flags}"
    )


if __name__ == "__main__":
    main()
