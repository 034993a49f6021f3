"""What weights and gradients cost on the network at each level of ZeRO, read from the program."""

import functools

import pytest

import startrail_jax as st
from programs import compile_gradients, make_config, make_program
from startrail_jax.hlo import COLLECTIVES, read_traffic
from startrail_jax.overlap import ENTRY, read_overlap
from startrail_jax.training.footprint import weights_of

STARTRAIL = st.Degrees.startrail(8, c=2)
ALL = ("data", "group", "ring", "team", "head")
# Two scalars that every step sums over 8 devices: the loss, and the weights of the tokens.
SCALARS = 2 * 2 * 4 * 7 // 8


@functools.cache
def compiled(level, zero_axes=ALL, remat="none", accumulation=1, width=64):
    """The text of loss and gradients, in float32: CPUs send 16-bit numbers as 32."""
    config = make_config(
        {"width": width},
        zero=level, zero_axes=zero_axes, remat=remat, accumulation=accumulation,
    )  # fmt: skip
    return compile_gradients(make_program(config, STARTRAIL)).as_text()


def traffic(level, **changes):
    """Bytes that a device receives beyond those of attention, by kind."""
    sent = read_traffic(compiled(level, **changes)).by_collective
    # Level 0 sums gradients, once; the rest of it is attention.
    changes = {name: changes[name] for name in ("remat", "width") if name in changes}
    attention = read_traffic(compiled(0, **changes)).by_collective | {"all_reduce": SCALARS}
    return {kind: sent[kind] - attention[kind] for kind in COLLECTIVES if sent[kind]}


def weight_bytes(width=64, *, over=8, split=True):
    """float32 bytes of the weights of layers, and of the others, that can be split (or cannot)."""
    weights = weights_of(make_config({"width": width}).model)
    sizes = {True: 0, False: 0}
    for weight in weights:
        if any(dim % over == 0 for dim in weight.shape) == split:
            sizes[weight.layers > 0] += 4 * weight.size
    return sizes[True], sizes[False]


LAYERS, ENDS = weight_bytes()
WHOLE = LAYERS + ENDS


def received(all_gather=0, reduce_scatter=0, all_reduce=0):
    sent = {"all_gather": all_gather, "reduce_scatter": reduce_scatter, "all_reduce": all_reduce}
    return {"all_to_all": 0, "collective_permute": 0} | sent


def test_level_0_sums_whole_gradients():
    assert traffic(0) == received(all_reduce=2 * 7 * WHOLE // 8)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("level", [1, 2])
def test_levels_1_and_2_collect_weights_once_a_step(level, accumulation):
    """Level 1 sums gradients once a step, level 2 those of every part of the batch."""
    times = accumulation if level == 2 else 1
    expected = received(all_gather=7 * WHOLE // 8, reduce_scatter=times * 7 * WHOLE // 8)
    assert traffic(level, accumulation=accumulation) == expected


@pytest.mark.parametrize("remat", ["none", "attention_saved", "full"])
def test_level_3_collects_layers_in_both_passes(remat):
    """Even where remat saves everything else: whole weights of all layers are never kept."""
    expected = received(all_gather=7 * (2 * LAYERS + ENDS) // 8, reduce_scatter=7 * WHOLE // 8)
    assert traffic(3, remat=remat) == expected


@pytest.mark.parametrize(("level", "collected"), [(1, WHOLE), (2, WHOLE), (3, 2 * LAYERS + ENDS)])
def test_hybrid_sums_parts_over_the_other_axes(level, collected):
    """ZeRO over 4 devices, of which there are 2 groups: these sum a quarter of the gradient."""
    expected = received(
        all_gather=3 * collected // 4, reduce_scatter=3 * WHOLE // 4, all_reduce=WHOLE // 4
    )
    remat = "attention_saved"
    assert traffic(level, zero_axes=("ring", "team"), remat=remat) == expected


def test_weights_that_cannot_be_split_are_summed():
    """Of width 60, the scales of the norms."""
    split, whole = (sum(weight_bytes(60, split=split)) for split in (True, False))
    assert whole == 4 * 60 * 7
    sent = traffic(2, width=60)
    assert sent["reduce_scatter"] == sent["all_gather"] == 7 * split // 8
    assert sent["all_reduce"] == 2 * 7 * whole // 8


def test_level_2_sums_in_the_loop_over_layers_and_level_1_after_it():
    after = {level: sums_of_entry(level) for level in (1, 2)}
    assert after == {1: 7 * WHOLE // 8, 2: 7 * ENDS // 8}


def sums_of_entry(level):
    """Bytes of the reduce_scatters that are in no loop."""
    transfers = read_overlap(compiled(level))
    return sum(
        x.received_bytes for x in transfers if x.kind == "reduce_scatter" and x.computation == ENTRY
    )
