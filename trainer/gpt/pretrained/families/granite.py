"""Granite 4: Mamba-2 and attention, an MLP with or without experts beside it, and fixed factors.
Imports no jax."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from models.config import GPTConfig, RopeConfig
from models.parts.experts import ExpertsConfig
from models.parts.gpt import stack_pairs
from models.parts.ssd import SSDConfig
from trainer.gpt.pretrained.families.experts import COUNTS, LIKE_MLP, LOSSES, ExpertLayers
from trainer.gpt.pretrained.families.family import OF_LAYER, SILU, Family
from trainer.gpt.pretrained.families.nemotron import MIXERS as OF_NEMOTRON
from trainer.gpt.pretrained.plain import few_digits, pattern
from trainer.gpt.pretrained.rope import FULL, OneBase
from trainer.gpt.pretrained.values import ConfigValues, require
from trainer.weights.places import TRANSPOSED, Groups

COUNT, SHARED, TYPES = COUNTS[1], "shared_intermediate_size", "layer_types"
POSITIONS, ROTARY, NO_POSITIONS = "position_embedding_type", "rope", "nope"
"""The key of positions, its value for rotary ones, and a value for none."""
PUBLISHED = {"ssd": "mamba", "attention": "attention"}
"""Mixer -> type of layer in published files, which all versions of transformers read."""
KINDS = {"linear_attention": "ssd", FULL: "attention"}
"""Types of layers in transformers from version 5 on -> mixer."""
EXPAND, CHUNK = "mamba_expand", "mamba_chunk_size"
OF_SSD = {
    "mamba_n_heads": "heads",
    "mamba_d_head": "head_dim",
    "mamba_n_groups": "groups",
    "mamba_d_state": "state_dim",
    "mamba_d_conv": "conv",
}
"""Keys of sizes -> settings of `SSDConfig`."""
OF_ATTENTION = "attention_multiplier"
FACTORS = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_divisor",
}
"""Keys of factors -> settings of `GPTConfig`."""
OF_EXPERTS = LIKE_MLP | {SHARED: "shared_width"}
GATE_AND_UP = "block_sparse_moe.input_linear.weight"
"""The gates and the projections up of all experts of a layer, [experts, 2 * hidden, width]."""
_OF_MATRICES: Groups = ((0,), (2,), (1,))
"""The transposed matrices of all experts."""
MIXERS: Mapping[str, Mapping[str, tuple[str, Groups]]] = {
    mixer: {
        path: (tensor.replace("mixer.", prefix), groups)
        for path, (tensor, groups) in OF_NEMOTRON[mixer].items()
    }
    for mixer, prefix in (("attention", "self_attn."), ("ssd", "mamba."))
}
"""Weight of a layer -> tensor of a layer, by mixer."""


def _shared(prefix: str) -> dict[str, tuple[str, Groups]]:
    return {
        f"{prefix}/gate/kernel": ("shared_mlp.input_linear.weight", TRANSPOSED),
        f"{prefix}/up/kernel": ("shared_mlp.input_linear.weight", TRANSPOSED),
        f"{prefix}/down/kernel": ("shared_mlp.output_linear.weight", TRANSPOSED),
    }


FEEDS: Mapping[str, Mapping[str, tuple[str, Groups]]] = {
    "mlp": _shared("mlp"),
    "experts": {
        "mlp/router": ("block_sparse_moe.router.layer.weight", TRANSPOSED),
        "mlp/expert_gate/kernel": (GATE_AND_UP, _OF_MATRICES),
        "mlp/expert_up/kernel": (GATE_AND_UP, _OF_MATRICES),
        "mlp/expert_down/kernel": ("block_sparse_moe.output_linear.weight", _OF_MATRICES),
        **_shared("mlp/shared"),
    },
}


@dataclass(frozen=True)
class RotaryOrNone(OneBase):
    """Rotary positions in all layers of attention, or in none, as a key says."""

    def fits(self, model: GPTConfig) -> bool:
        """True if a model in its simplest form has positions of this form."""
        return len({base is None for base in model.layer_bases}) == 1 and self.fits_bases(model)

    def read(
        self, values: ConfigValues, written: Mapping[str, Any], model: GPTConfig
    ) -> RopeConfig:
        """The positions of a model, from all values of a file with defaults, and from the values
        written in it."""
        if values.values[POSITIONS] != ROTARY:
            return RopeConfig(bases=("none",))
        return super().read(values, written, model)

    def values(self, model: GPTConfig) -> dict[str, Any]:
        """The values of a config.json."""
        if {*model.of_attention(model.layer_bases)} == {None}:
            return {POSITIONS: NO_POSITIONS}
        return {POSITIONS: ROTARY, **super().values(model)}


@dataclass(frozen=True, kw_only=True)
class Granite4(Family):
    """A Granite 4."""

    module_of_experts: ClassVar[str] = "block_sparse_moe.experts"
    needs_experts: ClassVar[bool] = False
    mixers: ClassVar[tuple[str, ...]] = ("attention", "ssd")
    layer_types: ClassVar[tuple[str, ...]] = (*KINDS, *PUBLISHED.values())

    def fits(self, model: GPTConfig) -> bool:
        """True if a model in its simplest form is one of the family."""
        ssd = model.ssd.of_model(model)
        same = replace(model, scale_dim=None, **dict.fromkeys(FACTORS.values(), 1.0))
        return (
            model.ssd.norm_eps is None
            and ssd.least_step == 0
            and ("ssd" not in model.mixers or ssd.heads * ssd.head_dim % model.width == 0)
            and super().fits(same)
        )

    def check(self, written: Mapping[str, Any], name: str) -> None:
        """Raises if values of a file, whose keys are known, are not supported together."""
        if written.get(COUNT) == 0:  # transformers asks the routers, of which there are none.
            require(LOSSES[1], written.get(LOSSES[1], False), (False, None), name)

    def model(self, values: ConfigValues) -> GPTConfig:
        """The model with the options that change its weights or windows."""
        model = super().model(values)
        # Without experts, there is an MLP in the place of the shared one.
        if self.has_experts(values):
            return model
        return replace(model, mlp_width=values.number(SHARED))

    def has_experts(self, values: ConfigValues) -> bool:
        """Whether the model of a file has layers of experts."""
        return values.values[COUNT] != 0 and values.number(COUNT) > 0

    def layers(self, values: ConfigValues) -> dict[str, Any]:
        """The options of a model in which its layers differ."""
        types = values.values[TYPES]
        if FULL not in types:
            raise values.wrong(TYPES, f"a list of types of layers, among them {FULL}", types)
        mixers = [KINDS[x] for x in types]
        options: dict[str, Any] = {"mixers": pattern(mixers)}
        if "ssd" in mixers:
            values.number(CHUNK)  # It changes no logits, but transformers needs a number.
            sizes: Any = {name: values.number(key) for key, name in OF_SSD.items()}
            options["ssd"] = SSDConfig(**sizes, conv_bias=bool(values.values["mamba_conv_bias"]))
        return options

    def forward(
        self, values: ConfigValues, written: Mapping[str, Any], model: GPTConfig
    ) -> dict[str, Any]:
        """The options of a model that change no weight, from all values of a file with defaults,
        and from the values written in it."""
        factors = {name: _positive(values, key) for key, name in FACTORS.items()}
        return {
            **super().forward(values, written, model),
            **factors,
            "scale_dim": _scale_dim(values),
        }

    def layer_values(self, model: GPTConfig) -> dict[str, Any]:
        """The values of a config.json in which layers differ; the family uses some of them."""
        sizes: dict[str, Any] = {EXPAND: 1, "mamba_n_heads": 1}  # Of no layer, but checked.
        if "ssd" in model.mixers:
            ssd = model.ssd.of_model(model)
            sizes = {key: getattr(ssd, name) for key, name in OF_SSD.items()}
            sizes |= {"mamba_conv_bias": ssd.conv_bias}
            sizes |= {EXPAND: ssd.heads * ssd.head_dim // model.width}
        # Replaced in a model with experts.
        dense = {COUNT: 0, "num_experts_per_tok": 0, SHARED: model.mlp_width}
        return {TYPES: [PUBLISHED[mixer] for mixer in model.layer_mixers], **sizes, **dense}

    def activation_values(self, model: GPTConfig) -> dict[str, Any]:
        """The values of a config.json for activations and scales."""
        return {
            **super().activation_values(model),
            **{key: getattr(model, name) for key, name in FACTORS.items()},
            OF_ATTENTION: (model.scale_dim or model.head_dim) ** -0.5,
        }

    def tables(self, model: GPTConfig) -> dict[str, Mapping[str, tuple[str, Groups]]]:
        """Stack of layers -> weight of a layer -> tensor of a layer."""
        return {
            stack: {**OF_LAYER, **MIXERS[mixer], **FEEDS[feed_forward]}
            for stack, (mixer, feed_forward) in stack_pairs(model).items()
        }

    def dim_of_rows(self, tensor: str) -> int:
        """The dimension of the rows of a tensor of several weights."""
        return int(tensor == GATE_AND_UP)


def _positive(values: ConfigValues, key: str) -> float:
    """A number above 0."""
    value = values.real(key)
    if value <= 0:
        raise values.wrong(key, "above 0", value)
    return value


def _scale_dim(values: ConfigValues) -> float:
    """The number of channels by whose root the factor of attention divides its logits."""
    factor = _positive(values, OF_ATTENTION)
    dim = few_digits(1 / factor * (1 / factor))
    if not 0 < dim < math.inf:
        raise values.wrong(OF_ATTENTION, "a number whose square a float holds", factor)
    return dim


GRANITE4 = Granite4(
    architecture="GraniteMoeHybridForCausalLM",
    # Published files have the last two, which nobody reads.
    keys=(
        *(TYPES, POSITIONS, *OF_SSD, "mamba_conv_bias", EXPAND, CHUNK),
        *(COUNT, *OF_EXPERTS, *LOSSES, *FACTORS, OF_ATTENTION),
        *("init_method", "normalization_function"),
    ),
    only=SILU | {"mamba_proj_bias": (False,), "time_step_limit": ([0.0, math.inf],)},
    windows="no",
    rope=RotaryOrNone(),
    experts=ExpertLayers(
        config=ExpertsConfig(shared_width=1),
        sizes=OF_EXPERTS,
        count=COUNT,
        tensors=FEEDS["experts"],
    ),
)
