"""`startrail_jax.testing`: exact attention passes, and every kind of fault fails by its name."""

import dataclasses
import functools
import os
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import startrail_jax as st
from attention_cases import make_attention
from startrail_jax import testing
from startrail_jax.testing import assert_exact, assert_model_exact, simulate_devices

PROBLEM = {"seq_len": 16, "heads": 4, "kv_heads": 2, "head_dim": 7, "value_head_dim": 5}


def attention_on(degrees, axis_type="explicit", **options):
    return make_attention(degrees, axis_type, **options)


def dense(query, key, value, *, segment_ids, return_lse, causal=True, window=16, scale=7**-0.5):
    """An attention function to spoil, which compiles faster than `Attention` does."""
    assert return_lse
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    distance = np.subtract.outer(np.arange(query.shape[1]), np.arange(key.shape[1]))
    seen = jnp.asarray((distance < window) & ((distance >= 0) | (not causal)))[None, None]
    if segment_ids is not None:
        query_ids, key_ids = segment_ids[0][:, None, :, None], segment_ids[1][:, None, None, :]
        seen = seen & (query_ids == key_ids) & (query_ids >= 0)
    query, key, wide = (x.astype(jnp.float32) for x in (query, key, value))
    logits = jnp.where(seen, scale * jnp.einsum("btnh,bsnh->bnts", query, key), -1e30)
    lse = jax.nn.logsumexp(logits, axis=-1)
    weights = jnp.where(seen, jnp.exp(logits - lse[..., None]), 0)
    return jnp.einsum("bnts,bsnv->btnv", weights, wide).astype(value.dtype), lse


# What is exact passes ---------------------------------------------------------------------------

EXACT = {
    "startrail": (st.Degrees.startrail(4, c=2), {}, {}),
    "auto": (
        st.Degrees(ring=2, data=2),
        {"axis_type": "auto"},
        {"packed": True, "dtype": "bfloat16"},
    ),
    "mask": (
        st.Degrees(ring=2),
        {"mask": st.masks.Prefix(5), "softcap": 2.0, "layout": "contiguous"},
        {"packed": True},
    ),
    "tensor": (st.Degrees(ring=2, tensor=2), {"window": 5, "scale": 0.7, "layout": "zigzag"}, {}),
    "cross": (
        st.Degrees(group=2),
        {"causal": False},
        {"kv_seq_len": 24, "packed": True, "dtype": "float16"},
    ),
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.slow_except_every(3)
def test_exact_attention_passes(name):
    degrees, options, problem = EXACT[name]
    assert_exact(attention_on(degrees, **options), **PROBLEM | problem)


@pytest.mark.slow_except_every(3)
@pytest.mark.parametrize("rule", ["gated_delta", "kda", "ssd"])
def test_linear_attention(rule):
    """It passes in 16 bits, and each fault fails by its name."""
    mesh = st.make_mesh(st.Degrees(ring=2), devices=jax.devices("cpu")[:2])
    linear = st.LinearAttention(mesh, rule=rule)
    sizes = dict(seq_len=24, heads=2, head_dim=8)
    assert_exact(linear, **sizes, packed=True, dtype="bfloat16")
    ids = np.arange(24)[None] // 7
    assert_exact(linear, **sizes, segment_ids=ids)

    def without(name, *arrays, **options):
        """Ignores an option, or spoils the gradient of an input."""
        spoilt = {"ddecay": 3, "dbeta": 4}.get(name)
        arrays = [x * 1.001 - 0.001 * jax.lax.stop_gradient(x) if i == spoilt else x
                  for i, x in enumerate(arrays)]  # fmt: skip
        return linear(*arrays, **options | ({} if spoilt else {name: None}))

    for name, found in (
        *(("ddecay", "ddecay"), ("dbeta", "dbeta"), ("segment_ids", "out")),
        ("initial_state", "out"),
    ):
        fault = functools.partial(without, name)
        with pytest.raises(AssertionError, match=f"leaves '{found}'"):
            assert_exact(linear, **sizes, segment_ids=ids, attention_fn=fault)
    with pytest.raises(ValueError, match="no keys of another length"):
        assert_exact(linear, **sizes, kv_seq_len=12)


@pytest.mark.parametrize("kind", ["attention", "linear"])
def test_id_of_ones_own_for_padding(kind):
    mesh = st.make_mesh(st.Degrees(ring=2), devices=jax.devices("cpu")[:2])
    options = dict(causal=True) if kind == "attention" else dict(rule="ssd")
    make = st.Attention if kind == "attention" else st.LinearAttention
    ids = np.where(np.arange(24) % 5 == 3, 9, np.arange(24) // 7)[None]
    assert_exact(make(mesh, padding_id=9, **options), seq_len=24, heads=2, segment_ids=ids)


def test_segment_ids_of_ones_own():
    """The batch follows from them. A row that is all padding has gradients of 0."""
    ids = np.array([[0] * 5 + [3] * 10 + [-1], [-1] * 16, [7] * 16])
    given = []

    def attention_fn(*arrays, segment_ids, **options):
        given.extend(x.shape for x in segment_ids)
        return dense(*arrays, segment_ids=segment_ids, **options)

    attention = attention_on(st.Degrees())
    assert_exact(attention, attention_fn=attention_fn, segment_ids=ids, **PROBLEM)
    assert set(given) == {(3, 16)}
    none, of_keys = testing._segment_pair((None, ids), (5, 16))
    np.testing.assert_array_equal(none, np.zeros((3, 5)))
    np.testing.assert_array_equal(of_keys, ids)
    assert testing._segment_pair((None, None), (5, 16)) is None


# What is not exact fails ------------------------------------------------------------------------


def leaking(x, factor):
    """`x`, with a gradient that is `factor` times what it should be."""
    return factor * x + jax.lax.stop_gradient((1 - factor) * x)


def spoilt(position, spoil):
    """Applies `spoil` to one of the results."""

    def attention_fn(*arrays, **options):
        results = list(dense(*arrays, **options))
        results[position] = spoil(results[position])
        return tuple(results)

    return attention_fn


MARK = "rows whose lse is -1e30"

# Fault -> (what has it, the first result that shows it).
FAULTS = {
    "scale": (functools.partial(dense, scale=0.4), "out"),
    "causal": (functools.partial(dense, causal=False), "out"),
    "window": (functools.partial(dense, window=15), "out"),
    "segments": (lambda *x, segment_ids, **o: dense(*x, segment_ids=None, **o), MARK),
    "out": (spoilt(0, lambda out: out * (1 + 1e-5)), "out"),
    "not_a_number": (spoilt(0, lambda out: jnp.where(out == out.max(), jnp.nan, out)), "out"),
    "dtype": (spoilt(0, lambda out: out.astype("bfloat16")), "out"),
    "lse": (spoilt(1, lambda lse: lse + 1e-4), "lse"),
    "shape": (spoilt(1, lambda lse: lse.swapaxes(1, 2)), "lse"),
    "mark": (spoilt(1, lambda lse: jnp.where(lse <= -1e30, -1e29, lse)), MARK),
    "gradient_of_lse": (spoilt(1, jax.lax.stop_gradient), "dq"),
    "dq": (lambda q, k, v, **o: dense(leaking(q, 1.0001), k, v, **o), "dq"),
    "dk": (lambda q, k, v, **o: dense(q, leaking(k, 1.0001), v, **o), "dk"),
    "dv": (lambda q, k, v, **o: dense(q, k, jax.lax.stop_gradient(v), **o), "dv"),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.slow_except_every(3)
def test_fault_fails_and_is_named(name):
    attention_fn, shown = FAULTS[name]
    packed = shown == MARK
    with pytest.raises(AssertionError, match=rf"(?s)\[Chex\].*leaves '{shown}'"):
        assert_exact(
            attention_on(st.Degrees()), attention_fn=attention_fn, packed=packed, **PROBLEM
        )


def test_other_order_of_tokens_fails():
    attention = attention_on(st.Degrees(team=2), layout="zigzag")
    other = dataclasses.replace(attention, layout="contiguous")
    with pytest.raises(AssertionError, match="leaves 'out'"):
        assert_exact(attention, attention_fn=other, **PROBLEM)


def test_sharding_unlike_the_input_fails():
    attention = attention_on(st.Degrees(team=2), "auto")
    replicated = NamedSharding(attention.mesh, P())

    def attention_fn(*arrays, **options):
        out, lse = attention(*arrays, **options)
        return jax.lax.with_sharding_constraint(out, replicated), lse

    with pytest.raises(AssertionError, match=r"leaves 'out': the sharding must be .*'team'.*got"):
        assert_exact(attention, attention_fn=attention_fn, **PROBLEM)


def test_tolerance_is_what_is_allowed():
    attention, (attention_fn, _) = attention_on(st.Degrees()), FAULTS["out"]
    assert_exact(attention, attention_fn=attention_fn, tolerance=2e-5, **PROBLEM)


def test_coarse_rounding_fails_in_bfloat16():
    """Three bits, where bfloat16 has seven."""
    coarse = spoilt(0, lambda out: out.astype("float8_e4m3fn").astype(out.dtype))
    attention = attention_on(st.Degrees())
    assert_exact(attention, attention_fn=dense, dtype="bfloat16", **PROBLEM)
    with pytest.raises(AssertionError, match="leaves 'out'"):
        assert_exact(attention, attention_fn=coarse, dtype="bfloat16", **PROBLEM)


# A model -----------------------------------------------------------------------------------------

SEQ_LEN, VOCABULARY, WIDTH = 16, 11, 8
# Padding is 0.
SEGMENTS = np.repeat(np.array([[1, 2], [2, 0]], np.int32), SEQ_LEN // 2, axis=1)


@pytest.fixture(scope="module")
def model():
    """Parameters, tokens and targets."""
    rng = np.random.default_rng(0)
    sizes = {"embed": (VOCABULARY, WIDTH), "place": (SEQ_LEN, WIDTH), "query": (WIDTH, 2, 3)}
    sizes |= {"key": (WIDTH, 1, 3), "value": (WIDTH, 1, 5), "out": (2, 5, VOCABULARY)}
    params = {name: rng.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    ids = rng.integers(0, VOCABULARY, (2, SEQ_LEN + 1)).astype(np.int32)
    return params, ids[:, :-1], ids[:, 1:]


def loss_of(
    attention,
    params,
    tokens,
    targets,
    segments=None,
    *,
    positions=None,
    before=lambda x: x,
    **given,
):
    if positions is None:
        positions = attention.layout.positions(tokens.shape[1])
    x = before(params["embed"][tokens] + params["place"][jnp.asarray(positions)][None])
    heads = (jnp.einsum("btc,cnh->btnh", x, params[name]) for name in ("query", "key", "value"))
    out = attention(*heads, segment_ids=segments, **given)
    log_p = jax.nn.log_softmax(jnp.einsum("btnh,nhv->btv", out, params["out"]))
    return -jnp.take_along_axis(log_p, targets[..., None], -1).mean()


MODELS = {
    "zigzag": (st.Degrees(team=2), {"layout": "zigzag"}, {}),
    "contiguous": (st.Degrees(ring=2, data=2), {"balance": "layout"}, {}),
    "documents": (
        st.Degrees(group=2),
        {"layout": "zigzag", "window": 5, "softcap": 2.0, "scale": 0.7, "padding_id": 0},
        {"sinks": np.array([0.5, -1], np.float32)},
    ),
    "full": (
        st.Degrees(head=2),
        {"causal": False},
        {
            "mask": np.arange(SEQ_LEN).reshape(1, 1, 1, -1) > 3,
            "bias": np.full((1, 1, SEQ_LEN, SEQ_LEN), 0.5, "f4"),
        },
    ),
    "slopes": (st.Degrees(tensor=2), {}, {"slopes": np.array([0.5, 0.25], np.float32)}),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow_except_every(2)
def test_model_passes(name, model):
    degrees, options, given = MODELS[name]
    attention = attention_on(degrees, "auto", **options)
    segments = [SEGMENTS] if name == "documents" else []
    assert_model_exact(attention, functools.partial(loss_of, **given), *model, *segments)


def test_model_on_explicit_axes_passes():
    def loss(attention, scale, query, segments):
        out, lse = attention(
            query * scale, query, query, segment_ids=(segments, segments), return_lse=True
        )
        return jnp.tanh(out).mean() + jnp.tanh(lse).mean()

    query = np.random.default_rng(0).normal(size=(2, SEQ_LEN, 2, 3)).astype(np.float32)
    attention = attention_on(st.Degrees(team=2), layout="zigzag", padding_id=0)
    assert_model_exact(attention, loss, np.float32(1.5), query, SEGMENTS)


def next_of(tokens):
    return jnp.roll(tokens, -1, axis=1)


# What a model does by the order of tokens in memory.
BY_MEMORY = {
    "positions": lambda a, p, t, y: loss_of(a, p, t, y, positions=np.arange(SEQ_LEN)),
    "targets": lambda a, p, t, y: loss_of(a, p, t, next_of(t)),
    "neighbours": lambda a, p, t, y: loss_of(a, p, t, y, before=lambda x: x + next_of(x)),
    "path": lambda a, p, t, y: (
        loss_of(a, p, t, y) + loss_of(Missed(a.layout), p | {"out": p["out"][::-1]}, t, y)
    ),
}


@dataclasses.dataclass
class Missed:
    """A layer that attends in its own way."""

    layout: object

    def __call__(self, query, key, value, *, segment_ids):
        return jax.nn.dot_product_attention(query, key, value, is_causal=True)


@pytest.mark.parametrize("name", BY_MEMORY)
def test_model_that_goes_by_memory_fails_in_zigzag_order(name, model):
    params, *batch = model
    params = params | {"value": params["value"][:, :, :3], "out": params["out"][:, :3]}
    attention = attention_on(st.Degrees(team=2), "auto", layout="zigzag")
    with pytest.raises(AssertionError, match=r"layout='zigzag'\. Look for .* positions"):
        assert_model_exact(attention, BY_MEMORY[name], params, *batch)
    contiguous = dataclasses.replace(attention, layout="contiguous")
    assert_model_exact(contiguous, BY_MEMORY[name], params, *batch)


def test_arrays_that_were_not_ordered_fail(model):
    params, *batch = model
    attention = attention_on(st.Degrees(team=2), "auto", layout="zigzag")
    with pytest.raises(AssertionError, match=r"Look for .*shard did not order"):
        assert_model_exact(attention, lambda a, p: loss_of(a, p, *batch), params)


def test_gradient_that_differs_is_named(model):
    def loss(attention, params, *batch):
        factor = 1.01 if attention.layout.kind == "zigzag" else 1.0
        return loss_of(attention, params | {"key": leaking(params["key"], factor)}, *batch)

    attention = attention_on(st.Degrees(team=2), "auto", layout="zigzag")
    message = r"^the gradient of params\['key'\] must be .* to 2e-05 .* difference of 0\.01,"
    with pytest.raises(AssertionError, match=message):
        assert_model_exact(attention, loss, *model)
    assert_model_exact(attention, loss, *model, tolerance=0.02)


def test_loss_that_is_not_a_number_fails(model):
    attention = attention_on(st.Degrees(), "auto")
    with pytest.raises(AssertionError, match=r"a loss of nan instead of nan"):
        assert_model_exact(attention, lambda *x: jnp.nan * loss_of(*x), *model)


def test_loss_that_calls_no_attention_fails(model):
    """An attention that a jit of the model's own remembers, and one that is a static argument."""
    attention = attention_on(st.Degrees(team=2), "auto")
    current = []

    @jax.jit
    def remembering(params, *batch):
        return loss_of(current[-1], params, *batch)

    def loss(attention, params, *batch):
        current.append(attention)
        return remembering(params, *batch)

    with pytest.raises(AssertionError, match=r"got a loss that called none\. .*clear_caches"):
        assert_model_exact(attention, loss, *model)
    told = jax.jit(loss_of, static_argnums=0)
    for _ in range(2):
        assert_model_exact(attention, told, *model)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            {"dropout_rate": 0.1},
            NotImplementedError,
            r"does not serve dropout; got a dropout_rate above 0\. .*deterministic=True",
        ),
        ({"local": True}, NotImplementedError, r"serves calls .*attention\.local.*attention_fn"),
        ({"limit": 99}, ValueError, r"must be at most 99 .*; got batch=2, heads=2, seq_len=16"),
    ],
)
def test_what_a_model_may_not_do_raises(given, error, message, model, monkeypatch):
    attention = attention_on(st.Degrees(team=2), "auto")

    def loss(attention, params, *batch):
        if not given.get("local"):
            rate = given.get("dropout_rate", 0.0)
            dropout = {"dropout_rng": jax.random.key(0), "dropout_rate": rate}
            return loss_of(attention, params, *batch, **dropout)
        spec = attention.query_spec(2)
        specs = {"in_specs": (spec,) * 3, "out_specs": (spec, attention.lse_spec)}
        x = jnp.ones((2, SEQ_LEN, 2, 3)) * params["place"][0, 0]
        return jax.shard_map(attention.local, mesh=attention.mesh, **specs)(x, x, x)[0].mean()

    monkeypatch.setattr(testing, "MAX_LOGITS", given.get("limit", testing.MAX_LOGITS))
    with pytest.raises(error, match=message):
        assert_model_exact(attention, loss, *model)


def test_model_with_lengths_of_calls_or_without_devices_raises(model):
    attention = attention_on(st.Degrees(team=2), "auto", mask=st.masks.Prefix())
    with pytest.raises(ValueError, match=r"assert_model_exact needs a mask whose lengths"):
        assert_model_exact(attention, loss_of, *model)
    abstract = st.Attention(AbstractMesh((2,), ("team",)), causal=True)
    with pytest.raises(ValueError, match=r"assert_model_exact needs a mesh of devices"):
        assert_model_exact(abstract, loss_of, *model)
    with pytest.raises(ValueError, match=r"needs a mesh of devices; got .* AbstractMesh\. Build"):
        assert_exact(abstract, **PROBLEM)


# What cannot be tested says so ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": 2**14}, r"at most 67108864 .*; got batch=4, heads=4, seq_len=16384.*shorter"),
        (
            {"seq_len": 18},
            r"divisible by 2 \* sequence degree.*got seq_len=18, degree=2\. Pad to 20",
        ),
        ({"batch": 3}, r"batch must be divisible by the data degree; got batch=3, data=2\. .*=4"),
        (
            {"packed": True, "segment_ids": np.zeros((2, 16), int)},
            r"segment_ids must be None; got both\. Leave one",
        ),
    ],
)
def test_sizes_that_do_not_fit_raise(changes, message):
    attention = attention_on(st.Degrees(team=2, data=2), layout="zigzag")
    with pytest.raises(ValueError, match=message):
        assert_exact(attention, **PROBLEM | changes)


def test_without_chex_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "chex", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs chex.*pip install 'startrail-jax\[test"):
        assert_exact(attention_on(st.Degrees(team=2)), **PROBLEM)


# Simulated devices ------------------------------------------------------------------------------


@pytest.fixture
def shown(monkeypatch):
    """The devices that jax has started with."""
    devices, platforms = list(jax.devices("cpu")), jax.config.jax_platforms
    monkeypatch.setattr(jax, "devices", lambda: devices)
    yield devices
    jax.config.update("jax_platforms", platforms)


def test_simulate_devices_accepts_enough_devices(shown):
    simulate_devices(len(shown))
    simulate_devices(1)


@pytest.mark.parametrize(("platform", "more"), [("cpu", 1), ("gpu", 0)])
def test_simulate_devices_that_comes_too_late_raises(platform, more, shown):
    count = len(shown) + more
    message = (
        rf"before jax starts; got count={count} when jax was already running with "
        rf"{len(shown)} {platform} devices\. Call it at the top of conftest\.py"
    )
    shown[:] = [types.SimpleNamespace(platform=platform)] * len(shown)
    with pytest.raises(RuntimeError, match=message):
        simulate_devices(count)


def test_simulate_devices_of_none_raises():
    with pytest.raises(ValueError, match=r"count must be at least 1; got count=0\. Pass"):
        simulate_devices(0)


@pytest.mark.slow
def test_example_of_the_docstring_runs():
    """It needs a process of its own, in which jax has not started."""
    (example,) = re.findall(r"\n\n((?: {4}.*\n|\n)+)", testing.__doc__)
    code = re.sub("^ {4}", "", example, flags=re.MULTILINE)
    code += "\nimport jax\nsimulate_devices(8)\ntest_my_attention_is_exact()\nprint(jax.devices())"
    environment = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert len(re.findall("CpuDevice", result.stdout)) == 8
