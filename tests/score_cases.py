"""Attention with scores and dropout: one compiled program, and what the oracle says of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import oracle
from attention_cases import QUICK, Result
from startrail_jax.scores import Dropout

RATE = 0.3
"""Of the dropout."""


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=QUICK)
def solve(attention, shared, query, key, value, dout, dlse, segment_ids, learnt, rng, prefix=None):
    attend = functools.partial(
        attention,
        segment_ids=segment_ids,
        return_lse=True,
        dropout_rng=rng,
        dropout_rate=RATE,
        broadcast_dropout=shared,
        deterministic=rng is None,
        prefix_lengths=prefix,
    )
    (out, lse), vjp = jax.vjp(lambda *x: attend(*x[:3], **x[3]), query, key, value, learnt)
    *gradients, of_learnt = vjp((dout, dlse))
    return Result(out, lse, *gradients), of_learnt


def draw_learnt(names, own, problem):
    """Sinks, slopes and bias in natural order, as far as they are named."""
    rng, (batch, tokens, heads, _) = np.random.default_rng(1), problem.query.shape
    learnt = {
        "sinks": np.linspace(-1, 2, heads),
        "slopes": 2.0 ** np.linspace(-4, 0, heads),
    }
    if own:
        shape = (batch if own[0] else 1, heads if own[1] else 1, tokens, problem.key.shape[1])
        learnt["bias"] = rng.normal(size=shape)
    return {name: np.float32(x) for name, x in learnt.items() if name in names}


def factors_of(problem, key, shared):
    """What dropout multiplies the probabilities by, from the positions of one device."""
    (batch, tokens, heads, _), keys = problem.query.shape, problem.key.shape[1]
    words = jax.random.bits(key, (2,), jnp.uint32)
    dropout = Dropout(words=words, first_row=0, first_head=0, rate=RATE, shared=shared)
    return np.asarray(dropout.keeps(batch, heads, jnp.arange(tokens), jnp.arange(keys))) / (
        1 - RATE
    )


def put_learnt(attention, learnt):
    """The same on the mesh: the bias in the order of the layout."""

    def put(name, x):
        if name == "bias":
            return attention.shard_bias(x)
        return jax.device_put(x, NamedSharding(attention.mesh, P()))

    return {name: put(name, x) for name, x in learnt.items()}


def of_oracle(problem, learnt, **told):
    """The oracle's Result, and its gradients of what is learnt."""
    inputs = problem.query, problem.key, problem.value
    told = dict(told, **learnt, segment_ids=problem.segment_ids)
    arguments = *inputs, problem.dout, problem.dlse
    wanted = Result(*oracle.attention(*inputs, **told), *oracle.gradients(*arguments, **told))
    found = {}
    if "sinks" in learnt:
        found["sinks"] = oracle.sink_gradient(*arguments, **told)
    if "slopes" in learnt:
        found["slopes"] = oracle.slope_gradient(*arguments, **told)
    if "bias" in learnt:
        whole = oracle.bias_gradient(*arguments, **told)
        shared = tuple(dim for dim in (0, 1) if learnt["bias"].shape[dim] == 1)
        found["bias"] = whole.sum(shared, keepdims=True)
    return wanted, found
