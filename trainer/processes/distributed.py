"""A run of several processes: how they find each other. Imports no jax until they are to."""

from __future__ import annotations

import json
import selectors
import socket
import threading
import time
from collections.abc import Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from startrail_jax.errors import InputError
from trainer.errors import RunError
from trainer.run.exit import end_now

# jax notices a process that is gone by itself, but says only that there is one: it is to be later
# than our own watch, and stands in for it before all have joined that.
LATER_THAN_WATCH_SECONDS = 20.0
# For the name of process 0's host to become known: Kubernetes makes it when that starts.
UNKNOWN_HOST_SECONDS = 20.0
LONGEST_GREETING = 1024


@dataclass(frozen=True, kw_only=True)
class Distributed:
    """Whether this is one of several processes, and which. Not a part of what a run is."""

    on: Annotated[bool, tyro.conf.arg(name="")] = False
    """Whether this is one of several processes that SLURM, Open MPI or Kubernetes started, which
    say all that the other flags of this group do: coordinator, processes, index."""
    coordinator: str | None = None
    """Host and port, such as "10.0.0.1:7777", at which process 0 waits for the others."""
    processes: int | None = None
    """Number of processes."""
    index: int | None = None
    """Number of this process, from 0."""
    start_timeout: float = 300.0
    """Seconds in which all processes must have started."""
    timeout: float = 20.0
    """Seconds without a sign of life after which a process counts as lost, and all others end."""

    def __post_init__(self) -> None:
        given = self._given()
        if None in given.values() and any(value is not None for value in given.values()):
            raise InputError(
                "distributed.coordinator, .processes and .index must be given together; got "
                f"{', '.join(f'{name}={value}' for name, value in given.items())}. Give the "
                "missing ones, or only --distributed where SLURM, Open MPI or Kubernetes know them."
            )
        for name in ("start_timeout", "timeout"):
            if not getattr(self, name) > 0:
                raise InputError(
                    f"distributed.{name} must be above 0; got {name}={getattr(self, name)}. Leave "
                    "it out for the default."
                )
        if self.coordinator is None or self.processes is None or self.index is None:
            return
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise InputError(
                "distributed.coordinator must be a host and a port; got "
                f"coordinator={self.coordinator!r}. Use the address of process 0 and a port that "
                "is free there, such as 10.0.0.1:7777."
            )
        if not 0 <= self.index < self.processes:
            raise InputError(
                "distributed.index must be at least 0 and below distributed.processes; got "
                f"index={self.index}, processes={self.processes}. Number the processes from 0."
            )

    def _given(self) -> dict[str, str | int | None]:
        return {
            "coordinator": self.coordinator,
            "processes": self.processes,
            "index": self.index,
        }

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return self.on or self.coordinator is not None

    @property
    def known_processes(self) -> int | None:
        """Number of processes; None if only jax can tell."""
        return self.processes if self.several else 1

    @property
    def coordinator_host(self) -> str | None:
        """Where process 0 is, as far as the flags say."""
        return None if self.coordinator is None else self.coordinator.rpartition(":")[0].strip("[]")


def start(options: Distributed) -> None:
    """Joins the other processes of a run, if there are any; call it before jax is used.

    Raises:
        RuntimeError: if the others are not found, or are not all there in time.
    """
    if not options.several:
        return
    import jax

    # It would take SIGTERM away from us.
    jax.config.update("jax_enable_preemption_service", False)
    deadline = time.monotonic() + options.start_timeout
    found = {}
    if options.coordinator is not None:
        # With an address jax would still ask SLURM, and take one GPU for each process.
        found = {
            "coordinator_address": _meet(options, deadline),
            "num_processes": options.processes,
            "process_id": options.index,
            "cluster_detection_method": "deactivate",
        }
    later = round(options.timeout + LATER_THAN_WATCH_SECONDS)
    # jax itself would abort, with a trace of C++.
    patience = threading.Timer(deadline - time.monotonic(), end_now, [_not_all_there(options)])
    patience.start()
    try:
        jax.distributed.initialize(
            **found,
            initialization_timeout=round(options.start_timeout + LATER_THAN_WATCH_SECONDS),
            heartbeat_timeout_seconds=later,
            shutdown_timeout_seconds=later,
        )
    except Exception as error:  # ValueError, RuntimeError or what a cluster's own library raises.
        raise RunError(_not_started(options, error)) from error
    finally:
        patience.cancel()


def listen_anywhere(port: int = 0) -> socket.socket:
    """A socket that listens on all addresses of this machine, on a free port by default."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _meet(options: Distributed, deadline: float) -> str:
    """Waits for all processes; returns the address that jax is to use for this start alone.

    At that of the flags jax itself would go on listening: a process of another start, or of an
    earlier one, that came there by mistake would end a run that is well.
    """
    assert options.coordinator is not None
    host, _, port = options.coordinator.rpartition(":")
    if options.index == 0:
        try:
            listener = listen_anywhere(int(port))
        except OSError as error:
            raise RunError(
                "distributed.coordinator must name a port that is free where process 0 runs; got "
                f"{options.coordinator}: {error.strerror}. Use another port."
            ) from error
        with listener:
            return f"{host}:{_wait_for_others(listener, options, deadline)}"
    began = time.monotonic()
    while True:
        try:
            return f"{host}:{_ask_process_0(options, deadline)}"
        except (OSError, UnicodeError) as error:
            is_unknown = isinstance(error, UnicodeError) or (
                isinstance(error, socket.gaierror)
                and error.errno == socket.EAI_NONAME
                and time.monotonic() - began > UNKNOWN_HOST_SECONDS
            )
            if is_unknown or time.monotonic() > deadline:
                waited = min(time.monotonic() - began, options.start_timeout)
                raise RunError(
                    f"Process 0 must wait at distributed.coordinator; got {error} from "
                    f"{options.coordinator} for {waited:.3g} s. Start process 0, correct the "
                    "address, or open the port."
                ) from error
        time.sleep(0.5)


def _ask_process_0(options: Distributed, deadline: float) -> int:
    """The port that it answers with when all are there."""
    assert options.coordinator is not None
    address = options.coordinator_host, int(options.coordinator.rpartition(":")[2])
    with socket.create_connection(address, timeout=5) as connection:
        asked = {"index": options.index, "processes": options.processes}
        connection.sendall(json.dumps(asked).encode() + b"\n")
        data = b""
        while not data.endswith(b"\n"):
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                part = connection.recv(LONGEST_GREETING)
            except TimeoutError:
                raise RunError(_not_all_there(options)) from None
            if not part or len(data) > LONGEST_GREETING:
                raise ConnectionError("no answer of process 0")
            data += part
    answer = _read(data)
    if "refused" in answer:
        raise RunError(answer["refused"])
    if not isinstance(answer.get("port"), int):
        raise ConnectionError("an answer that is not of process 0")
    return answer["port"]


def _wait_for_others(listener: socket.socket, options: Distributed, deadline: float) -> int:
    """Waits in process 0 until all others are connected, and tells them the port to use."""
    assert options.processes is not None
    here: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector, ExitStack() as connections:
        selector.register(listener, selectors.EVENT_READ)
        while len(here) < options.processes - 1:
            left = deadline - time.monotonic()
            if left < 0:
                raise RunError(_not_all_there(options))
            for key, _ in selector.select(left):
                if key.data is None:
                    with suppress(OSError):
                        new = connections.enter_context(listener.accept()[0])
                        new.setblocking(False)
                        selector.register(new, selectors.EVENT_READ, bytearray())
                    continue
                connection: Any = key.fileobj
                part = b""
                with suppress(OSError):
                    part = connection.recv(LONGEST_GREETING)
                key.data.extend(part)
                known = [index for index, other in here.items() if other is connection]
                if part and not known and len(key.data) < LONGEST_GREETING:
                    if not key.data.endswith(b"\n"):
                        continue
                    index, refusal = _index_of(_read(key.data), here, options)
                    if index is not None and refusal is None:
                        here[index] = connection
                        continue
                    if refusal is not None:
                        _answer(connection, refused=refusal)
                # Gone before all are there, a stranger, or refused.
                for index in known:
                    del here[index]
                selector.unregister(connection)
                connection.close()
        with listen_anywhere() as free:
            port = free.getsockname()[1]
        for connection in here.values():
            _answer(connection, port=port)
    return port


def _index_of(
    greeting: dict[str, Any], here: Collection[int], options: Distributed
) -> tuple[int | None, str | None]:
    """Which process greets, if it is one, and why it is refused, if it is."""
    index, processes = greeting.get("index"), greeting.get("processes")
    if type(index) is not int or type(processes) is not int:
        return None, None
    if processes != options.processes:
        return index, (
            f"distributed.processes must be the same in all; got {processes} in process {index}, "
            f"and {options.processes} in process 0. Give all the same."
        )
    if index in (0, *here):
        return index, (
            f"distributed.index must be another in every process; got index={index} in two. "
            "Number the processes from 0, and end those of an earlier start."
        )
    if not 0 < index < processes:
        return None, None
    return index, None


def _answer(connection: socket.socket, **values: Any) -> None:
    with suppress(OSError):
        connection.sendall(json.dumps(values).encode() + b"\n")


def _read(line: bytes | bytearray) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


def _not_all_there(options: Distributed) -> str:
    count = "All" if options.processes is None else f"All {options.processes}"
    return (
        f"{count} processes must start within {options.start_timeout:g} s; got fewer. Start the "
        "others, with the same coordinator and each with its own index, or use a longer "
        "--distributed.start-timeout."
    )


def _not_started(options: Distributed, error: Exception) -> str:
    got = f"got {type(error).__name__}: {str(error).rstrip('.')}."
    if options.coordinator is None:
        return (
            "--distributed needs processes that SLURM, Open MPI or Kubernetes started and jax "
            f"knows; {got} Start them so, or give --distributed.coordinator, "
            "--distributed.processes and --distributed.index."
        )
    return f"Process {options.index} must be able to join the others; {got} Mend that."
