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


def received(**sent):
    return dict.fromkeys(COLLECTIVES, 0) | sent


@pytest.mark.parametrize(
    ("level", "parts", "sent"),
    [
        # Remat "none" saves everything but gathered weights, so that both passes gather layers.
        (3, 1, dict(all_gather=2 * LAYERS + ENDS, reduce_scatter=SPLIT, all_reduce=2 * UNSPLIT)),
        (0, 1, dict(all_reduce=2 * (SPLIT + UNSPLIT))),
        (1, 2, dict(all_gather=SPLIT, reduce_scatter=SPLIT, all_reduce=2 * UNSPLIT)),
        (2, 2, dict(all_gather=SPLIT, reduce_scatter=2 * SPLIT, all_reduce=4 * UNSPLIT)),
    ],
)
@pytest.mark.slow_except_every(4)
def test_weights_are_gathered_and_gradients_summed_as_a_level_says(level, parts, sent):
    """Level 2 sums those of every part of a batch, and level 1 once a step."""
    assert UNSPLIT == 4 * 60 * 7
    expected = {kind: 7 * size // 8 for kind, size in sent.items()}
    assert traffic(level, parts=parts) == received(**expected)


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
