"""Rows of trees on cuDNN's kernels, which are emulated: what they compute, and when."""

import collections
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from test_trees import LAYOUTS, SCHEMES, ends, ends_of, group

import fake_cudnn
import startrail_jax as st
from attention_cases import make_attention
from benchmarks.compiled.deviceless import gpu_topology
from gpu_compiler import needs_gpu_compiler
from startrail_jax.blocks import tiled, trees
from startrail_jax.testing import assert_exact

LOGITS = r'"intermediate_tensor_shape":\s*{[^}]*?"dimensions":\s*\[([^\]]*)\]'


@pytest.fixture
def calls(monkeypatch):
    """The calls of emulated kernels: (name, (queries, keys, causal or window))."""
    calls = []
    fake_cudnn.install(monkeypatch, calls)
    jax.clear_caches()
    yield calls
    jax.clear_caches()


@pytest.fixture
def short_levels(calls, monkeypatch):
    """Several short levels, and few rounds."""
    monkeypatch.setattr(trees, "ROUNDS", 8)
    fake_cudnn.short_levels(monkeypatch)


@pytest.fixture
def tiles(calls, monkeypatch):
    """The passes of tiles."""
    visits = []

    def counted(visit, *operands):
        jax.debug.callback(lambda: visits.append(visit.__name__))
        return visit(*operands)

    for visit in (tiled.forward, tiled.backward):
        monkeypatch.setattr(tiled, visit.__name__, functools.partial(counted, visit))
    return visits


@pytest.mark.slow_except_every(5)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_trees_are_exact_without_tiles(scheme, layout, short_levels, tiles):
    degrees = SCHEMES[scheme]
    attention = make_attention(degrees, causal=True, layout=layout, backend="cudnn")
    kv_heads = 8 if degrees.head == 8 else 4
    until = ends(list(SCHEMES).index(scheme), 2, 96)
    assert_exact(attention, seq_len=96, heads=8, kv_heads=kv_heads, visible_until=until)
    jax.effects_barrier()
    assert not tiles


def test_trees_are_exact_in_16_bits(short_levels, tiles):
    degrees = st.Degrees(ring=2)
    attention = make_attention(degrees, causal=True, layout="zigzag", backend="cudnn")
    until = ends(2, 2, 64)
    assert_exact(attention, seq_len=64, heads=4, kv_heads=2, dtype="bfloat16", visible_until=until)
    jax.effects_barrier()
    assert not tiles


def test_a_beginning_and_its_answers_are_two_kinds_of_calls(calls):
    """In a square: its documents, and what is behind the beginning to the beginning."""
    attention = make_attention(st.Degrees(), causal=True, backend="cudnn")
    assert_exact(attention, seq_len=64, heads=2, visible_until=group(20, [14, 10, 20])[None])
    jax.effects_barrier()
    forward = [call for call in calls if call == ("attend", (64, 64, True))]
    assert sorted(set(calls)) == [
        (name, (64, 64, causal)) for name in ("attend", "gradients") for causal in (False, True)
    ]
    assert len(calls) == 4 * len(forward)


def test_a_rectangle_is_one_call_where_no_answer_goes_on(calls):
    """On two devices in natural order, the second of which has whole answers: as causal attention
    has it, and one more for the answers on the first one."""
    attention = make_attention(st.Degrees(ring=2), causal=True, backend="cudnn")
    found = {}
    for name, answers in {"whole": [12, 20, 12], "going on": [13, 19, 12]}.items():
        calls.clear()
        assert_exact(attention, seq_len=64, heads=2, visible_until=group(20, answers)[None])
        jax.effects_barrier()
        shapes = [call for call in calls if call[0] == "attend"]
        found[name] = shapes.count(("attend", (32, 128, False)))
    assert found["whole"]
    assert found["going on"] == 2 * found["whole"]


def deep(levels, length):
    """A tree whose nodes have one token and two children, the first of which ends at once."""
    node, parent = [0], [-1]
    for level in range(levels):
        for _ in range(2):
            parent.append(2 * level)
            node.append(len(parent) - 1)
    node += [len(parent) - 1] * (length - len(node))
    return ends_of(np.array(node), np.array(parent))[None]


FOR_TILES = {
    "too many rounds": deep(24, 64),
    "padding between documents": np.r_[np.full(10, 10), [-1] * 4, np.full(50, 64)][None],
}


@pytest.mark.parametrize("name", FOR_TILES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_trees_are_left_to_tiles(name, layout, short_levels, tiles):
    attention = make_attention(st.Degrees(ring=2), causal=True, layout=layout, backend="cudnn")
    assert_exact(attention, seq_len=64, heads=2, visible_until=FOR_TILES[name])
    jax.effects_barrier()
    assert {"forward", "backward"} == set(tiles)


@pytest.mark.parametrize("seed", range(4))
def test_numbers_that_are_no_trees_are_left_to_tiles(seed, short_levels, tiles):
    """In a program they cannot be refused; each key is visible until where its number says."""
    attention = make_attention(st.Degrees(), causal=True, backend="cudnn")
    until = group(20, [14, 10, 20])[None]
    rng = np.random.default_rng(seed)
    place = int(rng.integers(24, 30))
    until[0, 20:place] = rng.integers(46, 62)
    q, k, v = (rng.normal(size=(1, 64, 2, 16)).astype(np.float32) for _ in range(3))
    out = jax.jit(lambda *x: attention(*x[:3], visible_until=x[3]))(q, k, v, jnp.asarray(until))
    place = np.arange(64)
    seen = (place <= place[:, None]) & (place[:, None] < until)
    p = np.where(seen, np.exp(np.einsum("btnh,bsnh->bnts", q, k) / 4), 0)
    wanted = np.einsum("bnts,bsnh->btnh", p / p.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(out, wanted, atol=1e-5)
    jax.effects_barrier()
    assert tiles


def test_gradients_of_padding_are_not_read(short_levels, tiles):
    attention = make_attention(st.Degrees(ring=2), causal=True, backend="cudnn")
    until = np.r_[group(20, [14, 10, 7]), [-1] * 13][None]
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(1, 64, 2, 16)).astype(np.float32) for _ in range(4)]
    for x in arrays:
        x[until < 0] = np.nan
    *qkv, weights = attention.shard(*arrays)
    attend = functools.partial(attention, visible_until=attention.shard(until))
    out, pull = jax.vjp(attend, *qkv)
    for x in (out, *pull(weights)):
        x = attention.unshard(x)
        assert np.isfinite(x).all()
        assert not x[until < 0].any()
    jax.effects_barrier()
    assert not tiles


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("ring", [1, 2])
def test_kernels_of_trees_compile_for_gpus(ring):
    """The calls of an H100: each level of a square twice, documents and what is behind a beginning;
    rectangles, which are halves of zigzag units, once."""
    mesh = st.make_mesh(st.Degrees(ring=ring), devices=gpu_topology("h100", ring).devices)
    attention = st.Attention(mesh, causal=True, layout="zigzag")

    def both(q, k, v, until, dout):
        attend = functools.partial(attention, visible_until=until)
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(dout)

    def shaped(heads):
        sharding = NamedSharding(mesh, attention.query_spec(heads))
        return jax.ShapeDtypeStruct((1, 2048 * ring, heads, 64), jnp.bfloat16, sharding=sharding)

    ids = NamedSharding(mesh, attention.sequence_spec)
    until = jax.ShapeDtypeStruct((1, 2048 * ring), jnp.int32, sharding=ids)
    arguments = shaped(8), shaped(2), shaped(2), until, shaped(8)
    traced = jax.jit(both, compiler_options=st.compiler_options(mesh)).trace(*arguments)
    text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
    found = collections.Counter()
    for line in text.splitlines():
        if '"PADDING' in line and (name := re.search(r"fmhaSoftmax(Backward)?", line)):
            _, _, rows, keys = json.loads(f"[{re.search(LOGITS, line)[1]}]")
            found[name[0], int(rows), int(keys), re.search(r"PADDING\w*", line)[0]] += 1
    kernels = "fmhaSoftmax", "fmhaSoftmaxBackward"
    squares = {
        (name, size, size, mask): 1
        for name in kernels for size in (2048, 512) for mask in ("PADDING", "PADDING_CAUSAL")
    }  # fmt: skip
    rectangles = {
        (name, *sides, "PADDING"): 1 for name in kernels for sides in ((1024, 2048), (2048, 1024))
    }
    assert found == squares | (rectangles if ring == 2 else {})
