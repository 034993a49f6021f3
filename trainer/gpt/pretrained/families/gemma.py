"""Gemma 2 and 3: soft caps, another scale of attention, and positions of local layers. Imports no
jax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from models.config import GPTConfig
from trainer.gpt.pretrained.families.family import SCALES, WINDOWS, Family
from trainer.gpt.pretrained.rope import FULL, LOCAL_BASE, SLIDING, BasesByWindow
from trainer.gpt.pretrained.values import ConfigValues

GELU = "gelu_pytorch_tanh"
OPTIONS = {"mlp": "geglu", "scaled_embedding": True, "norms": "both", "norm_offset": True}
SCALE = "query_pre_attn_scalar"
CAPS = {"attn_logit_softcapping": "softcap", "final_logit_softcapping": "output_softcap"}
"""Keys of caps -> settings of `GPTConfig`."""
ONLY = {"hidden_activation": (GELU,), "use_bidirectional_attention": (None, False)}


@dataclass(frozen=True, kw_only=True)
class Gemma(Family):
    """A Gemma."""

    def fits(self, model: GPTConfig) -> bool:
        """True if a model in its simplest form is one of the family."""
        return super().fits(replace(model, **dict.fromkeys(SCALES)))

    def forward(
        self, values: ConfigValues, written: Mapping[str, Any], model: GPTConfig
    ) -> dict[str, Any]:
        """The options of a model that change no weight, from all values of a file with defaults,
        and from the values written in it."""
        scale, read = values.values[SCALE], values.values
        return super().forward(values, written, model) | {
            **{name: read[key] for key, name in CAPS.items()},
            "scale_dim": None if scale == model.head_dim else scale,
        }

    def layer_values(self, model: GPTConfig) -> dict[str, Any]:
        """The values of a config.json in which layers differ; the family uses some of them."""
        types = [FULL if window is None else SLIDING for window in model.layer_windows]
        return super().layer_values(model) | {"layer_types": types}

    def activation_values(self, model: GPTConfig) -> dict[str, Any]:
        """The values of a config.json for activations and scales."""
        return {
            "hidden_activation": GELU,
            SCALE: model.scale_dim or model.head_dim,
            **{key: getattr(model, name) for key, name in CAPS.items()},
        }


GEMMA2 = Gemma(
    architecture="Gemma2ForCausalLM",
    # Published files have `sliding_window_size` and `hidden_act`, which nobody reads.
    keys=(*WINDOWS, SCALE, *CAPS, "sliding_window_size", "hidden_act"),
    only=ONLY | {"sliding_window_pattern": (2,)},
    options=OPTIONS,
)
GEMMA3 = Gemma(
    architecture="Gemma3ForCausalLM",
    keys=(
        *(*WINDOWS, SCALE, "final_logit_softcapping", "sliding_window_pattern"),
        *(LOCAL_BASE, "hidden_act"),
    ),
    # transformers has the cap of attention, and caps nothing.
    only=ONLY | {"attn_logit_softcapping": (None,)},
    options=OPTIONS | {"qk_norm": True},
    rope=BasesByWindow(LOCAL_BASE),
)
