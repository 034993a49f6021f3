"""Checks of score arguments: slopes, sinks, bias, dropout."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jaxtyping import Array

from startrail_jax.blocks.scores import NAMES, Dropout, Scores
from startrail_jax.calls.sharding import Sharded
from startrail_jax.calls.validation import check_shardings, check_static
from startrail_jax.devices.degrees import SEQUENCE_ROLES
from startrail_jax.errors import InputError, UnsupportedError
from startrail_jax.masks import Mask
from startrail_jax.rings.schedule import Schedule
from startrail_jax.rings.score_units import ScoreInputs
from startrail_jax.xla.varying import varying_axes

_ARGUMENTS = {"words": "dropout_rng", "prefix": "prefix_lengths"}
"""Field of what is given -> the argument of a call that it comes from, where that is another."""


def check_scores(
    schedule: Schedule, scores: Sequence[str], query_tokens: int, key_tokens: int
) -> None:
    """Raises what a call would that gives these scores."""
    if isinstance(scores, str):
        raise InputError(
            f"scores must be a tuple of names; got scores={scores!r}. Write scores=({scores!r},)."
        )
    for name in scores:
        if name not in NAMES:
            raise InputError(f"scores must be of {NAMES}; got {name!r}. Name what calls give.")
    if "slopes" in scores:
        _check_distances(query_tokens, key_tokens)
    if "bias" in scores:
        _check_rows_stay(schedule)


def check_per_head(name: str, values: Any, heads: int, where: str = ", over all devices") -> Array:
    """The sinks or the slopes as an array."""
    array = jnp.asarray(values)
    if array.shape == (heads,) and jnp.issubdtype(array.dtype, jnp.floating):
        return array
    raise InputError(
        f"{name} must be floats [heads] = [{heads}]; got {array.dtype} {list(array.shape)}. Give "
        f"one for each query head{where}."
    )


def given_to_call(
    attention: Sharded,
    schedule: Schedule,
    inputs: tuple[Array, ...],
    **given: Any,
) -> tuple[ScoreInputs, ScoreInputs]:
    """What a call gives beside query, key, value and segment ids, checked; and the specs of it."""
    found = check_given(schedule, inputs[0], inputs[1], **given)
    parts, tree = jax.tree_util.tree_flatten_with_path(found)
    fields = {str(path[-1].name): x for path, x in parts}
    arrays: dict[str, Any] = {_ARGUMENTS.get(name, name): x for name, x in fields.items()}
    specs: dict[str, Any] = dict.fromkeys(arrays, PartitionSpec())
    if "bias" in arrays:
        specs["bias"] = attention.bias_spec(*arrays["bias"].shape[:2])
    if "prefix_lengths" in arrays:
        specs["prefix_lengths"] = PartitionSpec(attention.sequence_spec[0])
    check_shardings(list(arrays), list(arrays.values()), list(specs.values()), attention.mesh)
    return found, tree.unflatten(specs.values())


def given_to_shards(schedule: Schedule, query: Array, key: Array, **given: Any) -> ScoreInputs:
    """What `Attention.local` gives beside its shards; a bias has the columns of all keys."""
    shape, ranks = list(key.shape), schedule.num_shards * schedule.head.degree
    shape[1] *= ranks
    found = check_given(
        schedule,
        query,
        jax.ShapeDtypeStruct(shape, key.dtype),
        seq_len=query.shape[1] * ranks,
        where=" of this device",
        **given,
    )
    if found.scores is not None and found.scores.dropout is not None:
        _check_same_key(schedule, found.scores.dropout.words)
    return found


def check_given(
    schedule: Schedule,
    query: Any,
    key: Any,
    *,
    slopes: Any = None,
    bias: Any = None,
    sinks: Any = None,
    prefix_lengths: Any = None,
    dropout_rng: Any = None,
    dropout_rate: Any = 0.0,
    broadcast_dropout: bool = False,
    deterministic: bool = False,
    seq_len: int | None = None,
    where: str = ", over all devices",
) -> ScoreInputs:
    """What is given for queries and keys (arrays, or shapes of such), as far as it is. Whole rows
    have `seq_len` query tokens; None for those of `query`."""
    given: dict[str, Any] = {}
    check_static(deterministic=deterministic, broadcast_dropout=broadcast_dropout)
    if slopes is not None:
        _check_distances(query.shape[1] if seq_len is None else seq_len, key.shape[1])
        slopes = check_per_head("slopes", slopes, query.shape[2], where)
        given["slopes"] = slopes.astype(jnp.float32)
    if bias is not None:
        given["bias"] = _check_bias(schedule, jnp.asarray(bias), query, key)
    if rate := _check_rate(0.0 if deterministic else dropout_rate):
        words = _words(dropout_rng, rate)
        given["dropout"] = Dropout(words=words, rate=rate, shared=bool(broadcast_dropout))
    if sinks is not None:
        sinks = check_per_head("sinks", sinks, query.shape[2], where).astype(jnp.float32)
    prefix = _check_prefix(schedule.mask, prefix_lengths, query)
    return ScoreInputs(Scores(**given) if given else None, prefix, sinks)


def _check_same_key(schedule: Schedule, words: Array) -> None:
    names = [name for role in SEQUENCE_ROLES for name in getattr(schedule, role).names]
    differs = [name for name in names if name in varying_axes(words)]
    if differs:
        raise InputError(
            "dropout_rng must be the same key on all devices that share a sequence, for gradients "
            f"to be right; got one that varies over {differs}. Fold no index of these axes into "
            "it, as rows, heads and positions already give each device entries of its own, and let "
            "it enter shard_map by the spec P()."
        )


def _check_prefix(mask: Mask, lengths: Any, query: Any) -> Array | None:
    if (lengths is not None) != mask.per_row:
        given = "no prefix_lengths" if lengths is None else "prefix_lengths"
        raise InputError(
            "prefix_lengths go with masks.Prefix() without a length, and the other way round; got "
            f"{given} and mask={mask}. Give both or neither."
        )
    if lengths is None:
        return None
    array = jnp.asarray(lengths)
    if array.shape != query.shape[:1] or not jnp.issubdtype(array.dtype, jnp.integer):
        raise InputError(
            f"prefix_lengths must be integers [batch] = [{query.shape[0]}]; got {array.dtype} "
            f"{list(array.shape)}. Give the tokens of the prefix of each row."
        )
    # Traced lengths are unknown: those below 0 show what 0 does, those beyond a row all of it.
    is_traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(lengths))
    if not is_traced and getattr(lengths, "is_fully_addressable", True):
        values = np.asarray(lengths)
        wrong = np.flatnonzero((values < 0) | (values > query.shape[1]))
        if wrong.size:
            raise InputError(
                f"prefix_lengths must be from 0 to {query.shape[1]}, the tokens of a row; got "
                f"{values[wrong[0]]} for row {wrong[0]}. Count the tokens of the prefix, without "
                "padding."
            )
    return array.astype(jnp.int32)


def _check_distances(query_tokens: int, key_tokens: int) -> None:
    if query_tokens != key_tokens:
        raise UnsupportedError(
            "slopes need queries and keys of the same tokens, between which there is a distance; "
            f"got {query_tokens} queries and {key_tokens} keys. Give a bias in their place."
        )


def _check_bias(schedule: Schedule, bias: Array, query: Any, key: Any) -> Array:
    batch, tokens, heads, _ = query.shape
    fits = bias.ndim == 4 and bias.shape[2:] == (tokens, key.shape[1])
    fits = fits and bias.shape[0] in (1, batch) and bias.shape[1] in (1, heads)
    if not (fits and jnp.issubdtype(bias.dtype, jnp.floating)):
        way_out = (
            "Its queries and its keys are in the order of the layout: attention.shard_bias brings "
            "them there."
        )
        if not jnp.issubdtype(bias.dtype, jnp.floating):
            way_out = (
                "The fourth argument is a bias: name a mask of keys mask=, and ids of documents "
                "segment_ids=."
            )
        raise InputError(
            "bias must be floats [1 or batch, 1 or heads, query, key] = "
            f"[1 or {batch}, 1 or {heads}, {tokens}, {key.shape[1]}]; got {bias.dtype} "
            f"{list(bias.shape)}. {way_out}"
        )
    _check_rows_stay(schedule)
    return bias


def _check_rows_stay(schedule: Schedule) -> None:
    if schedule.backward == "query" and schedule.ring.degree > 1:
        raise UnsupportedError(
            "A bias needs queries that stay on their devices, as its rows would have to travel "
            f"with them; got backward='query' and ring={schedule.ring.degree}. Use "
            "backward='kv' or 'auto', or degrees with ring=1."
        )


def _check_rate(rate: Any) -> float:
    if isinstance(rate, jax.Array):
        raise UnsupportedError(
            "dropout_rate must be a Python number, as it is compiled into the program; got an "
            f"array {jax.typeof(rate)}. Make it a static argument of your jit."
        )
    if isinstance(rate, bool) or not isinstance(rate, numbers.Real) or not 0 <= float(rate) < 1:
        raise InputError(
            "dropout_rate must be a number of at least 0 and below 1; got "
            f"dropout_rate={rate!r}. 0 drops nothing."
        )
    return float(rate)


def _words(key: Any, rate: float) -> Array:
    """Two words of randomness from a key, whatever its generator."""
    if key is None:
        raise InputError(
            f"dropout_rate={rate} needs a key; got dropout_rng=None. Pass "
            "dropout_rng=jax.random.key(...), another one for each layer and step, or "
            "deterministic=True."
        )
    try:
        return jax.random.bits(key, (2,), jnp.uint32)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"dropout_rng must be one key of jax.random; got {_shown(key)} ({error}). Pass "
            "jax.random.key(seed)."
        ) from error


def _shown(value: Any) -> str:
    return f"an array {jax.typeof(value)}" if isinstance(value, jax.Array) else repr(value)
