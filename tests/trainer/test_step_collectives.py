"""Bytes sent for weights and gradients at each level of ZeRO, read from compiled programs."""

import functools
import math

import pytest

import startrail_jax as st
from programs import compile_gradients, make_config, make_program, weight_shapes
from startrail_jax.analysis.hlo import COLLECTIVES, read_traffic
from trainer.gpt.config import DataConfig

# Without a ring, whose rounds would only make the programs longer.
DEGREES = st.Degrees(data=2, group=2, team=2)
ALL = ("data", "group", "ring", "team", "head")
# Every step sums two scalars over 8 devices: the loss, and the weights of the tokens.
SCALARS = 2 * 2 * 4 * 7 // 8


# With this width, the scales of norms cannot be split over 8 devices.
WIDTH = {"width": 60}


@functools.cache
def compiled(level, zero_axes=ALL, remat="none", parts=1):
    """The program of loss and gradients as text; in float32, as CPUs send 16-bit numbers."""
    config = make_config(
        WIDTH, zero=level, zero_axes=zero_axes, remat=remat, gradient_accumulation=parts,
        data=DataConfig(mask_documents=False),
    )  # fmt: skip
    return compile_gradients(make_program(config, DEGREES)).as_text()


def traffic(level, remat="none", **changes):
    """Bytes that a device receives beyond those of attention, by kind."""
    sent = read_traffic(compiled(level, remat=remat, **changes)).by_collective
    # At level 0 the gradients are summed once, and all other traffic is that of attention, which
    # "attention_saved" does not repeat.
    attention = read_traffic(compiled(0)).by_collective | {"all_reduce": SCALARS}
    return {kind: sent[kind] - attention[kind] for kind in COLLECTIVES}


def weight_bytes(over=8, *, split=True):
    """float32 bytes of the weights that can be split, or that cannot: of layers, and of others."""
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


@pytest.mark.slow
def test_level_0_sums_whole_gradients():
    assert UNSPLIT == 4 * 60 * 7
    assert traffic(0) == received(all_reduce=2 * 7 * (SPLIT + UNSPLIT) // 8)


@pytest.mark.slow
def test_level_1_gathers_and_sums_once_a_step():
    """This holds for a batch in parts, too."""
    assert traffic(1, parts=2) == received(
        all_gather=7 * SPLIT // 8, reduce_scatter=7 * SPLIT // 8, all_reduce=SUM_OF_UNSPLIT
    )


@pytest.mark.slow
def test_level_2_gathers_once_a_step_and_sums_every_part():
    assert traffic(2, parts=2) == received(
        all_gather=7 * SPLIT // 8, reduce_scatter=2 * 7 * SPLIT // 8, all_reduce=2 * SUM_OF_UNSPLIT
    )


def test_level_3_gathers_layers_in_both_passes():
    """Remat "none" saves everything but gathered weights: those of all layers are never saved."""
    assert traffic(3) == received(
        all_gather=7 * (2 * LAYERS + ENDS) // 8,
        reduce_scatter=7 * SPLIT // 8,
        all_reduce=SUM_OF_UNSPLIT,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("level", "remat"), [(2, "none"), (3, "attention_saved")])
def test_hybrid_sums_parts_over_the_other_axes(level, remat):
    """ZeRO over each of two groups of 4 devices, between which quarters of gradients are summed."""
    layers, ends = weight_bytes(over=4)
    whole, gathered = layers + ends, (layers if level == 3 else 0) + layers + ends
    assert whole == SPLIT + UNSPLIT
    assert traffic(level, zero_axes=("group", "team"), remat=remat) == received(
        all_gather=3 * gathered // 4, reduce_scatter=3 * whole // 4, all_reduce=whole // 4
    )
