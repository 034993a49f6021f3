"""The memory of a whole training step: what XLA says of it without a GPU, and the formula.

Programs are compiled, not run. `deviceless.py` says what is missing then.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import jax

import startrail_jax as st
from benchmarks.compiled.deviceless import gpu_topology
from startrail_jax.devices.degrees import Degrees
from startrail_jax.planner.memory import Footprint
from trainer.config import TrainConfig
from trainer.parallel.step import Program, make_attention
from trainer.parallel.step_sizes import footprint
from trainer.tasks import TASKS


@dataclass(frozen=True)
class Row:
    """A run, such as a recipe, and what differs from it."""

    name: str
    config: TrainConfig
    donate: bool = True
    """Whether the step may use the memory of the old state for the new one."""


@dataclass(frozen=True)
class Reading:
    """What XLA says of a compiled step, in bytes of one device."""

    arguments: int
    temporary: int
    host: int
    peak: int
    seconds: float
    """To lower and to compile."""


def read(row: Row, degrees: Degrees, target: str) -> Reading:
    """Compiles a row's step for so many GPUs as the degrees have."""
    start = time.perf_counter()
    devices = gpu_topology(target, degrees.num_devices).devices
    compiled = lowered_step(row, degrees, devices).compile()
    memory: Any = compiled.memory_analysis()
    return Reading(
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
        seconds=time.perf_counter() - start,
    )


def lowered_step(row: Row, degrees: Degrees, devices: list[Any]) -> Any:
    """The whole training step of a row, lowered for `devices`."""
    mesh = st.make_mesh(degrees, axis_type="auto", devices=devices)
    objective = TASKS[row.config.kind].make_objective(row.config)
    program = Program(row.config, make_attention(mesh, row.config, objective), objective)
    step: Any = program.train_step
    if not row.donate:
        shardings = jax.tree.map(lambda x: x.sharding, program.state_shapes)
        options = st.compiler_options(mesh)
        step = jax.jit(step.__wrapped__, out_shardings=(shardings, None), compiler_options=options)
    return step.lower(program.state_shapes, program.batch_shapes)


def formula_of(config: TrainConfig, degrees: Degrees) -> Footprint:
    """The estimate for a run; raises what train.py would raise on such a mesh."""
    return footprint(config, TASKS[config.kind].make_objective(config), degrees)
