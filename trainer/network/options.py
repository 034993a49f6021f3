"""Flags that say which of several processes this is. Imports no jax."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from startrail_jax.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Distributed:
    """Whether this is one of several processes, and which. It is no part of what a run is."""

    on: Annotated[bool, tyro.conf.arg(name="")] = False
    """Whether this is one of several processes that SLURM, Open MPI or Kubernetes started. These
    provide the coordinator, the number of processes and the index of each."""
    coordinator: str | None = None
    """Host and port, such as "10.0.0.1:7777", at which process 0 waits for the others."""
    processes: int | None = None
    """Number of processes."""
    index: int | None = None
    """Number of this process, from 0."""
    bind: str | None = None
    """Address of the interface at which process 0 listens, such as "10.0.0.1", or "0.0.0.0" for
    all. By default that of the coordinator."""
    secret_file: Path | None = None
    """File with the secret that all processes must know. Without one the secret is taken from the
    environment variable STARTRAIL_SECRET, else process 0 makes one up in the run folder."""
    start_timeout: float = 300.0
    """Seconds in which all processes must have started."""
    timeout: float = 20.0
    """Seconds without a sign of life after which a process counts as lost, and all others end."""

    def __post_init__(self) -> None:
        given = {
            "coordinator": self.coordinator,
            "processes": self.processes,
            "index": self.index,
        }
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

    @property
    def several(self) -> bool:
        """Whether there are other processes."""
        return self.on or self.coordinator is not None

    @property
    def known_processes(self) -> int | None:
        """Number of processes; None if only jax can tell."""
        return self.processes if self.several else 1

    @property
    def coordinator_host(self) -> str | None:
        """The host of process 0, as far as the flags say."""
        return None if self.coordinator is None else self.coordinator.rpartition(":")[0].strip("[]")

    @property
    def coordinator_port(self) -> int | None:
        """The port of process 0, as far as the flags say."""
        return None if self.coordinator is None else int(self.coordinator.rpartition(":")[2])
