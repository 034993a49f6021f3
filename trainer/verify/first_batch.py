"""The first batch of a run on its mesh and on one device, cut until it fits there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import jax

from startrail_jax.devices.degrees import Degrees
from startrail_jax.errors import UserError
from trainer.config import TrainConfig
from trainer.data.batches import Feed
from trainer.parallel.abstract_step import AbstractStep, step_limit
from trainer.parallel.step import Program
from trainer.processes import gather
from trainer.task import Smaller, Task
from trainer.tasks import TASKS
from trainer.verify import ways
from trainer.verify.bounds import compared
from trainer.verify.report import Check
from trainer.verify.results import Apart, on_host

_FLOPS_OF_CPU, _FLOPS_OF_GPU = 1e11, 5e15
"""Most FLOPs of a batch on one device: seconds."""
_WEIGHTS_OF_CPU, _WEIGHTS_OF_GPU = 1 << 30, 8 << 30
"""Most bytes of the weights, which the host holds too."""
_LEAST_TOKENS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartOfRun:
    """A part of a run that fits one device."""

    config: Any
    of_data: bool
    """Whether the rows are those of the data; otherwise they are drawn."""
    cut: tuple[str, ...]
    """What was cut."""


def first_batch(part: PartOfRun, program: Program) -> Iterator[Check]:
    """Loss, and the gradient of every weight, on the mesh and on one device of the same kind."""
    own, mesh = part.config, program.attention.mesh
    task: Any = TASKS[own.kind]
    on_mesh = program if own is program.config else ways.program_of(own, mesh)
    single = ways.alone(own)
    alone = ways.program_of(single, ways.one_device(), layout="contiguous")
    weights, described = _weights(on_mesh, task, is_whole=not part.cut)
    batch, rows = _batches(part, on_mesh, alone, task)
    got = ways.results(on_mesh, weights, batch)
    want = ways.results(alone, weights, rows)
    kept = own.model.dtype
    of_what = "of the data" if part.of_data else "drawn"
    cut = f"cut to {', '.join(part.cut)}" if part.cut else "nothing cut"
    note = f"the mesh beside one device, {kept}, {described}, rows {of_what}, {cut}"
    if kept == "float32":
        yield from compared("first batch", Apart.of(got, want), note)
        return
    sharp = ways.program_of(ways.exact(single), ways.one_device(), layout="contiguous")
    right = ways.results(sharp, weights, rows)
    one, note = Apart.of(want, right), f"{note}; both beside float32"
    yield from compared("first batch", Apart.of(got, right), note, one)


def fitting(program: Program) -> PartOfRun:
    """The largest part of a run that one device computes in seconds."""
    config: Any = program.config
    task: Any = TASKS[config.kind]
    mesh: Any = program.attention.mesh
    devices = mesh.devices.ravel().tolist()
    limit, is_cpu = step_limit(devices), devices[0].platform == "cpu"
    flops = _FLOPS_OF_CPU if is_cpu else _FLOPS_OF_GPU
    most = _WEIGHTS_OF_CPU if is_cpu else _WEIGHTS_OF_GPU
    parts = [*_parts(config, program, task)]
    for part in parts[:-1]:
        try:
            single = ways.exact(ways.alone(part.config))
            objective = task.make_objective(single)
            step = AbstractStep.of_degrees(single, objective, Degrees(), limit)
            tokens = part.config.batch_size * part.config.num_tokens
            weights = sum(x.size for x in jax.tree.leaves(step.state_shapes.model))
            fits = step.fits(limit // 2) and objective.flops_per_token * tokens <= flops
            if fits and 4 * weights <= most:
                return part
        except UserError:  # One device cannot have it, whatever its memory.
            continue
    return parts[-1]


def _parts(config: Any, program: Program, task: Task[Any, Any]) -> Iterator[PartOfRun]:
    """Parts of a run, the largest first."""
    arrives = getattr(config.data, "follow", False)
    if not arrives:
        yield PartOfRun(config=config, of_data=True, cut=())
    few = _named(task.smaller(config, Smaller()), program)
    layers = f"{few.model.layers} of {config.model.layers} layers"
    if not arrives and not getattr(config, "replay_experts", False):
        yield PartOfRun(config=few, of_data=True, cut=(layers,))
    data, parts = program.attention.degrees.data, config.gradient_accumulation
    devices = program.attention.mesh.size
    for channels in (None, -(-256 // devices) * devices):
        halvings = max(config.num_tokens // _LEAST_TOKENS, 1).bit_length()
        for tokens in (config.num_tokens >> n for n in range(halvings)):
            to = Smaller(tokens=tokens, channels=channels, head_dim=True)
            own = dataclasses.replace(task.smaller(config, to), batch_size=data * parts)
            narrow = () if channels is None else (f"{channels} channels, few words",)
            rows = f"{own.batch_size} rows of {own.num_tokens:,} tokens"
            yield PartOfRun(config=_named(own, program), of_data=False, cut=(layers, rows, *narrow))


def _named(config: Any, program: Program) -> Any:
    """A smaller config that recomputes, and sends to experts, what the run does."""
    changes: dict[str, Any] = {"remat": program.remat, "profile": None}
    return dataclasses.replace(config, **changes, **ways.experts_of(config, program))


def _weights(program: Program, task: Task[Any, Any], *, is_whole: bool) -> tuple[Any, str]:
    """All weights on the host, and what they are."""
    config: Any = program.config
    if is_whole and getattr(config, "init_from", None) is not None:
        with task.initial_weights(config, program.state_shapes.base) as initial:
            if initial is not None:
                state = program.begin_with(initial.read(program.state_shapes.base))
                return ways.moved(on_host(state.model)), f"weights of {config.init_from}"
    return ways.first_weights(program), "random weights"


def _batches(part: PartOfRun, on_mesh: Program, alone: Program, task: Task[Any, Any]) -> Any:
    """The batch on the mesh, and on one device."""
    config = part.config

    def opened(program: Program) -> Any:
        layout = program.attention.layout
        if not part.of_data:
            return task.drawn_data(config, layout)
        return task.settled(task.open_data(config, layout), config, layout)

    if config.whole_documents:
        data = opened(on_mesh)
        batch, numbers = ways.documents(on_mesh, data)
        return batch, ways.documents_alone(alone, data, numbers)
    if part.of_data:
        return tuple(_first(program, opened(program)) for program in (on_mesh, alone))
    numbers = range(config.batch_size)
    return tuple(ways.rows(x, opened(x), numbers) for x in (on_mesh, alone))


def _first(program: Program, data: Any) -> Any:
    """The first batch of a run of rows."""
    config: TrainConfig = program.config
    is_shared = program.attention.mesh.size > 1
    with closing(
        Feed(
            data,
            sharding=program.batch_sharding,
            shape=program.tokens_shape,
            seed=config.seed,
            num_held_out=config.validation_sequences,
            gather=gather if is_shared else lambda value: [value],
        )
    ) as feed:
        return feed.next()
