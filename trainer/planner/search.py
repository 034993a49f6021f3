"""Ranks all legal settings of a cluster by the time of a training step, under its memory."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from startrail_jax.devices.degrees import ROLES, Degrees
from startrail_jax.errors import InputError
from startrail_jax.rings.options import GradientDtype, Options
from trainer.planner.grid import ORDERS, Call, Settings, all_settings, number_of
from trainer.planner.hardware import Cluster
from trainer.planner.quantities import show_count
from trainer.planner.step import COMPUTE, EXPOSED, Savings, Step, is_legal, tile_of
from trainer.planner.timing import Timings

REMAT = ("products_saved", "projections_saved", "attention_saved", "full")
"""What the backward pass of a layer may recompute, most memory first. "none" reads from memory what
it would compute again, which is no faster (benchmarks/RESULTS.md, "A roofline of a compiled
step")."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """By default, all degrees and all values of `Savings` but for remat "none" are searched."""

    degrees: Mapping[str, int] = field(default_factory=dict)
    """Degrees that are given."""
    zero: Sequence[int] = (0, 1, 2, 3)
    remat: Sequence[str] = REMAT
    offload: Sequence[bool] = (False, True)
    tiled: Sequence[bool] = (False, True)
    offload_optimizer: bool = False
    """Whether the moments of the optimizer are in the memory of the host."""
    gradient_dtype: GradientDtype = "float32"
    """Type in which parts of the gradients of attention travel."""
    memory_fraction: float = 0.92
    """Share of a GPU's memory that a step may take: the rest is for NCCL, cuDNN and gaps."""
    baselines: bool = True
    """Whether other schemes are timed too."""
    exchange: Literal["auto", "rings"] = "auto"
    """What layers with a window send: "rings", or "auto" for what is fewer bytes."""


_DEFAULTS = vars(Search())


def check_options(options: Search) -> None:
    """Raises if an option has a value that does not exist."""
    for name in ("zero", "remat", "offload", "tiled"):
        several = getattr(options, name)
        if isinstance(several, str) or not isinstance(several, Sequence) or not several:
            example = several if isinstance(several, (str, int)) else _DEFAULTS[name][0]
            raise InputError(
                f"Options.{name} must be a tuple of all values that are tried; got "
                f"{name}={several!r}. Write for example {name}=({example!r},)."
            )
    allowed: dict[str, tuple[Sequence[Any], Sequence[Any]]] = {
        "--offload": (options.offload, (False, True)),
        "--tile": (options.tiled, (False, True)),
        "--zero": (options.zero, (0, 1, 2, 3)),
        "--remat": (options.remat, ("none", *REMAT)),
        "--gradient-dtype": ((options.gradient_dtype,), ("float32", "bfloat16")),
    }
    for flag, (given, known) in allowed.items():
        for value in given:
            if value not in known:
                raise InputError(f"{flag} must be one of {known}; got {value!r}. Correct it.")
    for role, size in options.degrees.items():
        if role not in ROLES or size < 1:
            raise InputError(
                f"A degree must be at least 1, and one of {ROLES}; got --{role} {size}. Correct it."
            )
    if not 0 < options.memory_fraction <= 1:
        raise InputError(
            "--memory-fraction must be above 0 and at most 1; got "
            f"{options.memory_fraction}. Leave it out for 0.92."
        )


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A setting, as in `Settings`, and what is predicted for its training step."""

    scheme: str
    degrees: Degrees
    order: tuple[str, ...]
    """Order of the mesh axes over the nodes, slowest first."""
    inner: int
    published: bool
    """Whether it is StarTrail as in its paper, which `train.py` does not run."""
    savings: Savings
    tile: int | None
    """Tokens that the MLP and the loss treat at a time; None for all."""
    gradient_dtype: str
    seconds: float
    parts: dict[str, float]
    """Seconds by what they are spent on."""
    mfu: float
    """Share of the peak FLOP/s of all GPUs that the model's own FLOPs are."""
    memory_bytes: int
    """Device memory of a GPU: an estimate."""
    host_bytes: int
    """Memory of the host that a GPU takes."""
    fits: bool
    across_bytes: float
    """Bytes that the attentions of a step send through the ports of the busiest node."""
    inside_bytes: float
    """Bytes that the attentions of a step send between the GPUs of a node."""

    @property
    def compute_seconds(self) -> float:
        return sum(self.parts[name] for name in COMPUTE)

    @property
    def exposed_seconds(self) -> float:
        return sum(self.parts[name] for name in EXPOSED)

    @property
    def label(self) -> str:
        """The degrees above 1, in a few characters."""
        sizes = ((role, getattr(self.degrees, role)) for role in ROLES)
        named = [f"{role} {size}" for role, size in sizes if size > 1]
        if self.inner > 1:
            named.append(f"inner {self.inner}")
        return ", ".join(named) or "one GPU"


def scheme_of(degrees: Degrees) -> str:
    """The name by which a setting of the degrees is known."""
    group, ring, team, head = degrees.group, degrees.ring, degrees.team, degrees.head
    ulysses = " x Ulysses" if head > 1 else ""
    if group * ring * team == 1:
        return "Ulysses" if head > 1 else "no sequence parallelism"
    if team == group == 1:
        return "LoongTrain / USP" if head > 1 else "Ring Attention"
    if ring == team == 1:
        return f"all-gather{ulysses}"
    if team == group:
        return f"StarTrail, C = {team}{ulysses}"
    if ring == 1 and team > 1:
        return f"2-D tiles{ulysses}" if group > 1 else f"teams{ulysses}"
    return f"concentric rings{ulysses}"


def family(scheme: str) -> str:
    """The name of a scheme without its numbers."""
    return re.sub(", C = [0-9]+", "", scheme)


# Name of a baseline -> whether settings are of its scheme.
BASELINES: Mapping[str, Callable[[Settings], np.ndarray]] = {
    "Ring Attention": lambda s: (s.group == 1) & (s.team == 1) & (s.head == 1) & (s.ring > 1),
    "all-gather": lambda s: (s.ring == 1) & (s.team == 1) & (s.head == 1) & (s.group > 1),
    "Ulysses": lambda s: (s.ring == 1) & (s.team == 1) & (s.group == 1) & (s.head > 1),
    "LoongTrain / USP": lambda s: (s.team == 1) & (s.group == 1) & (s.head > 1) & (s.ring > 1),
    "StarTrail as published": lambda s: s.published,
}


class Candidates:
    """All settings with all savings, timed: one element for each pair, in the order of the axes
    that is the fastest for its degrees."""

    def __init__(
        self,
        cluster: Cluster,
        call: Call,
        options: Search,
        settings: Settings | None = None,
    ) -> None:
        self.cluster, self.call, self.options = cluster, call, options
        if settings is None:
            settings = all_settings(
                cluster, call, given=options.degrees, published=options.baselines
            )
        self.settings = settings
        """Every order of every setting of the degrees."""
        if not len(settings):
            raise no_setting(cluster, call, options)
        self._limit = options.memory_fraction * cluster.gpu.memory_bytes
        sent = Options(gradient_dtype=options.gradient_dtype, exchange=options.exchange)
        self._timing = Timings(settings, cluster, call, sent)
        self._degrees = number_of(*(vars(settings)[x] for x in (*ROLES, "published")))
        self.kinds: list[tuple[Step, Savings]] = []
        """Each with the settings in the order that is the fastest for its remat and offload."""
        found: list[tuple[np.ndarray, ...]] = []
        exchanges = self._timing.exchanges_again_seconds
        # What a backward pass repeats of attention -> its seconds: nothing, the forward pass, or
        # the exchanges without offload and with it.
        again: dict[Any, Any] = {"none": 0.0, "full": self._timing.passes[0].seconds}
        again |= {False: exchanges[0], True: exchanges[1]}
        steps: dict[Any, Step] = {}
        for remat, offload in itertools.product(options.remat, options.offload):
            repeated = remat if remat in again else offload
            if repeated not in steps:
                steps[repeated] = Step(self._timing, self._best_orders(again[repeated]))
            step = steps[repeated]
            for zero, tiled in itertools.product(options.zero, options.tiled):
                savings = Savings(
                    zero=zero,
                    remat=remat,
                    offload=offload,
                    tiled=tiled,
                    offload_optimizer=options.offload_optimizer,
                )
                legal = np.flatnonzero(is_legal(step.settings, savings, step.tokens))
                if not len(legal):
                    continue
                seconds = np.sum(list(step.parts(savings).values()), axis=0)[legal]
                memory = step.footprint(savings).device_bytes
                memory = np.broadcast_to(memory, len(step.settings))[legal]
                kind = np.full(len(legal), len(self.kinds))
                self.kinds.append((step, savings))
                found.append((kind, legal, seconds, memory))
        if not found:
            raise _no_savings(options)
        self.kind, self.row, self.seconds, self.memory = map(
            np.concatenate, zip(*found, strict=True)
        )
        self.fits = self.memory <= self._limit

    def _best_orders(self, again: np.ndarray | float) -> np.ndarray:
        """The row of the fastest order of each setting of the degrees."""
        forward, backward = (x.seconds for x in self._timing.passes)
        # Of equally fast ones, a single ring in the first order.
        keys = (self.settings.order, self.settings.inner, forward + backward + again)
        rows = np.lexsort((*keys, self._degrees))
        return rows[np.r_[True, np.diff(self._degrees[rows]) != 0]]

    def mask(self, scheme: Callable[[Settings], np.ndarray]) -> np.ndarray:
        found = [
            scheme(step.settings)[self.row[self.kind == kind]]
            for kind, (step, _) in enumerate(self.kinds)
        ]
        return np.concatenate(found)

    def best(self, mask: np.ndarray, count: int = 1) -> list[Prediction]:
        """The fastest candidates of a mask that fit the memory, one for each setting of the
        degrees; if none fits, the one that needs the least memory."""
        order = self.ordered(mask)
        if not len(order):
            rest = np.flatnonzero(mask)
            return [self.prediction(rest[self.memory[rest].argmin()])] if len(rest) else []
        chosen: dict[tuple[Degrees, bool], Prediction] = {}
        for index in order:
            key = self.degrees(index)
            if key not in chosen:
                chosen[key] = self.prediction(index)
            if len(chosen) == count:
                break
        return list(chosen.values())

    def ordered(self, mask: np.ndarray) -> np.ndarray:
        """The candidates of a mask that fit the memory: the fastest first, then those that need not
        offload, then those of least memory."""
        fitting = np.flatnonzero(mask & self.fits)
        offloads = np.array([savings.offload for _, savings in self.kinds])[self.kind[fitting]]
        return fitting[np.lexsort((self.memory[fitting], offloads, self.seconds[fitting]))]

    def savings(self, index: Any) -> Savings:
        return self.kinds[self.kind[index]][1]

    def degrees(self, index: Any) -> tuple[Degrees, bool]:
        """The degrees of a candidate, and whether it is StarTrail as in its paper."""
        settings, row = self.kinds[self.kind[index]][0].settings, self.row[index]
        degrees = Degrees(**{role: int(vars(settings)[role][row]) for role in ROLES})
        return degrees, bool(settings.published[row])

    def prediction(self, index: Any) -> Prediction:
        step, savings = self.kinds[self.kind[index]]
        step = step.take(self.row[index])
        settings, footprint = step.settings, step.footprint(savings)
        degrees, published = self.degrees(index)
        parts = {name: float(seconds[0]) for name, seconds in step.parts(savings).items()}
        call, cluster = self.call, self.cluster
        seconds = sum(parts.values())
        passes = [step.forward, step.backward] + [step.forward] * (savings.remat == "full")
        scheme = scheme_of(degrees)
        return Prediction(
            scheme=f"{scheme}, as published" if published else scheme,
            degrees=degrees,
            order=ORDERS[int(settings.order[0])],
            inner=int(settings.inner[0]),
            published=published,
            savings=savings,
            tile=int(tile_of(settings, step.tokens)[0]) if savings.tiled else None,
            gradient_dtype=self.options.gradient_dtype,
            seconds=seconds,
            parts=parts,
            mfu=call.flops / seconds / (cluster.num_gpus * self._timing.speed),
            memory_bytes=_one(footprint.device_bytes),
            host_bytes=_one(footprint.host_bytes),
            fits=bool(_one(footprint.device_bytes) <= self._limit),
            across_bytes=float(sum(x.across[0] for x in passes)),
            inside_bytes=float(sum(x.inside[0] for x in passes)),
        )


def _one(size: Any) -> int:
    return int(np.ravel(size)[0])


def no_setting(cluster: Cluster, call: Call, options: Search) -> InputError:
    """The error if there is no legal setting."""
    given, model = _flags_of(options.degrees), call.model
    product = int(np.prod(list(options.degrees.values()) or [1]))
    is_whole = set(options.degrees) == set(ROLES)
    if cluster.num_gpus % product or (is_whole and product != cluster.num_gpus):
        return InputError(
            "The product of the degrees must divide the number of GPUs, and be equal to it if all "
            f"six are given; got {given}, a product of {product}, for {cluster.num_gpus} GPUs. "
            "Change or leave out one of them."
        )
    return InputError(
        "No legal setting: data must divide --batch-size, head * tensor the heads, and the key "
        "heads or the other way round, and tensor the width of the MLP and the tokens of a GPU; "
        "got "
        f"--seq-len {show_count(call.seq_len)}, --batch-size {call.batch}, {model.heads} heads, "
        f"{model.kv_heads} key heads and an MLP of {model.mlp_width} for {cluster.num_gpus} GPUs"
        f"{f' with {given}' if given else ''}. Change or leave out a degree."
    )


def _flags_of(degrees: Mapping[str, int]) -> str:
    return " ".join(f"--mesh.{role} {size}" for role, size in degrees.items())


def _no_savings(options: Search) -> InputError:
    """The error if there are settings of the degrees, and none of them takes the given savings."""
    return InputError(
        "No legal setting: --tile needs more than 2048 tokens on a GPU, in tiles of at least 256, "
        "--offload a --remat other than none, and --zero several GPUs along another axis than "
        f"tensor; got --tile {all(options.tiled)}, --offload {all(options.offload)}, --remat "
        f"{' '.join(options.remat)} and --zero {' '.join(map(str, options.zero))}"
        f"{f' with {given}' if (given := _flags_of(options.degrees)) else ''}. Leave one of them "
        "out, such as --tile."
    )
