"""Llama: no windows, whatever its file says. Imports no jax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from startrail_jax.errors import UnsupportedError
from trainer.gpt.pretrained.families.family import WINDOWS, Family
from trainer.gpt.pretrained.rope import FULL, SLIDING
from trainer.gpt.pretrained.values import LENGTH, TOO_LARGE, ConfigValues


@dataclass(frozen=True, kw_only=True)
class Llama(Family):
    """A Llama. Its layers in transformers ignore windows, but its cache does not, and forgets keys
    while it generates: unless `layer_types` says otherwise, `sliding_window` applies to all
    layers."""

    def check(self, written: Mapping[str, Any], name: str) -> None:
        """Raises if a layer has a window."""
        size, types = written.get("sliding_window"), written.get("layer_types")
        if types is None and size is None:
            return
        values = ConfigValues(written, name)
        if types is None:
            length = values.number(LENGTH, default=TOO_LARGE)
            is_idle = values.number("sliding_window") >= length
        else:
            is_idle = SLIDING not in types
        if not is_idle:
            raise UnsupportedError(
                f"No layer may have a sliding window in {name!r}: layer_types must be {FULL} for "
                "all, or sliding_window null or at least max_position_embeddings; got "
                f"layer_types={types!r}, sliding_window={size!r}. Correct the file, or use another "
                "model."
            )


LLAMA = Llama(architecture="LlamaForCausalLM", keys=WINDOWS, windows="no")
