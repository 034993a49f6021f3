"""Programs that tests have compiled, kept for the next run in ~/.cache/startrail_jax.

Each process of tests, with the programs that it starts, works on a copy of its own: a program that
is killed may leave half a file there. At its end, whole files are added to what is kept.

Programs whose devices send each other messages are dropped before anything can read them: XLA keeps
the order of independent messages of a program that it compiled, but not of one that it has read
from a file. On eight simulated devices, steps with ZeRO 1 then met others' messages, and ended with
"Id can't be larger than the number of participating threads" or waited for ever.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import sys
import zlib
from contextlib import suppress
from importlib import metadata
from pathlib import Path

MOST_BYTES = 1 << 29
"""What is kept at most; the oldest files go."""
FORMAT = "without messages"
"""Changes when other programs are kept."""
ENTRIES = "*-cache"
"""Names that jax gives to compiled programs."""
ZSTD = b"\x28\xb5\x2f\xfd"
MESSAGES = re.compile(rb"all-gather|all-reduce|reduce-scatter|collective-|all-to-all|ragged-all")
"""Instructions by which devices send each other messages."""


def place() -> Path:
    """The folder of programs that this jax has compiled for this CPU."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cpu = Path("/proc/cpuinfo")
    features = re.findall(r"^flags.*$", cpu.read_text(), re.M)[:1] if cpu.is_file() else []
    facts = [FORMAT, metadata.version("jax"), metadata.version("jaxlib"), *features]
    return Path(home, "startrail_jax", hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16])


class Cache:
    """The folder of a process of tests, and of the programs that it starts."""

    def __init__(self, folder: Path) -> None:
        """Puts what is kept into an empty folder."""
        self._folder = folder
        for path in place().glob(ENTRIES):
            with suppress(FileNotFoundError):  # Another process removes old files.
                try:
                    os.link(path, folder / path.name)
                except OSError:  # On another disk.
                    shutil.copyfile(path, folder / path.name)
        self._safe = {path.name for path in folder.iterdir()}
        self._changed = folder.stat().st_mtime_ns

    def drop_messages(self) -> None:
        """Removes new programs that send messages, and files that are not whole."""
        with suppress(FileNotFoundError):  # At the end of the process.
            if self._folder.stat().st_mtime_ns == self._changed:
                return
            for path in self._folder.glob(ENTRIES):
                if path.name in self._safe:
                    continue
                if _sends_nothing(path.read_bytes()):
                    self._safe.add(path.name)
                else:
                    path.unlink(missing_ok=True)
            self._changed = self._folder.stat().st_mtime_ns

    def watch(self) -> None:
        """Drops such programs before jax looks for one here, and before a program is started."""
        import jax

        def on_event(event: str, **_: object) -> None:
            if event == "/jax/compilation_cache/compile_requests_use_cache":
                self.drop_messages()

        jax.monitoring.register_event_listener(on_event)
        sys.addaudithook(lambda event, _: event == "subprocess.Popen" and self.drop_messages())

    def keep(self) -> None:
        """Adds new programs to what is kept; nothing where that cannot be written."""
        self.drop_messages()
        with suppress(OSError):
            kept = place()
            kept.mkdir(parents=True, exist_ok=True)
            for name in self._safe:
                if not (kept / name).exists():
                    part = kept / f".part-{secrets.token_hex(4)}"
                    shutil.copyfile(self._folder / name, part)
                    part.replace(kept / name)
            paths = sorted(kept.glob(ENTRIES), key=lambda x: x.stat().st_mtime, reverse=True)
            size = 0
            for path in paths:
                size += path.stat().st_size
                if size > MOST_BYTES:
                    path.unlink(missing_ok=True)


def _sends_nothing(content: bytes) -> bool:
    """Whether a file is whole, and its program sends no messages between devices."""
    try:
        if content.startswith(ZSTD):
            import zstandard

            program = zstandard.ZstdDecompressor().decompress(content)
        else:
            program = zlib.decompress(content)
    except Exception:  # Each package has errors of its own.
        return False
    return bool(program) and not MESSAGES.search(program)
