"""What the processes of a run tell each other before they train."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


@dataclass(frozen=True, kw_only=True)
class Peers:
    """The processes that share a run, as one of them sees them; only itself by default."""

    index: int = 0
    """Number of this process."""
    count: int = 1
    """Number of processes."""
    gather: Callable[[Any], list[Any]] = lambda value: [value]
    """Returns what every process gives, a value of JSON, in their order. All must call it."""


POLL_SECONDS = 1.0


def first_does(work: Callable[[], None], among: Peers) -> None:
    """Has the first process do something while the others wait, however long that takes.

    All processes must call it. If it fails, only the first raises: that ends the others.
    """
    if among.count == 1:
        work()
        return
    done: Future[None] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    if among.index == 0:
        threading.Thread(target=run, daemon=True).start()
    # Short messages again and again: a single one would run into a timeout of the devices.
    while True:
        # One look decides: if the work failed after it, the next round raises.
        is_done = among.index == 0 and bool(wait([done], POLL_SECONDS).done)
        if is_done:
            done.result()
        if among.gather(is_done)[0]:
            return


def peers() -> Peers:
    """The processes of jax, once they are joined."""
    return Peers(index=jax.process_index(), count=jax.process_count(), gather=_gather)


def _gather(value: Any) -> list[Any]:
    """Goes through the devices, which are connected."""
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    # With one process, jax returns what it is given, without a dimension for the processes.
    counts = np.reshape(multihost_utils.process_allgather(np.array([len(text)], np.int32)), -1)
    padded = np.zeros(counts.max(), np.uint8)
    padded[: len(text)] = text
    rows = np.reshape(multihost_utils.process_allgather(padded), (len(counts), -1))
    return [json.loads(bytes(row[:count])) for row, count in zip(rows, counts, strict=True)]
