"""What comes to a port that anybody can reach. None of it may keep a run from starting."""

import contextlib
import resource
import socket
import threading
import time

NUM_IDLE = 1_100
GARBAGE = (
    b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(30),  # A client of jax's coordinator.
    b'{"index": 1, "processes": 2}\n',
    b'{"kind": "join", "token": "guessed", "index": 1, "flags": {}}\n',
    b"[" * 100_000 + b"\n",
    b"0" * 32 + b"\n" + b"0" * 64 + b"\n",  # A forged proof.
    b"\xff\n",
    b"\n" * 98,
    b"",
)
GIGABYTE = 1 << 30


class Strangers:
    """Connections to one port, all at the same time. A context manager, which closes them."""

    def __init__(self, port):
        self._port = port
        self._open = contextlib.ExitStack()
        self._over = threading.Event()
        self.sent = 0
        """Of the gigabyte, in bytes."""

    def __enter__(self):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = 4 * NUM_IDLE if most == resource.RLIM_INFINITY else min(4 * NUM_IDLE, most)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        if before[0] < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
            self._open.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        for _ in range(NUM_IDLE):
            self._connect()
        for garbage in GARBAGE:
            with contextlib.suppress(OSError):
                self._connect().sendall(garbage)
        for action in (self._drip, self._flood):
            thread = threading.Thread(target=action, args=[self._connect()], daemon=True)
            thread.start()
            self._open.callback(thread.join, 20)
        self._open.callback(self._over.set)
        return self

    def __exit__(self, *error):
        self._open.close()

    def _connect(self):
        return self._open.enter_context(socket.create_connection(("localhost", self._port), 20))

    def _drip(self, connection):
        with contextlib.suppress(OSError):
            while not self._over.wait(0.05):
                connection.sendall(b"x")

    def _flood(self, connection):
        data = bytes(1 << 20)
        with contextlib.suppress(OSError):
            while self.sent < GIGABYTE and not self._over.is_set():
                connection.sendall(data)
                self.sent += len(data)


def is_closed(connection, seconds=10):
    """Whether the other end closes a connection within some time; what it sends is dropped."""
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            if not connection.recv(1 << 10):
                return True
    except TimeoutError:
        return False
    except OSError:
        return True
    return False
