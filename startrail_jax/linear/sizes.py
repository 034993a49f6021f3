"""How linear attention cuts tokens, and what it keeps and computes. Imports no jax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

_FLOAT32 = 4

CHUNK = 64
"""Tokens of a chunk, at most."""
FORKED_CHUNK = 16
"""The same in trees, if each channel has its own decay: then each pair of tokens of a chunk has the
decay of each channel in memory."""
GROUP = 32
"""Chunks of a group, at most: the states of this many chunks are computed one after another."""
AT_ONCE = 512
"""Chunks that the last step of the backward pass works on at once, counted for all heads."""


def longest_chunk(by_channel: bool, levels: int) -> int:
    """Tokens of a chunk, at most, of a rule in rows of trees with so many levels; 0 for none."""
    return FORKED_CHUNK if by_channel and levels else CHUNK


@dataclass(frozen=True)
class Cut:
    """How the tokens of a slice are cut: groups of chunks."""

    groups: int
    chunks: int
    """Chunks of a group."""
    tokens: int
    """Tokens of a chunk, a power of two."""

    @classmethod
    def of(cls, tokens: int, most: int = CHUNK) -> Cut:
        """That of a slice, with chunks of at most so many tokens; the last group may be filled
        up."""
        chunk = min(most, 1 << max(tokens - 1, 0).bit_length())
        count = -(-tokens // chunk)
        groups = -(-count // GROUP)
        return cls(groups, -(-count // groups), chunk)

    @property
    def size(self) -> int:
        """Tokens of a slice, with those that fill it up."""
        return self.groups * self.chunks * self.tokens

    def at_once(self, rows: int) -> int:
        """Groups of a slice that the last step of the backward pass works on, of so many rows."""
        return min(max(1, AT_ONCE // rows), self.groups)


@runtime_checkable
class RuleSizes(Protocol):
    """What sizes follow from of a `startrail_jax.linear.rules.StateRule`."""

    name: str
    by_channel: bool
    delta: bool

    def factor_elements(self, key_dim: int) -> int:
        """Numbers in M of a map S -> M S + N."""
        ...


@dataclass(frozen=True, kw_only=True)
class StateSizes:
    """Sizes of the states of one device."""

    rule: RuleSizes
    batch: int
    heads: int
    key_dim: int
    value_dim: int
    levels: int = 0
    """Slots of a row of trees (`forks.py`); 0 for rows of documents, which have one state."""

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all rows and heads."""
        states = self.batch * self.heads * max(self.levels, 1)
        return states * self.key_dim * self.value_dim * _FLOAT32

    @property
    def map_bytes(self) -> int:
        """Bytes of maps of these states: M and N, and in trees the origin of each slot."""
        factor = max(self.levels, 1) * (self.levels + self.rule.factor_elements(self.key_dim))
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
        """Bytes that the forward pass needs beside inputs and output, in programs for GPUs. Inputs
        are copied with one head after the other; 3.5 maps is what programs had (within 6 %)."""
        return self.input_bytes + 7 * self._groups * self.map_bytes // 2

    @property
    def backward_bytes(self) -> int:
        """The same for the backward pass, within 15 %: it keeps states of some chunks at a time."""
        groups = self._cut.at_once(self.batch * self.slices * self.heads * max(self.levels, 1))
        at_once = groups * self.slices * self._cut.chunks * self.state_bytes
        return 2 * self.input_bytes + 2 * at_once

    @property
    def model_flops(self) -> int:
        """FLOPs of the recurrence in the forward pass, which MFU counts; backward is twice."""
        products = 3 if self.rule.delta else 2
        return 2 * products * self.batch * self.tokens * self.heads * self.key_dim * self.value_dim

    @property
    def _cut(self) -> Cut:
        chunk = longest_chunk(self.rule.by_channel, self.levels)
        return Cut.of(self.tokens // self.slices, chunk)

    @property
    def _groups(self) -> int:
        return self.slices * self._cut.groups
