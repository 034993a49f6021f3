"""Masks of keys, padding ids and short keys in a call."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import startrail_jax as st
from attention_cases import (
    FLOAT32_ERROR,
    Case,
    Problem,
    draw_problem,
    make_attention,
    reference,
    relative_error,
)
from refusals import refused
from startrail_jax.errors import InputError, UnsupportedError

DEGREES = st.Degrees.startrail(8, c=2)


def attention(degrees=DEGREES, axis_type="auto", **options):
    return make_attention(degrees, axis_type, **options)


def problem(rng, lengths=(32, 32), ids=(None, None)):
    drawn = draw_problem(rng, batch=2, lengths=lengths, heads=(4, 2))
    return dataclasses.replace(drawn, query_ids=ids[0], key_ids=ids[1])


def attend(ours, drawn, **given):
    """Output and gradients."""
    out, vjp = jax.vjp(
        functools.partial(ours, **given), *map(jnp.asarray, (drawn.query, drawn.key, drawn.value))
    )
    return dict(zip(("out", "dq", "dk", "dv"), (out, *vjp(jnp.asarray(drawn.dout))), strict=True))


def in_order(layout, drawn):
    """The problem with the tokens of queries, and of keys of their number, in layout order."""
    length = drawn.query.shape[1]
    moved = {
        name: x if x is None or x.shape[1] != length else layout.permute(x)
        for name, x in vars(drawn).items()
    }
    return Problem(**moved)


def assert_exact(found, drawn, causal=False):
    drawn.dlse[...] = 0
    expected = reference(drawn, causal=causal)
    for name, x in found.items():
        assert relative_error(x, getattr(expected, name)) < FLOAT32_ERROR, name


@pytest.mark.parametrize("kind", [bool, np.float32])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.slow_except_every(8)
def test_mask_of_keys_is_exact(causal, packed, kind):
    rng = np.random.default_rng(0)
    valid = rng.random((2, 32)) < 0.6
    ids = np.sort(rng.integers(0, 3, (2, 32))).astype(np.int32) if packed else None
    of_queries = np.zeros((2, 32), np.int32) if ids is None else ids
    drawn = problem(rng, ids=(of_queries, np.where(valid, of_queries, -1)))
    ours = attention(causal=causal, layout="contiguous")
    mask = valid[:, None, None, :].astype(kind)
    for one in (mask, jnp.asarray(mask)):
        assert_exact(attend(ours, drawn, mask=one, segment_ids=ids), drawn, causal)
    traced = jax.jit(lambda mask: attend(ours, drawn, mask=mask, segment_ids=ids))
    assert_exact(traced(mask), drawn, causal)


@pytest.mark.slow
def test_mask_of_keys_for_all_rows_and_for_cross_attention():
    rng = np.random.default_rng(1)
    valid = np.arange(48) % 5 != 2
    ids = np.zeros((2, 32), np.int32), np.broadcast_to(np.where(valid, 0, -1), (2, 48))
    drawn = problem(rng, (32, 48), ids)
    assert_exact(attend(attention(causal=False), drawn, mask=valid[None, None, None]), drawn)
    pair = np.zeros((2, 32), np.int32), None
    found = attend(attention(causal=False), drawn, mask=valid[None, None, None], segment_ids=pair)
    assert_exact(found, drawn)


def test_mask_that_is_all_true_changes_nothing():
    drawn = problem(np.random.default_rng(2))
    ours = attention(layout="contiguous")
    lowered = [
        jax.jit(functools.partial(ours, mask=mask)).lower(drawn.query, drawn.key, drawn.value)
        for mask in (None, np.ones((2, 1, 1, 32), bool), np.ones((2, 4, 32, 32), "f4"))
    ]
    assert len({x.as_text() for x in lowered}) == 1


def test_dense_and_additive_masks_are_refused():
    drawn = problem(np.random.default_rng(3))
    x = drawn.query, drawn.key, drawn.value
    dense = np.tril(np.ones((2, 1, 32, 32), bool))
    with refused(UnsupportedError, "partial", "segment_ids"):
        attention(causal=False)(*x, mask=dense)
    with refused(UnsupportedError, "causal already"):
        attention(layout="contiguous")(*x, mask=dense)
    with refused(UnsupportedError, "Sequence-parallel attention serves a mask of keys"):
        attention(causal=False)(*x, mask=np.where(dense[:, :, :1], 0.0, -1e9))


def test_additive_mask_in_a_jit_hides_everything():
    """No value of it is known there. Read as Flax's 0 and 1, it would hide what it shows."""
    drawn = problem(np.random.default_rng(3))
    mask = np.where(np.arange(32) < 16, 0.0, -1e9).astype("f4")[None, None, None]
    ours = jax.jit(attention(causal=False))
    out = ours(drawn.query, drawn.key, drawn.value, mask=np.broadcast_to(mask, (2, 1, 1, 32)))
    assert not np.any(out)


def with_padding_id():
    """Ids of which 0 is padding, and a problem with the same ids as the oracle takes them."""
    rng = np.random.default_rng(4)
    ids = np.sort(rng.integers(0, 3, (2, 32))).astype(np.int32)
    marked = np.where(ids == 0, -1, ids)
    return ids, problem(rng, ids=(marked, marked))


@pytest.mark.parametrize(
    "ours",
    [
        attention(causal=False, padding_id=0, layout="zigzag"),
        functools.partial(attention(causal=False, layout="zigzag"), padding_id=0),
    ],
    ids=["of the attention", "of the call"],
)
@pytest.mark.slow_except_every(2)
def test_padding_id_marks_padding(ours):
    ids, drawn = with_padding_id()
    layout = st.Layout("zigzag", 8)
    moved = in_order(layout, drawn)
    found = attend(ours, moved, segment_ids=layout.permute(ids))
    assert_exact({name: layout.unpermute(np.asarray(x)) for name, x in found.items()}, drawn)


@pytest.mark.slow
def test_padding_id_marks_padding_in_a_shard_map_of_the_caller():
    ids, drawn = with_padding_id()
    ours = attention(padding_id=0, layout="contiguous")
    specs = (ours.query_spec(4), *(ours.key_spec(2),) * 2, ours.sequence_spec)

    @jax.jit
    @functools.partial(jax.shard_map, mesh=ours.mesh, in_specs=specs, out_specs=specs[0])
    def local(query, key, value, ids):
        return ours.local(query, key, value, ids, ids)[0]

    assert_exact(attend(lambda *x: local(*x, ids), drawn), drawn, causal=True)


@pytest.mark.parametrize("in_jit", [False, True])
@pytest.mark.slow
def test_mask_of_keys_comes_to_explicit_axes(in_jit):
    """From the host, from every device and in shards: the op makes segment ids of it."""
    rng = np.random.default_rng(9)
    ours = attention(axis_type="explicit", causal=False, layout="contiguous")
    put = lambda x, spec: jax.device_put(x, jax.NamedSharding(ours.mesh, spec))  # noqa: E731
    for keys in (32, 77):
        valid = rng.random((2, keys)) < 0.6
        ids = np.zeros((2, 32), np.int32), np.where(valid, 0, -1)
        drawn = problem(rng, (32, keys), ids)
        key_spec = ours.key_spec(2) if keys == 32 else jax.P()
        x = (
            put(drawn.query, ours.query_spec(4)),
            *(put(x, key_spec) for x in (drawn.key, drawn.value)),
        )
        mask = valid[:, None, None]
        masks = [mask, put(mask, jax.P())]
        if keys == 32:
            masks.append(put(mask, jax.P(None, None, None, ours.sequence_spec[1])))
        for one in masks:
            call = lambda *x, mask=one: ours(*x, mask=mask)  # noqa: E731
            assert_exact({"out": (jax.jit(call) if in_jit else call)(*x)}, drawn)


@pytest.mark.usefixtures("unchecked")
def test_mask_beside_segment_ids_of_other_tokens_is_refused():
    drawn = problem(np.random.default_rng(3), (32, 48))
    x, ours = (drawn.query, drawn.key, drawn.value), attention(causal=False)
    mask, ids = np.arange(48)[None, None, None] % 2, np.zeros((2, 32), np.int32)
    for wrong in (ids, (ids, ids), (ids, ids, ids)):
        with refused(InputError, "segment_ids"):
            ours(*x, mask=mask, segment_ids=wrong)
    with refused(InputError, "segment_ids"):
        ours(drawn.query, *(np.zeros((2, 77, 2, 7), "f4"),) * 2, segment_ids=(ids, ids, ids))
    expected = ours(*x, mask=mask.astype(bool))
    np.testing.assert_array_equal(ours(*x, mask=mask.tolist()), expected)


@pytest.mark.slow
def test_softcap_and_padding_id_of_a_call_agree_with_the_attention():
    drawn = problem(np.random.default_rng(5))
    x = drawn.query, drawn.key, drawn.value
    capped, plain = (attention(layout="contiguous", softcap=c) for c in (2.0, None))
    np.testing.assert_array_equal(plain(*x, softcap=2.0), capped(*x, softcap=2.0))
    assert relative_error(plain(*x), capped(*x)) > 1e-3
    with refused(InputError, softcap=3.0):
        capped(*x, softcap=3.0)
    with refused(InputError, softcap=-1.0):
        plain(*x, softcap=-1.0)
    with refused(InputError, padding_id=True):
        plain(*x, padding_id=True)


@pytest.mark.parametrize(
    "case",
    [
        Case(degrees=DEGREES, axis_type="auto", mask="full"),
        Case(degrees=DEGREES, axis_type="explicit", mask="full", layout="zigzag"),
        Case(degrees=st.Degrees(head=2, ring=4), axis_type="explicit", mask="full", one_axis=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.slow_except_every(6)
def test_keys_of_any_length_are_filled_up(case, packed):
    """As the 77 tokens of a text that an image attends to."""
    rng = np.random.default_rng(6)
    ids = tuple(rng.integers(-1, 2, (2, n)).astype(np.int32) for n in (32, 77))
    drawn = problem(rng, (32, 77), ids if packed else (None, None))
    ours, whole = case.attention, in_order(case.attention.layout, drawn)
    put = lambda x, spec: jax.device_put(x, jax.NamedSharding(ours.mesh, spec))  # noqa: E731
    given = {}
    if packed:
        given["segment_ids"] = (put(whole.query_ids, ours.sequence_spec), put(ids[1], jax.P()))
    query, dout = (put(x, ours.query_spec(4)) for x in (whole.query, whole.dout))
    keys = [put(x, jax.P()) for x in (whole.key, whole.value)]
    out, vjp = jax.vjp(functools.partial(ours, **given), query, *keys)
    dq, dk, dv = vjp(dout)
    back = ours.layout.unpermute
    found = {"out": back(np.asarray(out)), "dq": back(np.asarray(dq)), "dk": dk, "dv": dv}
    assert_exact(found, drawn)


def test_keys_with_a_bias_are_not_filled_up():
    drawn = problem(np.random.default_rng(7), (32, 77))
    x = drawn.query, drawn.key, drawn.value
    with refused(InputError, "key seq_len=77"):
        attention(causal=False)(*x, bias=np.zeros((1, 1, 32, 77), "f4"))
