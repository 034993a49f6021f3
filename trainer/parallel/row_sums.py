"""Sums over tokens of a row, such as those of a document, which lie on several devices."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from startrail_jax.xla.varying import like, vary


@dataclass(frozen=True)
class RowSums:
    """Adds up numbers of tokens over the devices of a row, inside a `shard_map`.

    Messages: an all-reduce of 4 bytes for each token of the rows of `axes`, in both passes.
    """

    axes: tuple[str, ...]
    """Mesh axes whose devices have other tokens of the same rows, slowest first."""
    length: int
    """Number of tokens of a row, on all its devices."""
    split: tuple[str, ...] = ()
    """Those of `axes` whose devices are divided among several rows, as in batches of whole
    documents."""
    rows: tuple[int, ...] = ()
    """The row of each device along `split`."""

    def __call__(
        self, x: Float32[Array, "b t"], ids: Int32[Array, "b t"], counted: Bool[Array, "b t"]
    ) -> Float32[Array, "b t"]:
        """For each token the sum of x over all counted tokens of its row that have its id.

        An id is that of a document or of a part of one, from 0 and below `length`; negative for
        none. A token with such an id gets 0.
        """
        first = vary(jnp.zeros((), jnp.int32), *self.axes)
        if self.split:
            first = jnp.asarray(self.rows, jnp.int32)[lax.axis_index(self.split)]
        row = first + jnp.arange(len(ids), dtype=jnp.int32)[:, None]
        places = jnp.where(ids >= 0, row * self.length + ids, -1)
        return _summed(self, jnp.where(counted, x, 0), places)

    def _num_places(self, b: int) -> int:
        return self.length * (max(self.rows) + 1 if self.split else b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed(sums: RowSums, x: Array, places: Array) -> Array:
    """The sum of x over all tokens of a place, on all devices. It is its own transpose."""

    def added(before: tuple[Array, Array], after: tuple[Array, Array]) -> tuple[Array, Array]:
        starts, total = after
        return before[0] | starts, jnp.where(starts, total, before[1] + total)

    # Of each stretch of neighbours with one place, the last has the sum. At most two stretches of
    # a device have the same place, so that no order of additions is left open.
    border = places[:, 1:] != places[:, :-1]
    edge = like(jnp.ones((len(x), 1), bool), places)
    starts, ends = (jnp.concatenate(x, axis=1) for x in ((edge, border), (border, edge)))
    _, total = lax.associative_scan(added, (starts, x), axis=1)
    size = sums._num_places(len(x))
    at = jnp.where(ends & (places >= 0), places, size)
    whole = like(jnp.zeros(size, x.dtype), x).at[at].add(total, mode="drop")
    if sums.axes:
        whole = vary(lax.psum(whole, sums.axes), *sums.axes)
    return jnp.where(places >= 0, whole[jnp.maximum(places, 0)], 0)


def _summed_forward(sums: RowSums, x: Array, places: Array) -> tuple[Array, Array]:
    return _summed(sums, x, places), places


def _summed_backward(sums: RowSums, places: Array, dout: Array) -> tuple[Array, None]:
    return _summed(sums, dout, places), None


_summed.defvjp(_summed_forward, _summed_backward)
