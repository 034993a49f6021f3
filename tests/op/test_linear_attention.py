"""Linear attention against a recurrence in float64, token by token: outputs, states, gradients."""

import dataclasses
import importlib.util
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

import fake_jla
import linear_oracle as oracle
import startrail_jax as st
from refusals import refused
from startrail_jax.analysis.messages import read_messages
from startrail_jax.errors import InputError, UnsupportedError
from startrail_jax.linear import jla, sizes
from startrail_jax.linear.block import LinearRequest
from startrail_jax.linear.sizes import CHUNK, GROUP, Cut
from startrail_jax.traffic.ports import messages

RULES = ("gated_delta", "kda", "ssd")
NAMES = ("query", "key", "value", "decay", "beta", "state")
TOLERANCE = 2e-6


def inputs(rule, seq_len, *, heads=(2, 2, 4), dims=(6, 5), seed=0, batch=2, decay=-3.0):
    """Query, key, value, decay, beta, initial state, and cotangents of output and last state."""
    rng = np.random.default_rng(seed)
    (nq, nk, nv), (k, v) = heads, dims
    n = max(heads)
    q, key = (rng.normal(size=(batch, seq_len, x, k)) for x in (nq, nk))
    if rule != "ssd":
        q, key = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, key))
    shape = (batch, seq_len, n, k) if rule == "kda" else (batch, seq_len, n)
    arrays = (
        *(q, key, rng.normal(size=(batch, seq_len, nv, v))),
        -np.exp(rng.normal(size=shape) + decay),
        1 / (1 + np.exp(-rng.normal(size=(batch, seq_len, n)))),
        rng.normal(size=(batch, n, k, v)),
        rng.normal(size=(batch, seq_len, n, v)),
        rng.normal(size=(batch, n, k, v)),
    )
    return tuple(np.asarray(x, np.float32) for x in arrays)


def computed(attention, arrays, ids=None, *, has_state=True):
    """Output, last state and gradients in natural order, from arrays in natural order."""
    *tokens, state, dout, dlast = arrays
    *tokens, dout = attention.shard(*tokens, dout)
    spec = jax.NamedSharding(attention.mesh, attention.state_spec)
    state, dlast = (jax.device_put(x, spec) for x in (state, dlast))
    ids = None if ids is None else attention.shard(np.asarray(ids, np.int32))

    def loss(*args):
        *tokens, state = args
        out, last = attention(
            *tokens, segment_ids=ids, initial_state=state if has_state else None, return_state=True
        )
        return (out * dout).sum() + (last * dlast).sum(), (out, last)

    grads, (out, last) = jax.jit(jax.grad(loss, tuple(range(6)), has_aux=True))(*tokens, state)
    return (
        attention.unshard(out),
        np.asarray(last),
        [*map(attention.unshard, grads[:5]), np.asarray(grads[5])],
    )


def check(attention, arrays, ids=None, *, has_state=True, tolerance=TOLERANCE):
    rule = attention.rule.name
    *tokens, state, dout, dlast = arrays
    first = state if has_state else None
    scale = arrays[0].shape[-1] ** -0.5 if rule != "ssd" else 1.0
    options = dict(delta=rule != "ssd", scale=scale, ids=ids, state=first)
    out, states = oracle.linear_attention(*tokens, **options)
    wanted = oracle.gradients(*tokens, dout, dlast, **options)
    found, last, grads = computed(attention, arrays, ids, has_state=has_state)
    close(found, out, tolerance, "out")
    close(last, states[-1], tolerance, "last state")
    for name, x, y in zip(NAMES, grads, wanted, strict=True):
        if name != "state" or has_state:
            close(x, y, tolerance, name)


def close(found, wanted, tolerance, name):
    assert np.isfinite(found).all(), name
    error = np.abs(np.asarray(found, np.float64) - wanted).max() / max(np.abs(wanted).max(), 1e-30)
    assert error <= tolerance, f"{name}: {error:.2e}"


def documents(seq_len, starts, batch=2):
    """Ids of documents that begin at some tokens, other ones in each row."""
    ids = np.zeros((batch, seq_len), np.int32)
    for row in range(batch):
        for start in starts:
            ids[row, min(start + row, seq_len - 1) :] += 1
    return ids


MESHES = [
    (st.Degrees(), "contiguous", 150),
    (st.Degrees(ring=2), "zigzag", 140),
    (st.Degrees(ring=3, data=2), "contiguous", 210),
    (st.Degrees(ring=2, team=3), "zigzag", 72),
    (st.Degrees.startrail(8, c=2), "contiguous", 136),
    (st.Degrees(ring=2, head=4, tensor=2), "zigzag", 64),
    (st.Degrees(ring=16), "contiguous", 80),
]


def attention_on(degrees, rule, *, layout="contiguous", axis_type="auto", backend="xla"):
    devices = jax.devices()[: degrees.num_devices]
    mesh = st.make_mesh(degrees, axis_type, devices=devices)
    return st.LinearAttention(mesh, rule=rule, layout=layout, backend=backend)


@pytest.mark.slow_except_every(4)
@pytest.mark.parametrize(
    ("rule", "degrees", "layout", "seq_len"), [(x, *y) for x in RULES for y in MESHES]
)
def test_every_rule_is_exact(rule, degrees, layout, seq_len):
    attention = attention_on(degrees, rule, layout=layout)
    border = seq_len // attention.layout.multiple
    ids = documents(seq_len, [1, 2, border, 2 * border, seq_len // 2 + 5, seq_len - 2])
    check(attention, inputs(rule, seq_len), ids)


@pytest.mark.slow_except_every(2)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_groups_are_computed_at_once(rule, layout, monkeypatch):
    """Small groups, of which the last are filled up, and of which the backward pass takes some."""
    for name, size in dict(CHUNK=4, GROUP=2, AT_ONCE=10).items():
        monkeypatch.setattr(sizes, name, size)
    attention = attention_on(st.Degrees(ring=2), rule, layout=layout)
    ids = documents(76, [3, 8, 30, 38, 61])
    check(attention, inputs(rule, 76, seed=1), ids)
    check(attention, inputs(rule, 76, seed=2), has_state=False)


@pytest.mark.slow_except_every(5)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("heads", [(2, 2, 4), (2, 3, 6), (4, 1, 2)])
@pytest.mark.parametrize(("degrees", "layout", "seq_len"), MESHES[:4])
def test_kernels_of_jla_are_exact(degrees, layout, seq_len, heads, packed, monkeypatch):
    """Their states before and after groups, and their gradients, are put together aright."""
    fake_jla.install(monkeypatch)
    for name, size in dict(CHUNK=4, GROUP=2, AT_ONCE=10).items():
        monkeypatch.setattr(sizes, name, size)
    attention = attention_on(degrees, "gated_delta", layout=layout, backend="jla")
    border = seq_len // attention.layout.multiple
    starts = [1, 8, border, 2 * border, seq_len // 2 + 5, seq_len - 2]
    ids = documents(seq_len, starts) if packed else None
    if packed:
        ids[0, 9:12] = ids[1, -3:] = -1
    check(attention, inputs("gated_delta", seq_len, heads=heads, seed=7), ids)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (dict(platform="cpu", capability=None), "compute capability (9, 0); got cpu"),
        (dict(capability=(10, 0)), "got (10, 0)"),
        (dict(rule="kda"), "only rule='gated_delta' has run on a GPU; got rule='kda'"),
        (dict(dtype="float32"), "bfloat16 and float16; got float32"),
        (dict(value_dim=256), "among (64, 128); got 128 and 256"),
    ],
)  # fmt: skip
def test_limits_of_jla_are_named(changed, words, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    given = dict(platform="cuda", capability=(9, 0), rule="gated_delta", dtype="bfloat16")
    request = LinearRequest(**given, key_dim=128, value_dim=128)
    assert jla.refusal(request) is None
    assert words in jla.refusal(dataclasses.replace(request, **changed))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install '.[jla]'" in jla.refusal(request)


@pytest.mark.slow_except_every(4)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["none", "mixed", "infinite", "forgets"])
def test_decays_and_betas_of_any_size(rule, kind):
    """Sums of large decays would cost digits where one is subtracted from another."""
    *tokens, state, dout, dlast = inputs(rule, 128, seed=3)
    decay, beta = tokens[3:]
    rng = np.random.default_rng(4)
    if kind == "none":
        decay[:], beta[:] = 0, 1
    if kind == "forgets":
        decay[:] = -1e3
    if kind == "mixed":
        decay[rng.random(decay.shape) < 0.2] = -1e3
        decay[rng.random(decay.shape) < 0.2] = -20
        decay[rng.random(decay.shape) < 0.2] = 0
        beta[rng.random(beta.shape) < 0.2], beta[rng.random(beta.shape) < 0.2] = 0, 1
    if kind == "infinite":
        decay[rng.random(decay.shape) < 0.2] = -np.inf
    arrays = (*tokens, state, dout, dlast)
    with np.errstate(invalid="ignore"):
        check(attention_on(st.Degrees(ring=4), rule), arrays, documents(128, [40]))


def padded_documents():
    """Ids of 48 tokens. Padding lies in documents, over whole slices of 4 devices, before the first
    token and between documents, and an id comes back."""
    ids = documents(48, [20, 40])
    ids[0, 40:] = 0
    ids[0, 22:38] = ids[1, :13] = ids[1, 20:26] = ids[1, 33:36] = -1
    ids[1, 14] = -7
    return ids


@pytest.mark.slow_except_every(2)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_padding_is_as_if_it_were_not_there(rule, layout):
    """The document goes on behind it, and the first token from the initial state."""
    ids, attention = padded_documents(), attention_on(st.Degrees(ring=4), rule, layout=layout)
    *tokens, state, _, _ = inputs(rule, 48, seed=18)
    out, last = attention(
        *attention.shard(*tokens),
        segment_ids=attention.shard(ids),
        initial_state=jnp.asarray(state),
        return_state=True,
    )
    out, alone = attention.unshard(out), attention_on(st.Degrees(), rule)
    for row in range(2):
        real = ids[row] >= 0
        wanted, end = alone(
            *(x[row : row + 1, real] for x in tokens),
            segment_ids=ids[row : row + 1, real],
            initial_state=state[row : row + 1],
            return_state=True,
        )
        close(out[row, real], np.asarray(wanted)[0], TOLERANCE, "out")
        close(np.asarray(last)[row], np.asarray(end)[0], TOLERANCE, "last state")
        new = [x[:, :1] for x in tokens]
        after, _ = attention.decode(*new, state=last)
        wanted, _ = alone.decode(*(x[row : row + 1] for x in new), state=end)
        close(np.asarray(after)[row], np.asarray(wanted)[0], TOLERANCE, "decoded")


@pytest.mark.slow_except_every(3)
@pytest.mark.parametrize(
    ("rule", "layout", "backend"),
    [
        ("gated_delta", "contiguous", "xla"),
        ("gated_delta", "zigzag", "jla"),
        *((rule, layout, "xla") for rule in ("kda", "ssd") for layout in ("zigzag", "contiguous")),
    ],
)
def test_padding_changes_nothing_and_gets_nothing(rule, layout, backend, monkeypatch):
    """Wherever it is, and whatever is in it."""
    fake_jla.install(monkeypatch)
    arrays, ids = inputs(rule, 48, seed=5), padded_documents()
    attention = attention_on(st.Degrees(ring=4), rule, layout=layout, backend=backend)
    check(attention, arrays, ids)
    spoilt = [np.array(x) for x in arrays]
    for x in (*spoilt[:5], spoilt[6]):
        x[ids < 0] = np.nan
    out, last, grads = computed(attention, spoilt, ids)
    wanted = computed(attention, arrays, ids)
    np.testing.assert_array_equal(last, wanted[1])
    for x, y in zip((out, *grads), (wanted[0], *wanted[2]), strict=True):
        np.testing.assert_array_equal(x, y)
    # An id of one's own for padding.
    own = np.where(ids < 0, 9, ids)
    named = dataclasses.replace(attention, padding_id=9)
    np.testing.assert_array_equal(computed(named, arrays, own)[0], wanted[0])


@pytest.mark.parametrize("heads", [(4, 4, 2), (1, 2, 4), (2, 2, 2)])
def test_fewer_heads_of_some_arrays(heads):
    """Also where a tensor axis splits some of them, and the others are on all its devices."""
    attention = attention_on(st.Degrees(ring=2, tensor=2), "gated_delta")
    check(attention, inputs("gated_delta", 24, heads=heads, seed=6))


@some.composite
def any_problem(draw):
    """A call, its arrays and its documents, which may begin anywhere."""
    rule, layout = draw(some.sampled_from(RULES)), draw(some.sampled_from(["contiguous", "zigzag"]))
    kinds = [(x, y) for x in (1, 2, 3, 4, 6, 8) for y in (1, 2) if x * y <= 8]
    (ring, tensor), data = draw(some.sampled_from(kinds)), draw(some.sampled_from([1, 2]))
    degrees = st.Degrees(ring=ring, tensor=tensor, data=data)
    seq_len = 2 * ring * draw(some.integers(1, 40))
    heads = tuple(tensor * draw(some.sampled_from([1, 2, 4])) for _ in range(3))
    # With one or two channels, all keys are nearly one another, and the gradient of the decay is a
    # sum of large terms: it is exact to 6e-6.
    dims = draw(some.integers(4, 12)), draw(some.integers(1, 9))
    sizes = dict(heads=heads, dims=dims, seed=draw(some.integers(0, 99)), batch=2)
    decay = draw(some.sampled_from([-6.0, -2.0, 1.0, 4.0]))
    starts = draw(some.lists(some.integers(0, seq_len - 1), max_size=5))
    ids = documents(seq_len, starts)
    for row in range(2):
        first, count = draw(some.integers(0, seq_len - 1)), draw(some.integers(0, seq_len // 2))
        ids[row, first : first + count] = -1
    attention = attention_on(
        degrees, rule, layout=layout, axis_type=draw(some.sampled_from(["auto", "explicit"]))
    )
    arrays = inputs(rule, seq_len, **sizes, decay=decay)
    return attention, arrays, ids if draw(some.booleans()) else None, draw(some.booleans())


@pytest.mark.slow
@given(any_problem())
def test_any_problem_is_exact(problem):
    attention, arrays, ids, has_state = problem
    check(attention, arrays, ids, has_state=has_state)


def test_two_key_heads_on_sixteen_devices():
    attention = attention_on(st.Degrees(ring=2, team=2, group=2, head=2), "gated_delta")
    check(attention, inputs("gated_delta", 96, heads=(2, 2, 2), seed=7, batch=1))


def test_mesh_of_another_program_and_explicit_axes():
    devices = np.array(jax.devices()[:6]).reshape(2, 3)
    mesh = jax.sharding.Mesh(devices, ("rows", "context"))
    attention = st.LinearAttention(
        mesh, rule="kda", axis="context", axis_names={"data": "rows"}, layout="zigzag"
    )
    check(attention, inputs("kda", 42, seed=8))
    explicit = attention_on(st.Degrees(data=2, ring=3), "gated_delta", axis_type="explicit")
    arrays = inputs("gated_delta", 42, seed=9)
    out, last, grads = computed(explicit, arrays)
    auto = computed(attention_on(st.Degrees(data=2, ring=3), "gated_delta"), arrays)
    for x, y in zip((out, last, *grads), (auto[0], auto[1], *auto[2]), strict=True):
        np.testing.assert_array_equal(x, y)
    *tokens, _, _, _ = arrays
    with refused(InputError, "query must be sharded as"):
        explicit(*map(jnp.asarray, tokens))


@pytest.mark.parametrize("rule", RULES)
def test_sixteen_bits_are_as_exact_as_on_one_device(rule):
    arrays = inputs(rule, 192, seed=10, dims=(32, 24))
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in arrays[:3]]
    rounded = (*(np.asarray(x, np.float32) for x in narrow), *arrays[3:])
    scale = 32**-0.5 if rule != "ssd" else 1.0
    options = dict(delta=rule != "ssd", scale=scale)
    wanted, _ = oracle.linear_attention(*rounded[:5], **options)
    errors = []
    for degrees in (st.Degrees(), st.Degrees(ring=8)):
        attention = attention_on(degrees, rule)
        put = attention.shard(*[np.asarray(x) for x in narrow], *arrays[3:5])
        out = jax.jit(attention)(*put)
        assert out.dtype == jnp.bfloat16
        error = attention.unshard(out).astype(np.float64) - wanted
        errors.append(np.sqrt((error**2).mean()))
    assert errors[1] <= 1.2 * errors[0]


def in_sixteen_bits(*arrays):
    """Arrays in bfloat16, and the same numbers in float32."""
    narrow = [np.asarray(x).astype(jnp.bfloat16) for x in arrays]
    return narrow, [x.astype(np.float32) for x in narrow]


def root_mean_square(found, wanted):
    return np.sqrt(np.mean((np.asarray(found).astype(np.float64) - wanted) ** 2))


@pytest.mark.slow_except_every(4)
@pytest.mark.parametrize(
    ("degrees", "layout"),
    [
        (st.Degrees(), "contiguous"),
        (st.Degrees(ring=4), "zigzag"),
        (st.Degrees(tensor=8), "contiguous"),
    ],
)
@pytest.mark.parametrize(
    ("rule", "backend", "heads"),
    [
        *((rule, "xla", (1, 1, 40)) for rule in RULES),
        *(("gated_delta", "jla", heads) for heads in ((1, 2, 40), (40, 40, 1))),
    ],
)
def test_gradients_of_shared_heads_are_float32_sums(
    rule, backend, heads, degrees, layout, monkeypatch
):
    """In 16 bits they are as exact as heads that are written out, and summed in float64."""
    fake_jla.install(monkeypatch)
    arrays = inputs(rule, 64, heads=heads, dims=(16, 8), seed=15, batch=1)
    tokens = [0, 1, 2, 6]
    narrow, wide = in_sixteen_bits(*(arrays[i] for i in tokens))
    given, exact = list(arrays), list(arrays)
    for i, x, y in zip(tokens, narrow, wide, strict=True):
        given[i], exact[i] = x, y
    options = dict(delta=rule != "ssd", scale=16**-0.5 if rule != "ssd" else 1.0)
    wanted = oracle.gradients(*exact[:5], exact[6], exact[7], **options, state=exact[5])
    shared = computed(attention_on(degrees, rule, layout=layout, backend=backend), given)[2]
    given[:3] = (np.repeat(x, 40 // x.shape[2], axis=2) for x in narrow[:3])
    written = computed(attention_on(st.Degrees(), rule, backend=backend), given)[2]
    for name, count, found, each, right in zip(NAMES, heads, shared, written, wanted, strict=False):
        total = each.astype(np.float64).reshape(1, 64, count, 40 // count, -1).sum(3)
        bound = 1.25 * root_mean_square(total.astype(jnp.bfloat16), right)
        assert root_mean_square(found, right) <= bound, name


@pytest.mark.parametrize(("rule", "backend"), [*((x, "xla") for x in RULES), (RULES[0], "jla")])
def test_it_traces_under_x64_and_strict_promotion(rule, backend, monkeypatch):
    fake_jla.install(monkeypatch)
    *arrays, dout, _ = (jnp.asarray(x) for x in inputs(rule, 32))
    *floats, dout = (x.astype("bfloat16") for x in (*arrays[:3], dout))
    ids = jnp.asarray(documents(32, [5, 16]))
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        attention = attention_on(st.Degrees(ring=2), rule, layout="zigzag", backend=backend)

        def step(*arrays):
            out, pull = jax.vjp(lambda *x: attention(*x, segment_ids=ids), *arrays)
            return pull(out), attention.causal_conv(arrays[2], arrays[2][0, :4])

        grads, conv = jax.eval_shape(step, *floats, *arrays[3:5])
        attention.decode(*(x[:, :3] for x in (*floats, *arrays[3:5])), state=arrays[5])
    assert [*map(str, (x.dtype for x in (*grads, conv)))] == [
        *["bfloat16"] * 3, "float32", "float32", "bfloat16"
    ]  # fmt: skip


def test_state_goes_on_where_it_ended():
    """Two halves of a row, one after the other, are the whole row."""
    *tokens, _, _, _ = inputs("gated_delta", 64, seed=11)
    attention = attention_on(st.Degrees(ring=4), "gated_delta")
    whole = attention(*attention.shard(*tokens))
    first, second = (attention.shard(*[x[:, i : i + 32] for x in tokens]) for i in (0, 32))
    early, state = attention(*first, return_state=True)
    late = attention(*second, initial_state=state)
    found = np.concatenate([attention.unshard(early), attention.unshard(late)], 1)
    close(found, attention.unshard(whole), TOLERANCE, "out")


@pytest.mark.slow_except_every(3)
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("has_first", [False, True])
@pytest.mark.parametrize(
    ("degrees", "layout", "shape"),
    [
        (st.Degrees(), "zigzag", (2, 10, 6)),
        (st.Degrees(ring=2, data=2), "contiguous", (2, 16, 2, 3)),
        (st.Degrees(ring=2, team=2, tensor=2), "zigzag", (3, 24, 6)),
        (st.Degrees(ring=7), "contiguous", (1, 21, 6)),
    ],
)
def test_convolution_is_exact(width, has_first, degrees, layout, shape):
    rng = np.random.default_rng(12)
    x, cotangent = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
    kernel = rng.normal(size=(width, *shape[2:])).astype(np.float32)
    first = rng.normal(size=(shape[0], width - 1, *shape[2:])).astype(np.float32)
    last_cotangent = rng.normal(size=first.shape).astype(np.float32)
    attention = attention_on(degrees, "ssd", layout=layout)
    dout, zeros = attention.shard(cotangent), np.zeros_like(first)
    plain = np.zeros(shape[:2], np.int32)
    packed = documents(shape[1], [1, 5, 6, shape[1] - 2], shape[0])
    packed[0, -3:] = packed[-1, :2] = packed[0, 7] = -1
    padded = plain.copy()
    padded[0, shape[1] // 2 :] = padded[-1, :1] = padded[0, 3:5] = -1

    @jax.jit
    def both(x, kernel, first, ids):
        def loss(x, kernel, first):
            out, last = attention.causal_conv(
                x, kernel, segment_ids=ids, initial=first if has_first else None, return_last=True
            )
            return (out * dout).sum() + (last * last_cotangent).sum(), (out, last)

        return jax.grad(loss, (0, 1, 2), has_aux=True)(x, kernel, first)

    for ids in (plain, packed, padded):
        given = first if has_first else zeros
        grads, (out, last) = both(attention.shard(x), kernel, first, attention.shard(ids))
        wanted = oracle.causal_conv(x, kernel, ids=ids, first=given)
        close(attention.unshard(out), wanted[0], TOLERANCE, "out")
        close(np.asarray(last), wanted[1], TOLERANCE, "last inputs")

        def product(x, kernel, first, ids=ids):
            out, last = oracle.causal_conv(x, kernel, ids=ids, first=first)
            return (out * cotangent).sum() + (last * last_cotangent).sum()

        # It is linear in x and first together, and affine in the kernel.
        steps = [rng.normal(size=y.shape) for y in (x, kernel, first)]
        along = [
            product(steps[0], kernel, zeros),
            product(x, steps[1], given) - product(x, np.zeros_like(kernel), given),
            product(np.zeros_like(x), kernel, steps[2]) if has_first else 0,
        ]
        for name, gradient, step, expected in zip("xkf", grads, steps, along, strict=True):
            gradient = attention.unshard(gradient) if name == "x" else np.asarray(gradient)
            found = (gradient.astype(np.float64) * step).sum()
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-4), name


@pytest.mark.parametrize(
    ("degrees", "layout"),
    [
        (st.Degrees(), "contiguous"),
        (st.Degrees(ring=8), "contiguous"),
        (st.Degrees(ring=2, data=2, tensor=2), "zigzag"),
    ],
)
def test_gradients_of_a_convolution_in_sixteen_bits_are_rounded_once(degrees, layout):
    """Also those of the kernel, over all devices; what a slice gets from the next is sent so."""
    width, shape = 8, (2, 64, 6)
    rng = np.random.default_rng(17)
    (x, kernel, dout), (wide, weights, cotangent) = in_sixteen_bits(
        *(rng.normal(size=y) for y in (shape, (width, 6), shape))
    )
    attention = attention_on(degrees, "ssd", layout=layout)
    _, pull = jax.vjp(attention.causal_conv, attention.shard(x), jnp.asarray(kernel))
    dx, dkernel = pull(attention.shard(dout))
    inputs = np.pad(wide.astype(np.float64), [(0, 0), (width - 1, 0), (0, 0)])
    ahead = np.pad(cotangent.astype(np.float64), [(0, 0), (0, width - 1), (0, 0)])
    wanted = sum(ahead[:, i : i + 64] * weights[width - 1 - i] for i in range(width))
    of_kernel = np.stack([(inputs[:, i : i + 64] * cotangent).sum((0, 1)) for i in range(width)])
    once = root_mean_square(wanted.astype(jnp.bfloat16), wanted)
    borders = 1.0 if degrees.sequence == 1 else 1.2
    assert root_mean_square(attention.unshard(dx), wanted) <= 1.01 * borders * once
    once = root_mean_square(of_kernel.astype(jnp.bfloat16), of_kernel)
    assert root_mean_square(dkernel, of_kernel) <= 1.01 * once


@pytest.mark.parametrize("rule", RULES)
def test_new_tokens_follow_a_prompt(rule):
    """A prompt, one token, and 70 tokens at once, beside the whole row."""
    *tokens, _, _, _ = inputs(rule, 104, seed=13)
    attention = attention_on(st.Degrees(ring=2, tensor=2), rule, layout="zigzag")
    prompt, one, many = ([x[:, a:b] for x in tokens] for a, b in ((0, 32), (32, 33), (33, 103)))
    early, state = attention(*attention.shard(*prompt), return_state=True)
    found = [attention.unshard(early)]
    for new in (one, many):
        out, state = jax.jit(attention.decode)(*new, state=state)
        found.append(np.asarray(out))
    options = dict(delta=rule != "ssd", scale=6**-0.5 if rule != "ssd" else 1.0)
    out, states = oracle.linear_attention(*tokens, **options)
    close(np.concatenate(found, 1), out[:, :103], TOLERANCE, "out")
    close(np.asarray(state), states[103], TOLERANCE, "state")
    with refused(InputError, "initial_state must be float32", "[2, 2, 6, 5]"):
        attention.decode(*one, state=state[:, :2])


def test_convolution_of_new_tokens_follows_a_prompt():
    rng = np.random.default_rng(14)
    x, kernel = rng.normal(size=(2, 21, 6)), rng.normal(size=(4, 6))
    x, kernel = x.astype(np.float32), kernel.astype(np.float32)
    attention = attention_on(st.Degrees(ring=2), "ssd")
    early, last = attention.causal_conv(attention.shard(x[:, :16]), kernel, return_last=True)
    found = [attention.unshard(early)]
    for new in (x[:, 16:17], x[:, 17:]):
        out, last = attention.decode_conv(new, kernel, initial=last)
        found.append(np.asarray(out))
    close(np.concatenate(found, 1), oracle.causal_conv(x, kernel)[0], TOLERANCE, "out")
    np.testing.assert_array_equal(last, x[:, 18:])


@pytest.mark.slow_except_every(11)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("devices", [2, 5, 8])
@pytest.mark.parametrize("with_states", [False, True])
def test_bytes_are_those_of_compiled_programs(rule, layout, devices, with_states):
    """For any number of tokens: to and from each device."""
    attention = attention_on(st.Degrees(ring=devices), rule, layout=layout)
    sizes = dict(batch=2, heads=4, key_dim=6, value_dim=5)
    packed = rule != "kda"
    cost = attention.communication(
        **sizes, packed=packed, initial_state=with_states, return_state=with_states
    )
    for tokens in (1, 3):
        arrays = inputs(rule, tokens * 2 * devices)
        *given, state, dout, dlast = map(jnp.asarray, arrays)
        ids = jnp.zeros(dout.shape[:2], jnp.int32) if packed else None

        def loss(*args, dout=dout, dlast=dlast):
            *given, state, ids = args
            found = attention(
                *given,
                segment_ids=ids,
                initial_state=state if with_states else None,
                return_state=with_states,
            )
            out, last = found if with_states else (found, dlast)
            return (out * dout).sum() + (last * dlast).sum(), found

        grad = jax.grad(loss, tuple(range(5 + with_states)), has_aux=True)
        for function, traffic in ((lambda *args: loss(*args)[1], cost.forward), (grad, cost.total)):
            shardings = jax.NamedSharding(attention.mesh, attention.sequence_spec)
            put = [jax.device_put(x, shardings) for x in given]
            text = jax.jit(function).lower(*put, state, ids).compile().as_text()
            found = read_messages(text)
            wanted = messages(attention.degrees, traffic.transfers)
            np.testing.assert_array_equal(found.matrix, wanted.matrix)
            assert traffic.received_bytes == found.matrix.sum(0).max()


def test_table_of_the_page():
    """Bytes of a layer of Qwen3.5-9B on 64 devices, beside other ways, and what `print` says."""
    page = (Path(__file__).parents[2] / "docs/attention.md").read_text()
    rows = re.findall(r"^\| ([\d,]+) \| 46 \|.*", page, re.M)
    assert len(rows) == 2
    mesh = jax.sharding.AbstractMesh((64,), ("seq",))
    linear = st.LinearAttention(mesh, rule="gated_delta", axis="seq")
    layer = dict(heads=32, key_heads=16, key_dim=128, value_dim=128)
    for tokens in rows:
        each = int(tokens.replace(",", ""))
        found = linear.explain(seq_len=64 * each, **layer)
        assert found.exchange_bytes is None
        assert "the devices do not divide them" in str(found)
        # Inputs and outputs in bfloat16 and gates in float32, there and back, in both passes.
        of_token = 2 * (2 * 16 * 128 + 2 * 32 * 128) + 4 * 2 * 32
        attention = [
            st.communication(
                degrees,
                batch=1,
                seq_len=64 * each,
                heads=16,
                kv_heads=4,
                head_dim=256,
                dtype="bfloat16",
                mask=st.masks.Causal(),
                layout="zigzag",
            ).total.received_bytes
            for degrees in (st.Degrees(ring=64), st.Degrees(ring=16, head=4))
        ]
        sizes = (
            found.communication.total.received_bytes,
            found.gathered_bytes,
            2 * each * of_token * 63 // 64,
            *attention,
        )
        row = " | ".join([tokens, *(f"{x / 2**20:,.0f}" for x in sizes)])
        assert f"| {row} |" in page


def test_explanation_compares_with_a_split_by_heads():
    """It is that of a tensor axis, whose inputs and outputs are exchanged for those of tokens."""
    linear = attention_on(st.Degrees(ring=2, data=2), "gated_delta")
    sizes = dict(heads=4, key_dim=6, value_dim=5, key_heads=2)
    found = linear.explain(seq_len=64, **sizes, batch=2, dtype="float32")
    here = 32 * 4 * (2 * 2 * 6 + 4 * 5 + 4 + 4)
    assert found.sizes.input_bytes == here
    assert found.exchange_bytes == 2 * (here + 32 * 4 * 4 * 5) // 2
    assert found.sizes.model_flops == 32 * 4 * 6 * 6 * 5
    assert found.sizes.kept_bytes == 4 * 4 * (6 * 6 + 6 * 5)
    states = 2 * found.communication.forward.received_bytes
    least = int(re.search(r"fewer from ([\d,]+) tokens", str(found))[1].replace(",", ""))
    assert (least - 1) * found.exchange_bytes < states * 32 <= least * found.exchange_bytes
    with refused(InputError, "seq_len must be divisible by", seq_len=7):
        linear.explain(seq_len=7, **sizes)


@pytest.mark.slow_except_every(3)
@pytest.mark.parametrize("rule", RULES)
def test_what_is_kept_is_not_computed_again(rule):
    """Under `jax.checkpoint`, the scan over devices; XLA may find out what is there twice."""
    attention = attention_on(st.Degrees(ring=4), rule)
    tokens = attention.shard(*inputs(rule, 64)[:5])
    sent = []
    for names in (None, ("linear_states",), ()):
        call = attention
        if names is not None:
            policy = jax.checkpoint_policies.save_only_these_names(*names)
            call = jax.checkpoint(attention, policy=policy)

        def loss(*inputs, call=call):
            return call(*inputs).sum()

        grad = jax.jit(jax.value_and_grad(loss, tuple(range(5))))
        sent.append(grad.lower(*tokens).as_text().count("collective_permute"))
    assert sent[0] == sent[1] < sent[2]


def test_mistakes_are_named():
    attention = attention_on(st.Degrees(ring=2), "gated_delta")
    q, k, v, decay, beta, state, *_ = map(jnp.asarray, inputs("gated_delta", 8))
    mesh = attention.mesh
    with pytest.raises(TypeError, match="'rule'"):
        st.LinearAttention(mesh)
    with refused(InputError, "rule must be one of", "None"):
        st.LinearAttention(mesh, rule=None)
    with refused(InputError, "rule must be one of", "'delta'"):
        st.LinearAttention(mesh, rule="delta")
    with refused(InputError, "scale must be", "inf"):
        st.LinearAttention(mesh, rule="ssd", scale=np.inf)
    with refused(InputError, "backend must be one of ('xla', 'jla')", backend="cuda"):
        st.LinearAttention(mesh, rule="ssd", backend="cuda")
    with refused(UnsupportedError, "backend='jla' does not serve this", "Use backend='xla'"):
        dataclasses.replace(attention, backend="jla", degrees=None)(q, k, v)
    with refused(InputError, "query and key must be", "query [2, 8, 2, 5]"):
        attention(q[..., :5], k, v)
    with refused(InputError, "one dtype", "bfloat16, float32"):
        attention(q.astype("bfloat16"), k, v)
    with refused(InputError, "decay must be floats [2, 8, heads]", "[2, 8, 4, 6]"):
        attention(q, k, v, jnp.zeros((2, 8, 4, 6)))
    with refused(InputError, "decay must be floats [2, 8, heads, 6]", "rule='kda'"):
        dataclasses.replace(attention, rule="kda", degrees=None)(q, k, v, decay)
    with refused(InputError, "beta must be floats", "int32"):
        attention(q, k, v, decay, jnp.ones((2, 8, 4), jnp.int32))
    with refused(InputError, "must divide the largest number of heads", "'beta': 3"):
        attention(q, k, v, decay, beta[:, :, :3])
    with refused(InputError, "initial_state must be float32", "[2, 4, 6, 5]"):
        attention(q, k, v, initial_state=state[:, :2])
    with refused(InputError, "segment_ids must be [batch, seq] = [2, 8]", "[2, 7]"):
        attention(q, k, v, segment_ids=jnp.zeros((2, 7), jnp.int32))
    with refused(InputError, "divisible by tensor", "'state': 3", tensor=2):
        sizes = dict(key_dim=6, value_dim=5)
        attention_on(st.Degrees(tensor=2), "kda").communication(batch=1, heads=3, **sizes)
    with refused(InputError, "kernel [width, ...]", "kernel [4, 5]"):
        attention.causal_conv(q, jnp.zeros((4, 5)))
    for x, kernel, initial in (
        (jnp.ones((2, 8, 4), int), jnp.ones((3, 4)), jnp.zeros((2, 2, 4))),
        (beta, jnp.ones((3, 4), int), jnp.zeros((2, 2, 4))),
        (beta, jnp.ones((3, 4), "complex64"), jnp.zeros((2, 2, 4))),
        (beta, jnp.ones((3, 4)), jnp.ones((2, 2, 4), bool)),
    ):
        with refused(InputError, "x, kernel and initial must be floats; got x "):
            attention.causal_conv(x, kernel, initial=initial)
        with refused(InputError, "x, kernel and initial must be floats; got x "):
            attention.decode_conv(x, kernel, initial=initial)
    with refused(InputError, "x, kernel and initial must be floats; got x float32, kernel int32"):
        attention.conv_local(beta, jnp.ones((3, 4), jnp.int32))
    with refused(
        InputError, "state must be float32 [batch, heads, key_dim, value_dim]", state=None
    ):
        attention.decode(q, k, v, decay, beta, state=None)
    with refused(InputError, "initial must be [batch, width - 1, ...]", initial=None):
        attention.decode_conv(beta, jnp.ones((3, 4)), initial=None)
    with refused(InputError, "at least width - 1 tokens; got 4, width=6"):
        attention.causal_conv(beta, jnp.zeros((6, 4)))
    with refused(InputError, "seq_len must be divisible by", seq_len=7):
        attention(q[:, :7], k[:, :7], v[:, :7])


def test_cut_covers_all_tokens():
    for tokens in (1, 2, 3, 63, 64, 65, 1000, 4096, 131_072):
        cut = Cut.of(tokens)
        assert cut.tokens <= CHUNK
        assert cut.chunks <= GROUP
        assert tokens <= cut.size < tokens * 2 + cut.groups * CHUNK
