"""How long the processes of a run wait for each other, in seconds."""

from __future__ import annotations

import time

BEAT = 1.0
"""Between two signs of life."""
JOIN = 30.0
"""For all processes to connect to process 0. They have just met, in a broadcast."""
FAREWELL = 3.0
"""For processes that are told of a failure to take note of it."""
VERDICT = 5.0
"""For word of a failure elsewhere. A process that fails breaks the collectives of its neighbours: a
process whose collective fails waits this long before it believes that the fault is its own."""


def suspended_since(began: float) -> float:
    """For how long this process itself was suspended while it waited for a beat.

    It may have been suspended by Ctrl-Z, or together with its virtual machine. It received nothing
    then, so the time must not count as silence of the others.

    Args:
        began: when it began to wait, in seconds of `time.monotonic`.
    """
    excess = time.monotonic() - began - BEAT
    return excess if excess > BEAT else 0.0
