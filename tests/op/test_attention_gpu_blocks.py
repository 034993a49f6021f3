"""The whole op on the GPU block backends, whose kernels are emulated: a covering design."""

import dataclasses
import functools
from itertools import cycle
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_attention_grid import SCHEMES, clash

import fake_cudnn
from attention_cases import (
    FLOAT32_ERROR,
    HEADS,
    Case,
    Problem,
    Result,
    assert_close,
    check,
    covering,
    forward_and_backward,
    listed,
    make_attention,
    natural,
    place,
    reference,
    relative_error,
)
from startrail_jax import Degrees
from startrail_jax.blocks import tiled
from startrail_jax.masks import BlockCausal

# Errors over those of one kernel call for the whole sequence. It rounds probabilities and results;
# we round parts and their sum, and of outputs also what a team sends. Small problems scatter.
KERNEL_ERROR_RATIO = {"out": 1.45, "dq": 1.4, "dk": 1.4, "dv": 1.4}
SMALL_ERROR_RATIO = dict.fromkeys(KERNEL_ERROR_RATIO, 1.8)

# Several coarse and fine tiles where there are 14 tokens a shard, with remainders.
SMALL_TILES = {"COARSE": 12, "FINE": 5}


def cases(schemes, **factors):
    """A covering design over `factors` and the choices that bear on the blocks."""
    settings = {scheme: cycle(values) for scheme, values in schemes.items()}
    design = covering(
        {"scheme": tuple(schemes), "heads": HEADS, "backward": ("query", "kv"), **factors}, clash
    )
    for seed, row in enumerate(design):
        yield Case(degrees=next(settings[row.pop("scheme")]), seed=seed, **row)


# Schemes that differ in the units that meet.
NAMES = ("ring", "startrail", "fewest_bytes", "no_ring", "uneven")
UNITS = {name: SCHEMES[name] for name in NAMES}
CUDNN = list(
    cases(
        UNITS,
        backend=("cudnn",),
        mask=("full", "causal", "cross_full"),
        layout=("contiguous", "zigzag"),
        tokens=(2, 14),
    )
)
# Causal windows, narrower and wider than a shard, and blocks. Keys go round the rings or are sent
# alone.
WINDOWS = [
    # Of a window as long as the sequence, all is seen.
    case
    if case.mask != "window" or case.seq_len > 17
    else dataclasses.replace(case, exchange="auto")
    for case in cases(
        UNITS,
        backend=("cudnn",),
        mask=("own_window", "wide window", "two keys", "own key", "window", "block_causal"),
        layout=("contiguous", "zigzag"),
        tokens=(6, 14),
        exchange=("rings", "sparse"),
    )
]
# `test_blocks_tiled.py` has every mask and layout. These are few, since their programs are long: a
# loop for every kind of tile, in every round. The rings are short, but for one that loops.
TILED = listed(
    [
        (Degrees.ring_attention(2), "window", "single", "contiguous", "kv", 14),
        (Degrees.ring_attention(5), "cross", "grouped", "zigzag", "query", 14),
        (Degrees.startrail(8, c=2), "packed_window", "grouped", "zigzag", "query", 14),
        (Degrees.startrail(8, c=2), "cross", "equal", "contiguous", "kv", 14),
        (Degrees(group=2, ring=2, team=3), "packed_window", "single", "contiguous", "kv", 14),
        (Degrees(group=3, ring=2, team=2), "window", "equal", "zigzag", "query", 14),
    ],
    backend="tiled",
)
NARROW = [
    Case(degrees=degrees, mask=mask, heads=heads, dtype=dtype, tokens=14, backend="cudnn")
    for degrees, mask, heads, dtype in (
        (Degrees.ring_attention(8), "causal", "grouped", "float16"),
        (Degrees.startrail(8, c=2), "causal", "equal", "bfloat16"),
        (Degrees(group=2, ring=2, team=3), "full", "grouped", "float16"),
        (Degrees(group=4, ring=2, team=2), "causal", "single", "bfloat16"),
        (Degrees(data=2, ring=2, head=2, tensor=2), "full", "single", "bfloat16"),
    )
]


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    fake_cudnn.install(monkeypatch)


@pytest.mark.slow_except_every(5)
@pytest.mark.parametrize("case", CUDNN, ids=str)
def test_attention_on_cudnn_matches_oracle(case):
    check(case)


@pytest.mark.slow_except_every(27)
@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_windows_on_cudnn_match_oracle(case):
    check(case)


@pytest.mark.slow_except_every(4)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("documents", [1, 3])
def test_documents_and_padding_of_blocks_match_plain_xla(documents, layout):
    """Kernels serve one document with padding behind it, and tiles serve several."""
    tokens = 4 * 14
    ids = np.repeat(np.arange(documents + 1), -(-tokens // (documents + 1)))[None, :tokens]
    ids = np.where(ids == documents, -1, ids).astype(np.int32)
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(1, tokens, 2, 16)).astype(np.float32) for _ in range(3)]
    found = []
    for backend in ("cudnn", "xla"):
        attention = make_attention(
            Degrees(ring=2, team=2), mask=BlockCausal(9), layout=layout, backend=backend
        )
        attend = functools.partial(attention, segment_ids=attention.shard(ids))
        out, pull = jax.vjp(jax.jit(attend), *attention.shard(*arrays))
        found.append([attention.unshard(x) for x in (out, *pull(out))])
    chex.assert_trees_all_close(*found, rtol=2e-6, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("case", NARROW, ids=str)
def test_attention_on_cudnn_serves_narrow_dtypes(case):
    check(case, bounds(case.problem, SMALL_ERROR_RATIO, case.mask_arguments["causal"]))


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize(
    "degrees", [Degrees.ring_attention(8), Degrees.startrail(8, c=2), Degrees(team=4, ring=2)]
)
def test_attention_on_cudnn_is_nearly_as_exact_as_one_kernel(degrees, mask):
    causal = mask == "causal"
    attention = make_attention(degrees, causal=causal, backend="cudnn")
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.normal(size=(1, 512, 2, 64)).astype(jnp.bfloat16) for _ in range(4))
    problem = Problem(q, k, v, dout, np.zeros((1, 2, 512), np.float32), None, None)
    result = forward_and_backward(attention, *place(attention, problem))
    expected = reference(problem, causal=causal)
    assert_close(natural(attention, result), expected, bounds(problem, KERNEL_ERROR_RATIO, causal))


def bounds(problem, ratios, causal):
    """`ratios` times the errors of the emulated kernel over the whole sequence."""
    q, k, v, dout = map(jnp.asarray, (problem.query, problem.key, problem.value, problem.dout))
    scale = q.shape[-1] ** -0.5
    out, lse = fake_cudnn.attend(q, k, v, scale, causal)
    own = Result(out, lse, *fake_cudnn.gradients(q, k, v, lse, out, dout, scale, causal))
    expected = reference(problem, causal=causal)
    allowed = {
        name: ratio * relative_error(getattr(own, name), getattr(expected, name))
        for name, ratio in ratios.items()
    }
    return allowed | {"lse": FLOAT32_ERROR}


@pytest.mark.slow
@pytest.mark.parametrize("case", TILED, ids=str)
def test_attention_on_tiles_matches_oracle(case):
    with mock.patch.multiple(tiled, **SMALL_TILES):
        check(case)


@pytest.mark.slow
def test_gradients_of_rows_that_see_no_key_are_not_read_by_tiles():
    case = Case(degrees=Degrees(team=2), mask="padding", backend="tiled", tokens=14)
    problem, padding = case.problem, case.problem.query_ids < 0
    dout = problem.dout.copy()
    dout[padding] = np.nan
    spoilt = dataclasses.replace(problem, dout=dout)
    with mock.patch.multiple(tiled, **SMALL_TILES):
        found, expected = (
            forward_and_backward(case.attention, *place(case.attention, x))
            for x in (spoilt, problem)
        )
    chex.assert_trees_all_equal(found, expected)
