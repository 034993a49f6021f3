"""What the planner predicts for the rows of `run.py`, and every row that it knows."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

import startrail_jax as st
from benchmarks.cluster.attention import Place, Row
from benchmarks.cluster.rounds import Processes, Timed
from benchmarks.cluster.schemes import Scheme
from benchmarks.cluster.settings import CHOSEN, ClusterSettings
from startrail_jax.devices.degrees import SEQUENCE_ROLES
from startrail_jax.planner.grid import ORDERS, Call, Placement, Settings, all_settings
from startrail_jax.planner.hardware import GPUS, Cluster
from startrail_jax.planner.inputs.here import measure_cluster
from startrail_jax.planner.models import ModelSizes
from startrail_jax.planner.quantities import show_rate, show_seconds
from startrail_jax.planner.timing import Timing

NEAR, WITHIN = 1.1, 0.15
"""A choice is good if it takes at most so many times as long as the fastest row, and a prediction
if it is wrong by at most this share."""


def attention_call(settings: ClusterSettings) -> Call:
    """The call that is timed, in the words of the planner."""
    model = ModelSizes(
        name="attention",
        kind="attention",
        causal=settings.causal,
        width=settings.heads * settings.head_dim,
        layers=1,
        heads=settings.heads,
        kv_heads=settings.num_kv_heads,
        head_dim=settings.head_dim,
        mlp_width=settings.head_dim,
        outputs=1,
        itemsize=np.dtype("float32").itemsize if settings.dtype == "float32" else 2,
    )
    return Call(model=model, seq_len=settings.seq_len, batch=settings.batch_size)


def every_row(settings: ClusterSettings, place: Place) -> list[Row]:
    """A row for every legal setting of the planner: degrees, double rings, and orders of the axes.

    Nodes are alike, and so are the devices of a node. Of orders that bring the same neighbours
    together on nodes, only the first one is a row.
    """
    cluster = Cluster(
        nodes=len(place.devices) // place.devices_per_node,
        gpus_per_node=place.devices_per_node,
        gpu=GPUS["h100"],
        port_rate=1.0,
        ports=1,
    )
    given = {"data": 1, "tensor": 1}
    found = all_settings(cluster, attention_call(settings), given=given, published=False)
    placement = Placement(found, cluster)
    columns = [vars(found)[role] for role in SEQUENCE_ROLES] + [found.inner]
    columns += [placement.inside(role) for role in SEQUENCE_ROLES]
    seen: set[tuple[int, ...]] = set()
    rows = []
    for index, key in enumerate(zip(*(x.tolist() for x in columns), strict=True)):
        if key not in seen:
            seen.add(key)
            rows.append(_row(found, index))
    return rows


def _row(settings: Settings, index: int) -> Row:
    """A row with a short name: g2t8@tg has group 2 and team 8, of which the team is slower."""
    sizes = {role: int(vars(settings)[role][index]) for role in SEQUENCE_ROLES}
    order, inner = ORDERS[settings.order[index]], int(settings.inner[index])
    moving = [role for role in order if sizes.get(role, 1) > 1]
    name = "".join(f"{role[0]}{size}" for role, size in sizes.items() if size > 1)
    name += f"i{inner}" if inner > 1 else ""
    name += "@" + "".join(role[0] for role in moving) if len(moving) > 1 else ""
    options = {"inner": inner} if inner > 1 else {}
    return Row(
        scheme=Scheme(name=name or "one", degrees=st.Degrees(**sizes), given=options),
        order=order,
        label=CHOSEN,
    )


class Planned:
    """The cluster as the planner measures it, and what it predicts."""

    def __init__(self, settings: ClusterSettings, place: Place, processes: Processes) -> None:
        self._settings = settings
        with processes.limits():
            self.cluster = measure_cluster(
                place.devices,
                devices_per_node=place.devices_per_node,
                head_dim=settings.head_dim,
                # XLA's CPU backend multiplies nothing in bfloat16 as long as it sends bfloat16.
                itemsize=np.dtype(np.float32).itemsize
                if processes.emulated
                else attention_call(settings).model.itemsize,
                causal=settings.causal,
            )

    def facts(self) -> str:
        """The links that were measured, in words."""
        cluster = self.cluster
        duplex = "half" if cluster.half_duplex else "full"
        gpu, head_dim = cluster.gpu, self._settings.head_dim
        rates = [
            gpu.peak_flops * float(gpu.attention_efficiency(1, head_dim, backward=back))
            for back in (False, True)
        ]
        return (
            f"{cluster.ports} {duplex}-duplex ports of {show_rate(cluster.port_rate)} a node, "
            f"{show_rate(cluster.gpu.inside_rate)} inside; a message takes "
            f"{show_seconds(cluster.latency)} across and {show_seconds(cluster.inside_latency)} "
            f"inside, and {show_seconds(cluster.start_latency)} to start; attention at "
            f"{rates[0] / 1e9:.3g} and {rates[1] / 1e9:.3g} GFLOP/s a device, memory at "
            f"{show_rate(cluster.gpu.memory_rate)}"
        )

    def predict(self, rows: Sequence[Row], timed: Sequence[Sequence[Timed]]) -> None:
        """Adds the predictions to what is timed of each row, pass by pass."""
        seconds = self.seconds(rows)
        for index, of_row in enumerate(timed):
            for which, one in zip(self._settings.passes, of_row, strict=True):
                one.planned = float(seconds[which][index])

    def verdict(self, timed: Sequence[Timed]) -> str:
        """How well the rows follow the predictions, pass by pass."""
        passes = dict.fromkeys(one.what for one in timed)
        return "\n".join(verdict([x for x in timed if x.what == what]) for what in passes)

    def seconds(self, rows: Sequence[Row]) -> dict[str, np.ndarray]:
        """Predicted seconds of each row, by pass."""
        timing = Timing(settings_of(rows), self.cluster, attention_call(self._settings))
        forward = timing.forward().seconds
        return {"forward": forward, "both": forward + timing.backward().seconds}


def settings_of(rows: Sequence[Row]) -> Settings:
    """The rows as settings of the planner."""
    columns: dict[str, list[Any]] = {name: [] for name in Settings.__dataclass_fields__}
    for row in rows:
        scheme = row.scheme
        for role in ("data", *SEQUENCE_ROLES, "tensor"):
            columns[role].append(getattr(scheme.degrees, role))
        middle = [role for role in row.order if role in SEQUENCE_ROLES]
        columns["order"].append(ORDERS.index(("data", *middle, "tensor")))
        columns["inner"].append(scheme.options.get("inner", 1))
        columns["published"].append(scheme.published)
    return Settings(**{
        name: np.array(values, bool if name == "published" else np.int64)
        for name, values in columns.items()
    })  # fmt: skip


APART = 0.1
"""By how much the times of two rows must differ before their order counts."""


def kendall(found: np.ndarray, measured: np.ndarray) -> float:
    """Kendall's tau of rows that are measured `APART`: 1 if both have the same order, -1 if the
    opposite one. Rows that differ by less change places from one round to the next."""
    signs = [
        np.sign((found[i] - found[j]) * (measured[i] - measured[j]))
        for i, j in itertools.combinations(range(len(found)), 2)
        if abs(measured[i] / measured[j] - 1) > APART
    ]
    return float(np.mean(signs)) if signs else 1.0


def verdict(timed: Sequence[Timed]) -> str:
    """How well the rows of one pass follow the predictions, in two lines."""
    measured = np.array([statistics.median(x.seconds) for x in timed])
    found = np.array([x.planned or np.nan for x in timed])
    errors = np.abs(found / measured - 1)
    choice, best = int(found.argmin()), int(measured.argmin())
    ratio = measured[choice] / measured[best]
    return (
        f"{timed[0].what}: the planner takes {timed[choice].name}, {ratio:.2f} times the fastest, "
        f"{timed[best].name}\n  {np.mean(errors <= WITHIN):.0%} of {len(timed)} rows within "
        f"{WITHIN:.0%}, median error {np.median(errors):.1%}, Kendall "
        f"{kendall(found, measured):.2f}"
    )
