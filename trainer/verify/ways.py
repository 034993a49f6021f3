"""Ways to compute a batch: a program on a mesh, with the rows that it takes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import startrail_jax as st
from startrail_jax.xla.compiler import quick_options
from trainer.config import TrainConfig
from trainer.data.batches import local_rows, place
from trainer.data.dataset import Dataset
from trainer.parallel.checks import make_attention
from trainer.parallel.partition import path_name
from trainer.parallel.state import initial_state
from trainer.parallel.step import Program
from trainer.tasks import TASKS
from trainer.verify.results import Results, on_host, put

SEED = 0
"""That of the numbers that are put in place of weights which are all equal."""


def program_of(config: TrainConfig, mesh: Any, **options: Any) -> Program:
    """The program of a config on a mesh; `options` are changed ones of its attention."""
    objective = TASKS[config.kind].make_objective(config)
    attention = make_attention(mesh, config, objective)
    return Program(config, dataclasses.replace(attention, **options), objective)


@functools.cache
def one_device() -> Any:
    """The mesh of the first device of this process."""
    device = jax.local_devices()[0]
    return st.make_mesh(st.Degrees(), devices=[device], axis_type="auto")


def exact(config: Any) -> Any:
    """A config whose activations are float32, on XLA's own kernels."""
    kernels = dataclasses.replace(config.attention, backend="auto", linear_backend="xla")
    model = dataclasses.replace(config.model, dtype="float32")
    return dataclasses.replace(config, model=model, attention=kernels)


def alone(config: Any) -> Any:
    """A config for one device: rows, without a double ring."""
    attention = dataclasses.replace(config.attention, inner=1)
    config, changes = in_rows(config), {"attention": attention}
    if hasattr(config, "experts"):
        changes["experts"] = "auto"
    return dataclasses.replace(config, **changes)


def in_rows(config: Any) -> Any:
    """A config whose batches consist of rows."""
    if not config.whole_documents:
        return config
    data = dataclasses.replace(config.data, batches="rows", draw=type(config.data).draw)
    return dataclasses.replace(config, data=data)


def experts_of(config: Any, program: Program) -> dict[str, str]:
    """The setting of a smaller config by which experts get their tokens as in a run."""
    if program.partition.level < 3 or not program.objective.sizes.experts:
        return {}
    return {"experts": "dispatch" if program.partition.dispatches else "gather"}


def results(program: Program, weights: Any, batch: Any) -> Results:
    """Loss and gradients of a batch that is on the devices, from weights on the host."""
    placed = put(weights, program.state_shapes.model)
    with jax.default_matmul_precision("highest"):
        loss, gradients = jax.jit(program.gradients, compiler_options=quick(program))(placed, batch)
    # Substitutes of a gradient count too.
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    return Results(float(loss), {path_name(path): on_host(x) for path, x in leaves})


def quick(program: Program) -> dict[str, Any]:
    """Options of the compiler for a program that runs once."""
    mesh: Any = program.attention.mesh
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    return quick_options() if is_cpu else st.compiler_options(mesh)


def first_weights(program: Program) -> Any:
    """Random weights of the model on the host, `moved`: the scales of norms, and half of the
    matrices of adapters, are all equal at first."""
    make = jax.jit(lambda: program._initialise().model, compiler_options=quick(program))
    return moved(on_host(make()))


def moved(weights: Any) -> Any:
    """Weights of the host, of which those that are all equal become different numbers."""
    rng = np.random.default_rng(SEED)

    def of(x: np.ndarray) -> np.ndarray:
        if x.size and (x == x.flat[0]).all():
            return (x + 0.05 * rng.standard_normal(x.shape)).astype(x.dtype)
        return x

    return jax.tree.map(of, weights)


def state_of(program: Program, weights: Any) -> Any:
    """The state before the first step, with weights of the host."""
    make = functools.partial(initial_state, program.config, program.optimizer)
    return _state(program, make, put(weights, program.state_shapes.model))


def random_state(program: Program) -> Any:
    """The state of a run before its first step."""
    return _state(program, program._initialise)


def _state(program: Program, make: Callable[..., Any], *arguments: Any) -> Any:
    """The state that a function makes, sharded as the program needs it."""
    shardings = jax.tree.map(lambda x: x.sharding, program.state_shapes)
    options: Any = {"out_shardings": shardings, "compiler_options": quick(program)}
    return jax.jit(make, **options)(*arguments)


def rows(program: Program, data: Dataset, numbers: Sequence[int]) -> Any:
    """A batch of some examples on the devices of a program."""
    return _placed(program, data, [data.train[number] for number in numbers])


def rows_alone(program: Program, data: Dataset, numbers: Sequence[int]) -> Any:
    """The same examples of text, each in a row of its own."""
    found = [[x] for number in numbers for x in data.train[number]]
    missing = -len(found) % program.attention.degrees.data
    return _placed(program, data, [*found, *[[] for _ in range(missing)]])


def _placed(program: Program, data: Dataset, examples: Sequence[Any]) -> Any:
    shape = len(examples), program.tokens_shape[1]
    local = local_rows(program.batch_sharding, shape)
    batch = data.collate([examples[row] for row in local], list(local))
    return place(batch, program.batch_sharding, batch_size=len(examples), rows=local)


def documents(program: Program, data: Dataset) -> tuple[Any, list[int]]:
    """The first batch of whole documents, on the devices, and their numbers."""
    assert program.parts is not None, "batches of documents"
    assert data.documents is not None, "their data"
    first = next(iter(program.parts.stream(data.documents, seed=program.config.seed)))
    numbers = [number for part in first for row in part.rows for number in row]
    return program.parts.place(program.parts.read(data.documents, first)), numbers


def documents_alone(program: Program, data: Dataset, numbers: Sequence[int]) -> Any:
    """Documents of these numbers, each in a row of its own."""
    assert data.documents is not None, "batches of documents"
    missing = -len(numbers) % program.attention.degrees.data
    every = [[number] for number in numbers] + [[] for _ in range(missing)]
    shape = len(every), program.tokens_shape[1]
    local = local_rows(program.batch_sharding, shape)
    batch = data.documents.rows([every[row] for row in local], shape[1])
    ordered = jax.tree.map(program.attention.layout.permute, batch)
    return place(ordered, program.batch_sharding, batch_size=len(every), rows=local)
