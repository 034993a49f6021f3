"""Nemotron-H and Nemotron 3: layers of one part each, Mamba-2, attention without positions, an MLP
or experts. Imports no jax."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from models.config import GPTConfig, RopeConfig
from models.parts.experts import ExpertsConfig
from models.parts.gpt import stack_pairs
from models.parts.ssd import SSDConfig
from trainer.gpt.pretrained.families.experts import COUNTS, NORMALISED_SHARES, SIZES, ExpertLayers
from trainer.gpt.pretrained.families.family import OF_ATTENTION, OF_MODEL, Family
from trainer.gpt.pretrained.families.glm import GROUPS, PREDICTING, SCALE
from trainer.gpt.pretrained.plain import pattern
from trainer.gpt.pretrained.rope import FULL, OneBase
from trainer.gpt.pretrained.values import ConfigValues, require
from trainer.weights.files import Tensors
from trainer.weights.places import (
    AS_IT_IS,
    IN_COLUMNS,
    IN_ROWS,
    OF_CONV,
    OF_HEADS,
    TRANSPOSED,
    Groups,
)

BLOCKS, EPSILON, LATENT = "layers_block_type", "layer_norm_epsilon", "moe_latent_size"
KINDS = {
    "linear_attention": ("ssd", "none"),
    FULL: ("attention", "none"),
    "mlp": ("none", "mlp"),
    "moe": ("none", "experts"),
}
"""Types of layers in transformers -> mixer and feed-forward."""
OF_SSD = {
    "mamba_num_heads": "heads",
    "mamba_head_dim": "head_dim",
    "n_groups": "groups",
    "ssm_state_size": "state_dim",
    "conv_kernel": "conv",
}
"""Keys of sizes -> settings of `SSDConfig`."""
OF_EXPERTS = {
    **SIZES,
    "moe_shared_expert_intermediate_size": "shared_width",
    **GROUPS,
}
IDLE = (
    *("chunk_size", "expand", "num_logits_to_keep", "use_mamba_kernels", "mamba_ssm_cache_dtype"),
    *("time_step_max", "time_step_floor", "rescale_prenorm_residual", "mtp_layers_block_type"),
    *("mtp_hybrid_override_pattern", "moe_shared_expert_overlap", "norm_eps", "hidden_dropout"),
)
"""Keys that change no logits in transformers."""
PREFIX = "backbone."
"""Prefix of the names of the tensors in files."""
OF_BLOCKS: Mapping[str, tuple[str, Groups]] = {
    "attention_norm/scale": ("norm.weight", AS_IT_IS),
    "mlp_norm/scale": ("norm.weight", AS_IT_IS),
}
_OF_IN_PROJ = ("out_gate", "value", "key", "query")
MIXERS: Mapping[str, Mapping[str, tuple[str, Groups]]] = {
    "attention": {
        path: (name.replace("self_attn.", "mixer."), groups)
        for path, (name, groups) in OF_ATTENTION.items()
        if path.endswith("kernel")
    },
    "ssd": {
        **{f"attention/{x}/kernel": ("mixer.in_proj.weight", IN_ROWS) for x in _OF_IN_PROJ},
        "attention/step/kernel": ("mixer.in_proj.weight", TRANSPOSED),
        **{f"attention/{x}_conv": ("mixer.conv1d.weight", OF_CONV) for x in _OF_IN_PROJ[1:]},
        **{f"attention/{x}_conv_bias": ("mixer.conv1d.bias", OF_HEADS) for x in _OF_IN_PROJ[1:]},
        "attention/decay_rate": ("mixer.A_log", AS_IT_IS),
        "attention/step_bias": ("mixer.dt_bias", AS_IT_IS),
        "attention/skip": ("mixer.D", AS_IT_IS),
        "attention/out_scale": ("mixer.norm.weight", OF_HEADS),
        "attention/out/kernel": ("mixer.out_proj.weight", IN_COLUMNS),
    },
    "none": {},
}
"""Weight of a layer -> tensor of a layer, by mixer: rows of a tensor are in this order."""
FEEDS: Mapping[str, Mapping[str, tuple[str, Groups]]] = {
    "none": {},
    "mlp": {
        "mlp/up/kernel": ("mixer.up_proj.weight", TRANSPOSED),
        "mlp/down/kernel": ("mixer.down_proj.weight", TRANSPOSED),
    },
    "experts": {
        "mlp/router": ("mixer.gate.weight", TRANSPOSED),
        "mlp/choice_bias": ("mixer.gate.e_score_correction_bias", AS_IT_IS),
        "mlp/expert_up/kernel": ("mixer.experts.{}.up_proj.weight", TRANSPOSED),
        "mlp/expert_down/kernel": ("mixer.experts.{}.down_proj.weight", TRANSPOSED),
        "mlp/latent_in/kernel": ("mixer.fc1_latent_proj.weight", TRANSPOSED),
        "mlp/latent_out/kernel": ("mixer.fc2_latent_proj.weight", TRANSPOSED),
        "mlp/shared/up/kernel": ("mixer.shared_experts.up_proj.weight", TRANSPOSED),
        "mlp/shared/down/kernel": ("mixer.shared_experts.down_proj.weight", TRANSPOSED),
    },
}


@dataclass(frozen=True)
class NoPositions(OneBase):
    """No rotary positions, whatever a file says."""

    def fits(self, model: GPTConfig) -> bool:
        """True if a model in its simplest form has none."""
        return model.rope == RopeConfig(bases=("none",))

    def check(self, written: Mapping[str, Any], name: str) -> None:
        """Takes all values, of which transformers takes no notice either."""

    def read(
        self, values: ConfigValues, written: Mapping[str, Any], model: GPTConfig
    ) -> RopeConfig:
        """The positions of a model."""
        del values, written, model
        return RopeConfig(bases=("none",))

    def values(self, model: GPTConfig) -> dict[str, Any]:
        """The values of a config.json."""
        del model
        return {}


@dataclass(frozen=True, kw_only=True)
class BlocksOfExperts(ExpertLayers):
    """Experts without gates, in layers of their own."""

    varied: ClassVar[tuple[str, ...]] = ("groups", "top_groups", "share_scale", "latent_width")

    def fits_dense(self, feeds: tuple[str, ...], keys: tuple[str, ...]) -> bool:
        """True: layers without experts may be any."""
        del feeds, keys
        return True

    def read(self, values: ConfigValues, keys: tuple[str, ...], layers: int) -> dict[str, Any]:
        """The options of a model for its layers of experts, and the list of these layers."""
        found = super().read(values, keys, layers)
        latent = None if values.values[LATENT] is None else values.number(LATENT)
        more: Any = {"share_scale": values.real(SCALE), "latent_width": latent}
        return found | {"experts": replace(found["experts"], **more)}

    def feeds(self, values: ConfigValues, layers: int) -> list[str]:
        """The feed-forward of each layer."""
        return [KINDS[x][1] for x in values.values[BLOCKS]]

    def values(self, model: GPTConfig) -> dict[str, Any]:
        """The values of a config.json for experts; a family uses some of them."""
        experts = model.experts
        more = {SCALE: experts.share_scale, LATENT: experts.latent_width}
        return super().values(model) | more


@dataclass(frozen=True, kw_only=True)
class NemotronH(Family):
    """A model whose layers have one part each."""

    sizes_needed: ClassVar[tuple[str, ...]] = ("hidden_size",)
    module_of_experts: ClassVar[str] = "mixer.experts"
    never_adapted: ClassVar[tuple[str, ...]] = ("mixer.out_proj.weight",)
    needs_experts: ClassVar[bool] = False
    mixers: ClassVar[tuple[str, ...]] = ("attention", "ssd", "none")
    feed_forwards: ClassVar[tuple[str, ...]] = ("mlp", "experts", "none")
    layer_types: ClassVar[tuple[str, ...]] = tuple(KINDS)

    def fits(self, model: GPTConfig) -> bool:
        """True if a model in its simplest form is one of the family."""
        pairs = stack_pairs(model).values()
        return (
            all(pair in KINDS.values() for pair in pairs)
            and model.ssd.norm_eps is None
            and not model.tied_head
            and super().fits(model)
        )

    def check(self, written: Mapping[str, Any], name: str) -> None:
        """Raises if values of a file, whose keys are known, are not supported together."""
        # Here transformers ties nothing.
        key = "tie_word_embeddings"
        require(key, written.get(key, False), (False,), name)

    def depth(self, values: ConfigValues) -> int:
        """The number of layers."""
        return len(values.values[BLOCKS])

    def layers(self, values: ConfigValues) -> dict[str, Any]:
        """The options of a model in which its layers differ."""
        blocks = values.values[BLOCKS]
        if FULL not in blocks:
            raise values.wrong(BLOCKS, f"a list of types of layers, among them {FULL}", blocks)
        mixers, feeds = zip(*(KINDS[x] for x in blocks), strict=True)
        options: dict[str, Any] = {"mixers": pattern(mixers), "feed_forwards": pattern(feeds)}
        if "ssd" in mixers:
            sizes: Any = {name: values.number(key) for key, name in OF_SSD.items()}
            more: Any = {"least_step": values.real("time_step_min")}
            more["conv_bias"] = bool(values.values["use_conv_bias"])
            options["ssd"] = SSDConfig(**sizes, **more)
        return options

    def has_experts(self, values: ConfigValues) -> bool:
        """Whether the model of a file has layers of experts."""
        return "moe" in values.values[BLOCKS]

    def layer_values(self, model: GPTConfig) -> dict[str, Any]:
        """The values of a config.json in which layers differ; the family uses some of them."""
        kinds = {pair: name for name, pair in KINDS.items()}
        pairs = zip(model.layer_mixers, model.layer_feed_forwards, strict=True)
        ssd = model.ssd.of_model(model)
        return {
            BLOCKS: [kinds[pair] for pair in pairs],
            **{key: getattr(ssd, name) for key, name in OF_SSD.items()},
            "time_step_min": ssd.least_step,
            "use_conv_bias": ssd.conv_bias,
            EPSILON: model.norm_eps,
        }

    def activation_values(self, model: GPTConfig) -> dict[str, Any]:
        """The values of a config.json for activations and scales."""
        del model
        return {"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu"}

    def tables(self, model: GPTConfig) -> dict[str, Mapping[str, tuple[str, Groups]]]:
        """Stack of layers -> weight of a layer -> tensor of a layer."""
        return {
            stack: {**OF_BLOCKS, **MIXERS[mixer], **FEEDS[feed_forward]}
            for stack, (mixer, feed_forward) in stack_pairs(model).items()
        }

    def adapt(self, tensors: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
        """Tensors of a file under the names, and with the shapes, that the model needs: some
        versions of transformers write names of their own."""
        kinds = ("shapes", "dtypes", "slices")
        named: Any = {
            kind: {_in_file(name): x for name, x in getattr(tensors, kind).items()}
            for kind in kinds
        }
        return super().adapt(replace(tensors, **named), shapes)


def _in_file(name: str) -> str:
    return PREFIX + name.removeprefix("model.") if name.startswith("model.") else name


NEMOTRON_H = NemotronH(
    architecture="NemotronHForCausalLM",
    keys=(
        *(BLOCKS, "hybrid_override_pattern", EPSILON, *OF_SSD, "time_step_min", "use_conv_bias"),
        *(COUNTS[2], *OF_EXPERTS, LATENT, NORMALISED_SHARES, SCALE, PREDICTING, *IDLE),
    ),
    only={
        "mlp_hidden_act": ("relu2",),
        "mamba_hidden_act": ("silu", "swish"),
        "use_bias": (False,),
        "mamba_proj_bias": (False,),
        "residual_in_fp32": (False,),
        "sliding_window": (None,),
        "time_step_limit": ([0.0, math.inf],),
        "n_shared_experts": (1,),
        "output_router_logits": (False,),
    },
    options={"mlp": "relu2"},
    windows="no",
    rope=NoPositions(),
    predicting=PREDICTING,
    epsilon=EPSILON,
    prefix=PREFIX,
    of_model={
        "embedding/embedding": (f"{PREFIX}embeddings.weight", OF_MODEL["embedding/embedding"][1]),
        "norm/scale": (f"{PREFIX}norm_f.weight", AS_IT_IS),
        "head/kernel": OF_MODEL["head/kernel"],
        "score/kernel": OF_MODEL["score/kernel"],
    },
    experts=BlocksOfExperts(
        config=ExpertsConfig(
            scores="sigmoid", choice_bias=True, shared_width=1, activation="relu2"
        ),
        sizes=OF_EXPERTS,
        count=COUNTS[2],
    ),
)
