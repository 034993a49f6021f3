"""What the public callables require of their inputs, and the messages that say so."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from startrail_jax import masks
from startrail_jax.calls.key_masks import hide_keys, pad_keys, valid_keys
from startrail_jax.calls.sharding import Sharded, int32_ids
from startrail_jax.devices.degrees import Degrees
from startrail_jax.errors import InputError, ShapeWarning, UnsupportedError
from startrail_jax.rings.sizes import WIDTHS, Sizes
from startrail_jax.tokens.layout import Layout

DTYPES = tuple(WIDTHS)

_INPUTS = ("query", "key", "value", "segment_ids", "key segment_ids")


def served_call(
    attention: Sharded,
    arrays: tuple[Any, Any, Any],
    segment_ids: Any,
    dtype: Any,
    *,
    of_scores: masks.Mask,
    mask: Any,
    pads_keys: bool,
) -> tuple[tuple[Array, ...], tuple[PartitionSpec, ...]]:
    """Query, key, value and the arrays of segment ids of a call, as JAX arrays that fit each other
    and the mesh, and the spec of each of them.

    Segment ids are None, one array, or a pair of which each is an array or None. With a `dtype`,
    query, key and value are cast to it. `of_scores` is the mask of the attention, and `mask` that
    of the call, for keys. If `pads_keys`, keys of a length that does not fit may be filled up.
    """
    inputs = tuple(jnp.asarray(x, dtype) for x in arrays)
    if all(x.ndim == 4 for x in inputs):
        valid = valid_keys(mask, *inputs[:2], causal=of_scores.causal)
        segment_ids = attention.mark_padding(segment_ids)
        check_segments(inputs[0], inputs[1], _shapes_of_ids(inputs, segment_ids))
        if valid is not None:
            segment_ids = hide_keys(attention, valid, segment_ids)
        if pads_keys and isinstance(of_scores, masks.Full):
            inputs, segment_ids = pad_keys(attention, inputs, segment_ids)
        _warn_of_dimensions(*inputs[:2])
    check_arrays(*inputs, degrees=attention.degrees, layout=attention.layout, mask=of_scores)
    ids = segment_arrays(attention, inputs, segment_ids)
    check_segments(inputs[0], inputs[1], ids)
    inputs += ids
    heads, kv_heads = inputs[0].shape[2], inputs[1].shape[2]
    specs = (
        attention.query_spec(heads),
        *(attention.key_spec(kv_heads),) * 2,
        *(attention.sequence_spec for _ in inputs[3:]),
    )
    check_shardings(_INPUTS, inputs, specs, attention.mesh)
    return inputs, specs


def _warn_of_dimensions(query: Array, key: Array) -> None:
    """Warns where both have more heads than tokens, as no sequence has that is worth splitting."""
    if all(x.shape[2] > x.shape[1] for x in (query, key)):
        warnings.warn(
            "query and key must be [batch, seq, heads, head_dim]; got query "
            f"{list(query.shape)} and key {list(key.shape)}, which have more heads than tokens. If "
            "they are [batch, heads, seq, head_dim], swap the dimensions: query.swapaxes(1, 2).",
            ShapeWarning,
            stacklevel=4,  # The line that calls the attention.
        )


# Arguments that Flax's attention functions or jax.nn.dot_product_attention have -> what to do.
_WAYS_OUT = {
    "precision": "Use None or a jax.lax.Precision: float32 inputs are always computed in full",
    "module": "Leave sow_weights off: the weights never exist as a whole",
    "input_positions": "To decode, call Attention.decode with a cache of your own",
    "einsum_dot_general": "Leave it None",
    "qk_attn_weights_einsum": "Leave it None",
    "attn_weights_value_einsum": "Leave it None",
    "query_seq_lengths": "Mark padding by negative segment_ids",
    "key_value_seq_lengths": "Mark padding by negative segment_ids",
    "return_residual": "Use return_lse=True, which gives lse as [batch, heads, seq]",
}


def refuse_unserved(options: Mapping[str, Any]) -> None:
    """Raises a NotImplementedError for an option that asks for what this op does not do."""
    for name, value in options.items():
        if name not in _WAYS_OUT:
            raise TypeError(f"Attention.__call__ has no argument {name!r}. Leave it out.")
        if (
            value is not None
            and value is not False
            and not (name == "precision" and _is_precision(value))
        ):
            shown = f"an array {value.shape}" if hasattr(value, "shape") else repr(value)
            if name == "module":  # Its repr holds all its weights.
                shown = f"a {type(value).__name__}"
            raise UnsupportedError(
                f"Sequence-parallel attention does not serve {name}; got {name}={shown}. "
                f"{_WAYS_OUT[name]}."
            )


def _is_precision(value: Any) -> bool:
    """Whether a value is a precision, or a pair of them, that float32 in full serves."""
    given = value if isinstance(value, tuple) else (value,)
    names = ("default", "high", "highest", "bfloat16", "tensorfloat32", "float32", "fastest")
    return all(x is None or isinstance(x, jax.lax.Precision) or x in names for x in given)


def segment_arrays(
    attention: Sharded, inputs: tuple[Array, ...], segment_ids: Any
) -> tuple[Array, ...]:
    """The segment ids of checked inputs as JAX arrays: none, one, or those of both sides."""
    ids = segment_ids if isinstance(segment_ids, tuple) else (segment_ids,)
    if all(x is None for x in ids):
        return ()
    if len(ids) == 2:
        ids = tuple(_of_one(attention, inputs[i]) if x is None else x for i, x in enumerate(ids))
    return tuple(jnp.asarray(int32_ids(x)) for x in ids)


def _shapes_of_ids(inputs: tuple[Array, ...], segment_ids: Any) -> tuple[Any, ...]:
    """Segment ids as they are given, by their shapes; those of the tokens where one is left out."""
    if segment_ids is None:
        return ()
    ids = segment_ids if isinstance(segment_ids, tuple) else (segment_ids,)
    shapes = (x.shape[:2] if own is None else np.shape(own) for own, x in zip(ids, inputs))  # noqa: B905
    return tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)


def _of_one(attention: Sharded, tokens: Array) -> Any:
    """The segment ids of tokens [batch, seq, ...] that are all of one document."""
    zeros = np.zeros(tokens.shape[:2], np.int32)
    if AxisType.Explicit not in attention.mesh.axis_types:
        return zeros
    return jax.device_put(zeros, NamedSharding(attention.mesh, attention.sequence_spec))


def check_arrays(
    query: Any,
    key: Any,
    value: Any,
    *ids: Any,
    degrees: Degrees,
    layout: Layout,
    mask: masks.Mask,
) -> None:
    """Raises a ValueError unless whole arrays, or things of such a `shape` and `dtype`, fit each
    other, the layout and the mesh."""
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if not query.ndim == key.ndim == value.ndim == 4:
        raise InputError(
            "query, key and value must be [batch, seq, heads, head_dim]; "
            f"got {shapes}. Reshape them to four dimensions."
        )
    if not _fit(query, key, value):
        raise InputError(
            "query, key and value must have the same batch, key and value the same length and "
            "heads, and query and key the same head_dim, and no dimension may be 0; got "
            f"{shapes}. Correct the odd one out."
        )
    dtypes = [str(x.dtype) for x in (query, key, value)]
    if len(set(dtypes)) > 1 or dtypes[0] not in DTYPES:
        raise InputError(
            f"query, key and value must have one dtype of {DTYPES}; got {', '.join(dtypes)}. "
            "Cast them, or pass dtype=."
        )
    check_segments(query, key, ids)
    sizes = Sizes.of(query, key, value, packed=bool(ids))
    sizes.check(degrees, mask=mask, layout=layout)


def _fit(query: Any, key: Any, value: Any) -> bool:
    """Whether arrays of four dimensions are queries, and keys and values to attend to."""
    return (
        query.shape[0] == key.shape[0]
        and query.shape[3] == key.shape[3]
        and key.shape[:3] == value.shape[:3]
        and 0 not in query.shape + key.shape + value.shape
    )


def check_segments(query: Any, key: Any, ids: tuple[Any, ...]) -> None:
    wanted = (query.shape[:2], key.shape[:2])
    if len(ids) > 2 or (len(ids) == 1 and wanted[0] != wanted[1]):
        raise InputError(
            "segment_ids must be one array for queries and keys of one length, or a pair "
            f"(query_ids, key_ids); got {len(ids)} for {query.shape[1]} queries and "
            f"{key.shape[1]} keys. Pass a pair."
        )
    for array, shape in zip(ids, wanted, strict=False):
        if array.shape != shape or array.dtype != jnp.int32:
            raise InputError(
                f"segment_ids must be int32 [batch, seq] = {list(shape)}; got {array.dtype} "
                f"{list(array.shape)}. Number the documents of each row, and pad with -1."
            )


def check_shards(
    query: Any, key: Any, value: Any, query_ids: Any, key_ids: Any, *, degrees: Degrees, **rest: Any
) -> None:
    """The checks of a call, for what one device holds; messages give the sizes of whole arrays."""
    ids = ids_of_shards(query_ids, key_ids)

    def whole(x: Any) -> jax.ShapeDtypeStruct:
        sizes = (degrees.data, degrees.sequence, degrees.tensor, 1)
        shape = tuple(n * size for n, size in zip(x.shape, sizes, strict=False))
        return jax.ShapeDtypeStruct(shape, x.dtype)

    check_arrays(*map(whole, (query, key, value, *ids)), degrees=degrees, **rest)


def ids_of_shards(query_ids: Any, key_ids: Any) -> tuple[Any, ...]:
    """The segment ids of one device: none, or those of both sides."""
    if (query_ids is None) != (key_ids is None):
        raise InputError(
            "query_segments and key_segments must be given both or neither; got only one. "
            "Pass the same array twice where queries and keys are the same tokens."
        )
    return () if query_ids is None else (query_ids, key_ids)


def check_causal(is_causal: bool, mask: masks.Mask) -> None:
    """Raises a ValueError if a call asks an attention with another mask to be causal."""
    if is_causal and not mask.causal:
        raise InputError(
            "is_causal=True needs a causal attention; got an instance with causal=False and "
            f"mask={mask}. Build Attention(mesh, causal=True), or combine its mask with "
            "masks.Causal()."
        )


def check_static(**flags: Any) -> None:
    """Raises a NotImplementedError for a truth value that is traced."""
    for name, value in flags.items():
        if isinstance(value, Tracer):
            raise UnsupportedError(
                f"{name} must be True or False, as it is compiled into the program; got an array "
                f"{jax.typeof(value)}. Make it a static argument of your jit."
            )


def check_whole(mesh: Mesh | AbstractMesh) -> None:
    """Raises a ValueError inside a `shard_map`, where no array is whole, and under another mesh."""
    context = jax.sharding.get_abstract_mesh()
    manual = getattr(context, "manual_axes", ())
    if manual:
        raise InputError(
            "A call must be one with whole arrays, outside of any shard_map; got one inside a "
            f"shard_map over {tuple(sorted(manual))}. Make that shard_map manual over all axes of "
            "the mesh, with attention.query_spec(heads) and the like among its in_specs, and use "
            "attention.local, decode_local and update_cache_local in it."
        )
    if not context.empty and context.shape_tuple != mesh.shape_tuple:
        raise InputError(
            "The mesh of jax.set_mesh must be that of the attention, with axes "
            f"{dict(mesh.shape)}; got one with axes {dict(context.shape)}. Use "
            "jax.set_mesh(attention.mesh) around this call, or build the attention on your mesh: "
            "Attention(mesh, axis=...)."
        )


def check_shardings(
    names: Sequence[str],
    arrays: Sequence[Array],
    specs: Sequence[PartitionSpec],
    mesh: Mesh | AbstractMesh,
) -> None:
    """Raises a ValueError unless each array is sharded as its spec, on the Explicit axes of `mesh`.
    On Auto axes the compiler reshards what enters a `shard_map`, so there is nothing to check."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = {axis for axis, kind in kinds if kind == AxisType.Explicit}
    for name, array, spec in zip(names, arrays, specs, strict=False):
        sharding = jax.typeof(array).sharding
        wanted, given = (_entries(x, array.ndim, explicit) for x in (spec, sharding.spec))
        # An array that is on no mesh may enter where its spec names no Explicit axis.
        nowhere = sharding.mesh.empty and not any(wanted)
        fits = given == wanted and (nowhere or sharding.mesh.shape == mesh.shape)
        if _is_elsewhere(array, mesh):
            found = f"an array on {len(array.sharding.device_set)}, {array.sharding}"
        elif explicit and not fits:
            found = f"{sharding.spec} on axes {sharding.mesh.axis_names}"
        else:
            continue
        raise InputError(
            f"{name} must be sharded as {spec} over the {mesh.size} devices of the mesh; got "
            f"{found}. Use attention.shard for host arrays of tokens, attention.shard_bias for a "
            "bias, and for what is in the order of the layout jax.device_put or jax.reshard with "
            f"jax.NamedSharding(attention.mesh, {spec})."
        )


def _is_elsewhere(array: Array, mesh: Mesh | AbstractMesh) -> bool:
    """Whether an array that holds values is bound to other devices than those of the mesh."""
    if isinstance(array, Tracer) or isinstance(mesh, AbstractMesh) or not array.committed:
        return False
    return array.sharding.device_set != set(mesh.devices.flat)


def _entries(spec: PartitionSpec, ndim: int, axes: set[str]) -> list[tuple[str, ...]]:
    """The axes of each dimension, those in `axes` only."""
    padded = (*spec, *(None for _ in range(ndim - len(spec))))
    entries = (x if isinstance(x, tuple) else (x,) for x in padded)
    return [tuple(axis for axis in entry if axis in axes) for entry in entries]


def check_decode(
    query: Any,
    key: Any,
    value: Any,
    positions: Any,
    *,
    mask: masks.Mask,
    layout: Layout,
    slots: int,
) -> None:
    """Raises a ValueError unless new tokens and a cache fit each other, whole or of one device."""
    check_causal_decode(mask)
    shapes = f"query {query.shape}, key_cache {key.shape}, value_cache {value.shape}"
    are_four = query.ndim == key.ndim == value.ndim == 4
    if not are_four or not _fit(query, key, value) or query.shape[2] % key.shape[2]:
        raise InputError(
            "query must be [batch, new, heads, head_dim], key_cache [batch, slots, kv_heads, "
            "head_dim] and value_cache [batch, slots, kv_heads, value_head_dim], and kv_heads "
            f"divide heads; got {shapes}. Correct the odd one out."
        )
    dtypes = [str(x.dtype) for x in (query, key, value)]
    if len(set(dtypes)) > 1 or not jnp.issubdtype(query.dtype, jnp.floating):
        raise InputError(
            "query, key_cache and value_cache must have one dtype of floats; got "
            f"{', '.join(dtypes)}. Cast the query."
        )
    check_positions(positions, query.shape[:2])
    layout.check_length(slots, "slots")


def check_causal_decode(mask: masks.Mask) -> None:
    """Raises a ValueError unless an attention can decode."""
    mask.check_closed("decode")
    if not mask.causal:
        given = "causal=False" if isinstance(mask, masks.Full) else f"mask={mask}"
        raise InputError(
            "decode needs a causal attention, which sees no slots that are not filled yet; "
            f"got an instance with {given}. Build Attention(mesh, causal=True), or combine its "
            "mask with masks.Causal()."
        )


def check_update(
    cache: Any, new: Any, positions: Any, *, layout: Layout, slots: int, layers: bool = False
) -> None:
    """Raises a ValueError unless new keys or values of `Attention.update_cache` or
    `update_cache_local` fit a cache, which has a leading dimension of layers if `layers`."""
    shape = cache.shape[layers:]
    if not (
        len(shape) == new.ndim == 4 and (shape[0], *shape[2:]) == (new.shape[0], *new.shape[2:])
    ):
        raise InputError(
            f"cache must be [{'layers, ' if layers else ''}batch, slots, kv_heads, head_dim] and "
            "new [batch, new, kv_heads, head_dim], equal but for the second dimension; got cache "
            f"{cache.shape}, new {new.shape}. Correct the odd one out."
        )
    if jnp.issubdtype(new.dtype, jnp.floating) and not jnp.issubdtype(cache.dtype, jnp.floating):
        raise InputError(
            f"A cache of {cache.dtype} must be written with whole numbers, as floats would be cut "
            f"off; got new {new.dtype}. Quantise them, or use a cache of {new.dtype}."
        )
    check_positions(positions, new.shape[:2])
    layout.check_length(slots, "slots")


def check_positions(positions: Any, shape: tuple[int, ...]) -> None:
    if positions.shape != shape or positions.dtype != jnp.int32:
        raise InputError(
            f"positions must be int32 [batch, new] = {list(shape)}; got {positions.dtype} "
            f"{list(positions.shape)}. Give one for each new token of each row."
        )
