"""The device of each token of the sequence: permutations and positions, without collectives.

A layout is an order of the tokens. Shard r of the token axis in this order belongs to sequence rank
r, the flat index over the mesh axes (ring, group, team, head). A *unit* is the tokens that a gather
puts on one device, of blocks of consecutive ranks: `sort_unit` puts them in order of position, and
`unit_positions` gives their positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from startrail_jax.errors import InputError
from startrail_jax.values import adopt, is_whole, whole

KINDS = ("contiguous", "zigzag")


@dataclass(frozen=True)
class Span:
    """Positions from the first to the last, both included: integers, or arrays of them."""

    first: Any
    last: Any


@dataclass(frozen=True)
class Runs:
    """Increasing positions of a unit's tokens: `len(starts)` equally long runs of neighbours."""

    starts: tuple[Any, ...]
    """Position of the first token of each run: an integer, traced if it depends on the device, or a
    NumPy array for many units at once."""
    length: int
    apart: int = 0
    """Distance from the start of one run to that of the next, in tokens; under zigzag, among the
    early runs, and the late ones mirror them."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Number of runs, tokens in each, and `apart`."""
        return len(self.starts), self.length, self.apart

    @property
    def tokens(self) -> int:
        """Number of tokens in the unit."""
        return len(self.starts) * self.length

    @property
    def spans(self) -> tuple[Span, ...]:
        """First and last position of each run."""
        return tuple(Span(start, start + self.length - 1) for start in self.starts)

    def vector(self) -> Any:
        """Positions of all tokens of the unit, in increasing order: a jax.Array, int32 [tokens]."""
        import jax.numpy as jnp

        offsets = np.arange(self.length, dtype=np.int32)
        return jnp.concatenate([jnp.asarray(start, jnp.int32) + offsets for start in self.starts])


@dataclass(frozen=True)
class Layout:
    """A placement of tokens on the ranks of a sequence-parallel mesh.

    * "contiguous": the sequence is cut into `degree` slices, and rank r holds slice r.
    * "zigzag": the sequence is cut into 2 * degree slices, and rank r holds slices r and
      2 * degree - 1 - r, so that under a causal mask every pair of ranks costs the same (StarTrail,
      https://arxiv.org/abs/2407.00611, appendix A.1; LoongTrain,
      https://arxiv.org/abs/2406.18485, section 3.2).

    Raises:
        ValueError: if the kind is unknown or the degree is below 1.
    """

    kind: str
    """One of `KINDS`."""
    degree: int
    """Number of sequence shards."""

    @classmethod
    def of(cls, layout: Layout | str | None, degree: int) -> Layout:
        """A layout for `degree` sequence shards.

        Args:
            layout: a layout, its kind, or None for "contiguous".
            degree: number of sequence shards of the mesh.

        Raises:
            ValueError: if the layout is of another degree or of an unknown kind.
        """
        if layout is None:
            layout = "contiguous"
        if isinstance(layout, str):
            return cls(layout, degree)
        if layout.degree != degree:
            raise InputError(
                f"The layout must have as many shards as the mesh has sequence ranks; got "
                f"layout.degree={layout.degree}, sequence degree={degree}. "
                f"Pass layout={layout.kind!r} to have it built."
            )
        return layout

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(
                f"layout must be one of {KINDS}; got {self.kind!r}. "
                "Leave it out for tokens in natural order."
            )
        adopt(self, whole, "degree")
        if not is_whole(self.degree, 1):
            raise InputError(
                f"degree must be an integer of at least 1; got degree={self.degree!r}. "
                "Pass the number of sequence shards, Degrees.sequence."
            )

    @property
    def multiple(self) -> int:
        """The number, in tokens, that must divide a sequence length."""
        return self.degree * (2 if self.kind == "zigzag" else 1)

    def padded_length(self, seq_len: int) -> int:
        """The smallest length of at least `seq_len` that the layout can divide, in tokens."""
        return -(-seq_len // self.multiple) * self.multiple

    def check_length(self, seq_len: int, name: str = "seq_len") -> None:
        """Raises unless `seq_len` tokens can be laid out.

        Args:
            seq_len: tokens of the whole sequence.
            name: name of the length in the message.

        Raises:
            ValueError: if the length is not a positive multiple of `multiple`.
        """
        if seq_len > 0 and seq_len % self.multiple == 0:
            return
        factor = "2 * " if self.kind == "zigzag" else ""
        above = max(self.padded_length(seq_len), self.multiple)
        cut = f" or cut to {above - self.multiple}" if above > self.multiple else ""
        raise InputError(
            f"{name} must be divisible by {factor}sequence degree for layout={self.kind!r}; "
            f"got {name}={seq_len}, degree={self.degree}. Pad to {above}{cut}, and shift targets "
            "by one token before attention.shard."
        )

    def indices(self, seq_len: int, rank: int) -> np.ndarray:
        """Natural positions of the tokens of `rank`, in its own order: int32 [seq_len / degree].

        Raises:
            ValueError: if the length cannot be laid out, or if there is no such rank.
        """
        if not 0 <= rank < self.degree:
            raise InputError(
                f"rank must be in [0, {self.degree}); got rank={rank}. "
                "It is the flat index over (ring, group, team, head)."
            )
        return self.positions(seq_len).reshape(self.degree, -1)[rank]

    def positions(self, seq_len: int) -> np.ndarray:
        """Natural positions of all tokens, in layout order: int32 [seq_len].

        Raises:
            ValueError: if the length cannot be laid out.
        """
        self.check_length(seq_len)
        natural = np.arange(seq_len, dtype=np.int32)
        if self.kind == "zigzag":
            early, late = np.split(natural.reshape(2 * self.degree, -1), 2)
            return np.stack([early, late[::-1]], axis=1).reshape(-1)
        return natural

    def permute(self, x: Any, axis: int = 1) -> Any:
        """Puts the tokens along `axis` into layout order: `permute(x)[i] == x[positions[i]]`.

        Args:
            x: an array in natural order, of any dtype, on the host or on one device. A NumPy array
                gives a NumPy array.
            axis: the token dimension.

        Returns:
            The same tokens in layout order.

        Raises:
            ValueError: if the length cannot be laid out, if there is no such axis, or if the array
                is already sharded.
        """
        return self._take(x, axis, lambda positions: positions)

    def unpermute(self, x: Any, axis: int = 1) -> Any:
        """Puts the tokens along `axis` back into natural order: the inverse of `permute`.

        Args:
            x: an array in layout order, of any dtype, on the host or on one device. A NumPy array
                gives a NumPy array.
            axis: the token dimension.

        Returns:
            The same tokens in natural order.

        Raises:
            ValueError: if the length cannot be laid out, if there is no such axis, or if the array
                is already sharded.
        """
        return self._take(x, axis, np.argsort)

    def _take(self, x: Any, axis: int, order: Callable[[np.ndarray], np.ndarray]) -> Any:
        import jax
        import jax.numpy as jnp

        check_unsharded(x)
        axis = token_axis(x, axis)
        self.check_length(x.shape[axis], name=f"x.shape[{axis}]")
        index = order(self.positions(x.shape[axis]))
        return (
            jnp.take(x, index, axis=axis) if isinstance(x, jax.Array) else np.take(x, index, axis)
        )

    def sort_unit(self, x: Any, size: int, axis: int) -> Any:
        """Puts the gathered tokens of `size` ranks in order of position along `axis`.

        The reorder is static. Under zigzag, the early and late runs [e0 l0 e1 l1 ..] of the ranks
        become [e0 e1 .. | .. l1 l0].
        """
        if self.kind == "contiguous" or size == 1:
            return x
        import jax.numpy as jnp

        early, late = jnp.moveaxis(_split(x, axis, (size, 2, -1)), axis + 1, 0)
        return _merge(jnp.concatenate([early, jnp.flip(late, axis)], axis), axis, 2)

    def unsort_unit(self, x: Any, size: int, axis: int) -> Any:
        """The inverse of `sort_unit`: the tokens rank after rank, ready to be scattered."""
        if self.kind == "contiguous" or size == 1:
            return x
        import jax.numpy as jnp

        early, late = jnp.split(_split(x, axis, (2 * size, -1)), 2, axis)
        return _merge(jnp.stack([early, jnp.flip(late, axis)], axis + 1), axis, 3)

    def unit_positions(
        self, seq_len: int, first: Any, size: int, blocks: int = 1, apart: int = 0
    ) -> Runs:
        """Positions of the tokens of some blocks of consecutive ranks, in increasing order.

        Args:
            seq_len: tokens of the whole sequence.
            first: the first rank; it may be traced, or a NumPy array of the first ranks of units.
            size: number of ranks in a block.
            blocks: number of blocks.
            apart: distance from the first rank of a block to that of the next.
        """
        if apart == size:
            size, blocks = size * blocks, 1
        slices = seq_len // self.multiple
        ranks = [first + i * apart for i in range(blocks)]
        starts = [rank * slices for rank in ranks]
        if self.kind == "zigzag":
            starts += [seq_len - (rank + size) * slices for rank in reversed(ranks)]
        return Runs(tuple(starts), slices * size, slices * apart if blocks > 1 else 0)


def slice_pairs(ranks: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """(sender, receiver) of every even slice, and of every odd one, on the way to zigzag order."""
    slices = range(2 * ranks)
    homes = [min(s, 2 * ranks - 1 - s) for s in slices]
    return tuple(tuple((s // 2, homes[s]) for s in slices[odd::2]) for odd in (0, 1))


def token_axis(x: Any, axis: int) -> int:
    """The number of a token dimension, which may count from the end; raises if there is none."""
    shape = np.shape(x)
    if -len(shape) <= axis < len(shape):
        return axis % len(shape)
    raise InputError(
        f"axis must be a dimension of the array, that of its tokens; got axis={axis} and shape "
        f"{list(shape)}. Give the axis of the tokens, or arrays that have them."
    )


def check_unsharded(x: Any) -> None:
    """Raises if `x` is sharded: reordering it would send nearly all of it between devices, and as a
    rule it is already in the order of the layout."""
    import jax
    from jax.core import Tracer

    if not isinstance(x, jax.Array):
        return
    if isinstance(x, Tracer):
        spec = getattr(jax.typeof(x).sharding, "spec", ())
        sharded = any(entry is not None for entry in spec)
    else:
        spec, sharded = x.sharding, not x.sharding.is_fully_replicated
    if sharded:
        raise InputError(
            f"Reordering tokens needs a host or unsharded array; got one sharded as {spec}. "
            "Permute on the host before device_put, or call jax.device_get first."
        )


def _split(x: Any, axis: int, sizes: tuple[int, ...]) -> Any:
    return x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + 1 :])


def _merge(x: Any, axis: int, count: int) -> Any:
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + count :])
