"""The part that every process of a run, process 0 too, has in its heartbeat."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Literal, NoReturn

import jax

from trainer.errors import RunError
from trainer.network import timing
from trainer.network.connection import Connection, Message, is_readable
from trainer.network.door import NotLetInError, knock
from trainer.network.secret import Secret
from trainer.run.exit import describe, end_now


class Worker:
    """Tells process 0 from a thread that this process lives, and does what process 0 says."""

    def __init__(
        self, connection: Connection, names: list[str], index: int, timeout: float
    ) -> None:
        """Starts the thread.

        Args:
            connection: to process 0, which has let this process in.
            names: of all processes, for messages.
            index: of this process.
            timeout: seconds of silence after which process 0 counts as lost.
        """
        self._connection = connection
        self._names = names
        self._name = names[index]
        self._timeout = timeout
        self._looked = time.monotonic()
        self._changed = threading.Condition()
        self._calls = 0
        self._wished = False
        self._counted = False
        self._stop_at: int | None = None
        self._failed = False
        self._may_leave = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat worker", daemon=True)
        self._thread.start()

    def agree(self, wish: bool) -> bool:
        """Whether to stop; see `heartbeat`."""
        with self._changed:
            self._calls += 1
            if wish and not self._wished:
                self._wished = True
                self._connection.send("wish")
            # Process 0 knows of fewer calls than this one, and may choose it as the one to stop at.
            while self._counted and self._stop_at is None:
                self._changed.wait()
            return self._stop_at is not None and self._calls >= self._stop_at

    def leave(self, last: Callable[[], None] = lambda: None) -> None:
        """Returns when all processes have called this, and have done what is last.

        Args:
            last: done when all processes have called this, and still under their watch.
        """
        self._connection.send("done")
        self._may_leave.wait()
        last()
        self._connection.send("left")
        self._thread.join()

    def fail(self, error: BaseException) -> NoReturn:
        """Ends all processes, this one with the message of `error`."""
        try:
            if _may_be_of_another(error):
                time.sleep(timing.VERDICT)
            self._failed = True
            short = str(error).partition("\n")[0]
            self._connection.send("failed", why=f"{type(error).__name__}: {short}")
            # Process 0 closes the connection when it has told all others.
            self._thread.join(2 * timing.FAREWELL)
        finally:  # Even if a second Ctrl-C interrupts the waiting.
            end_now(f"{self._name}: {describe(error)}")

    def _run(self) -> None:
        try:
            while self._listen():
                self._connection.send("beat")
        finally:
            self._connection.close()

    def _listen(self) -> bool:
        """Receives messages for the time of a beat; returns whether there may be more."""
        readable = is_readable(self._connection.socket)
        last, self._looked = self._looked, time.monotonic()
        if not readable:
            self._connection.heard += timing.suspended(last, self._looked)
            if self._looked - self._connection.heard < self._timeout:
                return True
            return self._end(silent(self._names[0], self._timeout))
        messages = self._connection.receive()
        if messages is None:
            return self._end(gone(self._names[0]))
        return all(self._obey(message) for message in messages)

    def _obey(self, message: Message) -> bool:
        """Does what process 0 says; returns whether there may be more messages."""
        kind = message["kind"]
        if kind == "lost":
            return self._end(message["why"])
        if kind == "count":
            with self._changed:
                self._counted = True
                self._connection.send("calls", calls=self._calls)
        if kind == "stop_at":
            with self._changed:
                self._stop_at = message["call"]
                self._changed.notify_all()
        if kind == "leave":
            self._may_leave.set()
        return kind != "end"

    def _end(self, why: str) -> Literal[False]:
        if not self._failed:
            end_now(
                f"{self._name} ends because another process failed: {why.rstrip('.')}. Fix that; "
                "then the same command goes on from the newest whole checkpoint."
            )
        return False


def join(
    meeting: Message, index: int, timeout: float, flags: dict[str, str] | None = None
) -> Worker:
    """Joins the heartbeat that `coordinate` began; returns when all processes have joined.

    Args:
        meeting: what `coordinate` returned in process 0.
        index: of this process.
        timeout: seconds of silence after which process 0 counts as lost.
        flags: what must be the same in all processes; see `trainer.run.settings.flags_of`.

    Raises:
        RuntimeError: if process 0 cannot be reached, another process has not joined, or one has
            other flags than process 0.
    """
    hosts, port = list(meeting["hosts"]), meeting["port"]
    if index == 0:
        hosts.append("localhost")
    secret = secret_of_heartbeat(meeting["token"])
    deadline = time.monotonic() + timing.JOIN
    while True:
        for host in hosts:
            try:
                found = socket.create_connection((host, port), timing.FAREWELL)
            except OSError:
                continue
            try:
                knock(found, secret, time.monotonic() + timing.FAREWELL)
            except (OSError, NotLetInError):
                found.close()
                continue
            connection = Connection(found)
            connection.send("join", index=index, host=socket.gethostname(), flags=flags or {})
            # Longer than process 0 waits for all others.
            answer = connection.receive_one(timing.JOIN + timing.FAREWELL)
            if answer.get("kind") == "joined":
                return Worker(connection, answer["names"], index, timeout)
            connection.close()
            if answer.get("kind") == "lost":
                raise RunError(f"All processes must join; got: {answer['why']}. Start again.")
        if time.monotonic() > deadline:
            raise RunError(
                f"Process {index} must reach process 0 by TCP; got no connection to "
                f"{', '.join(hosts)}, port {port}. Open the network between the machines, or give "
                "the right address with --distributed.coordinator."
            )
        time.sleep(timing.BEAT)


def secret_of_heartbeat(token: str) -> Secret:
    """What process 0 has told all others over their devices."""
    return Secret(value=token, place="process 0")


def silent(name: str, timeout: float) -> str:
    """Says that a process is lost because nothing comes from it."""
    return f"{name} has given no sign of life for {timeout:g} s (stopped, or its network is down)"


def gone(name: str) -> str:
    """Says that a process is lost because its connection has ended."""
    return f"{name} exited without reporting an error"


def _may_be_of_another(error: BaseException) -> bool:
    """Whether a collective may have raised this error, or an error that led to it."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, jax.errors.JaxRuntimeError):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
