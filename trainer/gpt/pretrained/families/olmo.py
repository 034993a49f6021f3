"""OLMo: OLMoE, OLMo 2 and Olmo Hybrid. Imports no jax.

transformers joins the three convolutions of an Olmo Hybrid to one and renames norms, and undoes
both when it saves: the norms then have other names in layers with attention, and each of the three
convolutions a third of all rows, whatever their sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Shaped

from models.config import GPTConfig, RopeConfig
from models.parts.gated_delta import LinearConfig
from trainer.gpt.pretrained.families.experts import (
    COUNTS,
    LIKE_MLP,
    LOSSES,
    NORMALISED_SHARES,
    ExpertLayers,
)
from trainer.gpt.pretrained.families.family import SILU, Family
from trainer.gpt.pretrained.families.hybrid import SIZES, Hybrid
from trainer.gpt.pretrained.rope import NESTED, SCALING, THETA, OneBase
from trainer.gpt.pretrained.values import ConfigValues
from trainer.weights.files import Tensors
from trainer.weights.places import AS_IT_IS, IN_COLUMNS, IN_ROWS, OF_CONV, TRANSPOSED, Groups

OLMO = {"qk_norm": True, "qk_norm_over": "heads", "norms": "after"}
"""Options of OLMo 2 and later ones."""
NEGATIVE = "linear_allow_neg_eigval"
"""Key that allows the states of an Olmo Hybrid to change their sign: beta is then at most 2, else
1."""
NORMS = {
    "input_layernorm": "attention_layer_norm",
    "post_attention_layernorm": "feedforward_layer_norm",
}
"""Names in transformers -> names in files. It reads both in every layer."""
CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")
TENSORS: Mapping[str, tuple[str, Groups]] = {
    "attention_norm/scale": ("attention_layer_norm.weight", AS_IT_IS),
    "mlp_norm/scale": ("feedforward_layer_norm.weight", AS_IT_IS),
    "attention/query/kernel": ("linear_attn.q_proj.weight", IN_ROWS),
    "attention/key/kernel": ("linear_attn.k_proj.weight", IN_ROWS),
    "attention/value/kernel": ("linear_attn.v_proj.weight", IN_ROWS),
    "attention/out_gate/kernel": ("linear_attn.g_proj.weight", IN_ROWS),
    "attention/decay/kernel": ("linear_attn.a_proj.weight", TRANSPOSED),
    "attention/beta/kernel": ("linear_attn.b_proj.weight", TRANSPOSED),
    "attention/query_conv": ("linear_attn.q_conv1d.weight", OF_CONV),
    "attention/key_conv": ("linear_attn.k_conv1d.weight", OF_CONV),
    "attention/value_conv": ("linear_attn.v_conv1d.weight", OF_CONV),
    "attention/out_norm/scale": ("linear_attn.o_norm.weight", AS_IT_IS),
    "attention/out/kernel": ("linear_attn.o_proj.weight", IN_COLUMNS),
}
"""Tensors of linear attention in an Olmo Hybrid that differ from `hybrid.TENSORS`."""


@dataclass(frozen=True, kw_only=True)
class Olmoe(Family):
    """An OLMoE."""

    def model(self, values: ConfigValues) -> GPTConfig:
        """The model with the options that change its weights or windows; `forward` has the
        others."""
        heads, width, head_dim = (
            values.number(key) for key in ("num_attention_heads", "hidden_size", "head_dim")
        )
        if heads * head_dim != width:  # Of which it takes the norm of a query.
            raise values.wrong("head_dim", f"{width} / {heads}", head_dim)
        return super().model(values)


@dataclass(frozen=True)
class AllOrNone(OneBase):
    """Positions that are the same in all layers, or in none."""

    def fits(self, model: GPTConfig) -> bool:
        """True if a model in its simplest form has positions of this form."""
        return len({base is None for base in model.layer_bases}) == 1 and self.fits_bases(model)

    def read(
        self, values: ConfigValues, written: Mapping[str, Any], model: GPTConfig
    ) -> RopeConfig:
        """The positions of a model, from all values of a file with defaults, and from the values
        written in it."""
        if values.values[NESTED][THETA] is None:
            return RopeConfig(bases=("none",))
        return super().read(values, written, model)

    def values(self, model: GPTConfig) -> dict[str, Any]:
        """The values of a config.json."""
        values = super().values(model)
        theta = None if {*model.of_attention(model.layer_bases)} == {None} else values[THETA]
        return {NESTED: {THETA: theta, **(values[SCALING] or {"rope_type": "default"})}}


@dataclass(frozen=True, kw_only=True)
class OlmoHybrid(Hybrid):
    """An Olmo Hybrid."""

    def layers(self, values: ConfigValues) -> dict[str, Any]:
        """The options of a model in which its layers differ."""
        options = super().layers(values)
        if not values.values.get(NEGATIVE, True):
            options["linear"] = replace(options["linear"], largest_beta=1.0)
        return options

    def layer_values(self, model: GPTConfig) -> dict[str, Any]:
        """The values of a config.json in which layers differ."""
        return super().layer_values(model) | {NEGATIVE: model.linear.largest_beta == 2}

    def adapt(self, tensors: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
        """The tensors under the names and with the rows that a model of this program has."""
        return as_published(tensors, shapes)


def as_published(tensors: Tensors, needed: Mapping[str, tuple[int, ...]]) -> Tensors:
    """The tensors under the names and with the rows that a model of this program has."""
    names = {name: name for name in tensors.shapes}
    for name in needed.keys() - tensors.shapes.keys():
        for loaded, published in NORMS.items():
            for other in (name.replace(loaded, published), name.replace(published, loaded)):
                if other in names and other not in needed:
                    names[other] = name
    shapes = {names[name]: shape for name, shape in tensors.shapes.items()}
    dtypes = {names[name]: dtype for name, dtype in tensors.dtypes.items()}
    slices = {names[name]: x for name, x in tensors.slices.items()}
    for name in needed:
        if CONVOLUTIONS[0] not in name:
            continue
        three = [name.replace(CONVOLUTIONS[0], other) for other in CONVOLUTIONS]
        rows, sizes = ([x[key][0] for key in three if key in x] for x in (shapes, needed))
        if len(rows) == 3 and rows != sizes and sum(rows) == sum(sizes):
            parts, start = [(slices[key], shapes[key][0]) for key in three], 0
            for key, size in zip(three, sizes, strict=True):
                slices[key] = _Rows(parts, start)
                shapes[key] = (size, *shapes[key][1:])
                start += size
    return replace(tensors, shapes=shapes, dtypes=dtypes, slices=slices)


class _Rows:
    """Some rows of several tensors as if these were one, read when it is indexed with slices."""

    def __init__(self, parts: Sequence[tuple[Any, int]], start: int) -> None:
        self._parts, self._start = parts, start

    def __getitem__(self, index: tuple[slice, ...]) -> Shaped[np.ndarray, "..."]:
        rows, *columns = index
        first, last, blocks = self._start + rows.start, self._start + rows.stop, []
        for tensor, size in self._parts:
            cover = slice(max(first, 0), min(last, size))
            if cover.start < cover.stop:
                blocks.append(np.asarray(tensor[(cover, *columns)]))
            first, last = first - size, last - size
        return np.concatenate(blocks)


OLMOE = Olmoe(
    architecture="OlmoeForCausalLM",
    keys=(*COUNTS, *LIKE_MLP, NORMALISED_SHARES, *LOSSES),
    only=SILU | {"clip_qkv": (None,)},
    options={"qk_norm": True, "qk_norm_over": "heads"},
    windows="no",
    experts=ExpertLayers(sizes=LIKE_MLP),
)
OLMO_HYBRID = OlmoHybrid(
    architecture="OlmoHybridForCausalLM",
    # Beside the layers, how their weights begin.
    keys=(
        *("layer_types", *SIZES, NEGATIVE, "linear_a_log_min", "linear_a_log_max"),
        *("linear_dt_min", "linear_dt_max", "linear_dt_init_floor"),
    ),
    options=OLMO,
    windows="no",
    rope=AllOrNone(),
    linear=LinearConfig(norms="before", norm_eps=1e-5, largest_beta=2.0),
    linear_tensors=TENSORS,
)
