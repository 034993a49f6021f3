"""Latent attention: latents travel, and a device makes keys and values of what arrives."""

import functools
import itertools
import re
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import oracle
import startrail_jax as st
from attention_cases import FLOAT32_ERROR, QUICK, make_attention, relative_error
from refusals import refused
from startrail_jax.analysis.hlo import read_traffic
from startrail_jax.errors import InputError, UnsupportedError
from startrail_jax.rings import latents, sizes
from startrail_jax.testing import assert_model_exact, draw_documents

SCHEMES = {
    "one device": st.Degrees(),
    "ring of 2": st.Degrees(ring=2),
    "ring of 3": st.Degrees(ring=3, data=2),
    "ring of 6": st.Degrees(ring=6),
    "Ring Attention": st.Degrees.ring_attention(8),
    "all-gather": st.Degrees.all_gather(8),
    "Ulysses": st.Degrees.ulysses(4),
    "2D-Attention": st.Degrees.loongtrain(8, head=2),
    "StarTrail": st.Degrees.startrail(8, c=2),
    "StarTrail of 16": st.Degrees.startrail(16, c=2),
    "StarTrail, C = 4": st.Degrees.startrail(16, c=4),
    "teams": st.Degrees(team=2, ring=4),
    "StarTrail x Ulysses": st.Degrees.startrail(8, c=2, head=2),
    "tensor": st.Degrees(tensor=2, ring=4),
    "head and tensor": st.Degrees(head=2, tensor=2, ring=2),
}
LAYOUTS = ("contiguous", "zigzag")
BATCH, LENGTH, HEADS, RANK, KEY, ROTARY, VALUE = 2, 96, 4, 10, 7, 3, 5
NAMES = ("out", "lse", "query", "latent", "rotated_key", "key_kernel", "value_kernel")


def draw(rotary=ROTARY, key_len=LENGTH, dtype="float32", seed=0):
    """Query, latent, rotated key, both matrices, and cotangents of out and lse."""
    rng = np.random.default_rng(seed)

    def normal(*shape, size=1.0):
        return (size * rng.normal(size=shape)).astype(jnp.dtype(dtype))

    return (
        normal(BATCH, LENGTH, HEADS, KEY + rotary),
        normal(BATCH, key_len, RANK),
        normal(BATCH, key_len, rotary) if rotary else None,
        normal(RANK, HEADS, KEY, size=RANK**-0.5),
        normal(RANK, HEADS, VALUE, size=RANK**-0.5),
        normal(BATCH, LENGTH, HEADS, VALUE),
        rng.normal(size=(BATCH, HEADS, LENGTH)).astype(np.float32),
    )


def expanded(latent, rotated, key_kernel, value_kernel):
    """Keys and values of all heads, in float64."""
    latent, key_kernel, value_kernel = (
        np.asarray(x, np.float64) for x in (latent, key_kernel, value_kernel)
    )
    key = np.einsum("bsr,rnd->bsnd", latent, key_kernel)
    if rotated is not None:
        shared = np.asarray(rotated, np.float64)[:, :, None]
        key = np.concatenate([key, np.broadcast_to(shared, (*key.shape[:3], shared.shape[3]))], 3)
    return key, np.einsum("bsr,rnv->bsnv", latent, value_kernel)


def dense(query, latent, rotated, key_kernel, value_kernel, dout, dlse, **visible):
    """Results and gradients under `NAMES`, in float64."""
    key, value = expanded(latent, rotated, key_kernel, value_kernel)
    out, lse = oracle.attention(query, key, value, **visible)
    dq, dk, dv = oracle.gradients(query, key, value, dout, dlse, **visible)
    own, rest = dk[..., :KEY], dk[..., KEY:]
    latent = np.asarray(latent, np.float64)
    found = {
        "out": out,
        "lse": lse,
        "query": dq,
        "latent": np.einsum("bsnd,rnd->bsr", own, key_kernel)
        + np.einsum("bsnv,rnv->bsr", dv, value_kernel),
        "rotated_key": None if rotated is None else rest.sum(2),
        "key_kernel": np.einsum("bsr,bsnd->rnd", latent, own),
        "value_kernel": np.einsum("bsr,bsnv->rnv", latent, dv),
    }
    return {name: x for name, x in found.items() if x is not None}


def place(attention, arrays):
    """The inputs of a call on the mesh, from arrays in natural order."""
    query, latent, rotated, *kernels = arrays
    spec = P(None, attention.query_spec(HEADS)[2], None)
    tokens = (None if x is None else attention.shard(x) for x in (query, latent, rotated))
    return *tokens, *(jax.device_put(x, NamedSharding(attention.mesh, spec)) for x in kernels)


def results(attention, *problem, call=None, compiler_options=QUICK, **given):
    """Results and gradients under `NAMES`, on the host in natural order."""
    *arrays, dout, dlse = problem
    place_lse = NamedSharding(attention.mesh, attention.lse_spec)
    cotangents = (
        attention.shard(dout),
        jax.device_put(attention.layout.permute(dlse, axis=2), place_lse),
    )
    call = call or functools.partial(attention.latent, return_lse=True)

    @functools.partial(jax.jit, compiler_options=compiler_options)
    def program(inputs, given, cotangents):
        outputs, pull = jax.vjp(functools.partial(call, **given), *inputs)
        return *outputs, *pull(cotangents)

    inputs = place(attention, arrays)
    found = dict(zip(NAMES, program(inputs, given, cotangents), strict=True))
    assert found["out"].dtype == found["query"].dtype == inputs[0].dtype
    axes = {"lse": 2, "out": 1, "query": 1, "latent": 1, "rotated_key": 1}
    return {
        name: attention.unshard(x, axis=axes[name]) if name in axes else np.asarray(x)
        for name, x in found.items()
        if x is not None
    }


@contextmanager
def expanding(at_most):
    """Keys and values of units take this many bytes at a time; traces are not kept from before."""
    with mock.patch.object(sizes, "EXPANDED_BYTES", at_most):
        jax.clear_caches()
        yield
    jax.clear_caches()


def check(found, expected, bound=FLOAT32_ERROR):
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        empty = x == oracle.EMPTY
        if name == "lse":
            np.testing.assert_array_equal(found[name][empty], np.float32(oracle.EMPTY))
        here = np.where(empty, 0, found[name].astype(np.float64))
        assert relative_error(here, np.where(empty, 0, x)) <= bound, name


@functools.cache
def causal_problem(rotary):
    problem = draw(rotary)
    return problem, dense(*problem, causal=True)


@pytest.mark.slow_except_every(4)
@pytest.mark.parametrize("rotary", [ROTARY, 0])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_latent_attention_is_exact(scheme, layout, rotary):
    attention = make_attention(SCHEMES[scheme], causal=True, layout=layout)
    problem, expected = causal_problem(rotary)
    check(results(attention, *problem), expected)


OPTIONS = {
    "queries travel": dict(backward="query"),
    "latents travel": dict(backward="kv"),
    "published": dict(published=True),
    "double ring": dict(inner=2),
    "kept": dict(keep_gathered=True),
    "exchange for balance": dict(balance="exchange"),
    "its own scale": dict(scale=0.7),
    "softcap": dict(softcap=2.0),
    "window": dict(window=29),
    "full": dict(causal=False),
    "chunks of tokens": dict(mask=st.masks.Chunked(17) & st.masks.Causal()),
}
AS_ORACLE = {
    "scale": lambda x: dict(scale=x, causal=True),
    "softcap": lambda x: dict(softcap=x, causal=True),
    "window": lambda x: dict(window=x, causal=True),
    "causal": lambda x: dict(causal=x),
    "mask": lambda _: dict(causal=True, rule=lambda i, j: i // 17 == j // 17),
}


@pytest.mark.slow_except_every(3)
@pytest.mark.parametrize("at_once", [1, HEADS])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_an_attention_serve_latents(name, at_once):
    options = OPTIONS[name]
    degrees = (
        st.Degrees(team=2, group=2, ring=2)
        if name == "published"
        else st.Degrees(ring=4, head=2)
        if at_once == 1
        else st.Degrees.startrail(16, c=2)
    )
    given = {"causal": True} if not {"window", "causal", "mask"} & options.keys() else {}
    attention = make_attention(degrees, **options, **given)
    problem, visible = draw(), dict(causal=True)
    for key, as_oracle in AS_ORACLE.items():
        if key in options:
            visible = as_oracle(options[key])
    with expanding(1) if at_once == 1 else nullcontext():
        check(results(attention, *problem), dense(*problem, **visible))


@pytest.mark.parametrize("scheme", ["StarTrail", "2D-Attention", "tensor"])
def test_documents_and_padding(scheme):
    """Padding may be NaN, and gets no gradients."""
    attention = make_attention(SCHEMES[scheme], causal=True, layout="zigzag")
    ids = draw_documents(np.random.default_rng(1), BATCH, LENGTH)
    problem = draw()
    expected = dense(*problem, causal=True, segment_ids=ids)
    for x in problem[:3]:
        x[ids < 0] = np.nan
    found = results(attention, *problem, segment_ids=attention.shard(ids))
    assert not found["latent"][ids < 0].any()
    check(found, expected)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("scheme", ["StarTrail", "2D-Attention", "two rows of teams"])
def test_trees(scheme, window):
    degrees = SCHEMES.get(scheme, st.Degrees(data=2, team=2, ring=2))
    attention = make_attention(
        degrees, layout="zigzag", **(dict(window=window) if window else dict(causal=True))
    )
    # A beginning of 30 tokens, three texts that continue it, another text, and padding.
    ends = np.concatenate(
        [np.full(n, end) for n, end in ((30, 70), (15, 45), (15, 60), (10, 70), (20, 90), (6, -1))]
    )
    until = np.stack([ends, np.where(ends < 0, 96, ends)])
    depth = np.asarray(st.branch_positions(until))

    def rule(i, j):
        seen = (until[:, None, :] > i) & (until[:, None, :] >= 0) & (until[:, :, None] >= 0)
        return seen if window is None else seen & (depth[:, :, None] - depth[:, None, :] < window)

    problem = draw()
    expected = dense(*problem, causal=True, rule=rule)
    check(results(attention, *problem, visible_until=attention.shard(until)), expected)


def test_cross_attention():
    attention = make_attention(st.Degrees.startrail(8, c=2), causal=False)
    problem = draw(key_len=40)
    check(results(attention, *problem), dense(*problem))


@pytest.mark.parametrize("scheme", ["StarTrail", "head and tensor"])
def test_local_in_a_shard_map(scheme):
    attention = make_attention(SCHEMES[scheme], causal=True, layout="zigzag")
    tokens, queries = attention.sequence_spec, attention.query_spec(HEADS)
    of_heads = P(None, queries[2], None)
    ids = draw_documents(np.random.default_rng(1), BATCH, LENGTH)
    call = jax.shard_map(
        lambda *x: attention.latent_local(*x, x[-1]),
        mesh=attention.mesh,
        in_specs=(queries, tokens, tokens, of_heads, of_heads, tokens),
        out_specs=(queries, attention.lse_spec),
    )
    problem, sharded = draw(), attention.shard(ids)
    found = results(attention, *problem, call=lambda *x: call(*x, sharded))
    check(found, dense(*problem, causal=True, segment_ids=ids))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_types_round_about_as_much_as_expanded_keys_do(dtype):
    attention = make_attention(st.Degrees.startrail(8, c=2), causal=True)
    problem = draw(dtype=dtype)
    expected = dense(*(x if i < 7 else None for i, x in enumerate(problem)), causal=True)
    found = results(attention, *problem)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def plain(*inputs):
        def call(query, latent, rotated, key_kernel, value_kernel):
            key, value = latents.Expansion(key_kernel, value_kernel).keys_and_values(
                jnp.concatenate([latent, rotated], -1)[:, :, None]
            )
            return attention(query, key, value, return_lse=True)

        outputs, pull = jax.vjp(call, *inputs[:5])
        return *outputs, *pull(tuple(inputs[5:]))

    beside = dict(zip(NAMES, map(np.asarray, plain(*problem)), strict=True))
    for name, x in expected.items():
        errors = [relative_error(y[name].astype(np.float64), x) for y in (found, beside)]
        assert errors[0] <= 1.5 * errors[1] + FLOAT32_ERROR, (name, errors)


def test_few_heads_are_expanded_at_a_time():
    """Of 16 heads, all or one: the memory for keys and values falls to a part."""
    assert sizes.heads_at_once(16, 131072, 320, 2) == 2
    assert sizes.heads_at_once(16, 2**20, 320, 2) == 1
    assert sizes.heads_at_once(12, 1000, 320, 2) == 12
    assert sizes.heads_at_once(12, 2**18, 160, 2) == 3
    attention = make_attention(st.Degrees(), causal=True)
    heads, rank, channels, length = 16, 16, 16, 512
    shapes = [(1, length, heads, channels), (1, length, rank), (rank, heads, channels)]
    query, latent, kernel = (jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes)
    unit = length * 2 * channels * 4

    def size(at_once):
        def both(query, latent, *kernels):
            call = lambda *x: attention.latent(*x[:2], None, *x[2:]).sum()  # noqa: E731
            return jax.grad(call, (0, 1, 2, 3))(query, latent, *kernels)

        with expanding(at_once * unit):
            lowered = jax.jit(both).lower(query, latent, kernel, kernel)
        return lowered.compile(QUICK).memory_analysis().temp_size_in_bytes

    # Keys and values of all heads and their gradients are 2 x 16 units.
    assert size(16) - size(1) > 1.5 * 15 * unit


def test_settings_are_said():
    attention = make_attention(st.Degrees.startrail(8, c=2), causal=True)
    sizes = dict(seq_len=2**20, heads=16, head_dim=192, value_head_dim=128)
    found = attention.explain(**sizes, latent_dim=576, platform="cuda", capability=(9, 0))
    assert (found.backend, found.heads_at_once, found.travels) == ("cudnn", 1, "kv")
    assert "for 1 of a device's heads at a time" in str(found)
    assert attention.explain(**sizes).heads_at_once is None
    with refused(InputError, "latent_dim=576, kv_heads=4"):
        attention.explain(**sizes, latent_dim=576, kv_heads=4)


def test_a_model_with_latents_is_compared_with_a_dense_one():
    def loss(attention, params, x):
        latent = x @ params["down"]
        query = jnp.einsum("bsw,wnd->bsnd", x, params["query"])
        out = attention.latent(query, latent, None, params["key"], params["value"])
        return (out**2).sum()

    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32) / 3  # noqa: E731
    params = {
        "down": normal(8, 6),
        "query": normal(8, 2, 4),
        "key": normal(6, 2, 4),
        "value": normal(6, 2, 3),
    }
    attention = make_attention(st.Degrees.startrail(4, c=2), causal=True, layout="zigzag")
    assert_model_exact(attention, loss, params, normal(2, 32, 8))


# Bytes -------------------------------------------------------------------------------------------

SIX = {
    "Ring Attention": st.Degrees.ring_attention(8),
    "all-gather": st.Degrees.all_gather(8),
    "Ulysses": st.Degrees.ulysses(8),
    "2D-Attention": st.Degrees.loongtrain(8, head=2),
    "StarTrail": st.Degrees.startrail(8, c=2),
    "StarTrail x Ulysses": st.Degrees.startrail(8, c=2, head=2),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("backward", ["query", "kv"])
@pytest.mark.parametrize("scheme", [*SIX, "tensor", "published", "exchange"])
def test_bytes_are_those_of_the_compiled_program(scheme, backward, packed):
    options = dict(backward=backward, balance="layout")
    degrees = SIX.get(scheme, st.Degrees.startrail(8, c=2))
    if scheme == "tensor":
        degrees = st.Degrees(tensor=2, ring=2, team=2)
    options |= {"published": True} if scheme == "published" else {}
    options |= {"balance": "exchange"} if scheme == "exchange" else {}
    attention = make_attention(degrees, "explicit", causal=True, **options)
    heads, length = 8, 4 * degrees.sequence
    expected = st.communication(
        degrees,
        batch=1,
        seq_len=length,
        heads=heads,
        kv_heads=1,
        head_dim=KEY + ROTARY,
        value_head_dim=VALUE,
        latent_dim=RANK + ROTARY,
        dtype="float32",
        packed=packed,
        **options,
    )

    def struct(spec, *shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(attention.mesh, spec))

    tokens, queries = attention.sequence_spec, attention.query_spec(heads)
    of_heads = P(None, queries[2], None)
    arrays = (
        struct(queries, 1, length, heads, KEY + ROTARY),
        struct(tokens, 1, length, RANK),
        struct(tokens, 1, length, ROTARY),
    )
    kernels = (
        struct(of_heads, RANK, heads, KEY),
        struct(of_heads, RANK, heads, VALUE),
    )
    ids = struct(tokens, 1, length, dtype=jnp.int32) if packed else None
    dout = struct(queries, 1, length, heads, VALUE)

    def forward(arrays, kernels, ids):
        return attention.latent(*arrays, *kernels, segment_ids=ids)

    def both(arrays, kernels, ids, dout):
        # Gradients of the matrices are summed as those of all weights are.
        out, pull = jax.vjp(lambda x: forward(x, kernels, ids), arrays)
        return out, pull(dout)

    options = {"xla_backend_optimization_level": 0}
    for function, given, traffic in (
        (forward, (arrays, kernels, ids), expected.forward),
        (both, (arrays, kernels, ids, dout), expected.total),
    ):
        text = jax.jit(function).lower(*given).compile(options).as_text()
        assert read_traffic(text).by_collective == traffic.by_collective


def test_table_of_the_page():
    page = (Path(__file__).parents[2] / "docs/attention.md").read_text(encoding="utf-8")
    section = page.partition("## Latent attention")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| ([\w -]+) \| (\d.*) \|$", section, re.M))
    assert rows.keys() == SIX.keys()
    for scheme, row in rows.items():
        said = []
        for heads, of_keys in itertools.product((16, 128), (dict(kv_heads=1, latent_dim=576), {})):
            sizes = dict(seq_len=131072, heads=heads, head_dim=192, value_head_dim=128)
            given = dict(batch=1, layout="zigzag", kv_heads=heads) | of_keys
            cost = st.communication(SIX[scheme], **sizes, **given)
            passes = (x.received_bytes / 2**30 for x in (cost.forward, cost.backward))
            said.append(" + ".join(f"{x:.2f}" for x in passes))
        assert row == " | ".join(said)


# Decoding ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotary", [ROTARY, 0])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_decoding_with_a_cache_of_latents(scheme, rotary):
    """Ragged positions; slots that are not filled yet are not seen."""
    attention = make_attention(SCHEMES[scheme], "explicit", causal=True, layout="zigzag")
    query, latent, rotated, *kernels, _, _ = draw(rotary)
    positions = np.array([[40, 7, 95], [0, 61, 12]], np.int32)
    out, _ = oracle.attention(query, *expanded(latent, rotated, *kernels), causal=True)
    rows = np.arange(BATCH)[:, None]
    whole = latent if rotated is None else np.concatenate([latent, rotated], -1)

    def put(x, spec):
        return jax.device_put(x, NamedSharding(attention.mesh, spec))

    spec, query_spec = attention.key_spec(1), attention.decode_spec(HEADS)
    empty = put(np.full((BATCH, LENGTH, 1, whole.shape[2]), np.nan, np.float32), spec)
    kept = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (BATCH, LENGTH))
    batch = P(query_spec[0])
    new = put(whole[:, :, None], P(spec[0], None, *spec[2:]))
    cache = attention.update_cache(empty, new, put(kept, batch))
    of_heads = [put(x, P(None, query_spec[2], None)) for x in kernels]
    given = put(query[rows, positions], query_spec), cache, put(positions, batch), *of_heads
    found = jax.jit(attention.latent_decode, compiler_options=QUICK)(*given)
    assert relative_error(np.asarray(found), out[rows, positions]) <= FLOAT32_ERROR


def test_decoding_a_branch():
    attention = make_attention(st.Degrees.startrail(4, c=2), causal=True, layout="zigzag")
    query, latent, rotated, *kernels, _, _ = draw()
    until = np.stack([np.repeat([96, 40, 96], [30, 10, 56]), np.repeat([96, 50, 96], [20, 30, 46])])
    key, value = expanded(latent, rotated, *kernels)
    seen = lambda i, j: until[:, None, :] > i  # noqa: E731
    out, _ = oracle.attention(query, key, value, causal=True, rule=seen)
    cache = attention.shard(np.concatenate([latent, rotated], -1)[:, :, None])
    positions = np.array([[60, 70], [80, 95]], np.int32)
    rows = np.arange(BATCH)[:, None]
    found = attention.latent_decode(
        query[rows, positions], cache, positions, *kernels, visible_until=attention.shard(until)
    )
    assert relative_error(np.asarray(found), out[rows, positions]) <= FLOAT32_ERROR


# Mistakes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(latent=(2, 96, 11)), ["latent [2, 96, 11]", "Correct the odd one out"]),
        (dict(latent=(2, 96, 1, 10)), ["latent [2, 96, 1, 10]"]),
        (dict(rotated_key=(2, 96, 4)), ["rotated_key [2, 96, 4]"]),
        (dict(rotated_key=None), ["rotated_key None", "or None if that is 0"]),
        (dict(key_kernel=(10, 4, 10)), ["key_kernel [10, 4, 10]"]),
        (dict(value_kernel=(10, 2, 5)), ["value_kernel [10, 2, 5]"]),
        (dict(latent=(2, 90, 10), rotated_key=(2, 90, 3)), ["queries and keys of one length"]),
        (dict(query=(3, 96, 4, 10)), ["query [3, 96, 4, 10]"]),
    ],
)
def test_arrays_that_do_not_fit(change, words):
    attention = make_attention(st.Degrees(ring=2), causal=True)
    names = ("query", "latent", "rotated_key", "key_kernel", "value_kernel")
    given = dict(zip(names, draw()[:5], strict=True))
    for name, shape in change.items():
        given[name] = None if shape is None else np.zeros(shape, np.float32)
    with refused(InputError, *words):
        attention.latent(**given)


def test_options_that_do_not_serve_latents_are_refused():
    query, latent, rotated, *kernels, _, _ = draw()
    arrays = query, latent, rotated, *kernels
    attention = functools.partial(make_attention, st.Degrees(ring=2))
    with refused(InputError, "must have one dtype", "bfloat16"):
        attention(causal=True).latent(query, latent.astype(jnp.bfloat16), *arrays[2:])
    with refused(UnsupportedError, "exchange='sparse'", "latents are expanded where the rings"):
        attention(window=5, exchange="sparse").latent(*arrays)
    with refused(InputError, "head_chunks=2, key heads of a device=1"):
        attention(causal=True, head_chunks=2).latent(*arrays)
    with refused(InputError, "must be [batch, new, heads, head_dim]", "[2, 96, 10]"):
        positions = np.zeros((2, 96), np.int32)
        attention(causal=True).latent_decode(query, latent, positions, *kernels)
    with refused(InputError, "needs a causal attention"):
        cache = np.concatenate([latent, rotated], -1)[:, :, None]
        attention(causal=False).latent_decode(query, cache, positions, *kernels)
    with refused(InputError, "latent_dim=13, kv_heads=2"):
        st.communication(
            st.Degrees(ring=2), batch=1, seq_len=8, heads=4, kv_heads=2, head_dim=8, latent_dim=13
        )
