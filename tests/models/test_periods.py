"""Patterns of layers, and the loops that they become."""

import jax
import numpy as np
import pytest

from models.periods import kinds_of_layers, layer_of, stretches
from models.rope import Rope

pytestmark = pytest.mark.quick

ROPE = Rope(head_dim=4)


def loops(windows, layers, ropes=(ROPE,), mixers=("attention",)):
    """First layer, layers of a group, and groups, of each loop."""
    found = stretches(kinds_of_layers(mixers, ("mlp",), windows, ropes, layers))
    return [(sum(loop.first.values()), len(loop.kinds), loop.groups) for loop in found]


@pytest.mark.parametrize(
    ("windows", "layers", "expected"),
    [
        ((None,), 48, [(0, 1, 48)]),
        ((512, 512, 512, None), 48, [(0, 4, 12)]),
        ((512, 512, 512, None), 8, [(0, 4, 2)]),
        ((512, None), 5, [(0, 2, 2), (4, 1, 1)]),
        # Gemma 3 with 1 billion parameters.
        ((512,) * 5 + (None,), 26, [(0, 6, 4), (24, 1, 2)]),
        # Local layers after global ones have no period.
        ((None,) * 20 + (512,) * 8, 28, [(0, 1, 20), (20, 1, 8)]),
        ((3,), 2, [(0, 1, 2)]),
    ],
)
def test_patterns_become_few_loops(windows, layers, expected):
    assert loops(windows, layers) == expected


def test_layers_differ_in_their_rotary_positions_too():
    assert loops((7,), 36, ropes=(ROPE,) * 3 + (None,)) == [(0, 4, 9)]
    assert loops((7, None), 12, ropes=(ROPE, ROPE, None)) == [(0, 6, 2)]


def test_linear_attention_has_neither_window_nor_rotary_positions():
    mixers = ("linear", "linear", "linear", "attention")
    assert loops((None,), 32, mixers=mixers) == [(0, 4, 8)]
    assert loops((None,), 26, mixers=mixers) == [(0, 4, 6), (24, 1, 2)]
    # Of the windows, those of the attention layers are alike.
    assert loops((1, 2, 3, None), 32, mixers=mixers) == [(0, 4, 8)]


def test_every_layer_gets_its_kind_and_its_own_weights():
    windows, layers = (1, 2, 2, None), 11
    for mixers in (("attention",), ("linear", "attention", "attention")):
        kinds = kinds_of_layers(mixers, ("mlp",), windows, (ROPE, None), layers)
        of_part = {
            part: np.array([i for i, kind in enumerate(kinds) if kind.stack == part])
            for part in ("blocks", "linear_blocks")
        }
        stacked = {
            part: {"a": i, "b": 3 * i[:, None] + np.arange(3)} for part, i in of_part.items()
        }
        found = []
        for stretch in stretches(kinds):
            grouped = stretch.grouped(stacked)
            for turn in range(stretch.groups):
                group = jax.tree.map(lambda x, turn=turn: x[turn], grouped)
                taken = [(kind, layer_of(own)) for kind, own in stretch.each(group)]
                found += [(kind, x["a"], x["b"][0]) for kind, x in taken]
        assert found == [(kind, i, 3 * i) for i, kind in enumerate(kinds)]
