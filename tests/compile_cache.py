"""Programs that tests have compiled, kept for the next run in ~/.cache/startrail_jax.

Each process of tests, with the programs that it starts, works on a copy of its own: a program that
is killed may leave half a file there. At its end, whole files are added to what is kept.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import zlib
from contextlib import suppress
from importlib import metadata
from pathlib import Path

MOST_BYTES = 1 << 29
"""What is kept at most; the oldest files go."""
ENTRIES = "*-cache"
"""Names that jax gives to compiled programs."""
ZSTD = b"\x28\xb5\x2f\xfd"


def place() -> Path:
    """The folder of programs that this jax has compiled for this CPU."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cpu = Path("/proc/cpuinfo")
    features = re.findall(r"^flags.*$", cpu.read_text(), re.M)[:1] if cpu.is_file() else []
    facts = [metadata.version("jax"), metadata.version("jaxlib"), *features]
    return Path(home, "startrail_jax", hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16])


def fill(folder: Path) -> None:
    """Puts what is kept into the folder of a process."""
    for path in place().glob(ENTRIES):
        with suppress(FileNotFoundError):  # Another process removes old files.
            try:
                os.link(path, folder / path.name)
            except OSError:  # On another disk.
                shutil.copyfile(path, folder / path.name)


def keep(folder: Path) -> None:
    """Adds what a process has compiled to what is kept; nothing where that cannot be written."""
    with suppress(OSError):
        kept = place()
        kept.mkdir(parents=True, exist_ok=True)
        for path in folder.glob(ENTRIES):
            if not (kept / path.name).exists() and _is_whole(path.read_bytes()):
                part = kept / f".part-{secrets.token_hex(4)}"
                shutil.copyfile(path, part)
                part.replace(kept / path.name)
        files = sorted(kept.glob(ENTRIES), key=lambda path: path.stat().st_mtime, reverse=True)
        size = 0
        for path in files:
            size += path.stat().st_size
            if size > MOST_BYTES:
                path.unlink(missing_ok=True)


def _is_whole(content: bytes) -> bool:
    try:
        if content.startswith(ZSTD):
            import zstandard

            return bool(zstandard.ZstdDecompressor().decompress(content))
        return bool(zlib.decompress(content))
    except Exception:  # Each package has errors of its own.
        return False
