"""What linear attention sends: the messages of `scan.py` and `halo.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from startrail_jax.devices.degrees import SEQUENCE_ROLES, Degrees
from startrail_jax.linear.halo import pairs_along
from startrail_jax.linear.sizes import StateSizes
from startrail_jax.rings.transfers import Transfer
from startrail_jax.traffic.cost import Communication, Traffic, placed_on_nodes
from startrail_jax.traffic.ports import messages

_INT32 = 4


def communication_of_states(
    degrees: Degrees,
    sizes: StateSizes,
    *,
    zigzag: bool,
    packed: bool,
    initial_state: bool,
    return_state: bool,
    order: str | Sequence[str] | None = None,
    devices_per_node: int | None = None,
) -> Communication:
    """What `LinearAttention.communication` returns."""
    n = degrees.sequence
    forward = _scan(n, sizes, zigzag=zigzag, up=True)
    backward = _scan(n, sizes, zigzag=zigzag, up=zigzag)
    slices = 2 if zigzag else 1
    if sizes.levels:
        ends = sizes.batch * slices * (sizes.levels + 1) * _INT32
        forward += [
            _Message("ends of slots", ends, gathered=True),
            _Message("whether there are slots for all", _INT32, gathered=True),
        ]
    elif packed:
        forward.append(_Message("segment ids", sizes.batch * slices * _INT32, gathered=True))
    if return_state:
        forward.append(_Message("last state", sizes.state_bytes))
    if initial_state:
        backward.append(_Message("gradient of the initial state", sizes.state_bytes))
    passes = [_transfers(n, x) for x in (forward, backward, forward + backward)]
    order, grid = placed_on_nodes(degrees, order, devices_per_node, passes[-1])
    there, back, total = (
        Traffic(
            transfers=tuple(x),
            unit_bytes=sizes.map_bytes,
            unit="a map of all states of a device",
            nodes=None if grid is None else messages(degrees, x).through(grid),
        )
        for x in passes
    )
    return Communication(forward=there, backward=back, total=total, backward_mode=None, order=order)


@dataclass(frozen=True)
class _Message:
    name: str
    size: int
    pairs: list[tuple[int, int]] | None = None
    """Of a permute; None for an all_reduce or an all_gather."""
    gathered: bool = False
    """Whether it is an all_gather."""


def _scan(n: int, sizes: StateSizes, *, zigzag: bool, up: bool) -> list[_Message]:
    """The messages of `Line.enter`; zigzag order goes up and comes down."""
    steps, distances = [], [2**i for i in range((n - 1).bit_length())]
    for distance in distances:
        size = sizes.map_bytes if distance != distances[-1] else sizes.state_bytes
        steps.append(_Message("scan", size, pairs_along(n, distance, up)))
    if n > 1:
        steps.append(_Message("scan", sizes.state_bytes, pairs_along(n, 1, up)))
    if zigzag and n > 1:
        steps.append(_Message("state in the middle", sizes.state_bytes))
        for distance in (*distances, 1):
            steps.append(_Message("scan", sizes.map_bytes, pairs_along(n, distance, False)))
    return steps


def _transfers(n: int, steps: Sequence[_Message]) -> list[Transfer]:
    """The steps, with what the device receives that receives most."""
    if n == 1:
        return []
    received = [0] * n
    for step in steps:
        for _, target in step.pairs or ():
            received[target] += step.size
    most = received.index(max(received))
    found = []
    for step in steps:
        if step.gathered:
            share = step.size * (n - 1)
            found.append(Transfer(step.name, "all_gather", SEQUENCE_ROLES, row_bytes=share))
        elif step.pairs is None:
            share = 2 * step.size * (n - 1) // n
            found.append(Transfer(step.name, "all_reduce", SEQUENCE_ROLES, tensor_bytes=share))
        else:
            here = step.size if most in dict(step.pairs).values() else 0
            found.append(
                Transfer(
                    step.name,
                    "collective_permute",
                    SEQUENCE_ROLES,
                    pairs=tuple(step.pairs),
                    message_bytes=step.size,
                    tensor_bytes=here,
                )
            )
    return found
