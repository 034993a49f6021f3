"""How processes that were given one address find each other, before jax connects them.

Process 0 listens at the address. Each other process connects and sends a line of JSON, its index
and the number of processes. When all have done so, process 0 answers with a free port, at which
jax is to connect them for this start alone. At the given port jax would go on listening, and a
process of another start that came there by mistake would end a healthy run.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from contextlib import ExitStack, suppress
from typing import Any

from trainer.errors import RunError
from trainer.processes.options import Distributed

# Time for the name of process 0's host to become known: Kubernetes creates it when that starts.
UNKNOWN_HOST_SECONDS = 20.0
RETRY_SECONDS = 0.5
CONNECT_SECONDS = 5.0
LONGEST_GREETING = 1024


def meet(options: Distributed, deadline: float) -> str:
    """Waits for all processes; returns the address that jax is to use.

    Args:
        options: where process 0 listens, and which process this is.
        deadline: when to give up, in seconds of `time.monotonic`.

    Raises:
        RuntimeError: if the address cannot be used, not all processes come in time, or two of them
            do not fit each other.
    """
    if options.index == 0:
        return f"{_host(options)}:{_receive_others(options, deadline)}"
    return f"{_host(options)}:{_find_process_0(options, deadline)}"


def listen_anywhere(port: int = 0) -> socket.socket:
    """A socket that listens on all addresses of this machine, on a free port by default."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def not_all_there(options: Distributed) -> str:
    """The message for a start to which not all processes came in time."""
    count = "All" if options.processes is None else f"All {options.processes}"
    return (
        f"{count} processes must start within {options.start_timeout:g} s; got fewer. Start the "
        "others, with the same coordinator and each with its own index, or use a longer "
        "--distributed.start-timeout."
    )


def _host(options: Distributed) -> str:
    """The host as the address has it: an IPv6 address stays in brackets."""
    assert options.coordinator is not None
    return options.coordinator.rpartition(":")[0]


def _receive_others(options: Distributed, deadline: float) -> int:
    """Waits in process 0 until all others are connected, and tells them the port to use."""
    assert options.coordinator_port is not None
    try:
        listener = listen_anywhere(options.coordinator_port)
    except OSError as error:
        raise RunError(
            "distributed.coordinator must name a port that is free where process 0 runs; got "
            f"{options.coordinator}: {error.strerror}. Use another port."
        ) from error
    with listener, _Reception(listener, options) as reception:
        while not reception.is_complete:
            left = deadline - time.monotonic()
            if left < 0:
                raise RunError(not_all_there(options))
            reception.serve(left)
        with listen_anywhere() as free:
            port = free.getsockname()[1]
        reception.answer_all(port)
    return port


class _Reception:
    """The connections to process 0 while not all processes have come. A context manager."""

    def __init__(self, listener: socket.socket, options: Distributed) -> None:
        self._listener = listener
        self._options = options
        self._here: dict[int, socket.socket] = {}
        self._connections = ExitStack()
        self._selector = self._connections.enter_context(selectors.DefaultSelector())
        self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> _Reception:
        return self

    def __exit__(self, *error: Any) -> None:
        self._connections.close()

    @property
    def is_complete(self) -> bool:
        """Whether every other process is connected and has greeted."""
        assert self._options.processes is not None
        return len(self._here) == self._options.processes - 1

    def serve(self, seconds: float) -> None:
        """Waits for connections, greetings and ends of connections, and treats what has come."""
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self._accept()
            else:
                self._receive(key.fileobj, key.data)

    def answer_all(self, port: int) -> None:
        """Tells all processes the port to use."""
        for connection in self._here.values():
            _answer(connection, port=port)

    def _accept(self) -> None:
        with suppress(OSError):
            connection = self._connections.enter_context(self._listener.accept()[0])
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, bytearray())

    def _receive(self, connection: Any, received: bytearray) -> None:
        part = b""
        with suppress(OSError):
            part = connection.recv(LONGEST_GREETING)
        received.extend(part)
        known = [index for index, other in self._here.items() if other is connection]
        if part and not known and len(received) < LONGEST_GREETING:
            if not received.endswith(b"\n"):
                return
            index, refusal = self._read_greeting(_read(received))
            if index is not None and refusal is None:
                self._here[index] = connection
                return
            if refusal is not None:
                _answer(connection, refused=refusal)
        # A process that ended before all were there, a stranger, or one that was refused.
        for index in known:
            del self._here[index]
        self._selector.unregister(connection)
        connection.close()

    def _read_greeting(self, greeting: dict[str, Any]) -> tuple[int | None, str | None]:
        """The index of the process that greets, if it is one, and why it is refused, if it is."""
        index, processes = greeting.get("index"), greeting.get("processes")
        if type(index) is not int or type(processes) is not int:
            return None, None
        if processes != self._options.processes:
            return index, (
                "distributed.processes must be the same in all processes; got "
                f"{processes} in process {index}, and {self._options.processes} in process 0. Give "
                "all of them the same."
            )
        if index in (0, *self._here):
            return index, (
                "distributed.index must be different in every process; got "
                f"index={index} in two of them. Number the processes from 0, and end those of an "
                "earlier start."
            )
        if not 0 < index < processes:
            return None, None
        return index, None


def _find_process_0(options: Distributed, deadline: float) -> int:
    """Connects to process 0, again and again until the deadline; returns the port it answers."""
    began = time.monotonic()
    while True:
        try:
            return _ask_process_0(options, deadline)
        except (OSError, UnicodeError) as error:
            waited = time.monotonic() - began
            is_unknown = isinstance(error, UnicodeError) or (
                isinstance(error, socket.gaierror)
                and error.errno == socket.EAI_NONAME
                and waited > UNKNOWN_HOST_SECONDS
            )
            if is_unknown or time.monotonic() > deadline:
                raise RunError(
                    f"Process 0 must wait at distributed.coordinator; got {error} from "
                    f"{options.coordinator} for {min(waited, options.start_timeout):.3g} s. Start "
                    "process 0, correct the address, or open the port."
                ) from error
        time.sleep(RETRY_SECONDS)


def _ask_process_0(options: Distributed, deadline: float) -> int:
    """The port with which it answers when all processes are there."""
    assert options.coordinator_host is not None
    assert options.coordinator_port is not None
    address = options.coordinator_host, options.coordinator_port
    with socket.create_connection(address, timeout=CONNECT_SECONDS) as connection:
        asked = {"index": options.index, "processes": options.processes}
        connection.sendall(json.dumps(asked).encode() + b"\n")
        data = b""
        while not data.endswith(b"\n"):
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                part = connection.recv(LONGEST_GREETING)
            except TimeoutError:
                raise RunError(not_all_there(options)) from None
            if not part or len(data) > LONGEST_GREETING:
                raise ConnectionError("no answer from process 0")
            data += part
    answer = _read(data)
    if "refused" in answer:
        raise RunError(answer["refused"])
    if not isinstance(answer.get("port"), int):
        raise ConnectionError("an answer that does not come from process 0")
    return answer["port"]


def _answer(connection: socket.socket, **values: Any) -> None:
    with suppress(OSError):
        connection.sendall(json.dumps(values).encode() + b"\n")


def _read(line: bytes | bytearray) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}
