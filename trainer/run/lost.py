"""Which process was lost, as the last line of the processes that jax ends for it.

jax's C++ ends a process under a stack trace, without a word to Python. So what libraries write to
standard error passes through a small process, which is this file as a program: it has a line in
place of the stack trace. It imports the standard library alone, and begins in 20 ms.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

ENDS = b"JAX distributed service detected fatal errors"
TRACE = b"*** Check failure stack trace: ***"
UNHEALTHY = re.compile(rb"stopped sending heartbeats\):\n(.*?)\nThe tasks have crashed", re.DOTALL)
NUMBER = re.compile(rb"(\d+)\s*(?:\n|,|$)")
LEADER = re.compile(rb"Failed to send RPC to coordination|CoordinationService/Heartbeat")
STDERR = 2


@contextlib.contextmanager
def named_losses(index: int | None) -> Iterator[None]:
    """While it is open, a process that jax ends for the loss of another one says which one it was.
    To be entered before jax is used. `index` is the number of this process, if it is known."""
    stream = sys.stderr
    if stream is None or stream is not sys.__stderr__ or stream.fileno() != STDERR:
        yield  # Someone else reads it.
        return
    stream.flush()
    with os.fdopen(os.dup(STDERR), "w", encoding=stream.encoding, errors=stream.errors) as own:
        command = [sys.executable, "-I", "-S", __file__]
        watcher = subprocess.Popen(
            [*command, "" if index is None else str(index)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert watcher.stdin is not None
        os.dup2(watcher.stdin.fileno(), STDERR)
        watcher.stdin.close()
        own.reconfigure(line_buffering=True)
        sys.stderr = own  # What Python writes goes where it went, to a terminal too.
        try:
            yield
        finally:
            sys.stderr = stream
            stream.flush()
            os.dup2(own.fileno(), STDERR)
            with contextlib.suppress(subprocess.TimeoutExpired):
                watcher.wait(1)  # Longer if a program that this one started still writes.


def last_line(text: bytes, index: str) -> str:
    """The line of a process for what jax has written before it ends it."""
    unhealthy = UNHEALTHY.search(text)
    lost = sorted({int(x) for x in NUMBER.findall(unhealthy[1])}) if unhealthy else []
    if not lost and LEADER.search(text, text.find(ENDS)):
        lost = [0]
    if not lost:
        return "This process ends because another one was lost: see above."
    if index in map(str, lost):
        return "This process ends because it was suspended or cut off, and lost the others."
    plural = "processes" if lost[1:] else "process"
    verb = "were" if lost[1:] else "was"
    return (
        f"This process ends because {plural} {', '.join(map(str, lost))} {verb} lost: killed, "
        "suspended or cut off, which its own log or the scheduler may explain. The same command "
        "then goes on from the newest checkpoint."
    )


def pass_on(index: str) -> None:
    """Passes on what comes, up to the stack trace of the process that writes, if jax ends it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # It ends with the process that writes.
    text, shown, ends, trace = b"", 0, -1, -1
    while trace < 0 and (part := os.read(0, 1 << 16)):
        text += part
        ends = text.find(ENDS)
        trace = -1 if ends < 0 else text.find(TRACE, ends)
        # From then on whole lines, so that nothing of the stack trace is shown.
        stop = len(text) if ends < 0 else text.rfind(b"\n") + 1 if trace < 0 else trace
        _write(text[shown:stop])
        shown = max(stop, shown)
        if ends < 0:
            # jax says who is lost in some lines before it ends.
            kept = max(len(text) - (1 << 16), 0)
            text, shown = text[kept:], shown - kept
    if ends >= 0:
        end = b"" if text[:shown].endswith(b"\n") else b"\n"
        _write(end + last_line(text, index).encode() + b"\n")
    while os.read(0, 1 << 16):
        pass


def _write(text: bytes) -> None:
    while text:
        text = text[os.write(STDERR, text) :]


if __name__ == "__main__":
    pass_on(sys.argv[1])
