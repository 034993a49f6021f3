"""How jax's coordinator and its clients reach each other, without a port that strangers could use.

jax's coordinator asks nobody who they are: a client that comes to its port under the index of a
process ends the run. So it listens at a Unix socket in a folder of process 0 that only this user
may open, and not on the network. Each other process has such a socket as well, where its own client
connects. What comes there goes over the connection that the process made when it proved that it
knows the secret (`trainer.network.rendezvous`), and from there to the coordinator.

If another process ends, the end does not reach jax, which would abort with a stack trace of C++.
It is reported here, after a while in which the heartbeat can say more about it.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.network import timing
from trainer.network.rendezvous import tell_to_go_on

LONGEST_SOCKET_PATH = 100
"""In bytes; systems allow 104 to 108."""
CHUNK = 1 << 16
RETRY_SECONDS = 0.02

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def private_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for Unix sockets, which only this user may open."""
    # The folder for temporary files may have a path that is too long for the address of a socket.
    is_long = len(tempfile.gettempdir().encode()) > LONGEST_SOCKET_PATH - 32
    return tempfile.TemporaryDirectory(prefix="startrail-", dir="/tmp" if is_long else None)


class Tunnel:
    """Carries bytes between jax and other processes, in a thread."""

    def __init__(self, path: Path, lost: Callable[[str], None]) -> None:
        """Starts the thread.

        Args:
            path: the Unix socket where jax's coordinator, or its client in this process, is.
            lost: called with the name of a process whose connection ended before `leave`.
        """
        self._path = path
        self._lost = lost
        self._leaving = False
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tunnel", daemon=True)
        self._thread.start()

    def serve(self, connections: Mapping[int, socket.socket]) -> None:
        """Connects other processes with the coordinator in this one, as soon as it listens."""
        for index, connection in connections.items():
            self._start(self._serve(f"process {index} of {len(connections) + 1}", connection))

    def enter(self, connection: socket.socket, count: int) -> None:
        """Connects the client in this process with process 0. Returns when the socket is there."""
        ready = threading.Event()
        self._start(self._enter(f"process 0 of {count}", connection, ready))
        ready.wait()

    def leave(self) -> None:
        """From now on the ends of connections are expected."""
        self._leaving = True

    def close(self) -> None:
        """Ends the thread, and with it all connections, when they have carried what was sent."""
        if self._loop.is_closed():
            return
        self.leave()
        asyncio.run_coroutine_threadsafe(self._cancel(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        def start() -> None:
            task = self._loop.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._loop.call_soon_threadsafe(start)

    async def _cancel(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timing.FAREWELL)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, name: str, connection: socket.socket) -> None:
        with connection:
            while True:
                with suppress(FileNotFoundError, ConnectionRefusedError):
                    inside = await asyncio.open_unix_connection(str(self._path))
                    break
                await asyncio.sleep(RETRY_SECONDS)
            with suppress(OSError):
                tell_to_go_on(connection)
            connection.setblocking(False)
            await self._carry(name, await asyncio.open_connection(sock=connection), inside)

    async def _enter(self, name: str, connection: socket.socket, ready: threading.Event) -> None:
        connection.setblocking(False)
        entered: asyncio.Queue[Streams] = asyncio.Queue()
        server = await asyncio.start_unix_server(
            lambda *streams: entered.put_nowait(streams), str(self._path)
        )
        ready.set()
        inside = await entered.get()
        # jax keeps this one connection. Nobody else is to come.
        server.close()
        await self._carry(name, await asyncio.open_connection(sock=connection), inside)

    async def _carry(self, name: str, outside: Streams, inside: Streams) -> None:
        """Carries bytes in both directions until what is inside ends."""
        inward = asyncio.create_task(_copy(outside[0], inside[1]))
        outward = asyncio.create_task(_copy(inside[0], outside[1]))
        try:
            await asyncio.wait({inward, outward}, return_when=asyncio.FIRST_COMPLETED)
            if inward.done() and not self._leaving:
                # Longer than the heartbeat takes to tell this process of a failure elsewhere.
                await asyncio.sleep(2 * timing.FAREWELL)
                if not self._leaving:
                    self._lost(name)
            # What is inside is not to see that the other process has ended.
            await outward
            outside[1].close()
            with suppress(OSError):
                await outside[1].wait_closed()
        finally:
            inward.cancel()
            outward.cancel()
            for _, writer in (outside, inside):
                writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
