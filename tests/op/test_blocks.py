"""One contract suite for every block backend, and what is particular to each."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fake_cudnn
import fake_fa4
import oracle
from attention_cases import FLOAT32_ERROR, QUICK, relative_error
from startrail_jax import blocks
from startrail_jax.blocks import tiled, xla
from startrail_jax.blocks.base import Pair
from startrail_jax.blocks.shapes import EMPTY
from startrail_jax.blocks.softmax import merge_partials
from startrail_jax.blocks.tiles import visible_tiles
from startrail_jax.blocks.visibility import Visibility
from startrail_jax.masks import Causal, Window
from startrail_jax.tokens.layout import Layout

BATCH, HEADS, HEAD_DIM, VALUE_DIM = 2, 6, 5, 7
MASKS = ("full", "causal", "window", "segments", "causal segments")
# `test_blocks_tiled.py` has more of the tiled ones.
SERVED = [("xla", mask, kv_heads) for mask in MASKS for kv_heads in (1, 2, 6)]
SERVED += [("cudnn", mask, kv_heads) for mask in ("full", "causal") for kv_heads in (1, 2, 6)]
SERVED += [("fa4", mask, 2) for mask in ("full", "causal")]
SERVED += [("tiled", mask, 2) for mask in MASKS]


@pytest.fixture
def emulated(monkeypatch):
    fake_cudnn.install(monkeypatch)
    fake_fa4.install(monkeypatch)


@pytest.fixture(params=sorted(blocks.BACKENDS))
def block(request, emulated):
    return blocks.BACKENDS[request.param]


@pytest.fixture
def small_tiles(monkeypatch):
    """Several tiles of sizes that divide nothing, so that some overlap."""
    monkeypatch.setattr(xla, "TILE_ROWS", 22)
    monkeypatch.setattr(xla, "TILE_COLUMNS", 9)
    monkeypatch.setattr(tiled, "COARSE", 23)
    monkeypatch.setattr(tiled, "FINE", 7)


def random_block(query_len, key_len, kv_heads, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (
        (BATCH, query_len, HEADS, HEAD_DIM),
        (BATCH, key_len, kv_heads, HEAD_DIM),
        (BATCH, key_len, kv_heads, VALUE_DIM),
        (BATCH, query_len, HEADS, VALUE_DIM),
    )
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def masks(length):
    """Name -> (what the block is told, what the oracle is told) for `length` queries and keys."""
    runs = Layout("contiguous", 1).unit_positions(length, 0, 1)
    ids = np.sort(np.random.default_rng(1).integers(-1, 3, (BATCH, length)), axis=1)
    ids = np.roll(ids, 5, axis=1).astype(np.int32)
    causal = functools.partial(Visibility, Causal(), query_runs=runs, key_runs=runs)
    segments = dict(query_segments=jnp.asarray(ids), key_segments=jnp.asarray(ids))
    return {
        "full": (Visibility(), {}),
        "causal": (causal(), dict(causal=True)),
        "window": (Visibility(Window(10, 0), runs, runs), dict(causal=True, window=11)),
        "segments": (Visibility(**segments), dict(segment_ids=ids)),
        "causal segments": (causal(**segments), dict(causal=True, segment_ids=ids)),
    }


@pytest.mark.usefixtures("emulated")
@pytest.mark.slow_except_every(6)
@pytest.mark.parametrize(("backend", "name", "kv_heads"), SERVED)
def test_block_agrees_with_the_oracle(backend, small_tiles, name, kv_heads):
    block = blocks.BACKENDS[backend]
    mask, told = masks(53)[name]
    q, k, v, dout = random_block(53, 53, kv_heads)
    scale = 0.3

    @functools.partial(jax.jit, compiler_options=QUICK)
    def both(q, k, v, dout):
        out, lse = merge_partials(block.forward(Pair(q, k, v, mask, scale)))
        delta = (out * dout).sum(-1).swapaxes(1, 2)
        return (out, lse), block.backward(Pair(q, k, v, mask, scale), lse, delta, dout)

    (out, lse), gradients = both(q, k, v, dout)
    expected_out, expected_lse = oracle.attention(q, k, v, scale=scale, **told)
    expected = oracle.gradients(q, k, v, dout, scale=scale, **told)
    assert out.dtype == lse.dtype == jnp.float32
    assert relative_error(out, expected_out) < FLOAT32_ERROR
    np.testing.assert_array_equal(np.asarray(lse) == EMPTY, expected_lse == oracle.EMPTY)
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-6, atol=2e-6)
    for actual, wanted, name in zip(gradients, expected, expected._fields, strict=True):
        assert relative_error(actual, wanted) < FLOAT32_ERROR, name
        assert actual.dtype == jnp.float32, name


@pytest.mark.slow_except_every(3)
def test_block_goes_on_from_what_earlier_keys_left(block, small_tiles):
    q, k, v, dout = random_block(31, 40, 2)
    first, second = slice(0, 17), slice(17, 40)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def both(q, k, v, dout):
        state = ()
        for keys in (first, second):
            state = block.forward(Pair(q, k[:, keys], v[:, keys], Visibility(), 0.4), state)
        out, lse = merge_partials(state)
        delta = (out * dout).sum(-1).swapaxes(1, 2)
        dq = None
        for keys in (first, second):
            pair = Pair(q, k[:, keys], v[:, keys], Visibility(), 0.4)
            dq, _, _ = block.backward(pair, lse, delta, dout, (dq, None, None))
        return out, lse, dq

    out, lse, dq = both(q, k, v, dout)
    expected_out, expected_lse = oracle.attention(q, k, v, scale=0.4)
    assert relative_error(out, expected_out) < FLOAT32_ERROR
    np.testing.assert_allclose(lse, expected_lse, atol=2e-6)
    assert relative_error(dq, oracle.gradients(q, k, v, dout, scale=0.4).query) < FLOAT32_ERROR


@pytest.mark.slow_except_every(3)
def test_block_backward_uses_the_lse_and_delta_that_it_is_given(block):
    q, k, v, dout = random_block(8, 9, 6)
    out, lse = merge_partials(block.forward(Pair(q, k, v, Visibility(), 1.0)))
    delta = (out * dout).sum(-1).swapaxes(1, 2)
    shifted = block.backward(Pair(q, k, v, Visibility(), 1.0), lse + jnp.log(2.0), delta, dout)
    plain = block.backward(Pair(q, k, v, Visibility(), 1.0), lse, delta, dout)
    for half, whole in zip(shifted, plain, strict=True):
        np.testing.assert_allclose(2 * half, whole, rtol=1e-5, atol=1e-6)


def test_values_near_the_greatest_float32_do_not_overflow(block, small_tiles):
    q, k, v, _ = random_block(31, 40, 2)
    v = 2.0**125 * abs(v)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def forward(q, k, v):
        state = block.forward(Pair(q, k[:, :17], v[:, :17], Visibility(), 0.4))
        rest = Pair(q, k[:, 17:], v[:, 17:], Visibility(), 0.4)
        return merge_partials(block.forward(rest, state))[0]

    expected, _ = oracle.attention(q, k, v, scale=0.4)
    assert relative_error(np.asarray(forward(q, k, v), np.float64), expected) < FLOAT32_ERROR


def test_wholly_masked_tiles_are_never_visited(small_tiles):
    """Not-a-number in a tile that is masked shows at once where the tile is read."""
    length, document = 44, 22
    mask, _ = masks(length)["causal"]
    ids = (jnp.arange(length) // document)[None].repeat(BATCH, 0).astype(jnp.int32)
    mask = Visibility(
        Causal(), query_runs=mask.query_runs, key_runs=mask.key_runs,
        query_segments=ids, key_segments=ids,
    )  # fmt: skip
    q, k, v, dout = random_block(length, length, HEADS)
    query, key = xla.tilings(mask, length, length, 1)
    visible = np.asarray(visible_tiles(mask, query, key))
    assert visible.shape == (2, 5)
    assert visible.sum() < visible.size
    # Keys that only masked tiles of the first query tile hold.
    poisoned = np.concatenate(
        [np.arange(key.fresh[j], key.starts[j] + key.size) for j in np.flatnonzero(~visible[0])]
    )
    k, v = (x.at[:, poisoned].set(np.nan) for x in (k, v))
    out, lse = merge_partials(xla.forward(Pair(q, k, v, mask, 1.0)))
    rows = slice(0, query.size)
    assert np.isfinite(out[:, rows]).all()
    assert np.isfinite(lse[:, :, rows]).all()
    zero = jnp.zeros_like(lse)
    dq, _, _ = xla.backward(Pair(q, k, v, mask, 1.0), zero, zero, dout)
    assert np.isfinite(dq[:, rows]).all()


@pytest.mark.parametrize("pass_", ["forward", "backward"])
@pytest.mark.parametrize(
    ("backend", "mask", "tile"),
    [
        (xla, "causal", xla.TILE_ROWS * xla.TILE_COLUMNS),
        # No kernels: of dense tiles.
        (tiled, "causal segments", 128**2),
    ],
)
def test_memory_is_a_tile_of_logits_and_not_the_square(backend, mask, tile, pass_, monkeypatch):
    monkeypatch.setattr(tiled, "COARSE", 512)
    monkeypatch.setattr(tiled, "FINE", 128)

    def temporary_bytes(length):
        seen, _ = masks(length)[mask]
        q, k, v, dout = (jax.ShapeDtypeStruct((2, length, 2, 16), jnp.float32) for _ in range(4))
        lse = jax.ShapeDtypeStruct((2, 2, length), jnp.float32)
        step = {
            "forward": lambda q, k, v, lse, dout: backend.forward(Pair(q, k, v, seen, 1.0)),
            "backward": lambda q, k, v, lse, dout: backend.backward(
                Pair(q, k, v, seen, 1.0), lse, lse, dout
            ),
        }[pass_]
        compiled = jax.jit(step).lower(q, k, v, lse, dout).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = temporary_bytes(2048), temporary_bytes(4096)
    tile_bytes, array = 4 * 2 * 2 * tile, 4 * 2 * 2048 * 2 * 16
    assert short < 8 * tile_bytes + 8 * array
    assert long <= 2.1 * short
