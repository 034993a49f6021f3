"""Rows of trees: a shared beginning stands in a row once, before all that continues it."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fake_cudnn
import startrail_jax as st
from attention_cases import make_attention
from startrail_jax.blocks import tiled, xla
from startrail_jax.errors import InputError, UnsupportedError
from startrail_jax.testing import assert_exact, assert_model_exact
from startrail_jax.tokens.trees import check_ends

SCHEMES = {
    "ring": st.Degrees(ring=8),
    "StarTrail": st.Degrees.startrail(8, c=2),
    "Ulysses": st.Degrees.ulysses(8),
    "2D": st.Degrees(head=2, ring=4),
    "all-gather": st.Degrees.all_gather(8),
    "two rows": st.Degrees(data=2, team=2, ring=2),
    "tensor": st.Degrees(tensor=2, group=2, ring=2),
}
LAYOUTS = ("contiguous", "zigzag")
WINDOWS = dict(zip(SCHEMES, (1, 2, 5, 9, 17, 30, 95), strict=True))
"""A window for each scheme."""


def draw(rng, length, depth, most=0.3):
    """Trees of at most this depth below their roots, up to padding: the node of each token, -1 for
    padding; and the parent of each node, -1 for a root."""
    node, parent = [], []

    def grow(up, deep, room):
        me = len(parent)
        parent.append(up)
        own = int(rng.integers(1, max(2, round(most * room) + 1)))
        node.extend([me] * own)
        room -= own
        while deep < depth and room > 0 and rng.random() < 0.85:
            size = 1 if rng.random() < 0.2 else int(rng.integers(1, room + 1))
            grow(me, deep + 1, size)
            room -= size

    while len(node) < length - length // 8:
        grow(-1, 0, int(rng.integers(1, length - len(node) + 1)))
    return np.array(node + [-1] * (length - len(node))), np.array(parent)


def lineage(parent, node):
    """A node and all that it continues."""
    while node >= 0:
        yield node
        node = parent[node]


def ends_of(node, parent):
    """`visible_until` of the tokens of a row."""
    last = {}
    for place, own in enumerate(node.tolist()):
        for above in lineage(parent, own):
            last[above] = place
    return np.array([last[own] + 1 if own >= 0 else -1 for own in node.tolist()])


def drawn(seed, rows, length, depth=5):
    rng = np.random.default_rng(seed)
    depths = rng.integers(1, depth + 1, size=rows)
    return [draw(rng, length, int(deep)) for deep in depths]


def ends(seed, rows, length, depth=5):
    return np.stack([ends_of(*row) for row in drawn(seed, rows, length, depth)])


@pytest.mark.parametrize("seed", range(20))
def test_numbers_of_ends_say_what_a_mask_of_ancestors_says(seed):
    for node, parent in drawn(seed, 3, 40):
        until, place = ends_of(node, parent), np.arange(40)
        check_ends(until[None])
        seen = (place <= place[:, None]) & (place[:, None] < until) & (until >= 0)[:, None]
        above = [set(lineage(parent, own)) for own in node.tolist()]
        wanted = [
            [s <= t and node[s] in above[t] and node[s] >= 0 for s in range(40)] for t in range(40)
        ]
        np.testing.assert_array_equal(seen, wanted)
        positions = st.branch_positions(until[None])
        np.testing.assert_array_equal(positions[0], np.maximum(np.sum(wanted, 1) - 1, 0))


@pytest.mark.slow_except_every(5)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_trees_are_exact(scheme, layout):
    """Against float64 with the mask written out: out, lse and all gradients of six trees."""
    degrees = SCHEMES[scheme]
    attention = make_attention(degrees, causal=True, layout=layout)
    kv_heads = 8 if degrees.head == 8 else 4 if degrees.head * degrees.tensor > 1 else 2
    until = ends(list(SCHEMES).index(scheme), 6, 96)
    assert_exact(attention, seq_len=96, heads=8, kv_heads=kv_heads, visible_until=until)


@pytest.mark.slow_except_every(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("scheme", "window"), WINDOWS.items())
def test_windows_count_the_tokens_of_a_branch(scheme, window, layout):
    """Not those of other branches, which stand between in the row."""
    degrees = SCHEMES[scheme]
    attention = make_attention(degrees, window=window, layout=layout)
    kv_heads = 8 if degrees.head == 8 else 4
    until = ends(10 + list(SCHEMES).index(scheme), 6, 96)
    assert_exact(attention, seq_len=96, heads=8, kv_heads=kv_heads, visible_until=until)


def test_a_window_beyond_all_places_is_none():
    """Also beyond int32, in which places are."""
    until = ends(13, 2, 64)
    arrays = [np.random.default_rng(0).normal(size=(2, 64, 2, 4)).astype("f4") for _ in range(3)]
    causal, *wide = (
        make_attention(st.Degrees(), **options)(*arrays, visible_until=until)
        for options in (dict(causal=True), dict(window=2**31 - 1), dict(window=2**40))
    )
    for out in wide:
        np.testing.assert_array_equal(out, causal)


OPTIONS = {
    "softcap": dict(softcap=2.0),
    "keys travel": dict(backward="kv"),
    "queries travel": dict(backward="query"),
    "published": dict(published=True),
    "double ring": dict(inner=2),
    "parts of the heads": dict(head_chunks=2),
    "kept": dict(keep_gathered=True),
    "layout": dict(balance="layout"),
    "exchange": dict(balance="exchange"),
}


@pytest.mark.slow_except_every(3)
@pytest.mark.parametrize("name", OPTIONS)
def test_trees_are_exact_with(name):
    degrees = st.Degrees(team=2, group=2, ring=2) if name == "published" else SCHEMES["2D"]
    attention = make_attention(degrees, causal=True, **OPTIONS[name])
    assert_exact(attention, seq_len=64, heads=8, kv_heads=4, visible_until=ends(1, 2, 64))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_trees_are_exact_in_bfloat16(layout):
    attention = make_attention(SCHEMES["StarTrail"], causal=True, layout=layout)
    until = ends(2, 2, 64)
    assert_exact(attention, seq_len=64, heads=4, kv_heads=2, dtype="bfloat16", visible_until=until)


@pytest.mark.slow_except_every(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scheme", ["ring", "StarTrail"])
def test_trees_are_exact_in_tiles(scheme, layout, monkeypatch):
    """On the GPU backend, whose kernels are emulated, with many tiles of each kind."""
    fake_cudnn.install(monkeypatch)
    degrees = dataclasses.replace(SCHEMES[scheme], ring=2)
    attention = make_attention(degrees, causal=True, layout=layout, backend="tiled")
    with mock.patch.multiple(tiled, COARSE=12, FINE=5):
        assert_exact(
            attention, seq_len=96, heads=4, kv_heads=2, visible_until=ends(3, 2, 96),
            dtype="bfloat16",
        )  # fmt: skip


def test_branches_are_rows_of_their_own():
    """A beginning and its answers as one tree: outputs and gradients are those of rows."""
    beginning, answers = 40, (1, 7, 16)
    attention = make_attention(SCHEMES["StarTrail"], causal=True)
    length = beginning + sum(answers)
    rng = np.random.default_rng(0)
    tree = [rng.normal(size=(1, length, 4, 16)).astype(np.float32) for _ in range(4)]
    starts = beginning + np.cumsum((0, *answers[:-1]))
    until = np.full((1, length), length)
    for start, size in zip(starts, answers, strict=True):
        until[:, start : start + size] = start + size

    def results(attend, arrays, weights):
        out, pull = jax.vjp(attend, *arrays)
        return [attention.unshard(x) for x in (out, *pull(weights))]

    *qkv, weights = attention.shard(*tree)
    attend = functools.partial(attention, visible_until=attention.shard(until))
    out, *gradients = results(jax.jit(attend), qkv, weights)
    total = [np.zeros_like(x) for x in gradients]
    for i, (start, size) in enumerate(zip(starts, answers, strict=True)):
        own = np.r_[:beginning, start : start + size]
        padded = [np.zeros((1, 64, 4, 16), np.float32) for _ in range(4)]
        for row, x in zip(padded, tree, strict=True):
            row[:, : len(own)] = x[:, own]
        padded[3][:, : beginning * (i > 0)] = 0  # The beginning counts once.
        *qkv, weights = attention.shard(*padded)
        alone, *found = results(jax.jit(attention), qkv, weights)
        np.testing.assert_allclose(out[:, own], alone[:, : len(own)], atol=2e-6)
        for sums, x in zip(total, found, strict=True):
            sums[:, own] += x[:, : len(own)]
    for sums, x in zip(total, gradients, strict=True):
        np.testing.assert_allclose(x, sums, atol=2e-6 * np.abs(sums).max())


@pytest.mark.parametrize("window", [None, 9])
def test_masks_of_keys_hide_keys_of_trees(window):
    """A hidden key is one whose logit is small, and it keeps its place in its branch."""
    options = {"causal": True} if window is None else {"window": window}
    attention = make_attention(SCHEMES["ring"], **options)
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 64, 4, 16)).astype(np.float32) for _ in range(3))
    until = ends(9, 2, 64)
    hidden = (rng.random((2, 64)) < 0.3) & (st.branch_positions(until) > 0)
    valid = attention.shard(~hidden)[:, None, None]
    attend = functools.partial(attention, visible_until=attention.shard(until))
    out = attention.unshard(attend(*attention.shard(q, k, v), mask=valid))
    seen = np.arange(64) <= np.arange(64)[:, None]
    seen = seen & (np.arange(64)[:, None] < until[:, None]) & (until >= 0)[:, :, None]
    place = seen.sum(-1)
    if window is not None:
        seen &= place[:, :, None] - place[:, None] < window
    seen &= ~hidden[:, None]
    logits = np.einsum("btnh,bsnh->bnts", q, k) / 4
    p = np.where(seen[:, None], np.exp(logits), 0)
    wanted = np.einsum("bnts,bsnh->btnh", p / np.maximum(p.sum(-1, keepdims=True), 1e-30), v)
    np.testing.assert_allclose(out, wanted, atol=1e-5)


def test_sinks_count_in_trees_as_elsewhere():
    attention = make_attention(SCHEMES["StarTrail"], causal=True)
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(2, 64, 4, 16)).astype(np.float32) for _ in range(3)]
    qkv, sinks = attention.shard(*arrays), np.float32([-1, 0, 1, 2])
    attend = functools.partial(
        attention, *qkv, visible_until=attention.shard(ends(8, 2, 64)), return_lse=True
    )
    (out, lse), (with_sinks, _) = attend(), attend(sinks=sinks)
    kept = jax.nn.sigmoid(lse - sinks[None, :, None]).swapaxes(1, 2)[..., None]
    np.testing.assert_allclose(with_sinks, out * kept, atol=1e-6)


def test_documents_are_trees_without_branches():
    attention = make_attention(SCHEMES["2D"], causal=True, layout="zigzag")
    lengths = (13, 1, 30, 12)
    ids = np.repeat([0, 1, 2, 3, -1], (*lengths, 8))[None]
    until = np.repeat([*np.cumsum(lengths), -1], (*lengths, 8))[None]
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(1, 64, 4, 16)).astype(np.float32) for _ in range(3)]
    qkv = attention.shard(*arrays)
    by_ids = attention(*qkv, segment_ids=attention.shard(ids))
    by_ends = attention(*qkv, visible_until=attention.shard(until))
    np.testing.assert_array_equal(by_ids, by_ends)


def test_padding_may_be_anything_and_gets_nothing():
    attention = make_attention(SCHEMES["ring"], causal=True)
    until = ends(4, 1, 64)
    padding = until < 0
    assert padding.any()
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(1, 64, 4, 16)).astype(np.float32) for _ in range(3)]
    for x in arrays:
        x[padding] = np.nan
    attend = functools.partial(attention, visible_until=attention.shard(until))
    out, pull = jax.vjp(attend, *attention.shard(*arrays))
    for x in (out, *pull(jnp.ones_like(out))):
        x = attention.unshard(x)
        assert np.isfinite(x).all()
        assert not x[padding].any()


def group(beginning, answers, at=0):
    """`visible_until` of a beginning and its answers, which begin at a place."""
    ends = at + beginning + np.cumsum(answers)
    return np.repeat([ends[-1], *ends], [beginning, *answers])


def groups(count, beginning, answer, rng):
    """Groups of eight answers, of drawn lengths with these means."""
    row = np.zeros(0, np.int64)
    for _ in range(count):
        answers = np.maximum(rng.exponential(answer, 8).astype(int), 1)
        row = np.r_[row, group(int(rng.uniform(0.8, 1.2) * beginning), answers, len(row))]
    return row


@pytest.mark.parametrize("sizes", [(1, 28672, 4096), (16, 4096, 2048)])
def test_only_tiles_in_which_something_is_visible_are_visited(sizes):
    """Eight answers, and sixteen groups of them: the tiles hold few pairs that nobody sees."""
    until = groups(*sizes, np.random.default_rng(0))
    until = np.r_[until, [-1] * (-len(until) % 256)][None]
    length = until.size
    attention = make_attention(st.Degrees(), causal=True)
    visibility = attention.schedule.visibility(length, (0, 0, 0))
    visibility = dataclasses.replace(
        visibility, trees=True, query_segments=jnp.asarray(until), key_segments=jnp.asarray(until)
    )
    query, key = xla.tilings(visibility, length, length, 1)
    visited = np.asarray(xla.visible_tiles(visibility, query, key)).sum() * query.size * key.size
    visible = (until - np.arange(length))[until >= 0].sum()
    assert visible <= visited <= 1.15 * visible


def test_local_takes_them_too():
    attention = make_attention(SCHEMES["ring"], causal=True)
    until = ends(6, 2, 64)

    def attend(q, k, v, *, visible_until, return_lse):
        del return_lse
        spec = attention.query_spec(4)
        local = jax.shard_map(
            lambda q, k, v, until: attention.local(q, k, v, visible_until=until),
            mesh=attention.mesh,
            in_specs=(spec, spec, spec, attention.sequence_spec),
            out_specs=(spec, attention.lse_spec),
        )
        return local(q, k, v, visible_until)

    assert_exact(attention, seq_len=64, heads=4, visible_until=until, attention_fn=attend)


def test_a_model_over_trees_is_compared_with_dense_attention():
    attention = make_attention(SCHEMES["2D"], causal=True, layout="zigzag")
    until = ends(7, 1, 64).astype(np.int32)
    params = {"x": np.random.default_rng(0).normal(size=(97, 64)).astype(np.float32)}
    ids = np.random.default_rng(1).integers(97, size=(1, 64))

    def loss(attention, params, ids, until):
        x = params["x"][ids].reshape(*ids.shape, 4, 16)
        return (attention(x, x, x, visible_until=until) ** 2).mean()

    assert_model_exact(attention, loss, params, ids, until)


# Mistakes ----------------------------------------------------------------------------------------

GOOD = [8, 8, 4, 4, 8, 6, 8, 8]
WRONG = {
    "before its own token": ([8, 8, 2, 4, 8, 6, 8, 8], "larger than the place.*2 at place 2 of"),
    "beyond the row": ([9, 8, 4, 4, 8, 6, 8, 8], "at most the 8 tokens of a row; got 9 at place 0"),
    "not nested": ([8, 8, 4, 5, 8, 6, 8, 8], "nested.*4 at place 2 of row 0"),
    "far from nested": ([7, 7, 4, 4, 7, 6, 8, 8], "nested.*7 at place 4 of row 0"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", WRONG)
def test_rows_that_are_no_trees_raise(name, layout):
    attention = make_attention(st.Degrees(ring=2), causal=True, layout=layout)
    x = attention.shard(np.zeros((1, 8, 2, 4), np.float32))
    attention(x, x, x, visible_until=attention.shard(np.array([GOOD])))
    ends, message = WRONG[name]
    for until in (attention.shard(np.array([ends])), attention.layout.permute(np.array([ends]))):
        with pytest.raises(InputError, match=message):
            attention(x, x, x, visible_until=until)


@pytest.mark.parametrize("seed", range(10))
def test_nesting_is_checked_as_pair_by_pair(seed):
    rng = np.random.default_rng(seed)
    until = ends(seed, 1, 24)
    place = int(rng.integers(24))
    until[0, place] = rng.integers(place + 1, 25)
    real = [(k, int(end)) for k, end in enumerate(until[0]) if end >= 0]
    nested = all(not (k < j < end < other) for k, end in real for j, other in real)
    if nested:
        check_ends(until)
    else:
        with pytest.raises(InputError, match="nested"):
            check_ends(until)


CALLS = {
    "segment ids": (dict(), dict(segment_ids=np.zeros((1, 8), np.int32)), InputError, "got both"),
    "blocks": (dict(mask=st.masks.BlockCausal(4)), {}, UnsupportedError, "window; got .*Block"),
    "no mask": (dict(causal=False), {}, UnsupportedError, "causal attention"),
    "slopes": (dict(), dict(slopes=np.ones(2, np.float32)), UnsupportedError, "slopes"),
    "floats": (dict(), dict(visible_until=np.ones((1, 8))), InputError, "got float64"),
    "another length": (dict(), dict(visible_until=np.arange(4)[None] + 1), InputError, r"\[1, 4\]"),
    "cuDNN": (dict(backend="cudnn"), {}, UnsupportedError, "NVIDIA"),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_does_not_go_with_trees_raises(name):
    options, given, error, message = CALLS[name]
    attention = make_attention(st.Degrees(), **options)
    x = np.zeros((1, 8, 2, 4), np.float32)
    with pytest.raises(error, match=message):
        attention(x, x, x, **{"visible_until": np.array([GOOD]), **given})


def test_local_takes_no_segment_ids_of_keys_beside_them():
    attention = make_attention(st.Degrees())
    x, ids = jnp.zeros((1, 8, 2, 4)), jnp.zeros((1, 8), jnp.int32)
    with pytest.raises(InputError, match="got both"):
        attention.local(x, x, x, None, ids, visible_until=jnp.array([GOOD]))


@dataclasses.dataclass(frozen=True)
class Own:
    """A block of a user's."""

    trees: bool = False

    def refusal(self, request):
        return None

    def forward(self, pair, into=()):
        return xla.forward(pair, into)

    def backward(self, *arguments):
        return xla.backward(*arguments)


def test_a_block_of_your_own_must_say_that_it_knows_trees():
    x = np.zeros((1, 8, 2, 4), np.float32)
    make_attention(st.Degrees(), backend=Own(trees=True))(x, x, x, visible_until=np.array([GOOD]))
    with pytest.raises(UnsupportedError, match="no attribute trees = True"):
        make_attention(st.Degrees(), backend=Own())(x, x, x, visible_until=np.array([GOOD]))


def test_explain_says_which_backend_serves_trees():
    attention = make_attention(SCHEMES["ring"], causal=True, layout="zigzag")
    sizes = dict(seq_len=4096, heads=8, head_dim=128, platform="cuda", capability=(9, 0))
    assert attention.explain(trees=True, **sizes).backend == "cudnn"
    found = make_attention(SCHEMES["ring"], window=512, layout="zigzag").explain(
        trees=True, **sizes
    )
    assert found.backend == "tiled"
    assert "window of 512 tokens" in str(found)
