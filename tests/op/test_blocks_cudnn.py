"""The cuDNN backend: custom calls that are jax's own, pieces of masks, limits."""

import functools
import json
import re
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as jax_cudnn
from jax.sharding import PartitionSpec as P

import fake_cudnn
import oracle
import startrail_jax as st
from attention_cases import make_attention
from startrail_jax import blocks
from startrail_jax.blocks import cudnn
from startrail_jax.blocks.base import Pair, Request
from startrail_jax.blocks.pieces import pieces_by_offset, pieces_of_window
from startrail_jax.blocks.softmax import merge_partials
from startrail_jax.blocks.visibility import Visibility
from startrail_jax.masks import BlockCausal, Causal, Full, Window
from startrail_jax.rings.schedule import ring_offsets, unit_cases
from startrail_jax.tokens.layout import Layout

BATCH, QUERIES, KEYS, HEADS, HEAD_DIM = 2, 48, 32, 6, 16
FLASH = blocks.BACKENDS["cudnn"]


def arguments(dtype, kv_heads, value_head_dim=HEAD_DIM):
    query, key = (BATCH, QUERIES, HEADS, HEAD_DIM), (BATCH, KEYS, kv_heads, HEAD_DIM)
    value, out = ((*shape[:3], value_head_dim) for shape in (key, query))
    shapes = {"q": query, "k": key, "v": value, "out": out, "dout": out}
    arrays = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    return arrays | {"lse": jax.ShapeDtypeStruct((BATCH, HEADS, QUERIES), jnp.float32)}


def custom_calls(step, *operands):
    """(target, backend_config, other attributes, types) of the cuDNN calls of a CUDA program."""
    text = jax.jit(step).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    call = r'custom_call @(__cudnn[\w$]+)\(.*?\) \{(.*?)backend_config = "(.*?)"(.*)\} : (.*)'
    # MLIR writes a quotation mark as \22.
    unescape = lambda text: re.sub(r"\\([0-9A-F]{2})", lambda x: chr(int(x[1], 16)), text)  # noqa: E731
    # Older jax writes an empty list that newer jax leaves out.
    idle = {"wait_on_operation_queues": []}
    return [
        (target, idle | json.loads(unescape(config)), (before, after), types)
        for target, before, config, after, types in re.findall(call, text)
    ]


@pytest.fixture
def jax_own(monkeypatch):
    """jax's private entry, without the GPU that it asks about."""
    monkeypatch.setattr(jax_cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(jax_cudnn, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(jax_cudnn, "is_cuda_compute_capability_equal", lambda capability: False)

    def both(mask, window=0, **lengths):
        attend = functools.partial(
            jax_cudnn.dot_product_attention, scale=0.3, mask_type=jax_cudnn.MaskType[mask],
            sliding_window_length=window or None, **lengths,
        )  # fmt: skip

        def step(q, k, v, dout):
            out, vjp = jax.vjp(attend, q, k, v)
            return out, vjp(dout)

        return step

    return both


def both_passes(attend, gradients, *told):
    def step(q, k, v, dout):
        out, lse = attend(q, k, v, 0.3, *told)
        return out, gradients(q, k, v, lse, out, dout, 0.3, *told)

    return step


def operands(dtype, kv_heads, window=0, value_head_dim=HEAD_DIM):
    """q, k, v and dout; a window needs as many keys as queries."""
    x = arguments(dtype, kv_heads, value_head_dim)
    key = jax.ShapeDtypeStruct((BATCH, QUERIES, kv_heads, HEAD_DIM), dtype)
    return (x["q"], key, key, x["dout"]) if window else (x["q"], x["k"], x["v"], x["dout"])


@pytest.mark.parametrize("value_head_dim", [16, 8, 24])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_custom_calls_are_those_that_jax_makes(jax_own, dtype, kv_heads, causal, value_head_dim):
    x = operands(dtype, kv_heads, value_head_dim=value_head_dim)
    found = custom_calls(both_passes(cudnn.attend, cudnn.gradients, causal), *x)
    assert [target for target, *_ in found] == [
        "__cudnn$fmhaSoftmax",
        "__cudnn$fmhaSoftmaxBackward",
    ]
    assert found == custom_calls(jax_own("CAUSAL" if causal else "NO_MASK"), *x)


@pytest.mark.parametrize("window", [1, 20, 512])
@pytest.mark.parametrize("kv_heads", [6, 2])
def test_custom_calls_with_a_window_are_those_that_jax_makes(jax_own, kv_heads, window):
    """Those of jax.nn.dot_product_attention(is_causal=True, local_window_size=(window - 1, 0))."""
    x = operands("bfloat16", kv_heads, window)
    found = custom_calls(both_passes(cudnn.attend, cudnn.gradients, True, window), *x)
    assert found == custom_calls(jax_own("CAUSAL", window), *x)
    assert [x[1]["cudnn_fmha_backend_config"]["sliding_window_length"] for x in found] == [
        window
    ] * 2


@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize(("causal", "window"), [(True, 0), (True, 20), (False, 0)])
def test_custom_calls_with_segments_are_those_that_jax_makes(jax_own, causal, window, starts):
    shape = (BATCH, 5) if starts else (BATCH,)
    lengths = jnp.full(shape, 3, jnp.int32)
    told = dict(q_seqlen=lengths, kv_seqlen=lengths)
    segments = cudnn.Segments(lengths.ravel(), lengths.ravel())
    if starts:
        begins, ends = 4 * jnp.arange(lengths.size), jnp.zeros((BATCH, 6), jnp.int32)
        told |= dict(q_offsets=ends, kv_offsets=ends)
        segments = segments._replace(query_starts=begins, key_starts=begins)
    x = operands("bfloat16", 2, window)
    ours = both_passes(cudnn._attend, cudnn._gradients, causal, window, segments)
    found = custom_calls(ours, *x)
    assert len(found) == 2
    assert found == custom_calls(
        jax_own("PADDING_CAUSAL" if causal else "PADDING", window, **told), *x
    )


def test_window_of_jax_nn_is_the_length_of_the_call(jax_own):
    """jax counts keys before the query, and the call one more, the query's own."""
    q = jax.ShapeDtypeStruct((1, 64, 2, 16), jnp.bfloat16)
    attend = lambda q, k, v: jax.nn.dot_product_attention(  # noqa: E731
        q, k, v, is_causal=True, local_window_size=(4, 0), scale=0.3, implementation="cudnn"
    )
    (theirs,) = custom_calls(attend, q, q, q)
    (ours,) = custom_calls(lambda q, k, v: cudnn.attend(q, k, v, 0.3, True, 5)[0], q, q, q)
    assert ours[1] == theirs[1]


@pytest.mark.parametrize("check_vma", [False, True])
def test_custom_calls_lower_inside_shard_map(check_vma):
    """Also where operands vary over different axes, as replicated key heads do."""
    mesh = st.make_mesh(st.Degrees(ring=2, tensor=2), axis_type="auto", devices=jax.devices()[:4])
    query, key = P(None, "ring", "tensor"), P(None, "ring")

    def attend(q, k):
        out, lse = cudnn.attend(q, k, k, 0.3, True)
        return out, cudnn.gradients(q, k, k, lse, out, q, 0.3, True)[0]

    step = jax.shard_map(
        attend, mesh=mesh, in_specs=(query, key), out_specs=(query, query), check_vma=check_vma
    )
    x = arguments("bfloat16", 1)
    assert len(custom_calls(step, x["q"], x["k"])) == 2


def counted(pieces, queries, keys):
    """How often pieces hold each pair of so many queries and keys."""
    seen = np.zeros((queries, keys), int)
    for start, stop, first, end in pieces.rectangles:
        seen[start:stop, first:end] += 1
    for i, j, size in pieces.squares:
        seen[i : i + size, j : j + size] += np.tri(size, dtype=int)
    for i, j, size in pieces.windows:
        band = np.tri(size, dtype=int) - np.tri(size, k=-pieces.window, dtype=int)
        seen[i : i + size, j : j + size] += band
    for i, j, size in pieces.edges:
        seen[i : i + size, j : j + size] += np.tri(size, dtype=int).T
    return seen


def check_pieces(visibility, pieces):
    """Pieces hold every pair once that the mask shows."""
    queries, keys = np.asarray(visibility.query_positions), np.asarray(visibility.key_positions)
    seen = visibility.mask.visible(queries[:, None], keys[None, :])
    np.testing.assert_array_equal(counted(pieces, len(queries), len(keys)), seen)


def test_pieces_of_a_window_hold_every_visible_pair_once():
    rng = np.random.default_rng(0)

    def drawn():
        """Runs of a unit, of which some follow each other without a gap."""
        lengths = rng.integers(1, 10, rng.integers(1, 4))
        gaps = rng.choice([0, 0, 1, 5, 12], len(lengths))
        index, position = np.cumsum(lengths) - lengths, np.cumsum(gaps + lengths) - lengths
        return tuple(zip(index.tolist(), position.tolist(), lengths.tolist(), strict=True))

    kinds = set()
    for _ in range(1500):
        queries, keys, window = drawn(), drawn(), int(rng.integers(1, 30))
        pieces = pieces_of_window(queries, keys, window)
        at, key_at = (
            np.concatenate([position + np.arange(n) for _, position, n in runs])
            for runs in (queries, keys)
        )
        behind = at[:, None] - key_at[None, :]
        np.testing.assert_array_equal(
            counted(pieces, len(at), len(key_at)), (behind >= 0) & (behind < window)
        )
        kinds |= {kind for kind in ("windows", "edges", "squares") if getattr(pieces, kind)}
    assert len(kinds) == 3


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
@pytest.mark.parametrize(
    "mask",
    [
        Causal(),
        *(Window(x - 1, 0) for x in (1, 2, 5, 8, 9, 21)),
        *map(BlockCausal, (2, 5, 8, 12, 27)),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("ring", "group", "team", "head"),
    [(2, 2, 2, 1), (1, 3, 4, 1), (3, 4, 2, 1), (2, 2, 3, 2), (4, 1, 3, 1), (4, 3, 1, 1)],
)
@pytest.mark.slow_except_every(5)
def test_pieces_of_every_device_and_round_hold_what_is_visible(kind, mask, ring, group, team, head):
    mesh = jax.sharding.AbstractMesh((ring, group, team, head), ("ring", "group", "team", "head"))
    schedule = st.Attention(mesh, mask=mask, layout=kind).schedule
    seq_len, found = 8 * schedule.layout.degree, set()
    for p, g, a, distance in np.ndindex(ring, group, team, ring):
        if distance and distance not in ring_offsets(schedule, seq_len):
            continue
        seen = schedule.visibility(seq_len, (p, g, a), keys_behind=distance)
        index, cases = seen.cases()
        pieces = cases[int(index)]
        check_pieces(seen, pieces)
        found.add(pieces)
        if isinstance(mask, Causal):
            # In other rounds than the first, two blocks meet: one rectangle, or none if contiguous.
            assert len(pieces.rectangles) <= (1 if distance else 4)
            assert len(pieces.squares) <= (0 if distance else 2)
            assert not distance or len(cases) <= 2
    # What a backend is told before it chooses.
    assert found == {*unit_cases(schedule, seq_len)}


@pytest.mark.parametrize(
    ("layout", "window", "calls"),
    [
        # The run of another device is one call, whose far end is padded to whole tiles.
        ("contiguous", 128, [(1024, 1024, 128), (128, 128, True)]),
        ("contiguous", 1000, [(1024, 1024, 1000), (1024, 1024, True)]),
        # Two slices are rows of a batch; two runs arrive.
        ("zigzag", 128, [(512, 512, 128), (1024, 1024, 128)] + 2 * [(128, 128, True)]),
    ],
)
def test_a_layer_with_a_window_is_few_calls(monkeypatch, layout, window, calls):
    monkeypatch.setattr(cudnn, "refusal", lambda request: None)
    options = dict(window=window, layout=layout, backend="cudnn", exchange="sparse")
    attention = make_attention(st.Degrees(ring=4), **options)
    x = jax.ShapeDtypeStruct((1, 4096, 2, 16), jnp.bfloat16)

    def step(q, k, v):
        out, vjp = jax.vjp(attention, q, k, v)
        return vjp(out)

    made = custom_calls(step, x, x, x)
    for kernel in ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"):
        configs = [x[1]["cudnn_fmha_backend_config"] for x in made if x[0] == kernel]
        found = [
            (
                *map(int, x["intermediate_tensor_shape"]["dimensions"][2:]),
                x["sliding_window_length"] or x["mask_type"] == "CAUSAL",
            )
            for x in configs
        ]
        assert sorted(found) == sorted(calls)


def test_equal_zigzag_units_meet_in_three_ways_of_one_call_each():
    layout = Layout("zigzag", 8)
    units = [layout.unit_positions(64, 2 * i, 2) for i in range(4)]
    offsets = tuple(b.starts[0] - a.starts[0] for a in units for b in units)
    _, cases = pieces_by_offset(units[0].shape, units[0].shape, offsets)
    earlier, same, later = cases
    assert earlier.rectangles == ((0, 16, 0, 8),)
    assert same.squares == ((0, 0, 16),)
    assert later.rectangles == ((8, 16, 0, 16),)
    assert not earlier.squares + same.rectangles + later.squares


@pytest.mark.parametrize(
    ("dtype", "bound"), [("bfloat16", 2.0**-9), ("float16", 2.0**-12), ("float32", 1e-6)]
)
@pytest.mark.parametrize("size", [1.0, 1e-2, 1e15, 1e-12])
def test_output_for_gives_delta(dtype, bound, size):
    if dtype == "float16" and not 1e-3 < size < 1e4:
        size = 30.0
    rng = np.random.default_rng(0)
    dout = jnp.asarray(size * rng.normal(size=(2, 64, 3, 32)), dtype).at[0, :5].set(0)
    delta = jnp.asarray(size * rng.normal(size=(2, 3, 64)), jnp.float32).at[:, :, 10:15].set(0)
    out, changed = cudnn.output_for(delta, dout)
    assert out.dtype == changed.dtype == dout.dtype
    found = np.einsum("btnh,btnh->bnt", *(np.asarray(x, np.float64) for x in (out, changed)))
    assert np.linalg.norm(found - delta) < bound * np.linalg.norm(delta)
    assert np.isfinite(found).all()
    # Only rows without a gradient of their own are touched, and hardly.
    np.testing.assert_array_equal(changed[:, 5:], dout[:, 5:])
    assert np.abs(np.asarray(changed - dout, np.float32)).max() < 1e-5 * size


def test_output_for_reaches_gradients_of_lse_alone(monkeypatch):
    """dout = 0: all that comes through is the cotangent of lse; dv must stay 0."""
    fake_cudnn.install(monkeypatch)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 24, 2, 8)), jnp.float32) for _ in range(3))
    dlse = jnp.asarray(rng.normal(size=(1, 2, 24)), jnp.float32)
    _, lse = merge_partials(FLASH.forward(Pair(q, k, v, Visibility(), 0.5)))
    grads = FLASH.backward(Pair(q, k, v, Visibility(), 0.5), lse, -dlse, jnp.zeros_like(q))
    expected = oracle.gradients(q, k, v, np.zeros(q.shape), dlse, scale=0.5)
    chex.assert_trees_all_close(tuple(grads), tuple(expected), rtol=1e-7, atol=1e-6)


@pytest.mark.parametrize("size", [1e-1, 1e-3])
def test_output_for_in_float16_keeps_small_gradients_of_lse(size):
    """A float16 has no room for a dout that is negligible at any scale: it must be the least."""
    rng = np.random.default_rng(0)
    delta = jnp.asarray(size * rng.normal(size=(1, 2, 64)), jnp.float32)
    dout = jnp.zeros((1, 64, 2, 64), jnp.float16)
    out, changed = cudnn.output_for(delta, dout)
    found = np.einsum("btnh,btnh->bnt", *(np.asarray(x, np.float64) for x in (out, changed)))
    assert np.linalg.norm(found - delta) < 2.0**-10 * np.linalg.norm(delta)
    assert np.abs(np.asarray(changed, np.float32)).max() <= max(2.0**-24, size * 2.0**-17)


@pytest.mark.parametrize("degrees", [st.Degrees.ring_attention(4), st.Degrees(team=2, ring=2)])
@pytest.mark.slow
def test_gpu_blocks_under_x64_and_strict_promotion(monkeypatch, degrees):
    fake_cudnn.install(monkeypatch)
    for backend, options in (
        ("cudnn", dict(causal=True, layout="contiguous")),
        ("cudnn", dict(mask=BlockCausal(4), layout="contiguous")),
        ("tiled", dict(window=5)),
    ):
        attention = make_attention(degrees, backend=backend, **options)
        x = jnp.ones((1, 16, 2, 8), jnp.bfloat16)

        def step(x, attention=attention):
            out, vjp = jax.vjp(attention, x, x, x)
            return vjp(out)

        for x64 in (False, True):
            with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
                assert {dx.dtype for dx in jax.eval_shape(step, x)} == {jnp.dtype("bfloat16")}


def test_vmap_calls_the_kernel_for_each():
    x = arguments("bfloat16", 6)
    stacked = [jax.ShapeDtypeStruct((3, *x[name].shape), x[name].dtype) for name in ("q", "k", "v")]
    attend = jax.vmap(lambda q, k, v: cudnn.attend(q, k, v, 0.3, False))
    assert len(custom_calls(attend, *stacked)) == 1


REQUEST = dict(
    platform="cuda", capability=(8, 0), dtype="bfloat16", head_dim=128, value_head_dim=128,
    mask=Causal(), packed=False, num_cases=3,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(platform="cpu"), "NVIDIA GPUs; got platform 'cpu'"),
        (dict(capability=(7, 5)), r"compute capability 8\.0; got 7\.5"),
        (dict(dtype="float32"), "bfloat16 and float16; got float32"),
        (dict(value_head_dim=64), r"one head_dim before .* 9\.0; got 128 and 64"),
        (dict(value_head_dim=192, capability=(9, 0), head_dim=260), "; got 260 and 192"),
        (dict(head_dim=100, value_head_dim=100), "multiple of 8 of at most 128 .*; got 100"),
        (dict(head_dim=136, value_head_dim=136), "multiple of 8 of at most 128 .*; got 136"),
        (
            dict(head_dim=264, value_head_dim=264, capability=(9, 0)),
            "multiple of 8 of at most 256 .*; got 264",
        ),
        (dict(mask=Window(4, 2)), r"causal windows; got mask=Window\(left=4, right=2\)"),
        (dict(packed=True), r"from compute capability 9\.0 on; got 8\.0 and segment_ids"),
        (dict(num_cases=129), "at most 128 sets .*; got 129"),
        (dict(mask=BlockCausal(4), num_cases=0), "at most 64 blocks of queries"),
    ],
)
def test_limits_are_named_and_auto_goes_on(changed, message):
    request = Request(**REQUEST | changed)
    with pytest.raises(
        NotImplementedError, match=f"backend='cudnn' does not serve this: .*{message}"
    ):
        blocks.choose("cudnn", request)
    choice = blocks.choose("auto", request)
    cuda = request.platform == "cuda" and request.capability >= (8, 0)
    assert choice.backend == ("tiled" if cuda else "xla")


@pytest.mark.parametrize(
    "changed",
    [
        {},
        dict(mask=Full(), num_cases=1),
        dict(mask=Window(4, 0)),
        dict(head_dim=256, value_head_dim=256, capability=(9, 0)),
        dict(head_dim=192, capability=(9, 0)),
    ],
)
def test_auto_takes_cudnn_where_it_serves(changed):
    assert blocks.choose("auto", Request(**REQUEST | changed)) == blocks.Choice(FLASH, {})


def test_abstract_mesh_is_of_the_devices_that_jax_has(monkeypatch):
    mesh = st.make_mesh(st.Degrees(ring=2), devices=jax.devices()[:2]).abstract_mesh
    assert st.Attention(mesh, causal=True).schedule.platform == "cpu"
    card = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100", compute_capability="9.0")
    monkeypatch.setattr(jax, "devices", lambda: [card])
    schedule = st.Attention(mesh, causal=True).schedule
    assert (schedule.platform, schedule.capability) == ("cuda", (9, 0))
