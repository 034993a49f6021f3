"""Scores (caps, sinks, slopes, biases, dropout) and prefixes, on every kind of scheme."""

import dataclasses
import functools
from itertools import cycle
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fake_cudnn
import oracle
import startrail_jax as st
from attention_cases import (
    FLOAT32_ERROR,
    HEADS,
    Case,
    covering,
    draw_problem,
    place,
    relative_error,
)
from score_cases import OF_ROWS, RATE, SOFTCAP, ScoreCase, check, of_oracle, put_learnt
from startrail_jax.blocks import tiled, xla
from startrail_jax.blocks.scores import Dropout
from startrail_jax.tokens.layout import KINDS

# Scheme -> its settings, of which the covering design treats those of one scheme as one value and
# takes them in turn; so it does with masks. Rings are short, as rounds make programs long, but for
# one that is a loop in its program.
D = st.Degrees
SCHEMES = {
    "ring": [D(ring=2), D(ring=3), D(ring=5)],
    "no_ring": [D(team=2, group=2), D(team=3), D(team=2, group=4), D(group=2)],
    "startrail": [D(group=2, ring=2, team=2), D(team=2, ring=2), D(group=2, ring=2)],
    "with_head": [D(head=2, ring=2), D(head=3), D(group=2, team=2, head=2), D(head=2, team=2)],
    "data_tensor": [D(data=2, ring=2, tensor=2), D(data=2, team=2), D(ring=2, tensor=2, head=2)],
    # On emulated kernels.
    "tiled": [D(ring=2), D(team=2), D(group=2, team=2), D(head=2)],
}
KINDS_OF_MASKS = {
    "full": ("full",),
    "cross": ("cross",),
    "causal": ("causal",),
    "window": ("window", "two_sided", "right_only", "own_window", "left_only"),
    "blocks": ("chunked", "block_causal", "causal_chunked", "bounded_rule", "even_keys"),
    "prefix": ("prefix", "sinks", "prefix_or_window", "sinks_only"),
    "prefix of rows": tuple(OF_ROWS),
}


def clash(pair):
    """Pairs of choices that are refused: what the messages say is in test_attention_errors.py."""
    rows_travel = pair.get("bias") and pair.get("backward") == "query"
    no_distance = pair.get("mask") == "cross" and pair.get("slopes")
    own_ids = pair.get("mask") == "cross" and pair.get("segments", "documents") != "documents"
    return rows_travel or no_distance or own_ids


def cases():
    """A covering design: every two choices meet in some row, and so do any two scores."""
    settings = {scheme: cycle(values) for scheme, values in SCHEMES.items()}
    masks = {kind: cycle(names) for kind, names in KINDS_OF_MASKS.items()}
    # What scores hardly depend on: in turn, with periods that no factor has.
    others = zip(cycle((False, True)), cycle((False, True, False)), strict=False)
    chunks, once = {scheme: cycle((1, 2)) for scheme in ("no_ring", "with_head")}, cycle((1,))
    design = covering(
        {
            "scheme": tuple(SCHEMES),
            "mask": tuple(KINDS_OF_MASKS),
            "segments": (None, "documents", "padding"),
            "heads": HEADS,
            "layout": (*KINDS, None),
            "backward": ("query", "kv"),
            "dtype": ("float32", "bfloat16"),
            "axis_type": ("explicit", "auto"),
            "softcap": (False, True),
            "sinks": (False, True),
            "slopes": (False, True),
            "bias": (None, (True, True), (True, False), (False, True), (False, False)),
            "dropout": (None, False, True),
        },
        clash,
    )
    for seed, (row, (published, keep)) in enumerate(zip(design, others, strict=False)):
        scheme, mask = row.pop("scheme"), next(masks[row.pop("mask")])
        names = ("softcap", "sinks", "slopes", "bias", "dropout")
        given = {name: row.pop(name) for name in names}
        if mask in OF_ROWS:
            given["of_rows"], mask = mask, "causal"
        if mask == "cross":
            row["segments"] = None
        degrees = next(settings[scheme])
        case = Case(
            degrees=degrees,
            mask=mask,
            backend="tiled" if scheme == "tiled" else "auto",
            # Of bfloat16, long enough for rounding to average out.
            tokens=6 if row["dtype"] == "float32" else 14,
            head_chunks=1 if row["heads"] == "single" else next(chunks.get(scheme, once)),
            published=published and degrees.team == degrees.group,
            keep_gathered=keep,
            seed=seed,
            **row,
        )
        yield ScoreCase(case=case, **given)


CASES = list(cases())


@pytest.mark.slow_except_every(45)
@pytest.mark.parametrize("scored", CASES, ids=str)
def test_scores_match_the_oracle(scored, monkeypatch):
    """Results, all gradients, the same bits again, and the shardings of what went in."""
    if scored.case.backend == "tiled":
        fake_cudnn.install(monkeypatch)
    with mock.patch.multiple(tiled, COARSE=8, FINE=4), mock.patch.multiple(xla, TILE_COLUMNS=5):
        check(scored)


@pytest.mark.slow
def test_local_takes_what_a_call_takes():
    """Inside a shard_map of the caller: slopes and sinks of a device's own heads, and the rest."""
    case = Case(degrees=D(data=2, ring=2, tensor=2), heads="grouped", layout="contiguous")
    given = dict(sinks=True, slopes=True, bias=(True, True), dropout=False, of_rows="prefixes")
    scored = ScoreCase(case=dataclasses.replace(case, axis_type="auto"), **given)
    attention, problem = scored.attention, case.problem
    per_head, rows = P("tensor"), P(attention.sequence_spec[0])
    of_learnt = dict(
        sinks=per_head, slopes=per_head, bias=attention.bias_spec(*problem.dlse.shape[:2])
    )

    def local(query, key, value, learnt, lengths):
        dropout = dict(dropout_rng=scored.rng, dropout_rate=RATE)
        return attention.local(query, key, value, **learnt, prefix_lengths=lengths, **dropout)

    specs = (attention.query_spec(case.num_heads[0]), *(attention.key_spec(case.num_heads[1]),) * 2)
    attend = jax.shard_map(
        local,
        mesh=attention.mesh,
        in_specs=(*specs, of_learnt, rows),
        out_specs=(specs[0], attention.lse_spec),
    )
    learnt = put_learnt(attention, scored.learnt)
    arguments = place(attention, problem)[:3]
    out, lse = jax.jit(attend)(*arguments, learnt, scored.prefix_lengths)
    wanted, _ = of_oracle(problem, scored.learnt, **scored.told)
    for axis, found, expected in ((1, out, wanted.out), (2, lse, wanted.lse)):
        found = attention.layout.unpermute(np.asarray(found), axis=axis)
        assert relative_error(found, expected) <= FLOAT32_ERROR


def test_dropout_is_the_same_everywhere_and_of_the_rate_that_is_asked_for():
    """Each entry is a hash of its own: of parts of the batch, the heads and the positions too."""
    entries, words = (4, 8, 125, 250), jax.random.bits(jax.random.key(7), (2,), jnp.uint32)
    dropout = Dropout(words=words, first_row=0, first_head=0, rate=0.1, shared=False)
    keeps = jax.jit(Dropout.keeps, static_argnums=(1, 2))
    query, key = jnp.arange(entries[2]), jnp.arange(entries[3])
    kept = np.asarray(keeps(dropout, *entries[:2], query, key))
    assert kept.shape == entries
    assert abs(kept.mean() - 0.9) <= 4 * (0.1 * 0.9 / kept.size) ** 0.5
    # Neighbours in no direction know of each other: 4 sigma of a product of two that are apart.
    for axis in range(4):
        ahead, behind = np.split(np.moveaxis(kept - 0.9, axis, 0), [1])[1], kept - 0.9
        behind = np.moveaxis(behind, axis, 0)[:-1]
        assert abs((ahead * behind).mean()) <= 4 * 0.1 * 0.9 / ahead.size**0.5, axis
    part = dataclasses.replace(dropout, first_row=1, first_head=3)
    found = keeps(part, 2, 4, query[7:90:3], key[::-1])
    np.testing.assert_array_equal(found, kept[1:3, 3:7, 7:90:3, ::-1])
    shared = keeps(dataclasses.replace(dropout, shared=True), *entries[:2], query, key)
    assert shared.shape == (1, 1, *entries[2:])
    other = dataclasses.replace(dropout, words=words + jnp.uint32(1))
    assert np.asarray(keeps(other, *entries[:2], query, key) == kept).mean() < 0.83


def test_a_dropout_rate_of_0_changes_no_bit():
    case = Case(degrees=st.Degrees(ring=4), mask="own_window", heads="grouped")
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in
              place(case.attention, case.problem)[:3]]  # fmt: skip
    options = dict(dropout_rng=jax.random.key(0), dropout_rate=0.0)
    programs = [
        jax.jit(functools.partial(case.attention, **given)).lower(*shapes).as_text()
        for given in ({}, options, options | dict(dropout_rate=0.5, deterministic=True))
    ]
    assert programs[0] == programs[1] == programs[2]


def test_decode_has_masks_soft_caps_slopes_and_sinks():
    rng, slots = np.random.default_rng(0), 24
    problem = draw_problem(rng, batch=2, lengths=(slots, slots), heads=(4, 2))
    case = Case(degrees=st.Degrees(team=2, ring=2, tensor=2), mask="sinks", layout="zigzag")
    attention = dataclasses.replace(case.attention, softcap=SOFTCAP)
    sinks, positions = np.float32([0.5, -1, 2, 0]), np.int32([[3, 20], [11, 0]])
    rows = np.arange(2)[:, None]

    def put(x, spec):
        return jax.device_put(x, NamedSharding(attention.mesh, spec))

    key_spec = attention.key_spec(2)
    key, value = (put(attention.layout.permute(x), key_spec) for x in (problem.key, problem.value))
    query = put(problem.query[rows, positions], attention.decode_spec(4))
    slopes = np.float32([0.5, 0.25, 0.125, 1])
    out = attention.decode(query, key, value, put(positions, P()), sinks=sinks, slopes=slopes)
    expected, _ = oracle.attention(
        problem.query, problem.key, problem.value, **case.mask_arguments, sinks=sinks,
        softcap=SOFTCAP, slopes=slopes,
    )  # fmt: skip
    assert relative_error(out, expected[rows, positions]) <= FLOAT32_ERROR
