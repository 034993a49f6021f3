"""Block attention by cuDNN's flash kernels: NVIDIA GPUs, 16-bit dtypes, full masks, causal ones and
causal windows.

The visible part of a pair of sorted units is a set of full rectangles and causal squares
(`Pieces`), each of which is one kernel call. Where only the device knows which of several sets it
is, `lax.switch` chooses. cuDNN needs no other masks for this, and it serves grouped-query heads.

A causal window also has squares with a window, which cuDNN's kernels know: they take the number of
keys that a query sees. They need cuDNN 9.2, which is older than the one of any jax that is
supported, as many keys as queries, and neither bias nor dropout. JAX asks for no more. The far end
of a window is a causal square in reverse order of tokens.

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
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from startrail_jax.blocks import softmax
from startrail_jax.blocks.base import Pair, Request
from startrail_jax.blocks.pieces import Pieces
from startrail_jax.blocks.softmax import Partials, merge_partials, merge_precisely
from startrail_jax.blocks.visibility import Cases, Visibility
from startrail_jax.masks import Causal, Full
from startrail_jax.masks.algebra import causal_window
from startrail_jax.shapes import EMPTY, KeyShard, LseShard, OutShard, QueryShard, ValueShard
from startrail_jax.xla.varying import alike, as_varying

# Number of attentions to merge at a time. More of them take more memory; with fewer of them the
# merged one is read and written more often.
MAX_PARTIALS = 4

# Greatest number of sets of pieces to choose from; each of them is compiled.
MAX_CASES = 128

# Tokens to a multiple of which the far end of a window is padded: a window of 1024 has one of 1023
# there. Until cuDNN 9.15.1, the backward pass could read beyond keys of another number.
TILE = 128

DTYPES = ("bfloat16", "float16")


def refusal(request: Request) -> str | None:
    """See `base.Block.refusal`."""
    widest = 256 if (request.capability or (0, 0)) >= (9, 0) else 128
    if request.platform != "cuda":
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
    full = isinstance(request.mask, Full)
    if not (full or isinstance(request.mask, Causal) or causal_window(request.mask)):
        return f"its masks are full, causal and causal windows; got mask={request.mask}"
    if request.softcap is not None:
        return f"its kernels do not cap logits; got softcap={request.softcap}"
    if request.scores:
        return f"its kernels serve no scores of a call; got {', '.join(request.scores)}"
    if request.packed:
        return "its masks know no documents; got segment_ids"
    if not full and request.num_cases > MAX_CASES:
        return (
            f"causal units must meet in at most {MAX_CASES} sets of rectangles and squares; "
            f"got {request.num_cases}"
        )
    return None


def forward(pair: Pair, into: Partials = ()) -> Partials:
    """See `base.Block.forward`. Merges `into` once it has `MAX_PARTIALS` attentions."""
    q, k, v, visibility, scale, scores = pair
    assert scores.plain, "refused"
    case, cases = _cases(visibility, q, k)
    if len(into) >= MAX_PARTIALS:
        # Merge before the kernel: XLA would take a merge after it for enough to hide a message.
        into, q = lax.optimization_barrier(((merge_precisely(into),), q))
    here, cases = _only(visibility, case, cases)
    branches = [functools.partial(_forward, pieces, scale) for pieces in cases]
    out, lse = _choose(case, branches, q, k, v)
    if here is not None:
        out, lse = jnp.where(here, out, jnp.zeros_like(out)), jnp.where(here, lse, EMPTY)
    return (*into, (out, lse))


def backward(
    pair: Pair,
    lse: LseShard,
    delta: LseShard,
    dout: OutShard,
    into: tuple[Array | None, ...] = (None, None, None),
) -> tuple[Array, ...]:
    """See `base.Block.backward`."""
    q, k, v, visibility, scale, scores = pair
    assert scores.plain, "refused"
    out, dout = output_for(delta, dout)
    case, cases = _cases(visibility, q, k)
    # Sums, of several calls or with `into`, stay in float32.
    sums = any(len(_calls(pieces)) > 1 for pieces in cases)
    dtypes = [q.dtype if dx is None and not sums else jnp.float32 for dx in into]
    here, cases = _only(visibility, case, cases)
    branches = [functools.partial(_backward, pieces, scale, dtypes, here) for pieces in cases]
    return _choose(case, branches, (q, lse, out, dout), (k, v), into)


def _cases(visibility: Visibility, q: QueryShard, k: KeyShard) -> Cases:
    """The index of the set of pieces that is visible, and the sets to choose from."""
    if visibility.full:
        return 0, (Pieces.whole(q.shape[1], k.shape[1]),)
    return visibility.cases()


def _only(
    visibility: Visibility, case: Any, cases: tuple[Pieces, ...]
) -> tuple[Any, tuple[Pieces, ...]]:
    """Of a window of which some devices see one set and the others nothing: that set alone.

    All devices then make its calls, which are short, and those that see nothing drop what comes of
    them. In front of a branch, a GPU would wait for its host.

    Returns:
        Whether this device sees the set, or None where there is no such set; and the sets.
    """
    seen = [pieces for pieces in cases if pieces != Pieces()]
    if visibility.of_window is None or len(cases) != 2 or len(seen) != 1:
        return None, cases
    return case == cases.index(seen[0]), tuple(seen)


def _choose(case: Any, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
    """Runs the branch of the case on the operands."""
    if len(branches) == 1:
        return branches[0](*operands)
    return lax.switch(case, branches, *operands)


@dataclass(frozen=True)
class _Call:
    """One kernel call: it reads and writes its part of arrays [b, t, n, h] or [b, n, t]."""

    rows: slice
    """Its queries."""
    columns: slice
    """Its keys."""
    causal: bool = False
    window: int = 0
    """Keys that a query sees; 0 for all that the causal mask shows."""
    turned: bool = False
    """Whether tokens are in reverse order, and zeros behind them up to a multiple of `TILE`: the
    causal mask hides these from them."""
    squares: int = 1
    """Number of equal squares that lie one after another: the kernel takes them for rows of a
    batch."""

    @property
    def _padding(self) -> int:
        return -(self.rows.stop - self.rows.start) // self.squares % TILE

    def take(self, x: Array, where: slice) -> Array:
        """What the kernel gets of x, at the rows or at the columns."""
        x = x[:, where] if x.ndim == 4 else x[:, :, where]
        if self.squares > 1:
            b, t = x.shape[0] * self.squares, (where.stop - where.start) // self.squares
            if x.ndim == 4:
                x = x.reshape(b, t, *x.shape[2:])
            else:
                x = x.reshape(*x.shape[:2], self.squares, t).swapaxes(1, 2).reshape(b, -1, t)
        if self.turned:
            axis = 1 if x.ndim == 4 else 2
            width = [(0, self._padding if dim == axis else 0) for dim in range(x.ndim)]
            x = jnp.pad(jnp.flip(x, axis), width)
        return x

    def put(self, x: Array) -> Array:
        """The inverse of `take`, without what lies beyond the call."""
        axis = 1 if x.ndim == 4 else 2
        if self.turned:
            x = jnp.flip(_rows(x, 0, x.shape[axis] - self._padding), axis)
        if self.squares == 1:
            return x
        b = x.shape[0] // self.squares
        if x.ndim == 4:
            return x.reshape(b, -1, *x.shape[2:])
        n, t = x.shape[1:]
        return x.reshape(b, self.squares, n, t).swapaxes(1, 2).reshape(b, n, -1)


def _calls(pieces: Pieces) -> list[_Call]:
    """The kernel calls of a set of pieces."""
    calls = [_Call(slice(a, b), slice(c, d)) for a, b, c, d in pieces.rectangles]
    for squares, window, turned in (
        (pieces.squares, 0, False),
        (pieces.windows, pieces.window, False),
        (pieces.edges, 0, True),
    ):
        in_line = itertools.groupby(
            enumerate(squares), lambda x: (*(at - x[0] * x[1][2] for at in x[1][:2]), x[1][2])
        )
        for _, line in in_line:
            (_, (i, j, size)), *more = line
            count = 1 + len(more)
            rows, columns = slice(i, i + count * size), slice(j, j + count * size)
            calls.append(_Call(rows, columns, True, window, turned, count))
    return calls


def _forward(
    pieces: Pieces, scale: float, q: QueryShard, k: KeyShard, v: ValueShard
) -> tuple[OutShard, LseShard]:
    """Attention to the visible keys, in the dtype of q so that all cases return the same types."""
    parts = []
    for call in _calls(pieces):
        operands = call.take(q, call.rows), call.take(k, call.columns), call.take(v, call.columns)
        found = attend(*operands, scale, call.causal, call.window)
        parts.append((call.rows, tuple(map(call.put, found))))

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
    here: Any,
    queries: tuple[Array, ...],
    keys: tuple[Array, ...],
    into: Any,
) -> tuple[Array, ...]:
    """The contributions of the visible pairs to dq, dk and dv, added to `into`; none of them where
    `here` is False."""
    sums = [[] if dx is None else [(slice(0, dx.shape[1]), dx)] for dx in into]
    for call in _calls(pieces):
        q, lse, out, dout = (call.take(x, call.rows) for x in queries)
        k, v = (call.take(x, call.columns) for x in keys)
        grads = gradients(q, k, v, lse, out, dout, scale, call.causal, call.window)
        where = call.rows, call.columns, call.columns
        for parts, rows, dx in zip(sums, where, map(call.put, grads), strict=True):
            dx = dx if here is None else jnp.where(here, dx, jnp.zeros_like(dx))
            parts.append((rows, dx))

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
    q: QueryShard, k: KeyShard, v: ValueShard, scale: float, causal: bool, window: int = 0
) -> tuple[OutShard, LseShard]:
    """Calls cuDNN's forward kernel.

    Args:
        q, k, v: some rows of a query unit and of a key unit.
        scale: factor of the logits.
        causal: whether query i sees only keys j <= i, counted from the first of each.
        window: if it is not 0, query i sees only keys j > i - window, of as many as there are
            queries; for causal calls.

    Returns:
        out in the dtype of q, and lse in float32 (natural logarithm).
    """
    q, k, v = alike(q, k, v)
    b, t, n, _ = q.shape
    out, lse = _call(
        "__cudnn$fmhaSoftmax",
        _config(q, k, scale, causal, window, _FORWARD_PRODUCTS),
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
    window: int = 0,
) -> tuple[QueryShard, KeyShard, ValueShard]:
    """Calls cuDNN's backward kernel, which accepts any lse and out.

    Returns:
        dq, dk and dv in the dtype of q.
    """
    operands = alike(q, k, v, lse, dout, out)
    grads = _call(
        "__cudnn$fmhaSoftmaxBackward",
        _config(q, k, scale, causal, window, _BACKWARD_PRODUCTS),
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
    q: QueryShard, k: KeyShard, scale: float, causal: bool, window: int, products: dict[str, Any]
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
        "sliding_window_length": window,
        "max_seg_per_batch": 1,
        "is_paged_attention": False,
    }
    return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": attention})
