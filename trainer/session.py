"""The processes of a program, joined, and the mesh of their devices."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

import startrail_jax as st
from startrail_jax.devices.nodes import nodes_of
from startrail_jax.errors import InputError
from trainer.config import Distributed, MeshConfig
from trainer.parallel.degrees import (
    choose_degrees,
    choose_order,
    describe_nodes,
    keep_degrees,
)
from trainer.planning import Planner
from trainer.printable import printable, say
from trainer.processes import (
    first_does,
    gather,
    require_same_flags,
    select_devices,
    together,
    unused_gpus,
)
from trainer.run.folder import MESH_FILE, FormerMesh, read_mesh
from trainer.run.settings import CONFIG_FILE, flags_of, names_of_paths


@dataclass(frozen=True, kw_only=True)
class Session:
    """What the processes of a program share while they are joined."""

    mesh: Mesh
    """The devices of all processes."""
    description: tuple[str, ...]
    """Lines for the log: GPUs that are not used, the devices and the degrees of the mesh."""

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
    settings: Any,
    *,
    kind: str,
    call: Mapping[str, Any],
    folder: Path | None = None,
    adapts: bool = False,
    plan: Planner | None = None,
    prepare: Callable[[], None] | None = None,
    saves_at_sigterm: bool = False,
) -> Iterator[Session]:
    """Starts the processes of a program, and watches over them until all have left.

    Call it before jax is used. If one process fails, all of them end with status 1. Processes
    compare their settings, which are of `kind`, but for paths and `allow_changes`. In the run
    folder they find the degrees with which it trained last, and each other's errors; the first one
    may complete it (`prepare`) while the others wait.

    With `adapts`, all devices and default degrees are used where those of the settings do not fit.
    Where `plan` chooses no mesh for a new run, the fewest bytes decide.
    """
    with together(distributed, folder, saves_at_sigterm=saves_at_sigterm):
        processes = distributed.known_processes
        devices, mesh_config, remarks = _devices(settings, processes, call, adapts=adapts)
        # Read before the processes meet, and so before the first of them writes anything.
        former = None if folder is None else read_mesh(folder)
        flags = {
            "kind": kind,
            **flags_of(settings, but={"allow_changes", *names_of_paths(settings)}),
        }
        flags["former mesh"] = f"a run that was trained with the mesh {former}"
        require_same_flags(flags)
        if prepare is not None and folder is not None:
            first_does(prepare)
            # File systems of several machines show a new file to some of them later.
            former = read_mesh(folder)
            found = gather(None if former is None else [former.degrees, former.order])[0]
            former = None if found is None else FormerMesh(found[0], found[1] and tuple(found[1]))
        nodes = nodes_of(devices, mesh_config.devices_per_node)
        had, order = (None, None) if former is None else (former.degrees, former.order)
        degrees = keep_degrees(mesh_config, len(devices), had, planned=order is not None)
        chosen = None
        if plan is not None and (degrees is None or plan.config.plan == "show"):
            chosen = plan.default(devices) if plan.config.plan == "off" else plan.choose(devices)
        if chosen is not None:
            degrees, order = chosen.degrees, chosen.order
        elif degrees is None or mesh_config.order is not None:
            order = None
        platform = devices[0].platform
        degrees = degrees or choose_degrees(
            mesh_config, len(devices), call, nodes=nodes, platform=platform
        )
        order = order or choose_order(mesh_config, degrees, nodes, call, platform)
        wanted: Any = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
        note = unused_gpus(platform, wanted)
        lines = [*([] if note is None else [note]), *remarks]
        # A sample may have any mesh.
        if former is None and not adapts and folder and (folder / CONFIG_FILE).is_file():
            lines.append(
                f"WARNING: {folder} holds a run without {MESH_FILE}: it was lost. The mesh below "
                "is chosen anew; give --mesh flags for the one with which the run began"
            )
        shared = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
        lines += [
            f"devices: {len(devices)} x {devices[0].device_kind}{shared}",
            f"mesh: {', '.join(f'{name} {degree}' for name, degree in vars(degrees).items())}",
        ]
        if mesh_config.order or len(set(nodes)) > 1:
            lines.append(f"nodes: {describe_nodes(degrees, order, nodes)}")
        lines += () if chosen is None else chosen.description
        # Auto axes: the optimizer runs outside of `shard_map`, where the compiler shards it.
        mesh = st.make_mesh(
            degrees,
            axis_type="auto",
            devices=devices,
            order=order,
            devices_per_node=mesh_config.devices_per_node,
        )
        yield Session(mesh=mesh, description=tuple(lines))


def _devices(
    settings: Any, processes: int | None, call: Mapping[str, Any], *, adapts: bool
) -> tuple[list[Any], MeshConfig, tuple[str, ...]]:
    """The devices and degrees of the settings, or others if they may adapt; remarks for the log."""
    try:
        devices = select_devices(settings.devices, processes=processes)
        if adapts:
            nodes_of(devices, settings.mesh.devices_per_node)
            choose_degrees(settings.mesh, len(devices), call)
        return devices, settings.mesh, ()
    except InputError:
        if not adapts:
            raise
        devices = select_devices(None, processes=processes)
    remark = (
        f"the devices and degrees of the run do not fit {len(devices)} devices: others are used"
    )
    return devices, MeshConfig(), (remark,)
