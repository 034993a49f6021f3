"""What `Attention.explain` says is what runs, and why."""

import jax
import numpy as np
import pytest

import startrail_jax as st
from attention_cases import make_attention
from refusals import refused
from startrail_jax.blocks.pieces import Pieces
from startrail_jax.blocks.visibility import Visibility
from startrail_jax.errors import BalanceWarning, InputError, UnsupportedError
from startrail_jax.masks import Causal, Window
from startrail_jax.rings.work import shares

SIZES = dict(seq_len=4096, heads=8, head_dim=64)
HOPPER = dict(platform="cuda", capability=(9, 0))


def attention(degrees, **options):
    return make_attention(degrees, **{"layout": "zigzag", **options})


@pytest.mark.slow
def test_a_ring_on_cuda_is_one_call_of_cudnn_a_round():
    explanation = attention(st.Degrees.ring_attention(8)).explain(kv_heads=2, **SIZES, **HOPPER)
    assert explanation.backend == "cudnn"
    assert explanation.refusals == {}
    assert explanation.cases == (
        Pieces(rectangles=((0, 512, 0, 256),), squares=()),
        Pieces(rectangles=(), squares=((0, 0, 512),)),
        Pieces(rectangles=((256, 512, 0, 512),), squares=()),
    )
    assert (explanation.rounds, explanation.travels) == (8, "kv")
    assert "a round may be: 512 x 512 causal" in str(explanation)
    double = attention(st.Degrees.ring_attention(8), inner=4)
    assert "8 ring rounds (inner cycles of 4) of 512" in str(double.explain(**SIZES, **HOPPER))


@pytest.mark.slow
def test_a_window_on_cuda_is_calls_of_cudnn_which_are_named():
    explanation = attention(st.Degrees(ring=4), window=100).explain(**SIZES, **HOPPER)
    assert (explanation.backend, explanation.refusals) == ("cudnn", {})
    apart, joined = ((0, 0, 512), (512, 512, 512)), ((0, 0, 1024),)
    assert {x.windows for x in explanation.cases} == {apart, joined}
    assert [{x.edges for x in run} for run in explanation.arrived] == [
        {(), ((512, 0, 99),)},
        {(), ((0, 0, 99),)},
    ]
    assert "own keys may be: 1024 x 1024 causal with a window of 100" in str(explanation)
    assert "run 1 of keys may be: " in str(explanation)
    assert "99 x 99 causal in reverse" in str(explanation)
    rings = attention(st.Degrees(ring=4), window=100, exchange="rings")
    assert "a round may be: 1024 x 1024 causal with a window" in str(
        rings.explain(**SIZES, **HOPPER)
    )


def test_the_mesh_is_the_default_and_every_better_backend_says_why_not():
    explanation = attention(st.Degrees(team=2, ring=2)).explain(**SIZES)
    assert explanation.backend == "xla"
    assert list(explanation.refusals) == ["cudnn", "tiled"]
    assert "not 'cudnn': it needs NVIDIA GPUs; got platform 'cpu'" in str(explanation)


def test_documents_on_hopper_are_calls_of_cudnn_and_on_ampere_tiles():
    packed = attention(st.Degrees(ring=4))
    explanation = packed.explain(**SIZES, packed=True, **HOPPER)
    assert (explanation.backend, explanation.packed) == ("cudnn", True)
    assert "each call is cut to packed documents" in str(explanation)
    assert "cut to packed documents" not in str(packed.explain(**SIZES, **HOPPER))
    ampere = packed.explain(**SIZES, packed=True, platform="cuda", capability=(8, 0))
    assert ampere.backend == "tiled"
    assert "from compute capability 9.0 on" in ampere.refusals["cudnn"]


@pytest.mark.parametrize(
    ("options", "sizes", "refusal", "dense"),
    [
        (dict(mask=st.masks.Window(99, 5), causal=None), {}, "mask=Window(left=99, right=5)", None),
        ({}, dict(dtype="float32"), "got float32", "got float32"),
        (dict(window=100), dict(head_dim=264, packed=True), "at most 256", "at most 128"),
        (dict(softcap=50.0), {}, "softcap=50.0", "softcap=50.0"),
    ],
)
@pytest.mark.slow_except_every(3)
def test_other_requests_go_to_tiles_which_say_where_they_are_dense(options, sizes, refusal, dense):
    explanation = attention(st.Degrees(ring=4), **options).explain(**SIZES | sizes, **HOPPER)
    assert explanation.backend == "tiled"
    assert refusal in explanation.refusals["cudnn"]
    assert (explanation.dense is None) if dense is None else (dense in explanation.dense)


@pytest.mark.parametrize(
    ("options", "sizes", "kernels"),
    [
        # Tiles of 256 tokens, the runs of zigzag order: 16 on the diagonal, 120 below it.
        (dict(backend="tiled"), dict(packed=True), (120, 16 / 2, 0)),
        # A length that is not known yet: all else may be visible.
        (dict(mask=st.masks.Prefix()), {}, (120, 0, 136)),
        # Of 512 tokens: 8 on the diagonal, and those that the end of the window cuts, which are
        # causal too if it goes from corner to corner.
        (dict(window=600, layout="contiguous", backend="tiled"), {}, (0, 8 / 2, 7 + 6)),
        (dict(window=512, layout="contiguous", backend="tiled"), {}, (0, 1, 0)),
        (dict(causal=False), dict(scores=("slopes", "bias")), (0, 0, 1)),
    ],
)
@pytest.mark.slow_except_every(6)
def test_what_each_kernel_does_is_counted_in_tiles(options, sizes, kernels):
    explanation = attention(st.Degrees(ring=8), **options).explain(**SIZES | sizes, **HOPPER)
    assert explanation.backend == "tiled"
    found = [explanation.kernels[name] for name in ("full", "causal", "dense")]
    np.testing.assert_allclose(found, np.divide(kernels, sum(kernels)))
    assert f"{found[2]:.0%} dense" in str(explanation)


def test_scores_are_no_work_for_cudnn():
    plain = attention(st.Degrees(ring=2))
    explanation = plain.explain(**SIZES, **HOPPER, scores=("dropout", "bias"))
    assert explanation.travels == "kv"
    assert "dropout, bias" in explanation.refusals["cudnn"]
    assert "dropout, bias" in explanation.dense
    with refused(InputError, "'alibi'"):
        plain.explain(**SIZES, scores=("alibi",))


def test_a_window_that_hides_nothing_is_no_window():
    wide = attention(st.Degrees(ring=4), window=4096)
    assert wide.explain(**SIZES, **HOPPER).backend == "cudnn"
    assert wide.num_rounds(4096) == 4
    mask = wide.schedule.visibility(4096, (0, 0, 0))
    assert isinstance(mask, Visibility)
    assert mask.mask == Causal()
    assert wide.schedule.visibility(8192, (0, 0, 0)).mask == Window(4095, 0)


@pytest.mark.slow
def test_a_layout_that_balances_badly_is_named():
    plain = attention(st.Degrees(ring=4), layout="contiguous")
    with pytest.warns(BalanceWarning, match=r"busiest device has 1\.75 times .*layout='zigzag'"):
        explanation = plain.explain(**SIZES)
    assert explanation.advice in str(explanation)
    np.testing.assert_allclose(shares(plain.schedule, 4096).ravel(), [0.25, 0.75, 1.25, 1.75])

    chunked = dict(mask=st.masks.Chunked(512) & st.masks.Causal())
    for options in ({}, dict(causal=False), dict(window=100), chunked):
        explanation = attention(st.Degrees(ring=4), **options).explain(**SIZES)
        assert explanation.advice is None
        assert explanation.busiest == pytest.approx(1, abs=0.05)


def test_a_mask_is_named_with_its_rounds():
    mask = st.masks.Window(512, 512)
    window = attention(st.Degrees(ring=8), layout="contiguous", mask=mask)
    explanation = window.explain(**SIZES)
    assert explanation.rounds == 3
    assert "mask Window(left=512, right=512): the busiest device has 1." in str(explanation)


def test_an_abstract_mesh_may_be_asked_for_other_devices():
    mesh = jax.sharding.AbstractMesh((2,), ("ring",))
    abstract = st.Attention(mesh, layout="zigzag", causal=True)
    assert abstract.explain(**SIZES).backend == "xla"
    assert abstract.explain(**SIZES, **HOPPER).backend == "cudnn"


def test_keys_of_another_length():
    explanation = attention(st.Degrees(team=2, group=2), causal=False).explain(
        kv_seq_len=8192, **SIZES, **HOPPER
    )
    assert (explanation.query_tokens, explanation.key_tokens) == (2048, 4096)
    assert explanation.cases[0].rectangles == ((0, 2048, 0, 4096),)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        (
            dict(platform="amd"),
            "'cuda'",
        ),
        (dict(seq_len=4097), "seq_len"),
        (dict(kv_seq_len=8192), "attention needs queries and keys of one"),
        (dict(kv_heads=3), "kv_heads"),
        (dict(kv_heads=0), "kv_heads=0"),
    ],
)
def test_what_does_not_fit_raises(sizes, named):
    with refused(InputError, named):
        attention(st.Degrees(ring=2)).explain(**SIZES | sizes)


def test_a_backend_that_is_named_and_does_not_serve_raises():
    named = attention(st.Degrees(ring=2), backend="cudnn")
    with refused(UnsupportedError, backend="cudnn"):
        named.explain(dtype="float32", **SIZES, **HOPPER)


def test_gpus_are_those_of_nvidia():
    gpu, cuda = (
        attention(st.Degrees(ring=2)).explain(**SIZES, platform=x) for x in ("gpu", "cuda")
    )
    assert gpu == cuda
