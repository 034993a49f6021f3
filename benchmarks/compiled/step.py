"""A whole training step: its program for GPUs, and what XLA and the closed form say of its memory.

Programs are compiled, not run. `deviceless.py` says what is missing then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import startrail_jax as st
from benchmarks.compiled.deviceless import gpu_topology
from startrail_jax.devices.degrees import Degrees
from startrail_jax.planner.memory import Footprint
from trainer.config import TrainConfig
from trainer.parallel.step import Program, make_attention
from trainer.parallel.step_sizes import footprint
from trainer.tasks import TASKS


@dataclass(frozen=True)
class Memory:
    """What XLA says of a compiled step, in bytes of one device."""

    arguments: int
    """Weights, optimizer and batch."""
    temporary: int
    """Everything else that the step needs at a time."""
    host: int
    """What waits in the host's memory."""
    peak: int
    """What the device needs in all; memory of state that the step has used up is used again."""


def read_memory(compiled: Any) -> Memory:
    """The memory of a compiled program."""
    memory: Any = compiled.memory_analysis()
    return Memory(
        arguments=memory.argument_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        host=memory.host_temp_size_in_bytes,
        # Where more waits on the host than on the device, XLA's peak is that of the host.
        peak=min(
            memory.peak_memory_in_bytes,
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes,
        ),
    )


def peak_bytes(config: TrainConfig, degrees: Degrees, target: str) -> int:
    """The peak of a run's step, compiled for so many GPUs as the degrees have."""
    devices = gpu_topology(target, degrees.num_devices).devices
    return read_memory(lowered_step(config, degrees, devices).compile()).peak


def lowered_step(config: TrainConfig, degrees: Degrees, devices: list[Any]) -> Any:
    """The whole training step of a run, lowered for `devices`."""
    mesh = st.make_mesh(degrees, axis_type="auto", devices=devices)
    objective = TASKS[config.kind].make_objective(config)
    program = Program(config, make_attention(mesh, config, objective), objective)
    step: Any = program.train_step
    return step.lower(program.state_shapes, program.batch_shapes)


def formula_of(config: TrainConfig, degrees: Degrees) -> Footprint:
    """The estimate for a run; raises what train.py would raise on such a mesh."""
    return footprint(config, TASKS[config.kind].make_objective(config), degrees)


def describe(degrees: Degrees) -> str:
    """The degrees above 1."""
    return ", ".join(f"{name} {n}" for name, n in vars(degrees).items() if n > 1)
