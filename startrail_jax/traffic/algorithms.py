"""Divides collectives into messages, as NCCL and gloo do. It needs NumPy alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import numpy as np

Step = tuple[Sequence[int] | np.ndarray, Fraction]
"""The receiver of each member of a group, and the size of the message: a fraction of the bytes that
a member receives in all if nothing is sent twice. A device does not message itself."""
Algorithm = Callable[[int], list[Step]]
"""Size of a group -> the messages of its members."""


def ring(n: int) -> list[Step]:
    """Every member sends all that it has to the next one, piece by piece."""
    return [((np.arange(n) + 1) % n, Fraction(1))]


def direct(n: int) -> list[Step]:
    """Every member sends every other member its part directly."""
    return [((np.arange(n) + i) % n, Fraction(1, n - 1)) for i in range(1, n)]


def halving(n: int) -> list[Step]:
    """Gloo's reduce_scatter, by halves (its `ReduceScatterHalvingDoubling`).

    Members form blocks whose sizes are powers of 2, the largest first. In a block, half of the
    buffer goes to the next member, a quarter to that at distance 2, and so on, so that parts lie in
    bit-reversed order. Each block adds its parts to those of the next larger block. The members of
    the largest one then send every part to its owner.
    """
    if n == 1:
        return []
    sizes = [1 << bit for bit in reversed(range(n.bit_length())) if n >> bit & 1]
    first = [0, *itertools.accumulate(sizes)]
    largest, bits = sizes[0], sizes[0].bit_length() - 1
    steps: list[Step] = []

    def send(messages: dict[int, int], part: Fraction) -> None:
        """Messages from sender to receiver, each of a part of the buffer."""
        steps.append(([messages.get(i, i) for i in range(n)], part * n / (n - 1)))

    for bit in range(bits):
        apart = 1 << bit
        pairs = {s + i: s + (i ^ apart) for s, size in zip(first, sizes, strict=False)
                 for i in range(size) if size > apart}  # fmt: skip
        send(pairs, Fraction(1, 2 * apart))
    for index in reversed(range(1, len(sizes))):
        small, large = sizes[index], sizes[index - 1]
        for turn in range(0, large, small):
            to = {first[index] + i: first[index - 1] + turn + i for i in range(small)}
            send(to, Fraction(1, large))
    home: dict[Fraction, list[dict[int, int]]] = {}
    for place in range(largest):
        sender = int(f"{place:0{bits}b}"[::-1], 2)
        for owner in range(n):
            start = max(Fraction(place, largest), Fraction(owner, n))
            part = min(Fraction(place + 1, largest), Fraction(owner + 1, n)) - start
            if part > 0 and sender != owner:
                at_once = home.setdefault(part, [])
                free = (x for x in at_once if sender not in x and owner not in x.values())
                if (found := next(free, None)) is None:
                    at_once.append(found := {})
                found[sender] = owner
    for part, rounds in home.items():
        for messages in rounds:
            send(messages, part)
    return steps


NCCL: Mapping[str, Algorithm] = {
    "all_gather": ring,
    "all_reduce": ring,
    "all_to_all": direct,
    "reduce_scatter": ring,
}
"""The algorithm of each collective, as NCCL runs large ones. A collective_permute sends its
messages as they are."""

GLOO: Mapping[str, Algorithm] = {**NCCL, "reduce_scatter": halving}
"""The same for XLA's CPU backend: its reduce_scatter moves 4 / 3 of the bytes over 4 devices."""
