"""Files that outlive a power failure, and folders that are removed in one step."""

from __future__ import annotations

import errno
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REMOVED = ".removed"
"""Ending of a folder that is being removed."""
FLUSHED_AT_A_TIME = 8
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""What a file system answers that has no locks."""


def flush_files(folder: Path, process: int) -> None:
    """Flushes to the disk what a process has written below a folder, each file and folder of it.
    Names that end in the number of a process, such as `process_3`, are its own; process 0 has the
    others."""
    paths = [Path(path, name) for path, _, files in os.walk(folder) for name in (*files, ".")]

    def owner(path: Path) -> int:
        numbers = re.findall(r"process_(\d+)(?:/|$)", str(path.relative_to(folder)))
        return int(numbers[0]) if numbers else 0

    own = [path for path in paths if owner(path) == process]
    # A disk serves several at a time.
    with ThreadPoolExecutor(FLUSHED_AT_A_TIME) as threads:
        list(threads.map(flush, own))


def flush(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    """Renames within a folder, or replaces a file, and waits until that is on the disk."""
    old.replace(new)
    flush(new.parent)


def replace_text(path: Path, text: str) -> None:
    """Writes a file of one text, of which a reader finds the old one or the new one whole, also
    after a power failure once it has returned."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text + "\n", encoding="utf-8")
    flush(part)
    rename(part, path)


def remove(folder: Path) -> None:
    """Removes a folder and all that is in it. It is renamed first: a kill or a power failure leaves
    it whole, or under another name."""
    if not folder.name.endswith(REMOVED):
        renamed = folder.with_name(folder.name + REMOVED)
        shutil.rmtree(renamed, ignore_errors=True)  # An earlier kill may have left one.
        rename(folder, renamed)
        folder = renamed
    # What cannot be removed now has a name that counts nowhere, and the next start tries again.
    shutil.rmtree(folder, ignore_errors=True)
