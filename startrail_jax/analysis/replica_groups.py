"""Reads which devices a collective joins, in every notation that XLA prints.

The input is the attributes of one instruction of optimised HLO, as text. The devices are given by
their logical ids 0, 1, ... in the program.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

_PAIRS = re.compile(r"\bsource_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_LISTED_GROUPS = re.compile(r"\breplica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
_IOTA_GROUPS = re.compile(rf"\breplica_groups=\[\d+,(\d+)\]<={_IOTA}")
_MESH_GROUPS = re.compile(
    rf"\breplica_groups=mesh\[([^\]]+)\](?:, device_ids=\((?:([\d,]+)|{_IOTA})\))? \{{([^}}]*)\}}"
)


def read_pairs(attributes: str) -> list[tuple[int, ...]] | None:
    """(sender, receiver) of every message of a collective-permute; None if it cannot be read."""
    match = _PAIRS.search(attributes)
    return _tuples(match[1]) if match else None


def read_groups(attributes: str, num_devices: int) -> list[tuple[int, ...]] | None:
    """The groups of devices that a collective joins; None if they cannot be read.

    Args:
        num_devices: number of devices of the program. A collective without groups joins them all.
    """
    if match := _LISTED_GROUPS.search(attributes):
        return _tuples(match[1]) or [tuple(range(num_devices))]
    if match := _IOTA_GROUPS.search(attributes):
        return _iota_groups(match)
    if match := _MESH_GROUPS.search(attributes):
        return _mesh_groups(match)
    return None


def _iota_groups(match: re.Match[str]) -> list[tuple[int, ...]]:
    """Reads `[groups,size]<=[dims]T(permutation)`: `_iota` of the rest, cut into groups."""
    size, ids = int(match[1]), _iota(match[2], match[3])
    return [tuple(ids[start : start + size]) for start in range(0, len(ids), size)]


def _iota(shape: str, transposed: str | None) -> list[int]:
    """Reads `[dims]T(permutation)`: ids 0, 1, ... in this shape, transposed and made flat."""
    dims = _ints(shape)
    permutation = _ints(transposed) if transposed else range(len(dims))
    strides = _strides(dims)
    return [
        sum(index * strides[dim] for index, dim in zip(indices, permutation, strict=True))
        for indices in itertools.product(*(range(dims[dim]) for dim in permutation))
    ]


def _mesh_groups(match: re.Match[str]) -> list[tuple[int, ...]]:
    """Reads `mesh['x'=2,'y'=4] {'y'}`: groups along the axes that are named in the braces.

    A part of an axis is written `'y':(2)2`: size 2, with 2 parts before it. Ids that are not in
    order are listed, or given as in `_iota`: `device_ids=([2,4]T(1,0))`.
    """
    sizes, listed, shape, transposed, named = match.groups()
    axes = {name.strip("'"): int(size) for name, size in re.findall(r"([^,=]+)=(\d+)", sizes)}
    strides = dict(zip(axes, _strides(list(axes.values())), strict=True))
    ids: Sequence[int] = range(math.prod(axes.values()))
    if listed or shape:
        ids = _ints(listed) if listed else _iota(shape, transposed)
    # Each reference is a digit of the position of a device: (stride, size).
    digits = []
    for name, before, size in re.findall(r"'?([^,:']+)'?(?::\((\d+)\)(\d+))?", named):
        degree = int(size) if size else axes[name]
        after = axes[name] // (int(before) * degree) if size else 1
        digits.append((strides[name] * after, degree))
    groups: dict[int, list[int]] = {}
    for position, device in enumerate(ids):
        first = position - sum(stride * (position // stride % size) for stride, size in digits)
        groups.setdefault(first, []).append(device)
    return [tuple(group) for group in groups.values()]


def _ints(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _tuples(text: str) -> list[tuple[int, ...]]:
    """Reads `{0,1},{2,3}`."""
    return [tuple(_ints(group)) for group in re.findall(r"\{([\d,]*)\}", text)]


def _strides(dims: Sequence[int]) -> list[int]:
    """Strides of a row-major array."""
    return [math.prod(dims[dim + 1 :]) for dim in range(len(dims))]
