"""A TCP connection that carries messages, each of which is a line of JSON."""

from __future__ import annotations

import json
import selectors
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from trainer.network import timing

LONGEST_LINE = 1 << 20

Message = dict[str, Any]


class Connection:
    """One end of a connection between two processes. One thread reads it, any thread writes."""

    def __init__(self, connection: socket.socket) -> None:
        # Longer than process 0 waits for all others.
        connection.settimeout(timing.JOIN + timing.FAREWELL)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.heard = time.monotonic()
        """When the other end was heard last, in seconds of `time.monotonic`."""
        self._received = b""
        self._sending = threading.Lock()

    def send(self, kind: str, **values: Any) -> None:
        """Sends a message. A failure is ignored: the thread that reads will notice it."""
        data = json.dumps({"kind": kind, **values}).encode() + b"\n"
        with self._sending, suppress(OSError):
            self.socket.sendall(data)

    def receive(self) -> list[Message] | None:
        """Waits for messages; None at the end of the connection."""
        try:
            data = self.socket.recv(1 << 16)
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
        """Waits for a single message, and reads nothing beyond it.

        Args:
            seconds: time for the whole message.

        Returns:
            The message; an empty one if none comes in time, or something else does.
        """
        data = bytearray()
        deadline = time.monotonic() + seconds
        usual = self.socket.gettimeout()
        try:
            while len(data) < LONGEST_LINE and not data.endswith(b"\n"):
                left = deadline - time.monotonic()
                self.socket.settimeout(max(left, 0.001))
                byte = self.socket.recv(1)
                if not byte or left < 0:
                    return {}
                data += byte
            self.socket.settimeout(usual)
            message = json.loads(data)
        except (OSError, ValueError, RecursionError):
            return {}
        return message if isinstance(message, dict) else {}

    def close(self) -> None:
        """Closes this end."""
        self.socket.close()


def is_readable(waiting: socket.socket) -> bool:
    """Whether a socket has something to read or to accept, after at most a beat."""
    with selectors.DefaultSelector() as selector:
        selector.register(waiting, selectors.EVENT_READ)
        return bool(selector.select(timing.BEAT))
