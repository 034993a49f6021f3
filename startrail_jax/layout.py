"""Where each token of the sequence lives: permutations and positions. No collectives.

Shard r of the token axis, in layout order, belongs to sequence rank r, the flat index over
(group, ring, team, head). A *unit* is the union of consecutive ranks that a gather puts on one
device; `sort_unit` puts its tokens in order of position, and `unit_positions` says where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int32, Shaped

KINDS = ("contiguous", "zigzag", "striped")


@dataclass(frozen=True)
class Runs:
    """Increasing positions of the tokens of one unit, as `len(starts)` runs of equal length.

    Token i of a run is at `start + (i // block) * stride + i % block`; a run of neighbours has
    `block == length`.
    """

    starts: tuple[Int32[Array, ""] | int, ...]
    """Position of the first token of each run: traced where it depends on the device."""
    length: int
    """Tokens in each run."""
    block: int
    """Neighbouring tokens in a run."""
    stride: int
    """Positions from one block to the next."""

    @property
    def shape(self) -> tuple[int, int]:
        """Runs, and tokens in each."""
        return len(self.starts), self.length

    @property
    def contiguous(self) -> bool:
        """Whether the tokens of a run are neighbours."""
        return self.block == self.length or self.block == self.stride

    def vector(self) -> Int32[Array, " tokens"]:
        """Positions of all tokens of the unit, in order."""
        index = np.arange(self.length, dtype=np.int32)
        offsets = index // self.block * self.stride + index % self.block
        return jnp.concatenate([jnp.asarray(start, jnp.int32) + offsets for start in self.starts])


@dataclass(frozen=True)
class Layout:
    """A placement of tokens on the ranks of a sequence-parallel mesh.

    * "contiguous": rank r holds the r-th of `degree` slices.
    * "zigzag": rank r holds slices r and 2 * degree - 1 - r of 2 * degree, so that under a causal
      mask every pair of ranks costs the same (arXiv 2407.00611, appendix A.1; LoongTrain 3.2).
    * "striped": rank r holds tokens r, r + degree, r + 2 * degree, ... (arXiv 2311.09431).

    Raises:
        ValueError: on an unknown kind or a degree below 1.
    """

    kind: str
    """One of `KINDS`."""
    degree: int
    """Number of sequence shards."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f"layout must be one of {KINDS}; got {self.kind!r}. "
                "Leave it out for zigzag when causal and contiguous otherwise."
            )
        if self.degree < 1:
            raise ValueError(
                f"degree must be at least 1; got degree={self.degree}. "
                "Pass the number of sequence shards, Degrees.sequence."
            )

    @property
    def multiple(self) -> int:
        """What a sequence length must be divisible by."""
        return self.degree * (2 if self.kind == "zigzag" else 1)

    def padded_length(self, seq_len: int) -> int:
        """The least valid length that is at least `seq_len`."""
        return -(-seq_len // self.multiple) * self.multiple

    def check_length(self, seq_len: int, name: str = "seq_len") -> None:
        """Raises a ValueError unless `seq_len` tokens can be laid out."""
        if seq_len > 0 and seq_len % self.multiple == 0:
            return
        factor = "2 * " if self.kind == "zigzag" else ""
        way_out = f"Pad to {max(self.padded_length(seq_len), self.multiple)}"
        if seq_len > self.multiple:
            way_out += f" or cut to {seq_len // self.multiple * self.multiple}"
        if self.kind == "zigzag" and seq_len > 0 and seq_len % self.degree == 0:
            way_out += ", or use layout='contiguous'"
        raise ValueError(
            f"{name} must be divisible by {factor}sequence degree for layout={self.kind!r}; "
            f"got {name}={seq_len}, degree={self.degree}. {way_out}."
        )

    def indices(self, seq_len: int, rank: int) -> np.ndarray:
        """Natural positions of the tokens of `rank`, in their local order (int32).

        Raises:
            ValueError: if the length cannot be laid out or the rank does not exist.
        """
        if not 0 <= rank < self.degree:
            raise ValueError(
                f"rank must be in [0, {self.degree}); got rank={rank}. "
                "It is the flat index over (group, ring, team, head)."
            )
        return self.positions(seq_len).reshape(self.degree, -1)[rank]

    def positions(self, seq_len: int) -> np.ndarray:
        """Natural position of each token in layout order: int32 [seq_len].

        Raises:
            ValueError: if the length cannot be laid out.
        """
        self.check_length(seq_len)
        natural = np.arange(seq_len, dtype=np.int32)
        if self.kind == "striped":
            return natural.reshape(-1, self.degree).T.reshape(-1)
        if self.kind == "zigzag":
            early, late = np.split(natural.reshape(2 * self.degree, -1), 2)
            return np.stack([early, late[::-1]], axis=1).reshape(-1)
        return natural

    def permute(self, x: Any, axis: int = 1) -> Any:
        """From natural to layout order along `axis`: `permute(x)[i] == x[positions[i]]`.

        Args:
            x: a host or unsharded array; NumPy in, NumPy out.
            axis: the token dimension.

        Raises:
            ValueError: if the length cannot be laid out, or the array is sharded already.
        """
        return self._take(x, axis, lambda positions: positions)

    def unpermute(self, x: Any, axis: int = 1) -> Any:
        """From layout to natural order along `axis`, the inverse of `permute`.

        Args:
            x: a host or unsharded array; NumPy in, NumPy out.
            axis: the token dimension.

        Raises:
            ValueError: if the length cannot be laid out, or the array is sharded already.
        """
        return self._take(x, axis, np.argsort)

    def _take(self, x: Any, axis: int, order: Callable[[np.ndarray], np.ndarray]) -> Any:
        _check_unsharded(x)
        self.check_length(x.shape[axis], name=f"x.shape[{axis}]")
        index = order(self.positions(x.shape[axis]))
        return (
            jnp.take(x, index, axis=axis) if isinstance(x, jax.Array) else np.take(x, index, axis)
        )

    def sort_unit(self, x: Shaped[Array, "..."], size: int, axis: int) -> Shaped[Array, "..."]:
        """Sorts by position the tokens of `size` gathered consecutive ranks; a static reorder.

        Zigzag [e0 l0 e1 l1 ..] becomes [e0 e1 .. | .. l1 l0]; stripes are interleaved.
        """
        if self.kind == "contiguous" or size == 1:
            return x
        if self.kind == "striped":
            return _swap_blocks(x, size, axis)
        early, late = jnp.moveaxis(_split(x, axis, (size, 2, -1)), axis + 1, 0)
        return _merge(jnp.concatenate([early, jnp.flip(late, axis)], axis), axis, 2)

    def unsort_unit(self, x: Shaped[Array, "..."], size: int, axis: int) -> Shaped[Array, "..."]:
        """The inverse of `sort_unit`: back to rank after rank, ready to be scattered."""
        if self.kind == "contiguous" or size == 1:
            return x
        if self.kind == "striped":
            return _swap_blocks(x, x.shape[axis] // size, axis)
        early, late = jnp.split(_split(x, axis, (2 * size, -1)), 2, axis)
        return _merge(jnp.stack([early, jnp.flip(late, axis)], axis + 1), axis, 3)

    def unit_positions(self, seq_len: int, size: int, index: Int32[Array, ""] | int) -> Runs:
        """Positions of the sorted unit `index`: ranks `index * size .. (index + 1) * size - 1`.

        Args:
            seq_len: tokens of the whole sequence.
            size: ranks in a unit.
            index: which unit; may be traced.
        """
        tokens = seq_len // self.degree * size
        if self.kind == "contiguous":
            return Runs((index * tokens,), tokens, tokens, tokens)
        if self.kind == "striped":
            return Runs((index * size,), tokens, size, self.degree)
        half = tokens // 2
        return Runs((index * half, seq_len - (index + 1) * half), half, half, half)


def _check_unsharded(x: Any) -> None:
    """Raises if `x` is spread over devices: reordering it would move the whole array."""
    if not isinstance(x, jax.Array):
        return
    if isinstance(x, Tracer):
        spec = getattr(jax.typeof(x).sharding, "spec", ())
        sharded = any(entry is not None for entry in spec)
    else:
        spec, sharded = x.sharding, not x.sharding.is_fully_replicated
    if sharded:
        raise ValueError(
            f"permute and unpermute need a host or unsharded array; got one sharded as {spec}. "
            "Permute on the host before device_put, or jax.device_get it first."
        )


def _split(x: Array, axis: int, sizes: tuple[int, ...]) -> Array:
    return x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + 1 :])


def _merge(x: Array, axis: int, count: int) -> Array:
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + count :])


def _swap_blocks(x: Array, rows: int, axis: int) -> Array:
    return _merge(jnp.swapaxes(_split(x, axis, (rows, -1)), axis, axis + 1), axis, 2)
