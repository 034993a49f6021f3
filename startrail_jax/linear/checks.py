"""What linear attention requires of its inputs, and the messages that say so."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from startrail_jax.calls.sharding import Sharded, int32_ids
from startrail_jax.calls.trees import BOTH_IDS, int32_ends
from startrail_jax.calls.validation import DTYPES
from startrail_jax.devices.axes import device_kind
from startrail_jax.devices.degrees import Degrees
from startrail_jax.errors import InputError, UnsupportedError
from startrail_jax.linear.block import LinearCall, LinearRequest
from startrail_jax.linear.forks import Forked
from startrail_jax.linear.rules import RULES, StateRule
from startrail_jax.linear.vjp import BLOCKS
from startrail_jax.tokens.trees import branch_levels


def check_inputs(attention: Sharded, rule: StateRule, arrays: Any, *, whole: bool = True) -> int:
    """The number of states of a row; raises a ValueError unless arrays fit each other."""
    query, key, value, decay, beta, state, ids = arrays
    inputs = dict(query=query, key=key, value=value)
    shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in inputs.items())
    if {x.ndim for x in inputs.values()} != {4} or not (
        query.shape[:2] == key.shape[:2] == value.shape[:2]
        and query.shape[3] == key.shape[3]
        and all(x.size for x in inputs.values())
    ):
        raise InputError(
            "query and key must be [batch, seq, heads, key_dim] and value [batch, seq, heads, "
            f"value_dim], of one batch, seq and key_dim; got {shapes}. Correct the odd one out."
        )
    dtypes = {str(x.dtype) for x in inputs.values()}
    if len(dtypes) > 1 or not dtypes <= {*DTYPES}:
        raise InputError(
            f"query, key and value must have one dtype of {DTYPES}; got "
            f"{', '.join(sorted(dtypes))}. Cast them."
        )
    batch, length, _, key_dim = query.shape
    rows = (key_dim,) if rule.by_channel else ()
    gates = {name: x for name, x in (("decay", decay), ("beta", beta)) if x is not None}
    for name, x in gates.items():
        rest = rows if name == "decay" else ()
        fits = x.ndim == 3 + len(rest) and x.shape == (batch, length, x.shape[2], *rest)
        if not fits or not jnp.issubdtype(x.dtype, jnp.floating):
            form = ", ".join(map(str, (batch, length, "heads", *rest)))
            raise InputError(
                f"{name} must be floats [{form}] under rule={rule.name!r}; got "
                f"{x.dtype} {list(x.shape)}."
            )
    heads = check_state_heads(
        attention.degrees, {name: x.shape[2] for name, x in (inputs | gates).items()}
    )
    if state is not None:
        form = (batch, heads, key_dim, value.shape[3])
        if state.shape != form or state.dtype != jnp.float32:
            raise InputError(
                "initial_state must be float32 [batch, heads, key_dim, value_dim] = "
                f"{list(form)}; got {state.dtype} {list(state.shape)}."
            )
    if whole:
        check_rows(attention, (batch, length), ids)
    else:
        attention.check_batch(batch)
    return heads


def check_state_heads(degrees: Degrees, counts: dict[str, int]) -> int:
    """The largest number of heads; raises a ValueError unless all fit it and the mesh."""
    heads = max(counts.values())
    if any(heads % x for x in counts.values()) or heads % degrees.tensor:
        raise InputError(
            "The heads of each array must divide the largest number of heads, and this must be "
            f"divisible by tensor; got heads {counts}, tensor={degrees.tensor}."
        )
    return heads


def check_rows(attention: Sharded, shape: tuple[int, ...], ids: Array | None) -> None:
    """Raises a ValueError unless arrays [batch, seq, ...] fit the mesh, and ids fit them."""
    if ids is not None and ids.shape != shape:
        raise InputError(
            f"segment_ids must be [batch, seq] = {list(shape)}; got {list(ids.shape)}. "
            "Linear attention has no keys of its own length, and takes no pair."
        )
    attention.check_batch(shape[0])
    attention.layout.check_length(shape[1])


def ids_of_call(
    attention: Sharded,
    rule: StateRule,
    segment_ids: Any,
    visible_until: Any,
    levels: Any,
    shape: tuple[int, ...] | None,
    **others: Any,
) -> tuple[int, Any]:
    """The levels of a call, 0 for documents, and its segment ids or `visible_until`, after all
    checks. `shape` is that of whole rows; None for shards, whose values are not checked. `others`
    are arguments of the call that do not go with trees."""
    if visible_until is None:
        marked = attention.mark_padding(segment_ids)
        if shape is None or marked is None:
            return 0, marked
        return 0, jnp.asarray(int32_ids(marked))
    _check_forks(rule, segment_ids, levels, others)
    if shape is None:
        return levels, visible_until

    def check(ends: np.ndarray) -> None:
        if (needed := branch_levels(ends)) > levels:
            raise InputError(
                "levels must be at least startrail_jax.branch_levels(visible_until) = "
                f"{needed}; got levels={levels}."
            )

    return levels, jnp.asarray(int32_ends(attention, visible_until, shape, check))


def _check_forks(rule: StateRule, segment_ids: Any, levels: Any, others: dict[str, Any]) -> None:
    """Raises unless rows of trees go with the rule and with what else a call is given."""
    if segment_ids is not None:
        raise InputError(BOTH_IDS)
    if isinstance(levels, bool) or not isinstance(levels, int) or levels < 1:
        raise InputError(
            f"levels must be a positive integer; got levels={levels!r}. Pass "
            "startrail_jax.branch_levels(visible_until)."
        )
    for name, given in others.items():
        if given is not None and given is not False:
            raise UnsupportedError(
                f"visible_until does not go with {name}, as a row of trees has no one state; got "
                f"both. Leave {name} out."
            )
    if rule not in RULES.values():
        raise UnsupportedError(
            f"visible_until goes with the rules {(*RULES,)}; got rule={rule!r}. Use segment_ids."
        )


def check_served(attention: Sharded, call: LinearCall, value: Array, key_dim: int) -> None:
    """Raises a NotImplementedError unless the backend serves a call."""
    platform, capability = device_kind(attention.mesh)
    rule = call.rule.rule if isinstance(call.rule, Forked) else call.rule
    request = LinearRequest(
        platform=platform,
        capability=capability,
        rule=rule.name,
        trees=call.levels > 0,
        dtype=str(value.dtype),
        key_dim=key_dim,
        value_dim=value.shape[3],
    )
    refusal = BLOCKS[call.backend].refusal(request)
    if refusal is not None:
        raise UnsupportedError(
            f"backend={call.backend!r} does not serve this: {refusal}. Use backend='xla', "
            "which serves everything."
        )


def check_conv(x: Array, kernel: Array, initial: Any) -> Array:
    """What stands before the first token; raises a ValueError unless all fit each other."""
    form = (x.shape[0], max(len(kernel) - 1, 0), *x.shape[2:]) if x.ndim in (3, 4) else ()
    first = jnp.zeros(form, x.dtype) if initial is None else jnp.asarray(initial)
    if not all(jnp.issubdtype(y.dtype, jnp.floating) for y in (x, kernel, first)):
        raise InputError(
            f"x, kernel and initial must be floats; got x {x.dtype}, kernel {kernel.dtype}, "
            f"initial {first.dtype}. Cast them."
        )
    if not form or kernel.shape[1:] != x.shape[2:] or not kernel.size or first.shape != form:
        raise InputError(
            "x must be [batch, seq, ...] with one or two dimensions of channels, kernel [width, "
            "...] and initial [batch, width - 1, ...] with the same ones; got x "
            f"{list(x.shape)}, kernel {list(kernel.shape)}, initial {list(first.shape)}."
        )
    return first.astype(x.dtype)
