"""A watch among the processes of a run: when one fails all end, and say which it was and why.

Without it a process whose neighbour is gone waits in a collective, for minutes or for ever. Each
process connects to process 0 and tells it every second that it lives, from a thread of its own, so
that this goes on while the program waits for devices. Process 0 tells all

    lost      a process failed, has ended without a word, or is silent: end, and say so
    count     how often have you asked whether to stop? wait with the next answer
    stop_at   answer yes from this call on
    end       all are done

A message is a line of JSON. Process 0 takes part as the others do, over a connection to itself.
"""

from __future__ import annotations

import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from trainer.errors import RunError
from trainer.processes.distributed import (
    Distributed,
    listen_anywhere,
)
from trainer.run.exit import (
    describe,
    end_now,
)

BEAT_SECONDS = 1.0
# For all to connect. They have just met, in a broadcast.
JOIN_SECONDS = 30.0
# Within which those that are told of a loss take note of it.
FAREWELL_SECONDS = 3.0
# A collective fails on the neighbours of a process first, and on them only: who fails in one waits
# for word of another's failure, before it believes that the failure is its own.
VERDICT_SECONDS = 5.0
LONGEST_LINE = 1 << 20
LONGEST_ADDRESS = 2048
# Of the flags in which a process differs from process 0.
SHOWN_FLAGS = 8

Message = dict[str, Any]
Flags = dict[str, str]


@contextmanager
def watch(options: Distributed, flags: Flags | None = None) -> Iterator[Callable[[bool], bool]]:
    """Ends this process, with status 1, when another one fails, and the others when this one does.

    For everything between the choice of devices and the end of the program: who leaves waits for
    all to leave. For one process alone it does nothing.

    Args:
        options: where process 0 is, and after how long a silent process counts as lost.
        flags: what must be the same in all processes; see `settings.flags_of`.

    Yields:
        A function for the wish to stop, whose answer is the same on all processes: their n-th
        calls all return False, or all True. From the first True on, all answers are True.

    Raises:
        RuntimeError: if the processes cannot reach process 0, or have other flags than it.
    """
    if jax.process_count() == 1:
        yield bool
        return
    index, count = jax.process_index(), jax.process_count()
    meeting = lead(_own_hosts(options), count, options.timeout) if index == 0 else {}
    # By way of the devices, by which they have just met.
    member = join(_broadcast(meeting), index, options.timeout, flags)
    try:
        yield member.agree
        member.leave()
    except BaseException as error:
        member.fail(error)


class Line:
    """A connection that carries messages; to be read by one thread, written by any."""

    def __init__(self, connection: socket.socket) -> None:
        # Longer than process 0 waits for all.
        connection.settimeout(JOIN_SECONDS + FAREWELL_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.heard = time.monotonic()
        self._received = b""
        self._sending = threading.Lock()

    def send(self, kind: str, **values: Any) -> None:
        """Sends a message; where nobody receives it, whoever reads will notice."""
        data = json.dumps({"kind": kind, **values}).encode() + b"\n"
        with self._sending, suppress(OSError):
            self.connection.sendall(data)

    def receive(self) -> list[Message] | None:
        """Waits for messages; None at the end of the connection."""
        try:
            data = self.connection.recv(1 << 16)
        except OSError:
            return None
        if not data or len(self._received) > LONGEST_LINE:
            return None
        self.heard = time.monotonic()
        *lines, self._received = (self._received + data).split(b"\n")
        try:
            return [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            return None

    def receive_one(self, seconds: float) -> Message:
        """Waits for one message and no more of them; it is empty if there comes something else.

        Args:
            seconds: for the whole of it.
        """
        data = bytearray()
        deadline = time.monotonic() + seconds
        usual = self.connection.gettimeout()
        try:
            while len(data) < LONGEST_LINE and not data.endswith(b"\n"):
                left = deadline - time.monotonic()
                self.connection.settimeout(max(left, 0.001))
                byte = self.connection.recv(1)
                if not byte or left < 0:
                    return {}
                data += byte
            self.connection.settimeout(usual)
            message = json.loads(data)
        except (OSError, ValueError, RecursionError):
            return {}
        return message if isinstance(message, dict) else {}

    def close(self) -> None:
        self.connection.close()


class Member:
    """What a process does in the watch: a thread that tells that it lives, and obeys process 0."""

    def __init__(self, line: Line, names: list[str], index: int, timeout: float) -> None:
        self._line = line
        self._names = names
        self._name = names[index]
        self._timeout = timeout
        self._changed = threading.Condition()
        self._calls = 0
        self._wished = False
        self._counted = False
        self._stop_at: int | None = None
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def agree(self, wish: bool) -> bool:
        """Whether to stop; see `watch`."""
        with self._changed:
            self._calls += 1
            if wish and not self._wished:
                self._wished = True
                self._line.send("wish")
            # Process 0 was told of fewer calls than this, and may decide on it.
            while self._counted and self._stop_at is None:
                self._changed.wait()
            return self._stop_at is not None and self._calls >= self._stop_at

    def leave(self) -> None:
        """Returns when all processes are here."""
        self._line.send("done")
        self._thread.join()

    def fail(self, error: BaseException) -> NoReturn:
        """Ends all processes, this one with the message of `error`."""
        try:
            if _may_be_of_another(error):
                time.sleep(VERDICT_SECONDS)
            self._failed = True
            short = str(error).partition("\n")[0]
            self._line.send("failed", why=f"{type(error).__name__}: {short}")
            # Until it comes back, and process 0 has told all.
            self._thread.join(2 * FAREWELL_SECONDS)
        finally:  # Of a second Ctrl-C too.
            end_now(f"{self._name}: {describe(error)}")

    def _run(self) -> None:
        try:
            while self._listen():
                self._line.send("beat")
        finally:
            self._line.close()

    def _listen(self) -> bool:
        """Takes messages for a beat; returns whether there may be more."""
        since = time.monotonic()
        if not _is_readable(self._line.connection):
            self._line.heard += _stopped_since(since)
            if time.monotonic() - self._line.heard < self._timeout:
                return True
            return self._end(_silent(self._names[0], self._timeout))
        messages = self._line.receive()
        if messages is None:
            return self._end(f"{self._names[0]} has ended without a word")
        return all(self._obey(message) for message in messages)

    def _obey(self, message: Message) -> bool:
        """Does what process 0 says; returns whether there may be more."""
        kind = message["kind"]
        if kind == "lost":
            return self._end(message["why"])
        if kind == "count":
            with self._changed:
                self._counted = True
                self._line.send("calls", calls=self._calls)
        if kind == "stop_at":
            with self._changed:
                self._stop_at = message["call"]
                self._changed.notify_all()
        return kind != "end"

    def _end(self, why: str) -> Literal[False]:
        if not self._failed:
            end_now(
                f"{self._name} ends, as another has failed: {why.rstrip('.')}. When that is "
                "mended, the same command goes on from the newest whole checkpoint."
            )
        return False


class Leader:
    """What process 0 does for all, in a thread."""

    def __init__(self, listener: socket.socket, token: str, count: int, timeout: float) -> None:
        self._listener = listener
        self._token = token
        self._count = count
        self._timeout = timeout
        self._lines: dict[int, Line] = {}
        self._flags: dict[int, Flags] = {}
        self._gathering = True
        self._joined = threading.Condition()
        self._names = [f"process {index} of {count}" for index in range(count)]
        self._calls: dict[int, int] = {}
        self._done: set[int] = set()
        self._asked = False
        threading.Thread(target=self._run, name="watch of all", daemon=True).start()

    def _run(self) -> None:
        try:
            why = self._gather() or self._follow()
        except Exception as error:
            why = f"the watch in {self._names[0]}: {describe(error)}"
        if why is None:
            self._part("end")
        else:
            self._part("lost", why=why)

    def _gather(self) -> str | None:
        """Returns when all have joined, or why they cannot."""
        threading.Thread(target=self._accept, name="watch for all", daemon=True).start()
        with self._joined:
            self._joined.wait_for(lambda: len(self._lines) == self._count, JOIN_SECONDS)
            self._gathering = False
        for index, name in enumerate(self._names):
            if index not in self._lines:
                return f"{name} did not join the watch in {JOIN_SECONDS:g} s"
        other = self._other_flags()
        if other is None:
            self._tell("joined", names=self._names)
        return other

    def _accept(self) -> None:
        """Takes connections as long as there are some to come; none waits for another."""
        with self._listener:
            while self._gathering:
                if _is_readable(self._listener):
                    with suppress(OSError):
                        line = Line(self._listener.accept()[0])
                        threading.Thread(target=self._admit, args=[line], daemon=True).start()

    def _admit(self, line: Line) -> None:
        """Takes a connection for that of a process, if it says so at once and knows the token."""
        first = line.receive_one(FAREWELL_SECONDS)
        index, flags = first.get("index"), first.get("flags")
        knows = first.get("token") == self._token
        with self._joined:
            if (
                self._gathering
                and knows
                and isinstance(index, int)
                and isinstance(flags, dict)
                and 0 <= index < self._count
            ):
                self._names[index] = f"process {index} of {self._count} ({first.get('host')})"
                self._lines[index] = line
                self._flags[index] = flags
                self._joined.notify_all()
                return
        line.close()

    def _other_flags(self) -> str | None:
        """Says which process has other flags than process 0, if one has."""
        of_0 = self._flags[0]
        for index, own in sorted(self._flags.items()):
            names = [name for name in of_0 | own if of_0.get(name) != own.get(name)]
            if names:
                here, there = (
                    " ".join(flags[name] for name in names[:SHOWN_FLAGS] if name in flags)
                    for flags in (own, of_0)
                )
                more = "" if len(names) <= SHOWN_FLAGS else f" and {len(names) - SHOWN_FLAGS} more"
                return (
                    f"{self._names[index]} has {here or 'none'}{more}, and process 0 "
                    f"{there or 'none'}{more}: all must have the same flags"
                )
        return None

    def _follow(self) -> str | None:
        """Listens until all are done; returns why one is lost, if one is."""
        with selectors.DefaultSelector() as selector:
            for index, line in self._lines.items():
                line.heard = time.monotonic()
                selector.register(line.connection, selectors.EVENT_READ, index)
            beaten = 0.0
            while len(self._done) < self._count:
                since = time.monotonic()
                found = selector.select(BEAT_SECONDS)
                stopped = _stopped_since(since)
                for line in self._lines.values():
                    line.heard += stopped
                for key, _ in found:
                    why = self._listen(key.data)
                    if why is not None:
                        return why
                for index, line in self._lines.items():
                    if time.monotonic() - line.heard > self._timeout:
                        return _silent(self._names[index], self._timeout)
                if time.monotonic() - beaten > BEAT_SECONDS:
                    beaten = time.monotonic()
                    self._tell("beat")
        return None

    def _listen(self, index: int) -> str | None:
        """Takes messages of a process; returns why it is lost, if it is."""
        messages = self._lines[index].receive()
        if messages is None:
            return f"{self._names[index]} has ended without a word"
        for message in messages:
            kind = message["kind"]
            if kind == "failed":
                return f"{self._names[index]}: {message['why']}"
            if kind == "done":
                self._done.add(index)
            elif kind == "wish" and not self._asked:
                self._asked = True
                self._tell("count")
            elif kind == "calls":
                self._calls[index] = message["calls"]
                if len(self._calls) == self._count:
                    # The first call that none has made yet.
                    self._tell("stop_at", call=max(self._calls.values()) + 1)
        return None

    def _tell(self, kind: str, **values: Any) -> None:
        for line in self._lines.values():
            line.send(kind, **values)

    def _part(self, kind: str, **values: Any) -> None:
        """A last message, to process 0 after all others: this thread ends with it."""
        deadline = time.monotonic() + FAREWELL_SECONDS
        others = [line for index, line in self._lines.items() if index]
        for lines in (others, [self._lines[0]] if 0 in self._lines else []):
            for line in lines:
                line.send(kind, **values)
                with suppress(OSError):
                    line.connection.shutdown(socket.SHUT_WR)
            for line in lines:
                # What was not read before a connection is closed takes with it what was sent last.
                while (left := deadline - time.monotonic()) > 0:
                    line.connection.settimeout(left)
                    if line.receive() is None:
                        break
                line.close()


def lead(hosts: list[str], count: int, timeout: float) -> Message:
    """Begins the watch, in process 0; returns what the others need in order to join."""
    listener = listen_anywhere()
    token = secrets.token_hex(16)
    Leader(listener, token, count, timeout)
    return {"hosts": hosts, "port": listener.getsockname()[1], "token": token}


def join(meeting: Message, index: int, timeout: float, flags: Flags | None = None) -> Member:
    """Joins the watch that `lead` began, as process `index`; returns when all have.

    Raises:
        RuntimeError: if process 0 cannot be reached, another process has not joined, or one has
            other flags than process 0.
    """
    hosts, port = ["localhost"] if index == 0 else meeting["hosts"], meeting["port"]
    deadline = time.monotonic() + JOIN_SECONDS
    while True:
        for host in hosts:
            try:
                line = Line(socket.create_connection((host, port), FAREWELL_SECONDS))
            except OSError:
                continue
            token = meeting["token"]
            host = socket.gethostname()
            line.send("join", token=token, index=index, host=host, flags=flags or {})
            # Longer than process 0 waits for all.
            answer = line.receive_one(JOIN_SECONDS + FAREWELL_SECONDS)
            if answer.get("kind") == "joined":
                return Member(line, answer["names"], index, timeout)
            line.close()
            if answer.get("kind") == "lost":
                raise RunError(f"All processes must join; got: {answer['why']}. Start again.")
        if time.monotonic() > deadline:
            raise RunError(
                f"Process {index} must reach process 0 by TCP; it does at none of "
                f"{', '.join(hosts)}, port {port}. Open the network between the machines, or give "
                "the right address by --distributed.coordinator."
            )
        time.sleep(BEAT_SECONDS)


def _own_hosts(options: Distributed) -> list[str]:
    """Names and addresses of this machine by which others may reach it, the likeliest first."""
    hosts = [options.coordinator_host, socket.gethostname()]
    with suppress(OSError):
        hosts += [str(found[4][0]) for found in socket.getaddrinfo(socket.gethostname(), None)]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unsent:
        # The address of the interface of the default route. Nothing is sent.
        unsent.connect(("192.0.2.1", 9))
        hosts.append(unsent.getsockname()[0])
    return list(dict.fromkeys(host for host in hosts if host))


def _broadcast(meeting: Message) -> Message:
    """What process 0 gives, on all."""
    data = np.zeros(LONGEST_ADDRESS, np.uint8)
    text = json.dumps(meeting).encode()
    data[: len(text)] = np.frombuffer(text, np.uint8)
    sent = np.asarray(multihost_utils.broadcast_one_to_all(data))
    return json.loads(bytes(sent).rstrip(b"\0"))


def _is_readable(connection: socket.socket) -> bool:
    """Waits for it for a beat."""
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        return bool(selector.select(BEAT_SECONDS))


def _stopped_since(since: float) -> float:
    """For how long this process itself was stopped in a wait for a beat: others say nothing then.

    By Ctrl-Z, or with its virtual machine.
    """
    excess = time.monotonic() - since - BEAT_SECONDS
    return excess if excess > BEAT_SECONDS else 0.0


def _silent(name: str, timeout: float) -> str:
    return f"{name} has given no sign of life for {timeout:g} s (stopped, or its network is down)"


def _may_be_of_another(error: BaseException) -> bool:
    """Whether a collective may have raised this error, or what led to it."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, jax.errors.JaxRuntimeError):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
