"""The contract of a backend of linear attention: what it computes of the groups of a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from jaxtyping import Array

from startrail_jax.linear.rules import Map, StateRule
from startrail_jax.linear.scan import Line
from startrail_jax.linear.sizes import longest_chunk


@dataclass(frozen=True)
class LinearCall:
    """What is static in a call."""

    line: Line
    heads: int
    """States of a row of this device."""
    scale: float
    packed: bool
    backend: str
    """A key of `startrail_jax.linear.vjp.BLOCKS`."""
    levels: int = 0
    """Slots of a row, if rows are trees (see `forks.py`), whose rule then is `Forked`; else 0."""

    @property
    def rule(self) -> StateRule:
        return self.line.rule

    @property
    def chunk(self) -> int:
        """Tokens of a chunk, at most."""
        return longest_chunk(self.rule.by_channel, self.levels)


@dataclass(frozen=True, kw_only=True)
class LinearRequest:
    """What a backend is asked for, on one device."""

    platform: str
    """Platform of the devices, one of `startrail_jax.devices.degrees.PLATFORMS`."""
    capability: tuple[int, int] | None
    """Least CUDA compute capability of the devices; None if it is not known, or not CUDA."""
    rule: str
    dtype: str
    key_dim: int
    value_dim: int
    trees: bool = False


class LinearBlock(Protocol):
    """A backend: a module with these functions.

    `blocks` are query, key, value [b, s, g, n, c, _, channels], decay [b, s, g, n, c, _, 1 or k],
    beta [b, s, g, n, c, _] and document [b, s, g, n, c, ...] (see `rules.Chunk`), for s slices of g
    groups of n chunks of c tokens; states are [b, s, g, h, k, v] in float32.
    """

    def refusal(self, request: LinearRequest) -> str | None:
        """Why the backend does not serve a `LinearRequest`, with the values; None if it does."""
        ...

    def maps(self, call: LinearCall, blocks: Any) -> Map:
        """The maps of all groups, [b, s, g, h, ...]."""
        ...

    def outputs(self, call: LinearCall, blocks: Any, states: Array) -> tuple[Array, Array]:
        """The states after groups, and the outputs of all chunks, [b, s, g, n, c, h, v]."""
        ...

    def wanted(self, call: LinearCall, blocks: Any, states: Array, dout: Array) -> Array:
        """Gradients of the states before groups, as far as the groups' own outputs give them."""
        ...

    def gradients(
        self, call: LinearCall, blocks: Any, states: Array, dout: Array, after: Array
    ) -> Any:
        """The gradients of all floats of blocks, from those of outputs and of the states after."""
        ...
