"""Movement of data between devices: shifts, gathers, scatters and exchanges.

There are no attention maths here. Every function runs inside `shard_map`, and an axis of degree 1
moves nothing. Received bytes are given in the size of the array x that a device puts in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, Shaped

from startrail_jax.devices.degrees import Axis, Cycle


def index(axis: Axis) -> Int32[Array, ""] | int:
    """This device's index along `axis`."""
    if axis.degree == 1:
        return 0
    place = lax.axis_index(axis.names)
    return place if axis.groups is None else place // axis.stride % axis.degree


def shift(tree: Any, cycle: Cycle, step: int) -> Any:
    """Sends each array of `tree` `step` places further in its cycle, in one message."""
    return shift_along(tree, [(cycle, step)])


def shift_along(tree: Any, moves: Sequence[tuple[Cycle, int]]) -> Any:
    """Sends each array of `tree` some places in each of some cycles of one axis, in one message."""
    axis = moves[0][0].axis
    pairs = [(p, p) for p in range(axis.degree)]
    for cycle, step in moves:
        pairs = [(p, cycle.place(target, step)) for p, target in pairs]
    if all(p == target for p, target in pairs):
        return tree
    return jax.tree.map(lambda x: permute(x, axis, pairs), tree)


def permute(x: Array, axis: Axis, pairs: list[tuple[int, int]]) -> Array:
    """`lax.ppermute` by flat indices along `axis`, whose names may be in any order. (jax 0.12
    requires the order of the mesh.)"""
    if axis.groups is not None:
        pairs = [(group[i], group[j]) for group in axis.groups for i, j in pairs]
        axis = Axis(axis.names, axis.degree * len(axis.groups))
    mesh = jax.sharding.get_abstract_mesh()
    ordered = tuple(sorted(axis.names, key=mesh.axis_names.index))
    if ordered == axis.names:
        return lax.ppermute(x, axis.names, pairs)
    sizes = [mesh.shape[name] for name in axis.names]
    flat = np.arange(axis.degree).reshape(sizes)
    flat = flat.transpose([axis.names.index(name) for name in ordered]).ravel()
    place = np.argsort(flat).tolist()
    return lax.ppermute(x, ordered, [(place[source], place[target]) for source, target in pairs])


def trade_places(x: Array, slow: Axis, fast: Axis) -> Array:
    """Sends from member (i, j) of two axes of one degree to (j, i), which is the way back as well.
    `slow` comes before `fast` in the order of devices."""
    n = slow.degree
    if n == 1:
        return x
    pairs = [(rank, rank % n * n + rank // n) for rank in range(n**2)]
    return permute(x, Axis.joined(slow, fast), pairs)


def gather(x: Shaped[Array, "..."], axis: Axis, dim: int) -> Shaped[Array, "..."]:
    """Concatenates the arrays of all members along `dim`. Receives degree - 1 times x."""
    if axis.degree == 1:
        return x
    return lax.all_gather(x, axis.names, axis=dim, tiled=True, axis_index_groups=axis.groups)


def scatter_sum(x: Shaped[Array, "..."], axis: Axis, dim: int) -> Shaped[Array, "..."]:
    """Sums over members and keeps this member's part of `dim`: the transpose of `gather`. Receives
    (degree - 1) / degree of x."""
    if axis.degree == 1:
        return x
    return lax.psum_scatter(
        x, axis.names, scatter_dimension=dim, tiled=True, axis_index_groups=axis.groups
    )


def sum_at_owner(
    x: Float32[Array, "..."], axis: Axis, dim: int, dtype: Any
) -> Float32[Array, "..."]:
    """`scatter_sum`, with parts that travel in `dtype` and are added in float32.

    In a narrow dtype every member rounds its parts once and sends them to their owners, which do
    not round their own: the error does not grow with the degree. In float32 the network sums.
    Receives (degree - 1) / degree of x, in `dtype`.
    """
    if axis.degree == 1 or jnp.dtype(dtype) == jnp.float32:
        return scatter_sum(x, axis, dim)
    size = x.shape[dim] // axis.degree
    own = lax.dynamic_slice_in_dim(x, index(axis) * size, size, dim)
    parts = partials(x.astype(dtype), axis, dim)
    is_own = (jnp.arange(axis.degree) == index(axis)).reshape(-1, *[1] * x.ndim)
    return jnp.where(is_own, own, parts.astype(jnp.float32)).sum(0)


def total(x: Shaped[Array, "..."], axis: Axis) -> Shaped[Array, "..."]:
    """The sum over members, on all of them. Receives 2 (degree - 1) / degree of x.

    `psum` knows no groups where shard_map tracks what varies. Members that are a digit of a mesh
    axis each sum a part of x, and gather all of it.
    """
    if axis.groups is None:
        return lax.psum(x, axis.names) if axis.degree > 1 else x
    return _by_parts(x, axis, lambda flat: scatter_sum(flat, axis, 0))


def maximum(x: Shaped[Array, "..."], axis: Axis) -> Shaped[Array, "..."]:
    """The elementwise maximum over members, on all of them. Receives as much as `total`."""
    if axis.groups is None:
        return lax.pmax(x, axis.names) if axis.degree > 1 else x
    return _by_parts(x, axis, lambda flat: partials(flat, axis, 0).max(0))


def _by_parts(x: Array, axis: Axis, reduce: Callable[[Array], Array]) -> Array:
    """Reduces this member's part of all elements, and gathers those of the others."""
    flat = jnp.pad(x.ravel(), (0, -x.size % axis.degree))
    return gather(reduce(flat), axis, 0)[: x.size].reshape(x.shape)


def exchange(x: Shaped[Array, "..."], axis: Axis, split: int, concat: int) -> Shaped[Array, "..."]:
    """Splits dimension `split` over the members and joins what they send along `concat`. Receives
    (degree - 1) / degree of x."""
    return _all_to_all(x, axis, split, concat, tiled=True) if axis.degree > 1 else x


def partials(x: Shaped[Array, "..."], axis: Axis, dim: int) -> Shaped[Array, "p ..."]:
    """Every member's version of this member's part of `dim`, on a new leading dimension. Receives
    (degree - 1) / degree of x."""
    if axis.degree == 1:
        return x[None]
    parts = x.reshape(*x.shape[:dim], axis.degree, -1, *x.shape[dim + 1 :])
    return _all_to_all(parts, axis, dim, 0, tiled=False)


def _all_to_all(x: Array, axis: Axis, split: int, concat: int, *, tiled: bool) -> Array:
    if axis.groups is not None:
        return _all_to_groups(x, axis, split, concat, tiled)
    return lax.all_to_all(x, axis.names, split_axis=split, concat_axis=concat, tiled=tiled)


def _send_to_groups(x: Array, axis: Axis, split: int, concat: int, tiled: bool) -> Array:
    """`lax.all_to_all` among the groups of a mesh axis, which jax cannot `vmap` by itself."""

    @jax.custom_batching.custom_vmap
    def send(x: Array) -> Array:
        how: dict[str, Any] = dict(split_axis=split, concat_axis=concat, tiled=tiled)
        return lax.all_to_all(x, axis.names, **how, axis_index_groups=axis.groups)

    @send.def_vmap
    def _(_size: int, _is_mapped: Any, x: Array) -> tuple[Array, bool]:
        return _send_to_groups(x, axis, split + 1, concat + 1, tiled), True

    return send(x)


# `custom_vmap` has no gradient of its own.
_all_to_groups = jax.custom_vjp(_send_to_groups, nondiff_argnums=(1, 2, 3, 4))
_all_to_groups.defvjp(
    lambda x, *how: (_all_to_groups(x, *how), None),
    lambda axis, split, concat, tiled, _, dout: (_all_to_groups(dout, axis, concat, split, tiled),),
)


def _exchange_keys(x: Float[Array, "b s k h"], axis: Axis, dtype: Any) -> Float[Array, "b gs _ h"]:
    """Step 0 for keys or values: trades tokens for heads, sent in `dtype`. Gradients are sent in
    the dtype of x, which is float32 for copies."""
    return exchange(x.astype(dtype), axis, split=2, concat=1).astype(x.dtype)


exchange_keys = jax.custom_vjp(_exchange_keys, nondiff_argnums=(1, 2))
exchange_keys.defvjp(
    lambda x, axis, dtype: (exchange_keys(x, axis, dtype), None),
    lambda axis, dtype, _, dout: (exchange(dout, axis, split=1, concat=2),),
)


def repeat_heads(heads: int, x: Float[Array, "b s k h"]) -> Float32[Array, "b s n h"]:
    """Repeats each of the k heads of an array `heads / k` times, as `copy_heads` does."""
    return copy_heads(x, jnp.arange(heads) // (heads // x.shape[2]), Axis((), 1))


def needed_heads(num_heads: int, parts: int, tensor: Axis) -> Int32[Array, " parts"]:
    """Key head of each of this device's `parts`; neighbours may need the same one. Every device
    along `tensor` holds all `num_heads`."""
    first = index(tensor) * parts
    return (first + jnp.arange(parts)) // (parts * tensor.degree // num_heads)


def _copy_heads(
    x: Float[Array, "b s k h"], heads: Int32[Array, " copies"], replicas: Axis
) -> Float32[Array, "b s copies h"]:
    """Takes heads by number, any of them several times.

    The copies are float32, so that their gradients are too. These are summed over all copies on
    this device and on those along `replicas`, which hold the same x, and only then rounded to the
    dtype of x.
    """
    return jnp.take(x, heads, axis=2, mode="clip").astype(jnp.float32)


def _copy_heads_forward(x: Array, heads: Array, replicas: Axis) -> tuple[Array, Any]:
    return copy_heads(x, heads, replicas), (heads, x[:0])


def _copy_heads_backward(replicas: Axis, residuals: Any, dout: Array) -> tuple[Array, None]:
    heads, like = residuals
    copies = jax.nn.one_hot(heads, like.shape[2], dtype=jnp.float32)
    dx = jnp.einsum("bsch,ck->bskh", dout, copies, precision="highest")
    if replicas.degree > 1:
        dx = lax.psum(dx, replicas.names)
    return dx.astype(like.dtype), None


copy_heads = jax.custom_vjp(_copy_heads, nondiff_argnums=(2,))
copy_heads.defvjp(_copy_heads_forward, _copy_heads_backward)
