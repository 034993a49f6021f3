"""cuDNN's flash attention kernels as functions of arrays on one device, and what they serve.

A window needs cuDNN 9.2, which is older than the one of any jax that is supported; values of
another head_dim than keys need 9.10. JAX asks for no more.

XLA runs these kernels as custom calls, which are made here through the public `jax.ffi`. The
entry that JAX has (`jax.nn.dot_product_attention`) rounds the log-sum-exp, and its backward pass
does not accept a global one. XLA defines the contract of the calls (CudnnfMHABackendConfig in
xla/service/gpu/backend_configs.proto); a test compares these calls with those of JAX.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int32

from startrail_jax.blocks import softmax
from startrail_jax.blocks.base import Request
from startrail_jax.blocks.shapes import KeyShard, LseShard, OutShard, QueryShard, ValueShard
from startrail_jax.xla.varying import alike, as_varying

DTYPES = ("bfloat16", "float16")

# See `packed.Kernels`.
by_segment = True
leading = True

# Tokens to a multiple of which tokens in reverse order are padded: a window of 1024 has 1023 at its
# far end. Until cuDNN 9.15.1, the backward pass could read beyond keys of another number.
TILE = 128


class Segments(NamedTuple):
    """The queries and keys that see each other in a call: the tokens of documents.

    Without starts, there is one segment for each row of the batch: its first queries and its last
    keys, or with `leading` its first keys. With starts, segments are of all rows together, equally
    many a row, and a row is only a part of memory: tokens are counted from the first of all rows,
    and a segment may go on in the next row. Results of tokens outside of all segments mean nothing.
    """

    query_lengths: Int32[Array, " segments"]
    """0 for a segment that is not used."""
    key_lengths: Int32[Array, " segments"]
    query_starts: Int32[Array, " segments"] | None = None
    """Index of the first query of each segment, over all rows."""
    key_starts: Int32[Array, " segments"] | None = None
    """Index of the first key of each, likewise."""
    leading: bool = False
    """Whether the keys of a segment without starts are the first ones of a row."""


def refusal(request: Request) -> str | None:
    """Why the kernels do not serve a request, whatever its mask; None if they may."""
    hopper = (request.capability or (0, 0)) >= (9, 0)
    widest = 256 if hopper else 128
    head_dims = request.head_dim, request.value_head_dim
    if request.platform != "cuda":
        return f"it needs NVIDIA GPUs; got platform {request.platform!r}"
    if request.capability is not None and request.capability < (8, 0):
        return f"it needs compute capability 8.0; got {'.'.join(map(str, request.capability))}"
    if request.dtype not in DTYPES:
        return f"its dtypes are {' and '.join(DTYPES)}; got {request.dtype}"
    if head_dims[0] != head_dims[1] and not hopper:
        return (
            "keys and values must have one head_dim before compute capability 9.0; got "
            f"{head_dims[0]} and {head_dims[1]}"
        )
    if any(head_dim % 8 or head_dim > widest for head_dim in head_dims):
        return (
            f"head_dim must be a multiple of 8 of at most {widest} (256 from compute capability "
            f"9.0 on); got {' and '.join(map(str, dict.fromkeys(head_dims)))}"
        )
    if request.packed and request.capability is not None and not hopper:
        return (
            "its kernels serve documents from compute capability 9.0 on; got "
            f"{'.'.join(map(str, request.capability))} and segment_ids"
        )
    return refusal_of_scores(request)


def refusal_of_scores(request: Request) -> str | None:
    """Why flash kernels do not serve the scores of a request; None if it has none."""
    if request.softcap is not None:
        return f"its kernels do not cap logits; got softcap={request.softcap}"
    if request.scores:
        return f"its kernels serve no scores of a call; got {', '.join(request.scores)}"
    return None


def output_for(delta: LseShard, dout: OutShard) -> tuple[OutShard, OutShard]:
    """An output whose rowsum(dout * out) is `delta`, and dout, both in the dtype of dout.

    cuDNN's backward pass takes no delta but computes it from out and dout. Any out with the right
    sum will do, such as out = delta dout / rowsum(dout^2). So the true output need not travel, and
    delta may include the gradient of lse. Where dout is too small for the quotient, a constant that
    is as small as the dtype allows takes its place.
    """
    half = dout.dtype == jnp.float16
    greatest, least = (2.0**14, 2.0**-24) if half else (2.0**60, 2.0**-80)
    delta = softmax.rows(delta)
    largest = jnp.abs(dout).max(-1, keepdims=True).astype(jnp.float32)
    tiny = jnp.maximum(jnp.abs(delta) / (dout.shape[-1] * greatest), least).astype(dout.dtype)
    small = largest * greatest < jnp.abs(delta)
    dout = jnp.where(small, tiny, dout)
    # Scale each row to at most 1, so that no square overflows or vanishes.
    largest = jnp.where(small, tiny.astype(jnp.float32), largest)
    largest = jnp.where(largest > 0, largest, 1.0)
    unit = dout.astype(jnp.float32) / largest
    norm = jnp.square(unit).sum(-1, keepdims=True)
    out = delta / largest / jnp.maximum(norm, 1.0) * unit
    return out.astype(dout.dtype), dout


def attend(
    q: QueryShard,
    k: KeyShard,
    v: ValueShard,
    scale: float,
    causal: bool,
    window: int = 0,
    segments: Segments | None = None,
    edge: bool = False,
) -> tuple[OutShard, Float32[Array, "_ n _"]]:
    """Calls cuDNN's forward kernel for some rows of a query unit and of a key unit.

    If `causal`, query i sees only keys j <= i, counted from the first of each row or segment; with
    a `window`, only j > i - window, of as many keys as queries. If `edge`, it sees only keys j >= i
    of its row, of as many keys as queries; not for causal calls, nor with starts of segments.

    out is in the dtype of q. With starts, lse is [segments, n, t], of queries counted from the
    first of their segment.
    """
    if _needs_one_head_dim(q, v, segments):
        rows, keys, values = _of_one_head_dim(q, k, v)
        out, lse = _attend(rows, keys, values, scale, causal, window, segments)
        return out[..., : v.shape[3]], lse
    if not _in_reverse(segments, edge):
        return _attend(q, k, v, scale, causal, window, segments)
    if segments is not None and segments.leading:
        return _attend(q, filled(k), filled(v), scale, causal, window, segments)
    rows, keys, values = _turned(edge, q), turned(k), turned(v)
    out, lse = _attend(rows, keys, values, scale, edge, 0, _first(segments, edge, rows))
    return _unturned(edge, out, q.shape[1]), _unturned(edge, lse, q.shape[1])


def gradients(
    q: QueryShard,
    k: KeyShard,
    v: ValueShard,
    lse: Float32[Array, "_ n _"],
    out: OutShard,
    dout: OutShard,
    scale: float,
    causal: bool,
    window: int = 0,
    segments: Segments | None = None,
    edge: bool = False,
) -> tuple[QueryShard, KeyShard, ValueShard]:
    """cuDNN's backward kernel, for any out and any lse, which is as `attend` gives it: dq, dk and
    dv in the dtype of q."""
    if _needs_one_head_dim(q, v, segments):
        rows, keys, values, out, dout = _of_one_head_dim(q, k, v, out, dout)
        grads = _gradients(rows, keys, values, lse, out, dout, scale, causal, window, segments)
        dq, dk, dv = (dx[..., : x.shape[3]] for dx, x in zip(grads, (q, k, v), strict=True))
        return dq, dk, dv
    if not _in_reverse(segments, edge):
        return _gradients(q, k, v, lse, out, dout, scale, causal, window, segments)
    tokens = k.shape[1]
    if segments is not None and segments.leading:
        keys, values = filled(k), filled(v)
        grads = _gradients(q, keys, values, lse, out, dout, scale, causal, window, segments)
        dq, dk, dv = grads
        return dq, dk[:, :tokens], dv[:, :tokens]
    rows, lse, out, dout = (_turned(edge, x) for x in (q, lse, out, dout))
    told = scale, edge, 0, _first(segments, edge, rows)
    dq, dk, dv = _gradients(rows, turned(k), turned(v), lse, out, dout, *told)
    return _unturned(edge, dq, q.shape[1]), unturned(dk, tokens), unturned(dv, tokens)


def _in_reverse(segments: Segments | None, edge: bool) -> bool:
    """Whether keys go to a kernel in reverse order: without starts, segments are the first keys of
    a row for it, and a causal mask begins at the first query and the first key."""
    return edge or (segments is not None and segments.query_starts is None)


def _first(segments: Segments | None, edge: bool, rows: QueryShard) -> Segments | None:
    """The segments of keys in reverse order, and of queries likewise if `edge`: of these, the first
    ones then come last, and all count."""
    if segments is None or not edge:
        return segments
    lengths = jnp.full_like(segments.query_lengths, rows.shape[1])
    return Segments(lengths, segments.key_lengths)


def _turned(reverse: bool, x: Array) -> Array:
    return turned(x) if reverse else x


def _unturned(reverse: bool, x: Array, tokens: int) -> Array:
    return unturned(x, tokens) if reverse else x


def _attend(
    q: QueryShard,
    k: KeyShard,
    v: ValueShard,
    scale: float,
    causal: bool,
    window: int,
    segments: Segments | None,
) -> tuple[OutShard, Float32[Array, "_ n _"]]:
    """`attend` of what a kernel serves as it is: segments without starts hold the first keys."""
    q, k, v, *lengths = alike(q, k, v, *_lengths(q, k, segments))
    b, t, n, _ = q.shape
    rows = b if segments is None else segments.query_lengths.size
    out, lse = _call(
        "__cudnn$fmhaSoftmax",
        _config(q, k, scale, causal, window, segments, _FORWARD_PRODUCTS),
        (q, k, v, *lengths),
        [((b, n, t, v.shape[3]), q.dtype), ((rows, n, t), jnp.float32)],
    )
    return out.swapaxes(1, 2), lse


def _gradients(
    q: QueryShard,
    k: KeyShard,
    v: ValueShard,
    lse: Float32[Array, "_ n _"],
    out: OutShard,
    dout: OutShard,
    scale: float,
    causal: bool,
    window: int,
    segments: Segments | None,
) -> tuple[QueryShard, KeyShard, ValueShard]:
    """`gradients`, likewise."""
    operands = alike(q, k, v, lse, dout, out, *_lengths(q, k, segments))
    grads = _call(
        "__cudnn$fmhaSoftmaxBackward",
        _config(q, k, scale, causal, window, segments, _BACKWARD_PRODUCTS),
        operands,
        [_transposed(x) for x in (q, k, v)],
    )
    dq, dk, dv = (x.swapaxes(1, 2) for x in grads)
    return dq, dk, dv


def _needs_one_head_dim(q: QueryShard, v: ValueShard, segments: Segments | None) -> bool:
    """Whether keys and values must be of one head_dim, since starts count the elements of both."""
    return segments is not None and segments.query_starts is not None and q.shape[3] != v.shape[3]


def _of_one_head_dim(*arrays: Array) -> Any:
    """Arrays [b, t, n, h] with zeros behind their channels, up to the largest h."""
    widest = max(x.shape[3] for x in arrays)
    return [jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, widest - x.shape[3]))) for x in arrays]


def turned(x: Array) -> Array:
    """x [b, t, ...] or [b, n, t] in reverse order, with zeros behind up to a multiple of `TILE`."""
    return filled(jnp.flip(x, 2 if x.ndim == 3 else 1))


def filled(x: Array) -> Array:
    """x with zeros behind its tokens, likewise."""
    axis = 2 if x.ndim == 3 else 1
    width = [(0, -x.shape[axis] % TILE if dim == axis else 0) for dim in range(x.ndim)]
    return jnp.pad(x, width)


def unturned(x: Array, tokens: int) -> Array:
    """The inverse of `turned`, for so many tokens."""
    axis = 2 if x.ndim == 3 else 1
    return jnp.flip(lax.slice_in_dim(x, 0, tokens, axis=axis), axis)


def _lengths(q: QueryShard, k: KeyShard, segments: Segments | None) -> list[Int32[Array, "..."]]:
    """The operands that tell a kernel its segments."""
    if segments is None:
        return []
    if segments.query_starts is None or segments.key_starts is None:
        return [segments.query_lengths, segments.key_lengths]
    rows = q.shape[0]
    operands = [segments.query_lengths.reshape(rows, -1), segments.key_lengths.reshape(rows, -1)]
    for x, starts in ((q, segments.query_starts), (k, segments.key_starts)):
        # In elements, and one more in each row, which is not read.
        starts = starts * np.int32(x.shape[2] * x.shape[3])
        ends = alike(jnp.full(rows, x.size, jnp.int32), starts)[0]
        operands.append(jnp.concatenate([starts, ends]).reshape(rows, -1))
    return operands


def _transposed(x: Array) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of a result for x [b, t, n, h], whose shape is [b, n, t, h] for cuDNN."""
    b, t, n, h = x.shape
    return (b, n, t, h), x.dtype


def _call(
    target: str,
    config: str,
    operands: Sequence[Array],
    results: list[tuple[tuple[int, ...], Any]],
) -> Sequence[Array]:
    """Makes one custom call; returns its results without the last, which is cuDNN's workspace."""
    varying = as_varying(operands[0])
    # XLA finds the size of the workspace.
    results = [*results, ((0,), jnp.uint8)]
    call = jax.ffi.ffi_call(
        target,
        [jax.ShapeDtypeStruct(shape, dtype, **varying) for shape, dtype in results],
        # In memory the order is [b, t, n, h].
        output_layouts=[(0, 2, 1, 3) if len(shape) == 4 else None for shape, _ in results],
        custom_call_api_version=2,
        legacy_backend_config=config,
        vmap_method="sequential",
    )
    return call(*operands)[:-1]


def _product(left: int, right: int, left_batch: str, right_batch: str) -> dict[str, list[str]]:
    """Dimension numbers of one product: the contracting dimensions, and those of batch and head."""
    return {
        "lhs_contracting_dimensions": [str(left)],
        "rhs_contracting_dimensions": [str(right)],
        "lhs_batch_dimensions": list(left_batch),
        "rhs_batch_dimensions": list(right_batch),
    }


# By whether a call is causal, and whether it has segments.
_MASKS = {
    (False, False): "NO_MASK",
    (True, False): "CAUSAL",
    (False, True): "PADDING",
    (True, True): "PADDING_CAUSAL",
}

# Products of arrays [b, t, n, h] and probabilities [b, n, t, s].
_FORWARD_PRODUCTS = {
    "bmm1_dot_dimension_numbers": _product(3, 3, "02", "02"),
    "bmm2_dot_dimension_numbers": _product(3, 1, "01", "02"),
}
_BACKWARD_PRODUCTS = {
    "bmm1_grad_gemm1_dot_dimension_numbers": _product(2, 1, "01", "02"),
    "bmm1_grad_gemm2_dot_dimension_numbers": _product(3, 1, "01", "02"),
    "bmm2_grad_gemm1_dot_dimension_numbers": _product(2, 1, "01", "02"),
    "bmm2_grad_gemm2_dot_dimension_numbers": _product(3, 3, "02", "02"),
}


def _config(
    q: QueryShard,
    k: KeyShard,
    scale: float,
    causal: bool,
    window: int,
    segments: Segments | None,
    products: dict[str, Any],
) -> str:
    """The backend_config of a call, as JSON; XLA writes 64-bit integers as strings."""
    b, t, n, _ = q.shape
    logits_layout = {
        "dim_level_types": [],
        "dim_unique": [],
        "dim_ordered": [],
        "minor_to_major": ["3", "2", "1", "0"],
        "tiles": [],
        "element_size_in_bits": "0",
        "memory_space": "0",
        "index_primitive_type": "PRIMITIVE_TYPE_INVALID",
        "pointer_primitive_type": "PRIMITIVE_TYPE_INVALID",
        "dynamic_shape_metadata_prefix_bytes": "0",
    }
    attention = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": scale,
        "intermediate_tensor_shape": {
            "element_type": {"bfloat16": "BF16", "float16": "F16"}[q.dtype.name],
            "dimensions": [str(b), str(n), str(t), str(k.shape[1])],
            "tuple_shapes": [],
            "layout": logits_layout,
            "is_dynamic_dimension": [False, False, False, False],
        },
        "is_flash_attention": True,
        "mask_type": _MASKS[causal, segments is not None],
        **products,
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": window,
        "max_seg_per_batch": 1 if segments is None else segments.query_lengths.size // b,
        "is_paged_attention": False,
    }
    return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": attention})
