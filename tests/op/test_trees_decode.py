"""Decoding from a cache whose slots hold trees: new tokens see the slots that they continue."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import oracle
import startrail_jax as st
from attention_cases import (
    FLOAT32_ERROR,
    QUICK,
    host_mesh,
    make_attention,
    one_axis,
    relative_error,
)
from refusals import refused
from startrail_jax.analysis.hlo import read_traffic
from startrail_jax.errors import InputError, UnsupportedError
from startrail_jax.tokens.layout import KINDS

SCHEMES = {
    "one device": st.Degrees(),
    "ring": st.Degrees(ring=8),
    "StarTrail": st.Degrees.startrail(8, c=2),
    "teams": st.Degrees(team=2, ring=4),
    "Ulysses": st.Degrees.ulysses(8),
    "2D": st.Degrees(head=2, ring=4),
    "all-gather": st.Degrees.all_gather(8),
    "data and tensor": st.Degrees(data=2, ring=2, tensor=2),
}
BATCH, SLOTS, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 2, 48, 8, 2, 7, 11
FAR = np.iinfo(np.int32).max
PADDING, ROOT = -2, -1


def put(attention, x, spec):
    return jax.device_put(x, NamedSharding(attention.mesh, spec))


def normal(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def lineage(parent, slot):
    """A token and all that it continues, the last first."""
    while slot >= 0:
        yield slot
        slot = parent[slot]


def grown(rng, length):
    """The token that each token continues, in a row whose branches grow in turns: the next token
    goes on with any of them, forks one, begins a text or is padding."""
    parent = []
    for place in range(length):
        used = [s for s in range(place) if parent[s] != PADDING]
        leaves = sorted({*used} - {*parent})
        kind = rng.choice(
            ["same", "other", "fork", "root", "padding"], p=[0.6, 0.2, 0.08, 0.04, 0.08]
        )
        if kind == "padding":
            parent.append(PADDING)
        elif kind == "root" or not used:
            parent.append(ROOT)
        else:
            parent.append(
                {"same": used[-1], "other": rng.choice(leaves), "fork": rng.choice(used)}[kind]
            )
    return parent


def drawn(seed, firsts=(40, 29)):
    """Rows whose new tokens at three places continue any branch; the last two continue the first,
    one of them or each in its own way. Gives `visible_until`, places and who continues whom."""
    rng = np.random.default_rng(seed)
    until, parents = [], []
    for first in firsts:
        parent = grown(rng, first)
        leaf = int(rng.choice([s for s in range(first) if parent[s] != PADDING]))
        two_drafts = bool(rng.integers(2))
        parent += [leaf, first, first if two_drafts else first + 1]
        own = {*lineage(parent, first)}
        row = rng.integers(-3, FAR, size=SLOTS)  # Slots that are not filled may have any number.
        for slot in range(first):
            ended = -1 if parent[slot] == PADDING else rng.integers(slot + 1, first + 1)
            row[slot] = rng.choice([first + 3, FAR]) if slot in own else ended
        row[first : first + 3] = first + 3, first + 2 if two_drafts else first + 3, first + 3
        until.append(row)
        parents.append(parent)
    positions = np.array(firsts)[:, None] + np.arange(3)
    return np.array(until, np.int32), positions.astype(np.int32), parents


def seen_by(parents, positions, window=None):
    """The slots that each new token sees, bools [batch, new, slots]: the last of its branch."""
    seen = np.zeros((*positions.shape, SLOTS), bool)
    for row, new in np.ndindex(positions.shape):
        branch = [*lineage(parents[row], positions[row, new])]
        seen[row, new, branch[:window]] = True
    return seen


def dense(query, key, value, seen, **options):
    return oracle.attention(query, key, value, rule=lambda i, j: seen, **options)[0]


def draw(seed, new=3, heads=HEADS, kv_heads=KV_HEADS):
    rng = np.random.default_rng(seed)
    return (
        normal(rng, BATCH, new, heads, HEAD_DIM),
        normal(rng, BATCH, SLOTS, kv_heads, HEAD_DIM),
        normal(rng, BATCH, SLOTS, kv_heads, VALUE_DIM),
    )


def place(attention, query, key, value, positions, until):
    spec, query_spec = attention.key_spec(key.shape[2]), attention.decode_spec(query.shape[2])
    permute = attention.layout.permute
    return (
        put(attention, query, query_spec),
        put(attention, permute(key), spec),
        put(attention, permute(value), spec),
        put(attention, positions, P(query_spec[0])),
        put(attention, permute(until), attention.sequence_spec),
    )


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def decode(attention, query, key, value, positions, until, **per_head):
    return attention.decode(query, key, value, positions, visible_until=until, **per_head)


def decoded(attention, *problem, **per_head):
    return np.asarray(decode(attention, *place(attention, *problem), **per_head))


@pytest.mark.slow_except_every(3)
@pytest.mark.parametrize("window", [None, 1, 9, 26])
@pytest.mark.parametrize("layout", KINDS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_new_tokens_see_their_own_branch(scheme, layout, window):
    """Or its last tokens, and nothing of branches that grew between them; in float64 by lists."""
    options = {"causal": True} if window is None else {"window": window}
    attention = make_attention(SCHEMES[scheme], "explicit", layout=layout, **options)
    for seed in range(3):
        until, positions, parents = drawn(seed)
        arrays = draw(seed)
        wanted = dense(*arrays, seen_by(parents, positions, window))
        found = decoded(attention, *arrays, positions, until)
        assert relative_error(found, wanted) <= FLOAT32_ERROR


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(
    ("degrees", "kv_heads"), [(st.Degrees(head=2, tensor=4), 2), (st.Degrees(ring=2, tensor=4), 1)]
)
def test_key_heads_that_devices_share(degrees, kv_heads, window):
    options = {"causal": True} if window is None else {"window": window}
    attention = make_attention(degrees, "explicit", layout="zigzag", **options)
    until, positions, parents = drawn(3)
    arrays = draw(3, kv_heads=kv_heads)
    found = decoded(attention, *arrays, positions, until)
    wanted = dense(*arrays, seen_by(parents, positions, window))
    assert relative_error(found, wanted) <= FLOAT32_ERROR


def test_one_axis_for_all_roles():
    degrees = st.Degrees(team=2, head=2, ring=2)
    attention = st.Attention(host_mesh(degrees), window=9, layout="zigzag", **one_axis(degrees))
    until, positions, parents = drawn(4)
    arrays = draw(4)
    found = decoded(attention, *arrays, positions, until)
    wanted = dense(*arrays, seen_by(parents, positions, 9))
    assert relative_error(found, wanted) <= FLOAT32_ERROR


def test_sinks_and_soft_caps_are_those_of_a_branch():
    attention = make_attention(SCHEMES["StarTrail"], "explicit", causal=True, softcap=2.0)
    until, positions, parents = drawn(5)
    arrays, sinks = draw(5), np.linspace(-1, 2, HEADS).astype(np.float32)
    found = decoded(attention, *arrays, positions, until, sinks=sinks)
    seen = seen_by(parents, positions)
    wanted = dense(*arrays, seen, sinks=sinks, softcap=2.0)
    assert relative_error(found, wanted) <= FLOAT32_ERROR


@pytest.mark.parametrize("window", [None, 5, SLOTS - 1, SLOTS + 6])
@pytest.mark.parametrize("layout", KINDS)
def test_a_row_of_one_text_is_decoded_as_without_numbers(layout, window):
    """Also beyond the slots, where a window counts the tokens that have none."""
    options = {"causal": True} if window is None else {"window": window}
    attention = make_attention(st.Degrees(ring=2, team=2), "explicit", layout=layout, **options)
    positions = np.array([[2, 47, 53, 70, -1], [0, 30, 48, 59, 95]], np.int32)
    *placed, until = place(attention, *draw(6, new=5), positions, np.full((BATCH, SLOTS), FAR))
    found = decode(attention, *placed, until)
    np.testing.assert_array_equal(found, decode(attention, *placed, None))


@pytest.mark.parametrize("layout", KINDS)
def test_a_new_token_counts_in_its_window_also_where_its_slot_is_hidden(layout):
    attention = make_attention(SCHEMES["ring"], "explicit", window=9, layout=layout)
    until, positions, parents = drawn(11)
    positions = positions[:, :1]
    until[np.arange(BATCH), positions[:, 0]] = -1
    arrays = draw(11, new=1)
    seen = seen_by(parents, positions, 9) & (np.arange(SLOTS) < positions[..., None])
    found = decoded(attention, *arrays, positions, until)
    assert relative_error(found, dense(*arrays, seen)) <= FLOAT32_ERROR


def test_slots_of_other_branches_may_hold_anything_and_get_no_gradient():
    attention = make_attention(SCHEMES["teams"], "explicit", causal=True, layout="zigzag")
    until, positions, parents = drawn(7)
    query, key, value = draw(7)
    hidden = ~seen_by(parents, positions).any(1)
    wanted = decoded(attention, query, key, value, positions, until)
    key[hidden] = value[hidden] = np.nan
    assert np.array_equal(decoded(attention, query, key, value, positions, until), wanted)
    key[hidden] = value[hidden] = 0
    *arrays, there, ends = place(attention, query, key, value, positions, until)
    decode_there = functools.partial(attention.decode, positions=there, visible_until=ends)
    total = jax.grad(lambda *x: (decode_there(*x) ** 2).sum(), argnums=(1, 2))
    for x in jax.jit(total, compiler_options=QUICK)(*arrays):
        moved = attention.unshard(x).any((2, 3))
        np.testing.assert_array_equal(moved, ~hidden)


# A tree, and its branches one after another ------------------------------------------------------

PROMPT, FIRST, SECOND = 20, 12, 16
NEW = 4
TREE = np.r_[0 : PROMPT + FIRST + SECOND]
ENDS = np.repeat([SLOTS, PROMPT + FIRST, SLOTS], [PROMPT, FIRST, SECOND])
OF_FIRST, OF_SECOND = np.split(TREE[PROMPT:], [FIRST])
ORDERS = {
    # The tokens in the order in which they are written, and their numbers when the last four come.
    "the last branch": (TREE, ENDS),
    "the first branch, after the other": (
        np.r_[:PROMPT, OF_SECOND, OF_FIRST],
        np.repeat([SLOTS, PROMPT + SECOND, SLOTS], [PROMPT, SECOND, FIRST]),
    ),
    "the first branch, in two parts": (
        np.r_[:PROMPT, OF_FIRST[:-NEW], OF_SECOND, OF_FIRST[-NEW:]],
        np.repeat([FAR, SLOTS - NEW, FAR], [PROMPT + FIRST - NEW, SECOND, NEW]),
    ),
}


@pytest.mark.slow_except_every(3)
@pytest.mark.parametrize("window", [None, 6, 25])
@pytest.mark.parametrize("layout", KINDS)
@pytest.mark.parametrize("order", ORDERS)
def test_decoding_equals_a_call_over_the_tree(order, layout, window):
    options = {"causal": True} if window is None else {"window": window}
    attention = make_attention(SCHEMES["StarTrail"], "explicit", layout=layout, **options)
    rng = np.random.default_rng(0)
    query = normal(rng, BATCH, SLOTS, HEADS, HEAD_DIM)
    _, key, value = draw(1)
    until = attention.shard(ENDS[None].repeat(BATCH, 0))
    called = jax.jit(attention)(*attention.shard(query, key, value), visible_until=until)
    tokens, ends = ORDERS[order]
    cache = key[:, tokens], value[:, tokens]
    positions = np.arange(SLOTS - NEW, SLOTS, dtype=np.int32)[None].repeat(BATCH, 0)
    # As in generation, what is to come is not in the cache: the last tokens are written now.
    attend = place(attention, query[:, tokens[-NEW:]], *cache, positions, ends[None].repeat(2, 0))
    query_there, *caches, places, ends_there = attend
    empty = [jnp.zeros_like(x) for x in caches]
    for new in (np.arange(SLOTS - NEW), np.arange(SLOTS - NEW, SLOTS)):
        at = new.astype(np.int32)[None].repeat(BATCH, 0)
        spec = attention.decode_spec(KV_HEADS)
        empty = [
            attention.update_cache(x, put(attention, full[:, new], spec), at)
            for x, full in zip(empty, cache, strict=True)
        ]
    found = decode(attention, query_there, *empty, places, ends_there)
    wanted = np.asarray(attention.unshard(called))[:, tokens[-NEW:]]
    np.testing.assert_allclose(found, wanted, atol=2e-6)


def test_a_branch_that_stands_before_another_is_decoded_in_its_place():
    attention = make_attention(SCHEMES["ring"], "explicit", window=25)
    query, key, value = draw(2, new=SLOTS)
    until = ENDS[None].repeat(BATCH, 0)
    sharded = attention.shard(query, key, value, until)
    called = attention.unshard(attention(*sharded[:3], visible_until=sharded[3]))
    last = OF_FIRST[-NEW:].astype(np.int32)
    positions = last[None].repeat(BATCH, 0)
    found = decoded(attention, query[:, last], key, value, positions, until)
    np.testing.assert_allclose(found, np.asarray(called)[:, last], atol=2e-6)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("check_vma", [True, False])
def test_decode_local_takes_them_too(window, check_vma):
    options = {"causal": True} if window is None else {"window": window}
    attention = make_attention(SCHEMES["2D"], "explicit", layout="zigzag", **options)
    until, positions, _ = drawn(8)
    placed = place(attention, *draw(8), positions, until)
    query_spec, spec = attention.decode_spec(HEADS), attention.key_spec(KV_HEADS)
    local = jax.shard_map(
        lambda *x: attention.decode_local(*x[:4], visible_until=x[4]),
        mesh=attention.mesh,
        in_specs=(query_spec, spec, spec, P(query_spec[0]), attention.sequence_spec),
        out_specs=query_spec,
        check_vma=check_vma,
    )
    found = jax.jit(local, compiler_options=QUICK)(*placed)
    np.testing.assert_array_equal(found, decode(attention, *placed))


# Bytes -------------------------------------------------------------------------------------------


def traffic_of(attention, slots, trees):
    def shape(spec, *sizes, dtype="float32"):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(attention.mesh, spec))

    spec, query_spec = attention.key_spec(KV_HEADS), attention.decode_spec(HEADS)
    cache = shape(spec, BATCH, slots, KV_HEADS, HEAD_DIM)
    arrays = (
        shape(query_spec, BATCH, 3, HEADS, HEAD_DIM),
        cache,
        cache,
        shape(P(query_spec[0]), BATCH, 3, dtype="int32"),
        shape(attention.sequence_spec, BATCH, slots, dtype="int32") if trees else None,
    )
    return read_traffic(decode.lower(attention, *arrays).compile(QUICK).as_text())


@pytest.mark.parametrize("layout", KINDS)
def test_numbers_are_not_sent(layout):
    attention = make_attention(SCHEMES["StarTrail"], "explicit", causal=True, layout=layout)
    assert traffic_of(attention, 1 << 10, trees=True) == traffic_of(attention, 1 << 10, trees=False)


@pytest.mark.parametrize("layout", KINDS)
def test_a_window_sends_a_count_for_each_run_of_slots(layout):
    """Whatever the length of the cache, and the window."""
    attention = make_attention(SCHEMES["StarTrail"], "explicit", window=100, layout=layout)
    plain = traffic_of(attention, 1 << 10, trees=False)
    for slots in (1 << 10, 1 << 14):
        traffic = traffic_of(attention, slots, trees=True)
        assert traffic.counts["all_gather"] == 1
        runs = 2 if layout == "zigzag" else 1
        assert traffic.received_bytes - plain.received_bytes == 7 * 4 * BATCH * 3 * runs


# Mistakes ----------------------------------------------------------------------------------------


def test_numbers_beyond_int32_count_as_the_largest():
    attention = make_attention(st.Degrees(), causal=True)
    until, positions, _ = drawn(9)
    arrays = draw(9)
    wanted = attention.decode(*arrays, positions, visible_until=until)
    wide = until.astype(np.int64)
    for far, padding in ((1 << 62, -1), (FAR + 7, -(1 << 62))):
        wide[until == FAR], wide[until < 0] = far, padding
        found = attention.decode(*arrays, positions, visible_until=wide)
        np.testing.assert_array_equal(found, wanted)
    few = np.maximum(until, 0).clip(max=100)
    wanted = attention.decode(*arrays, positions, visible_until=few)
    for dtype in ("u1", "i1", "u8"):
        found = attention.decode(*arrays, positions, visible_until=few.astype(dtype))
        np.testing.assert_array_equal(found, wanted)


def test_mistakes_raise():
    attention = make_attention(st.Degrees(), causal=True)
    until, positions, _ = drawn(10)
    arrays = draw(10)
    for wrong in (until.astype(np.float32), until[:, :-1], until[:1], until > 0):
        given = f"got {wrong.dtype} {list(wrong.shape)}"
        with refused(InputError, "visible_until must be integers [batch, slots] = [2, 48]", given):
            attention.decode(*arrays, positions, visible_until=wrong)
        local = [*map(jnp.asarray, (*arrays, positions))]
        with refused(InputError, "visible_until must be integers [batch, slots]", given):
            attention.decode_local(*local, visible_until=jnp.asarray(wrong))
    with refused(UnsupportedError, "visible_until", "slopes"):
        attention.decode(*arrays, positions, visible_until=until, slopes=np.ones(HEADS, np.float32))
    masks = (st.masks.Full(), st.masks.BlockCausal(4), st.masks.Chunked(4) & st.masks.Causal())
    for mask in masks:
        other = make_attention(st.Degrees(), mask=mask)
        with refused(UnsupportedError, "visible_until needs a causal attention", mask=mask):
            other.decode(*arrays, positions, visible_until=until)
    ring = make_attention(st.Degrees(ring=2), "explicit", causal=True)
    *placed, _ = place(ring, *arrays, positions, until)
    with refused(InputError, "visible_until must be sharded", "'ring'"):
        ring.decode(*placed, visible_until=until)
