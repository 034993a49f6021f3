"""What process 0 does for all processes of a run in their heartbeat."""

from __future__ import annotations

import secrets
import selectors
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from trainer.network import timing
from trainer.network.connection import Connection, Message
from trainer.network.door import Door, listen
from trainer.network.options import Distributed
from trainer.network.secret import Secret
from trainer.processes.worker import gone, secret_of_heartbeat, silent
from trainer.run.exit import describe

# How many flags are shown in which a process differs from process 0.
SHOWN_FLAGS = 8


class Coordinator:
    """Lets all processes in, passes on what they say, and notices when one is lost; in threads."""

    def __init__(self, listener: socket.socket, secret: Secret, count: int, timeout: float) -> None:
        """Starts the threads.

        Args:
            listener: where the processes connect.
            secret: what a process must know in order to be let in.
            count: number of processes.
            timeout: seconds of silence after which a process counts as lost.
        """
        self._listener = listener
        self._secret = secret
        self._count = count
        self._timeout = timeout
        self._connections: dict[int, Connection] = {}
        self._flags: dict[int, dict[str, str]] = {}
        self._gathering = True
        self._following = False
        self._joined = threading.Condition()
        self._names = [f"process {index} of {count}" for index in range(count)]
        self._calls: dict[int, int] = {}
        self._done: set[int] = set()
        self._left: set[int] = set()
        self._asked = False
        threading.Thread(target=self._run, name="heartbeat coordinator", daemon=True).start()

    def _run(self) -> None:
        try:
            why = self._gather() or self._follow()
        except Exception as error:
            why = f"the heartbeat in {self._names[0]}: {describe(error)}"
        if why is None:
            self._part("end")
        else:
            self._part("lost", why=why)

    def _gather(self) -> str | None:
        """Returns when all have joined, or why they cannot."""
        threading.Thread(target=self._accept, name="heartbeat listener", daemon=True).start()
        with self._joined:
            self._joined.wait_for(lambda: len(self._connections) == self._count, timing.JOIN)
            self._gathering = False
        for index, name in enumerate(self._names):
            if index not in self._connections:
                return f"{name} did not join within {timing.JOIN:g} s"
        difference = self._different_flags()
        if difference is None:
            self._tell("joined", names=self._names)
        return difference

    def _accept(self) -> None:
        """Lets processes in until all have joined. Each has a thread, so that none waits."""
        with Door(self._listener, self._secret) as door:
            while self._gathering:
                for connection in door.serve(timing.BEAT)[0]:
                    threading.Thread(
                        target=self._admit,
                        args=[Connection(connection)],
                        name="heartbeat admission",
                        daemon=True,
                    ).start()

    def _admit(self, connection: Connection) -> None:
        """Lets a process in if it says at once which it is."""
        first = connection.receive_one(timing.GREETING)
        index, flags = first.get("index"), first.get("flags")
        with self._joined:
            if (
                self._gathering
                and isinstance(index, int)
                and isinstance(flags, dict)
                and 0 <= index < self._count
            ):
                self._names[index] = f"process {index} of {self._count} ({first.get('host')})"
                self._connections[index] = connection
                self._flags[index] = flags
                self._joined.notify_all()
                return
        connection.close()

    def _different_flags(self) -> str | None:
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
        """Listens until all have left; returns why one is lost, if one is."""
        self._following = True
        with selectors.DefaultSelector() as selector:
            for index, connection in self._connections.items():
                connection.heard = time.monotonic()
                selector.register(connection.socket, selectors.EVENT_READ, index)
            beaten, now = 0.0, time.monotonic()
            while len(self._left) < self._count:
                found = selector.select(timing.BEAT)
                last, now = now, time.monotonic()
                for connection in self._connections.values():
                    connection.heard += timing.suspended(last, now)
                for key, _ in found:
                    why = self._listen(key.data)
                    if why is not None:
                        return why
                for index, connection in self._connections.items():
                    if now - connection.heard > self._timeout:
                        return silent(self._names[index], self._timeout)
                if now - beaten > timing.BEAT:
                    beaten = now
                    self._tell("beat")
        return None

    def _listen(self, index: int) -> str | None:
        """Receives messages of a process; returns why it is lost, if it is."""
        messages = self._connections[index].receive()
        if messages is None:
            return gone(self._names[index])
        for message in messages:
            kind = message["kind"]
            if kind == "failed":
                return f"{self._names[index]}: {message['why']}"
            if kind == "done":
                self._done.add(index)
                if len(self._done) == self._count:
                    self._tell("leave")
            elif kind == "left":
                self._left.add(index)
            elif kind == "wish" and not self._asked:
                self._asked = True
                self._tell("count")
            elif kind == "calls":
                self._calls[index] = message["calls"]
                if len(self._calls) == self._count:
                    # The first call that no process has made yet.
                    self._tell("stop_at", call=max(self._calls.values()) + 1)
        return None

    def _tell(self, kind: str, **values: Any) -> None:
        for connection in self._connections.values():
            connection.send(kind, **values)

    def _part(self, kind: str, **values: Any) -> None:
        """Sends a last message, to process 0 after all others: this thread ends with it."""
        deadline = time.monotonic() + timing.FAREWELL
        others = [connection for index, connection in self._connections.items() if index]
        own = [connection for index, connection in self._connections.items() if not index]
        for connections in (others, own):
            with selectors.DefaultSelector() as selector:
                for connection in connections:
                    connection.send(kind, **values)
                    with suppress(OSError):
                        connection.socket.shutdown(socket.SHUT_WR)
                    selector.register(connection.socket, selectors.EVENT_READ, connection)
                # Closing a connection with unread data would destroy the message just sent.
                while selector.get_map() and (left := deadline - time.monotonic()) > 0:
                    for key, _ in selector.select(min(left, timing.BEAT)):
                        if key.data.receive() is None:
                            selector.unregister(key.fileobj)
                    if connections is others and self._following:
                        # It waits for longer than it may hear nothing.
                        for connection in own:
                            connection.send("beat")
            for connection in connections:
                connection.close()


def coordinate(options: Distributed, count: int) -> Message:
    """Begins the heartbeat, in process 0.

    Args:
        options: where process 0 listens, and after how long a silent process counts as lost.
        count: number of processes.

    Returns:
        What all processes need in order to `join`.
    """
    listener = listen(options)
    host, port = listener.getsockname()[:2]
    token = secrets.token_hex(16)
    Coordinator(listener, secret_of_heartbeat(token), count, options.timeout)
    return {"hosts": _hosts(options, host), "port": port, "token": token}


def _hosts(options: Distributed, bound: str) -> list[str]:
    """Names and addresses at which others may reach this process, the likeliest first."""
    if bound not in ("::", "0.0.0.0"):
        # Through a proxy or a translated address, only the name that others were given may do.
        return list(dict.fromkeys(host for host in (options.coordinator_host, bound) if host))
    hosts = [options.coordinator_host, socket.gethostname()]
    with suppress(OSError):
        hosts += [str(found[4][0]) for found in socket.getaddrinfo(socket.gethostname(), None)]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unsent:
        # Gives the address of the interface of the default route. Nothing is sent.
        unsent.connect(("192.0.2.1", 9))
        hosts.append(unsent.getsockname()[0])
    return list(dict.fromkeys(host for host in hosts if host))
