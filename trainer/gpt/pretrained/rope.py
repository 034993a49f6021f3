"""Rotary positions in a config.json: its keys, and their `RopeConfig`. Imports no jax.

A family has one of these forms, or a form of its own, which is in the file of the family.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from models.config import GPTConfig, RopeConfig
from startrail_jax.errors import UnsupportedError
from trainer.gpt.pretrained.plain import stretches_some
from trainer.gpt.pretrained.values import LENGTH, ConfigValues, require

FULL, SLIDING = "full_attention", "sliding_attention"
"""Types of layers in transformers: without a window, and with one."""
NESTED, SCALING, THETA = "rope_parameters", "rope_scaling", "rope_theta"
LOCAL_BASE = "rope_local_base_freq"
OUTER_LENGTH = "original_max_position_embeddings"
SHARE = "partial_rotary_factor"
ROPE = (NESTED, SCALING, THETA, LOCAL_BASE, OUTER_LENGTH)
"""Keys of a config.json for rotary positions."""
# `rope_type` of config.json -> `RopeConfig.scaling`.
SCALINGS = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
# How the channels are shared by time, height and width, which are one number for text.
KEYS_OF_IMAGES = frozenset({"mrope_section", "mrope_interleaved"})
KEYS = frozenset(
    {
        *("rope_type", "type", THETA, "factor", OUTER_LENGTH, "low_freq_factor"),
        *("high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale"),
        *("mscale_all_dim", "truncate", SHARE),
    }
)
"""Keys of an object of rotary positions."""


@dataclass(frozen=True)
class OneBase:
    """Positions that are the same in all layers; all channels turn."""

    keys: ClassVar[frozenset[str]] = KEYS
    truncate: ClassVar[tuple[Any, ...]] = (True, None)
    """Values of YaRN's `truncate`, which has the blend begin at whole pairs of channels."""
    shares: ClassVar[tuple[Any, ...] | None] = (1.0, None)
    """Values of the share of the channels that turn; None for any."""

    def fits(self, model: GPTConfig) -> bool:
        """True if a model in its simplest form has positions of this form."""
        return None not in model.layer_bases and self.fits_bases(model)

    @staticmethod
    def fits_bases(model: GPTConfig) -> bool:
        """True if all layers with positions have the same ones, on all channels."""
        bases = {base for base in model.layer_bases if base is not None}
        return len(bases) <= 1 and not stretches_some(model) and _turns_whole_pairs(model)

    def check(self, written: Mapping[str, Any], name: str) -> None:
        """Raises if a key or value of the positions is unknown: none may be left out silently."""
        for key in (NESTED, SCALING):
            if written.get(key) is not None:
                for entry in self._objects(key, ConfigValues(written, name)):
                    self._check_object(entry, name)

    def _objects(self, key: str, written: ConfigValues) -> Iterable[Any]:
        """The objects of positions under a key."""
        if not isinstance(written.values[key], dict):
            raise written.wrong(key, "an object", written.values[key])
        return (written.values[key],)

    def _check_object(self, entry: Mapping[str, Any], name: str) -> None:
        scaling = entry.get("rope_type", entry.get("type", "default"))
        unknown = sorted(entry.keys() - self.keys)
        if not isinstance(scaling, str) or scaling not in SCALINGS or unknown:
            raise UnsupportedError(
                f"rope_type must be one of {', '.join(SCALINGS)} in {name!r}; got {scaling!r}"
                f"{f' with {unknown}' if unknown else ''}, which is not supported. Use another "
                "model, or rope_type default and --model.rope.scaling ntk."
            )
        require("truncate", entry.get("truncate"), self.truncate, name)
        if self.shares is not None:
            require(SHARE, entry.get(SHARE), self.shares, name)

    def read(
        self, values: ConfigValues, written: Mapping[str, Any], model: GPTConfig
    ) -> RopeConfig:
        """The positions of a model, from all values of a file with defaults, and from the values
        written in it."""
        del model
        return read_rope(values, values.values[NESTED], written)

    def values(self, model: GPTConfig) -> dict[str, Any]:
        """The values of a config.json, under the names that all versions of transformers read."""
        return rope_values(model)


@dataclass(frozen=True)
class BasesByWindow(OneBase):
    """Positions of two kinds: never stretched in layers with a window, and others in layers
    without."""

    local_key: str | None = None
    """The key of the base of layers with a window; None where each type of layer has an object."""

    def fits(self, model: GPTConfig) -> bool:
        """True if positions differ only between layers with a window and layers without."""
        pairs = set(zip(model.layer_windows, model.layer_bases, strict=True))
        if len({window for window, _ in pairs}) < len(pairs) or None in model.layer_bases:
            return False
        if not _turns_whole_pairs(model):
            return False
        if all(window is None for window, _ in pairs):
            return True
        return model.rope.scaling == "none" or model.rope.stretches == "global"

    def _objects(self, key: str, written: ConfigValues) -> Iterable[Any]:
        if key != NESTED:
            return super()._objects(key, written)
        entry = written.values[key]
        if not isinstance(entry, dict) or not entry.keys() <= {FULL, SLIDING}:
            raise written.wrong(key, f"an object with {FULL} and {SLIDING}", entry)
        if not all(isinstance(x, dict) for x in entry.values()):
            raise written.wrong(key, "of objects", entry)
        return entry.values()

    def read(
        self, values: ConfigValues, written: Mapping[str, Any], model: GPTConfig
    ) -> RopeConfig:
        """The positions of a model, from all values of a file with defaults, and from the values
        written in it."""
        objects, windows = values.values[NESTED], model.layer_windows
        rope, local = (read_rope(values, objects[x], written) for x in (FULL, SLIDING))
        if local != RopeConfig(bases=local.bases):
            raise UnsupportedError(
                f"The rotary positions of {SLIDING} must be of rope_type default in "
                f"{values.name!r}; got {objects[SLIDING]!r}, which is not supported. Use another "
                "model."
            )
        if set(windows) == {None}:
            return rope
        if None not in windows:
            return local
        # Also without a scaling: a flag may add one, and local layers are never stretched.
        bases = tuple((rope if window is None else local).bases[0] for window in windows)
        return replace(rope, bases=bases, stretches="global")

    def values(self, model: GPTConfig) -> dict[str, Any]:
        """The values of a config.json, under the names that all versions of transformers read."""
        pairs = dict(zip(model.layer_windows, model.layer_bases, strict=True))
        local = next((base for window, base in pairs.items() if window is not None), None)
        base = pairs.get(None, model.layer_bases[0])
        of_global = replace(model.rope, bases=(base,), stretches="all")
        values = rope_values(replace(model, rope=of_global, windows=("none",)))
        if local is None:
            return values
        if self.local_key is not None:
            return values | {self.local_key: local}
        scaling = values[SCALING] or {"rope_type": "default"}
        objects = {FULL: {**scaling, THETA: base}}
        objects[SLIDING] = {"rope_type": "default", THETA: local}
        return {NESTED: objects}


def _turns_whole_pairs(model: GPTConfig) -> bool:
    rope = model.rope
    return rope.truncate and rope.channels is None and not rope.interleaved


def rope_values(model: GPTConfig) -> dict[str, Any]:
    """The values of a config.json for layers with the same positions."""
    rope = model.rope
    bases = model.of_attention(model.layer_bases)
    base = next((x for x in bases if x is not None), 10_000.0)
    if rope.scaling == "ntk":  # It is nothing but a larger base: see `models.rope`.
        half = (rope.channels or model.head_dim) // 2
        base *= rope.factor ** (half / max(half - 1, 1))
    if rope.scaling in ("none", "ntk"):
        return {THETA: base, SCALING: None}
    scaling: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.original_length is not None:
        scaling[OUTER_LENGTH] = rope.original_length
    if rope.scaling == "llama3":
        most, least = rope.turns or (4.0, 1.0)
        scaling |= {"high_freq_factor": most, "low_freq_factor": least}
    if rope.scaling == "yarn":
        most, least = rope.turns or (32.0, 1.0)
        scaling |= {"beta_fast": most, "beta_slow": least}
        # Versions of transformers differ in what they make of a factor that is left out.
        factor = rope.attention_factor
        scaling["attention_factor"] = paper_factor(rope.factor) if factor is None else factor
        scaling |= {} if rope.truncate else {"truncate": False}
    return {THETA: base, SCALING: scaling}


def rope_length(rope: RopeConfig, length: int) -> int:
    """The length that positions are stretched to, or `length`, whichever is larger."""
    if rope.original_length is None:
        return length
    return max(length, round(rope.factor * rope.original_length))


def paper_factor(factor: float) -> float:
    """The factor of queries and keys in the paper on YaRN."""
    return 0.1 * math.log(factor) + 1


def read_rope(
    values: ConfigValues, entry: Mapping[str, Any], written: Mapping[str, Any]
) -> RopeConfig:
    """Reads one object of rotary positions, with the defaults of transformers."""
    rope = ConfigValues(entry, values.name)
    base, name = rope.real(THETA), entry["rope_type"]
    if name == "default":
        # transformers does not look at a factor.
        return RopeConfig(bases=(base,))
    # Of the two places, transformers prefers the outer one.
    length = values.values[LENGTH]
    if name == "yarn" and written.get(OUTER_LENGTH, length) is None:
        raise values.wrong(OUTER_LENGTH, "a whole number", None)
    inner = rope.number(OUTER_LENGTH, default=length)
    original = ConfigValues(written, values.name).number(OUTER_LENGTH, default=inner)
    if name == "yarn" and entry.get("factor") is None and 0 < original < length:
        factor = length / original  # YaRN may leave it to the two lengths.
    else:
        factor = rope.real("factor")
    if factor < 1:
        raise rope.wrong("factor", "at least 1", factor)
    attention_factor = _attention_factor(rope, factor) if name == "yarn" else None
    stretches = factor != 1 or attention_factor is not None
    scaling: Any = SCALINGS[name] if stretches else "none"
    if scaling in ("none", "linear"):
        return RopeConfig(bases=(base,), scaling=scaling, factor=factor)
    if scaling == "llama3":
        turns = rope.real("high_freq_factor"), rope.real("low_freq_factor")
        standard = (4.0, 1.0)
    else:
        turns = rope.real("beta_fast", default=32.0), rope.real("beta_slow", default=1.0)
        standard = (32.0, 1.0)
    return RopeConfig(
        bases=(base,),
        scaling=scaling,
        factor=factor,
        original_length=original,
        turns=None if turns == standard else turns,
        attention_factor=attention_factor,
        truncate=name != "yarn" or entry.get("truncate") is not False,
    )


def _attention_factor(rope: ConfigValues, factor: float) -> float | None:
    """YaRN's factor of queries and keys; None for the factor of the paper."""
    if rope.values.get("attention_factor") is not None:
        written = rope.real("attention_factor")
        return None if written == paper_factor(factor) else written
    if not rope.values.get("mscale") or not rope.values.get("mscale_all_dim"):
        return None
    above, below = (
        0.1 * rope.real(key) * math.log(factor) + 1 for key in ("mscale", "mscale_all_dim")
    )
    if not below:
        raise rope.wrong("mscale_all_dim", "above 0", rope.values["mscale_all_dim"])
    return above / below
