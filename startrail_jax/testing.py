"""Tests whether your own attention is exact, on simulated or real devices.

    import startrail_jax as st
    from startrail_jax.testing import assert_exact, simulate_devices

    simulate_devices(8)


    def test_my_attention_is_exact():
        mesh = st.make_mesh(st.Degrees.startrail(8, c=2))
        attention = st.Attention(mesh, window=24)
        assert_exact(attention, seq_len=64, heads=4, kv_heads=2, packed=True)

`assert_model_exact` compares the loss and gradients of a whole model with those of the same model
on dense attention. `assert_exact` needs chex, which `pip install 'startrail-jax[testing]'`
installs; the others need only jax.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Bool, Float

from startrail_jax.attention import Attention
from startrail_jax.blocks.shapes import EMPTY
from startrail_jax.errors import BalanceWarning, InputError, UnsupportedError
from startrail_jax.linear.attention import LinearAttention
from startrail_jax.linear.testing import STATES, StateProblem, in_natural_order
from startrail_jax.masks.algebra import causal_window

# The largest error that is allowed in float32, relative to the largest absolute value of a result.
# It holds for lse in every dtype, as lse is always float32. A rounding is at most 6e-8 of a value,
# and a sum over many keys rounds many times. Errors of up to 1.2e-6 were measured on CPUs.
FLOAT32_TOLERANCE = 2e-6
# The largest error that is allowed in bfloat16 and float16, over the error of dense attention that
# rounds its probabilities, the gradients of its logits and its results to that dtype once. Sharded
# attention also rounds what devices send each other, and the largest error of a small problem
# varies: ratios of up to 2.0 were measured on CPUs.
NARROW_ERROR_RATIO = 4.0
# The largest difference that is allowed in a model in float32, relative to the largest absolute
# value of an array. Differences of up to 1.5e-6 were measured in models of two layers.
MODEL_TOLERANCE = 2e-5

MARKED_ROWS = "rows whose lse is -1e30"
"""The name under which rows that see no key are compared."""

# The most logits that the reference may compute, in all rows and heads together. This many take
# some seconds, and about 3 GB of memory if they are all in one head.
MAX_LOGITS = 2**26


def simulate_devices(count: int) -> None:
    """Makes jax run on at least `count` simulated CPU devices of this process.

    Call it before jax starts, which happens when a program first asks for devices or makes an
    array: for instance at the top of `conftest.py`. Further calls do no harm. The CPU is selected
    even on machines with GPUs, so that tests do the same everywhere; leave this function out of
    tests that should run on GPUs.

    Args:
        count: the smallest acceptable number of devices.

    Raises:
        ValueError: if `count` is below 1.
        RuntimeError: if jax has already started with fewer CPU devices, or on other devices.
    """
    if count < 1:
        raise ValueError(
            f"count must be at least 1; got count={count}. Pass the number of devices of the mesh."
        )
    jax.config.update("jax_platforms", "cpu")
    already = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    if already < count:
        try:
            jax.config.update("jax_num_cpu_devices", count)
            return
        except RuntimeError:
            pass  # jax has started: its devices may be enough.
    devices = jax.devices()
    if devices[0].platform != "cpu" or len(devices) < count:
        raise RuntimeError(
            f"simulate_devices must be called before jax starts; got count={count} when jax was "
            f"already running with {len(devices)} {devices[0].platform} devices. Call it at the "
            "top of conftest.py, before any array is made and before jax.devices() is called."
        )


def assert_exact(
    attention: Attention | LinearAttention,
    *,
    seq_len: int,
    heads: int,
    head_dim: int = 16,
    kv_heads: int | None = None,
    value_head_dim: int | None = None,
    kv_seq_len: int | None = None,
    batch: int | None = None,
    dtype: DTypeLike = "float32",
    segment_ids: ArrayLike | tuple[ArrayLike | None, ArrayLike | None] | None = None,
    visible_until: ArrayLike | None = None,
    packed: bool = False,
    attention_fn: Callable[..., Any] | None = None,
    tolerance: float | None = None,
    seed: int = 0,
) -> None:
    """Asserts that `attention` computes exact attention, and its gradients, on its own mesh.

    Random queries, keys and values are permuted to the layout of `attention` and sharded over its
    mesh. The output, the log-sum-exp and the gradients must match dense attention in float64 NumPy,
    and must be sharded like the inputs. The dense reference is for small problems, up to 8,192
    tokens in one head or 1,024 tokens in 64 heads. A few tokens per device are enough to find most
    bugs.

    A `LinearAttention` is compared with its recurrence, token by token, in float64: output, last
    state, and the gradients of all inputs.

    Args:
        attention: the mesh, layout, mask and backend to test. If its devices belong to several
            processes, each of them makes the same call.
        seq_len: tokens of the whole sequence.
        heads: query heads, over all devices; of linear attention, states.
        kv_heads: key heads, over all devices; None for as many as query heads. Of linear attention,
            heads of query and key.
        value_head_dim: None for `head_dim`.
        kv_seq_len: tokens of the keys; None for `seq_len`.
        batch: rows, over all devices; None for as many as `segment_ids` has, or without it for two
            rows per data shard.
        dtype: of queries, keys and values: float32, bfloat16 or float16.
        segment_ids: as `Attention` takes them, but with tokens in natural order.
        visible_until: as `Attention` takes it, but with tokens in natural order. It goes to
            `attention_fn` in place of segment ids.
        packed: whether to draw segment ids at random: four documents in each row, and padding.
        attention_fn: the function to test, where it is not `attention` itself but, for instance, a
            `shard_map` of your own around `attention.local`. It is called as
            `attention_fn(query, key, value, segment_ids=..., return_lse=True)`, for linear
            attention as `attention_fn(query, key, value, decay, beta, segment_ids=...,
            initial_state=..., return_state=True)`, and with `visible_until` without states but with
            `levels=...`.
        tolerance: largest error that is allowed, relative to the largest absolute value of each
            result. None for 2e-6 in float32, and in bfloat16 and float16 for four times the error
            that dense attention makes by rounding to that dtype.
        seed: of the random draws.

    Raises:
        AssertionError: if a result differs. The message, from chex, names the first of out, lse,
            dq, dk and dv that differs, and shows where.
        ModuleNotFoundError: if chex is not installed.
        NotImplementedError: if the backend of `attention` does not support these inputs.
        ValueError: if the sizes do not fit the mesh, or are too large for the reference.
    """
    chex = _import_chex()
    _check_devices("assert_exact", attention)
    trial = draw_trial(
        attention,
        seq_len=seq_len,
        heads=heads,
        head_dim=head_dim,
        kv_heads=kv_heads,
        value_head_dim=value_head_dim,
        kv_seq_len=kv_seq_len,
        batch=batch,
        dtype=dtype,
        segment_ids=segment_ids,
        visible_until=visible_until,
        packed=packed,
        tolerance=tolerance,
        seed=seed,
    )
    function: Callable[..., Any] = attention_fn or attention

    def checked(*arrays: Any, **options: Any) -> Any:
        results = function(*arrays, **options)
        outputs = results if isinstance(results, tuple) else (results,)
        named = dict(zip(trial.cotangents, outputs, strict=True))
        chex.assert_trees_all_equal_shapes_and_dtypes(named, dict(trial.cotangents))
        return results

    found = trial.results(attention, checked)
    chex.assert_trees_all_equal_comparator(
        lambda x, y: x.sharding.is_equivalent_to(y, x.ndim),
        lambda x, y: f"the sharding must be {y}; got {x.sharding}",
        found,
        {name: trial.sharding(attention, name) for name in found},
    )
    for x in trial.compare(attention, found):
        given, wanted = {x.name: x.found}, {x.name: x.expected}
        if x.name == MARKED_ROWS:
            chex.assert_trees_all_equal(given, wanted)
        else:
            chex.assert_trees_all_close(given, wanted, rtol=0, atol=x.bound * x.size)


def assert_model_exact(
    attention: Attention,
    loss: Callable[..., Any],
    params: Any,
    *batch: Any,
    tolerance: float = MODEL_TOLERANCE,
) -> None:
    """Asserts that a model has the same loss and gradients as with dense attention.

    `loss(attention, params, *arrays)` and its gradients are computed twice, in full float32: with
    `attention`, on the arrays that `attention.shard` makes of the batch; and with dense attention
    of the same settings, on the same mesh, on arrays whose tokens are in natural order. In natural
    order, code that relies on the order of tokens in memory is right. So the comparison fails if a
    model in zigzag order counts positions itself, shifts targets after the sharding, mixes
    neighbouring tokens, masks dense logits itself, or gets arrays in another order.

    Mistakes that are the same in both runs are not found: segment ids or a window that the model
    does not pass on, and, in contiguous order, a path to attention that you missed, which still
    computes the right values on the whole sequence. To find these, compare the model with the
    unmodified model.

    Args:
        attention: the attention that the model should use. All devices of its mesh must belong to
            this process.
        loss: (attention, params, *arrays) -> a scalar. It must call the attention that it gets.
            `attention.local` and dropout raise an error, and `decode` is not replaced.
        params: tree of float arrays, with respect to which gradients are taken.
        *batch: arrays [batch, seq, ...], or trees of them, in natural order on the host, as
            `attention.shard` takes them. Put arrays without a token dimension into `loss`.
        tolerance: largest allowed difference, relative to the largest absolute value of each array.
            The default, 2e-5, is for models in float32; narrower dtypes need a larger tolerance,
            and find fewer bugs.

    Raises:
        AssertionError: if the loss or a gradient differs. The message names the one that differs
            most. Also if `loss` called no attention, for example because another `jit` has cached
            the model.
        NotImplementedError: if a call uses dropout or `attention.local`.
        ValueError: if the mask leaves lengths to calls, the mesh has no devices, or a call is too
            large for dense attention: see `assert_exact`.
    """
    _check_devices("assert_model_exact", attention)
    attention.resolved_mask.check_closed("assert_model_exact")
    fields = dataclasses.fields(attention)
    settings: dict[str, Any] = {x.name: getattr(attention, x.name) for x in fields}
    settings["layout"] = "contiguous"
    dense = _Dense(**settings)

    def results(attention: Attention) -> list[tuple[str, np.ndarray]]:
        """Name and value of the loss and of each gradient."""
        arrays = [attention.shard(x) for x in batch]
        with jax.default_matmul_precision("highest"):
            program = jax.jit(jax.value_and_grad(functools.partial(loss, attention)))
            value, gradients = program(params, *arrays)
        leaves = jax.tree_util.tree_leaves_with_path(gradients)
        named = [(f"the gradient of params{jax.tree_util.keystr(path)}", x) for path, x in leaves]
        return [(name, np.asarray(x, np.float64)) for name, x in [("the loss", value), *named]]

    found, wanted = results(attention), results(dense)
    if not dense.calls:
        raise AssertionError(
            "loss must call the attention that it is given; got a loss that called none. Bring it "
            "to each layer of the model. A function under a jit of its own may remember another: "
            "give that the attention as a static argument, or call jax.clear_caches() in loss."
        )
    # A gradient that is 0 but for rounding, as that of a bias of keys, has no size of its own.
    largest = max((_largest(x) for _, x in wanted[1:] if x.any()), default=1.0)
    errors = {}
    for (name, given), (_, right) in zip(found, wanted, strict=True):
        size = float(np.abs(right).max(initial=0))
        size = size if name == "the loss" or size > 1e-5 * largest else largest
        errors[name] = np.nan_to_num(np.abs(given - right).max(initial=0) / (size or 1), nan=np.inf)
    name = max(errors, key=lambda name: errors[name])
    if errors[name] > tolerance:
        raise AssertionError(
            f"{name} must be that of dense attention to {tolerance:g} of its largest value; got a "
            f"difference of {errors[name]:.2g}, and a loss of {found[0][1]:.8g} instead of "
            f"{wanted[0][1]:.8g}, in layout={attention.layout.kind!r}. Look for what goes by the "
            "order of tokens in memory: positions that the model counts itself (give it "
            "attention.layout.positions), targets shifted after attention.shard, neighbours that "
            "are mixed, masks of its own, arrays that attention.shard did not order. assert_exact "
            "checks the attention alone; a dtype below float32 needs a larger tolerance."
        )


def _import_chex() -> ModuleType:
    """The module chex, which the rest of the package does not need."""
    try:
        import chex
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "startrail_jax.testing.assert_exact needs chex, which cannot be imported "
            f"({error}). Run: pip install 'startrail-jax[testing]'"
        ) from error
    return chex


def _check_devices(caller: str, attention: Attention | LinearAttention) -> None:
    """Raises a ValueError unless the mesh of an attention has devices."""
    if isinstance(attention.mesh, AbstractMesh):
        raise ValueError(
            f"{caller} needs a mesh of devices; got an attention on an AbstractMesh. "
            "Build the attention on startrail_jax.make_mesh(degrees)."
        )


# The problem ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Inputs:
    """Arguments of attention, with segment ids of queries and of keys, and output cotangents."""

    query: Any
    key: Any
    value: Any
    dout: Any
    dlse: Any
    segment_ids: tuple[Any, Any] | None
    trees: bool = False
    """Whether the ids are `visible_until`."""


def _segment_pair(
    segment_ids: ArrayLike | tuple[ArrayLike | None, ArrayLike | None] | None,
    lengths: tuple[int, int],
) -> tuple[np.ndarray, np.ndarray] | None:
    """Segment ids of queries and of keys, int32, on the host; zeros where a pair has none."""
    pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    batch = next((len(np.asarray(ids)) for ids in pair if ids is not None), None)
    if batch is None:
        return None
    query_ids, key_ids = (
        np.zeros((batch, length), np.int32)
        if ids is None
        else np.asarray(ids).astype(np.int32, casting="same_kind")
        for ids, length in zip(pair, lengths, strict=True)
    )
    return query_ids, key_ids


def _check_size(batch: int, heads: int, seq_len: int, kv_seq_len: int, *, data: int) -> None:
    """Raises a ValueError unless the reference can hold the problem and the mesh its rows."""
    if batch % data:
        raise InputError(
            f"batch must be divisible by the data degree; got batch={batch}, data={data}. "
            f"Use batch={-(-batch // data) * data}."
        )
    logits = batch * heads * seq_len * kv_seq_len
    if logits > MAX_LOGITS:
        raise InputError(
            "batch * heads * seq_len * kv_seq_len must be at most "
            f"{MAX_LOGITS} for the dense float64 reference; got batch={batch}, heads={heads}, "
            f"seq_len={seq_len}, kv_seq_len={kv_seq_len}, a product of {logits}. Use a shorter "
            "sequence or fewer heads: most faults show with a few tokens per device."
        )


def draw_documents(rng: np.random.Generator, batch: int, length: int) -> np.ndarray:
    """Segment ids [batch, length]: four documents of random lengths, and padding at the end."""
    starts = rng.integers(0, length, size=(batch, 3, 1))
    ids = (np.arange(length) >= starts).sum(axis=1, dtype=np.int32)
    ids[:, length - length // 8 :] = -1
    return ids


def _draw_inputs(
    rng: np.random.Generator,
    *,
    query: tuple[int, int, int, int],
    key: tuple[int, int, int, int],
    value_head_dim: int,
    dtype: DTypeLike,
    segment_ids: tuple[np.ndarray, np.ndarray] | None,
) -> _Inputs:
    """Normal arrays on the host, in natural order."""

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(jnp.dtype(dtype))

    return _Inputs(
        query=normal(*query),
        key=normal(*key),
        value=normal(*key[:3], value_head_dim),
        dout=normal(*query[:3], value_head_dim),
        dlse=rng.normal(size=(query[0], query[2], query[1])).astype(np.float32),
        segment_ids=segment_ids,
    )


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One result beside the reference, on the host, with tokens in natural order."""

    name: str
    found: np.ndarray
    expected: np.ndarray
    bound: float
    """Largest error that is allowed, relative to `size`."""

    @property
    def size(self) -> float:
        """Largest absolute value of the reference; 1 if all are 0."""
        return _largest(self.expected)

    @property
    def error(self) -> float:
        """Largest difference, relative to `size`; infinite if a result is not a number."""
        found, expected = (np.asarray(x, np.float64) for x in (self.found, self.expected))
        return float(np.nan_to_num(np.abs(found - expected), nan=np.inf).max()) / self.size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """A random problem, with its results in float64 and the errors that are allowed.

    It holds for every mesh and layout: arrays are on the host, with tokens in natural order.
    """

    cotangents: Mapping[str, np.ndarray]
    """Of the results of a call, by their names."""
    expected: Mapping[str, np.ndarray]
    """Results and gradients by their names, in float64."""
    bounds: Mapping[str, float]
    """Largest errors that are allowed, relative to the largest value of each result."""

    def results(
        self,
        attention: Any,
        function: Callable[..., Any],
        compiler_options: dict[str, Any] | None = None,
    ) -> dict[str, jax.Array]:
        """What one compiled program computes on the mesh of an attention, by name."""
        raise NotImplementedError

    def sharding(self, attention: Any, name: str) -> NamedSharding:
        """The sharding that a result must have."""
        raise NotImplementedError

    def compare(self, attention: Any, found: Mapping[str, jax.Array]) -> list[Comparison]:
        """The results beside the reference; each process gets whole arrays."""
        raise NotImplementedError


def draw_trial(
    attention: Attention | LinearAttention,
    *,
    seq_len: int,
    heads: int,
    head_dim: int = 16,
    kv_heads: int | None = None,
    value_head_dim: int | None = None,
    kv_seq_len: int | None = None,
    batch: int | None = None,
    dtype: DTypeLike = "float32",
    segment_ids: ArrayLike | tuple[ArrayLike | None, ArrayLike | None] | None = None,
    visible_until: ArrayLike | None = None,
    packed: bool = False,
    tolerance: float | None = None,
    seed: int = 0,
) -> Trial:
    """The problem of `assert_exact`, for attentions with the mask, the scale and the rule of this
    one.

    Raises:
        NotImplementedError, ValueError: as `assert_exact`.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    value_head_dim = head_dim if value_head_dim is None else value_head_dim
    kv_seq_len = seq_len if kv_seq_len is None else kv_seq_len
    if packed and segment_ids is not None:
        raise ValueError(
            "packed=True draws segment ids, so segment_ids must be None; got both. "
            "Leave one of them out."
        )
    trees = visible_until is not None
    if trees and (packed or segment_ids is not None):
        raise ValueError(
            "visible_until takes the place of segment_ids and packed; got one of these too. Leave "
            "visible_until out."
        )
    ids = _segment_pair(visible_until if trees else segment_ids, (seq_len, kv_seq_len))
    rng = np.random.default_rng(seed)
    rows = batch
    if rows is None:
        rows = 2 * attention.degrees.data if ids is None else len(ids[0])
    if isinstance(attention, LinearAttention):
        if kv_seq_len != seq_len or isinstance(segment_ids, tuple):
            raise ValueError(
                "Linear attention has no keys of another length; got kv_seq_len or a pair of "
                "segment_ids. Leave them out."
            )
        if packed:
            ids = (draw_documents(rng, rows, seq_len),) * 2
        problem = StateProblem.drawn(
            attention,
            rng,
            tokens=(rows, seq_len),
            heads=(heads, kv_heads),
            dims=(head_dim, value_head_dim),
            dtype=dtype,
            ids=None if ids is None else ids[0],
            trees=trees,
        )
        return _StateTrial.of(attention, problem, tolerance)
    attention.resolved_mask.check_closed("assert_exact")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BalanceWarning)
        # Raises unless these sizes fit the mesh, the layout and the backend.
        attention.explain(
            seq_len=seq_len,
            heads=heads,
            head_dim=head_dim,
            kv_heads=kv_heads,
            value_head_dim=value_head_dim,
            dtype=dtype,
            packed=packed or ids is not None,
            kv_seq_len=kv_seq_len,
            trees=trees,
        )
    _check_size(rows, heads, seq_len, kv_seq_len, data=attention.degrees.data)
    if packed:
        ids = draw_documents(rng, rows, seq_len), draw_documents(rng, rows, kv_seq_len)
    inputs = _draw_inputs(
        rng,
        query=(rows, seq_len, heads, head_dim),
        key=(rows, kv_seq_len, kv_heads, head_dim),
        value_head_dim=value_head_dim,
        dtype=dtype,
        segment_ids=ids,
    )
    inputs = dataclasses.replace(inputs, trees=trees)
    return _DenseTrial.of(attention, inputs, tolerance)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _DenseTrial(Trial):
    """A problem of `Attention`, whose reference is dense."""

    inputs: _Inputs

    @classmethod
    def of(cls, attention: Attention, inputs: _Inputs, tolerance: float | None) -> _DenseTrial:
        seen = _visible(attention, inputs)
        scale = inputs.query.shape[-1] ** -0.5 if attention.scale is None else attention.scale
        expected = _reference(inputs, seen, scale, attention.softcap)
        bounds = dict.fromkeys(expected, FLOAT32_TOLERANCE if tolerance is None else tolerance)
        if tolerance is None and inputs.query.dtype != np.float32:
            rounded = _reference(inputs, seen, scale, attention.softcap, inputs.query.dtype)
            for name in ("out", "dq", "dk", "dv"):
                error = np.abs(rounded[name] - expected[name]).max()
                bounds[name] = NARROW_ERROR_RATIO * error / _largest(expected[name])
        cotangents = {"out": inputs.dout, "lse": inputs.dlse}
        return cls(cotangents=cotangents, expected=expected, bounds=bounds, inputs=inputs)

    def results(
        self,
        attention: Attention,
        function: Callable[..., Any],
        compiler_options: dict[str, Any] | None = None,
    ) -> dict[str, jax.Array]:
        """Results of one compiled program, by name: out, lse, dq, dk, dv."""

        trees = self.inputs.trees

        @functools.partial(jax.jit, compiler_options=compiler_options)
        def program(arrays: tuple[Any, ...], ids: Any, cotangents: Any) -> dict[str, Any]:
            of_tokens = {"visible_until": ids[0]} if trees else {"segment_ids": ids}
            attend = functools.partial(function, **of_tokens, return_lse=True)
            (out, lse), vjp = jax.vjp(attend, *arrays)
            dq, dk, dv = vjp(cotangents)
            return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}

        x = _place(attention, self.inputs)
        return program((x.query, x.key, x.value), x.segment_ids, (x.dout, x.dlse))

    def sharding(self, attention: Attention, name: str) -> NamedSharding:
        """That of queries for out and dq, and that of keys for dk and dv."""
        specs = {"out": "query", "dq": "query", "dk": "key", "dv": "key"}
        if name == "lse":
            return NamedSharding(attention.mesh, attention.lse_spec)
        heads = (self.inputs.query if specs[name] == "query" else self.inputs.key).shape[2]
        spec_of = attention.query_spec if specs[name] == "query" else attention.key_spec
        return NamedSharding(attention.mesh, spec_of(heads))

    def compare(self, attention: Attention, found: Mapping[str, jax.Array]) -> list[Comparison]:
        """The results beside the reference, after the rows that see no key."""
        actual = {
            name: np.asarray(attention.unshard(x, axis=2 if name == "lse" else 1), np.float64)
            for name, x in found.items()
        }
        expected = dict(self.expected)
        # EMPTY, the lse of a row that sees no key, is compared by itself: any error is small
        # beside it.
        empty, marked = expected["lse"] == EMPTY, actual["lse"] == np.float32(EMPTY)
        expected["lse"], actual["lse"] = (np.where(empty, 0, x["lse"]) for x in (expected, actual))
        return [
            Comparison(MARKED_ROWS, marked, empty, 0.0),
            *(Comparison(x, actual[x], expected[x], self.bounds[x]) for x in expected),
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _StateTrial(Trial):
    """A problem of `LinearAttention`, whose reference is its recurrence."""

    problem: StateProblem

    @classmethod
    def of(
        cls, attention: LinearAttention, problem: StateProblem, tolerance: float | None
    ) -> _StateTrial:
        expected = problem.expected(attention)
        bounds = dict.fromkeys(expected, FLOAT32_TOLERANCE if tolerance is None else tolerance)
        if tolerance is None and problem.inputs[0].dtype != np.float32:
            one = problem.of_one_device(attention)
            for name, wanted in expected.items():
                error = float(np.abs(one[name] - wanted).max()) / _largest(wanted)
                bounds[name] = max(bounds[name], NARROW_ERROR_RATIO * error)
        cotangents = {"out": problem.cotangents[0]}
        if not problem.trees:
            cotangents["state"] = problem.cotangents[1]
        return cls(cotangents=cotangents, expected=expected, bounds=bounds, problem=problem)

    def results(
        self,
        attention: LinearAttention,
        function: Callable[..., Any],
        compiler_options: dict[str, Any] | None = None,
    ) -> dict[str, jax.Array]:
        """Results of one compiled program, by the names of `expected`."""
        return self.problem.results(attention, function, compiler_options)

    def sharding(self, attention: LinearAttention, name: str) -> NamedSharding:
        """That of the inputs with the same heads."""
        shape = self.expected[name].shape
        of_tokens = attention.heads_spec(shape[2], len(shape))
        return NamedSharding(attention.mesh, attention.state_spec if name in STATES else of_tokens)

    def compare(
        self, attention: LinearAttention, found: Mapping[str, jax.Array]
    ) -> list[Comparison]:
        """The results beside the reference."""
        actual = in_natural_order(attention, found)
        return [Comparison(x, actual[x], self.expected[x], self.bounds[x]) for x in self.expected]


def _place(attention: Attention, inputs: _Inputs) -> _Inputs:
    """The inputs in the order of the layout, sharded over the mesh."""

    def put(x: np.ndarray, spec: PartitionSpec, axis: int = 1) -> jax.Array:
        return attention._put(attention.layout.permute(x, axis), spec)

    query_spec = attention.query_spec(inputs.query.shape[2])
    key_spec = attention.key_spec(inputs.key.shape[2])
    ids = inputs.segment_ids
    return _Inputs(
        query=put(inputs.query, query_spec),
        key=put(inputs.key, key_spec),
        value=put(inputs.value, key_spec),
        dout=put(inputs.dout, query_spec),
        dlse=put(inputs.dlse, attention.lse_spec, axis=2),
        segment_ids=ids and (put(ids[0], attention.sequence_spec),
                             put(ids[1], attention.sequence_spec)),
        trees=inputs.trees,
    )  # fmt: skip


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x).max()) or 1.0


# The reference ----------------------------------------------------------------------------------


def _visible(attention: Attention, inputs: _Inputs) -> Bool[Any, "B T S"]:
    """Which key each query sees; traced if the segment ids are."""
    batch, query_len = inputs.query.shape[:2]
    query, key = np.arange(query_len)[:, None], np.arange(inputs.key.shape[1])
    seen = np.asarray(attention.resolved_mask.visible(query[None], key[None, None]))
    seen = np.broadcast_to(seen, (batch, query_len, len(key)))
    if inputs.segment_ids is not None:
        query_ids, key_ids = inputs.segment_ids
        if inputs.trees:
            alike = (key <= query)[None] & (query[None] < key_ids[:, None, :])
            window = causal_window(attention.resolved_mask)
            if window is not None:  # It counts the tokens that a query continues, and itself.
                place = alike.sum(-1)
                seen = place[:, :, None] - place[:, None, :] < window
        else:
            query_ids, key_ids = attention.mark_padding(inputs.segment_ids)
            alike = query_ids[:, :, None] == key_ids[:, None, :]
        seen = seen & alike & (query_ids[:, :, None] >= 0)
    return seen


def _reference(
    inputs: _Inputs,
    seen: Bool[np.ndarray, "B T S"],
    scale: float,
    softcap: float | None = None,
    dtype: Any = np.float64,
) -> dict[str, Float[np.ndarray, "..."]]:
    """Dense attention and its gradients in float64, one row of the batch and one head at a time.

    s = scale q k^T,  p = exp(s - lse),  out = p v,  lse = log sum exp s    (over visible keys)
    s = c tanh(s / c) with a cap c, before the mask; ds is then multiplied by 1 - (s / c)^2
    dv = p^T dout,  ds = p * (dout v^T - rowsum(dout * out) + dlse)
    dq = scale ds k,  dk = scale ds^T q
    """

    def rounded(x: np.ndarray) -> np.ndarray:
        return x.astype(dtype).astype(np.float64)

    arrays = inputs.query, inputs.key, inputs.value, inputs.dout, inputs.dlse
    query, key, value, dout, dlse = (np.asarray(x, np.float64) for x in arrays)
    out, lse = np.zeros_like(dout), np.zeros_like(dlse)
    dq, dk, dv = np.zeros_like(query), np.zeros_like(key), np.zeros_like(value)
    group = query.shape[2] // key.shape[2]
    for b, n in np.ndindex(query.shape[0], query.shape[2]):
        q, k, v = query[b, :, n], key[b, :, n // group], value[b, :, n // group]
        s, slope = scale * (q @ k.T), 1.0
        if softcap is not None:
            s = softcap * np.tanh(s / softcap)
            slope = 1 - (s / softcap) ** 2
        s = np.where(seen[b], s, EMPTY)
        highest = s.max(axis=1)
        lse[b, n] = highest + np.log(np.exp(s - highest[:, None]).sum(axis=1))
        p = np.where(seen[b], np.exp(s - lse[b, n, :, None]), 0)
        out[b, :, n] = rounded(rounded(p) @ v)
        delta = (dout[b, :, n] * out[b, :, n]).sum(axis=1) - dlse[b, n]
        ds = rounded(p * (dout[b, :, n] @ v.T - delta[:, None]) * slope)
        dq[b, :, n] = scale * (ds @ k)
        dk[b, :, n // group] += scale * (ds.T @ q)
        dv[b, :, n // group] += rounded(p).T @ dout[b, :, n]
    return {"out": out, "lse": lse, "dq": rounded(dq), "dk": rounded(dk), "dv": rounded(dv)}


def dense_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    seen: Any,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    changed: Callable[[jax.Array], jax.Array] = lambda logits: logits,
) -> tuple[jax.Array, jax.Array]:
    """Output [B T N V] and log-sum-exp [B N T], sinks included, of dense attention. `seen` are the
    visible pairs, [B 1 T S] or what broadcasts to it; `changed` is applied to the capped logits."""
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    s = jnp.einsum("btnh,bsnh->bnts", query, key, precision="highest")
    s = s * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        s = softcap * jnp.tanh(s / softcap)
    s = jnp.where(seen, changed(s), EMPTY)
    lse = jax.nn.logsumexp(s, axis=-1)
    if sinks is not None:
        lse = jnp.logaddexp(lse, sinks[None, :, None])
    p = jnp.where(seen, jnp.exp(s - lse[..., None]), 0)
    return jnp.einsum("bnts,bsnv->btnv", p, value, precision="highest"), lse


@dataclasses.dataclass(frozen=True, eq=False)
class _Dense(Attention):
    """Dense attention with the settings of another, in float32, with tokens in natural order.

    Every instance differs from all others, so that no jit takes one for another.
    """

    calls: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    """The shapes of the queries of all calls."""

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def _whole(
        self,
        specs: tuple[Any, ...],
        given_specs: Any,
        given: Any,
        *inputs: Any,
        trees: bool,
    ) -> tuple[jax.Array, jax.Array]:
        if given.scores is not None and given.scores.dropout is not None:
            raise UnsupportedError(
                "assert_model_exact does not serve dropout; got a dropout_rate above 0. Call the "
                "attention with deterministic=True in the loss to check."
            )
        (batch, length, heads, _), kv_length = inputs[0].shape, inputs[1].shape[1]
        _check_size(batch, heads, length, kv_length, data=1)
        self.calls.append(inputs[0].shape)
        whole = jax.tree.map(lambda x: self.placed(x, PartitionSpec()), (given, inputs))
        out, lse = jax.checkpoint(functools.partial(self._dense, trees))(*whole)
        return self.placed(out, specs[0]), self.placed(lse, self.lse_spec)

    def _dense(
        self, trees: bool, given: Any, inputs: tuple[Any, ...]
    ) -> tuple[jax.Array, jax.Array]:
        """Output and log-sum-exp, as `_reference` writes them, of replicated arrays."""
        query, key, value, *of_tokens = inputs
        dtype = query.dtype
        if given.expansion is not None:
            key, value = given.expansion.keys_and_values(key.astype(jnp.float32))
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
        ids = (of_tokens[0], of_tokens[-1]) if of_tokens else None
        if ids is not None:  # Padding may be NaN.
            query, key, value = (
                jnp.where(own[..., None, None] >= 0, x, 0)
                for own, x in zip((ids[0], ids[1], ids[1]), (query, key, value), strict=True)
            )
        problem = _Inputs(
            query=query,
            key=key,
            value=value,
            dout=None,
            dlse=None,
            segment_ids=ids,
            trees=trees,
        )
        seen = jnp.asarray(_visible(self, problem))[:, None]
        slopes, bias = (getattr(given.scores, name, None) for name in ("slopes", "bias"))

        def changed(s: jax.Array) -> jax.Array:
            if slopes is not None:
                distance = np.abs(np.subtract.outer(*map(np.arange, s.shape[2:])))
                s = s - slopes[None, :, None, None] * distance[None, None]
            return s if bias is None else s + bias

        options: dict[str, Any] = {"scale": self.scale, "softcap": self.softcap}
        out, lse = dense_attention(
            query, key, value, seen, sinks=given.sinks, changed=changed, **options
        )
        return out.astype(dtype), jnp.where(seen.any(axis=-1), lse, EMPTY)

    def _on_device(self, *shards: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
        raise UnsupportedError(
            "assert_model_exact serves calls of an attention; got one of attention.local, in a "
            "shard_map of the model. Check that function by assert_exact(attention_fn=...)."
        )
