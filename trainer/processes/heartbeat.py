"""The heartbeat of the processes of a run: when one fails all end, and say which it was and why.

Without it a process whose neighbour is gone waits in a collective, for minutes or for ever. Each
process connects to process 0 and tells it every second that it lives. It does so in a thread, which
goes on while the program waits for devices. Process 0 tells all

    lost      a process failed, exited without reporting an error, or is silent: end, and say so
    count     how often have you asked whether to stop? wait before you answer the next time
    stop_at   answer yes from this call on
    leave     all are done: do what is last, which may wait for the others
    end       all have left

A message is a line of JSON. Process 0 takes part as the others do, over a connection to itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
import numpy as np
from jax.experimental import multihost_utils

from trainer.network.connection import Message
from trainer.network.options import Distributed
from trainer.processes.coordinator import coordinate
from trainer.processes.worker import join

LONGEST_MEETING = 2048


@contextmanager
def heartbeat(
    options: Distributed,
    flags: dict[str, str] | None = None,
    last: Callable[[], None] = lambda: None,
) -> Iterator[Callable[[bool], bool]]:
    """Ends this process, with status 1, when another one fails, and the others when this one does.

    It belongs around everything between the choice of devices and the end of the program: at its
    end each process waits for all others. With one process it does nothing.

    Args:
        options: where process 0 is, and after how long a silent process counts as lost.
        flags: what must be the same in all processes; see `trainer.run.settings.flags_of`.
        last: done when all processes have come to their ends, and still under their watch; see
            `trainer.processes.distributed.start`.

    Yields:
        A function that turns the wish of any process to stop into an answer that is the same on
        all: their n-th calls all return False, or all True. After the first True all answers are.

    Raises:
        RuntimeError: if the processes cannot reach process 0, or have other flags than it.
    """
    if jax.process_count() == 1:
        yield bool
        return
    index, count = jax.process_index(), jax.process_count()
    meeting = coordinate(options, count) if index == 0 else {}
    worker = join(_broadcast(meeting), index, options.timeout, flags)
    try:
        yield worker.agree
        worker.leave(last)
    except BaseException as error:
        worker.fail(error)


def _broadcast(meeting: Message) -> Message:
    """What process 0 gives, in all processes. It goes through the devices, which are connected."""
    data = np.zeros(LONGEST_MEETING, np.uint8)
    text = json.dumps(meeting).encode()
    data[: len(text)] = np.frombuffer(text, np.uint8)
    sent = np.asarray(multihost_utils.broadcast_one_to_all(data))
    return json.loads(bytes(sent).rstrip(b"\0"))
