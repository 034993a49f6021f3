"""How long the processes of a run wait for each other, in seconds."""

from __future__ import annotations

BEAT = 1.0
"""Between two signs of life."""
JOIN = 30.0
"""For all processes to connect to process 0. They have just met, in a broadcast."""
FAREWELL = 3.0
"""For processes that are told of a failure to take note of it."""
GREETING = 10.0
"""For a connection to prove that it comes from a process of the run, and then to say from which. A
connection that takes longer is closed."""
VERDICT = 5.0
"""For word of a failure elsewhere. A process that fails breaks the collectives of its neighbours: a
process whose collective fails waits this long before it believes that the fault is its own."""


def suspended(last: float, now: float) -> float:
    """For how many seconds this process was suspended between two looks at its connections.

    It may have been suspended by Ctrl-Z, or together with its virtual machine. It received nothing
    then, so the time must not count as silence of the others.

    Args:
        last: time of the last look, after which it waited for at most a beat.
        now: time of this look.
    """
    excess = now - last - BEAT
    return excess if excess > BEAT else 0.0
