"""What a Hugging Face config.json says of rotary positions, and back. Imports no jax."""

from __future__ import annotations

import math
from typing import Any

from startrail_jax.errors import UnsupportedError
from trainer.gpt.config import GPTConfig, RopeConfig
from trainer.gpt.pretrained.values import ConfigValues

# `rope_type` of config.json -> `RopeConfig.scaling`.
SCALINGS = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
# Of a rope that is not understood, nothing may be left out silently.
ROPE_KEYS = {
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"),
    *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"),
    *("mscale", "mscale_all_dim", "truncate", "partial_rotary_factor"),
}


def read_rope(read: ConfigValues, length: int) -> RopeConfig:
    """The rotary positions; `rope_parameters` is the name since transformers 5.

    Args:
        read: config.json.
        length: tokens of the sequences that the model is made for.

    Raises:
        ValueError: if a value is wrong or missing.
        NotImplementedError: if they are of a kind that is not supported.
    """
    # transformers prefers the older name.
    given = read.values.get("rope_scaling") or read.values.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise read.wrong("rope_parameters", "an object", given)
    name = given.get("rope_type", given.get("type", "default"))
    unknown = sorted(given.keys() - ROPE_KEYS)
    if not isinstance(name, str) or name not in SCALINGS or unknown:
        raise UnsupportedError(
            f"rope_type must be one of {', '.join(SCALINGS)} in {read.name!r}; got {name!r}"
            f"{f' with {unknown}' if unknown else ''}, which is not supported. Use another model, "
            "or rope_type default and --model.rope.scaling ntk."
        )
    rope = ConfigValues(given, read.name)
    rope.require("truncate", True, default=True)
    rope.require("partial_rotary_factor", 1.0, default=1.0)
    base = (rope if "rope_theta" in given else read).real("rope_theta")
    if name == "default":
        # transformers does not look at a factor.
        return RopeConfig(base=base)
    # Of the two places, transformers prefers the outer one.
    key = "original_max_position_embeddings"
    original = read.number(key, default=rope.number(key, default=length))
    factor = _factor(rope, original, length)
    attention_factor = _attention_factor(rope, factor) if name == "yarn" else None
    stretches = factor != 1 or attention_factor is not None
    scaling: Any = SCALINGS[name] if stretches else "none"
    if scaling in ("none", "linear"):
        return RopeConfig(base=base, scaling=scaling, factor=factor)
    if scaling == "llama3":
        turns = rope.real("high_freq_factor"), rope.real("low_freq_factor")
        standard = (4.0, 1.0)
    else:
        turns = rope.real("beta_fast", default=32.0), rope.real("beta_slow", default=1.0)
        standard = (32.0, 1.0)
    return RopeConfig(
        base=base,
        scaling=scaling,
        factor=factor,
        original_length=original,
        turns=None if turns == standard else turns,
        attention_factor=attention_factor,
    )


def _factor(rope: ConfigValues, original: int, length: int) -> float:
    """The factor of the positions. YaRN may leave it to the two lengths, as in transformers."""
    name = rope.values.get("rope_type") or rope.values.get("type")
    if name == "yarn" and rope.values.get("factor") is None and 0 < original < length:
        return length / original
    factor = rope.real("factor")
    if factor < 1:
        raise rope.wrong("factor", "at least 1", factor)
    return factor


def _attention_factor(rope: ConfigValues, factor: float) -> float | None:
    """YaRN's factor of queries and keys; None for that of the paper."""
    if rope.values.get("attention_factor") is not None:
        given = rope.real("attention_factor")
        return None if given == _paper_factor(factor) else given
    if not rope.values.get("mscale") or not rope.values.get("mscale_all_dim"):
        return None
    above, below = (
        0.1 * rope.real(key) * math.log(factor) + 1 for key in ("mscale", "mscale_all_dim")
    )
    if not below:
        raise rope.wrong("mscale_all_dim", "above 0", rope.values["mscale_all_dim"])
    return above / below


def _paper_factor(factor: float) -> float:
    return 0.1 * math.log(factor) + 1


def rope_length(rope: RopeConfig, length: int) -> int:
    """Tokens of the sequences that stretched positions are for, of which transformers computes.

    Args:
        rope: the positions.
        length: the least length.
    """
    if rope.original_length is None:
        return length
    return max(length, round(rope.factor * rope.original_length))


def rope_values(model: GPTConfig) -> dict[str, Any]:
    """The rotary positions, under the names that all versions of transformers read."""
    rope = model.rope
    base = rope.base
    if rope.scaling == "ntk":  # It is nothing but a larger base: see `models.rope`.
        half = model.head_dim // 2
        base *= rope.factor ** (half / max(half - 1, 1))
    if rope.scaling in ("none", "ntk"):
        return {"rope_theta": base, "rope_scaling": None}
    scaling: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.original_length is not None:
        scaling["original_max_position_embeddings"] = rope.original_length
    if rope.scaling == "llama3":
        most, least = rope.turns or (4.0, 1.0)
        scaling |= {"high_freq_factor": most, "low_freq_factor": least}
    if rope.scaling == "yarn":
        most, least = rope.turns or (32.0, 1.0)
        scaling |= {"beta_fast": most, "beta_slow": least}
        # Versions of transformers differ in what they make of a factor that is left out.
        factor = rope.attention_factor
        scaling["attention_factor"] = _paper_factor(rope.factor) if factor is None else factor
    return {"rope_theta": base, "rope_scaling": scaling}
