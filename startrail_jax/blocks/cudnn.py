"""Block attention by cuDNN's flash kernels: NVIDIA GPUs, 16-bit dtypes, full and causal masks.

The visible part of a pair of sorted units is a set of full rectangles and causal squares
(`Pieces`), each of which is one kernel call. Where only the device knows which of several sets it
is, `lax.switch` chooses. cuDNN needs no other masks for this, and it serves grouped-query heads.

XLA runs cuDNN's kernels as custom calls, which are made here through the public `jax.ffi`. The
entry that JAX has (`jax.nn.dot_product_attention`) rounds the log-sum-exp, and its backward pass
does not accept a global one. XLA defines the contract of the calls (CudnnfMHABackendConfig in
xla/service/gpu/backend_configs.proto); a test compares these calls with those of JAX.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from startrail_jax.blocks import softmax
from startrail_jax.blocks.base import Request
from startrail_jax.blocks.pieces import Pieces
from startrail_jax.blocks.scores import PLAIN, Scores
from startrail_jax.blocks.softmax import Partials, merge_partials, merge_precisely
from startrail_jax.blocks.visibility import Visibility
from startrail_jax.masks import Causal, Full
from startrail_jax.shapes import EMPTY, KeyShard, LseShard, OutShard, QueryShard, ValueShard
from startrail_jax.xla.varying import alike

# Number of attentions to merge at a time. More of them take more memory; with fewer of them the
# merged one is read and written more often.
MAX_PARTIALS = 4

# Greatest number of sets of pieces to choose from; each of them is compiled.
MAX_CASES = 128

DTYPES = ("bfloat16", "float16")


def refusal(request: Request) -> str | None:
    """See `base.Block.refusal`."""
    widest = 256 if (request.capability or (0, 0)) >= (9, 0) else 128
    if request.platform not in ("cuda", None):
        return f"it needs NVIDIA GPUs; got platform {request.platform!r}"
    if request.capability is not None and request.capability < (8, 0):
        return f"it needs compute capability 8.0; got {'.'.join(map(str, request.capability))}"
    if request.dtype not in DTYPES:
        return f"its dtypes are {' and '.join(DTYPES)}; got {request.dtype}"
    if request.value_head_dim != request.head_dim:
        return (
            "keys and values must have one head_dim; got "
            f"{request.head_dim} and {request.value_head_dim}"
        )
    if request.head_dim % 8 or request.head_dim > widest:
        return (
            f"head_dim must be a multiple of 8 of at most {widest} (256 from compute capability "
            f"9.0 on); got {request.head_dim}"
        )
    if not isinstance(request.mask, (Full, Causal)):
        return f"its masks are full and causal; got mask={request.mask}"
    if request.softcap is not None:
        return f"its kernels do not cap logits; got softcap={request.softcap}"
    if request.scores:
        return f"its kernels serve no scores of a call; got {', '.join(request.scores)}"
    if request.packed:
        return "its masks are full and causal; got segment_ids"
    if isinstance(request.mask, Causal) and not 1 <= request.num_cases <= MAX_CASES:
        return (
            f"causal units must meet in at most {MAX_CASES} sets of rectangles and squares; got "
            f"{request.num_cases or 'a striped layout'}"
        )
    return None


def forward(
    q: QueryShard,
    k: KeyShard,
    v: ValueShard,
    visibility: Visibility,
    scale: float,
    into: Partials = (),
    scores: Scores = PLAIN,
) -> Partials:
    """See `base.Block.forward`. Merges `into` once it has `MAX_PARTIALS` attentions."""
    assert scores.plain, "refused"
    case, cases = _cases(visibility, q, k)
    branches = [functools.partial(_forward, pieces, scale) for pieces in cases]
    if len(into) >= MAX_PARTIALS:
        # Merge before the kernel: XLA would take a merge after it for enough to hide a message.
        into, q = lax.optimization_barrier(((merge_precisely(into),), q))
    return (*into, _choose(case, branches, q, k, v))


def backward(
    q: QueryShard,
    k: KeyShard,
    v: ValueShard,
    lse: LseShard,
    delta: LseShard,
    dout: OutShard,
    visibility: Visibility,
    scale: float,
    into: tuple[Array | None, ...] = (None, None, None),
    scores: Scores = PLAIN,
) -> tuple[Array, ...]:
    """See `base.Block.backward`."""
    assert scores.plain, "refused"
    out, dout = output_for(delta, dout)
    case, cases = _cases(visibility, q, k)
    # Sums, of several calls or with `into`, stay in float32.
    sums = any(len(_calls(pieces)) > 1 for pieces in cases)
    dtypes = [q.dtype if dx is None and not sums else jnp.float32 for dx in into]
    branches = [functools.partial(_backward, pieces, scale, dtypes) for pieces in cases]
    return _choose(case, branches, (q, lse, out, dout), (k, v), into)


def _cases(visibility: Visibility, q: QueryShard, k: KeyShard) -> tuple[Any, tuple[Pieces, ...]]:
    """The index of the set of pieces that is visible, and the sets to choose from."""
    if visibility.causal:
        return visibility.cases()
    return 0, (Pieces.whole(q.shape[1], k.shape[1]),)


def _choose(case: Any, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
    """Runs the branch of the case on the operands."""
    if len(branches) == 1:
        return branches[0](*operands)
    return lax.switch(case, branches, *operands)


def _calls(pieces: Pieces) -> list[tuple[slice, slice, bool]]:
    """The kernel calls: (queries, keys, whether the mask is causal) of each."""
    full = [(slice(a, b), slice(0, keys), False) for a, b, keys in pieces.rectangles]
    causal = [(slice(i, i + n), slice(j, j + n), True) for i, j, n in pieces.squares]
    return full + causal


def _forward(
    pieces: Pieces, scale: float, q: QueryShard, k: KeyShard, v: ValueShard
) -> tuple[OutShard, LseShard]:
    """Attention to the visible keys, in the dtype of q so that all cases return the same types."""
    parts = [
        (rows, attend(q[:, rows], k[:, keys], v[:, keys], scale, causal))
        for rows, keys, causal in _calls(pieces)
    ]

    def join(rows: slice, parts: list[Any]) -> Any:
        if len(parts) > 1:
            out, lse = merge_partials(parts)
            return out.astype(q.dtype), lse
        if parts:
            return parts[0]
        b, t, n, _ = q[:, rows].shape
        out, lse = (
            jnp.zeros((b, t, n, v.shape[-1]), q.dtype),
            jnp.full((b, n, t), EMPTY, jnp.float32),
        )
        return alike(out, lse, q)[:2]

    return _by_rows(q.shape[1], parts, join)


def _backward(
    pieces: Pieces,
    scale: float,
    dtypes: Sequence[Any],
    queries: tuple[Array, ...],
    keys: tuple[Array, ...],
    into: Any,
) -> tuple[Array, ...]:
    """The contributions of the visible pairs to dq, dk and dv, added to `into`."""
    sums = [[] if dx is None else [(slice(0, dx.shape[1]), dx)] for dx in into]
    for rows, columns, causal in _calls(pieces):
        q, lse, out, dout = (x[:, rows] if x.ndim == 4 else x[:, :, rows] for x in queries)
        k, v = (x[:, columns] for x in keys)
        grads = gradients(q, k, v, lse, out, dout, scale, causal)
        for parts, where, dx in zip(sums, (rows, columns, columns), grads, strict=True):
            parts.append((where, dx))

    def join(like: Array, dtype: Any, rows: slice, parts: list[Array]) -> Array:
        if parts:
            total = functools.reduce(jnp.add, (x.astype(jnp.float32) for x in parts))
            return total.astype(dtype)
        return alike(jnp.zeros_like(like[:, rows], dtype), like)[0]

    return tuple(
        _by_rows(x.shape[1], parts, functools.partial(join, x, dtype))
        for x, dtype, parts in zip((queries[0], *keys), dtypes, sums, strict=True)
    )


def _by_rows(
    length: int, parts: list[tuple[slice, Any]], join: Callable[[slice, list[Any]], Any]
) -> Any:
    """Joins parts of an array that cover overlapping ranges of rows.

    The ends of all parts cut the rows into intervals. In each interval, `join` gets the interval
    and the rows of the parts that cover it; its results are concatenated.

    Args:
        length: number of rows.
        parts: (rows, arrays) of each part.
        join: joins what lies in one interval.
    """
    ends = sorted({0, length}.union(*({rows.start, rows.stop} for rows, _ in parts)))
    joined = []
    for start, stop in itertools.pairwise(ends):
        there = [
            jax.tree.map(functools.partial(_rows, start=start - rows.start, size=stop - start), x)
            for rows, x in parts
            if rows.start <= start and stop <= rows.stop
        ]
        joined.append(join(slice(start, stop), there))
    if len(joined) == 1:
        return joined[0]
    return jax.tree.map(lambda *xs: jnp.concatenate(xs, 1 if xs[0].ndim == 4 else 2), *joined)


def _rows(x: Array, start: int, size: int) -> Array:
    """Some tokens of an array [b, t, n, h] or [b, n, t]."""
    return lax.slice_in_dim(x, start, start + size, axis=1 if x.ndim == 4 else 2)


def output_for(delta: LseShard, dout: OutShard) -> tuple[OutShard, OutShard]:
    """An output whose rowsum(dout * out) is `delta`, and dout, both in the dtype of dout.

    cuDNN's backward pass takes no delta but computes it from out and dout. Any out with the right
    sum will do, such as

        out = delta dout / rowsum(dout^2)

    So the true output need not travel, and delta may include the gradient of lse. Where dout is too
    small for the quotient, a constant that is as small as the dtype allows takes its place.
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
    q: QueryShard, k: KeyShard, v: ValueShard, scale: float, causal: bool
) -> tuple[OutShard, LseShard]:
    """Calls cuDNN's forward kernel.

    Args:
        q, k, v: some rows of a query unit and of a key unit.
        scale: factor of the logits.
        causal: whether query i sees only keys j <= i, counted from the first of each.

    Returns:
        out in the dtype of q, and lse in float32 (natural logarithm).
    """
    q, k, v = alike(q, k, v)
    b, t, n, _ = q.shape
    out, lse = _call(
        "__cudnn$fmhaSoftmax",
        _config(q, k, scale, causal, _FORWARD_PRODUCTS),
        (q, k, v),
        [_transposed(q), ((b, n, t), jnp.float32)],
    )
    return out.swapaxes(1, 2), lse


def gradients(
    q: QueryShard,
    k: KeyShard,
    v: ValueShard,
    lse: LseShard,
    out: OutShard,
    dout: OutShard,
    scale: float,
    causal: bool,
) -> tuple[QueryShard, KeyShard, ValueShard]:
    """Calls cuDNN's backward kernel, which accepts any lse and out.

    Returns:
        dq, dk and dv in the dtype of q.
    """
    operands = alike(q, k, v, lse, dout, out)
    grads = _call(
        "__cudnn$fmhaSoftmaxBackward",
        _config(q, k, scale, causal, _BACKWARD_PRODUCTS),
        operands,
        [_transposed(x) for x in (q, k, v)],
    )
    dq, dk, dv = (x.swapaxes(1, 2) for x in grads)
    return dq, dk, dv


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
    kind = jax.typeof(operands[0])
    manual = {}
    if kind.manual_axis_type.varying:
        manual["manual_axis_type"] = kind.manual_axis_type
        manual["sharding"] = NamedSharding(kind.sharding.mesh, PartitionSpec())
    # XLA finds the size of the workspace.
    results = [*results, ((0,), jnp.uint8)]
    call = jax.ffi.ffi_call(
        target,
        [jax.ShapeDtypeStruct(shape, dtype, **manual) for shape, dtype in results],
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
    q: QueryShard, k: KeyShard, scale: float, causal: bool, products: dict[str, Any]
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
        "mask_type": "CAUSAL" if causal else "NO_MASK",
        **products,
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": 0,
        "max_seg_per_batch": 1,
        "is_paged_attention": False,
    }
    return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": attention})
