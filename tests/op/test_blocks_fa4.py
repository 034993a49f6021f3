"""FlashAttention-4's kernels, which are emulated: what the op makes of them."""

import importlib.util

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_blocks_packed import emulated, spoilt_tiles  # noqa: F401 - fixtures

import fake_fa4
from attention_cases import Case, check, listed, make_attention
from startrail_jax import Degrees, blocks
from startrail_jax.blocks.base import Request
from startrail_jax.masks import Causal, Full, Window

CASES = listed(
    [
        (Degrees(), "causal", "grouped", "contiguous", "auto", 61),
        (Degrees.ring_attention(4), "full", "single", "contiguous", "query", 14),
        (Degrees.startrail(8, c=2), "causal", "grouped", "zigzag", "query", 6),
        (Degrees(group=2, ring=2, team=3), "cross_full", "equal", "contiguous", "kv", 14),
        (Degrees.ring_attention(3), "own_window", "grouped", "zigzag", "kv", 14),
        (Degrees(), "window", "single", "contiguous", "auto", 48),
        (Degrees(), "packed", "grouped", "contiguous", "auto", 61),
        (Degrees(data=2, head=2), "packed_window", "equal", "contiguous", "auto", 29),
        (Degrees.ring_attention(4), "packed", "single", "zigzag", "kv", 14),
        (Degrees.ring_attention(3), "packed_window", "equal", "zigzag", "query", 14),
        (Degrees(team=4, ring=2), "packed own_window", "grouped", "zigzag", "kv", 6),
    ],
    backend="fa4",
)


@pytest.mark.slow_except_every(3)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_on_fa4_matches_the_oracle(case, spoilt_tiles, monkeypatch):  # noqa: F811
    fake_fa4.install(monkeypatch)
    check(case)


def test_documents_of_all_lengths_are_one_call(monkeypatch):
    fake_fa4.install(monkeypatch)
    passes = []
    for name in ("fwd_lse", "vjp"):
        real = getattr(fake_fa4, name)

        def counted(*given, real=real, name=name):
            passes.append(name)
            return real(*given)

        monkeypatch.setattr(fake_fa4, name, counted)
    case = Case(degrees=Degrees(), mask="packed", backend="fa4", tokens=4096)
    shapes = jax.eval_shape(lambda: [case.problem.query, case.problem.key, case.problem.value])
    attend = lambda q, k, v: case.attention(q, k, v, segment_ids=case.problem.segment_ids).sum()  # noqa: E731
    jax.eval_shape(jax.grad(attend), *shapes)
    assert passes == ["fwd_lse", "vjp"]


REQUEST = dict(
    platform="cuda", capability=(9, 0), dtype="bfloat16", head_dim=128, value_head_dim=128,
    mask=Causal(), packed=False, num_cases=3,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(platform="cpu"), "NVIDIA GPUs; got platform 'cpu'"),
        (dict(capability=(8, 0)), r"compute capability 9\.0 on; got 8\.0"),
        (dict(dtype="float32"), "bfloat16 and float16; got float32"),
        (dict(head_dim=136), "multiple of 8 of at most 128; got 136 and 128"),
        (dict(softcap=3.0), r"softcap=3\.0"),
        (dict(mask=Window(4, 0)), r"have run on no GPU yet; got mask=Window\(left=4, right=0\)"),
        (dict(mask=Window(4, 2)), r"causal windows; got mask=Window\(left=4, right=2\)"),
        (dict(mask=Full(), packed=True), r"documents under causal masks .* mask=Full\(\)"),
    ],
)
def test_limits_are_named(changed, message, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(NotImplementedError, match=f"'fa4' does not serve this: .*{message}"):
        blocks.choose("fa4", Request(**REQUEST | changed))
    assert blocks.choose("fa4", Request(**REQUEST)).backend == "fa4"


def test_the_package_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotImplementedError, match=r"pip install '\.\[fa4\]'"):
        blocks.choose("fa4", Request(**REQUEST))
    assert blocks.choose(("fa4", "auto"), Request(**REQUEST)).backend == "cudnn"


def test_explain_says_what_each_kernel_is(monkeypatch):
    fake_fa4.install(monkeypatch)
    attention = make_attention(Degrees(ring=2), layout="zigzag", backend=("fa4", "auto"))
    sizes = dict(seq_len=4096, heads=8, kv_heads=2, head_dim=128, dtype="bfloat16")
    found = attention.explain(**sizes, packed=True, platform="cuda", capability=(9, 0))
    assert found.backend == "fa4"
    assert found.cases
    assert "FlashAttention-4" in str(found)
    assert "cut to packed documents" in str(found)


@pytest.mark.parametrize("window", [(None, None), (4, 0), (0, None)])
@pytest.mark.parametrize("varlen", [False, True])
def test_emulation_is_the_reference_of_the_package(varlen, window):
    """The package has its own in plain JAX, which needs no GPU."""
    if importlib.util.find_spec("fa4_jax") is None:
        pytest.skip("needs fa4-jax")
    from fa4_jax.attention import AttnConfig, get_backend

    rng = np.random.default_rng(0)
    b, t, n, kv, h = 2, 24, 4, 2, 8
    q, k, v, dout = (
        jnp.asarray(rng.normal(size=(b, t, heads, h)), jnp.float32) for heads in (n, kv, kv, n)
    )
    local = window != (None, None)
    config = AttnConfig(not local, local, window, 0.3, None, "reference", varlen)
    told = None
    if varlen:
        q, k, v, dout = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v, dout))
        starts = jnp.asarray([0, 0, 5, 30, 2 * t], jnp.int32)
        told = starts, starts, jnp.asarray([0, 5, 20, 11]), jnp.asarray([0, 5, 17, 11])
    library = get_backend("reference")
    ours, theirs = ([*x.fwd_lse(config, q, k, v, (), told)] for x in (fake_fa4, library))
    out, lse = (jnp.nan_to_num(x, neginf=0.0) for x in ours)
    for x, given in ((fake_fa4, ours), (library, theirs)):
        given += x.vjp(config, q, k, v, out, lse, dout, None, (), told)
    for own, their in zip(ours, theirs, strict=True):
        there = ~jnp.isnan(own)
        chex.assert_trees_all_close(own[there], their[there], rtol=2e-6, atol=2e-6)
