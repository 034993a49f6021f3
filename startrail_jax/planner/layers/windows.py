"""Which layers of a Hugging Face model have its sliding window, where no list names their types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

Windows = Literal["none", "all", "upper", "no_rope", "pattern"]
"""Which layers have the window: none; all; those from `max_window_layers` on, if
`use_sliding_window` ("upper"); those without rotary positions, if `use_sliding_window` ("no_rope");
or all but the last of every so many ("pattern")."""
WINDOWS: Mapping[str, Windows] = {
    "llama": "none",
    "mistral": "all",
    "qwen2": "upper",
    "qwen3": "upper",
    "smollm3": "no_rope",
    "gemma2": "pattern",
    "gemma3_text": "pattern",
}
"""The same by `model_type`, of the types that `train.py --init-from` takes."""


def sliding_layers(
    which: Windows, layers: int, *, first: int = 0, rotary: Sequence[Any] = (), period: int = 1
) -> list[bool]:
    """Whether each layer has the window.

    Args:
        which: the rule.
        layers: number of layers.
        first: number of the first layer with a window, for "upper".
        rotary: whether each layer has rotary positions, for "no_rope".
        period: of how many layers the last has no window, for "pattern".
    """
    has = {
        "none": lambda i: False,
        "all": lambda i: True,
        "upper": lambda i: i >= first,
        "no_rope": lambda i: not rotary[i],
        "pattern": lambda i: (i + 1) % period != 0,
    }[which]
    return [has(i) for i in range(layers)]
