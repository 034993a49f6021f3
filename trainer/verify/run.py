"""`train.py --verify`: checks a run on its own devices, and writes verify.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax

from startrail_jax.devices.nodes import mesh_devices
from trainer.config import TrainConfig
from trainer.durable import replace_text
from trainer.parallel.step import Program
from trainer.planning import Planner
from trainer.processes import first_does
from trainer.run.folder import current_versions, require_writable
from trainer.run.settings import flags_of
from trainer.tasks import TASKS
from trainer.verify import checks, ways
from trainer.verify.first_batch import first_batch, fitting
from trainer.verify.links import links
from trainer.verify.report import Check, Verdicts
from trainer.verify.speed import speed

VERIFY_FILE = "verify.json"
_FOLDER = "verify"
"""For a checkpoint, which is removed."""


def verify(config: TrainConfig, mesh: Any, line: Callable[[str], None]) -> bool:
    """Makes all checks on a mesh. All processes must call it.

    Args:
        config: config of the run.
        mesh: its mesh.
        line: shows a line, in the first process.

    Returns:
        Whether nothing is wrong.
    """
    program = ways.program_of(config, mesh)
    require_writable(config.run_dir)
    device = mesh.devices.flat[0]
    report = Verdicts(line)
    report.facts = {
        "devices": f"{mesh.size} x {device.device_kind}",
        "mesh": {name: int(size) for name, size in mesh.shape.items()},
        "versions": current_versions(),
        "settings": {name: text for name, text in flags_of(config).items() if name != "verify"},
    }
    path = config.run_dir / VERIFY_FILE
    # If a process is lost, no file of an earlier check must be taken for one of this.
    first_does(lambda: path.unlink(missing_ok=True))
    try:
        for check in _checks(config, program):
            report.add(check)
        report.is_whole = True
    finally:
        if jax.process_index() == 0:
            replace_text(path, report.as_json())
    line(f"{report.summary}; {path} has the numbers")
    return report.ok


def _checks(config: Any, program: Program) -> Iterator[Check]:
    part, cut = fitting(program), checks.cut_of(config, program)
    yield from first_batch(part, program)
    yield from checks.gradients(cut)
    yield from checks.steps(cut, config.run_dir / _FOLDER)
    mesh: Any = program.attention.mesh
    devices = mesh_devices(mesh)
    cluster = Planner(config, TASKS[config.kind]).measure(devices)
    yield from links(mesh, cluster, config.mesh.devices_per_node)
    # The run itself, or what simulated devices compute of it in seconds.
    is_cpu = devices[0].platform == "cpu"
    timed, cut = (part.config, part.cut) if is_cpu else (config, ())
    yield from speed(timed, program, cluster, cut)
