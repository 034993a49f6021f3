"""Log-probabilities of tokens, from hidden states and the head of a model, without whole logits."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.typing import ArrayLike
from jaxtyping import Array, Float32

from startrail_jax.blocks.shapes import EMPTY
from startrail_jax.blocks.softmax import cap_logits
from startrail_jax.errors import InputError
from startrail_jax.values import is_real, is_whole, real, whole
from startrail_jax.xla.varying import alike


class TokenLogprobs(NamedTuple):
    """What a model gives the tokens of a batch, in nats."""

    logprobs: Float32[Array, "batch seq"]
    """Log-probability of the target of each token; 0 without a target."""
    entropy: Float32[Array, "batch seq"]
    """Entropy of the distribution of the target; 0 without a target."""


class _Settings(NamedTuple):
    """What is static in a call."""

    temperature: float
    softcap: float | None
    tile: int


def token_logprobs(
    hidden: ArrayLike,
    head: ArrayLike,
    targets: ArrayLike,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    tile: int = 4096,
) -> TokenLogprobs:
    """Log-probability and entropy of the target of each token.

        z = softcap(hidden head) / temperature,    logprob = z[target] - log sum exp z

    The logits of all tokens exist for `tile` entries of the vocabulary at a time; the backward pass
    computes them again. No dimension of tokens is cut or gathered: under `jit`, the arrays may be
    sharded over batch and seq in any way, in any order of tokens, and in a `shard_map` they are
    those of one device. Shift the targets before tokens are sharded: the next token of the last one
    of a device lies elsewhere.

    Args:
        hidden: [batch, seq, width], the input of the head; float32, bfloat16 or float16.
        head: [width, vocab] in floats. It is cast to the dtype of `hidden`; its gradient is summed
            in float32.
        targets: integers [batch, seq] from 0 to vocab - 1, or -1 for none: what such a token holds
            changes nothing, also if it is NaN. The log-probability of a larger one is NaN.
        temperature: divisor of the logits: that of the sampler with whose log-probabilities these
            are compared.
        softcap: soft cap c of the logits, c * tanh(logits / c), as in Gemma 2; None for no cap.
        tile: entries of the vocabulary at a time. A device needs about 13 bytes for each of them
            and each of its tokens.

    Returns:
        A pair of float32 arrays [batch, seq], sharded as targets. Gradients flow through both to
        `hidden` and `head`.

    Raises:
        ValueError: if shapes or dtypes do not fit each other, or an option is no positive number.
    """
    call = _Settings(real(temperature), None if softcap is None else real(softcap), whole(tile))
    hidden, head, targets = (jnp.asarray(x) for x in (hidden, head, targets))
    _check(call, hidden, head, targets)
    # Each device has a gradient of the head of its own, which are summed outside.
    hidden, head, targets = alike(hidden, head, targets)
    numbers: Any = _numbers(call, hidden, head, targets)
    return TokenLogprobs(*numbers)


def _check(call: _Settings, hidden: Array, head: Array, targets: Array) -> None:
    shapes = f"hidden {list(hidden.shape)}, head {list(head.shape)}, targets {list(targets.shape)}"
    fits = hidden.ndim == 3 and head.ndim == 2 and hidden.shape[2] == head.shape[0]
    if not fits or hidden.shape[:2] != targets.shape or not head.size:
        raise InputError(
            "hidden must be [batch, seq, width], head [width, vocab] and targets [batch, seq]; got "
            f"{shapes}. A tied embedding [vocab, width] is the head embedding.T."
        )
    floats = all(jnp.issubdtype(x.dtype, jnp.floating) for x in (hidden, head))
    if not floats or not jnp.issubdtype(targets.dtype, jnp.integer):
        raise InputError(
            "hidden and head must be floats and targets integers; got "
            f"{hidden.dtype}, {head.dtype} and {targets.dtype}. Cast them."
        )
    for name in ("temperature", "softcap"):
        value = getattr(call, name)
        if value is not None and not (is_real(value) and value > 0):
            raise InputError(f"{name} must be a positive number; got {name}={value!r}.")
    if not is_whole(call.tile, 1):
        raise InputError(f"tile must be a positive integer; got tile={call.tile!r}.")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _numbers(call: _Settings, hidden: Array, head: Array, targets: Array) -> Any:
    return _forward(call, hidden, head, targets)[0]


def _forward(call: _Settings, hidden: Array, head: Array, targets: Array) -> Any:
    zeros, vocab = jnp.zeros_like(targets, jnp.float32), head.shape[1]
    saved, hidden = hidden, _with_target(hidden, targets)

    def add(so_far: Any, i: Array) -> tuple[Any, None]:
        """Over the entries so far: the largest logit; the sum of the exponentials of what logits
        are below it, and of these times that; and the logit of the target."""
        highest, total, weighted, own = so_far
        tile = _tile(call, hidden, head, i)
        place = targets - tile.start
        at = jnp.clip(place, 0, tile.z.shape[-1] - 1)[..., None]
        here = (targets >= tile.first) & (place < tile.z.shape[-1])
        own = own + jnp.where(here, jnp.take_along_axis(tile.z, at, -1)[..., 0], 0)
        higher = jnp.maximum(highest, jnp.where(tile.seen, tile.z, EMPTY).max(-1))
        shrinks = jnp.exp(highest - higher)
        below = jnp.where(tile.seen, tile.z - higher[..., None], EMPTY)
        powers = jnp.exp(below)
        weighted = shrinks * (weighted + total * (highest - higher)) + (powers * below).sum(-1)
        total = total * shrinks + powers.sum(-1)
        return (higher, total, weighted, own), None

    first = (zeros + EMPTY, zeros, zeros, zeros)
    (highest, total, weighted, own), _ = lax.scan(add, first, _tiles(call, head))
    lse = highest + jnp.log(total)
    own = jnp.where(targets < vocab, own, jnp.nan)
    entropy = jnp.log(total) - weighted / total
    out = jnp.where(targets >= 0, own - lse, 0), jnp.where(targets >= 0, entropy, 0)
    return out, (saved, head, targets, lse, entropy)


def _backward(call: _Settings, residuals: Any, cotangents: Any) -> Any:
    hidden, head, targets, lse, entropy = residuals
    hidden = _with_target(hidden, targets)
    of_own, of_entropy = (jnp.where(targets >= 0, x, 0)[..., None] for x in cotangents)
    like_head = _explicit(head)

    def add(so_far: Any, i: Array) -> tuple[Any, None]:
        dhidden, dhead = so_far
        tile = _tile(call, hidden, head, i)
        logprobs = tile.z - lse[..., None]
        p = jnp.where(tile.seen, jnp.exp(logprobs), 0)
        is_own = tile.seen & (targets[..., None] == tile.entries)
        dz = of_own * (is_own - p) - of_entropy * p * (logprobs + entropy[..., None])
        dz = (dz * tile.slope).astype(hidden.dtype)
        dhidden = dhidden + _product("btv,wv->btw", dz, tile.head, _explicit(hidden))
        dpart = _product("btw,btv->wv", hidden, dz, like_head)
        before = lax.dynamic_slice_in_dim(dhead, tile.start, dz.shape[-1], 1)
        dhead = lax.dynamic_update_slice_in_dim(dhead, before + dpart, tile.start, 1)
        return (dhidden, dhead), None

    first = (jnp.zeros_like(hidden, jnp.float32), jnp.zeros_like(head, jnp.float32))
    (dhidden, dhead), _ = lax.scan(add, first, _tiles(call, head))
    return _with_target(dhidden, targets).astype(hidden.dtype), dhead.astype(head.dtype), None


_numbers.defvjp(_forward, _backward)


def _tiles(call: _Settings, head: Array) -> Array:
    return jnp.arange(-(-head.shape[1] // min(call.tile, head.shape[1])))


class _Tile(NamedTuple):
    """Some neighbouring entries of the vocabulary."""

    head: Array
    """[width, size] in the dtype of hidden states."""
    z: Array
    """The logits, [batch, seq, size]."""
    slope: Array | float
    """Their derivative by hidden @ head."""
    start: Array
    """Number of the first entry."""
    first: Array
    """Number of the first entry that no tile before has."""
    entries: Array
    """Numbers of all, [1, 1, size]."""
    seen: Array
    """Which of the entries no tile before has, [1, 1, size]."""


def _tile(call: _Settings, hidden: Array, head: Array, i: Array) -> _Tile:
    size = min(call.tile, head.shape[1])
    start = jnp.minimum(i * size, head.shape[1] - size)  # The last one begins among those before.
    part = lax.dynamic_slice_in_dim(head, start, size, 1).astype(hidden.dtype)
    z, slope = cap_logits(_product("btw,wv->btv", hidden, part, _explicit(hidden)), call.softcap)
    entries = (start + jnp.arange(size))[None, None]
    t = call.temperature
    slope = 1 / t if slope is None else slope / t
    return _Tile(part, z / t, slope, start, i * size, entries, entries >= i * size)


def _product(formula: str, x: Array, y: Array, sharding: Any) -> Array:
    return jnp.einsum(
        formula,
        x,
        y,
        precision="highest",
        preferred_element_type=jnp.float32,
        out_sharding=sharding,
    )


def _explicit(x: Array) -> Any:
    """The sharding of an array on Explicit axes; None for the compiler's choice on others."""
    sharding: Any = jax.typeof(x).sharding
    return sharding if AxisType.Explicit in sharding.mesh.axis_types else None


def _with_target(x: Array, targets: Array) -> Array:
    return jnp.where(targets[..., None] >= 0, x, 0)
