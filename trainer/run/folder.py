"""The folder of a run: whose it is, and with which config. Imports no jax."""

from __future__ import annotations

import dataclasses
import difflib
import errno
import fcntl
import json
import os
import tempfile
import types
import typing
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

from startrail_jax.errors import InputError
from trainer.config import TrainConfig
from trainer.dit.config import DiTTrainConfig
from trainer.errors import RunError, StorageError
from trainer.gpt.config import GPTTrainConfig

CONFIG_FILE = "config.json"
CHECKPOINTS_FOLDER = "checkpoints"
LOCK_FILE = "lock"

# Settings that may change when a run goes on: they change how it is computed or watched, but not
# what comes out, up to rounding. All others must stay, those of a later version too.
FREE_SETTINGS = (
    *("devices", "mesh", "zero", "zero_axes", "remat", "offload", "tile", "accumulation"),
    *("run_dir", "log_every", "tensorboard", "checkpoint", "profile", "non_finite"),
    *("evaluate_every", "validation_sequences", "sample_length", "temperature", "allow_changes"),
)

KINDS: dict[str, type[TrainConfig]] = {kind.kind: kind for kind in (GPTTrainConfig, DiTTrainConfig)}
"""Configs by the word that config.json has for them, as its "kind"."""

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)

Config = TypeVar("Config")


@contextmanager
def open_run(config: TrainConfig, *, writes: bool = True) -> Iterator[Path]:
    """Makes or reopens the folder of a run and keeps it for this program alone.

    Args:
        config: the run. It is compared with config.json where the folder has a checkpoint.
        writes: whether this process locks and writes; of a run's processes, the first does.

    Yields:
        The folder.

    Raises:
        OSError: if the folder cannot be written.
        RuntimeError: if another program trains there.
        ValueError: if the folder holds a run whose settings give other results.
    """
    folder = config.run_dir
    require_writable(folder)
    if not writes:
        _check_same_run(config)
        yield folder
        return
    with (folder / LOCK_FILE).open("a+") as file:
        _lock(file, folder)
        _check_same_run(config)
        yield folder


def require_writable(folder: Path) -> None:
    """Makes a folder if there is none, and writes to it.

    Raises:
        OSError: if either fails.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
    except OSError as error:
        raise StorageError(
            f"The folder of a run must be one that can be written; got {folder}: "
            f"{error.strerror}. Mend that, or use another --run-dir."
        ) from error


def save_config(config: Any, path: Path) -> None:
    """Writes a dataclass as JSON; a reader finds the old file or the new one, never a part.

    Args:
        config: a dataclass of dataclasses, numbers, strings, paths and tuples.
        path: the file.
    """
    kind = {"kind": config.kind} if isinstance(config, TrainConfig) else {}
    text = json.dumps(kind | dataclasses.asdict(config), default=os.fspath, indent=2)
    part = path.with_name(f"{path.name}.part")
    part.write_text(text + "\n")
    part.replace(path)


def load_config(kind: type[Config], path: Path) -> Config:
    """Reads what `save_config` wrote. Settings that the file lacks take their defaults.

    Args:
        kind: the dataclass; `TrainConfig` stands for that of `KINDS` which the file names, or that
            of a GPT if it names none.
        path: the file.

    Raises:
        ValueError: if the file is not JSON, or a setting is unknown or of a wrong type.
    """
    try:
        values = json.loads(path.read_text())
        if issubclass(kind, TrainConfig) and isinstance(values, dict):
            kind = _named_kind(kind, values.pop("kind", GPTTrainConfig.kind))
        return _decode(kind, values, "")
    except ValueError as error:
        raise InputError(f"{path} must hold the config of a run. {error}") from error


def _named_kind(kind: Any, name: Any) -> Any:
    fitting = [x for x, other in KINDS.items() if issubclass(other, kind)]
    if name not in fitting:
        raise InputError(f"kind must be {' or '.join(fitting)}; got {name!r}. Correct the file.")
    return KINDS[name]


def _lock(file: IO[str], folder: Path) -> None:
    """Locks until the file is closed, which the end of a process does too, however it ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        raise RunError(
            f"One program at a time may train in a folder; got {folder}, where process "
            f"{file.read()} does. Wait for it, stop it, or use another --run-dir."
        ) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        warnings.warn(
            f"The file system of {folder} has no locks: nothing keeps a second program out.",
            stacklevel=2,
        )
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()


def _check_same_run(config: TrainConfig) -> None:
    path = config.run_dir / CONFIG_FILE
    checkpoints = config.run_dir / CHECKPOINTS_FOLDER
    # A run that never saved anything whole has nothing that could be mixed up.
    if not path.exists() or not any(x.name.isdecimal() for x in checkpoints.glob("*")):
        return
    there = load_config(TrainConfig, path)
    if there.kind != config.kind:
        raise InputError(
            f"A run that goes on must keep its kind of model; got {config.run_dir}, which holds a "
            f"run of kind {there.kind!r}, and a config of kind {config.kind!r}. Use another "
            "--run-dir."
        )
    saved, now = (settings_of(x, but=FREE_SETTINGS) for x in (there, config))
    changed = [name for name in now if saved[name] != now[name]]
    # Rotary positions have no weights, and a longer context asks for others.
    is_other_model = any(
        name.startswith("model.") and not name.startswith("model.rope.") for name in changed
    ) or (there.ema_decay is None) != (config.ema_decay is None)
    if not changed or (config.allow_changes and not is_other_model):
        return
    lines = "\n".join(
        f"  {flag_text(name, saved[name])} there, {flag_value(now[name])} now" for name in changed
    )
    flags = " ".join(flag_text(name, saved[name]) for name in changed)
    allow = "" if is_other_model else " With --allow-changes it goes on as given now."
    raise InputError(
        f"A run that goes on must keep the settings that its result depends on; got "
        f"{config.run_dir}, a run with others:\n{lines}\n"
        f"Use another --run-dir for a new run, or {flags} to go on with this one.{allow}"
    )


def settings_of(config: Any, *, but: Collection[str] = (), prefix: str = "") -> dict[str, Any]:
    """Every setting of a dataclass, which may hold others, by its dotted name.

    Args:
        config: the dataclass.
        but: dotted names to leave out, with all that they hold.
        prefix: of the names, before those of `config`.
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


def flag_text(name: str, value: Any) -> str:
    """A setting as it is given on the command line."""
    group, _, last = name.replace("_", "-").rpartition(".")
    prefix = f"--{group}." if group else "--"
    if isinstance(value, bool):
        return f"{prefix}{last}" if value else f"{prefix}no-{last}"
    return f"{prefix}{last} {flag_value(value)}"


def flag_value(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _decode(hint: Any, value: Any, name: str) -> Any:
    """`value`, which came out of JSON, as the type that `hint` says."""
    kind, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _decode_dataclass(hint, value, name)
    if kind is types.UnionType and type(None) in arguments:
        (other,) = set(arguments) - {type(None)}
        return None if value is None else _decode(other, value, name)
    if kind is Literal and (type(value), value) in [(type(x), x) for x in arguments]:
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
    if hint in (int, float, str, bool) and type(value) is hint:
        return value
    wanted = hint.__name__ if isinstance(hint, type) else str(hint)
    raise InputError(f"{name or 'It'} must be {wanted}; got {value!r}. Correct the file.")


def _decode_dataclass(kind: Any, values: dict[str, Any], name: str) -> Any:
    prefix = f"{name}." if name else ""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in values:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1) or list(fields)
            raise InputError(
                f"Every setting must be one of {kind.__name__}'s; got {prefix}{key}. "
                f"Use {' or '.join(prefix + x for x in near)}, or leave it out."
            )
    missing = [
        key
        for key, field in fields.items()
        if key not in values and field.default is field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise InputError(
            f"Settings without a default must be there; got none for {prefix}{missing[0]}. Add it."
        )
    hints = typing.get_type_hints(kind)
    return kind(**{key: _decode(hints[key], x, prefix + key) for key, x in values.items()})
