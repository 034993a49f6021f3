"""Emulates a power failure: what a program has not flushed to the disk is lost."""

from __future__ import annotations

import json
import os
import runpy
import stat
import sys
from pathlib import Path

import numpy as np

from trainer import durable

PROGRAM = "from tests.faults.power import run; run()"
"""A program whose words are the folder of the run, that for what is flushed, and the flags of
train.py."""


def run() -> None:
    """Runs train.py under `record`; what was in the folder of the run before is on the disk."""
    live, flushed = Path(sys.argv.pop(1)), Path(sys.argv.pop(1))
    record(flushed)
    for path in [live, *live.rglob("*")] if live.exists() else []:
        durable.flush(path)
    sys.argv[0] = "train.py"
    runpy.run_path("train.py", run_name="__main__")


def record(flushed: Path) -> None:
    """Keeps each file and folder that is flushed from now on, by its number on the disk."""
    flush = os.fsync
    # The number of a file that is open is given to no other.
    held: dict[int, int] = {}

    def fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        held.setdefault(status.st_ino, os.dup(descriptor))
        if stat.S_ISDIR(status.st_mode):
            name = _folder_name(status.st_ino)
            content = json.dumps({x.name: x.inode() for x in os.scandir(descriptor)}).encode()
        else:
            name = _file_name(status.st_ino)
            content = Path(f"/proc/self/fd/{descriptor}").read_bytes()
        part = flushed / f"{name}.part"
        part.write_bytes(content)
        part.replace(flushed / name)
        flush(descriptor)

    flushed.mkdir(parents=True, exist_ok=True)
    os.fsync = fsync


def after_power_failure(
    live: Path, flushed: Path, out: Path, random: np.random.Generator, survives: float
) -> None:
    """Makes a folder that a disk could have kept, if a change survives with that probability."""
    _make_folder(live.stat().st_ino, live, flushed, out, lambda: random.random() < survives)


def _make_folder(number, live, flushed, out, survives) -> None:
    out.mkdir(parents=True)
    listed = flushed / _folder_name(number)
    entries = json.loads(listed.read_text(encoding="utf-8")) if listed.exists() else {}
    if live is not None and survives():
        entries = {x.name: x.inode() for x in os.scandir(live)}
    for name, child in entries.items():
        path = None if live is None else live / name
        if path is not None and not (path.exists() and path.stat().st_ino == child):
            path = None  # It was renamed, or removed.
        is_folder = path.is_dir() if path else (flushed / _folder_name(child)).exists()
        if is_folder:
            _make_folder(child, path, flushed, out / name, survives)
            continue
        kept = flushed / _file_name(child)
        content = kept.read_bytes() if kept.exists() else b""
        if path is not None and survives():
            content = path.read_bytes()
        (out / name).write_bytes(content)


def _folder_name(number: int) -> str:
    return f"folder-{number}"


def _file_name(number: int) -> str:
    return f"file-{number}"
