"""One attention problem on one setting: its inputs, one compiled program, and how far off it is."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, count, product
from random import Random

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import oracle
import startrail_jax as st

# Relative L2 error of out, lse, dq, dk, dv against the float64 oracle on the same (rounded) inputs:
# a bound for float32 (and for lse, which is float32 in every dtype), and for the narrow dtypes a
# multiple of the error that jax.nn.dot_product_attention makes in that dtype.
FLOAT32_ERROR = 2e-6
NARROW_ERROR_RATIO = 1.25
# jax.nn does not serve float16 on a CPU: held against bfloat16, of three bits less.
FLOAT16_IS_FINER = 8

# Most of the time goes into LLVM, and the programs of the tests run once or twice.
QUICK = {"xla_backend_optimization_level": 0}

# Name -> (causal, window, how segment ids are drawn).
MASKS = {
    "full": (False, None, None),
    "causal": (True, None, None),
    "window": (True, 17, None),
    "packed": (True, None, "documents"),
    "packed_window": (True, 11, "documents"),
    "padding": (True, None, "padding"),
    "padding_full": (False, None, "padding"),
    "cross": (False, None, "cross"),
    "cross_full": (False, None, None),
}

# Name -> a mask, and below what it shows, written down once more.
_M = st.masks
MORE_WINDOWS = ("wide window", "two keys", "own key")
"""Windows whose kernel calls differ, beside `own_window`."""
PATTERNS = {
    "two_sided": _M.Window(5, 3),
    "right_only": _M.Window(None, 4),
    "left_only": _M.Window(2, None),
    "own_window": _M.Window(7, 0),
    "wide window": _M.Window(12, 0),
    "two keys": _M.Window(1, 0),
    "own key": _M.Window(0, 0),
    "chunked": _M.Chunked(5),
    "block_causal": _M.BlockCausal(7),
    "prefix": _M.Prefix(9),
    "sinks_only": _M.Sinks(3),
    "causal_chunked": _M.Chunked(6) & _M.Causal(),
    "sinks": _M.Causal() & (_M.Window(4, 0) | _M.Sinks(2)),
    "prefix_or_window": _M.Prefix(4) | _M.Window(0, 3),
    "even_keys": _M.Rule(lambda query, key: (key <= query) & ((query - key) % 3 != 1)),
    "bounded_rule": _M.Rule(
        lambda query, key: key + 6 <= query,
        lambda q0, q1, k0, k1: (k0 + 6 <= q1, k1 + 6 <= q0),
    ),
}
DENSE = {
    "two_sided": lambda i, j: (i - 5 <= j) & (j <= i + 3),
    "right_only": lambda i, j: j - i < 5,
    "left_only": lambda i, j: i - j < 3,
    "own_window": lambda i, j: (i - j < 8) & (i - j >= 0),
    "wide window": lambda i, j: (i - j < 13) & (i - j >= 0),
    "two keys": lambda i, j: (i - j < 2) & (i - j >= 0),
    "own key": lambda i, j: i == j,
    "chunked": lambda i, j: np.floor(i / 5) == np.floor(j / 5),
    "block_causal": lambda i, j: j < (np.floor(i / 7) + 1) * 7,
    "prefix": lambda i, j: np.where(j < 9, True, i - j >= 0),
    "sinks_only": lambda i, j: (j < 3) | (i < 0),
    "causal_chunked": lambda i, j: (j >= np.floor(i / 6) * 6) & (j <= i),
    "sinks": lambda i, j: (j <= i) & ((i - j < 5) | (j < 2)),
    "prefix_or_window": lambda i, j: (j < 4) | (j <= i + 3) & (j >= i) | (j <= i),
    "even_keys": lambda i, j: (j <= i) & ((i - j) % 3 != 1),
    "bounded_rule": lambda i, j: i - j >= 6,
}

MASKS |= {name: (None, None, None) for name in PATTERNS}
MASKS |= {f"packed {name}": (None, None, "documents") for name in PATTERNS}

# As many key heads as query heads, a quarter of them, one.
HEADS = ("equal", "grouped", "single")


def or_causal(options):
    """The options of an attention, which is causal if they do not say what it sees."""
    told = any(options.get(name) is not None for name in ("causal", "window", "mask"))
    return options if told else options | {"causal": True}


def make_attention(degrees, axis_type="auto", **options):
    """On the first devices; causal if the options do not say what it sees."""
    devices = jax.devices("cpu")[: degrees.num_devices]
    return st.Attention(st.make_mesh(degrees, axis_type, devices), **or_causal(options))


def host_mesh(degrees, axis_type="explicit"):
    """A mesh as other programs have it, with one axis for the sequence."""
    kind = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}[axis_type]
    shape = (degrees.data, degrees.sequence, degrees.tensor)
    devices = jax.devices("cpu")[: degrees.num_devices]
    return jax.make_mesh(shape, HOST_AXES, (kind,) * 3, devices=devices)


def one_axis(degrees):
    """The options of an attention on `host_mesh`."""
    data, axis, tensor = HOST_AXES
    degrees = dataclasses.replace(degrees, data=1, tensor=1)
    return {"axis": axis, "degrees": degrees, "axis_names": {"data": data, "tensor": tensor}}


HOST_AXES = ("fsdp", "context", "model")


# Options of an attention that `st.communication` takes too.
OPTIONS = ("published", "backward", "inner", "head_chunks", "keep_gathered", "gradient_dtype")
OPTIONS += ("exchange", "balance")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A problem (mask, heads, length, dtype) and a setting (everything else)."""

    degrees: st.Degrees
    mask: str = "causal"
    heads: str = "equal"
    layout: str | None = None
    backward: str = "auto"
    published: bool = False
    inner: int = 1
    head_chunks: int = 1
    keep_gathered: bool = False
    gradient_dtype: str = "float32"
    exchange: str = "rings"
    balance: str = "layout"
    axis_type: str = "explicit"
    one_axis: bool = False
    """Whether one axis of a mesh that others made plays all sequence roles."""
    tokens: int = 6
    """Tokens of one sequence shard."""
    dtype: str = "float32"
    backend: str = "auto"
    segments: str | None = None
    """How segment ids are drawn, where the mask does not say it."""
    seed: int = 0

    @property
    def num_heads(self) -> tuple[int, int]:
        """Query heads (divisible by head * tensor), and key heads (that divide or are divided)."""
        heads, kv_heads = self._heads_of_chunk
        return heads * self.head_chunks, kv_heads * self.head_chunks

    @property
    def _heads_of_chunk(self) -> tuple[int, int]:
        ranks = self.degrees.head * self.degrees.tensor
        if self.heads == "equal":
            return (3, 3) if ranks == 1 else (ranks, ranks)
        if self.heads == "single":
            return (5, 1) if ranks == 1 else (ranks, 1)
        splits = lambda n: 4 * n % ranks == 0 and (ranks % n == 0 or n % ranks == 0)  # noqa: E731
        kv_heads = next(filter(splits, count(2)))
        return 4 * kv_heads, kv_heads

    @property
    def seq_len(self) -> int:
        return self.tokens * self.degrees.sequence

    @property
    def key_len(self) -> int:
        return self.seq_len + (4 * self.degrees.sequence if "cross" in self.mask else 0)

    @property
    def mask_arguments(self) -> dict:
        """What the oracle takes beside segment ids."""
        causal, window, _ = MASKS[self.mask]
        if causal is None:
            return {"rule": DENSE[self.mask.removeprefix("packed ")]}
        return {"causal": causal, "window": window}

    @functools.cached_property
    def mesh(self):
        devices = jax.devices("cpu")[: self.degrees.num_devices]
        if self.one_axis:
            return host_mesh(self.degrees, self.axis_type)
        return st.make_mesh(self.degrees, axis_type=self.axis_type, devices=devices)

    @functools.cached_property
    def attention(self) -> st.Attention:
        mask = PATTERNS.get(self.mask.removeprefix("packed "))
        return st.Attention(
            self.mesh,
            mask=mask,
            **{name: getattr(self, name) for name in ("layout", "backend", *OPTIONS)},
            **(one_axis(self.degrees) if self.one_axis else {}),
            **({} if mask else self.mask_arguments),
        )

    @functools.cached_property
    def problem(self) -> "Problem":
        return draw_problem(
            np.random.default_rng(self.seed),
            batch=3 * self.degrees.data,
            lengths=(self.seq_len, self.key_len),
            heads=self.num_heads,
            dtype=self.dtype,
            segments=self.segments or MASKS[self.mask][2],
        )

    def __str__(self) -> str:
        """Says only what is not the default."""
        degrees = "x".join(
            f"{name}{size}" for name, size in dataclasses.asdict(self.degrees).items() if size > 1
        )
        others = [f for f in dataclasses.fields(self) if f.name != "degrees"]
        values = [str(getattr(self, f.name)) for f in others if getattr(self, f.name) != f.default]
        return "-".join([degrees or "single", *values])


@dataclasses.dataclass(frozen=True)
class Problem:
    """Global arrays in natural token order, of the dtype that the op gets them in."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    dout: np.ndarray
    dlse: np.ndarray
    query_ids: np.ndarray | None
    key_ids: np.ndarray | None

    def astype(self, dtype) -> "Problem":
        names = ("query", "key", "value", "dout")
        cast = {name: getattr(self, name).astype(jnp.dtype(dtype)) for name in names}
        return dataclasses.replace(self, **cast)

    @property
    def segment_ids(self):
        return None if self.query_ids is None else (self.query_ids, self.key_ids)


@dataclasses.dataclass(frozen=True)
class Result:
    """Global arrays; from a mesh in layout order and sharded, from the oracle neither."""

    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray

    def items(self):
        return [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]


def listed(rows, **common) -> list[Case]:
    """Cases from rows of degrees, mask, heads, layout, backward pass and tokens of a shard."""
    names = ("degrees", "mask", "heads", "layout", "backward", "tokens")
    return [
        Case(**dict(zip(names, row, strict=True)), seed=seed, **common)
        for seed, row in enumerate(rows)
    ]


def draw_problem(rng, *, batch, lengths, heads, dtype="float32", segments=None) -> Problem:
    """Widths are primes, so that no transpose can hide; narrow dtypes have one, and dlse = 0."""
    query_len, key_len = lengths
    num_heads, kv_heads = heads
    narrow = dtype != "float32"
    head_dim, value_dim = (7, 7) if narrow else (7, 11)
    normal = lambda *shape: rng.normal(size=shape).astype(jnp.dtype(dtype))  # noqa: E731
    query_ids, key_ids = draw_segments(rng, segments, batch, query_len, key_len)
    return Problem(
        query=normal(batch, query_len, num_heads, head_dim),
        key=normal(batch, key_len, kv_heads, head_dim),
        value=normal(batch, key_len, kv_heads, value_dim),
        dout=normal(batch, query_len, num_heads, value_dim),
        dlse=np.float32(not narrow) * rng.normal(size=(batch, num_heads, query_len)).astype("f4"),
        query_ids=query_ids,
        key_ids=key_ids,
    )


def draw_segments(rng, kind, batch, query_len, key_len):
    """Documents of random lengths, cut elsewhere in each row; padding at the end and inside."""
    if kind is None:
        return None, None
    count = {"documents": 5, "padding": 2, "cross": 3}[kind]

    def documents(length):
        cuts = np.sort(rng.choice(length, size=(batch, count - 1)), axis=1)
        return (np.arange(length)[None, :, None] >= cuts[:, None, :]).sum(-1).astype(np.int32)

    query_ids = documents(query_len)
    key_ids = query_ids if kind != "cross" else documents(key_len)
    if kind == "padding":
        query_ids[:, -(query_len // 5) :] = -1
        query_ids[0, query_len // 3 : query_len // 2] = -1
    if kind == "cross":
        query_ids[0, :2], key_ids[-1, -3:] = -1, -1
    return query_ids, key_ids


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def forward_and_backward(attention, query, key, value, dout, dlse, segment_ids):
    """One program: out, lse, dq, dk, dv."""
    attend = functools.partial(attention, segment_ids=segment_ids, return_lse=True)
    (out, lse), vjp = jax.vjp(attend, query, key, value)
    return Result(out, lse, *vjp((dout, dlse)))


jax.tree_util.register_dataclass(Result)


def lse_spec(query_spec):
    """[batch, heads, seq] from the spec of [batch, seq, heads, head_dim]."""
    batch, seq, heads, _ = (*query_spec, *[None] * (4 - len(query_spec)))
    return P(batch, heads, seq)


def place(attention, problem: Problem) -> tuple:
    """The arguments of `forward_and_backward`, in layout order and sharded."""
    query_spec = attention.query_spec(problem.query.shape[2])
    key_spec = attention.key_spec(problem.key.shape[2])

    def put(x, spec, axis=1):
        laid_out = attention.layout.permute(x, axis=axis)
        return jax.device_put(laid_out, NamedSharding(attention.mesh, spec))

    ids = problem.segment_ids
    return (
        put(problem.query, query_spec),
        put(problem.key, key_spec),
        put(problem.value, key_spec),
        put(problem.dout, query_spec),
        put(problem.dlse, lse_spec(query_spec), axis=2),
        ids and tuple(put(x, attention.sequence_spec) for x in ids),
    )


def natural(attention, result: Result) -> Result:
    """On the host, in natural token order."""
    axes = {name: 2 if name == "lse" else 1 for name, _ in result.items()}
    return Result(
        **{
            name: attention.layout.unpermute(np.asarray(x), axis=axes[name])
            for name, x in result.items()
        }
    )


def reference(problem: Problem, **mask) -> Result:
    """The oracle's answer, in float64."""
    arguments = dict(mask, segment_ids=problem.segment_ids)
    inputs = problem.query, problem.key, problem.value
    out, lse = oracle.attention(*inputs, **arguments)
    return Result(out, lse, *oracle.gradients(*inputs, problem.dout, problem.dlse, **arguments))


def jax_nn(problem: Problem, **mask) -> Result:
    """What jax.nn.dot_product_attention makes of the same input on one device."""
    seen = oracle.visible(
        problem.query.shape[1], problem.key.shape[1], segment_ids=problem.segment_ids, **mask
    )
    # Rows that see no key: ours are 0, which jax.nn's softmax is not.
    rows = seen.any(-1)[:, :, None, None]
    dout = np.where(rows, problem.dout, np.zeros_like(problem.dout))
    out, *grads = _jax_nn(problem.query, problem.key, problem.value, dout, seen[:, None])
    return Result(np.where(rows, out, np.zeros_like(out)), np.zeros(()), *map(np.asarray, grads))


@functools.partial(jax.jit, compiler_options=QUICK)
def _jax_nn(query, key, value, dout, seen):
    attend = functools.partial(jax.nn.dot_product_attention, mask=seen)
    out, vjp = jax.vjp(attend, query, key, value)
    return out, *vjp(dout)


def relative_error(found, expected) -> float:
    """Relative L2 error; rows of lse that see no key must be EMPTY and do not count."""
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    assert found.shape == expected.shape
    empty = expected == oracle.EMPTY
    np.testing.assert_array_equal(found == np.float32(oracle.EMPTY), empty)
    found, expected = np.where(empty, 0, found), np.where(empty, 0, expected)
    norm = np.linalg.norm(expected)
    return float(np.linalg.norm(found - expected) / (norm if norm > 0 else 1.0))


def error_bounds(problem: Problem, expected: Result, **mask) -> dict[str, float]:
    """The greatest error allowed for each of out, lse, dq, dk, dv."""
    bounds = {name: FLOAT32_ERROR for name, _ in expected.items()}
    finer = {"float32": None, "bfloat16": 1, "float16": FLOAT16_IS_FINER}[problem.query.dtype.name]
    if finer is None:
        return bounds
    if finer > 1:
        problem = problem.astype("bfloat16")
        expected = reference(problem, **mask)
    baseline = jax_nn(problem, **mask)
    for name in ("out", "dq", "dk", "dv"):
        error = relative_error(getattr(baseline, name), getattr(expected, name))
        bounds[name] = NARROW_ERROR_RATIO * error / finer
    return bounds


def assert_close(found: Result, expected: Result, bounds: Mapping[str, float]) -> None:
    errors = {name: relative_error(x, getattr(expected, name)) for name, x in found.items()}
    # Written so that NaN fails.
    wrong = {n: f"{e:.2e} > {bounds[n]:.2e}" for n, e in errors.items() if not e <= bounds[n]}
    assert not wrong, wrong


def check(case: Case, bounds: Mapping[str, float] | None = None) -> None:
    """What every setting must do: match the oracle, rerun to the same bits, shard as the input."""
    arguments = place(case.attention, case.problem)
    result = forward_and_backward(case.attention, *arguments)
    expected = reference(case.problem, **case.mask_arguments)
    bounds = bounds or error_bounds(case.problem, expected, **case.mask_arguments)
    assert_close(natural(case.attention, result), expected, bounds)

    again = forward_and_backward(case.attention, *arguments)
    chex.assert_trees_all_equal(again, result)

    query, key, value, dout, dlse, _ = arguments
    for name, like in (("out", dout), ("lse", dlse), ("dq", query), ("dk", key), ("dv", value)):
        x = getattr(result, name)
        assert x.dtype == like.dtype, name
        assert x.sharding.is_equivalent_to(like.sharding, x.ndim), (name, x.sharding)


def covering(factors: Mapping[str, Sequence], clash, seed: int = 0) -> Iterator[dict]:
    """Few rows that hold every pair of values of two factors that does not `clash`."""
    rng = Random(seed)

    def pairs(row: Mapping) -> set:
        return set(combinations(sorted((k, str(v)) for k, v in row.items()), 2))

    def possible(row: Mapping) -> bool:
        return not any(clash(dict(pair)) for pair in combinations(row.items(), 2))

    missing = [
        {a: x, b: y}
        for a, b in combinations(factors, 2)
        for x, y in product(factors[a], factors[b])
        if not clash({a: x, b: y})
    ]
    while missing:
        start = missing[0]
        wanted = {pair for row in missing for pair in pairs(row)}
        candidates = []
        while len(candidates) < 30:
            row = {name: rng.choice(values) for name, values in factors.items()} | start
            if possible(row):
                candidates.append(row)
        best = max(candidates, key=lambda row: len(pairs(row) & wanted))
        done = pairs(best)
        missing = [row for row in missing if not pairs(row) <= done]
        yield best
