"""The folder of a run: one program trains in it at a time, with one config. Imports no jax."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from startrail_jax.errors import InputError
from trainer.config import TrainConfig
from trainer.errors import RunError, StorageError
from trainer.places import check_mirror, folder_here, is_in_store, text_of
from trainer.run.commands import command
from trainer.run.settings import (
    flag_text,
    flag_value,
    load_config,
    read_kind,
    settings_of,
)

CONFIG_FILE = "config.json"
CHECKPOINTS_FOLDER = "checkpoints"
FROZEN_FOLDER = "frozen"
"""What the checkpoints of a run with frozen weights lack: those weights, once."""
KEPT_FOLDER = "pretrained"
"""What an export needs of the pretrained model with which a run began."""
METRICS_FILE = "metrics.jsonl"
CHECKSUMS_FILE = "checksums.json"
"""In the folder of a checkpoint."""
LOCK_FILE = "lock"

# Settings that may change when a run goes on: they change how its result is computed or reported,
# but not the result itself, up to rounding. All other settings must stay, new ones too.
FREE_SETTINGS = (
    *("devices", "mesh", "zero", "zero_axes", "remat", "offload", "tile", "accumulation"),
    *("attention.inner", "attention.head_chunks", "attention.keep_gathered"),
    *("plan", "plan_measure"),
    *("wandb", "mlflow"),
    *("run_dir", "mirror", "data.cache", "log_every", "tensorboard", "checkpoint", "profile"),
    # Only steps that are yet to be done depend on these.
    *("non_finite", "non_finite_limit", "spike_factor"),
    *("evaluate_every", "validation_sequences", "sample_length", "temperature", "allow_changes"),
    # Steps that are done do not depend on it: a bad example has been replaced, or raised an error.
    "data.max_bad",
)

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


def config_of(run_dir: Path, name: str) -> Path:
    """The config.json of the folder of a run.

    Args:
        run_dir: the folder.
        name: what gives it, for errors: "RUN_DIR".

    Raises:
        ValueError: if it is not that of a run.
    """
    path = run_dir / CONFIG_FILE
    if path.is_file():
        return path
    advice = "Use the --run-dir of train.py."
    what = "a folder without one" if run_dir.is_dir() else "no such folder"
    if is_in_store(run_dir):
        url = text_of(run_dir)
        check_mirror(url)
        what, here = "which is in a store", folder_here(url)
        fetching = command("trainer.mirror.fetch", url, here)
        advice = f"Fetch it first, and give {here}: {fetching}"
        if (here / CONFIG_FILE).is_file():
            advice = f"Give {here}, the folder of that run on this machine."
    raise InputError(
        f"{name} must be the folder of a run, with its {CONFIG_FILE}; got {text_of(run_dir)!r}, "
        f"{what}. {advice}"
    )


@contextmanager
def open_run(config: TrainConfig, *, writes: bool = True) -> Iterator[Path]:
    """Makes or reopens the folder of a run and keeps other programs from training in it.

    Args:
        config: the run. It is compared with config.json if the folder has a checkpoint.
        writes: whether this process locks and writes; True for the first process of a run alone.

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
    with locked(folder):
        _check_same_run(config)
        yield folder


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other programs from training in a folder.

    Raises:
        RuntimeError: if another program trains there.
    """
    with (folder / LOCK_FILE).open("a+") as file:
        _lock(file, folder)
        yield


def result_flags(config: TrainConfig) -> dict[str, str]:
    """The settings that the result of a run depends on, as flags, by their names.

    Paths are left out: a folder of data may move, and what it holds is compared by itself.
    """
    return {
        name: flag_text(name, value)
        for name, value in _fixed_settings(config).items()
        if not isinstance(value, Path)
    }


def _fixed_settings(config: TrainConfig) -> dict[str, Any]:
    """The settings that the result of a run depends on, by their names."""
    return settings_of(config, but=(*FREE_SETTINGS, *config.idle_settings))


def model_flags(config: TrainConfig) -> dict[str, str]:
    """The settings of the model, as flags, by their names: what its weights were trained with."""
    flags = result_flags(config)
    return {name: flag for name, flag in flags.items() if name.startswith(("model.", "lora."))}


def require_writable(folder: Path) -> None:
    """Makes a folder if it does not exist, and writes to it.

    Raises:
        OSError: if either fails.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turns an error of the operating system, as of a full disk, into one that says what to do."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            f"The folder of a run must be one that can be written; got {folder}: "
            f"{error.strerror}. Fix that, or use another --run-dir."
        ) from error


def _lock(file: IO[str], folder: Path) -> None:
    """Locks a file until it is closed, which the end of the process does too, however it ends."""
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
    # Rotary positions have no weights, and a longer context needs other ones.
    is_other_state = any(
        name == "optimizer.kind"
        or (name.startswith(("model.", "lora.")) and not name.startswith("model.rope."))
        for name in changed
    ) or (saved["ema_decay"] is None) != (now["ema_decay"] is None)
    if not changed or (config.allow_changes and not is_other_state):
        return
    lines = "\n".join(
        f"  {flag_text(name, saved[name])} there, {flag_value(now[name])} now" for name in changed
    )
    flags = " ".join(flag_text(name, saved[name]) for name in changed)
    allow = "" if is_other_state else " With --allow-changes it goes on as given now."
    another = "another --run-dir" + (" and --mirror" if config.mirror else "")
    raise InputError(
        f"A run that goes on must keep the settings that its result depends on; got "
        f"{config.run_dir}, a run with others:\n{lines}\n"
        f"Use {another} for a new run, or {flags} to go on with this one.{allow}"
    )
