"""The tiled backend over an emulation of cuDNN's kernels: every mask, and who computes what."""

import collections
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fake_cudnn
import oracle
from attention_cases import DENSE, FLOAT32_ERROR, PATTERNS, QUICK, relative_error
from startrail_jax.blocks import tiled
from startrail_jax.blocks.base import Pair, Request
from startrail_jax.blocks.scores import PLAIN, ScoreTile
from startrail_jax.blocks.shapes import EMPTY
from startrail_jax.blocks.softmax import merge_partials
from startrail_jax.blocks.tiles import Tiling, split_tiles
from startrail_jax.blocks.visibility import Visibility
from startrail_jax.masks import Window, resolve
from startrail_jax.tokens.layout import Layout

BATCH, HEADS, HEAD_DIM, VALUE_DIM = 2, 6, 5, 7
SCALE = 0.3


@dataclass(frozen=True)
class Case:
    """Attention of one query unit to one key unit of a sequence."""

    kind: str = "contiguous"
    degree: int = 1
    query: tuple[int, int] = (1, 0)
    """Ranks in the unit, and its index."""
    key: tuple[int, int] = (1, 0)
    seq_len: int = 48
    causal: bool = True
    window: int | None = None
    rule: str | None = None
    """Name of another mask."""
    packed: bool = False
    kv_heads: int = 2
    coarse: int = 12
    fine: int = 3
    in_vain: int = 0
    """Dense tiles whose only ids in common are those of tokens that a tile repeats."""

    def runs(self, unit):
        size, index = unit
        return Layout(self.kind, self.degree).unit_positions(self.seq_len, index * size, size)

    def positions(self):
        """Natural positions of the queries and of the keys; both are all tokens if not causal."""
        return tuple(np.asarray(self.runs(unit).vector()) for unit in (self.query, self.key))

    def documents(self):
        """Ids [B, seq_len]: a different packing in each row, with padding behind it."""
        lengths = [[20, 3, 18], [9, 23, 16]]
        rows = [np.repeat(np.arange(3), np.array(x) * self.seq_len // 48) for x in lengths]
        fill = np.full((BATCH, self.seq_len), -1, np.int32)
        for filled, row in zip(fill, rows, strict=True):
            filled[: len(row)] = row
        return fill if self.packed else np.zeros_like(fill)

    def mask(self):
        mask = Visibility()
        queries, keys = self.positions()
        if self.causal:
            runs = dict(query_runs=self.runs(self.query), key_runs=self.runs(self.key))
            pattern = PATTERNS[self.rule] if self.rule else None
            window = self.window
            mask = Visibility(pattern or resolve(None, causal=True, window=window), **runs)
        if not self.packed:
            return mask
        ids = jnp.asarray(self.documents())
        fields = {**vars(mask), "query_segments": ids[:, queries], "key_segments": ids[:, keys]}
        return Visibility(**fields)

    def told(self):
        """The same for the oracle, which gets the whole sequence: the other keys are padding."""
        ids = self.documents()
        key_ids = np.full_like(ids, -1)
        key_ids[:, self.positions()[1]] = ids[:, self.positions()[1]]
        if self.rule:
            return dict(rule=DENSE[self.rule], segment_ids=(ids, key_ids))
        return dict(causal=self.causal, window=self.window, segment_ids=(ids, key_ids))

    def visible(self):
        """What the queries of the unit see of its keys: bool [B, t, s]."""
        queries, keys = self.positions()
        seen = oracle.visible(self.seq_len, self.seq_len, **self.told())
        return seen[:, queries][:, :, keys]


zigzag = functools.partial(Case, "zigzag", 4, seq_len=96)
CASES = {
    "full": Case(causal=False, seq_len=24),
    "window below a fine tile": Case(window=2),
    # A tile size that the right edge of the window does not lie on, as it could be a triangle.
    "window to both sides": Case(rule="two_sided", seq_len=40, coarse=10, fine=5),
    "window of a coarse tile": Case(window=12, packed=True),
    "window to a fine tile, zigzag": zigzag(query=(2, 1), key=(2, 1), window=7, kv_heads=6),
    "prefix": Case(rule="prefix"),
    "frames, packed": Case(rule="block_causal", packed=True),
    "chunks, zigzag": zigzag(query=(2, 1), key=(2, 1), rule="causal_chunked"),
    "documents": Case(causal=False, packed=True, kv_heads=1),
    "causal documents": Case(packed=True),
    "windowed documents": Case(packed=True, window=17, kv_heads=6),
    "sizes that divide nothing": Case(seq_len=53, coarse=13, fine=4, packed=True, in_vain=3),
    "full, sizes that divide nothing": Case(seq_len=53, coarse=7, fine=2, causal=False),
    "tiles of one token": Case(seq_len=6, coarse=2, fine=1),
    "one tile size": Case(coarse=8, fine=8, kv_heads=1),
    "zigzag, home": zigzag(query=(2, 1), key=(2, 1)),
    "zigzag, earlier keys": zigzag(query=(2, 1), key=(2, 0), packed=True),
    "zigzag, later keys": zigzag(query=(1, 1), key=(1, 3), kv_heads=6),
    "zigzag, few queries": zigzag(query=(1, 2), key=(2, 0), kv_heads=1),
    "zigzag, few keys": zigzag(query=(4, 0), key=(1, 3), packed=True, window=50),
}


def small_tiles(monkeypatch, case):
    monkeypatch.setattr(tiled, "COARSE", case.coarse)
    monkeypatch.setattr(tiled, "FINE", case.fine)


def random_arrays(case):
    """q, k, v, dout of the whole sequence."""
    rng = np.random.default_rng(0)
    keys, values = (case.kv_heads, HEAD_DIM), (case.kv_heads, VALUE_DIM)
    heads = (HEADS, HEAD_DIM), keys, values, (HEADS, VALUE_DIM)
    return [jnp.float32(rng.normal(size=(BATCH, case.seq_len, *x))) for x in heads]


def both_passes(mask, q, k, v, dout):
    out, lse = merge_partials(tiled.forward(Pair(q, k, v, mask, SCALE)))
    delta = (out * dout).sum(-1).swapaxes(1, 2)
    return out, lse, *tiled.backward(Pair(q, k, v, mask, SCALE), lse, delta, dout)


def check_both_passes(case):
    """On the units of the case, compiled, against the oracle on the whole sequence."""
    arrays = random_arrays(case)
    queries, keys = case.positions()
    unit = [x[:, own] for x, own in zip(arrays, (queries, keys, keys, queries), strict=True)]
    step = jax.jit(functools.partial(both_passes, case.mask()), compiler_options=QUICK)
    results = out, lse, *gradients = step(*unit)
    assert {x.dtype for x in results} == {jnp.dtype(jnp.float32)}
    q, k, v, dout = (np.asarray(x, np.float64) for x in arrays)
    expected_out, expected_lse = oracle.attention(q, k, v, scale=SCALE, **case.told())
    assert relative_error(out, expected_out[:, queries]) < FLOAT32_ERROR
    expected_lse = expected_lse[:, :, queries]
    np.testing.assert_array_equal(np.asarray(lse) == EMPTY, expected_lse == oracle.EMPTY)
    np.testing.assert_allclose(lse, expected_lse, rtol=FLOAT32_ERROR, atol=FLOAT32_ERROR)
    of_unit = np.zeros_like(dout)
    of_unit[:, queries] = dout[:, queries]
    expected = oracle.gradients(q, k, v, of_unit, scale=SCALE, **case.told())
    rows = queries, keys, keys
    for name, actual, wanted, own in zip(expected._fields, gradients, expected, rows, strict=True):
        assert relative_error(actual, wanted[:, own]) < FLOAT32_ERROR, name


def worth(case):
    """What a pass over the case should call, (queries, keys, causal) or "dense": by brute force."""
    seen, mask, calls = case.visible(), case.mask(), collections.Counter()
    coarse = tiled.tilings(mask, *seen.shape[1:])
    (rows, row_parents), (columns, column_parents) = (split_tiles(x, case.fine) for x in coarse)
    runs = case.causal and (mask.query_runs.length, mask.key_runs.length)
    for i, j in np.ndindex(*(len(x.starts) for x in coarse)):
        call = tile_worth(seen, *coarse, i, j, runs)
        calls[call] += call != "dense"
        if call == "dense":
            for x in np.flatnonzero(row_parents == i):
                for y in np.flatnonzero(column_parents == j):
                    calls[tile_worth(seen, rows, columns, x, y, runs)] += 1
    calls.pop("nothing", None)
    return +calls


def tile_worth(seen, rows, columns, i, j, runs):
    repeats = rows.starts[i] < rows.fresh[i] or columns.starts[j] < columns.fresh[j]
    tile = seen[:, rows.starts[i] :, columns.starts[j] :][:, : rows.size, : columns.size]
    m, n = tile.shape[1:]
    if tile.all() and not repeats:
        return m, n, False
    for less in (0, 1):
        triangles = [np.tri(m, n, -less, dtype=bool)]
        if runs and not any(run % m for run in runs):
            triangles.append(triangles[0].T)
        if m == n > 1 and not repeats and any((tile == x).all() for x in triangles):
            return m - less, n - less, True
    own = tile[:, rows.fresh[i] - rows.starts[i] :, columns.fresh[j] - columns.starts[j] :]
    return "dense" if own.any() else "nothing"


def recorded(function, calls):
    @functools.wraps(function)
    def wrapper(*operands):
        jax.debug.callback(lambda: calls.append((function.__name__, "dense")))
        return function(*operands)

    return wrapper


@pytest.mark.parametrize(("length", "large", "small"), [(48, 12, 3), (53, 13, 4), (20, 7, 1)])
def test_split_tiles_hold_what_is_fresh_in_the_large_ones_once(length, large, small):
    tiling = Tiling.of(length, 1, large)
    parts, parents = split_tiles(tiling, small)
    assert parts.size <= small
    fresh = np.concatenate([tiling.fresh, [length]])
    for parent in range(len(tiling.starts)):
        own = [
            np.arange(parts.fresh[i], parts.starts[i] + parts.size)
            for i in np.flatnonzero(parents == parent)
        ]
        expected = np.arange(fresh[parent], fresh[parent + 1])
        np.testing.assert_array_equal(np.concatenate(own), expected)


@pytest.mark.slow_except_every(24)
@pytest.mark.parametrize("name", CASES)
def test_tiles_agree_with_the_oracle_and_go_to_kernels_where_they_can(name, monkeypatch):
    case, calls = CASES[name], []
    small_tiles(monkeypatch, case)
    fake_cudnn.install(monkeypatch, calls)
    for dense in (tiled._attend, tiled._gradients):
        monkeypatch.setattr(tiled, dense.__name__, recorded(dense, calls))
    check_both_passes(case)
    jax.effects_barrier()
    for names in (("attend", "_attend"), ("gradients", "_gradients")):
        made = collections.Counter(call for name, call in calls if name in names)
        made["dense"] -= case.in_vain
        assert +made == worth(case)


@pytest.mark.parametrize(
    "name",
    ["zigzag, home", "windowed documents", "sizes that divide nothing", "zigzag, few queries"],
)
@pytest.mark.slow_except_every(3)
def test_what_cudnn_does_not_serve_is_computed_from_dense_tiles(name, monkeypatch):
    case = CASES[name]
    small_tiles(monkeypatch, case)
    check_both_passes(case)


def test_dense_tile_of_values_near_the_greatest_float32_does_not_overflow():
    q, v = jnp.zeros((1, 3, 2, 5)), jnp.full((1, 7, 1, 4), 3e38)
    at = ScoreTile(
        PLAIN, Visibility(), *(Tiling.of(n, 1, n) for n in (3, 7)), *jnp.zeros(2, int), 1, 2
    )
    out, *_ = tiled._attend(q, jnp.zeros((1, 7, 1, 5)), v, SCALE, None, at)
    np.testing.assert_allclose(out, 3e38, rtol=1e-6)


@pytest.mark.slow
def test_error_hardly_grows_with_the_number_of_merges(monkeypatch):
    """512 tiles of keys: a rounding of lse in each merge would add up to more than the bound."""
    monkeypatch.setattr(tiled, "COARSE", 4)
    fake_cudnn.install(monkeypatch)
    rng = np.random.default_rng(0)
    queries, keys = (1, 16, 2, 8), (1, 2048, 2, 8)
    arrays = [rng.normal(size=x).astype(np.float32) for x in (queries, keys, keys, queries)]
    step = jax.jit(functools.partial(both_passes, Visibility()), compiler_options=QUICK)
    out, lse, *gradients = step(*arrays)
    expected = oracle.attention(*arrays[:3], scale=SCALE)
    expected += oracle.gradients(*arrays, scale=SCALE)
    for found, wanted in zip((out, lse, *gradients), expected, strict=True):
        assert relative_error(found, wanted) < FLOAT32_ERROR


def test_every_request_is_served_on_gpus_with_cudnn():
    usual = dict(
        capability=(8, 0), dtype="float32", head_dim=5, value_head_dim=7, mask=Window(2, 0),
        packed=True, num_cases=0,
    )  # fmt: skip
    assert tiled.refusal(Request(platform="cuda", **usual)) is None
    assert "needs NVIDIA GPUs; got platform 'cpu'" in tiled.refusal(
        Request(platform="cpu", **usual)
    )
    old = Request(platform="cuda", **{**usual, "capability": (7, 0)})
    assert "capability 8.0; got 7.0" in tiled.refusal(old)
