"""The settings of a run: as JSON, as flags, and which of them must stay. Imports no jax."""

from __future__ import annotations

import dataclasses
import difflib
import json
import shlex
import types
import typing
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal, TypeVar

from startrail_jax.errors import InputError
from trainer.config import TrainConfig
from trainer.durable import replace_text
from trainer.places import check_on_disk, text_of, way_to

CONFIG_FILE = "config.json"
CHECKPOINTS_FOLDER = "checkpoints"
KIND = "kind"
"""The key of config.json that names the task of a run. It is no setting."""
KIND_WITHOUT_NAME = "gpt"
"""What a config.json without that key holds: it was written when there was one task."""

# Settings that may change when a run goes on: they change how its result is computed or reported,
# but not the result itself, up to rounding. All other settings must stay, new ones too.
FREE_SETTINGS = (
    *("devices", "mesh", "zero", "zero_axes", "remat", "offload", "offload_optimizer", "tile"),
    "gradient_accumulation",
    *("attention.inner", "attention.head_chunks", "attention.keep_gathered"),
    *("attention.exchange", "attention.backend", "attention.linear_backend"),
    *("plan", "verify", "wandb"),
    *("run_dir", "mirror", "data.cache", "log_every", "tensorboard", "checkpoint", "profile"),
    # Only steps that are yet to be done depend on these.
    *("non_finite", "non_finite_limit"),
    *("validation_every", "validation_sequences", "sample", "export", "allow_changes"),
)

OF_WEIGHTS = ("model.", "lora.", "frozen")
"""How the names of settings begin that say which weights a run has, and which of them it trains."""
WITHOUT_WEIGHTS = (
    *("model.rope.", "model.experts.balance_loss", "model.experts.balance_over"),
    *("model.experts.balance_rate", "model.experts.z_loss"),
)
"""Settings of a model with which its weights keep their meaning."""

Config = TypeVar("Config")


def save_config(config: Any, path: Path) -> None:
    """Writes a dataclass as JSON; a reader finds the old file or the new one, never a part."""
    kind = {KIND: config.kind} if isinstance(config, TrainConfig) else {}
    values = kind | dataclasses.asdict(config)
    replace_text(path, json.dumps(values, default=text_of, indent=2))


def load_config(config_type: type[Config], path: Path) -> Config:
    """Reads what `save_config` wrote; missing settings take their defaults. If the task of a run is
    not known, `trainer.tasks.load_train_config` finds the type."""
    try:
        values = json.loads(path.read_bytes())
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
    """The task of a run, as a file that `save_config` wrote names it."""
    try:
        values = _decode(dict, json.loads(path.read_bytes()), "")
        return _decode(str, values.get(KIND, KIND_WITHOUT_NAME), KIND)
    except (ValueError, RecursionError) as error:
        raise _not_a_config(path, error) from error


def settings_of(config: Any, *, but: Collection[str] = (), prefix: str = "") -> dict[str, Any]:
    """Every setting of a dataclass and of the dataclasses in it, by its dotted name."""
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
    """How each setting is given on the command line, by its dotted name; without those in `but`."""
    return {name: flag_text(name, value) for name, value in settings_of(config, but=but).items()}


def names_of_paths(settings: Any, prefix: str = "") -> set[str]:
    """The dotted names of all settings that are paths."""
    hints = typing.get_type_hints(type(settings))
    names = set()
    for name, value in vars(settings).items():
        if dataclasses.is_dataclass(value):
            names |= names_of_paths(value, f"{prefix}{name}.")
        elif Path in (hints[name], *typing.get_args(hints[name])):
            names.add(prefix + name)
    return names


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
    return " ".join(map(_word, value)) if isinstance(value, tuple) else str(value)


def _word(value: Any) -> str:
    """A value as a word of the command line, in quotes if a shell would put names of files in its
    place."""
    text = flag_value(value)
    return shlex.quote(text) if any(x in text for x in "*?[") else text


def config_of(run_dir: Path, name: str) -> Path:
    """The config.json of the folder of a run."""
    path = run_dir / CONFIG_FILE
    if path.is_file():
        return path
    check_on_disk(name, run_dir)
    what, advice = "a folder without one", "Use the --run-dir of train.py."
    if not run_dir.is_dir():
        what, advice = "no such folder", way_to(run_dir, advice)
    raise InputError(
        f"{name} must be the folder of a run, with its {CONFIG_FILE}; got {text_of(run_dir)!r}, "
        f"{what}. {advice}"
    )


def result_flags(config: TrainConfig) -> dict[str, str]:
    """The settings that the result of a run depends on, as flags, by their names. Paths are left
    out: a folder of data may move, and what it holds is compared by itself."""
    paths = names_of_paths(config)
    fixed = _fixed_settings(config)
    return {name: flag_text(name, value) for name, value in fixed.items() if name not in paths}


def _fixed_settings(config: TrainConfig) -> dict[str, Any]:
    """The settings that the result of a run depends on, by their names."""
    return settings_of(config, but=(*FREE_SETTINGS, *config.idle_settings))


def model_flags(config: TrainConfig) -> dict[str, str]:
    """The settings of the model, as flags, by their names: what its weights were trained with."""
    flags = result_flags(config)
    return {name: flag for name, flag in flags.items() if name.startswith(OF_WEIGHTS)}


def check_same_run(config: TrainConfig) -> None:
    """Compares a run with the config.json of its folder, if that has a checkpoint."""
    path = config.run_dir / CONFIG_FILE
    checkpoints = config.run_dir / CHECKPOINTS_FOLDER
    # A run without a whole checkpoint has no result yet that other settings could spoil.
    if not path.exists() or not any(x.name.isdecimal() for x in checkpoints.glob("*")):
        return
    kind = read_kind(path)
    if kind != config.kind:
        raise InputError(
            f"A run that goes on must keep its kind of model; got {config.run_dir}, which holds a "
            f"run of kind {kind!r}, and a config of kind {config.kind!r}. Use another --run-dir."
        )
    saved, now = _fixed_settings(load_config(type(config), path)), _fixed_settings(config)
    # What has an effect in one of them only does so because of a setting that both have.
    changed = [name for name in now if name in saved and saved[name] != now[name]]
    # Rotary positions and losses have no weights, and a longer context needs other positions.
    is_other_state = any(
        name == "optimizer.kind"
        or (name.startswith(OF_WEIGHTS) and not name.startswith(WITHOUT_WEIGHTS))
        for name in changed
    ) or (saved["ema_decay"] is None) != (now["ema_decay"] is None)
    if not changed or (config.allow_changes and not is_other_state):
        return
    lines = "\n".join(
        f"  {flag_text(name, saved[name])}{'none' if saved[name] == () else ''} there, "
        f"{flag_value(now[name]) or 'none'} now"
        for name in changed
    )
    flags = " ".join(flag_text(name, saved[name]).rstrip() for name in changed)
    allow = "" if is_other_state else " With --allow-changes it goes on as given now."
    another = "another --run-dir" + (" and --mirror" if config.mirror else "")
    raise InputError(
        f"A run that goes on must keep the settings that its result depends on; got "
        f"{config.run_dir}, a run with others:\n{lines}\n"
        f"Use {another} for a new run, or {flags} to go on with this one.{allow}"
    )


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
    if hasattr(config_type, "of_older_file"):
        values = config_type.of_older_file(values)
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
