"""The checks of `--verify`: each compares what the run's mesh computes with something else."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.checkpoints.checkpoint import Checkpoints
from trainer.parallel.partition import path_name
from trainer.parallel.step import Program
from trainer.processes import first_does, gather
from trainer.task import Smaller
from trainer.tasks import TASKS
from trainer.verify import ways
from trainer.verify.bounds import AFTER_STEPS, compared
from trainer.verify.reference import float64_results
from trainer.verify.report import Check
from trainer.verify.results import Apart, Results, on_host

STEPS = 2
"""Steps before a checkpoint, and after it."""
_TOKENS_OF_CPU, _TOKENS_OF_GPU = 16, 128
"""Tokens of a device in the cut run, if the run has as many."""


@dataclass(frozen=True, kw_only=True)
class SmallRun:
    """The run, cut down to what a host computes in float64: drawn data, and few channels."""

    run: Any
    """The config, with the types and kernels of the run."""
    mesh: Any

    @functools.cached_property
    def config(self) -> Any:
        """The config in float32."""
        return ways.exact(self.run)

    @functools.cached_property
    def program(self) -> Program:
        """The program on the mesh, in float32, without accumulation."""
        return ways.program_of(self.config, self.mesh)

    @functools.cached_property
    def one(self) -> Program:
        """The program of one device."""
        return ways.program_of(ways.alone(self.config), ways.one_device(), layout="contiguous")

    @functools.cached_property
    def weights(self) -> Any:
        """All weights, on the host."""
        return ways.first_weights(self.one)

    def data(self, program: Program) -> Any:
        """The data in the order of a program."""
        task = TASKS[self.config.kind]
        return task.drawn_data(self.config, program.attention.layout)

    @property
    def note(self) -> str:
        """What is left of the run."""
        config, model = self.config, self.config.model
        return (
            f"{model.layers} layers of {model.width} channels, {config.batch_size} rows of "
            f"{config.num_tokens:,} drawn tokens"
        )

    @property
    def numbers(self) -> range:
        """The examples of the batch."""
        return range(self.config.batch_size)

    @functools.cached_property
    def _documents(self) -> tuple[Any, list[int]]:
        return ways.documents(self.program, self.data(self.program))

    @functools.cached_property
    def batch(self) -> Any:
        """The batch on the mesh."""
        if self.config.whole_documents:
            return self._documents[0]
        return ways.rows(self.program, self.data(self.program), self.numbers)

    def alone(self, program: Program) -> Any:
        """The same examples, each in a row of its own; as they are, where a row is an example."""
        data = self.data(program)
        if self.config.whole_documents:
            return ways.documents_alone(program, data, self._documents[1])
        if self.has_documents:
            return ways.rows_alone(program, data, self.numbers)
        return ways.rows(program, data, self.numbers)

    @property
    def has_documents(self) -> bool:
        """Whether several examples share a row."""
        return getattr(self.config.data, "mask_documents", False)

    @functools.cached_property
    def results(self) -> Results:
        """Loss and gradients of the batch on the mesh."""
        return ways.results(self.program, self.weights, self.batch)


def cut_of(config: Any, program: Program) -> SmallRun:
    """The cut of a run whose program on its mesh is given."""
    mesh: Any = program.attention.mesh
    degrees, devices = program.attention.degrees, mesh.size
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    share = _TOKENS_OF_CPU if is_cpu else _TOKENS_OF_GPU
    tokens = min(config.num_tokens, degrees.sequence * share)
    channels = -(-64 // devices) * devices
    to = Smaller(tokens=tokens, channels=channels, head_dim=not is_cpu)
    small = TASKS[config.kind].smaller(config, to)
    parts = max(config.gradient_accumulation, 2)
    changes: dict[str, Any] = {
        "batch_size": degrees.data * parts,
        "gradient_accumulation": 1,
        "remat": program.remat,
        "tile": None if config.tile is None else max(min(config.tile, tokens // 2), 1),
        "optimizer": dataclasses.replace(small.optimizer, warmup_steps=None, warmup_fraction=0.0),
        "profile": None,
        "offload": False,
        "steps": max(config.steps, 2 * STEPS),
    }
    changes |= ways.experts_of(config, program)
    return SmallRun(run=dataclasses.replace(small, **changes), mesh=mesh)


def gradients(cut: SmallRun) -> Iterator[Check]:
    """The mesh beside float64, and beside other ways to compute the same on the mesh."""
    right = float64_of(cut)
    note = f"the mesh beside the host, float32, cut to {cut.note}"
    yield from compared("float64", Apart.of(cut.results, right), note)
    yield from _narrow(cut, right)

    def of(name: str, program: Program, batch: Any, note: str) -> Iterator[Check]:
        got = ways.results(program, cut.weights, batch)
        yield from compared(name, Apart.of(got, cut.results), note)

    config, mesh = cut.config, cut.mesh
    if cut.has_documents:
        rows = cut.program
        if config.whole_documents:
            rows = ways.program_of(ways.in_rows(config), mesh)
        note = "each document in a row of its own, beside the batch of the run"
        yield from of("documents", rows, cut.alone(rows), note)
    kind = cut.program.attention.layout.kind
    if not config.whole_documents and config.causal:
        other = "contiguous" if kind == "zigzag" else "zigzag"
        program = ways.program_of(config, mesh, layout=other)
        batch = ways.rows(program, cut.data(program), cut.numbers)
        yield from of("order of tokens", program, batch, f"{other} beside {kind}")
    if not config.whole_documents:
        parts = config.batch_size // cut.program.attention.degrees.data
        whole, want = without_balance(config), cut.results
        if whole is not config:
            want = ways.results(ways.program_of(whole, mesh), cut.weights, cut.batch)
        accumulated = dataclasses.replace(whole, gradient_accumulation=parts)
        got = ways.results(ways.program_of(accumulated, mesh), cut.weights, cut.batch)
        note = f"{parts} parts of a batch beside one"
        yield from compared("accumulation", Apart.of(got, want), note)
    if config.zero:
        changes: dict[str, Any] = {"zero": 0, "zero_axes": type(config).zero_axes}
        if hasattr(config, "experts"):
            changes["experts"] = "auto"
        program = ways.program_of(dataclasses.replace(config, **changes), mesh)
        yield from of("ZeRO", program, cut.batch, f"level 0 beside {config.zero}")


def _narrow(cut: SmallRun, right: Results) -> Iterator[Check]:
    """The run's own type and kernels, where they are not those of the cut."""
    if cut.run == cut.config:
        return
    on_mesh = ways.program_of(cut.run, cut.mesh)
    alone = ways.program_of(ways.alone(cut.run), ways.one_device(), layout="contiguous")
    got = ways.results(on_mesh, cut.weights, cut.batch)
    want = ways.results(alone, cut.weights, cut.alone(alone))
    one, note = Apart.of(want, right), f"the same in {cut.run.model.dtype}, with its kernels"
    yield from compared("the run's type", Apart.of(got, right), note, one)


def without_balance(config: Any) -> Any:
    """A config without the loss that balances experts: each part of a batch is, by itself."""
    experts: Any = getattr(config.model, "experts", None)
    if "experts" not in getattr(config.model, "layer_feed_forwards", ()):
        return config
    if not experts.balance_loss:
        return config
    experts = dataclasses.replace(experts, balance_loss=0.0)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, experts=experts))


def float64_of(cut: SmallRun) -> Results:
    """The results of the cut in float64."""
    one = cut.one
    prepared = jax.jit(functools.partial(one._prepare, training=True))(cut.alone(one))
    return float64_results(
        one.objective, one.attention, one.config.frozen, cut.weights, on_host(prepared)
    )


# Steps, checkpoints and replicas -----------------------------------------------------------------


def steps(cut: SmallRun, folder: Path) -> Iterator[Check]:
    """Steps on the mesh; replicas; a checkpoint, read back on the mesh and on one device."""
    program, state = cut.program, ways.state_of(cut.program, cut.weights)
    step = _compiled(program, state, cut.batch)
    state, _ = _train(step, state, cut.batch)
    counted, differing = replicas(state)
    yield Check(
        name="replicas",
        value=len(differing),
        most=0,
        note=f"of {counted} arrays differ after {STEPS} steps{_first(differing)}",
    )
    saved = on_host(state.changing)
    first_does(lambda: shutil.rmtree(folder, ignore_errors=True))
    with Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(STEPS, state.changing, {})
        checkpoints.wait()
        read, _ = checkpoints.restore(program.state_shapes.changing)
        yield _same("checkpoint on the mesh", on_host(read), saved)
        read = read._replace(frozen=state.frozen)
        _, going_on = _train(step, state, cut.batch)
        _, again = _train(step, read, cut.batch)
        yield _losses("steps after it on the mesh", again, going_on)
        one = cut.one
        read, _ = checkpoints.restore(one.state_shapes.changing)
        yield _same("checkpoint on one device", on_host(read), saved)
        read = read._replace(frozen=ways.state_of(one, cut.weights).frozen)
        batch = cut.alone(one)
        _, alone = _train(_compiled(one, read, batch), read, batch)
        yield _losses("steps after it on one device", alone, going_on)
    first_does(lambda: shutil.rmtree(folder, ignore_errors=True))


def _compiled(program: Program, state: Any, batch: Any) -> Any:
    """The step of a program."""
    step: Any = program.train_step
    with jax.default_matmul_precision("highest"):
        return step.lower(state, batch).compile(ways.quick(program))


def _train(step: Any, state: Any, batch: Any) -> tuple[Any, np.ndarray]:
    """The state after some steps, and their losses. The given state stays."""
    state, losses = jax.tree.map(jnp.copy, state), []
    for _ in range(STEPS):
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
    return state, np.array(losses)


def _losses(name: str, got: np.ndarray, want: np.ndarray) -> Check:
    apart = np.abs(got - want) / np.maximum(np.abs(want), 1)
    value = float(np.nan_to_num(apart, nan=np.inf).max())
    note = f"losses of {STEPS} more steps, beside the state that was not read back"
    return Check(name=name, value=value, most=AFTER_STEPS, note=note)


def _same(name: str, got: Any, want: Any) -> Check:
    """How many arrays are not the same, to the bit."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True)
    other = [path_name(path) for (path, x), y in pairs if x.tobytes() != y.tobytes()]
    note = f"of {len(jax.tree.leaves(want))} arrays are not what was saved{_first(other)}"
    return Check(name=name, value=len(other), most=0, note=note)


def _first(names: list[str]) -> str:
    return f"; the first is {names[0]}" if names else ""


def replicas(tree: Any) -> tuple[int, list[str]]:
    """How many arrays have replicas on several devices, and the names of those that differ."""
    hashes = {}
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        for shard in x.addressable_shards:
            place = str([(i.start, i.stop) for i in shard.index])
            digest = hashlib.sha256(np.asarray(shard.data).tobytes()).hexdigest()
            hashes.setdefault(f"{path_name(path)} {place}", []).append(digest)
    every: dict[str, list[str]] = {}
    for own in gather(hashes):
        for name, digests in own.items():
            every.setdefault(name, []).extend(digests)
    several = {name: digests for name, digests in every.items() if len(digests) > 1}
    differing = [name for name, digests in several.items() if len(set(digests)) > 1]
    return len({name.split(" ")[0] for name in several}), differing
