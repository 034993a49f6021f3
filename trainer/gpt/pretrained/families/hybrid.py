"""Families with layers of the gated delta rule beside layers of attention. Imports no jax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from models.config import GPTConfig
from models.parts.gated_delta import LinearConfig
from trainer.gpt.pretrained.families.family import OF_LAYER, Family
from trainer.gpt.pretrained.plain import pattern
from trainer.gpt.pretrained.rope import FULL
from trainer.gpt.pretrained.values import ConfigValues
from trainer.weights.places import AS_IT_IS, IN_COLUMNS, IN_ROWS, OF_CONV, TRANSPOSED, Groups

LINEAR = "linear_attention"
"""The type of a layer of linear attention in transformers."""
SIZES = {
    "linear_num_value_heads": "heads",
    "linear_num_key_heads": "key_heads",
    "linear_key_head_dim": "key_dim",
    "linear_value_head_dim": "value_dim",
    "linear_conv_kernel_dim": "conv",
}
"""Keys of linear attention -> settings of `LinearConfig`."""
MIXERS = {FULL: "attention", LINEAR: "linear"}
TENSORS: Mapping[str, tuple[str, Groups]] = {
    "attention/query/kernel": ("linear_attn.in_proj_qkv.weight", IN_ROWS),
    "attention/key/kernel": ("linear_attn.in_proj_qkv.weight", IN_ROWS),
    "attention/value/kernel": ("linear_attn.in_proj_qkv.weight", IN_ROWS),
    "attention/out_gate/kernel": ("linear_attn.in_proj_z.weight", IN_ROWS),
    "attention/decay/kernel": ("linear_attn.in_proj_a.weight", TRANSPOSED),
    "attention/beta/kernel": ("linear_attn.in_proj_b.weight", TRANSPOSED),
    "attention/query_conv": ("linear_attn.conv1d.weight", OF_CONV),
    "attention/key_conv": ("linear_attn.conv1d.weight", OF_CONV),
    "attention/value_conv": ("linear_attn.conv1d.weight", OF_CONV),
    "attention/decay_rate": ("linear_attn.A_log", AS_IT_IS),
    "attention/decay_bias": ("linear_attn.dt_bias", AS_IT_IS),
    "attention/out_norm/scale": ("linear_attn.norm.weight", AS_IT_IS),
    "attention/out/kernel": ("linear_attn.out_proj.weight", IN_COLUMNS),
}
"""Weight of a layer -> tensor. Where several weights are one tensor, it has their rows in the order
of this table."""


@dataclass(frozen=True, kw_only=True)
class Hybrid(Family):
    """A family with layers of linear attention."""

    linear: LinearConfig = field(default_factory=LinearConfig)
    """Options of layers of linear attention beside their sizes."""
    linear_tensors: Mapping[str, tuple[str, Groups]] = field(default_factory=dict)
    """Tensors that differ from `TENSORS`, in the order of the rows of a tensor."""
    mixers: ClassVar[tuple[str, ...]] = ("attention", "linear")
    layer_types: ClassVar[tuple[str, str]] = (FULL, LINEAR)

    def fits(self, model: GPTConfig) -> bool:
        """True if a model in its simplest form is one of the family."""
        return self._fits_linear(model) and super().fits(model)

    def _fits_linear(self, model: GPTConfig) -> bool:
        """True if the family may have the model's layers of linear attention, or may lack such
        layers."""
        linear, family = model.linear, self.linear
        if "linear" not in model.layer_mixers:
            # Only an Olmo Hybrid must have such layers.
            return family.norms is None
        return (
            linear.largest_beta in (1.0, family.largest_beta)
            and (linear.norm_eps or model.norm_eps) == (family.norm_eps or model.norm_eps)
            and (linear.norms or model.norms) == (family.norms or model.norms)
        )

    def layers(self, values: ConfigValues) -> dict[str, Any]:
        """The options of a model in which its layers differ."""
        types, layers = values.values["layer_types"], values.values["num_hidden_layers"]
        if len(types) != layers or FULL not in types:
            needed = f"a list of {layers} names, one for each layer, among them {FULL}"
            raise values.wrong("layer_types", needed, types)
        sizes: Any = {name: values.number(key) for key, name in SIZES.items()}
        mixers = pattern([MIXERS[x] for x in types])
        return {"mixers": mixers, "linear": replace(self.linear, **sizes)}

    def layer_values(self, model: GPTConfig) -> dict[str, Any]:
        """The values of a config.json in which layers differ; the family uses some of them."""
        types = {mixer: layer_type for layer_type, mixer in MIXERS.items()}
        linear = model.linear.of_model(model)
        return {
            "layer_types": [types[mixer] for mixer in model.layer_mixers],
            **{key: getattr(linear, name) for key, name in SIZES.items()},
        }

    def table(self, model: GPTConfig, mixer: str) -> dict[str, tuple[str, Groups]]:
        """The tensors of a layer without its feed-forward."""
        if mixer != "linear":
            return super().table(model, mixer)
        table, of_family = {**OF_LAYER, **TENSORS}, self.linear_tensors
        return {x: y for x, y in table.items() if x not in of_family} | dict(of_family)
