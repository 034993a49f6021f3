"""What a Hugging Face config.json says of the layers of a model, and back. Imports no jax.

Its values, with errors that name them; rotary positions; layers that differ from each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from startrail_jax.errors import InputError, UnsupportedError
from startrail_jax.planner.layers import Windows, shortest, sliding_layers
from trainer.gpt.config import GPTConfig, RopeConfig

TOO_LARGE = 1 << 31
"""No size of a model is so large."""
# `rope_type` of config.json -> `RopeConfig.scaling`.
SCALINGS = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
# Of a rope that is not understood, nothing may be left out silently.
ROPE_KEYS = {
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"),
    *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"),
    *("mscale", "mscale_all_dim", "truncate", "partial_rotary_factor"),
}
GLOBAL, LOCAL = "full_attention", "sliding_attention"


class ConfigValues:
    """The values of a config.json, or of an object in it.

    A default of an argument is for values that are null or missing.
    """

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        """Keeps the values, and the name of the file for messages."""
        self.values = values
        self.name = name

    def number(
        self, key: str, *, default: int | None = None, least: int = 1, most: int = TOO_LARGE - 1
    ) -> int:
        """A whole number from `least` to `most`; the default may be another."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(key, f"a whole number from {least} to {most}", value)
        return value

    def real(self, key: str, *, default: float | None = None) -> float:
        """A finite number."""
        value: Any = self.values.get(key)
        value = default if value is None else value
        try:
            if type(value) in (int, float) and math.isfinite(value):
                return float(value)
        except OverflowError:  # Of a whole number that no float holds.
            pass
        raise self.wrong(key, "a finite number", value)

    def flag(self, key: str) -> bool:
        """True or false."""
        value = self.values.get(key)
        if type(value) is not bool:
            raise self.wrong(key, "true or false", value)
        return value

    def require(self, key: str, supported: Any, *, default: Any = None) -> None:
        """Raises unless something has the only value that is supported."""
        value = self.values.get(key)
        value = default if value is None else value
        if value != supported:
            raise UnsupportedError(
                f"{key} must be {supported!r} in {self.name!r}; got {value!r}, which is not "
                "supported. Use another model."
            )

    def wrong(self, key: str, wanted: str, value: Any) -> InputError:
        """The error of a value that is not what it must be."""
        given = repr(value)
        given = given if len(given) <= 200 else f"{given[:200]}..."
        return InputError(
            f"{key} must be {wanted} in {self.name!r}; got {given}. Download the file again."
        )


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


def plain(model: GPTConfig) -> GPTConfig:
    """The same model, said in the simplest way: two models are equal if these are."""
    windows, bases = shortest(model.layer_windows), shortest(model.layer_bases)
    model = replace(model, window=None, windows=None, no_rope_every=None)
    if model.scale_dim == model.head_dim:
        model = replace(model, scale_dim=None)
    options = window_options(windows)
    base, every = model.rope.base, None
    if len(bases) == 1 and bases[0] is not None:
        base, named = bases[0], None
    elif bases[-1] is None and set(bases[:-1]) == {base}:
        every, named = len(bases), None
    else:
        named = tuple("none" if x is None else x for x in bases)
    stretches = model.rope.stretches if _stretches_some(model) else "all"
    rope = replace(model.rope, base=base, bases=named, stretches=stretches)
    return replace(model, rope=rope, no_rope_every=every, **options)


def _stretches_some(model: GPTConfig) -> bool:
    """Whether positions are stretched in the layers without a window, and there are others."""
    rope = model.rope
    mixed = set(model.layer_windows) != {None}
    return rope.stretches == "global" and rope.scaling != "none" and mixed


def window_options(windows: Sequence[int | None]) -> dict[str, Any]:
    """The options of a model whose layers have these windows."""
    first, *others = shortest(windows)
    if not others:
        return {"window": first}
    return {"windows": tuple("none" if x is None else x for x in (first, *others))}


def read_windows(
    read: ConfigValues, which: Windows, layers: int, skips: Sequence[bool]
) -> tuple[int | None, ...]:
    """The sliding window of each layer; None for a layer without one.

    Args:
        read: config.json.
        which: layers with a window where it names no types.
        layers: number of layers.
        skips: whether each layer has no rotary positions.

    Raises:
        ValueError: if a value is wrong or missing.
        NotImplementedError: if layers are of a type that is not supported.
    """
    size, types = read.values.get("sliding_window"), read.values.get("layer_types")
    if which in ("upper", "no_rope") and not read.flag("use_sliding_window"):
        size = None
    if which == "none":
        _check_without_windows(read, layers)
    if types is None:
        first = read.number("max_window_layers", least=0) if which == "upper" else 0
        period = read.number("sliding_window_pattern") if which == "pattern" else 1
        rotary = [not skipped for skipped in skips]
        chosen = sliding_layers(which, layers, first=first, rotary=rotary, period=period)
        sliding = [x and (which == "pattern" or size is not None) for x in chosen]
    else:
        known = {GLOBAL: False, LOCAL: True}
        if not isinstance(types, list) or len(types) != layers:
            raise read.wrong("layer_types", f"a list of {layers} names, one for each layer", types)
        if any(not isinstance(kind, str) or kind not in known for kind in types):
            raise UnsupportedError(
                f"layer_types must be {GLOBAL} or {LOCAL} in {read.name!r}; got "
                f"{types!r}. Use another model."
            )
        sliding = [known[kind] for kind in types]
    if any(sliding) and size is None:
        raise UnsupportedError(
            f"Layers of type {LOCAL} need a sliding_window, and use_sliding_window where the "
            f"file has it; got sliding_window={read.values.get('sliding_window')}, "
            f"use_sliding_window={read.values.get('use_sliding_window')} in {read.name!r}. "
            "Correct the file."
        )
    window = read.number("sliding_window") if any(sliding) else None
    return tuple(window if has else None for has in sliding)


def _check_without_windows(read: ConfigValues, layers: int) -> None:
    """Raises if what a file says of windows may make another model where the family has none.

    The layers of transformers take no notice of it, but its cache does, which then forgets keys
    while it generates: unless `layer_types` says otherwise, a `sliding_window` is that of all.
    """
    size, types = read.values.get("sliding_window"), read.values.get("layer_types")
    if types is None:
        kept = size is None or read.number("sliding_window") >= read.number(
            "max_position_embeddings"
        )
    else:
        kept = types == [GLOBAL] * layers
    if not kept:
        raise UnsupportedError(
            f"No layer may have a sliding window in {read.name!r}: layer_types must be {layers} "
            f"times {GLOBAL}, or sliding_window null or at least max_position_embeddings; got "
            f"layer_types={types!r}, sliding_window={size!r}. Correct the file, or use another "
            "model."
        )


def read_skips(read: ConfigValues, layers: int) -> tuple[bool, ...]:
    """Whether each layer of a SmolLM3 has no rotary positions."""
    period = read.number("no_rope_layer_interval")
    flags = read.values.get("no_rope_layers")
    flags = [int((i + 1) % period != 0) for i in range(layers)] if flags is None else flags
    if (
        not isinstance(flags, list)
        or len(flags) != layers
        or any(type(flag) not in (int, bool) or flag not in (0, 1) for flag in flags)
    ):
        raise read.wrong("no_rope_layers", f"a list of {layers} numbers that are 0 or 1", flags)
    # The list wins over the period, as in transformers.
    return tuple(not flag for flag in flags)


def read_local_rope(read: ConfigValues, length: int, windows: Sequence[int | None]) -> RopeConfig:
    """The rotary positions of a Gemma 3, whose local layers have a base of their own.

    Args:
        read: config.json.
        length: tokens of the sequences that the model is made for.
        windows: the window of each layer.

    Raises:
        ValueError, NotImplementedError: as `read_rope`.
    """
    given = read.values.get("rope_parameters") or {}
    if not isinstance(given, dict) or not given.keys() <= {GLOBAL, LOCAL}:
        raise read.wrong("rope_parameters", f"an object with {GLOBAL} and {LOCAL}", given)
    scaling = read.values.get("rope_scaling") or {}

    def part(kind: str, base: float, **more: Any) -> RopeConfig:
        own = given.get(kind) or {}
        if not isinstance(own, dict):
            raise read.wrong(f"rope_parameters.{kind}", "an object", own)
        values = {"rope_theta": base, "rope_parameters": {**own, **more}}
        return read_rope(
            ConfigValues({**read.values, "rope_scaling": None, **values}, read.name), length
        )

    if not isinstance(scaling, dict):
        raise read.wrong("rope_scaling", "an object", scaling)
    rope = part(GLOBAL, read.real("rope_theta"), **scaling)
    of_local = part(LOCAL, read.real("rope_local_base_freq"))
    local = of_local.base
    if of_local != RopeConfig(base=local):
        raise UnsupportedError(
            f"The rotary positions of {LOCAL} must be of rope_type default in {read.name!r}; "
            f"got {given.get(LOCAL)!r}, which is not supported. Use another model."
        )
    if set(windows) == {None}:
        return rope
    if None not in windows:
        return RopeConfig(base=local)
    # Also without a scaling: a flag may add one, and local layers are never stretched.
    bases = tuple(rope.base if window is None else local for window in windows)
    return replace(rope, bases=bases, stretches="global")


def read_softcaps(read: ConfigValues, head_dim: int) -> dict[str, Any]:
    """The soft caps of a Gemma, and the scale of its scores."""
    scale_dim = read.number("query_pre_attn_scalar")
    caps = {"softcap": "attn_logit_softcapping", "output_softcap": "final_logit_softcapping"}
    # Here null says that there is none.
    options = {ours: read.values[key] and read.real(key) for ours, key in caps.items()}
    return options | {"scale_dim": None if scale_dim == head_dim else scale_dim}


def layer_values(model: GPTConfig, which: Windows, *, skips_rope: bool) -> dict[str, Any]:
    """What config.json says of windows and of layers without rotary positions."""
    windows, bases = model.layer_windows, model.layer_bases
    values: dict[str, Any] = {}
    size = next((window for window in windows if window is not None), None)
    if which != "none":
        values["sliding_window"] = size
    if which in ("upper", "no_rope"):
        values["use_sliding_window"] = size is not None
    if which == "upper":
        values["max_window_layers"] = 0 if size is not None else model.layers
    if which == "pattern" or (None in windows and size is not None):
        values["layer_types"] = [GLOBAL if window is None else LOCAL for window in windows]
    elif which == "no_rope" and size is not None:
        values["layer_types"] = [LOCAL] * model.layers
    if skips_rope:
        values["no_rope_layers"] = [int(base is not None) for base in bases]
    return values


def local_rope_values(model: GPTConfig) -> dict[str, Any]:
    """`rope_values` of a Gemma 3."""
    pairs = dict(zip(model.layer_windows, model.layer_bases, strict=True))
    local = next((base for window, base in pairs.items() if window is not None), None)
    base = pairs.get(None, model.rope.base)
    of_global = replace(model.rope, base=base, bases=None, stretches="all")
    values = rope_values(replace(model, rope=of_global, windows=None, window=None))
    return values if local is None else values | {"rope_local_base_freq": local}


def one_window(model: GPTConfig) -> bool:
    """Whether all layers with a window have the same one, as every family wants it."""
    return len({window for window in model.layer_windows if window is not None}) <= 1


def one_base(model: GPTConfig) -> bool:
    """Whether all layers with rotary positions have the same ones."""
    bases = {base for base in model.layer_bases if base is not None}
    return len(bases) <= 1 and not _stretches_some(model)


def bases_by_window(model: GPTConfig) -> bool:
    """Whether rotary positions differ only between layers with a window and those without.

    Those with a window must not be stretched, as in Gemma 3.
    """
    pairs = set(zip(model.layer_windows, model.layer_bases, strict=True))
    if len({window for window, _ in pairs}) < len(pairs) or any(x is None for _, x in pairs):
        return False
    if all(window is None for window, _ in pairs):
        return True
    return model.rope.scaling == "none" or model.rope.stretches == "global"


def without_rope(model: GPTConfig) -> tuple[GPTConfig, tuple[bool, ...]]:
    """The model without what config.json has in another form, or not at all."""
    same = replace(plain(model), rope=RopeConfig(), no_rope_every=None, dtype="float32")
    return same, tuple(base is None for base in model.layer_bases)
