"""The algebra of masks, by brute force against dense masks that are written down once more here."""

import dataclasses
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import startrail_jax as st
from attention_cases import DENSE, PATTERNS, make_attention
from refusals import refused
from startrail_jax.blocks import xla
from startrail_jax.blocks.tiles import Tiling, tile_kinds, visible_tiles
from startrail_jax.blocks.visibility import Visibility
from startrail_jax.errors import InputError, UnsupportedError
from startrail_jax.masks import Mask
from startrail_jax.rings.schedule import ring_offsets
from startrail_jax.rings.work import visible_pairs
from startrail_jax.tokens.layout import KINDS, Layout, Span
from startrail_jax.traffic.settings import all_degrees

pytestmark = pytest.mark.quick

M = st.masks
LENGTH = 13
# Masks whose answers are exact, not only safe.
COMBINED = {name for name, mask in PATTERNS.items() if isinstance(mask, (M.Both, M.Either))}
EXACT = set(PATTERNS) - COMBINED - {"even_keys"}


def dense(name, length):
    query, key = np.arange(length)[:, None], np.arange(length)[None, :]
    return np.broadcast_to(DENSE[name](query, key), (length, length))


def all_spans(length):
    """Every span of positions as arrays first, last [spans]."""
    pairs = [(a, b) for a in range(length) for b in range(a, length)]
    return np.array(pairs).T


@pytest.mark.parametrize("name", PATTERNS)
def test_every_answer_holds_for_all_spans_of_positions(name):
    mask, seen = PATTERNS[name], dense(name, LENGTH)
    first, last = all_spans(LENGTH)
    query, key = Span(first[:, None], last[:, None]), Span(first, last)
    spans = [slice(a, b + 1) for a, b in zip(first, last, strict=True)]
    blocks = [[seen[rows, columns] for columns in spans] for rows in spans]
    some, every = (np.array([[f(x) for x in row] for row in blocks]) for f in (np.any, np.all))
    shape = some.shape
    said = [np.broadcast_to(f(query, key), shape) for f in (mask.some, mask.every, mask.triangle)]
    assert (said[0] >= some).all()
    assert (said[1] <= every).all()
    if name in EXACT:
        np.testing.assert_array_equal(said[0], some)
        np.testing.assert_array_equal(said[1], every)
    tril = np.tri(LENGTH, dtype=bool)
    for i, j in np.argwhere(said[2]):
        rows, columns = slice(first[i], last[i] + 1), slice(first[j], last[j] + 1)
        assert (seen[rows, columns] == tril[rows, columns]).all()
    looks_ahead = np.triu(seen, 1).any()
    assert not (mask.causal and looks_ahead)
    assert mask.causal or looks_ahead or rule_of(mask)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("length", [1, 2, 5, LENGTH, 40])
def test_the_mask_of_a_length_shows_the_same(name, length):
    mask = PATTERNS[name]
    query, key = np.arange(length)[:, None], np.arange(length)[None, :]
    wanted = dense(name, length)
    np.testing.assert_array_equal(mask.visible(query, key) & np.ones_like(wanted), wanted)
    short = mask.within(length)
    np.testing.assert_array_equal(short.visible(query, key) & np.ones_like(wanted), wanted)
    assert wanted.all() or not isinstance(short, M.Full)
    assert visible_pairs(mask, length) == wanted.sum()
    assert hash(short) == hash(mask.within(length))
    assert rule_of(short) or eval(repr(short), vars(M)) == short


def rule_of(mask):
    """Whether a mask has a rule of the user's own, which has no text to read back."""
    parts = [getattr(mask, field.name) for field in dataclasses.fields(mask)]
    return isinstance(mask, M.Rule) or any(rule_of(x) for x in parts if isinstance(x, Mask))


def schedules(num_devices, name):
    for degrees in all_degrees(num_devices):
        mesh = st.make_mesh(degrees, devices=jax.devices()[:num_devices]).abstract_mesh
        for layout in KINDS:
            yield st.Attention(mesh, mask=PATTERNS[name], layout=layout).schedule


@pytest.mark.slow_except_every(65)
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("num_devices", [1, 2, 6, 12])
def test_rounds_are_left_out_just_where_no_device_sees_a_key(name, num_devices):
    seq_len = 4 * num_devices
    seen, mask = dense(name, seq_len), PATTERNS[name].within(seq_len)
    for schedule in schedules(num_devices, name):
        offsets, ring = ring_offsets(schedule, seq_len), range(schedule.ring.degree)
        units = schedule.units_that_meet(seq_len, ring)
        for offset in ring:
            runs = {
                tuple(unit_at(unit, (offset, *device)) for unit in units)
                for device in np.ndindex(units[0].starts[0].shape[1:])
            }
            parts = [seen[np.ix_(positions(a), positions(b))] for a, b in runs]
            for part, pair in zip(parts, runs, strict=True):
                kind = mask.kind(*pair)
                assert not (part.any() and kind == "empty")
                assert part.all() or kind != "full"
                if name in EXACT:
                    assert kind == ("full" if part.all() else "partial" if part.any() else "empty")
            needed = any(part.any() for part in parts)
            assert offset in offsets or not needed
            if name in EXACT:
                assert (offset in offsets) == (needed or offset == 0)


def unit_at(units, place):
    """The unit of one device and round."""
    shape = units.starts[0].shape
    starts = (int(np.broadcast_to(start, shape)[place]) for start in units.starts)
    return dataclasses.replace(units, starts=tuple(starts))


def positions(runs):
    return np.concatenate([start + np.arange(runs.length) for start in runs.starts])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow_except_every(3)
def test_tiles_show_what_the_mask_shows(kind):
    """One pair of units, all masks: which tiles are visited, of what kind, and what is in them."""
    layout, seq_len = Layout(kind, 4), 4 * 12
    query, key = (layout.unit_positions(seq_len, first, 2) for first in (2, 0))
    rows, columns = (Tiling.of(24, len(query.starts), 5) for _ in range(2))
    where = positions(query), positions(key)
    for name, pattern in PATTERNS.items():
        mask, seen = Visibility(pattern, query, key), dense(name, seq_len)[np.ix_(*where)]
        visited = np.asarray(visible_tiles(mask, rows, columns))
        kinds = {x: np.asarray(pairs) for x, pairs in tile_kinds(mask, rows, columns).items()}
        np.testing.assert_array_equal(sum(x.astype(int) for x in kinds.values()), visited)
        for i, j in itertools.product(range(len(rows.starts)), range(len(columns.starts))):
            part = seen[rows.starts[i] :][: rows.size, columns.starts[j] :][:, : columns.size]
            fresh = part[rows.fresh[i] - rows.starts[i] :, columns.fresh[j] - columns.starts[j] :]
            assert visited[i, j] or not fresh.any(), name
            if "full" in kinds and kinds["full"][i, j]:
                assert part.all(), name
            if "causal" in kinds and kinds["causal"][i, j]:
                np.testing.assert_array_equal(part, np.tri(*part.shape))


# At 128K tokens over 64 devices. Visibility -> (first, last) key that each query sees.
ROWS = {
    "window": (M.Window(1024, 0), lambda i: (np.maximum(i - 1024, 0), i)),
    "chunks": (M.Chunked(8192), lambda i: (i // 8192 * 8192, i // 8192 * 8192 + 8191)),
    "frames": (M.BlockCausal(1560), lambda i: (0 * i, np.minimum(i // 1560 * 1560 + 1559, 131071))),
}


@pytest.mark.parametrize("name", ROWS)
def test_hardly_a_tile_is_visited_in_which_nothing_is_visible(name):
    mask, row = ROWS[name]
    seq_len, degrees = 131072, st.Degrees.ring_attention(64)
    mesh = jax.sharding.AbstractMesh((64,), ("ring",))
    attention = st.Attention(mesh, mask=mask, layout="contiguous")
    schedule = attention.schedule
    tiles = xla.tilings(schedule.visibility(seq_len, (0, 0, 0)), seq_len // 64, seq_len // 64, 1)

    @jax.jit
    @jax.vmap
    def visited(device, distance):
        pair = schedule.visibility(seq_len, (device, 0, 0), keys_behind=distance)
        return visible_tiles(pair, *tiles).sum()

    offsets = np.array(ring_offsets(schedule, seq_len))
    count = int(visited(*(x.ravel() for x in np.meshgrid(np.arange(degrees.ring), offsets))).sum())

    size = tiles[0].size
    first, last = row(np.arange(seq_len))
    least = (last // size).reshape(-1, size).max(1) - (first // size).reshape(-1, size).min(1) + 1
    assert least.sum() <= count <= 1.15 * least.sum()
    assert len(offsets) == {"window": 2, "chunks": 7, "frames": 64}[name]


def test_masks_are_simplified_where_they_meet():
    causal, window = M.Causal(), M.Window(3, 0)
    assert causal & M.Window(3, 5) == window == M.Window(3, 5) & causal
    assert causal & M.Full() == causal == M.Full() & causal
    assert M.Full() | causal == M.Full() == causal | M.Full()
    assert causal & causal == causal == causal | causal
    assert M.Window(None, 0).within(9) == causal
    assert M.Window(None, None).within(9) == M.Full()
    assert str(causal & (window | M.Sinks(4))) == (
        "(Causal() & (Window(left=3, right=0) | Sinks(count=4)))"
    )


def test_causal_and_window_are_short_for_masks():
    mesh = jax.sharding.AbstractMesh((2,), ("ring",))
    make = lambda **options: st.Attention(mesh, **options)  # noqa: E731
    assert make(causal=True).resolved_mask == M.Causal()
    with refused(InputError, "needs causal=, window= or mask=; got none of them"):
        make()
    assert make(causal=False).resolved_mask == M.Full()
    assert make(window=5).resolved_mask == M.Window(4, 0)
    for short, mask in ((dict(window=5), M.Window(4, 0)), (dict(causal=False), M.Full())):
        same = make(mask=mask)
        assert same.schedule == make(**short).schedule
        assert same.causal == make(**short).causal
        assert same.layout == make(**short).layout
    assert dataclasses.replace(make(mask=M.Prefix(3)), backend="xla").mask == M.Prefix(3)


@pytest.mark.usefixtures("unchecked")
def test_bounds_of_a_rule_may_be_numbers():
    causal = lambda query, key: key <= query  # noqa: E731

    def numbers(a, b, c, d):
        return 1 * (jnp.asarray(c) <= b), 1 * (jnp.asarray(d) <= a)

    query = Span(np.array([[0], [4]]), np.array([[3], [7]]))
    key = Span(np.array([[0, 4]]), np.array([[3, 7]]))
    rule, wanted = M.Rule(causal, numbers), M.Causal()
    for found, expected in ((rule.some, wanted.some), (rule.every, wanted.every)):
        answer = np.asarray(found(query, key))
        assert answer.dtype == bool
        np.testing.assert_array_equal(answer, expected(query, key))
    assert M.Rule(causal, lambda a, b, c, d: (1, 0)).every(Span(0, 3), Span(0, 3)) is False


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: M.Window(-1, 0),
            "left of masks.Window must be .* 0 or None; got left=-1",
        ),
        (lambda: M.Window(2, 1.5), "right of masks.Window must be .*; got right=1.5"),
        (lambda: M.Chunked(0), "size of masks.Chunked must be .* at least 1; got size=0"),
        (lambda: M.BlockCausal(True), "size of masks.BlockCausal must be .*; got size=True"),
        (lambda: M.Prefix(0), "length of masks.Prefix must be .*; got length=0"),
        (lambda: M.Sinks(-4), "count of masks.Sinks must be .*; got count=-4"),
        (
            lambda: M.Rule(lambda query, key: (key <= query).swapaxes(1, 2)),
            r"bools that broadcast to \[b, t, s\].*bool \[5, 3, 2\]",
        ),
        (lambda: M.Rule(lambda query, key: query - key), "got, for b=5, t=2 and s=3, int32"),
        (lambda: M.Rule(lambda query, key: (key <= query)[0]), r"got, .*, bool \[2, 3\]"),
        (lambda: M.Rule(lambda query, key: True), r"got, .*, bool \[\]"),
        (lambda: M.Rule(lambda query: query > 0), "TypeError"),
        (lambda: M.Rule(lambda query, key: {}[1]), r"Rule must .* KeyError: 1\. Compare"),
        (lambda: M.Causal() & np.ones(3, bool), r"sides of & must be masks.*an array \(3,\)\."),
        (lambda: np.ones(3, bool) & M.Causal(), r"sides of & must be masks.*an array \(3,\)\."),
        (lambda: jnp.ones(3, bool) | M.Causal(), r"sides of \| must be masks.*an array \(3,\)\."),
        (lambda: M.Sinks(3) | None, r"sides of \| must be masks.* got None\. .*Rule\(function\)"),
    ],
)
def test_masks_of_nonsense_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_mask_has_no_opposite():
    with refused(UnsupportedError, "masks.Rule"):
        _ = ~M.Causal()


NOTHING = M.Rule(lambda query, key: key < 0, lambda *ends: (False, False))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "named"),
    [
        (dict(mask=np.ones((8, 8), bool)), "startrail_jax.masks"),
        (dict(mask="causal"), "'causal'"),
        (dict(mask=M.Causal(), window=3), "mask=Causal"),
        (dict(mask=M.Full(), causal=True), "causal=True"),
        (dict(mask=M.Prefix(9)), "mask=Prefix"),
        (dict(mask=M.Causal() | M.Prefix(9)), "no longer than the sequence"),
        (dict(mask=NOTHING), "seq_len=8"),
        (dict(mask=M.Causal() & NOTHING), "hides every key"),
    ],
)
def test_attentions_with_masks_of_nonsense_are_refused(options, named):
    x = jnp.zeros((1, 8, 1, 4))
    mesh = st.make_mesh(st.Degrees(ring=2), devices=jax.devices()[:2])
    with refused(InputError, named):
        jax.eval_shape(st.Attention(mesh, layout="contiguous", **options), x, x, x)


def test_a_mask_needs_queries_and_keys_of_one_length():
    x, y = jnp.zeros((1, 8, 1, 4)), jnp.zeros((1, 16, 1, 4))
    with refused(InputError, size=4):
        jax.eval_shape(make_attention(st.Degrees(ring=2), mask=M.Chunked(4)), x, y, y)


def test_windows_wider_than_integers_are_those_of_the_sequence():
    assert visible_pairs(M.Window(2**40, 0), 64) == 64 * 65 // 2


def test_of_a_prefix_that_calls_give_every_pair_counts_that_may_be_visible():
    assert visible_pairs(M.Prefix(), 72) == 72**2
    for combined in (M.Prefix() & M.Causal(), M.Causal() | M.Chunked(4) & M.Prefix()):
        whole = combined.given(np.int32(72)).visible(np.arange(72)[:, None], np.arange(72))
        assert visible_pairs(combined, 72) == whole.sum()
    assert visible_pairs(M.Prefix() & M.Causal(), 72) == 72 * 73 // 2
    x = jnp.ones((1, 8, 1, 4))
    attention = make_attention(st.Degrees(ring=2), mask=M.Window(2**31, 0))
    found = attention.decode(x[:, :1], x, x, jnp.array([[3]]))
    chex.assert_trees_all_close(found, x[:, :1])


@pytest.mark.parametrize("mask", [M.Causal(), M.Full(), M.Window(5, 0), M.BlockCausal(4)], ids=str)
def test_tokens_are_in_natural_order_under_every_mask(mask):
    """Arrays that nothing has reordered are right, and positions are those in memory."""
    layout = st.Attention(jax.sharding.AbstractMesh((2,), ("ring",)), mask=mask).layout
    assert layout.kind == "contiguous"
    np.testing.assert_array_equal(layout.positions(8), np.arange(8))
