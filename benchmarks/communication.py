"""Prints the bytes that every scheme moves, forward and backward.

    python benchmarks/communication.py --devices 64 --heads 64

prints one line for each setting of the schemes that the device and head counts allow, and the
reason why others are not possible. The last lines name the settings of fewest bytes of all, in the
table or not. The figures are closed forms (`startrail_jax.communication`), which the tests compare
with compiled programs, byte for byte. No accelerator is needed.

Expected for 64 devices, as many key heads as query heads, and a causal forward pass: 126 units for
Ring Attention, 44 for StarTrail as published (C = 4 or 8), 36 (C = 4) and 28 (C = 8) for StarTrail
here, and 28 for team 8, ring 8, group 1, the fewest that are possible without splitting heads. One
unit is the device's share of one query-sized tensor.

Reference: StarTrail, https://arxiv.org/abs/2407.00611.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, get_args

import startrail_jax as st
from startrail_jax.devices.degrees import SEQUENCE_ROLES
from startrail_jax.rings.options import GradientDtype
from startrail_jax.traffic.settings import legal_degrees, refusal


def schemes(num_devices: int) -> Iterator[tuple[str, st.Degrees]]:
    """The scheme table of the design, with every degree that divides the number of devices."""
    p, degrees = num_devices, st.Degrees
    parts = [part for part in range(2, p) if p % part == 0]
    squares = [c for c in range(2, p) if p % c**2 == 0]
    yield "Ring Attention", degrees.ring_attention(p)
    yield "all-gather context parallelism", degrees.all_gather(p)
    yield "Ulysses", degrees.ulysses(p)
    for u in parts:
        yield "LoongTrain 2D-Attention, USP", degrees.loongtrain(p, head=u)
    for name in ("StarTrail as published", "StarTrail"):
        yield from ((name, degrees.startrail(p, c=c)) for c in squares)
    for a in parts:
        yield "teams, group 1", degrees(team=a, ring=p // a)
    for a in parts:
        yield "2-D tiles, no ring", degrees(team=a, group=p // a)
    for u in parts:
        for c in (c for c in squares if p % (u * c**2) == 0):
            yield "StarTrail x Ulysses", degrees.startrail(p, c=c, head=u)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    call: dict[str, Any] = {
        "batch": 1,
        "seq_len": args.seq_len,
        "heads": args.heads,
        "kv_heads": args.heads // args.head_ratio,
        "causal": not args.full,
        "layout": "contiguous" if args.full else "zigzag",
    }

    def report(degrees: st.Degrees, **options: Any) -> Any:
        options |= {"gradient_dtype": args.gradient_dtype, "keep_gathered": args.keep_gathered}
        return st.communication(degrees, **call, head_dim=128, dtype="bfloat16", **options)

    print(f"{args.devices} devices, {call}, 128 channels, bfloat16")
    print("received per device; unit: one device's share of the query\n")
    roles = "".join(f"{role:>7}" for role in SEQUENCE_ROLES)
    print(f"{'scheme':<31}{roles}{'fwd units':>11}{'bwd units':>11}{'units':>8}{'MB':>10}")
    for name, degrees in schemes(args.devices):
        sizes = "".join(f"{getattr(degrees, role):>7}" for role in SEQUENCE_ROLES)
        if reason := refusal(degrees, **call):
            print(f"{name:<31}{sizes}  {reason.split('. ')[0]}")
            continue
        found = report(degrees, published=name == "StarTrail as published")
        print(f"{name:<31}{sizes}{found.forward.units:>11.2f}{found.backward.units:>11.2f}"
              f"{found.total.units:>8.2f}{found.total.received_bytes / 1e6:>10.1f}")  # fmt: skip
    print()
    settings = legal_degrees(args.devices, **call)
    for among, some in (
        (f"all {len(settings)} settings", settings),
        ("those without head", [degrees for degrees in settings if degrees.head == 1]),
    ):
        size, best = min(
            ((report(degrees).total.received_bytes, degrees) for degrees in some),
            key=lambda x: x[0],
        )
        named = ", ".join(f"{role} {getattr(best, role)}" for role in SEQUENCE_ROLES)
        print(f"fewest bytes of {among}, forward and backward: {named}, {size / 1e6:.1f} MB")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Bytes that one device receives in one attention call, by scheme.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--devices", type=int, default=64, help="P, that share one sequence")
    parser.add_argument("--seq-len", type=int, default=65536, help="tokens of a sequence")
    parser.add_argument("--heads", type=int, default=32, help="query heads, of 128 channels")
    parser.add_argument("--head-ratio", type=int, default=1, help="query heads per key head")
    parser.add_argument("--full", action="store_true", help="no causal mask")
    parser.add_argument("--gradient-dtype", default="float32", choices=get_args(GradientDtype))
    parser.add_argument("--keep-gathered", action="store_true", help="units for the backward pass")
    args = parser.parse_args(argv)
    for name, size, degree in (
        # Of a causal call, each device has an early and a late part (zigzag).
        ("--seq-len", args.seq_len, args.devices * (1 if args.full else 2)),
        ("--heads", args.heads, args.head_ratio),
    ):
        if degree < 1 or size < 1 or size % degree:
            parser.error(f"{name} {size} must be a positive multiple of {degree}; choose another.")
    return args


if __name__ == "__main__":
    main()
