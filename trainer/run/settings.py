"""The settings of a config: as JSON in a file, and as flags of the command line. Imports no jax."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import types
import typing
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal, TypeVar

from startrail_jax.errors import InputError
from trainer.config import TrainConfig
from trainer.durable import replace_text
from trainer.places import text_of

KIND = "kind"
"""The key of config.json that names the task of a run. It is no setting."""
KIND_WITHOUT_NAME = "gpt"
"""What a config.json without that key holds: it was written when there was one task."""

Config = TypeVar("Config")


def save_config(config: Any, path: Path) -> None:
    """Writes a dataclass as JSON; a reader finds the old file or the new one, never a part.

    Args:
        config: a dataclass of dataclasses, numbers, strings, paths and tuples.
        path: the file.
    """
    kind = {KIND: config.kind} if isinstance(config, TrainConfig) else {}
    values = kind | dataclasses.asdict(config)
    replace_text(path, json.dumps(values, default=_text_of_path, indent=2))


def _text_of_path(value: Any) -> str:
    return text_of(Path(os.fspath(value)))


def load_config(config_type: type[Config], path: Path) -> Config:
    """Reads what `save_config` wrote. Settings that the file lacks take their defaults.

    Args:
        config_type: the dataclass that was written. See `trainer.tasks.load_train_config` for the
            config of a run whose task is not known.
        path: the file.

    Raises:
        ValueError: if the file is not JSON, holds a run of another kind, or a setting is missing,
            unknown or of a wrong type.
    """
    try:
        values = json.loads(path.read_text())
        if issubclass(config_type, TrainConfig) and isinstance(values, dict):
            kind = values.pop(KIND, KIND_WITHOUT_NAME)
            if kind != config_type.kind:
                raise InputError(
                    f"kind must be {config_type.kind}; got {kind!r}. Correct the file."
                )
        return _decode(config_type, values, "")
    except (ValueError, RecursionError) as error:
        raise _not_a_config(path, error) from error


def read_kind(path: Path) -> str:
    """The task of a run, as a file that `save_config` wrote names it.

    Args:
        path: the file.

    Raises:
        ValueError: if the file is not a JSON object, or names its kind by anything but a string.
    """
    try:
        values = _decode(dict, json.loads(path.read_text()), "")
        return _decode(str, values.get(KIND, KIND_WITHOUT_NAME), KIND)
    except (ValueError, RecursionError) as error:
        raise _not_a_config(path, error) from error


def settings_of(config: Any, *, but: Collection[str] = (), prefix: str = "") -> dict[str, Any]:
    """Every setting of a dataclass and of the dataclasses in it, by its dotted name.

    Args:
        config: the dataclass.
        but: dotted names to leave out, with all settings below them.
        prefix: what the names begin with.
    """
    settings = {}
    for name, value in vars(config).items():
        if prefix + name in but:
            continue
        if dataclasses.is_dataclass(value):
            settings |= settings_of(value, but=but, prefix=f"{prefix}{name}.")
        else:
            settings[prefix + name] = value
    return settings


def flags_of(config: Any, *, but: Collection[str] = ()) -> dict[str, str]:
    """How each setting of a dataclass is given on the command line, by its dotted name.

    Args:
        config: the dataclass.
        but: dotted names to leave out, such as paths that may differ between machines.
    """
    return {name: flag_text(name, value) for name, value in settings_of(config, but=but).items()}


def flag_text(name: str, value: Any) -> str:
    """A setting as it is given on the command line."""
    group, _, last = name.replace("_", "-").rpartition(".")
    prefix = f"--{group}." if group else "--"
    if isinstance(value, bool):
        return f"{prefix}{last}" if value else f"{prefix}no-{last}"
    return f"{prefix}{last} {flag_value(value)}"


def flag_value(value: Any) -> str:
    """The value of a setting as it is given on the command line."""
    if isinstance(value, Path):
        return text_of(value)
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _not_a_config(path: Path, error: Exception) -> InputError:
    if not isinstance(error, InputError):  # The file is no JSON.
        damage = f"damaged ({type(error).__name__}: {error})" if path.stat().st_size else "empty"
        error = InputError(
            f"It is {damage}. Move it away and start train.py with the flags with which the run "
            "began: they are compared with those in the newest checkpoint, and the file is written "
            "again."
        )
    return InputError(f"{path} must hold the config of a run. {error}")


def _decode(hint: Any, value: Any, name: str) -> Any:
    """Turns a value of JSON into the type that `hint` says; nothing is converted silently."""
    kind, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _decode_dataclass(hint, value, name)
    # A union with a Literal is of the second kind.
    if kind in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        words = [part for part in arguments if typing.get_origin(part) is Literal]
        if any(_is_word(value, part) for part in words):
            return value
        others = [part for part in arguments if part is not type(None) and part not in words]
        (kind,) = others or words[:1]
        return _decode(kind, value, name)
    if kind is Literal and _is_word(value, hint):
        return value
    if kind is tuple and isinstance(value, list):
        if arguments[-1] is Ellipsis:
            arguments = arguments[:1] * len(value)
        if len(arguments) == len(value):
            pairs = zip(arguments, value, strict=True)
            return tuple(_decode(part, x, f"{name}[{i}]") for i, (part, x) in enumerate(pairs))
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and type(value) is int:
        return float(value)
    if hint in (int, float, str, bool, dict) and type(value) is hint:
        return value
    wanted = hint.__name__ if isinstance(hint, type) else str(hint)
    raise InputError(f"{name or 'It'} must be {wanted}; got {value!r}. Correct the file.")


def _is_word(value: Any, literal: Any) -> bool:
    """Whether a Literal has a value, of the same type: True equals 1."""
    return (type(value), value) in [(type(x), x) for x in typing.get_args(literal)]


def _decode_dataclass(config_type: Any, values: dict[str, Any], name: str) -> Any:
    prefix = f"{name}." if name else ""
    fields = {field.name: field for field in dataclasses.fields(config_type)}
    for key in values:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1) or list(fields)
            raise InputError(
                f"Every setting must be one of {config_type.__name__}'s; got {prefix}{key}. "
                f"Use {' or '.join(prefix + x for x in near)}, or leave it out."
            )
    missing = [
        key
        for key, field in fields.items()
        if key not in values and field.default is field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise InputError(
            f"Settings without a default must be in the file; got none for {prefix}{missing[0]}. "
            "Add it."
        )
    hints = typing.get_type_hints(config_type)
    return config_type(**{key: _decode(hints[key], x, prefix + key) for key, x in values.items()})
