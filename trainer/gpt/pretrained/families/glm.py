"""GLM 4: dense models, and GLM 4.5 to 4.7 with experts. Imports no jax.

Half of the channels of a head turn: neighbouring ones in the dense models. The router is that of
DeepSeek V3, whose bias in the choice of experts is a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from models.config import GPTConfig, RopeConfig
from models.parts.experts import ExpertsConfig
from trainer.gpt.pretrained.families.experts import (
    COUNTS,
    LOSSES,
    NORMALISED_SHARES,
    SIZES,
    TENSORS,
    ExpertLayers,
)
from trainer.gpt.pretrained.families.family import OF_ATTENTION, SILU, Family
from trainer.gpt.pretrained.families.qwen3_5 import ShareTurns
from trainer.gpt.pretrained.rope import SHARE
from trainer.gpt.pretrained.values import ConfigValues
from trainer.weights.places import AS_IT_IS, TRANSPOSED, Groups

SCALE, SHARED, DENSE_FIRST = "routed_scaling_factor", "n_shared_experts", "first_k_dense_replace"
PREDICTING = "num_nextn_predict_layers"
GROUPS = {"n_group": "groups", "topk_group": "top_groups"}
OF_ROUTER: Mapping[str, tuple[str, Groups]] = {
    **{name: (tensor.replace("shared_expert.", "shared_experts."), groups)
       for name, (tensor, groups) in TENSORS.items() if name != "mlp/shared_gate/kernel"},
    "mlp/choice_bias": ("mlp.gate.e_score_correction_bias", AS_IT_IS),
}  # fmt: skip
OF_GLM4: Mapping[str, tuple[str, Groups]] = {
    "attention_norm/scale": ("input_layernorm.weight", AS_IT_IS),
    "attention_out_norm/scale": ("post_self_attn_layernorm.weight", AS_IT_IS),
    "mlp_norm/scale": ("post_attention_layernorm.weight", AS_IT_IS),
    "mlp_out_norm/scale": ("post_mlp_layernorm.weight", AS_IT_IS),
    "mlp/gate/kernel": ("mlp.gate_up_proj.weight", TRANSPOSED),
    "mlp/up/kernel": ("mlp.gate_up_proj.weight", TRANSPOSED),
    "mlp/down/kernel": ("mlp.down_proj.weight", TRANSPOSED),
}


@dataclass(frozen=True, kw_only=True)
class GroupedExperts(ExpertLayers):
    """The experts of DeepSeek V3, after some dense layers."""

    varied: ClassVar[tuple[str, ...]] = ("groups", "top_groups", "share_scale")

    def fits(self, model: GPTConfig, keys: tuple[str, ...]) -> bool:
        """True if a family with these keys has the layers of experts of a model."""
        experts = model.experts.of_model(model)
        return experts.shared_width % experts.width == 0 and super().fits(model, keys)

    def fits_dense(self, feeds: tuple[str, ...], keys: tuple[str, ...]) -> bool:
        """True if the layers without experts are the first ones."""
        del keys
        return "mlp" not in feeds[feeds.index("experts") :]

    def read(self, values: ConfigValues, keys: tuple[str, ...], layers: int) -> dict[str, Any]:
        """The options of a model for its layers of experts, and the list of these layers."""
        found = super().read(values, keys, layers)
        width = found["experts"].width * values.number(SHARED)
        scale = values.real(SCALE)
        return found | {"experts": replace(found["experts"], shared_width=width, share_scale=scale)}

    def feeds(self, values: ConfigValues, layers: int) -> list[str]:
        """The feed-forward of each layer."""
        first: Any = values.values.get(DENSE_FIRST)
        if type(first) is not int or not 0 <= first < layers:
            raise values.wrong(DENSE_FIRST, f"a whole number from 0 to {layers - 1}", first)
        return ["mlp"] * first + ["experts"] * (layers - first)

    def values(self, model: GPTConfig) -> dict[str, Any]:
        """The values of a config.json for experts; a family uses some of them."""
        experts = model.experts.of_model(model)
        return super().values(model) | {
            SCALE: experts.share_scale,
            SHARED: experts.shared_width // experts.width,
            DENSE_FIRST: model.layer_feed_forwards.index("experts"),
        }


@dataclass(frozen=True)
class HalfTurns(ShareTurns):
    """Positions on a share of the channels, a half by default."""

    interleaved: bool = False

    def fits(self, model: GPTConfig) -> bool:
        """True if a model in its simplest form has positions of this form."""
        plain = replace(model, rope=replace(model.rope, interleaved=False))
        return model.rope.interleaved == self.interleaved and super().fits(plain)

    def read(
        self, values: ConfigValues, written: Mapping[str, Any], model: GPTConfig
    ) -> RopeConfig:
        """The positions of a model, from all values of a file with defaults, and from the values
        written in it."""
        return replace(super().read(values, written, model), interleaved=self.interleaved)


@dataclass(frozen=True, kw_only=True)
class Glm4(Family):
    """A dense GLM 4."""

    def tables(self, model: GPTConfig) -> dict[str, Mapping[str, tuple[str, Groups]]]:
        """Stack of layers -> weight of a layer -> tensor of a layer."""
        return {stack: {**OF_ATTENTION, **OF_GLM4} for stack in super().tables(model)}


GLM4 = Glm4(
    architecture="Glm4ForCausalLM",
    keys=(SHARE, "attention_bias"),
    options={"norms": "both"},
    switches={"attention_bias": "qkv_bias"},
    windows="no",
    rope=HalfTurns(interleaved=True),
)
GLM4_MOE = Family(
    architecture="Glm4MoeForCausalLM",
    keys=(
        *(*COUNTS[2:], *SIZES, *GROUPS, NORMALISED_SHARES, SCALE, SHARED, DENSE_FIRST, SHARE),
        *("attention_bias", "use_qk_norm", PREDICTING),
    ),
    predicting=PREDICTING,
    # It has no loss that balances experts.
    only=SILU | {LOSSES[1]: (False,)},
    switches={"attention_bias": "qkv_bias", "use_qk_norm": "qk_norm"},
    windows="no",
    rope=HalfTurns(),
    experts=GroupedExperts(
        config=ExpertsConfig(scores="sigmoid", choice_bias=True, shared_width=1),
        sizes=SIZES | GROUPS,
        count=COUNTS[2],
        tensors=OF_ROUTER,
    ),
)
