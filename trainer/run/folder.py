"""The folder of a run: one program trains in it at a time, with one config. Imports no jax."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from trainer.config import TrainConfig
from trainer.errors import RunError, StorageError
from trainer.run.settings import check_same_run

FROZEN_FOLDER = "frozen"
"""What the checkpoints of a run with frozen weights lack: those weights, once."""
KEPT_FOLDER = "pretrained"
"""What an export needs of the pretrained model with which a run began."""
METRICS_FILE = "metrics.jsonl"
CHECKSUMS_FILE = "checksums.json"
"""In the folder of a checkpoint."""
LOCK_FILE = "lock"

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


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
    with locked(folder) if writes else nullcontext():
        check_same_run(config)
        yield folder


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other programs from training in a folder.

    Raises:
        RuntimeError: if another program trains there.
    """
    with (folder / LOCK_FILE).open("a+") as file:
        try:
            # Until the file is closed, which the end of the process does too, however it ends.
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
        yield


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
