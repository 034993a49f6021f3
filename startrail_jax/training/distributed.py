"""A run of several processes: how they find each other. Imports no jax until they are to."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass
from typing import Annotated

import tyro

from startrail_jax.training.errors import end_now

# jax notices a process that is gone by itself, but says only that there is one: it is to be later
# than our own watch, and stands in for it before all have joined that.
LATER_THAN_WATCH_SECONDS = 20.0


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
            raise ValueError(
                "distributed.coordinator, .processes and .index must be given together; got "
                f"{', '.join(f'{name}={value}' for name, value in given.items())}. Give the "
                "missing ones, or only --distributed where SLURM, Open MPI or Kubernetes know them."
            )
        for name in ("start_timeout", "timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"distributed.{name} must be above 0; got {name}={getattr(self, name)}. Leave "
                    "it out for the default."
                )
        if self.coordinator is None or self.processes is None or self.index is None:
            return
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(
                "distributed.coordinator must be a host and a port; got "
                f"coordinator={self.coordinator!r}. Use the address of process 0 and a port that "
                "is free there, such as 10.0.0.1:7777."
            )
        if not 0 <= self.index < self.processes:
            raise ValueError(
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
            "coordinator_address": options.coordinator,
            "num_processes": options.processes,
            "process_id": options.index,
            "cluster_detection_method": "deactivate",
        }
        _check_coordinator(options, deadline)
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
        raise RuntimeError(_not_started(options, error)) from error
    finally:
        patience.cancel()


def _check_coordinator(options: Distributed, deadline: float) -> None:
    """Waits until process 0 listens, or sees that it can: jax itself ends the program if not."""
    assert options.coordinator is not None
    host, port = options.coordinator_host, int(options.coordinator.rpartition(":")[2])
    if options.index == 0:
        try:
            socket.create_server(("", port)).close()
        except OSError as error:
            raise RuntimeError(
                "distributed.coordinator must name a port that is free where process 0 runs; got "
                f"{options.coordinator}: {error.strerror}. Use another port."
            ) from error
        return
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"Process 0 must wait at distributed.coordinator; got {error} from "
                    f"{options.coordinator} for {options.start_timeout:g} s. Start process 0, "
                    "correct the address, or open the port."
                ) from error
        time.sleep(0.5)


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
