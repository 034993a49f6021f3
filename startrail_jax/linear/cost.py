"""What linear attention sends (the messages of `scan.py` and `halo.py`), keeps and computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from startrail_jax.devices.degrees import SEQUENCE_ROLES, Degrees
from startrail_jax.linear.halo import pairs_along
from startrail_jax.linear.rules import StateRule
from startrail_jax.linear.vjp import Cut
from startrail_jax.rings.transfers import Transfer
from startrail_jax.traffic.cost import Communication, Traffic, placed_on_nodes
from startrail_jax.traffic.ports import messages

_FLOAT32 = 4
_INT32 = 4
_IDS = "segment ids"


@dataclass(frozen=True, kw_only=True)
class StateSizes:
    """Sizes of the states of one device."""

    rule: StateRule
    batch: int
    heads: int
    key_dim: int
    value_dim: int

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all rows and heads."""
        return self.batch * self.heads * self.key_dim * self.value_dim * _FLOAT32

    @property
    def map_bytes(self) -> int:
        """Bytes of maps of these states, M and N."""
        factor = self.rule.factor_elements(self.key_dim)
        return self.batch * self.heads * factor * _FLOAT32 + self.state_bytes


@dataclass(frozen=True, kw_only=True)
class LayerSizes(StateSizes):
    """Sizes of linear attention on one device."""

    tokens: int
    """Of a row."""
    key_heads: int
    """Heads of query and key, on this device."""
    itemsize: int
    """Bytes of a number of query, key and value."""
    slices: int
    """Slices of the sequence that a device holds."""

    @property
    def input_bytes(self) -> int:
        """Bytes of query, key, value, decay and beta."""
        channels = 2 * self.key_heads * self.key_dim + self.heads * self.value_dim
        gates = self.heads * (1 + (self.key_dim if self.rule.by_channel else 1))
        return self.batch * self.tokens * (channels * self.itemsize + gates * _FLOAT32)

    @property
    def output_bytes(self) -> int:
        """Bytes of the output."""
        return self.batch * self.tokens * self.heads * self.value_dim * self.itemsize

    @property
    def kept_bytes(self) -> int:
        """Bytes of what is kept for the backward pass beside the inputs: a map for each group."""
        return self._groups * self.map_bytes

    @property
    def forward_bytes(self) -> int:
        """Bytes that the forward pass needs beside inputs and output, in programs for GPUs.

        Inputs are copied with one head after the other; 3.5 maps is what programs had (within 6 %).
        """
        return self.input_bytes + 7 * self._groups * self.map_bytes // 2

    @property
    def backward_bytes(self) -> int:
        """The same for the backward pass, within 15 %: it keeps states of some chunks at a time."""
        groups = self._cut.at_once(self.batch * self.slices * self.heads)
        at_once = groups * self.slices * self._cut.chunks * self.state_bytes
        return 2 * self.input_bytes + 2 * at_once

    @property
    def model_flops(self) -> int:
        """FLOPs of the recurrence in the forward pass, which MFU counts; backward is twice."""
        products = 3 if self.rule.delta else 2
        return 2 * products * self.batch * self.tokens * self.heads * self.key_dim * self.value_dim

    @property
    def _cut(self) -> Cut:
        return Cut.of(self.tokens // self.slices)

    @property
    def _groups(self) -> int:
        return self.slices * self._cut.groups


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
    if packed:
        ways = (True, False) if zigzag else (True,)
        forward += [_Message(_IDS, sizes.batch * _INT32, pairs_along(n, 1, up)) for up in ways]
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
    """Of a permute; None for an all_reduce."""


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
        if step.pairs is None:
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
                    tensor_bytes=0 if step.name == _IDS else here,
                    row_bytes=here if step.name == _IDS else 0,
                )
            )
    return found
