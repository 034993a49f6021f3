"""Over which manual mesh axes an array varies, as `shard_map(..., check_vma=True)` tracks it."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

# jax before 0.10.1 has `vma` in place of `manual_axis_type`.
_OLD = not hasattr(jax.ShapeDtypeStruct((), "float32"), "manual_axis_type")


def is_replicated(x: Array, like: Array) -> bool:
    """Whether the array is the same along some manual mesh axis over which `like` varies."""
    return not varying_axes(like) <= varying_axes(x)


def alike(*arrays: Any) -> tuple[Any, ...]:
    """The arrays, each marked as varying over every manual mesh axis that one of them varies over.
    The gradient of an array that was replicated there is summed over that axis. None stays None."""
    axes = frozenset().union(*(varying_axes(x) for x in arrays if x is not None))
    return tuple(None if x is None else vary(x, *axes) for x in arrays)


def vary(x: Array, *axes: str) -> Array:
    """The array, marked as varying over `axes` too; its gradient is summed over the new ones."""
    new = tuple(axis for axis in axes if axis not in varying_axes(x))
    return lax.pcast(x, new, to="varying") if new else x


def like(x: Array, other: Array) -> Array:
    """The array, marked as varying over every manual mesh axis over which `other` varies."""
    return vary(x, *varying_axes(other))


def unmarked(x: Array) -> Array:
    """The array, not marked as varying, for a function that does not know of manual mesh axes.

    It has no gradient, as the mark says where gradients are summed: differentiate the function
    inside, and mark its results with `like`.
    """
    return _unmarked.bind(x) if varying_axes(x) else x


def varying_axes(x: Array) -> frozenset[str]:
    """The manual mesh axes over which an array varies."""
    kind: Any = jax.typeof(x)
    if _OLD:
        return frozenset(kind.vma)
    return frozenset(kind.manual_axis_type.varying)


def as_varying(x: Array) -> dict[str, Any]:
    """The arguments of `jax.ShapeDtypeStruct` for a result that varies as `x` does."""
    kind: Any = jax.typeof(x)
    if not varying_axes(x):
        return {}
    sharding = NamedSharding(kind.sharding.mesh, PartitionSpec())
    if _OLD:
        return {"vma": kind.vma, "sharding": sharding}
    return {"manual_axis_type": kind.manual_axis_type, "sharding": sharding}


def _without_mark(kind: Any) -> Any:
    if _OLD:
        return kind.update(vma=frozenset())
    return kind.update(manual_axis_type=type(kind.manual_axis_type)())


_unmarked = Primitive("unmarked")
_unmarked.def_abstract_eval(_without_mark)
mlir.register_lowering(_unmarked, lambda _, x: [x])
