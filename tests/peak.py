"""How far this process grows meanwhile."""

import ctypes
import threading
from pathlib import Path

import pytest

STATUS = Path("/proc/self/status")
needs_linux = pytest.mark.skipif(not STATUS.exists(), reason="needs Linux")


def sizes():
    """Bytes of memory that are this process's own, and of those and the files that it maps."""
    status = STATUS.read_text()
    return [1024 * int(status.partition(f"{x}:")[2].split()[0]) for x in ("RssAnon", "VmRSS")]


class Peak(threading.Thread):
    """Watches how far this process grows: in memory of its own, and in resident memory."""

    def __enter__(self):
        # What earlier tests have freed would be taken again, and not be seen.
        ctypes.CDLL(None).malloc_trim(0)
        self.before, self.anonymous, self.resident = sizes(), 0, 0
        self.watched = threading.Event()
        self.start()
        return self

    def run(self):
        while not self.watched.wait(0.002):
            anonymous, resident = (
                now - before for now, before in zip(sizes(), self.before, strict=True)
            )
            self.anonymous = max(self.anonymous, anonymous)
            self.resident = max(self.resident, resident)

    def __exit__(self, *error):
        self.watched.set()
        self.join()
