"""What a Hugging Face config.json says of layers that differ from each other. Imports no jax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from startrail_jax.errors import UnsupportedError
from startrail_jax.planner.layers.loops import shortest
from trainer.gpt.config import GPTConfig, RopeConfig
from trainer.gpt.pretrained.rope import read_rope, rope_values
from trainer.gpt.pretrained.values import ConfigValues

Windows = Literal["none", "all", "upper", "no_rope", "pattern"]
"""Which layers have the sliding window where config.json does not name a type for each: none; all;
those from `max_window_layers` on, if `use_sliding_window` ("upper"); those without rotary
positions, if `use_sliding_window` ("no_rope"); or all but the last of every so many ("pattern")."""
GLOBAL, LOCAL = "full_attention", "sliding_attention"


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
        chosen = {
            "none": lambda i: False,
            "all": lambda i: True,
            "upper": lambda i: i >= first,
            "no_rope": lambda i: skips[i],
            "pattern": lambda i: (i + 1) % period != 0,
        }[which]
        sliding = [chosen(i) and (which == "pattern" or size is not None) for i in range(layers)]
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
    bases = shortest([rope.base if window is None else local for window in windows])
    if set(windows) == {None}:
        return rope
    if None not in windows:
        return RopeConfig(base=local)
    # Also without a scaling: a flag may add one, and local layers are never stretched.
    return replace(rope, bases=None if len(bases) == 1 else bases, stretches="global")


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
