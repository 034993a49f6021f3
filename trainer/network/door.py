"""Where process 0 listens, and how only processes that know the secret get in.

Anybody may connect to a port. What a stranger can take is bounded: one line of fixed length is read
from a connection, in a time that does not grow with what comes, and of the connections that have
not proved themselves only so many are kept, the newest.
"""

from __future__ import annotations

import hmac
import ipaddress
import selectors
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from trainer.errors import RunError
from trainer.network import timing
from trainer.network.options import Distributed
from trainer.network.secret import (
    ANSWER_LENGTH,
    CHALLENGE_LENGTH,
    PROOF_LENGTH,
    Secret,
    make_challenge,
)
from trainer.printable import printable

MOST_STRANGERS = 256
"""How many connections may be open that have not proved yet that they know the secret."""
PROCESS_0, OTHER = "process 0", "another process"


def listen(options: Distributed, port: int = 0) -> socket.socket:
    """A socket that listens on the interface that process 0 was told to use.

    Args:
        options: the host of the coordinator, or the address to use instead.
        port: the port; any that is free by default.

    Raises:
        OSError: if the host is unknown, is not this machine, or the port is taken.
    """
    host = options.bind or options.coordinator_host
    assert host is not None
    if options.bind is None and _is_loopback_only_here(host):
        note = (
            f"distributed.coordinator: here {host} is an address that other machines cannot reach; "
            "process 0 listens on all interfaces. Name one with --distributed.bind."
        )
        print(printable(note), file=sys.stderr)
        host = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    failure = OSError(f"{host} has no address")
    for family, *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        is_any = family == socket.AF_INET6 and address[0] == "::"
        try:
            return socket.create_server(
                address, family=family, dualstack_ipv6=is_any and socket.has_dualstack_ipv6()
            )
        except OSError as error:
            failure = error
    raise failure


def _is_loopback_only_here(host: str) -> bool:
    """Whether a name means this machine only to itself, as in the /etc/hosts of Debian."""
    if host == "localhost" or _is_address(host):
        return False
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return all(
        ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found
    )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


class NotLetInError(RunError):
    """The other end does not know the secret of this process."""


def knock(connection: socket.socket, secret: Secret, deadline: float) -> None:
    """Proves to process 0 that this process knows the secret, and lets it prove the same.

    Args:
        connection: to process 0.
        secret: what both know.
        deadline: when to give up, in seconds of `time.monotonic`.

    Raises:
        NotLetInError: if the other end closes the connection at the proof, or proves nothing.
        OSError: if the connection ends before that, or nothing comes in time.
    """
    theirs, own = _read_line(connection, CHALLENGE_LENGTH, deadline), make_challenge()
    if len(theirs) < CHALLENGE_LENGTH:
        raise ConnectionError("no answer from process 0")
    connection.sendall(own + secret.proof(OTHER, theirs, own))
    try:
        found = _read_line(connection, PROOF_LENGTH, deadline)
    except ConnectionResetError:
        found = b""
    if not hmac.compare_digest(found, secret.proof(PROCESS_0, theirs, own)):
        raise NotLetInError(
            "All processes must know the same secret; got another one at process 0, or a program "
            f"that is not of this run. This process has its secret from {secret.place}. Give all "
            "processes the same."
        )


def _read_line(connection: socket.socket, length: int, deadline: float) -> bytes:
    """A line of a fixed length, or what comes of it before the connection ends."""
    data = b""
    while len(data) < length:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        part = connection.recv(length - len(data))
        if not part:
            break
        data += part
    return data


@dataclass
class _Stranger:
    """A connection that has not proved anything yet."""

    challenge: bytes
    deadline: float
    received: bytes = b""


class Door:
    """Accepts connections and lets those in that know the secret. A context manager.

    All sockets of one wait belong to it; it has no thread.
    """

    def __init__(self, listener: socket.socket, secret: Secret) -> None:
        """Takes over a listening socket, which it closes at the end."""
        self._listener = listener
        self._secret = secret
        # By age. `epoll` has no limit of 1,024, as `select` has.
        self._strangers: dict[socket.socket, _Stranger] = {}
        self._watched: set[socket.socket] = set()
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self.num_refused = 0
        """How many connections said something that was no proof."""

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *error: Any) -> None:
        for stranger in list(self._strangers):
            self._drop(stranger)
        self._selector.close()
        self._listener.close()

    def serve(self, seconds: float) -> tuple[list[socket.socket], list[socket.socket]]:
        """Waits until something happens, and for some time at most.

        Returns:
            The connections that have just been let in, and the watched ones with something to read.
        """
        deadlines = [stranger.deadline for stranger in self._strangers.values()]
        until = min([time.monotonic() + seconds, *deadlines])
        admitted, readable = [], []
        for key, _ in self._selector.select(max(until - time.monotonic(), 0)):
            connection: Any = key.fileobj
            if connection is self._listener:
                self._accept()
            elif connection in self._watched:
                readable.append(connection)
            # It may have been dropped meanwhile, because newer ones came.
            elif connection in self._strangers and self._hear(connection):
                admitted.append(connection)
        now = time.monotonic()
        for connection, stranger in list(self._strangers.items()):
            if stranger.deadline <= now:
                self._drop(connection)
        return admitted, readable

    def watch(self, connection: socket.socket) -> None:
        """Includes a connection that was let in in the next waits."""
        self._watched.add(connection)
        self._selector.register(connection, selectors.EVENT_READ)

    def forget(self, connection: socket.socket) -> None:
        """Ends the watch over a connection."""
        self._watched.discard(connection)
        self._selector.unregister(connection)

    def _accept(self) -> None:
        """Accepts what has come, as far as it does not crowd out strangers of the same call."""
        for _ in range(MOST_STRANGERS // 2):
            try:
                connection = self._listener.accept()[0]
            except BlockingIOError:
                return
            except OSError:
                # Of the one that connected, or this process may open no more files.
                if self._strangers:
                    self._drop(next(iter(self._strangers)))
                else:
                    time.sleep(timing.BEAT / 10)
                return
            connection.setblocking(False)
            challenge = make_challenge()
            with suppress(OSError):
                connection.sendall(challenge)
            if len(self._strangers) >= MOST_STRANGERS:
                self._drop(next(iter(self._strangers)))
            deadline = time.monotonic() + timing.GREETING
            self._strangers[connection] = _Stranger(challenge, deadline)
            self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, connection: socket.socket) -> bool:
        """Reads from a stranger; returns whether that is one no longer."""
        stranger = self._strangers[connection]
        try:
            part = connection.recv(ANSWER_LENGTH - len(stranger.received))
        except BlockingIOError:
            return False
        except OSError:
            part = b""
        stranger.received += part
        if part and len(stranger.received) < ANSWER_LENGTH:
            return False
        theirs, own = stranger.challenge, stranger.received[:CHALLENGE_LENGTH]
        expected = own + self._secret.proof(OTHER, theirs, own)
        if not hmac.compare_digest(stranger.received, expected):
            self.num_refused += bool(stranger.received)
            self._drop(connection)
            return False
        del self._strangers[connection]
        self._selector.unregister(connection)
        with suppress(OSError):
            connection.sendall(self._secret.proof(PROCESS_0, theirs, own))
        connection.setblocking(True)
        return True

    def _drop(self, connection: socket.socket) -> None:
        del self._strangers[connection]
        self._selector.unregister(connection)
        connection.close()
