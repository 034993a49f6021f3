"""The processes of a program, joined, and their devices."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from startrail_jax.errors import InputError
from trainer.config import Distributed, TrainConfig
from trainer.mesh import mesh_of_flags
from trainer.printable import printable, say
from trainer.processes import (
    gather,
    require_same_flags,
    select_devices,
    together,
    unused_gpus,
)
from trainer.run.folder import FormerMesh, read_mesh
from trainer.run.settings import flags_of, names_of_paths
from trainer.task import SampleOptions


@dataclass(frozen=True, kw_only=True)
class Session:
    """What the processes of a program share while they are joined."""

    devices: tuple[Any, ...]
    """The devices of all processes."""
    description: tuple[str, ...]
    """Lines for the log: GPUs that are not used, and the devices."""

    @property
    def is_first(self) -> bool:
        """Whether this is the first process, which alone prints and writes files."""
        return jax.process_index() == 0

    def print(self, text: str, end: str = "\n") -> None:
        """Prints text to standard output, in the first process only. A terminal gets escapes for
        control characters; a file or a program gets the text as it is."""
        if self.is_first:
            is_terminal = sys.stdout is not None and sys.stdout.isatty()
            print(printable(text) if is_terminal else text, end=end, flush=True)

    def note(self, line: str) -> None:
        """Prints a line to standard error, in the first process only."""
        if self.is_first:
            say(line)


@contextmanager
def joined(
    distributed: Distributed,
    count: int | None,
    folder: Path | None = None,
    *,
    adapts: bool = False,
    saves_at_sigterm: bool = False,
) -> Iterator[Session]:
    """Starts the processes of a program, and watches over them until all have left.

    Call it before jax is used. If one process fails, all of them end with status 1, and find each
    other's errors in the run folder. They use `count` devices, or all; with `adapts`, all of them
    where there are fewer.
    """
    with together(distributed, folder, saves_at_sigterm=saves_at_sigterm):
        processes, remarks = distributed.known_processes, []
        try:
            devices = select_devices(count, processes=processes)
        except InputError:
            if not adapts:
                raise
            devices = select_devices(None, processes=processes)
            remarks.append(f"the run had {count} devices: all of these are used instead")
        yield Session(devices=tuple(devices), description=(*remarks, *_lines(devices)))


def agree(settings: Any, *, kind: str, folder: Path) -> FormerMesh | None:
    """Compares the settings of all processes, which are of `kind`, but for paths and
    `allow_changes`; returns the mesh with which the run of a folder trained last, if it is known.
    """
    # Read before the processes meet, and so before the first of them writes anything.
    former = read_mesh(folder)
    flags = flags_of(settings, but={"allow_changes", *names_of_paths(settings)})
    about_run = f"a run that was trained with the mesh {former}"
    require_same_flags({"kind": kind, **flags, "former mesh": about_run})
    return former


@contextmanager
def on_mesh_of_flags(
    options: SampleOptions,
    distributed: Distributed,
    config: TrainConfig,
    folder: Path,
    *,
    kind: str,
) -> Iterator[tuple[Session, Mesh]]:
    """The processes of a program that does not train, joined, and the mesh of its flags; says which
    devices and mesh there are. `config` and `folder` are those of a run, whose mesh is the default,
    and gives way if it does not fit the devices."""
    adapts = (options.devices, options.mesh) == (config.devices, config.mesh)
    with joined(distributed, options.devices, folder, adapts=adapts) as session:
        former = agree(options, kind=kind, folder=folder)
        mesh, lines = mesh_of_flags(
            options.mesh, session.devices, former, config.attention_call, adapts=adapts
        )
        for line in (*session.description, *lines):
            session.note(line)
        yield session, mesh


def former_mesh_of_first(folder: Path) -> FormerMesh | None:
    """The former mesh that the first process finds: file systems of several machines show a new
    file to some of them later."""
    former = read_mesh(folder)
    found = gather(None if former is None else [former.degrees, former.order])[0]
    return None if found is None else FormerMesh(found[0], found[1] and tuple(found[1]))


def _lines(devices: list[Any]) -> Iterator[str]:
    """Lines for the log about the devices."""
    asked: Any = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    note = unused_gpus(devices[0].platform, asked)
    if note is not None:
        yield note
    shared = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    yield f"devices: {len(devices)} x {devices[0].device_kind}{shared}"
