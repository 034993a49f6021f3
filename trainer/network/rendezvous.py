"""How processes that were given one address find each other, before jax connects them.

Process 0 listens at the address. Each other process connects, proves that it knows the secret of
the run, and sends a line of JSON, its index and the number of processes. When all have done so,
process 0 listens no longer. It tells each of them to go on, and the same connections then carry
what jax's coordinator and its clients say (`trainer.network.tunnel`).
"""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from typing import Any

from trainer.errors import RunError
from trainer.network.connection import Connection, Message
from trainer.network.door import Door, NotLetInError, knock, listen
from trainer.network.options import Distributed
from trainer.network.secret import Secret

UNKNOWN_HOST_SECONDS = 20.0
"""Time for the name of process 0's host to become known: Kubernetes creates it when that starts."""
OTHER_SECRET_SECONDS = 20.0
"""Time for which another secret at the address may be that of a run that is about to end."""
RETRY_SECONDS = 0.5
CONNECT_SECONDS = 5.0
LONGEST_GREETING = 1024
GO = "go"


def receive_others(
    options: Distributed, secret: Secret, deadline: float
) -> dict[int, socket.socket]:
    """Waits in process 0 until all others are connected.

    Args:
        options: where process 0 listens.
        secret: what the others must know.
        deadline: when to give up, in seconds of `time.monotonic`.

    Returns:
        The connections, by the index of the process. `tell_to_go_on` tells one that all are there.

    Raises:
        RuntimeError: if the address cannot be used, or not all processes come in time.
    """
    with _Reception(_listen(options), options, secret) as reception:
        while not reception.is_complete:
            left = deadline - time.monotonic()
            if left < 0:
                raise RunError(not_all_there(options, reception.num_refused))
            reception.receive(left)
        return reception.release()


def find_process_0(options: Distributed, secret: Secret, deadline: float) -> socket.socket:
    """Connects to process 0, again and again until the deadline.

    Args:
        options: where process 0 listens, and which process this is.
        secret: what process 0 must know.
        deadline: when to give up, in seconds of `time.monotonic`.

    Returns:
        The connection, over which process 0 has said that all are there.

    Raises:
        RuntimeError: if process 0 is not there, has another secret or refuses this process, or if
            not all processes come in time.
    """
    began = time.monotonic()
    while True:
        try:
            return _ask_process_0(options, secret, deadline)
        except NotLetInError:
            if time.monotonic() > min(deadline, began + OTHER_SECRET_SECONDS):
                raise
        except (OSError, UnicodeError) as error:
            if _is_hopeless(error, began) or time.monotonic() > deadline:
                waited = min(time.monotonic() - began, options.start_timeout)
                raise RunError(
                    f"Process 0 must wait at distributed.coordinator; got {error} from "
                    f"{options.coordinator} for {waited:.3g} s. Start process 0, correct the "
                    "address, or open the port."
                ) from error
        time.sleep(RETRY_SECONDS)


def tell_to_go_on(connection: socket.socket) -> None:
    """Tells another process that all are there.

    Raises:
        OSError: if it is gone.
    """
    connection.sendall(_line(kind=GO))


def not_all_there(options: Distributed, num_refused: int = 0) -> str:
    """The message for a start to which not all processes came in time."""
    count = "All" if options.processes is None else f"All {options.processes}"
    others = (
        f" {num_refused} connections were closed because they did not know the secret of the run."
        if num_refused
        else ""
    )
    return (
        f"{count} processes must start within {options.start_timeout:g} s; got fewer.{others} "
        "Start the others, with the same coordinator and each with its own index, or use a longer "
        "--distributed.start-timeout."
    )


def _is_hopeless(error: Exception, began: float) -> bool:
    """Whether the host of an address is wrong, after the time in which it may become known."""
    return isinstance(error, UnicodeError) or (
        isinstance(error, socket.gaierror)
        and error.errno == socket.EAI_NONAME
        and time.monotonic() - began > UNKNOWN_HOST_SECONDS
    )


def _listen(options: Distributed) -> socket.socket:
    """The socket at the address of the coordinator."""
    assert options.coordinator_port is not None
    began = time.monotonic()
    while True:
        try:
            return listen(options, options.coordinator_port)
        except (OSError, UnicodeError) as error:
            if not isinstance(error, socket.gaierror) or _is_hopeless(error, began):
                shown = f"{options.coordinator}{f' and bind={options.bind}' * bool(options.bind)}"
                why = getattr(error, "strerror", None) or error
                raise RunError(
                    "distributed.coordinator must name the machine where process 0 runs and a port "
                    f"that is free there; got {shown}: {why}. Use another "
                    "port, or say with --distributed.bind at which address process 0 is to listen."
                ) from error
        time.sleep(RETRY_SECONDS)


class _Reception(Door):
    """The connections to process 0 while not all processes have come. A context manager."""

    def __init__(self, listener: socket.socket, options: Distributed, secret: Secret) -> None:
        super().__init__(listener, secret)
        self._options = options
        self._greetings: dict[socket.socket, bytearray] = {}
        self._here: dict[int, socket.socket] = {}

    def __enter__(self) -> _Reception:
        return self

    def __exit__(self, *error: Any) -> None:
        for connection in self._greetings:
            connection.close()
        super().__exit__(*error)

    @property
    def is_complete(self) -> bool:
        """Whether every other process is connected and has greeted."""
        assert self._options.processes is not None
        return len(self._here) == self._options.processes - 1

    def receive(self, seconds: float) -> None:
        """Waits for connections, greetings and ends of connections, and treats what has come."""
        admitted, readable = self.serve(seconds)
        for connection in admitted:
            self._greetings[connection] = bytearray()
            self.watch(connection)
        for connection in readable:
            self._receive(connection, self._greetings[connection])

    def release(self) -> dict[int, socket.socket]:
        """The connections of all processes, which are closed no longer."""
        for connection in self._here.values():
            self.forget(connection)
            del self._greetings[connection]
        return self._here

    def _receive(self, connection: socket.socket, received: bytearray) -> None:
        try:
            part = connection.recv(LONGEST_GREETING)
        except OSError:
            part = b""
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
                with suppress(OSError):
                    connection.sendall(_line(kind="refused", why=refusal))
        # A process that ended before all were there, or one that was refused.
        for index in known:
            del self._here[index]
        self.forget(connection)
        del self._greetings[connection]
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


def _ask_process_0(options: Distributed, secret: Secret, deadline: float) -> socket.socket:
    """A connection over which process 0 has said that all are there."""
    assert options.coordinator_host is not None
    assert options.coordinator_port is not None
    address = options.coordinator_host, options.coordinator_port
    connection = socket.create_connection(address, timeout=CONNECT_SECONDS)
    try:
        # Process 0 answers at once, unless it has more to do than to let processes in.
        knock(connection, secret, min(deadline, time.monotonic() + UNKNOWN_HOST_SECONDS))
        connection.sendall(_line(index=options.index, processes=options.processes))
        answer = Connection(connection).receive_one(deadline - time.monotonic())
        if time.monotonic() > deadline:
            raise RunError(not_all_there(options))
        if answer.get("kind") == "refused":
            raise RunError(answer["why"])
        if answer.get("kind") != GO:
            raise ConnectionError("no answer from process 0")
    except BaseException:
        connection.close()
        raise
    connection.settimeout(None)
    return connection


def _line(**values: Any) -> bytes:
    return json.dumps(values).encode() + b"\n"


def _read(line: bytes | bytearray) -> Message:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}
