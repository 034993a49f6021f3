"""Qwen3.5 and Qwen3-Next: hybrids of the gated delta rule, with rotary positions on some channels.
Imports no jax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from models.config import GPTConfig, RopeConfig
from models.parts.experts import ExpertsConfig
from trainer.gpt.pretrained.families.experts import (
    COUNTS,
    DENSE,
    LOSSES,
    NORMALISED_SHARES,
    WITH_SHARED,
    ExpertLayers,
)
from trainer.gpt.pretrained.families.family import SILU
from trainer.gpt.pretrained.families.hybrid import SIZES, Hybrid
from trainer.gpt.pretrained.rope import (
    KEYS,
    KEYS_OF_IMAGES,
    NESTED,
    SCALING,
    SHARE,
    THETA,
    OneBase,
)
from trainer.gpt.pretrained.values import ConfigValues
from trainer.weights.places import IN_ROWS, TRANSPOSED, Groups

OF_HYBRID = ("layer_types", "full_attention_interval", SHARE, *SIZES)
PREDICTING = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype")
"""Keys of the heads that predict more tokens, and of the type of states in other programs."""
BY_KEY_HEAD = ("linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight")
"""Tensors of Qwen3-Next whose rows are grouped by the key heads of linear attention."""
OF_QWEN3_NEXT: Mapping[str, tuple[str, Groups]] = {
    "attention/query/kernel": (BY_KEY_HEAD[0], IN_ROWS),
    "attention/key/kernel": (BY_KEY_HEAD[0], IN_ROWS),
    "attention/value/kernel": (BY_KEY_HEAD[0], IN_ROWS),
    "attention/out_gate/kernel": (BY_KEY_HEAD[0], IN_ROWS),
    "attention/beta/kernel": (BY_KEY_HEAD[1], TRANSPOSED),
    "attention/decay/kernel": (BY_KEY_HEAD[1], TRANSPOSED),
}


@dataclass(frozen=True)
class ShareTurns(OneBase):
    """Positions that are the same in all layers; a share of the channels turns."""

    keys: ClassVar[frozenset[str]] = KEYS | KEYS_OF_IMAGES
    shares: ClassVar[tuple[Any, ...] | None] = None

    def fits(self, model: GPTConfig) -> bool:
        """True if a model in its simplest form has positions of this form."""
        return super().fits(replace(model, rope=replace(model.rope, channels=None)))

    def read(
        self, values: ConfigValues, written: Mapping[str, Any], model: GPTConfig
    ) -> RopeConfig:
        """The positions of a model, from all values of a file with defaults, and from the values
        written in it."""
        rope = super().read(values, written, model)
        share = ConfigValues(values.values[NESTED], values.name).real(SHARE, default=1.0)
        return replace(rope, channels=int(model.head_dim * share))

    def values(self, model: GPTConfig) -> dict[str, Any]:
        """The values of a config.json."""
        values = super().values(model)
        scaling = values[SCALING] or {"rope_type": "default"}
        share = (model.rope.channels or model.head_dim) / model.head_dim
        return {NESTED: {THETA: values[THETA], **scaling, SHARE: share}}


@dataclass(frozen=True, kw_only=True)
class Qwen3Next(Hybrid):
    """Qwen3-Next, whose tensors of linear attention have rows of all weights for each key head."""

    def row_groups(self, tensor: str, model: GPTConfig) -> int:
        """Number of groups of rows in a tensor of several weights; each group has rows of all of
        them."""
        return model.linear.of_model(model).key_heads if tensor in BY_KEY_HEAD else 1


QWEN3_5 = Hybrid(
    architecture="Qwen3_5ForCausalLM",
    keys=(*OF_HYBRID, *PREDICTING),
    only=SILU
    | {
        "attn_output_gate": (True, None),
        "output_gate_type": ("swish", "silu", None),
        "mlp_only_layers": ([], None),
    },
    options={"qk_norm": True, "attention_gate": True, "norm_offset": True},
    windows="no",
    rope=ShareTurns(),
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    architecture="Qwen3_5MoeForCausalLM",
    keys=(*QWEN3_5.keys, *COUNTS, *WITH_SHARED, *LOSSES),
    experts=ExpertLayers(config=ExpertsConfig(shared_width=1, shared_gate=True), sizes=WITH_SHARED),
)
QWEN3_NEXT = Qwen3Next(
    architecture="Qwen3NextForCausalLM",
    keys=(*OF_HYBRID, *COUNTS, *WITH_SHARED, NORMALISED_SHARES, *DENSE, *LOSSES),
    options=QWEN3_5.options,
    windows="no",
    rope=QWEN3_5.rope,
    experts=QWEN3_5_MOE.experts,
    linear_tensors=OF_QWEN3_NEXT,
)
