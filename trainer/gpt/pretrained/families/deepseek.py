"""DeepSeek V2 Lite, DeepSeek V3 and Moonlight: latent attention, dense layers first, and experts.
Imports no jax."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from models.config import GPTConfig, RopeConfig
from models.parts.experts import ExpertsConfig
from models.parts.latent import LatentConfig
from trainer.gpt.pretrained.families.experts import COUNTS, LOSSES, NORMALISED_SHARES, SIZES
from trainer.gpt.pretrained.families.family import OF_LAYER, SILU, Family
from trainer.gpt.pretrained.families.glm import (
    DENSE_FIRST,
    GROUPS,
    OF_ROUTER,
    PREDICTING,
    SCALE,
    SHARED,
    GroupedExperts,
)
from trainer.gpt.pretrained.plain import few_digits
from trainer.gpt.pretrained.rope import NESTED, SCALING, OneBase
from trainer.gpt.pretrained.values import ConfigValues
from trainer.weights.places import AS_IT_IS, IN_COLUMNS, IN_ROWS, TRANSPOSED, Groups

OF_LATENT = {
    "kv_lora_rank": "rank",
    "qk_nope_head_dim": "key_dim",
    "qk_rope_head_dim": "rotary_dim",
    "v_head_dim": "value_dim",
}
"""Keys of sizes -> settings of `LatentConfig`."""
QUERY_RANK, INTERLEAVED, SHARPENS = "q_lora_rank", "rope_interleave", "mscale_all_dim"
NORM_EPSILON = 1e-6
"""What the norms of latents add, whatever a file says of other norms."""
LATENTS, KEYS_AND_VALUES = "self_attn.kv_a_proj_with_mqa.weight", "self_attn.kv_b_proj.weight"
"""Tensors of two weights: of latents and rotated keys; of keys and values, head by head."""
OF_ATTENTION: Mapping[str, tuple[str, Groups]] = {
    "attention/latent/kernel": (LATENTS, TRANSPOSED),
    "attention/rotated/kernel": (LATENTS, TRANSPOSED),
    "attention/latent_norm/scale": ("self_attn.kv_a_layernorm.weight", AS_IT_IS),
    "attention/key/kernel": (KEYS_AND_VALUES, IN_ROWS),
    "attention/value/kernel": (KEYS_AND_VALUES, IN_ROWS),
    "attention/out/kernel": ("self_attn.o_proj.weight", IN_COLUMNS),
}
WHOLE_QUERY: Mapping[str, tuple[str, Groups]] = {
    "attention/query/kernel": ("self_attn.q_proj.weight", IN_ROWS),
}
NARROW_QUERY: Mapping[str, tuple[str, Groups]] = {
    "attention/query_down/kernel": ("self_attn.q_a_proj.weight", TRANSPOSED),
    "attention/query_norm/scale": ("self_attn.q_a_layernorm.weight", AS_IT_IS),
    "attention/query/kernel": ("self_attn.q_b_proj.weight", IN_ROWS),
}


@dataclass(frozen=True)
class TurnsOfLatents(OneBase):
    """Positions on the channels that all heads share, of neighbours or of halves."""

    def fits(self, model: GPTConfig) -> bool:
        """True if a model in its simplest form has positions of this form."""
        return super().fits(replace(model, rope=replace(model.rope, interleaved=False)))

    def read(
        self, values: ConfigValues, written: Mapping[str, Any], model: GPTConfig
    ) -> RopeConfig:
        """The positions of a model, from all values of a file with defaults, and from the values
        written in it."""
        rope = super().read(values, written, model)
        return replace(rope, interleaved=bool(values.values[INTERLEAVED]))

    def values(self, model: GPTConfig) -> dict[str, Any]:
        """The values of a config.json."""
        values: dict[str, Any] = super().values(model) | {INTERLEAVED: model.rope.interleaved}
        if model.scale_dim is not None:
            own = model.latent.of_model(model)
            factor = ((own.key_dim + own.rotary_dim) / model.scale_dim) ** 0.25
            sharpens = (factor - 1) / (0.1 * math.log(model.rope.factor))
            values[SCALING] = {**values[SCALING], SHARPENS: sharpens}
        return values


@dataclass(frozen=True)
class NeighboursTurn(TurnsOfLatents):
    """Positions of neighbouring channels, which no key of a file says."""

    def fits(self, model: GPTConfig) -> bool:
        """True if a model in its simplest form has positions of this form."""
        return model.rope.interleaved and super().fits(model)

    def read(
        self, values: ConfigValues, written: Mapping[str, Any], model: GPTConfig
    ) -> RopeConfig:
        """The positions of a model, from all values of a file with defaults, and from the values
        written in it."""
        known = ConfigValues({**values.values, INTERLEAVED: True}, values.name)
        return super().read(known, written, model)

    def values(self, model: GPTConfig) -> dict[str, Any]:
        """The values of a config.json."""
        return {key: x for key, x in super().values(model).items() if key != INTERLEAVED}


@dataclass(frozen=True, kw_only=True)
class WholeShares(GroupedExperts):
    """Experts whose shares are those of the softmax over all experts."""

    varied: ClassVar[tuple[str, ...]] = ("share_scale",)

    def fits(self, model: GPTConfig, keys: tuple[str, ...]) -> bool:
        """True if a family with these keys has the layers of experts of a model."""
        return not model.experts.normalised and super().fits(model, (*keys, NORMALISED_SHARES))


@dataclass(frozen=True, kw_only=True)
class Latents(Family):
    """A family with latent attention."""

    mixers: ClassVar[tuple[str, ...]] = ("latent",)

    def fits(self, model: GPTConfig) -> bool:
        """True if a model in its simplest form is one of the family."""
        own = model.latent.of_model(model)
        return own.norm_eps == NORM_EPSILON and own.rotary_dim > 0 and super().fits(model)

    def model(self, values: ConfigValues) -> GPTConfig:
        """The model with the options that change its weights or windows."""
        read = values.values
        if read["num_key_value_heads"] != read["num_attention_heads"]:
            needed = f"{read['num_attention_heads']}, as all heads have keys of their own"
            raise values.wrong("num_key_value_heads", needed, read["num_key_value_heads"])
        return super().model(values)

    def layers(self, values: ConfigValues) -> dict[str, Any]:
        """The options of a model in which its layers differ."""
        sizes: Any = {name: values.number(key) for key, name in OF_LATENT.items()}
        if values.values[QUERY_RANK] is not None:
            sizes["query_rank"] = values.number(QUERY_RANK)
        latent = LatentConfig(**sizes, norm_eps=NORM_EPSILON)
        return {"mixers": ("latent",), "latent": latent}

    def layer_values(self, model: GPTConfig) -> dict[str, Any]:
        """The values of a config.json in which layers differ; the family uses some of them."""
        own = model.latent.of_model(model)
        sizes = {key: getattr(own, name) for key, name in OF_LATENT.items()}
        return {**sizes, QUERY_RANK: own.query_rank}

    def values(
        self, model: GPTConfig, model_type: str, *, length: int, dtype: str
    ) -> dict[str, Any]:
        """The values of a config.json from which `model` and `forward` make the model again."""
        values = super().values(model, model_type, length=length, dtype=dtype)
        return values | {"head_dim": model.latent.rotary_dim, "num_key_value_heads": model.heads}

    def table(self, model: GPTConfig, mixer: str) -> dict[str, tuple[str, Groups]]:
        """The tensors of a layer without its feed-forward."""
        del mixer
        query = WHOLE_QUERY if model.latent.query_rank is None else NARROW_QUERY
        return {**OF_LAYER, **query, **OF_ATTENTION}

    def row_groups(self, tensor: str, model: GPTConfig) -> int:
        """Number of groups of rows in a tensor of several weights."""
        return model.heads if tensor == KEYS_AND_VALUES else 1


@dataclass(frozen=True, kw_only=True)
class DeepSeek(Latents):
    """A DeepSeek V3, whose latents have rotary positions."""

    def fits(self, model: GPTConfig) -> bool:
        """True if a model in its simplest form is one of the family."""
        # The logits have another scale only where positions are stretched.
        stretched = model.rope.scaling == "yarn" and model.rope.factor > 1
        return super().fits(replace(model, scale_dim=None) if stretched else model)

    def model(self, values: ConfigValues) -> GPTConfig:
        """The model with the options that change its weights or windows."""
        found, rotary_dim = values.values["head_dim"], values.number("qk_rope_head_dim")
        if found != rotary_dim:  # transformers turns so many channels, and fails.
            raise values.wrong("head_dim", f"qk_rope_head_dim, {rotary_dim}", found)
        return super().model(values)

    def forward(
        self, values: ConfigValues, written: Mapping[str, Any], model: GPTConfig
    ) -> dict[str, Any]:
        """The options of a model that change no weight, from all values of a file with defaults,
        and from the values written in it."""
        found = super().forward(values, written, model)
        entry = ConfigValues(values.values[NESTED], values.name)
        if found["rope"].scaling == "none" or not entry.values.get(SHARPENS):
            return found
        # YaRN's factor of queries and of keys, in all channels.
        factor = 0.1 * entry.real(SHARPENS) * math.log(found["rope"].factor) + 1
        own = model.latent.of_model(model)
        scale_dim = (own.key_dim + own.rotary_dim) * factor**-4
        return found | {"scale_dim": few_digits(scale_dim)}

    def activation_values(self, model: GPTConfig) -> dict[str, Any]:
        """The values of a config.json for activations and scales."""
        return super().activation_values(model) | {"attention_bias": False}


DEEPSEEK_V2 = DeepSeek(
    architecture="DeepseekV2ForCausalLM",
    # Published files have the last ones, which nobody reads; groups count in another choice.
    keys=(
        *(*COUNTS[2:], *SIZES, *GROUPS, SCALE, SHARED, DENSE_FIRST),
        *(*OF_LATENT, QUERY_RANK, "qk_head_dim", "ep_size", "aux_loss_alpha", "seq_aux"),
    ),
    only=SILU
    | {LOSSES[1]: (False,), "attention_bias": (False,), NORMALISED_SHARES: (False,)}
    | {"topk_method": ("greedy",), "scoring_func": ("softmax",), "moe_layer_freq": (1,)},
    windows="no",
    rope=NeighboursTurn(),
    experts=WholeShares(
        config=ExpertsConfig(normalised=False, shared_width=1),
        count=COUNTS[2],
        tensors={path: x for path, x in OF_ROUTER.items() if path != "mlp/choice_bias"},
    ),
)
DEEPSEEK_V3 = DeepSeek(
    architecture="DeepseekV3ForCausalLM",
    # Published files have the last ones, which nobody reads.
    keys=(
        *(*COUNTS[2:], *SIZES, *GROUPS, NORMALISED_SHARES, SCALE, SHARED, DENSE_FIRST),
        *(*OF_LATENT, QUERY_RANK, INTERLEAVED, PREDICTING, "qk_head_dim"),
        *("ep_size", "aux_loss_alpha", "seq_aux"),
    ),
    predicting=PREDICTING,
    # It has no loss that balances experts.
    only=SILU
    | {LOSSES[1]: (False,), "attention_bias": (False,)}
    | {"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",), "moe_layer_freq": (1,)},
    windows="no",
    rope=TurnsOfLatents(),
    experts=GroupedExperts(
        config=ExpertsConfig(scores="sigmoid", choice_bias=True, shared_width=1),
        sizes=SIZES | GROUPS,
        count=COUNTS[2],
        tensors=OF_ROUTER,
    ),
)
