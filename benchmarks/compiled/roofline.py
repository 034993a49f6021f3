"""A roofline of a compiled program: its kernels, its collectives, and what runs beneath these.

The text of an optimised program is its schedule, which is played here: kernels one after another,
and beside them one link, which carries one collective at a time. A kernel takes as long as its
bytes at the rate of the memory, or its FLOPs at that of the matrix units, whichever is longer. What
kernels wait for the link is *exposed*. Kernels that run between the -start and the -done of an
asynchronous collective are *beneath* it. Nothing is measured: the rates are those of
`trainer.planner.hardware`.

Of a conditional, all branches count, each with the same share, as devices and rounds take different
ones. Copies to and from the host are left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jax.sharding import Mesh

from startrail_jax.analysis.hlo import (
    HloModule,
    Instruction,
    TrafficReader,
    callees,
    device_groups,
    num_bytes,
    parse_module,
    source_target_pairs,
)
from startrail_jax.errors import UnsupportedError
from startrail_jax.rings.latents import SCOPE
from startrail_jax.traffic import COLLECTIVES
from trainer.planner.hardware import Gpu
from trainer.planner.models import DISPATCHES

ATTENTION, MATRICES, OTHERS = "attention", "matrices", "other kernels"
KINDS = (ATTENTION, MATRICES, OTHERS)
ENTRY = "entry"
"""What the entry of a program is called here, among its computations."""
BACKWARD = "transpose("
"""What the `op_name` of an instruction of the backward pass contains."""

MESSAGES = DISPATCHES + 1
"""Turns of a loop that sends tokens to experts, where a device gets up to 1.25 times the mean."""
_RECOMPUTED = "rematted_computation"
"""What the `op_name` of an instruction contains that jax computes a second time."""
_NOTHING = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "reshape", "after-all"),
    *("partition-id", "replica-id", "iota", "opt-barrier"),
}
_CONTROL_FLOW = ("while", "conditional", "call")
_READS_A_PART = {"dynamic-slice", "slice", "gather"}
_WRITES_A_PART = {"dynamic-update-slice": 1, "scatter": -1}
"""Opcode -> which operand holds what is written."""
_DIMS = re.compile(r"\[([\d,]*)\]")
_OP_NAME = re.compile(r'\bop_name="([^"]*)"')
_ATTENTION_TARGET = re.compile(r'custom_call_target="__cudnn\$fmhaSoftmax(Backward)?"')
_LOGITS = re.compile(r'"intermediate_tensor_shape":\s*{[^}]*?"dimensions":\s*\[([^\]]*)\]')
_WINDOW = re.compile(r'"sliding_window_length":\s*(\d+)')
_PRODUCT_TARGET = re.compile(r'custom_call_target="__cublas\$')
_CONTRACTING = re.compile(r'\blhs_contracting_dim(?:ension)?s"?[=:][{\[]([\d,"]*)')


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """An instruction that computes, of one device."""

    name: str
    kind: str
    """One of `KINDS`."""
    runs: float
    """How often it runs in one execution; in a branch, the mean over branches."""
    bytes: int
    """Bytes that one run reads and writes."""
    flops: float
    """FLOPs of matrix products in one run."""
    seconds: float
    """Seconds of one run."""
    recomputed: bool
    """Whether jax computes it a second time, for the backward pass."""
    expands: bool
    """Whether it makes keys and values of latents, or takes back their gradients."""
    result: str
    """Type of the result, as text."""


@dataclass(kw_only=True)
class Collective:
    """A collective, and what runs while it is under way."""

    name: str
    kind: str
    """One of `COLLECTIVES`; several, joined by "and", if XLA has wrapped several together."""
    computation: str
    """`ENTRY`, or the name of the loop body, branch or callee that holds it."""
    runs: float = 0.0
    asynchronous: bool
    """Whether kernels may run while it is under way."""
    received_bytes: int
    """What the device that receives most receives in one run."""
    groups: tuple[tuple[int, ...], ...]
    """Groups of devices; for a collective_permute, the sender and receiver of each message."""
    op_name: str
    """Path of the traced operation that it comes from."""
    attention: list[Instruction] = field(default_factory=list)
    """What attends beneath it: calls of cuDNN's attention, and control flow with such calls or with
    products, to which the backend "xla" compiles."""
    products: list[Instruction] = field(default_factory=list)
    """Other matrix products beneath it."""
    last: bool = True
    """Whether nothing in the same computation attends after it has started."""

    @property
    def overlapped(self) -> bool:
        """Whether attention runs beneath it."""
        return bool(self.attention)

    @property
    def is_homecoming(self) -> bool:
        """Whether it brings a gradient home after the last round."""
        return BACKWARD in self.op_name and self.computation == ENTRY and self.last

    def axes(self, mesh: Mesh) -> set[str]:
        """The mesh axes along which it moves data."""
        places = np.stack(np.unravel_index(range(mesh.size), mesh.devices.shape), axis=1)
        moved = np.any([np.ptp(places[list(group)], axis=0) > 0 for group in self.groups], 0)
        return {name for name, moves in zip(mesh.axis_names, moved, strict=True) if moves}


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """All kernels and collectives of a program, and the time that kernels wait for the link."""

    kernels: tuple[Kernel, ...]
    collectives: tuple[Collective, ...]
    exposed_seconds: float
    received_bytes: float
    """Bytes that the link carries."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole program."""
        return sum(x.runs * x.seconds for x in self.kernels) + self.exposed_seconds

    @property
    def recomputed_share(self) -> float:
        """FLOPs that are computed a second time, over all."""
        every = sum(x.runs * x.flops for x in self.kernels)
        again = sum(x.runs * x.flops for x in self.kernels if x.recomputed)
        return again / every if every else 0.0

    @property
    def expanding_seconds(self) -> float:
        """Seconds in which keys and values are made of latents, and gradients of latents of
        theirs."""
        return sum(x.runs * x.seconds for x in self.kernels if x.expands)

    def hops(self, mesh: Mesh) -> list[Collective]:
        """The permutes along the ring of a mesh."""
        permutes = (x for x in self.collectives if x.kind == "collective_permute")
        return [x for x in permutes if x.axes(mesh) == {"ring"}]

    def table(self, largest: int = 10) -> str:
        """Totals by kind, and the kernels that move most bytes."""
        lines = [f"{'':<16}{'kernels':>9}{'GB':>10}{'TFLOP':>10}{'s':>10}{'':>7}"]
        for kind in KINDS:
            found = [x for x in self.kernels if x.kind == kind]
            total = [sum(x.runs * y for x, y in zip(found, column, strict=True)) for column in (
                [1] * len(found), [x.bytes for x in found], [x.flops for x in found],
                [x.seconds for x in found])]  # fmt: skip
            lines.append(_line(kind, f"{total[0]:.0f}", *total[1:], whole=self.seconds))
        lines.append(_line("exposed link", "", self.received_bytes, None, self.exposed_seconds,
                           whole=self.seconds))  # fmt: skip
        lines.append(f"recomputed: {self.recomputed_share:.1%} of the FLOPs")
        if expanding := self.expanding_seconds:
            share = expanding / self.seconds
            lines.append(f"expanding latents: {expanding:.4f} s, {share:.1%} of the time")
        lines += ["", f"{'largest by bytes':<36}{'runs':>8}{'MiB':>9}{'s':>9}  result"]
        for x in sorted(self.kernels, key=lambda x: -x.runs * x.bytes)[:largest]:
            lines.append(f"{x.name:<36.35}{x.runs:>8.4g}{x.bytes / 2**20:>9.1f}"
                         f"{x.runs * x.seconds:>9.4f}  {x.result:.60}")  # fmt: skip
        return "\n".join(lines)


def _line(
    name: str, count: str, size: float, flops: float | None, seconds: float, *, whole: float
) -> str:
    work = "" if flops is None else f"{flops / 1e12:.1f}"
    share = seconds / whole if whole else 0.0
    return f"{name:<16}{count:>9}{size / 1e9:>10.1f}{work:>10}{seconds:>10.4f}{share:>7.1%}"


def read_roofline(text: str, gpu: Gpu) -> Roofline:
    player = _Player(parse_module(text), gpu)
    player.play(player.module.entry, 1.0)
    return Roofline(
        kernels=tuple(player.kernels),
        collectives=tuple(player.collectives.values()),
        exposed_seconds=player.exposed,
        received_bytes=player.received,
    )


@dataclass
class _Player:
    """Plays the schedule; times are seconds since the program began."""

    module: HloModule
    gpu: Gpu
    kernels: list[Kernel] = field(default_factory=list)
    collectives: dict[tuple[str, str], Collective] = field(default_factory=dict)
    """By computation and name."""
    exposed: float = 0.0
    received: float = 0.0
    now: float = 0.0
    link_free: float = 0.0
    """When the link has carried all that was started."""
    _fused: dict[str, tuple[dict[int, int], int, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._traffic = TrafficReader(self.module, MESSAGES)
        self._traffic.traffic()

    def play(self, computation: str, runs: float) -> None:
        """Plays one of so many runs of a computation."""
        started: list[Collective] = []
        under_way: dict[str, tuple[Collective, float]] = {}
        for x in self.module.computations[computation]:
            before = len(self.kernels)
            if x.opcode == "while":
                self._loop(x, runs)
            elif x.opcode == "conditional":
                self._branches(x, runs)
            elif x.opcode == "call":
                for callee in callees(x):
                    self.play(callee, runs)
            elif x.opcode.endswith(("-done", "-update")):
                pending = [under_way.pop(name) for name in x.operand_names if name in under_way]
                for collective, end in pending:
                    if x.opcode.endswith("-update"):
                        under_way[x.name] = collective, end
                    else:
                        self._wait(end, runs)
            elif self._collectives(x):
                collective = self._start(computation, x, runs)
                started.append(collective)
                under_way[x.name] = collective, self.link_free
                if not x.opcode.endswith("-start"):
                    self._wait(under_way.pop(x.name)[1], runs)
            elif x.opcode not in _NOTHING and not x.opcode.endswith("-start"):
                self.kernels.append(self._kernel(computation, x, runs))
                self.now += self.kernels[-1].seconds
            kinds = {kernel.kind for kernel in self.kernels[before:]}
            attends = ATTENTION in kinds or (MATRICES in kinds and x.opcode in _CONTROL_FLOW)
            for collective, _ in under_way.values():
                if collective.asynchronous and attends:
                    collective.attention.append(x)
                elif collective.asynchronous and MATRICES in kinds:
                    collective.products.append(x)
            for collective in started if attends else ():
                collective.last = False
        if under_way:
            raise UnsupportedError(
                "A collective must end in the computation in which it starts; got "
                f"{', '.join(under_way)} in {computation} without its -done. Compile without the "
                "option that moves it to the next iteration, such as xla_gpu_enable_pipelined_p2p."
            )

    def _start(self, computation: str, x: Instruction, runs: float) -> Collective:
        """Gives a collective to the link."""
        received = self._traffic.instruction_traffic(computation, x).received_bytes
        self.link_free = max(self.now, self.link_free) + received / self.gpu.inside_rate
        self.received += runs * received
        found = self._collectives(x)
        collective = Collective(
            name=x.name,
            kind=" and ".join(dict.fromkeys(map(_kind, found))),
            computation=ENTRY if computation == self.module.entry else computation,
            # XLA marks a pair that it keeps although nothing is to run meanwhile.
            asynchronous=x.opcode.endswith("-start") and '"is_sync":true' not in x.attributes,
            received_bytes=received,
            groups=tuple(
                group
                for y in found
                for group in (
                    source_target_pairs(y)
                    if _kind(y) == "collective_permute"
                    else device_groups(self.module, y)
                )
            ),
            op_name=_op_name(x),
        )
        known = self.collectives.setdefault((computation, x.name), collective)
        known.runs += runs
        return collective

    def _collectives(self, x: Instruction) -> list[Instruction]:
        """The collectives that an instruction starts, itself or in what it calls."""
        if _kind(x) in COLLECTIVES:
            return [x]
        inner = (y for callee in callees(x) for y in self.module.computations[callee])
        return [found for y in inner for found in self._collectives(y)]

    def _wait(self, end: float, runs: float) -> None:
        self.exposed += runs * max(0.0, end - self.now)
        self.now = max(self.now, end)

    def _loop(self, x: Instruction, runs: float) -> None:
        """Plays one turn, and takes all others for alike."""
        _, body = callees(x)
        count = self._traffic.turns(x) or 1
        start, late = self.now, max(0.0, self.link_free - self.now)
        self.play(body, runs * count)
        self.now = start + count * (self.now - start)
        self.link_free = self.now + (late if self.link_free <= start else 0.0)

    def _branches(self, x: Instruction, runs: float) -> None:
        start, ends, names = self.now, [], callees(x)
        for name in names:
            self.now = start
            self.play(name, runs / len(names))
            ends.append(self.now)
        self.now = sum(ends) / len(ends)

    def _kernel(self, computation: str, x: Instruction, runs: float) -> Kernel:
        results = self._traffic.results(computation)
        sizes = [num_bytes(results.get(name, "")) for name in x.operand_names]
        size, flops, kind = num_bytes(x.result) + sum(sizes), 0.0, OTHERS
        rate = self.gpu.peak_flops * self.gpu.matrix_efficiency
        if x.opcode == "fusion":
            read, written, flops = self._fusion(callees(x)[0])
            size = written + sum(read.get(i, whole) for i, whole in enumerate(sizes))
        elif x.opcode == "dot" or _PRODUCT_TARGET.search(x.attributes):
            flops = _dot_flops(x, results)
        elif x.opcode in _READS_A_PART:
            size = 2 * num_bytes(x.result)
        elif x.opcode in _WRITES_A_PART:
            size = 2 * sizes[_WRITES_A_PART[x.opcode]]
        elif match := _ATTENTION_TARGET.search(x.attributes):
            flops, kind = _attention_flops(x, results, backward=bool(match[1])), ATTENTION
            if flops:
                rows, head_dim = _dims(results[x.operand_names[0]])[1::2]
                rate = self.gpu.peak_flops * float(
                    self.gpu.attention_efficiency(rows, head_dim, backward=bool(match[1]))
                )
        if flops and kind != ATTENTION:
            kind = MATRICES
        return Kernel(
            name=x.name,
            kind=kind,
            runs=runs,
            bytes=size,
            flops=flops,
            seconds=max(size / self.gpu.memory_rate, flops / rate),
            recomputed=_RECOMPUTED in _op_name(x),
            expands=SCOPE in _op_name(x),
            result=x.result,
        )

    def _fusion(self, name: str) -> tuple[dict[int, int], int, float]:
        """Of a fused computation: bytes read of each parameter, bytes written, and FLOPs."""
        if name not in self._fused:
            body, results = self.module.computations[name], self._traffic.results(name)
            read = {
                int(x.operands): self._read(x, body, results)
                for x in body
                if x.opcode == "parameter"
            }
            flops = sum(_dot_flops(x, results) for x in body if x.opcode == "dot")
            flops += sum(self._fusion(callees(x)[0])[2] for x in body if x.opcode == "fusion")
            self._fused[name] = read, _written(body[-1], body, results), flops
        return self._fused[name]

    def _read(self, parameter: Instruction, body: list[Instruction], results: dict) -> int:
        """Bytes of a parameter that are read: parts only, if all that use it take parts."""
        whole, size, names = num_bytes(parameter.result), 0, [parameter.name]
        for name in names:
            for x in body:
                if name not in x.operand_names:
                    continue
                first = x.operand_names[0] == name
                if x.opcode in ("bitcast", "reshape"):
                    names.append(x.name)
                elif first and x.opcode in _READS_A_PART:
                    size += num_bytes(x.result)
                elif not (first and x.opcode in _WRITES_A_PART):
                    return whole
        return min(size, whole)


def _written(x: Instruction, body: Sequence[Instruction], results: dict[str, str]) -> int:
    """Bytes that a fused computation writes with the result `x`."""
    by_name = {y.name: y for y in body}
    while x.opcode in ("bitcast", "reshape"):
        x = by_name[x.operand_names[0]]
    if x.opcode == "tuple":
        return sum(_written(by_name[name], body, results) for name in x.operand_names)
    if x.opcode in _WRITES_A_PART:
        return num_bytes(results[x.operand_names[_WRITES_A_PART[x.opcode]]])
    return num_bytes(x.result)


def _kind(x: Instruction) -> str:
    return x.opcode.removesuffix("-start").replace("-", "_")


def _op_name(x: Instruction) -> str:
    found = _OP_NAME.search(x.attributes)
    return found[1] if found else ""


def _dims(result: str) -> list[int]:
    """The dimensions of the first array of a type."""
    found = _DIMS.search(result)
    return [int(n) for n in found[1].split(",") if n] if found else []


def _dot_flops(x: Instruction, results: dict[str, str]) -> float:
    summed = _CONTRACTING.search(x.attributes)
    operand = _dims(results[x.operand_names[0]])
    inner = [operand[int(n)] for n in re.findall(r"\d+", summed[1])] if summed else []
    return 2.0 * math.prod(_dims(x.result)) * math.prod(inner)


def _attention_flops(x: Instruction, results: dict[str, str], *, backward: bool) -> float:
    """Useful FLOPs of a call of cuDNN's attention: of visible pairs, 2.5 times as many backward."""
    logits = _LOGITS.search(x.attributes)
    if logits is None:
        return 0.0
    batch, heads, rows, keys = (int(n.strip(' "')) for n in logits[1].split(","))
    causal = '"CAUSAL"' in x.attributes
    pairs = rows * keys / (2 if causal else 1)
    window = _WINDOW.search(x.attributes)
    if window and int(window[1]):
        pairs = min(pairs, rows * int(window[1]))
    head_dim = _dims(results[x.operand_names[0]])[-1]
    return 4.0 * batch * heads * pairs * head_dim * (2.5 if backward else 1.0)
