"""Metrics for programs that collect those of many runs: Weights & Biases and MLflow.

Each has a thread of its own, because it talks to a server: one that is slow, unreachable or broken
delays no step and ends no run. What goes wrong is a warning in the log, once.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol

from trainer.durable import replace_text
from trainer.places import without_secret

End = Literal["finished", "interrupted", "failed"]
# A report is small, and there are few: more are waiting only if the program hangs.
MOST_WAITING = 10_000
CLOSE_SECONDS = 60.0
# Other processes hear of a failure, and end, only after this.
CLOSE_SECONDS_AFTER_FAILURE = 5.0


class Tracker(Protocol):
    """A run in a program that collects metrics."""

    def log(self, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        """Adds the metrics of a step, which were measured at a time since 1970."""
        ...

    def finish(self, end: End) -> None:
        """Ends the run, or the part of it that this program did."""
        ...


OpenTracker = Callable[[Path, Mapping[str, str]], Tracker]
"""(folder of the run, its settings) -> a new run, or the one that the folder began"""


class Tracking:
    """A tracker in a thread of its own."""

    def __init__(self, name: str, open_tracker: OpenTracker, settings: Mapping[str, str]) -> None:
        """Prepares the thread, which `start` starts.

        Args:
            name: what the tracker is called in warnings.
            open_tracker: begins or continues its run.
            settings: the settings of the run by name.
        """
        self.name = name
        self._open = open_tracker
        self._settings = settings
        self._waiting: queue.Queue[Any] = queue.Queue(MOST_WAITING)
        self._failure: str | None = None
        self._has_failed = False
        self._thread: threading.Thread | None = None

    def start(self, folder: Path) -> None:
        """Begins or continues the run of a folder, without waiting for it."""
        self._thread = threading.Thread(target=self._work, args=(folder,), daemon=True)
        self._thread.start()

    def log(self, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        """Has the metrics of a step written, without waiting for it."""
        if self._has_failed:
            return
        try:
            self._waiting.put_nowait((step, seconds, metrics))
        except queue.Full:
            self._fail(f"it has not taken {MOST_WAITING:,} reports")

    def take_failure(self) -> str | None:
        """Why nothing more is written, the first time that it is asked after that."""
        failure, self._failure = self._failure, None
        return failure

    def end(self, end: End) -> None:
        """Has the run ended after all that waits to be written, without waiting for it."""
        # A thread that hangs has a full queue, and leaves no room for the end.
        with suppress(queue.Full):
            self._waiting.put_nowait(end)

    def join(self, seconds: float, limit: float) -> None:
        """Waits for the end, but only for some seconds, the last of `limit` in all."""
        if self._thread is None:
            return
        if not self._has_failed:
            self._thread.join(seconds)
        if self._thread.is_alive():
            self._fail(f"it has not ended within {limit:.0f} s")

    def _work(self, folder: Path) -> None:
        try:
            tracker = self._open(folder, self._settings)
            while isinstance(item := self._waiting.get(), tuple):
                tracker.log(*item)
            tracker.finish(item)
        # Whatever it is, even an exit of the package: training goes on.
        except BaseException as error:
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, why: str) -> None:
        if not self._has_failed:
            # Packages quote the address of their server, which may hold a password.
            self._failure, self._has_failed = without_secret(why), True


def close_all(trackings: Sequence[Tracking], end: End) -> None:
    """Waits until all is written, of all trackers at once, but not for ever."""
    limit = CLOSE_SECONDS_AFTER_FAILURE if end == "failed" else CLOSE_SECONDS
    deadline = time.monotonic() + limit
    for tracking in trackings:
        tracking.end(end)
    for tracking in trackings:
        tracking.join(max(deadline - time.monotonic(), 0.0), limit)


def known_run(path: Path, place: Mapping[str, str | None]) -> str | None:
    """The id of the run that a folder began at a place; None if there is none.

    Args:
        path: what `keep_run` wrote.
        place: where runs are collected: a project, say.
    """
    try:
        saved = json.loads(path.read_text())
        return saved["id"] if saved["place"] == dict(place) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep_run(path: Path, place: Mapping[str, str | None], run_id: str) -> None:
    """Notes the id of a run, so that the program which goes on with the folder continues it."""
    replace_text(path, json.dumps({"place": dict(place), "id": run_id}))
