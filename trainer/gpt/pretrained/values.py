"""The values of a Hugging Face config.json, with the defaults of transformers. Imports no jax."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

from startrail_jax.errors import InputError, UnsupportedError
from trainer.printable import shortened

CONFIG = "config.json"
LENGTH = "max_position_embeddings"
"""The key of the length in tokens that a model is made for."""
MOST = {"num_hidden_layers": 10_000}
"""No model is so deep, and no file of its weights is looked at before its depth is known."""
TOO_LARGE = 1 << 31
"""No size of a model is so large."""


class ConfigValues:
    """The values of a config.json, or of an object in it, with errors that name them."""

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        """Keeps the values, and the name of the file for messages."""
        self.values = values
        self.name = name

    def number(self, key: str, *, default: int | None = None) -> int:
        """A whole number from 1 on; `default` replaces a null or missing value."""
        value, most = self.values.get(key), MOST.get(key, TOO_LARGE - 1)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 1 <= value <= most:
            raise self.wrong(key, f"a whole number from 1 to {most}", value)
        return value

    def real(self, key: str, *, default: float | None = None) -> float:
        """A finite number; `default` replaces a null or missing value."""
        value: Any = self.values.get(key)
        value = default if value is None else value
        try:
            if type(value) in (int, float) and math.isfinite(value):
                return float(value)
        except OverflowError:  # Of a whole number that no float holds.
            pass
        raise self.wrong(key, "a finite number", value)

    def wrong(self, key: str, needed: str, value: Any) -> InputError:
        """The error of a wrong value."""
        return InputError(
            f"{key} must be {needed} in {self.name!r}; got {shortened(value)}. Download the file "
            "again."
        )


def with_floats(value: Any) -> Any:
    """Values in which transformers has written infinity as an object, `{"__float__": "Infinity"}`,
    with a number in its place."""
    if isinstance(value, list):
        return [with_floats(x) for x in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(value["__float__"])
    return {key: with_floats(x) for key, x in value.items()}


def require(key: str, value: Any, supported: Sequence[Any], name: str) -> None:
    """Raises unless a value is supported; True is not 1."""
    if not any(value == x and isinstance(value, bool) == isinstance(x, bool) for x in supported):
        raise UnsupportedError(
            f"{key} must be {' or '.join(map(repr, supported))} in {name!r}; got {value!r}, "
            "which is not supported. Use another model."
        )


def transformers_for(name: str) -> Any:
    """The library transformers, which reads the config.json of this name."""
    from trainer.gpt.tokenizer import load_transformers  # Not above: `--help` must be fast.

    return load_transformers(f"The {CONFIG} of a pretrained model", name)


def with_defaults(written: Mapping[str, Any], model_type: str, name: str) -> ConfigValues:
    """The values that transformers reads, with its defaults of this `model_type`."""
    reader = transformers_for(name).CONFIG_MAPPING[model_type]
    try:
        read: Any = reader(**copy.deepcopy(dict(written))).get_text_config()
    except Exception as error:  # Whatever the values make it raise.
        raise InputError(
            f"{name!r} must be a config.json that transformers reads; got "
            f"{type(error).__name__}: {error}. Download the file again."
        ) from error
    values = dict(vars(read))
    if values.get("head_dim") is None and "head_dim" not in written:
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    if (layers := read.to_dict().get("per_layer_config")) is not None:
        values["per_layer_config"] = layers
    return ConfigValues(values, name)
