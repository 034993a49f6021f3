"""The exchange that sends only the keys that a mask shows: what must move, and exactness."""

import dataclasses
import itertools
from collections import Counter
from itertools import cycle
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fake_cudnn
import score_cases
import startrail_jax as st
from attention_cases import (
    DENSE,
    HEADS,
    MASKS,
    PATTERNS,
    Case,
    check,
    covering,
    forward_and_backward,
    make_attention,
    place,
    relative_error,
)
from refusals import refused
from score_cases import ScoreCase
from startrail_jax.blocks import tiled, xla
from startrail_jax.errors import UnsupportedError
from startrail_jax.rings import sparse_plan
from startrail_jax.rings.sparse_plan import plan_sparse
from startrail_jax.tokens.layout import Layout

M, D = st.masks, st.Degrees


def latent(height, width, reach):
    """A rule of a video with frames of height x width tokens: `reach` is that of a sliding tile."""

    def sees(query, key):
        frames = abs(query // (height * width) - key // (height * width)) <= 1
        rows = abs(query // width % height - key // width % height) <= reach
        return frames & rows & (abs(query % width - key % width) <= reach)

    def bounds(first, last, key_first, key_last):
        size = height * width
        return (key_first // size <= last // size + 1) & (first // size <= key_last // size + 1), 0

    return M.Rule(sees, bounds)


def overlapping():
    """A run of 3 keys that is sent as 7 keys, which hold another run of 2 keys."""

    def meet(first, last, low, high):
        return (first <= high) & (last >= low)

    def bounds(first, last, key_first, key_last):
        middle = meet(first, last, 8, 15) & meet(key_first, key_last, 0, 6)
        late = meet(key_first, key_last, 8, 10) | meet(key_first, key_last, 13, 14)
        own = meet(first, last, key_first, key_last)
        return middle | (meet(first, last, 16, 23) & late) | own, 0

    return M.Rule(lambda query, key: bounds(query, query, key, key)[0], bounds)


# Name -> a mask of static positions, beside those of `attention_cases`.
MORE = {
    "sinks and window": M.Causal() & (M.Window(4, 0) | M.Sinks(3)),
    "latent": latent(3, 4, 1),
    "overlapping": overlapping(),
}
SPARSE = {
    "window": ("two_sided", "own_window", "wide window", "right_only", "left_only"),
    "blocks": ("chunked", "causal_chunked", "block_causal"),
    "sinks": ("sinks", "sinks_only", "sinks and window", "prefix_or_window"),
    "rules": ("latent", "bounded_rule", "even_keys", "prefix"),
}
SCHEMES = {
    "ring": (D(ring=2), D(ring=3), D(ring=6), D(ring=5)),
    "others": (D(group=2, ring=2, team=2), D(team=3), D(group=3, team=2), D(ring=2, team=2)),
    "head": (D(head=2, ring=2), D(head=3), D(group=2, team=2, head=2)),
    "data_tensor": (D(data=2, ring=2, tensor=2), D(ring=2, tensor=4), D(team=2, tensor=2, head=2)),
    # On emulated kernels.
    "tiled": (D(ring=2), D(team=3), D(head=4), D(group=2, team=2)),
}


@pytest.fixture(autouse=True, scope="module")
def masks():
    """The masks of this file under names that `Case` knows."""
    dense = {
        name: lambda i, j, mask=mask: np.asarray(mask.visible(i, j)) for name, mask in MORE.items()
    }
    with (
        mock.patch.dict(PATTERNS, MORE),
        mock.patch.dict(DENSE, dense),
        mock.patch.dict(MASKS, {name: (None, None, None) for name in MORE}),
    ):
        yield


def cases():
    """A covering design: every two choices meet in some row."""
    settings = {scheme: cycle(values) for scheme, values in SCHEMES.items()}
    names = {kind: cycle(values) for kind, values in SPARSE.items()}
    design = covering(
        {
            "scheme": tuple(SCHEMES),
            "mask": tuple(SPARSE),
            "segments": (None, "documents", "padding"),
            "heads": HEADS,
            "layout": ("contiguous", "zigzag"),
            "axis_type": ("explicit", "auto"),
            "keep_gathered": (False, True),
            "softcap": (False, True),
            "sinks": (False, True),
            "slopes": (False, True),
            "dropout": (None, False, True),
            "head_chunks": (1, 2),
        },
        lambda pair: (
            pair.get("head_chunks") == 2
            and (pair.get("heads") == "single" or pair.get("scheme") == "data_tensor")
        ),
    )
    for seed, row in enumerate(design):
        scheme, mask = row.pop("scheme"), next(names[row.pop("mask")])
        given = {name: row.pop(name) for name in ("softcap", "sinks", "slopes", "dropout")}
        case = Case(
            degrees=next(settings[scheme]),
            mask=mask,
            backend="tiled" if scheme == "tiled" else "auto",
            tokens=(6, 14)[seed % 2],
            exchange="sparse",
            seed=seed,
            **row,
        )
        yield ScoreCase(case=case, **given)


CASES = list(cases())


@pytest.mark.slow_except_every(24)
@pytest.mark.parametrize("scored", CASES, ids=str)
def test_what_is_seen_is_enough(scored, monkeypatch):
    """Results and all gradients match the oracle, though nothing else is sent."""
    if scored.case.backend == "tiled":
        fake_cudnn.install(monkeypatch)
    with mock.patch.multiple(tiled, COARSE=8, FINE=4), mock.patch.multiple(xla, TILE_COLUMNS=5):
        score_cases.check(scored)


@pytest.mark.parametrize(
    "case",
    [
        Case(degrees=D(ring=6), mask="sinks and window", exchange="sparse", tokens=20),
        Case(
            degrees=D(ring=3), mask="overlapping", exchange="sparse", layout="contiguous", tokens=8
        ),
    ],
    ids=str,
)
@pytest.mark.slow_except_every(2)
def test_keys_and_gradients_of_shared_and_of_padded_runs_count_once(case):
    found = plan_sparse(case.attention.resolved_mask, case.attention.layout, case.seq_len)
    if case.mask == "overlapping":
        runs = [run for move in found.moves for run in move.runs]
        assert any(
            high - low + 1 < run.length for run in runs for low, high in run.needed if high >= low
        )
    else:
        assert found.shared == 3
    check(case)


# Masks whose rows see many keys: of few, jax's own error is small by chance.
OF_MANY_KEYS = (
    *("wide window", "left_only", "right_only"),
    *("block_causal", "prefix_or_window", "bounded_rule"),
)


def narrow_cases():
    """Of 16 bits, long enough for rounding to average out."""
    settings = {scheme: cycle(values) for scheme, values in SCHEMES.items() if scheme != "tiled"}
    design = covering(
        {
            "scheme": tuple(settings),
            "mask": OF_MANY_KEYS,
            "heads": HEADS,
            "layout": ("contiguous", "zigzag"),
            "dtype": ("bfloat16", "float16"),
        },
        lambda _: False,
    )
    for seed, row in enumerate(design):
        scheme = next(settings[row.pop("scheme")])
        yield Case(degrees=scheme, tokens=14, exchange="sparse", seed=seed, **row)


@pytest.mark.slow
@pytest.mark.parametrize("case", list(narrow_cases()), ids=str)
def test_16_bits_are_as_exact_as_those_of_jax(case):
    check(case)


@pytest.mark.slow
def test_gradients_travel_in_16_bits_if_asked_to():
    """Those of keys of others are rounded once; all else stays as it is."""
    case = Case(degrees=D(ring=4), mask="own_window", exchange="sparse")
    arguments = place(case.attention, case.problem)
    exact = forward_and_backward(case.attention, *arguments)
    other = dataclasses.replace(case.attention, gradient_dtype="bfloat16")
    rounded = forward_and_backward(other, *arguments)
    for name in ("out", "lse", "dq"):
        np.testing.assert_array_equal(getattr(rounded, name), getattr(exact, name))
    for name in ("dk", "dv"):
        error = relative_error(getattr(rounded, name), getattr(exact, name))
        assert 1e-6 < error < 2.0**-8


def received(found, layout, seq_len):
    """Of each rank, how often each position of others is received and counts."""
    counts = np.zeros((layout.degree, seq_len), int)
    positions = layout.positions(seq_len).reshape(layout.degree, -1)
    for move in found.moves:
        sources = [source for source, _ in move.pairs]
        targets = [target for _, target in move.pairs]
        assert max(Counter(sources).values(), default=1) == 1
        assert max(Counter(targets).values(), default=1) == 1
        for run in move.runs:
            pairs = move.pairs or [(run.owner, rank) for rank in range(layout.degree)]
            for source, target in pairs:
                begin = run.starts[source]
                sent = positions[source, begin : begin + run.length]
                first = run.positions[target]
                np.testing.assert_array_equal(sent, np.arange(first, first + run.length))
                low, high = run.needed[target]
                assert low > high or first <= low <= high < first + run.length
                counts[target, low : high + 1] += 1
    return counts


def some_masks():
    """Windows, chunks and rules of all kinds, drawn, with what they show, written down again."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        left, right = rng.integers(0, 40, size=2).tolist()
        size, count = rng.integers(1, 30, size=2).tolist()
        yield M.Window(left, right), lambda i, j, a=left, b=right: (j >= i - a) & (j <= i + b)
        yield M.Window(left, 0), lambda i, j, a=left: (j >= i - a) & (j <= i)
        yield (
            M.Chunked(size) & M.Causal(),
            lambda i, j, n=size: (i // n == j // n) & (j <= i),
        )
        yield (
            M.Causal() & (M.Window(left, 0) | M.Sinks(count)),
            lambda i, j, a=left, n=count: (j <= i) & ((j >= i - a) | (j < n)),
        )
        low, high = sorted(rng.integers(-30, 30, size=2).tolist())
        yield (
            M.Rule(
                lambda i, j, a=low, b=high: (j - i >= a) & (j - i <= b),
                lambda i, k, j, m, a=low, b=high: ((m - i >= a) & (j - k <= b), 0),
            ),
            lambda i, j, a=low, b=high: (j - i >= a) & (j - i <= b),
        )


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
@pytest.mark.slow_except_every(2)
def test_exactly_what_is_seen_moves_once(kind):
    """Each key that a rank needs counts there once; no rank has two pieces in a move."""
    rng = np.random.default_rng(1)
    for mask, dense in itertools.islice(some_masks(), 0, None, 2):
        degree = int(rng.integers(2, 10))
        layout = Layout(kind, degree)
        seq_len = layout.multiple * int(rng.integers(1, 9))
        found = plan_sparse(mask, layout, seq_len)
        position = np.arange(seq_len)
        seen = dense(position[:, None], position[None])
        own = layout.positions(seq_len).reshape(degree, -1)
        needed = np.stack([seen[rows].any(0) for rows in own])
        for rank, rows in enumerate(own):
            needed[rank, rows] = False
        counts = received(found, layout, seq_len)
        # Of shared keys, the mask hides what a rank does not need.
        shared = np.zeros(seq_len, bool)
        for run in (run for move in found.moves if move.shared for run in move.runs):
            shared[run.positions[0] : run.positions[0] + run.length] = True
        np.testing.assert_array_equal(counts[:, ~shared], needed[:, ~shared])
        assert np.all(counts[:, shared] >= needed[:, shared])
        assert counts.max(initial=0) <= 1


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_ends_of_runs_are_found_inside_of_blocks(kind):
    """Slices of more tokens than they have blocks; runs too short for whole tiles."""
    for left, right, size in ((7, 0, 150), (40, 13, 300), (0, 29, 1001), (60, 30, 777)):
        layout = Layout(kind, 3)
        seq_len = layout.multiple * size
        found = plan_sparse(M.Window(left, right), layout, seq_len)
        own = layout.positions(seq_len).reshape(3, -1)
        needed = np.zeros((3, seq_len), int)
        for rank, rows in enumerate(own):
            for shift in range(-left, right + 1):
                keys = rows + shift
                needed[rank, keys[(keys >= 0) & (keys < seq_len)]] = 1
            needed[rank, rows] = 0
        np.testing.assert_array_equal(received(found, layout, seq_len), needed)


def test_shared_keys_count_where_they_are_needed_and_not_at_home():
    layout, seq_len = Layout("zigzag", 8), 512
    found = plan_sparse(M.Causal() & (M.Window(9, 0) | M.Sinks(4)), layout, seq_len)
    assert (found.permuted, found.shared) == (2 * 9, 4)
    counts = received(found, layout, seq_len)
    assert counts.max() == 1
    assert counts[:, :4].sum(1).tolist() == [0] + 7 * [4]


@pytest.mark.parametrize(
    ("mask", "kind", "lengths"),
    [
        (M.Window(15, 0), "zigzag", [15, 15]),
        (M.Window(15, 0), "contiguous", [15]),
        (M.Window(15, 7), "zigzag", [22, 22]),
        (M.Window(15, 7), "contiguous", [15, 7]),
        (M.Window(40, 0), "zigzag", [32, 32, 8, 8]),
        (M.Window(40, 0), "contiguous", [40]),
        (M.Chunked(32), "zigzag", []),
        (M.Chunked(64), "contiguous", []),
        (M.Causal() & (M.Window(15, 0) | M.Sinks(4)), "contiguous", [4, 15]),
    ],
    ids=str,
)
def test_moves_are_as_few_as_the_busiest_rank_has_pieces(mask, kind, lengths):
    found = plan_sparse(mask, Layout(kind, 8), 512)
    assert [move.length for move in found.moves] == lengths


def test_pieces_of_one_length_need_no_more_moves_than_a_rank_has():
    """Konig's theorem, where the first move that fits would not do."""
    rng = np.random.default_rng(2)
    for _ in range(50):
        ranks = int(rng.integers(3, 12))
        wanted = rng.random((ranks, ranks)) < 0.4
        np.fill_diagonal(wanted, False)
        needs = {
            int(target): [(8 * int(source), 8 * int(source) + 3) for source in np.flatnonzero(row)]
            for target, row in enumerate(wanted)
        }
        moves = sparse_plan._moves(sparse_plan.Slices(ranks, 1, 8), needs)
        assert len(moves) == max(wanted.sum(0).max(), wanted.sum(1).max())
        assert sum(len(move.pairs) for move in moves) == wanted.sum()


def test_runs_are_whole_tiles_if_that_is_a_few_keys_more():
    """Kernels serve the far end of a window in whole tiles alone."""
    layout = Layout("contiguous", 4)
    for left, right, lengths in (
        (1023, 0, [1024]),
        (4095, 511, [4096, 512]),
        (500, 0, [500]),
        (100, 0, [100]),
        (2**14 - 1, 0, [2**14]),
    ):
        found = plan_sparse(M.Window(left, right), layout, 2**16)
        assert [move.length for move in found.moves] == lengths
        counts = received(found, layout, 2**16)
        assert counts.max() == 1
        # The one that is next is hidden by the mask.
        assert np.all(counts.sum(1) <= sum(lengths))


def test_an_exchange_over_a_thousand_devices_is_found_in_seconds():
    found = plan_sparse(M.Window(1023, 0), Layout("zigzag", 1024), 2**20)
    # A slice has 512 tokens.
    assert [move.length for move in found.moves] == 4 * [512]
    assert plan_sparse(M.BlockCausal(4096), Layout("zigzag", 1024), 2**20) is None


CALL = dict(seq_len=1024, heads=4, head_dim=8, dtype="float32")


def test_auto_takes_what_receives_fewer_bytes():
    attention = make_attention(D.startrail(8, c=2), layout="zigzag", window=16)
    said = attention.explain(**CALL)
    assert (said.exchange, said.moves) == ("sparse", (15, 15))
    assert "bytes with 'sparse'" in str(said)
    report = st.communication(
        D.startrail(8, c=2), batch=1, kv_heads=4, mask=M.Window(15, 0), layout="zigzag", **CALL
    )
    assert report.forward.received_bytes == 2 * 15 * 4 * 2 * 8 * 4
    # Ulysses trades heads, which are few bytes beside those of nearly all keys.
    assert make_attention(D.ulysses(4), window=900).explain(**CALL).exchange == "rings"


REFUSED = {
    "bias": (dict(window=9), dict(scores=("bias",))),
    "causal": ({}, {}),
    "full": (dict(causal=False), {}),
    "prefix of rows": (dict(mask=M.Prefix()), {}),
    "as published": (dict(window=9, published=True), {}),
}


@pytest.mark.filterwarnings("ignore::startrail_jax.errors.BalanceWarning")
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.slow_except_every(6)
def test_what_cannot_be_seen_goes_round_the_rings(name):
    """By name in `explain`; whoever asks for "sparse" gets an error."""
    options, call = REFUSED[name]
    attention = make_attention(D.startrail(8, c=2), **options)
    said = attention.explain(**CALL, **call)
    assert said.exchange == "rings"
    assert said.why
    asked = dataclasses.replace(
        attention, exchange="sparse", **({"causal": None} if attention.mask else {})
    )
    with refused(UnsupportedError, exchange="sparse"):
        asked.explain(**CALL, **call)


@pytest.mark.parametrize("options", [{}, dict(causal=False), dict(window=2000)], ids=str)
@pytest.mark.slow_except_every(3)
def test_where_all_is_seen_the_program_is_that_of_the_rings(options):
    texts = []
    for name in ("auto", "rings"):
        attention = make_attention(D.startrail(8, c=2), exchange=name, **options)
        shape = jax.ShapeDtypeStruct((1, 512, 4, 8), jnp.float32)
        loss = lambda *x, attend=attention: attend(*x).sum()  # noqa: E731
        texts.append(jax.jit(jax.grad(loss, (0, 1, 2))).lower(*[shape] * 3).as_text())
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_local_sends_what_is_seen():
    """Inside a shard_map of the caller."""
    case = Case(degrees=D(ring=3, team=2), mask="own_window", exchange="sparse", axis_type="auto")
    attention = case.attention
    arguments = place(attention, case.problem)[:3]
    spec = attention.query_spec(3)
    local = jax.shard_map(
        lambda *x: attention.local(*x)[0], mesh=attention.mesh, in_specs=(spec,) * 3, out_specs=spec
    )
    text = jax.jit(local).lower(*arguments).compile().as_text()
    assert "all-gather" not in text
    np.testing.assert_array_equal(jax.jit(local)(*arguments), attention(*arguments))
