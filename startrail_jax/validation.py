"""What the public callable requires of its inputs, and how it says so."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec
from jaxtyping import Array

from startrail_jax.layout import Layout
from startrail_jax.mesh import Degrees

DTYPES = ("float32", "bfloat16", "float16")


def check_heads(degrees: Degrees, heads: int, kv_heads: int) -> None:
    """Raises unless the heads can be grouped and split over `head` and `tensor`."""
    split = degrees.head * degrees.tensor
    given = f"heads={heads}, kv_heads={kv_heads}, head={degrees.head}, tensor={degrees.tensor}"
    if heads % split:
        raise ValueError(
            f"heads must be divisible by head * tensor; got {given}. "
            f"Use a multiple of {split} heads, or lower degrees."
        )
    if heads % kv_heads:
        raise ValueError(
            f"heads must be a multiple of kv_heads; got {given}. "
            f"Use {-(-heads // kv_heads) * kv_heads} heads, or a divisor of {heads} as kv_heads."
        )
    if kv_heads % split and split % kv_heads:
        raise ValueError(
            f"kv_heads and head * tensor must divide one another; got {given}. "
            f"Choose degrees whose product divides {kv_heads} or is a multiple of it."
        )


def segment_array(ids: Any) -> Array:
    """Segment ids as int32.

    Raises:
        ValueError: if they are not integers, or might not fit, as two documents could become one.
    """
    on_host = not isinstance(ids, jax.Array)
    ids = np.asarray(ids) if on_host else ids
    kind = ids.dtype
    limits = np.iinfo(np.int32)
    fits = np.can_cast(kind, np.int32) or (
        on_host and ids.size > 0 and limits.min <= ids.min() and ids.max() <= limits.max
    )
    if not np.issubdtype(kind, np.integer) or not fits:
        raise ValueError(
            f"segment_ids must be integers that fit int32; got {kind} {list(ids.shape)}. "
            "Number the documents of each row from 0, and pad with -1."
        )
    return jnp.asarray(ids, jnp.int32)


def check_shards(
    query: Any, key: Any, value: Any, query_ids: Any, key_ids: Any, *, degrees: Degrees, **rest: Any
) -> None:
    """`check_arrays` for what one device holds; messages give the sizes of the whole arrays."""
    if (query_ids is None) != (key_ids is None):
        raise ValueError(
            "query_segments and key_segments must be given both or neither; got only one. "
            "Pass the same array twice where queries and keys are the same tokens."
        )

    def whole(x: Any) -> jax.ShapeDtypeStruct:
        sizes = (degrees.data, degrees.sequence, degrees.tensor, 1)
        shape = tuple(n * size for n, size in zip(x.shape, sizes, strict=False))
        return jax.ShapeDtypeStruct(shape, x.dtype)

    ids = () if query_ids is None else (whole(query_ids), whole(key_ids))
    check_arrays(whole(query), whole(key), whole(value), ids, degrees=degrees, **rest)


def check_arrays(
    query: Any,
    key: Any,
    value: Any,
    ids: tuple[Any, ...],
    *,
    degrees: Degrees,
    layout: Layout,
    causal: bool,
) -> None:
    """Raises unless shapes and dtypes fit each other, the layout and the mesh."""
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if not query.ndim == key.ndim == value.ndim == 4:
        raise ValueError(
            "query, key and value must be [batch, seq, heads, head_dim]; "
            f"got {shapes}. Reshape them to four dimensions."
        )
    if not (query.shape[0] == key.shape[0] and key.shape[:3] == value.shape[:3]):
        raise ValueError(
            "query, key and value must have the same batch, and key and value the same length and "
            f"heads; got {shapes}. Correct the odd one out."
        )
    if query.shape[3] != key.shape[3] or 0 in query.shape + key.shape + value.shape:
        raise ValueError(
            "query and key must have the same head_dim, and no dimension may be 0; "
            f"got {shapes}. Project them to one head_dim."
        )
    dtypes = [str(x.dtype) for x in (query, key, value)]
    if len(set(dtypes)) > 1 or dtypes[0] not in DTYPES:
        raise ValueError(
            f"query, key and value must have one dtype of {DTYPES}; got {', '.join(dtypes)}. "
            "Cast them, or pass dtype=."
        )
    if query.shape[0] % degrees.data:
        raise ValueError(
            f"The batch must be divisible by the data degree; got batch={query.shape[0]}, "
            f"data={degrees.data}. Pad the batch to "
            f"{-(-query.shape[0] // degrees.data) * degrees.data}, or lower data."
        )
    if causal and query.shape[1] != key.shape[1]:
        raise ValueError(
            "Causal attention needs queries and keys of one length; got "
            f"{query.shape[1]} queries and {key.shape[1]} keys. Use causal=False for "
            "cross-attention, or pad with segment id -1."
        )
    layout.check_length(query.shape[1])
    layout.check_length(key.shape[1], "key seq_len")
    check_heads(degrees, query.shape[2], key.shape[2])
    _check_segments(query, key, ids)


def _check_segments(query: Any, key: Any, ids: tuple[Any, ...]) -> None:
    wanted = (query.shape[:2], key.shape[:2])
    if len(ids) > 2 or (len(ids) == 1 and wanted[0] != wanted[1]):
        raise ValueError(
            "segment_ids must be one array for queries and keys of one length, or a pair "
            f"(query_ids, key_ids); got {len(ids)} for {query.shape[1]} queries and "
            f"{key.shape[1]} keys. Pass a pair."
        )
    for array, shape in zip(ids, wanted, strict=False):
        if array.shape != shape or array.dtype != jnp.int32:
            raise ValueError(
                f"segment_ids must be int32 [batch, seq] = {list(shape)}; got {array.dtype} "
                f"{list(array.shape)}. Number the documents of each row, and pad with -1."
            )


def check_sharding(name: str, array: Array, spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> None:
    """Raises unless `array` is sharded as `spec`, on the Explicit axes of `mesh`.

    On Auto axes the compiler reshards, so anything goes.
    """
    explicit = {
        axis
        for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    }
    wanted = _entries(spec, array.ndim, explicit)
    sharding = jax.typeof(array).sharding
    given = _entries(sharding.spec, array.ndim, explicit)
    nowhere = sharding.mesh.empty and not any(wanted)
    if given == wanted and (nowhere or sharding.mesh.shape == mesh.shape):
        return
    if not explicit:
        return
    raise ValueError(
        f"{name} must be sharded as {spec} on this mesh of Explicit axes {mesh.axis_names}; got "
        f"{sharding.spec} on axes {sharding.mesh.axis_names}. Use jax.device_put or jax.reshard "
        f"with jax.NamedSharding(attention.mesh, {spec}), or a mesh of Auto axes."
    )


def _entries(spec: PartitionSpec, ndim: int, axes: set[str]) -> list[tuple[str, ...]]:
    """The axes of each dimension, those in `axes` only."""
    padded = (*spec, *(None for _ in range(ndim - len(spec))))
    entries = (x if isinstance(x, tuple) else (x,) for x in padded)
    return [tuple(axis for axis in entry if axis in axes) for entry in entries]


def refuse_unserved(**options: Any) -> None:
    """Raises for a Flax option that asks for what this op does not do."""
    ways_out = {
        "bias": "Add positions to the queries and keys (RoPE) instead",
        "mask": "Use causal=, window= and segment_ids=",
        "dropout_rate": "Set it to 0, or pass deterministic=True",
        "precision": "Leave it None: float32 inputs are computed in full precision",
        "module": "Leave sow_weights off: the weights never exist as a whole",
        "input_positions": "To decode, call Attention.decode with a cache of your own",
    }
    for name, value in options.items():
        if value is not None and not (name == "dropout_rate" and value == 0):
            shown = f"an array {value.shape}" if hasattr(value, "shape") else repr(value)
            raise NotImplementedError(
                f"Sequence-parallel attention does not serve {name}; got {name}={shown}. "
                f"{ways_out.get(name, 'Leave it None')}."
            )
