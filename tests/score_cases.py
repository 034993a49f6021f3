"""Attention with scores and dropout: one compiled program, and what the oracle says of it."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import oracle
import startrail_jax as st
from attention_cases import (
    FLOAT32_ERROR,
    NARROW_ERROR_RATIO,
    QUICK,
    Case,
    Result,
    assert_close,
    natural,
    place,
    reference,
    relative_error,
)
from startrail_jax.blocks.scores import Dropout

RATE, SOFTCAP = 0.3, 1.5
"""Of the dropout, and of the logits."""

# Errors in bfloat16 over those of jax.nn, where more than NARROW_ERROR_RATIO is allowed. `delta` is
# of outputs that are rounded, as in FlashAttention, which counts more for rows of few keys.
NARROW_RATIOS = dict(dq=1.5, dk=1.5, bias=1.75)
# Of slopes and sinks, in bfloat16: one number a head, in which rounded deltas of all rows add up.
NARROW_SUM_ERROR = 4 * 2.0**-8

PREFIX = st.masks.Prefix()
# Name -> a mask whose prefix has a length for each row, and what it shows, given the lengths.
OF_ROWS = {
    "prefixes": (PREFIX, lambda i, j, n: (j < n) | (j <= i)),
    "chunked prefixes": (
        PREFIX & st.masks.Chunked(10),
        lambda i, j, n: ((j < n) | (j <= i)) & (i // 10 == j // 10),
    ),
    "prefixes or window": (
        PREFIX | st.masks.Window(2, 3),
        lambda i, j, n: (j < n) | (j <= i + 3),
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreCase:
    """A problem and a setting, and what a call gives beside query, key and value."""

    case: Case
    of_rows: str | None = None
    """A mask of `OF_ROWS` in the place of the case's."""
    softcap: bool = False
    sinks: bool = False
    slopes: bool = False
    bias: tuple[bool, bool] | None = None
    """Whether each row and each head has its own; None for no bias."""
    dropout: bool | None = None
    """Whether all rows and heads drop the same; None for no dropout."""

    @functools.cached_property
    def attention(self) -> st.Attention:
        attention = self.case.attention
        if self.softcap:
            attention = dataclasses.replace(attention, softcap=SOFTCAP)
        if self.of_rows is None:
            return attention
        mask, _ = OF_ROWS[self.of_rows]
        return dataclasses.replace(attention, mask=mask, causal=None, layout=self.case.layout)

    @functools.cached_property
    def learnt(self) -> dict:
        """Sinks, slopes and bias in natural order."""
        names = {name for name in ("sinks", "slopes", "bias") if getattr(self, name)}
        return draw_learnt(names, self.bias, self.case.problem)

    @property
    def rng(self):
        """The key of the dropout."""
        return None if self.dropout is None else jax.random.key(5)

    @property
    def prefix_lengths(self):
        """Of each row, another one; the first row is causal."""
        return np.int32(np.arange(len(self.case.problem.query)) * 5 % self.case.seq_len)

    @functools.cached_property
    def told(self) -> dict:
        """What the oracle takes beside segment ids and what is learnt."""
        told = dict(self.case.mask_arguments)
        if self.of_rows is not None:
            (_, rule), lengths = OF_ROWS[self.of_rows], self.prefix_lengths[:, None, None]
            told = {"rule": lambda i, j: rule(i[None], j[None], lengths)}
        if self.softcap:
            told["softcap"] = SOFTCAP
        if self.dropout is not None:
            told["factors"] = factors_of(self.case.problem, self.rng, self.dropout)
        return told

    def solve(self, arguments, learnt):
        """Result and gradients of what is learnt, on the mesh of the case."""
        prefix = None
        if self.of_rows is not None:
            rows = NamedSharding(self.attention.mesh, P(self.attention.sequence_spec[0]))
            prefix = jax.device_put(self.prefix_lengths, rows)
        return solve(self.attention, bool(self.dropout), *arguments, learnt, self.rng, prefix)

    def bounds(self, wanted, of_wanted) -> dict[str, float]:
        """The greatest error allowed for each part of a Result and each gradient."""
        exact = dict(wanted.items()) | of_wanted
        bounds = dict.fromkeys(exact, FLOAT32_ERROR)
        if self.case.dtype == "float32":
            return bounds
        theirs, of_theirs = jax_nn_with_scores(self.case.problem, self.learnt, **self.told)
        for name, found in (dict(theirs.items()) | of_theirs).items():
            if name in ("slopes", "sinks"):
                bounds[name] = NARROW_SUM_ERROR
            elif name != "lse":
                ratio = NARROW_RATIOS.get(name, NARROW_ERROR_RATIO)
                bounds[name] = ratio * relative_error(found, exact[name])
        return bounds

    def __str__(self) -> str:
        """Says only what is not the default."""
        others = [f for f in dataclasses.fields(self) if f.name != "case"]
        given = {f.name: getattr(self, f.name) for f in others}
        named = [
            f"{name}={value}" if isinstance(value, str | tuple) else name
            for name, value in given.items()
            if value not in (None, False) or (name == "dropout" and value is not None)
        ]
        return "-".join([str(self.case), *named]).replace(" ", "")


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
    wanted = reference(problem, **told, **learnt)
    told = dict(told, **learnt, segment_ids=problem.segment_ids)
    arguments = *inputs, problem.dout, problem.dlse
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


def jax_nn_with_scores(problem, learnt, *, softcap=None, factors=None, **mask):
    """What jax.nn makes of the input, with scores where it would have them, and its gradients."""
    seen = oracle.visible(
        problem.query.shape[1], problem.key.shape[1], segment_ids=problem.segment_ids, **mask
    )
    # Rows that see no key: ours are 0, which jax.nn's softmax is not.
    rows = seen.any(-1)[:, :, None, None]
    dout = np.where(rows, problem.dout, np.zeros_like(problem.dout))
    inputs = problem.query, problem.key, problem.value, learnt
    out, *gradients, of_learnt = _jax_nn(seen[:, None, None], factors, softcap, inputs, dout)
    out = np.where(rows, out, np.zeros_like(out))
    return Result(out, np.zeros(()), *map(np.asarray, gradients)), of_learnt


@functools.partial(jax.jit, static_argnums=2, compiler_options=QUICK)
def _jax_nn(seen, factors, softcap, inputs, dout):
    out, vjp = jax.vjp(functools.partial(_attend_as_jax_nn, seen, factors, softcap), *inputs)
    return out, *vjp(dout)


def _attend_as_jax_nn(seen, factors, softcap, query, key, value, learnt):
    """The steps of jax.nn.dot_product_attention, and its roundings, with the scores between."""
    (batch, tokens, heads, head_dim), kv_heads = query.shape, key.shape[2]

    def per_head(x):
        x = jnp.broadcast_to(x, (x.shape[0], heads, *x.shape[2:]))
        return x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:])

    grouped = query.reshape(batch, tokens, kv_heads, -1, head_dim)
    logits = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=jnp.float32)
    logits = logits * head_dim**-0.5
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    if "slopes" in learnt:
        far = np.float32(np.abs(np.arange(tokens)[:, None] - np.arange(tokens)))[None, None, None]
        logits = logits - per_head(learnt["slopes"][None, :, None, None]) * far
    if "bias" in learnt:
        logits = logits + per_head(learnt["bias"])
    logits = jnp.where(seen, logits, np.finfo(np.float32).min)
    if "sinks" in learnt:
        sinks = per_head(learnt["sinks"][None, :, None, None])
        logits = jnp.concatenate(
            [logits, jnp.broadcast_to(sinks, (*logits.shape[:-1], 1))], axis=-1
        )
    weights = jax.nn.softmax(logits, axis=-1)[..., : key.shape[1]].astype(key.dtype)
    if factors is not None:
        weights = weights * per_head(jnp.asarray(factors, key.dtype))
    out = jnp.einsum("bkgts,bskv->btkgv", weights, value)
    return out.reshape(batch, tokens, heads, -1)


def check(scored: ScoreCase) -> None:
    """What every setting must do: match the oracle, rerun to the same bits, shard as the input."""
    case, attention, problem = scored.case, scored.attention, scored.case.problem
    arguments, learnt = place(attention, problem), put_learnt(attention, scored.learnt)
    result, of_learnt = scored.solve(arguments, learnt)
    chex.assert_trees_all_equal(scored.solve(arguments, learnt), (result, of_learnt))
    wanted, of_wanted = of_oracle(problem, scored.learnt, **scored.told)
    bounds = scored.bounds(wanted, of_wanted)
    assert_close(natural(attention, result), wanted, bounds)
    for name, expected in of_wanted.items():
        found = of_learnt[name]
        if case.axis_type == "explicit":
            assert found.sharding.is_equivalent_to(learnt[name].sharding, found.ndim), name
        if name == "bias":
            for axis in (2, 3):
                found = attention.layout.unpermute(np.asarray(found), axis=axis)
        error = relative_error(found, expected)
        assert error <= bounds[name], (name, error, bounds[name])
