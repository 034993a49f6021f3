"""Decoding: a few new tokens attend to a cache that lies sharded over the sequence axes."""

import functools
import re

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
from startrail_jax import masks
from startrail_jax.analysis.hlo import read_traffic
from startrail_jax.errors import InputError
from startrail_jax.tokens.layout import KINDS

SCHEMES = {
    "one device": st.Degrees(),
    "Ring Attention": st.Degrees.ring_attention(8),
    "all-gather": st.Degrees.all_gather(8),
    "Ulysses": st.Degrees.ulysses(8),
    "2D-Attention": st.Degrees.loongtrain(8, head=2),
    "StarTrail": st.Degrees.startrail(8, c=2),
    "teams": st.Degrees(team=2, ring=4),
    "tiles": st.Degrees(team=4, group=2),
    "StarTrail x Ulysses": st.Degrees.startrail(8, c=2, head=2),
    "data and tensor": st.Degrees(data=2, team=2, tensor=2),
}
BATCH, SLOTS, HEADS, HEAD_DIM, VALUE_DIM = 2, 48, 8, 7, 11


def attention_on(degrees, **options):
    return make_attention(degrees, "explicit", **{"layout": "zigzag", **options})


def put(attention, x, spec):
    return jax.device_put(x, NamedSharding(attention.mesh, spec))


def draw(kv_heads=2, dtype="float32", new=3, heads=HEADS):
    """Queries and caches in natural order, and ragged positions of the queries."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(jnp.dtype(dtype))  # noqa: E731
    query = normal(BATCH, new, heads, HEAD_DIM)
    key = normal(BATCH, SLOTS, kv_heads, HEAD_DIM)
    value = normal(BATCH, SLOTS, kv_heads, VALUE_DIM)
    positions = np.stack([rng.choice(SLOTS, size=new, replace=False) for _ in range(BATCH)])
    return query, key, value, positions.astype(np.int32)


def dense(query, key, value, positions, **visible):
    """The oracle, which has queries at all positions: those that are asked for are taken out."""
    whole = np.zeros((BATCH, max(SLOTS, positions.max() + 1), *query.shape[2:]))
    rows = np.arange(BATCH)[:, None]
    whole[rows, positions] = query
    out, _ = oracle.attention(whole, key, value, causal=True, **visible)
    return out[rows, positions]


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def decode(attention, *arrays):
    return attention.decode(*arrays)


def place(attention, query, key, value, positions):
    spec, query_spec = attention.key_spec(key.shape[2]), attention.decode_spec(query.shape[2])
    return (
        put(attention, query, query_spec),
        *(put(attention, attention.layout.permute(x), spec) for x in (key, value)),
        put(attention, positions, P(query_spec[0])),
    )


def decoded(attention, *problem):
    placed = place(attention, *problem)
    out = decode(attention, *placed)
    assert out.sharding.is_equivalent_to(placed[0].sharding, 4)
    return np.asarray(out)


@pytest.mark.parametrize("degrees", SCHEMES.values(), ids=SCHEMES)
def test_decode_equals_dense_attention(degrees):
    problem = draw()
    found = decoded(attention_on(degrees), *problem)
    assert relative_error(found, dense(*problem)) <= FLOAT32_ERROR


@pytest.mark.parametrize("degrees", [*SCHEMES.values()][1::4])
def test_gradients_flow_through_decode(degrees):
    attention, (query, key, value, positions) = attention_on(degrees), draw()
    rng = np.random.default_rng(1)
    dout = rng.normal(size=(*query.shape[:3], VALUE_DIM)).astype("f4")
    *placed, positions_there = place(attention, query, key, value, positions)
    found = jax.jit(
        jax.grad(lambda *x: (attention.decode(*x, positions_there) * dout).sum(), argnums=(0, 1, 2))
    )(*placed)
    rows = np.arange(BATCH)[:, None]
    whole, dwhole = (np.zeros((BATCH, SLOTS, *x.shape[2:])) for x in (query, dout))
    whole[rows, positions], dwhole[rows, positions] = query, dout
    wanted = oracle.gradients(whole, key, value, dwhole, causal=True)
    assert relative_error(found[0], wanted.query[rows, positions]) <= FLOAT32_ERROR
    for mine, theirs in zip(found[1:], (wanted.key, wanted.value), strict=True):
        assert relative_error(attention.unshard(mine), theirs) <= FLOAT32_ERROR


@pytest.mark.parametrize("degrees", [st.Degrees(), st.Degrees(ring=2, team=2)])
def test_left_padding_that_is_not_written_is_not_seen(degrees):
    """Its positions are negative, and those of the other tokens begin with 0."""
    attention, (query, key, value, _) = attention_on(degrees), draw(new=1)
    padding = np.array([5, 12])[:, None]
    positions = (np.arange(SLOTS) - padding).astype(np.int32)
    key[positions < 0] = value[positions < 0] = 1e3
    last = positions[:, -1:]
    placed = place(attention, query, np.zeros_like(key), np.zeros_like(value), last)
    caches = [
        attention.update_cache(cache, put(attention, new, attention.decode_spec(2)), positions)
        for cache, new in zip(placed[1:3], (key, value), strict=True)
    ]
    found = decode(attention, placed[0], *caches, placed[3])
    for row, count in enumerate(padding[:, 0]):
        real = (x[row : row + 1, count:] for x in (key, value))
        whole = np.zeros((1, SLOTS - count, *query.shape[2:]))
        whole[:, -1] = query[row]
        wanted, _ = oracle.attention(whole, *real, causal=True)
        assert relative_error(np.asarray(found)[row, 0], wanted[0, -1]) <= FLOAT32_ERROR


def test_gradients_of_decode_are_summed_over_devices_in_float32():
    """Those of a query over its slots' devices, and those of a key head over its tensor ranks."""
    problem = draw(kv_heads=1, dtype="bfloat16")
    attention = attention_on(st.Degrees(ring=2, tensor=4))
    *placed, positions = place(attention, *problem)
    gradient = jax.grad(lambda *x: attention.decode(*x, positions).sum(), argnums=(0, 1, 2))
    text = jax.jit(gradient).lower(*placed).as_text()
    sums = re.findall(r"all_reduce.*?\n    *\}\) :.*?-> tensor<(?:\d+x)*(\w+)>", text, re.S)
    assert len(sums) == 5
    assert {*sums} == {"f32"}


# Masks, most of which show a query within the slots as much as a causal one, and what they mean.
MASKS = {
    "causal": (masks.Causal(), lambda i, j: j <= i),
    "window 5": (masks.Window(4, 0), lambda i, j: j > i - 5),
    "window of all slots but one": (masks.Window(SLOTS - 2, 0), lambda i, j: j > i - SLOTS + 1),
    "window of all slots": (masks.Window(SLOTS - 1, 0), lambda i, j: j > i - SLOTS),
    "window beyond the slots": (masks.Window(SLOTS + 6, 0), lambda i, j: j > i - SLOTS - 7),
    "chunks of all slots": (
        masks.Chunked(SLOTS) & masks.Causal(),
        lambda i, j: j // SLOTS == i // SLOTS,
    ),
    "chunks": (masks.Chunked(20) & masks.Causal(), lambda i, j: j // 20 == i // 20),
    "window and sinks": (
        (masks.Window(SLOTS - 1, 0) | masks.Sinks(4)) & masks.Causal(),
        lambda i, j: (j > i - SLOTS) | (j < 4),
    ),
    "blocks of all slots": (
        masks.BlockCausal(SLOTS) & masks.Window(SLOTS, 0),
        lambda i, j: (j // SLOTS <= i // SLOTS) & (j > i - SLOTS - 1),
    ),
}
ON_EIGHT = {name: degrees for name, degrees in SCHEMES.items() if degrees.num_devices == 8}


@pytest.mark.slow_except_every(13)
@pytest.mark.parametrize("layout", KINDS)
@pytest.mark.parametrize("degrees", [*ON_EIGHT.values()][:8], ids=[*ON_EIGHT][:8])
@pytest.mark.parametrize("name", MASKS)
def test_decode_beyond_the_slots_sees_what_the_mask_shows(name, degrees, layout):
    """A mask that hides nothing from queries within the slots still hides slots from later ones."""
    mask, rule = MASKS[name]
    query, key, value, _ = draw(new=6)
    positions = np.array([[2, 47, 53, 70, 100, 143], [0, 30, 48, 59, 95, 96]], np.int32)
    attention = attention_on(degrees, layout=layout, mask=mask)
    found = decoded(attention, query, key, value, positions)
    expected = dense(query, key, value, positions, rule=rule)
    assert relative_error(found, expected) <= FLOAT32_ERROR
    # Rows that see nothing are exactly 0.
    assert not found[~expected.any(axis=(2, 3))].any()


@pytest.mark.parametrize(
    ("degrees", "kv_heads", "copies"),
    [
        # Three tensor ranks share two key heads: one of them has queries of both.
        (st.Degrees(head=2, tensor=3), 2, 1),
        (st.Degrees(ring=2, tensor=4), 1, 1),
        (st.Degrees(ring=2, tensor=4), 2, 1),
        (st.Degrees(head=2, tensor=2), 1, 2),
        (st.Degrees(head=2, tensor=4), 2, 2),
        (st.Degrees(head=4, tensor=2), 8, 1),
    ],
    ids=str,
)
def test_decode_with_few_key_heads(degrees, kv_heads, copies):
    """Each device needs all the key heads of its tensor share, whatever `head` is."""
    problem = draw(kv_heads=kv_heads, heads=12 if degrees.tensor == 3 else HEADS)
    attention = attention_on(degrees)
    assert attention.key_copies(kv_heads) == copies
    assert relative_error(decoded(attention, *problem), dense(*problem)) <= FLOAT32_ERROR


def test_decode_in_bfloat16_rounds_its_result_alone():
    problem = draw(dtype="bfloat16")
    found = decoded(attention_on(st.Degrees(team=2, ring=2)), *problem)
    expected = dense(*problem)
    assert found.dtype == jnp.bfloat16
    nearest = relative_error(expected.astype(jnp.bfloat16), expected)
    assert relative_error(found, expected) <= 1.01 * nearest


def test_decode_sees_no_slot_above_its_position_and_none_at_a_negative_one():
    query, key, value, _ = draw()
    positions = np.array([[0, 11, -1], [20, -5, 7]], np.int32)
    attention = attention_on(st.Degrees(group=2, team=2))
    found = decoded(attention, query, key, value, positions)
    assert not found[positions < 0].any()
    above = np.arange(SLOTS)[None, :] > positions.max(axis=1)[:, None]
    key, value = (np.where(above[:, :, None, None], np.float32(1e9), x) for x in (key, value))
    again = decoded(attention, query, key, value, positions)
    np.testing.assert_array_equal(again, found)


@pytest.mark.parametrize("layout", KINDS)
def test_update_cache_writes_the_slots_of_the_positions_alone(layout):
    attention = attention_on(st.Degrees(data=2, ring=2, head=2), layout=layout)
    _, cache, _, positions = draw()
    positions[1, 2] = -1
    positions[0, 1] = SLOTS
    new = np.random.default_rng(1).normal(size=(BATCH, 3, 2, HEAD_DIM)).astype(np.float32)
    expected = cache.copy()
    for row, column in np.ndindex(BATCH, 3):
        if 0 <= positions[row, column] < SLOTS:
            expected[row, positions[row, column]] = new[row, column]
    spec = attention.key_spec(2)
    placed = (
        put(attention, attention.layout.permute(cache), spec),
        put(attention, new, P(spec[0])),
        put(attention, positions, P(spec[0])),
    )
    found = attention.update_cache(*placed)
    assert found.sharding.is_equivalent_to(placed[0].sharding, 4)
    np.testing.assert_array_equal(attention.layout.unpermute(np.asarray(found)), expected)


def compiled_step(attention, slots, kv_heads=2, dtype="float32"):
    """Writes keys and values of one token, and attends it."""

    def step(caches, query, new, positions):
        caches = [attention.update_cache(x, new, positions) for x in caches]
        return attention.decode(query, *caches, positions), caches

    def shape(spec, *sizes, dtype=dtype):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(attention.mesh, spec))

    spec = attention.key_spec(kv_heads)
    cache = shape(spec, BATCH, slots, kv_heads, HEAD_DIM)
    return (
        jax.jit(step, donate_argnums=0)
        .lower(
            [cache, cache],
            shape(attention.decode_spec(HEADS), BATCH, 1, HEADS, HEAD_DIM),
            shape(P(spec[0], None, *spec[2:]), BATCH, 1, kv_heads, HEAD_DIM),
            shape(P(spec[0]), BATCH, 1, dtype="int32"),
        )
        .compile(QUICK)
    )


def test_decode_messages_do_not_grow_with_the_cache_and_its_memory_is_shared():
    attention = attention_on(st.Degrees.startrail(8, c=2))
    short, long = (compiled_step(attention, slots) for slots in (1 << 10, 1 << 14))
    traffic = read_traffic(long.as_text())
    assert traffic == read_traffic(short.as_text())
    assert {kind for kind, count in traffic.counts.items() if count} == {"all_reduce"}
    assert traffic.counts["all_reduce"] == 2
    # 2 (P - 1) / P of float32 sums of outputs and weights, and of maxima.
    assert traffic.received_bytes == 2 * 7 * BATCH * HEADS * (HEAD_DIM + 2) * 4 // 8
    # Both caches are written in place: what comes out takes no memory of its own.
    bytes_of_caches = 2 * BATCH * (1 << 14) * 2 * HEAD_DIM * 4
    memory = long.memory_analysis()
    assert memory.alias_size_in_bytes == bytes_of_caches // 8
    few = 4096  # Queries, outputs, indices.
    assert memory.argument_size_in_bytes - memory.alias_size_in_bytes < few
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < few


def test_decode_of_every_token_equals_the_attention_whose_keys_are_the_cache():
    """On a mesh of Auto axes, whose names are the user's."""
    devices = jax.devices()[:4]
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("inner", "outer"), axis_types=kinds, devices=devices)
    attention = st.Attention(mesh, axis_names={"ring": ("outer", "inner")}, scale=0.3, causal=True)
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(1, 16, n, 5)).astype(np.float32) for n in (4, 2, 2))
    permute, unpermute = attention.layout.permute, attention.layout.unpermute
    placed = [
        put(attention, permute(x), attention.query_spec(x.shape[2])) for x in (query, key, value)
    ]
    whole = unpermute(np.asarray(attention(*placed)))
    steps = decode(attention, query, *placed[1:], np.arange(16, dtype=np.int32)[None])
    np.testing.assert_allclose(steps, whole, atol=2e-6)


# Errors --------------------------------------------------------------------------------------


def test_decode_errors():
    attention = attention_on(st.Degrees())
    query, key, value, positions = draw()
    with refused(InputError, causal=False):
        attention_on(st.Degrees(), causal=False).decode(query, key, value, positions)
    with refused(InputError, "mask=BlockCausal"):
        attention_on(st.Degrees(), mask=masks.BlockCausal(4)).decode(query, key, value, positions)
    with refused(InputError, "[batch, new"):
        attention.decode(query[..., :5], key, value, positions)
    with refused(InputError, "bfloat16, float32, float32"):
        attention.decode(query.astype(jnp.bfloat16), key, value, positions)
    with refused(InputError, "must be int32"):
        attention.decode(query, key, value, positions[:, :2])
    with refused(InputError, slots=47):
        attention.decode(query, key[:, :47], value[:, :47], positions)
    with refused(InputError, "[batch, slots"):
        attention.update_cache(key, key[:, :3, :, :5], positions)
    with refused(InputError, "A cache of int8 must be written with whole numbers"):
        attention.update_cache(key.astype("i1"), key[:, :3], positions)
    with refused(InputError, "float32 [2, 3]"):
        attention.update_cache(key, key[:, :3], positions.astype(np.float32))
    with refused(InputError, "cache must"):
        attention.update_cache_local(*map(jnp.asarray, (key, key[:, :3], positions)), layer=0)
    # Errors name the spec that a cache should have.
    ring = attention_on(st.Degrees(ring=2))
    with refused(InputError, "'ring'"):
        ring.decode(query, key, value, positions)
    with refused(InputError, "'ring'"):
        ring.update_cache(key, key[:, :3], positions)
