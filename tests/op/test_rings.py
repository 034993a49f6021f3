"""The schedule: who meets whom, in how many rounds."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import startrail_jax as st
from attention_cases import make_attention
from startrail_jax import masks
from startrail_jax.blocks import xla
from startrail_jax.blocks.tiles import visible_tiles
from startrail_jax.devices.degrees import Axis, Cycle
from startrail_jax.rings import schedule as schedules
from startrail_jax.rings.options import Options
from startrail_jax.rings.ring_loop import circulate
from startrail_jax.rings.rounds import ring_offsets
from startrail_jax.tokens.layout import Layout


def schedule_of(degrees, **options):
    return make_attention(degrees, **options).schedule


def test_options_of_communication_are_those_of_attention():
    """With the same types and defaults, and all of them reach the schedule."""
    fields = {x.name: (x.type, x.default) for x in dataclasses.fields(st.Attention)}
    own = {x.name: (x.type, x.default) for x in dataclasses.fields(Options)}
    assert len(own) == 8
    assert own.items() <= fields.items()
    others = dict(backward="kv", inner=2, head_chunks=2, keep_gathered=True, balance="layout")
    others |= dict(gradient_dtype="bfloat16", exchange="rings", published=True)
    assert others.keys() == own.keys()
    schedule = schedule_of(st.Degrees.startrail(8, c=2), **others)
    assert {name: getattr(schedule, name) for name in others} == others


def devices_of(schedule):
    degrees = (schedule.ring.degree, schedule.group.degree, schedule.team.degree)
    return itertools.product(*map(range, degrees))


@pytest.mark.parametrize("direction", ["keys_behind", "queries_ahead"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize(
    ("degrees", "inner"),
    [
        ((2, 2, 2), 1),
        ((3, 2, 1), 1),
        ((1, 3, 2), 1),
        ((2, 1, 3), 1),
        ((1, 5, 1), 1),
        ((2, 3, 2), 1),
        ((2, 4, 2), 2),
        ((1, 6, 2), 3),
        ((1, 6, 1), 2),
        ((2, 3, 1), 3),
    ],
)
@pytest.mark.slow_except_every(3)
def test_every_pair_of_tokens_is_met_exactly_once(degrees, inner, layout, direction):
    group, ring, team = degrees
    degrees = st.Degrees(group=group, ring=ring, team=team)
    schedule = schedule_of(degrees, layout=layout, inner=inner)
    seq_len = 2 * group * ring * team
    met = np.zeros((seq_len, seq_len), int)
    for device in devices_of(schedule):
        for offset in ring_offsets(schedule, seq_len):
            mask = schedule.visibility(seq_len, device, **{direction: offset})
            met[np.ix_(mask.query_positions, mask.key_positions)] += 1
    np.testing.assert_array_equal(met, 1)


@pytest.mark.parametrize(
    ("ring", "group", "team", "head"),
    [(2, 2, 2, 1), (1, 4, 4, 1), (4, 1, 4, 1), (4, 4, 1, 1), (3, 2, 5, 1), (2, 3, 2, 2)],
)
def test_every_device_has_the_same_causal_work_in_every_round(ring, group, team, head):
    """Under zigzag; with one diagonal more in the first round."""
    degrees = st.Degrees(ring=ring, group=group, team=team, head=head)
    mesh = jax.sharding.AbstractMesh((ring, group, team, head), ("ring", "group", "team", "head"))
    attention, seq_len = st.Attention(mesh, layout="zigzag", causal=True), 6 * degrees.sequence
    schedule = attention.schedule
    for distance in range(ring):
        for device in devices_of(schedule):
            mask = schedule.visibility(seq_len, device, keys_behind=distance)
            seen = mask.key_positions[None] <= mask.query_positions[:, None]
            slices = 3 * head
            diagonal = slices if distance == 0 else 0
            assert seen.sum() == 2 * team * group * slices**2 + diagonal


@pytest.mark.parametrize(
    ("layout", "window", "expected"),
    [
        ("contiguous", 1, (0,)),
        ("contiguous", 10, (0, 1)),
        ("contiguous", 11, (0, 1)),
        ("contiguous", 12, (0, 1, 2)),
        ("contiguous", 80, tuple(range(8))),
        ("zigzag", 1, (0,)),
        ("zigzag", 3, (0, 1, 7)),
    ],
)
def test_a_window_leaves_out_the_rounds_that_nobody_needs(layout, window, expected):
    schedule = schedule_of(st.Degrees(ring=8), layout=layout, window=window)
    assert ring_offsets(schedule, 80) == expected


def tiles_visited(degrees, seq_len, **options):
    """Tiles that each device visits in the forward pass, times their area."""
    schedule = schedule_of(degrees, **options)
    shard = seq_len // degrees.sequence
    work = []
    for device in devices_of(schedule):
        area = 0
        for offset in ring_offsets(schedule, seq_len):
            mask = schedule.visibility(seq_len, device, keys_behind=offset)
            query, key = xla.tilings(
                mask, shard * schedule.query_ranks, shard * schedule.key_ranks, 1
            )
            area += int(visible_tiles(mask, query, key).sum()) * query.size * key.size
        work.append(area)
    return np.array(work)


@pytest.mark.parametrize(
    "degrees",
    [
        st.Degrees.ring_attention(8),
        st.Degrees.all_gather(8),
        st.Degrees.startrail(8, c=2),
        st.Degrees(team=2, ring=4),
        st.Degrees(team=2, group=4),
        st.Degrees.loongtrain(8, head=2),
    ],
    ids=str,
)
@pytest.mark.slow_except_every(3)
def test_zigzag_balances_the_block_work_and_wastes_little(degrees):
    seq_len = 16384
    work = tiles_visited(degrees, seq_len, layout="zigzag")
    assert work.max() / work.mean() <= 1.03
    useful = seq_len * (seq_len + 1) / 2
    assert work.sum() <= 1.05 * useful


def met_and_been(cycles, offsets, *, direction, unrolled, mark):
    """Whom each device met, as `mark` of the distance, and where each traveller has been."""
    size = cycles[0].axis.degree
    mesh = jax.make_mesh(
        (size,), ("ring",), devices=jax.devices()[:size], axis_types=(jax.sharding.AxisType.Auto,)
    )

    def on_device(x):
        one = jax.nn.one_hot(jax.lax.axis_index("ring"), size, dtype=jnp.int32)

        def visit(traveller, distance, met):
            met = jnp.zeros_like(one) if met is None else met
            return met + jax.nn.one_hot(traveller[0], size, dtype=jnp.int32) * mark(distance), one

        met, been = circulate(
            cycles,
            offsets,
            direction=direction,
            travellers=x,
            visit=visit,
            finalise=lambda met: met,
            unrolled=unrolled,
        )
        return met[None], been[None]

    specs = dict(in_specs=P("ring"), out_specs=P("ring"))
    return jax.jit(jax.shard_map(on_device, mesh=mesh, **specs))(jnp.arange(size))


@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize("unrolled", [(9, 1), (2, 1), (4, 2), (3, 4), (4, 5)])
@pytest.mark.parametrize(
    "offsets", [(0,), (0, 1), (0, 1, 2), (0, 2, 5), (0, 1, 2, 3, 5, 6), tuple(range(7))]
)
@pytest.mark.slow_except_every(7)
def test_circulate_brings_each_traveller_past_everyone_and_its_share_home(
    offsets, unrolled, direction
):
    cycles = (Cycle(Axis(("ring",), 7), 7),)
    met, been = met_and_been(
        cycles, offsets, direction=direction, unrolled=unrolled, mark=lambda distance: 1
    )
    for p in range(7):
        assert np.flatnonzero(met[p]).tolist() == sorted((p - direction * o) % 7 for o in offsets)
        assert np.flatnonzero(been[p]).tolist() == sorted((p + direction * o) % 7 for o in offsets)
    assert met.max() == been.max() == 1


@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize("unrolled", [(24, 1), (4, 1)])
@pytest.mark.parametrize(("outer", "inner"), [(2, 3), (4, 2), (3, 4), (6, 1), (1, 6)])
@pytest.mark.slow_except_every(3)
def test_double_ring_brings_each_traveller_past_everyone_and_its_share_home(
    outer, inner, unrolled, direction
):
    size = outer * inner
    schedule = schedule_of(st.Degrees(ring=size), inner=inner)
    met, been = met_and_been(
        schedule.cycles,
        ring_offsets(schedule, 2 * size),
        direction=direction,
        unrolled=unrolled,
        mark=lambda distance: distance + 1,
    )
    for p in range(size):
        lives = [schedule.along_ring(p, distance, -direction) for distance in range(size)]
        assert sorted(lives) == list(range(size))
        assert met[p][np.array(lives)].tolist() == list(range(1, size + 1))
    assert (been == 1).all()


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_rounds_of_a_window_are_those_in_which_units_meet(kind):
    for ring, group, team, inner, run in ((8, 1, 1, 1, 3), (6, 2, 1, 3, 5), (4, 2, 3, 2, 2)):
        degrees = st.Degrees(ring=ring, group=group, team=team)
        layout = Layout(kind, degrees.sequence)
        seq_len = run * layout.multiple
        for window in range(1, seq_len):
            schedule = schedules.schedule_of(
                degrees, masks.Window(window - 1, 0), layout, inner=inner
            )
            met = schedule.mask.meet(*schedule.units_that_meet(seq_len, range(ring)))
            needed = {0, *(np.flatnonzero(met.any((1, 2, 3))) // inner)}
            assert ring_offsets(schedule, seq_len) == tuple(
                offset for offset in range(ring) if offset // inner in needed
            )
