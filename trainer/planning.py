"""Which mesh is predicted to be the fastest for a run on the devices at hand.

`trainer.planner` predicts; here are the settings of the run, and what it can do.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

import startrail_jax as st
from startrail_jax.errors import InputError, UserError
from startrail_jax.tokens.documents import DocumentSizes
from startrail_jax.tokens.layout import Layout
from trainer.config import TrainConfig
from trainer.objective import Objective
from trainer.parallel.abstract_step import AbstractStep, step_limit
from trainer.parallel.degrees import given_order
from trainer.planner.documents import DocumentForecast, fill_rows, forecasts, sample
from trainer.planner.grid import ORDERS, Call, Settings, all_settings
from trainer.planner.hardware import Cluster
from trainer.planner.here import SHARE, jax_share, measure_cluster
from trainer.planner.quantities import GIB, show_rate, show_seconds
from trainer.planner.search import REMAT, Candidates, Prediction, Search, no_setting
from trainer.processes import gather
from trainer.task import Task

_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class PlannedMesh:
    """A mesh that a plan has chosen."""

    degrees: st.Degrees
    order: tuple[str, ...]
    """The order of its axes over the nodes, slowest first."""
    description: tuple[str, ...]
    """Lines for the log: what was measured, the choice, and what comes next."""


@dataclass(frozen=True)
class Planner:
    """Chooses the mesh of a run. All processes must ask it, and get the same answer."""

    config: TrainConfig
    """The run: model, batch, ZeRO, tile and a remat that it names stay as they are."""
    task: Task[Any, Any]
    """Gives its model, its loss, and the lengths of its documents."""

    def choose(self, devices: Sequence[Any]) -> PlannedMesh:
        """Measures the devices, and chooses."""
        config = self.config
        if config.optimizer.kind != "adamw":
            raise InputError(
                f"--plan needs optimizer.kind='adamw'; got --plan {config.plan} and "
                f"optimizer.kind={config.optimizer.kind!r}, whose memory is not predicted. Leave "
                "out --plan, and give the mesh by --mesh flags: --optimizer.kind adamw --plan show "
                "ranks them."
            )
        sizes = self._sizes() if config.whole_documents else None
        begin = time.perf_counter()
        cluster = self.measure(devices)
        seconds = time.perf_counter() - begin
        limit = step_limit(devices, cluster.gpu.memory_bytes)
        share = _describe_limit(limit, devices[0].platform, cluster.gpu.memory_bytes)
        lines = [f"plan: measured in {show_seconds(seconds)}: {_describe(cluster)}; {share}"]
        count = _SHOWN if config.plan == "show" else 2
        if sizes is None:
            found = self.forecasts(cluster, count, limit)
            described = [_describe_forecast(x, config.gradient_accumulation) for x in found]
        else:
            whole = self.document_forecasts(cluster, sizes, count, limit)
            found = [x.mesh for x in whole]
            described = list(map(_describe_documents, whole))
            lines.append(
                f"plan: {len(sizes.lengths):,} documents of the data. {whole[0].comparison}"
            )
        names = ("the fastest", "the runner-up") if config.plan == "use" else range(1, _SHOWN + 1)
        lines += [f"plan: {x}: {y}" for x, y in zip(names, described, strict=False)]
        # All processes take the choice of the first.
        degrees, order = gather([vars(found[0].degrees), found[0].order])[0]
        return PlannedMesh(
            degrees=st.Degrees(**degrees),
            order=given_order(config.mesh) or tuple(order),
            description=tuple(lines),
        )

    def measure(self, devices: Sequence[Any]) -> Cluster:
        """Measures the devices, with an attention like that of the run."""
        config = self.config
        return measure_cluster(
            devices,
            devices_per_node=config.mesh.devices_per_node,
            head_dim=config.model.head_dim,
            itemsize=jnp.dtype(config.model.dtype).itemsize,
            causal=config.causal,
        )

    def forecasts(self, cluster: Cluster, count: int, limit: int | None = None) -> list[Prediction]:
        """The meshes with the fastest predictions that the run can have, the fastest first.

        `limit` is the bytes that a step may take on a device; None for jax's share of its memory.
        The `memory_bytes` of predictions are by the run's own sizes.
        """
        return self._found(cluster, count, limit, lambda mesh: mesh)[1]

    def document_forecasts(
        self, cluster: Cluster, sizes: DocumentSizes, count: int, limit: int | None = None
    ) -> list[DocumentForecast]:
        """The same for whole documents: a mesh for each number of devices that share a row."""
        config = self.config
        filled = fill_rows(sizes, config.num_tokens, config.batch_size)
        candidates, meshes = self._found(
            cluster,
            cluster.num_gpus,
            limit,
            lambda mesh: cluster.num_gpus // (mesh.data * mesh.tensor),
            visible=filled.visible,
        )
        drawn = config.documents_drawn or 1
        return forecasts(candidates, sizes, meshes, drawn, filled.fill)[:count]

    def _sizes(self) -> DocumentSizes:
        """The sizes of some documents of the run."""
        documents = self.task.open_data(self.config, Layout("contiguous", 1)).documents
        assert documents is not None, "the task opens them where config.whole_documents"
        return sample(documents.sizes)

    def _found(
        self,
        cluster: Cluster,
        count: int,
        limit: int | None,
        kind: Callable[[st.Degrees], Any],
        **of_call: Any,
    ) -> tuple[Candidates, list[Prediction]]:
        """All candidates, and the fastest mesh of each of so many kinds that the run can have."""
        config = self.config
        limit = int(jax_share() * cluster.gpu.memory_bytes) if limit is None else limit
        batch = config.batch_size // config.gradient_accumulation
        objective = self.task.make_objective(config)
        call = Call(model=objective.sizes, seq_len=config.num_tokens, batch=batch, **of_call)
        given = config.mesh.given
        options = Search(
            degrees=given,
            zero=(config.zero,),
            remat=REMAT if config.remat == "auto" else (config.remat,),
            offload=(config.offload,),
            # Tiles and memory are those of the run: see below.
            tiled=(False,),
            offload_optimizer=config.offload_optimizer,
            gradient_dtype=config.attention.gradient_dtype,
            exchange=config.attention.exchange,
            baselines=False,
        )
        roomy = dataclasses.replace(
            cluster, gpu=dataclasses.replace(cluster.gpu, memory_bytes=1 << 60)
        )
        found: dict[Any, Prediction] = {}
        too_large: list[int] = []
        refusal: object = "what is left does not pass the checks of a step"
        try:
            rows = all_settings(cluster, call, given=given, published=False)
            if not len(rows):
                raise no_setting(cluster, call, options)
            rows = rows.take(self._allowed(rows))
            if not len(rows):
                raise InputError(
                    f"no mesh has --attention.inner {config.attention.inner} and the order of "
                    "--mesh.order"
                )
            timed = Candidates(roomy, call, options, rows)
            sizes: dict[st.Degrees, tuple[str, int] | None] = {}
            for index in timed.ordered(np.ones(len(timed.row), bool)):
                mesh = timed.degrees(index)[0]
                if kind(mesh) in found:
                    continue
                if mesh not in sizes:
                    sizes[mesh] = self._size(objective, mesh, limit)
                remat, size = sizes[mesh] or (None, 0)
                if timed.savings(index).remat != remat:
                    continue
                if size > limit:
                    too_large.append(size)
                    continue
                prediction = timed.prediction(index)
                found[kind(mesh)] = dataclasses.replace(prediction, memory_bytes=size)
                if len(found) == count:
                    break
            if found:
                return timed, list(found.values())
        except UserError as error:
            refusal = error
        if too_large:
            refusal = (
                f"the smallest step takes {min(too_large) / GIB:.3g} GiB of {limit / GIB:.3g} GiB"
            )
        raise InputError(
            f"--plan {config.plan} needs a mesh that divides the batch, the tokens and the heads "
            f"of the run and whose step fits the memory; got none for {cluster.num_gpus} devices "
            f"of {cluster.gpu.memory_bytes / GIB:.1f} GiB ({refusal}). Leave out --plan to see "
            "what a default mesh lacks, or a --mesh flag that rules meshes out."
        )

    def _size(self, objective: Objective, mesh: st.Degrees, limit: int) -> tuple[str, int] | None:
        """What a run recomputes on a mesh, and the memory of a step; None if it cannot have it."""
        try:
            step = AbstractStep.of_degrees(self.config, objective, mesh, limit)
            return step.remat, step.memory().device_bytes
        except UserError:
            return None

    def _allowed(self, settings: Settings) -> np.ndarray:
        """Which settings have the double ring and the order of the run."""
        allowed = settings.inner == self.config.attention.inner
        order = given_order(self.config.mesh)
        for row in np.flatnonzero(allowed) if order is not None else ():
            own = [x for x in ORDERS[settings.order[row]] if vars(settings)[x][row] > 1]
            allowed[row] = own == [x for x in order or () if vars(settings)[x][row] > 1]
        return allowed


def _describe_limit(limit: int, platform: str, whole: int) -> str:
    """How many of the bytes of a device a step may take."""
    of = f"{limit / GIB:.3g} GiB of {whole / GIB:.3g} GiB a device"
    return f"a step may take {of}" if platform == "cpu" else f"jax has {of} ({SHARE} changes it)"


def _describe_forecast(found: Prediction, parts: int) -> str:
    """A line about a mesh. `parts` of a batch make a step."""
    seconds, waits = (show_seconds(parts * x) for x in (found.seconds, found.exposed_seconds))
    return (
        f"{found.label} ({found.scheme}): predicted {seconds} a step, of which {waits} wait for "
        f"messages, and {found.memory_bytes / GIB:.3g} GiB"
    )


def _describe_documents(found: DocumentForecast) -> str:
    """A line about a mesh for whole documents."""
    mesh = found.mesh
    return (
        f"{mesh.label} ({mesh.scheme}): predicted {found.tokens_per_second:,.0f} tokens of "
        f"documents in a second, and {mesh.memory_bytes / GIB:.3g} GiB"
    )


def _describe(cluster: Cluster) -> str:
    gpu = cluster.gpu
    nodes = f"{cluster.nodes} x {cluster.gpus_per_node} {gpu.name}"
    parts = [f"{gpu.peak_flops * gpu.single_speed * gpu.matrix_efficiency / 1e12:.3g} TFLOP/s"]
    if cluster.gpus_per_node > 1:
        latency = show_seconds(cluster.inside_latency + cluster.start_latency)
        parts.append(f"inside {show_rate(gpu.inside_rate)} after {latency}")
    if cluster.nodes > 1:
        latency = show_seconds(cluster.latency + cluster.start_latency)
        way = ", half-duplex," if cluster.half_duplex else ""
        ports = f"{cluster.ports} port{'s' if cluster.ports > 1 else ''} a node of "
        parts.append(f"{ports}{show_rate(cluster.port_rate)}{way} after {latency}")
    return f"{nodes}, {'; '.join(parts)}"
