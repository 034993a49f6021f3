"""Backends as values: kernels of one's own in every scheme, and sequences of backends."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
import pytest

import startrail_jax as st
from attention_cases import Case, check, make_attention
from examples.own_kernel import Dense
from refusals import refused
from startrail_jax.errors import InputError, UnsupportedError

CASES = [
    Case(degrees=st.Degrees.startrail(8, c=2), backend=Dense()),
    Case(degrees=st.Degrees(ring=5), mask="packed", heads="grouped", backward="query"),
    Case(degrees=st.Degrees(head=2, group=3), mask="cross", heads="grouped"),
    Case(degrees=st.Degrees(team=2, ring=2), mask="packed_window", backward="kv"),
    Case(degrees=st.Degrees(ring=4), mask="sinks", exchange="sparse", tokens=14),
    Case(degrees=st.Degrees(ring=2, team=2), mask="padding_full", head_chunks=2),
    Case(degrees=st.Degrees(group=2, team=2), mask="cross_full", axis_type="auto"),
    Case(degrees=st.Degrees(ring=4), inner=2),
    Case(degrees=st.Degrees(ring=2), dtype="bfloat16", tokens=14),
]


@pytest.mark.slow_except_every(8)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_own_kernel_is_exact_in_every_scheme(case):
    check(dataclasses.replace(case, backend=Dense()))


def attention(backend, **options):
    return make_attention(st.Degrees(ring=2), backend=backend, layout="contiguous", **options)


SIZES = {"seq_len": 512, "heads": 4, "head_dim": 64}


def test_the_first_of_a_sequence_that_serves_is_taken():
    ours = attention(["cudnn", Dense(), "auto"], causal=False)
    assert ours.backend == ("cudnn", Dense(), "auto")
    found = ours.explain(**SIZES)
    assert (found.backend, list(found.refusals)) == ("Dense", ["cudnn"])
    assert "a kernel of your own" in str(found)
    assert ours.explain(**SIZES, platform="cuda", capability=(9, 0)).backend == "cudnn"
    capped = dataclasses.replace(ours, softcap=2.0).explain(**SIZES)
    assert (capped.backend, capped.refusals["Dense"]) == ("xla", "it knows no caps and no scores")


def test_sequence_of_backends_computes_as_the_one_that_serves():
    x = [np.random.default_rng(0).standard_normal((1, 16, 2, 8), np.float32)] * 3
    found = np.asarray(attention(("cudnn", Dense()))(*x))
    np.testing.assert_array_equal(found, np.asarray(attention(Dense())(*x)))
    found = np.asarray(attention(("tiled", "xla"))(*x))
    np.testing.assert_array_equal(found, np.asarray(attention("auto")(*x)))


def test_backends_that_do_not_serve_are_refused():
    x = [np.zeros((1, 16, 2, 8), np.float32)] * 3
    with refused(UnsupportedError, "it knows no caps", backend=Dense()):
        attention(Dense(), softcap=2.0)(*x)
    with refused(UnsupportedError, "cudnn: ", "Dense: "):
        attention(("cudnn", Dense()), softcap=2.0)(*x)


class Unhashable(Dense):
    __hash__ = None


@pytest.mark.parametrize("backend", ["triton", Dense, ("xla", "triton"), (), Unhashable()])
def test_what_is_no_backend_is_refused(backend):
    with refused(InputError, "backend"):
        attention(backend)


@dataclasses.dataclass(frozen=True)
class Wrong(Dense):
    """A kernel that does something to what it gives."""

    of_forward: Callable = lambda into, out, lse: (*into, (out, lse))
    of_backward: Callable = lambda dq, dk, dv: (dq, dk, dv)

    def forward(self, pair, into=()):
        *into, both = super().forward(pair, into)
        return self.of_forward(into, *both)

    def backward(self, *args, **options):
        return self.of_backward(*super().backward(*args, **options))


@pytest.mark.parametrize(
    "wrong",
    [
        {"of_forward": lambda into, out, lse: (*into, (out, lse.swapaxes(1, 2)))},
        {"of_forward": lambda into, out, lse: (*into, (out, lse.astype("bfloat16")))},
        {"of_forward": lambda into, out, lse: (out, lse)},
        {"of_forward": lambda into, out, lse: None},
        {"of_backward": lambda dq, dk, dv: (dq, dk)},
        {"of_backward": lambda dq, dk, dv: (dq, dk.repeat(2, 2), dv)},
        {"of_backward": lambda dq, dk, dv: (dq, dk, dv.astype("bfloat16"))},
    ],
)
def test_what_a_kernel_gives_is_held_to_its_contract(wrong):
    x = [np.ones((1, 16, heads, 8), np.float32) for heads in (4, 2, 2)]
    (name,) = wrong
    with refused(InputError, name.removeprefix("of_"), "Wrong"):
        jax.grad(lambda *x: attention(Wrong(**wrong))(*x).sum())(*x)
