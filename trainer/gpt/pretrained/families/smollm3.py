"""SmolLM3: layers without rotary positions. Imports no jax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from models.config import GPTConfig, RopeConfig
from trainer.gpt.pretrained.families.family import CHOICE, Family
from trainer.gpt.pretrained.rope import OneBase
from trainer.gpt.pretrained.values import ConfigValues

SKIPPED = "no_rope_layers"
"""The key of a number for each layer: 1 with positions, and 0 without."""


@dataclass(frozen=True)
class SomeLayers(OneBase):
    """Positions that are the same in all layers that have them."""

    def fits(self, model: GPTConfig) -> bool:
        """True if a model in its simplest form has positions of this form."""
        return self.fits_bases(model)

    def read(
        self, values: ConfigValues, written: Mapping[str, Any], model: GPTConfig
    ) -> RopeConfig:
        """The positions of a model, from all values of a file with defaults, and from the values
        written in it."""
        rope, flags = super().read(values, written, model), values.values[SKIPPED]
        if len(flags) != model.layers or not set(flags) <= {0, 1}:
            needed = f"a list of {model.layers} numbers that are 0 or 1"
            raise values.wrong(SKIPPED, needed, flags)
        if all(flags):
            return rope
        return replace(rope, bases=tuple(rope.bases[0] if flag else "none" for flag in flags))

    def values(self, model: GPTConfig) -> dict[str, Any]:
        """The values of a config.json, under the names that all versions of transformers read."""
        flags = [int(base is not None) for base in model.layer_bases]
        return super().values(model) | {SKIPPED: flags}


SMOLLM3 = Family(
    architecture="SmolLM3ForCausalLM",
    # Published files have `max_window_layers`, which transformers reads for Qwen only.
    keys=(*CHOICE, SKIPPED, "no_rope_layer_interval"),
    rope=SomeLayers(),
)
