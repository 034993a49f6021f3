"""What weights and gradients cost on the network at each level of ZeRO, read from the program."""

import functools
import math

import pytest

import startrail_jax as st
from programs import compile_gradients, make_config, make_program, weight_shapes
from startrail_jax.analysis.hlo import (
    COLLECTIVES,
    read_traffic,
)
from startrail_jax.analysis.overlap import (
    ENTRY,
    read_overlap,
)

STARTRAIL = st.Degrees.startrail(8, c=2)
ALL = ("data", "group", "ring", "team", "head")
# Two scalars that every step sums over 8 devices: the loss, and the weights of the tokens.
SCALARS = 2 * 2 * 4 * 7 // 8


# The scales of norms, of this width, cannot be split over 8 devices.
WIDTH = {"width": 60}


@functools.cache
def compiled(level, zero_axes=ALL, remat="none", accumulation=1):
    """The text of loss and gradients, in float32: CPUs send 16-bit numbers as 32."""
    config = make_config(
        WIDTH, zero=level, zero_axes=zero_axes, remat=remat, accumulation=accumulation
    )
    return compile_gradients(make_program(config, STARTRAIL)).as_text()


def traffic(level, remat="none", **changes):
    """Bytes that a device receives beyond those of attention, by kind."""
    sent = read_traffic(compiled(level, remat=remat, **changes)).by_collective
    # Level 0 sums gradients, once; the rest of it is attention, which "attention_saved" does not
    # repeat either.
    attention = read_traffic(compiled(0)).by_collective | {"all_reduce": SCALARS}
    return {kind: sent[kind] - attention[kind] for kind in COLLECTIVES}


def weight_bytes(over=8, *, split=True):
    """float32 bytes of the weights of layers, and of the others, that can be split (or cannot)."""
    sizes = {True: 0, False: 0}
    for path, shape in weight_shapes(make_config(WIDTH)).items():
        in_layers = path.startswith("blocks/")
        dims = shape[1:] if in_layers else shape
        if any(dim % over == 0 for dim in dims) == split:
            sizes[in_layers] += 4 * math.prod(shape)
    return sizes[True], sizes[False]


LAYERS, ENDS = weight_bytes()
SPLIT, UNSPLIT = LAYERS + ENDS, sum(weight_bytes(split=False))
SUM_OF_UNSPLIT = 2 * 7 * UNSPLIT // 8


def received(**sent):
    return dict.fromkeys(COLLECTIVES, 0) | sent


def test_level_0_sums_whole_gradients():
    assert UNSPLIT == 4 * 60 * 7
    assert traffic(0) == received(all_reduce=2 * 7 * (SPLIT + UNSPLIT) // 8)


def test_level_1_collects_and_sums_once_a_step():
    """Also where it takes the batch in parts."""
    assert traffic(1, accumulation=2) == received(
        all_gather=7 * SPLIT // 8, reduce_scatter=7 * SPLIT // 8, all_reduce=SUM_OF_UNSPLIT
    )


def test_level_2_collects_once_a_step_and_sums_every_part():
    assert traffic(2, accumulation=2) == received(
        all_gather=7 * SPLIT // 8,
        reduce_scatter=2 * 7 * SPLIT // 8,
        all_reduce=2 * SUM_OF_UNSPLIT,
    )


def test_level_3_collects_layers_in_both_passes():
    """Though remat "none" saves everything else: whole weights of all layers are never kept."""
    assert traffic(3) == received(
        all_gather=7 * (2 * LAYERS + ENDS) // 8,
        reduce_scatter=7 * SPLIT // 8,
        all_reduce=SUM_OF_UNSPLIT,
    )


@pytest.mark.parametrize(("level", "remat"), [(2, "none"), (3, "attention_saved")])
def test_hybrid_sums_parts_over_the_other_axes(level, remat):
    """ZeRO over 4 devices, which there are twice: the two sum a quarter of the gradient."""
    layers, ends = weight_bytes(over=4)
    whole, collected = layers + ends, (layers if level == 3 else 0) + layers + ends
    assert whole == SPLIT + UNSPLIT
    assert traffic(level, zero_axes=("ring", "team"), remat=remat) == received(
        all_gather=3 * collected // 4, reduce_scatter=3 * whole // 4, all_reduce=whole // 4
    )


def test_level_1_sums_after_all_parts_and_level_2_within():
    """Read as what is summed outside of all loops."""
    after = {
        level: sum(
            x.received_bytes
            for x in read_overlap(compiled(level, accumulation=2))
            if x.kind == "reduce_scatter" and x.computation == ENTRY
        )
        for level in (1, 2)
    }
    assert after == {1: 7 * SPLIT // 8, 2: 0}
