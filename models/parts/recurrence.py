"""Layers that keep a state in place of keys and values: their sizes. Imports no jax.

While it decodes, a layer keeps its states and the last inputs of its convolution, whatever the
length. Between the passes it keeps its output and a map of states for every `GROUP` chunks of
tokens (`startrail_jax.linear.sizes`). It sends log2(devices) maps in each pass, whatever the length
(`startrail_jax.linear.cost`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from models.weights import Weight, projection, weight

PROJECTIONS: Mapping[str, Weight] = {
    "query/kernel": projection("width | key_heads key_dim"),
    "key/kernel": projection("width | key_heads key_dim"),
    "value/kernel": projection("width | value_heads value_dim"),
}
"""The weights of queries, keys and values of any layer with a recurrence."""
CONVOLUTIONS: Mapping[str, Weight] = {
    "query_conv": weight("conv key_heads key_dim", "conv"),
    "key_conv": weight("conv key_heads key_dim", "conv"),
    "value_conv": weight("conv value_heads value_dim", "conv"),
}
"""The kernels of its short convolution."""


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """A recurrence over tokens behind a short convolution, as in `startrail_jax.LinearAttention`. A
    layer keeps two arrays while it decodes: its states, and the inputs of the convolution that
    precede the next token."""

    rule: str
    """Name of the rule by which a token changes the states: see `startrail_jax.LinearAttention`."""
    heads: int
    """Heads of values, each with a state [key_dim, value_dim], in float32."""
    key_heads: int
    """Heads of queries and keys, a divisor of `heads`."""
    key_dim: int
    value_dim: int
    conv: int
    """Tokens that the convolution sees, the token itself included."""
    gates: int
    """Projections to one number for each head, such as a decay."""
    delta: bool
    """True if a token writes the difference to what the state holds (the delta rule)."""
    by_channel: bool = False
    """True if each channel of a key has its own decay."""
    rank: int | None = None
    """Channels between two matrices that make the gate of the output or the decays of channels;
    None if each has one matrix."""

    @property
    def name(self) -> str:
        """The rule, for `startrail_jax.linear.sizes`."""
        return self.rule

    def factor_elements(self, key_dim: int) -> int:
        """Numbers in M of a map S -> M S + N of states."""
        return key_dim**2 if self.delta else 1

    @property
    def values(self) -> int:
        """Channels of values, and of the output."""
        return self.heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of query, key and value, which are convolved."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def decays(self) -> int:
        """Decays of channels of a token, beside the gates of heads."""
        return self.heads * self.key_dim if self.by_channel else 0

    @property
    def state_flops(self) -> int:
        """FLOPs of the recurrence for each token, forward."""
        return 2 * (3 if self.delta else 2) * self.values * self.key_dim

    @property
    def moved(self) -> int:
        """Elements of a token that its kernels read and write in a forward pass: query, key and
        value are joined, convolved and normalised, the output is normalised and multiplied, and
        decays of channels become float32."""
        return 6 * self.channels + 4 * self.values + 3 * self.decays

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the dimensions of its weights, by name."""
        names = ("key_heads", "key_dim", "value_dim", "conv")
        found = {"value_heads": self.heads, **{name: getattr(self, name) for name in names}}
        return found if self.rank is None else found | {"gate_rank": self.rank}

    def on_device(self, tensor: int) -> Recurrence:
        """The recurrence of one device, where `tensor` devices share the heads."""
        key_heads = max(self.key_heads // tensor, 1)
        return replace(self, heads=self.heads // tensor, key_heads=key_heads)

    def state_shape(self, rows: int) -> tuple[int, ...]:
        """Shape of the states of a layer."""
        return (rows, self.heads, self.key_dim, self.value_dim)

    def tail_shape(self, rows: int) -> tuple[int, ...]:
        """Shape of the inputs of the convolution that precede the next token."""
        return (rows, self.conv - 1, self.channels)
