"""Reads compiled programs: which kernels run while a collective is under way.

The text of an optimised program is its schedule. An asynchronous collective is under way from its
-start to its -done, and the kernels between the two run meanwhile: they are *beneath* it. The text
shows whether a message can be hidden at all, but not whether the kernels take longer than the
message. `startrail_jax.analysis.hlo` reads the same texts for bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from jax.sharding import Mesh

from startrail_jax.analysis import COLLECTIVES
from startrail_jax.analysis.hlo import (
    HloModule,
    Instruction,
    TrafficReader,
    callees,
    device_groups,
    num_bytes,
    parse_module,
    source_target_pairs,
    trip_count,
)
from startrail_jax.errors import UnsupportedError

ENTRY = "entry"
"""The name that `computation` has, in what is listed here, for the entry of a program."""

BACKWARD = "transpose("
"""What the `op_name` of an instruction of the backward pass contains."""

_CONTROL_FLOW = ("while", "conditional", "call")
_TARGET = re.compile(r'\bcustom_call_target="([^"]*)"')
_OP_NAME = re.compile(r'\bop_name="([^"]*)"')
_ATTENTION_TARGET = re.compile(r"__cudnn\$fmha")
_PRODUCT_TARGET = re.compile(r"__cublas\$|__triton_gemm|__cutlass")

# Opcodes that only move data, and opcodes that do nothing in memory.
_MOVES = {"copy", "transpose", "slice", "dynamic-slice", "concatenate", "pad", "reverse"}
_VIEWS = {"parameter", "constant", "bitcast", "reshape", "tuple", "get-tuple-element"}


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One instruction that computes."""

    name: str
    """Name of the instruction."""
    result: str
    """Type of the result, as text."""
    op_name: str
    """Path of the traced operation that it comes from; it contains `BACKWARD` in the backward
    pass."""


@dataclass(frozen=True, kw_only=True)
class ScheduledCollective:
    """One collective of a program, and what runs while it is under way."""

    name: str
    """Name of the instruction that starts it."""
    kind: str
    """One of `COLLECTIVES`; several, joined by "and", if XLA has wrapped several together."""
    computation: str
    """`ENTRY`, or the name of the computation (loop body, branch, callee) that holds it."""
    runs: int
    """How often it runs in one execution of the program; in a branch, at most."""
    asynchronous: bool
    """Whether kernels may run while it is under way."""
    received_bytes: int
    """What the device that receives most receives in one run, in bytes."""
    attention: tuple[Kernel, ...]
    """Kernels of block attention beneath it."""
    products: tuple[Kernel, ...]
    """Other matrix products beneath it."""
    after: int
    """Number of attention kernels of its pass, in the same computation, that start before it."""
    of: int
    """Number of attention kernels of its pass, in the same computation. Its pass, forward or
    backward, is that of the attention kernel that follows it."""
    groups: tuple[tuple[int, ...], ...]
    """Groups of devices that it joins; for a collective_permute, sender and receiver of each
    message."""
    op_name: str
    """Path of the traced operation that it comes from."""

    @property
    def overlapped(self) -> bool:
        """Whether attention runs beneath it."""
        return bool(self.attention)


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A kernel that moves a buffer within the memory of a device and computes nothing."""

    name: str
    """Name of the instruction."""
    computation: str
    """`ENTRY`, or the name of the computation (loop body, branch, callee) that holds it."""
    runs: int
    """How often it runs in one execution of the program; in a branch, at most."""
    written_bytes: int
    """Bytes that it writes in one run."""
    conditional: str
    """Name of the conditional, if it is in a branch, else empty. Only one of the branches runs."""
    in_rounds: bool
    """Whether it recurs in every round of a ring: in a loop, or between two attention kernels."""


def read_overlap(text: str) -> tuple[ScheduledCollective, ...]:
    """Lists the collectives of a compiled program with the kernels that run beneath each.

    A call of cuDNN's attention counts as block attention, as does control flow that holds such a
    call. Control flow that holds matrix products counts too, because backend "xla" compiles to it.
    All other matrix products are listed as products.

    Args:
        text: the whole text of the optimised, scheduled program, `compiled.as_text()`.

    Returns:
        The collectives of each computation, in the order in which they start.

    Raises:
        ValueError: if a loop with collectives has no known trip count, or if the text is not HLO.
        NotImplementedError: if a collective does not end in the computation in which it starts, or
            is of another kind or form.
    """
    reader = _OverlapReader(parse_module(text))
    return tuple(x for name, runs in reader.places.items() for x in reader.listed(name, runs))


def read_copies(text: str, at_least: int) -> tuple[Copy, ...]:
    """Lists the copies in the entry of a program and in the computations that send anything.

    Branches that hold attention are read too. Copies in the loops of block attention are part of it
    and are not listed.

    Args:
        text: the whole text of the program, as for `read_overlap`.
        at_least: number of bytes that a copy must write to be listed.

    Raises:
        ValueError: if a loop with collectives has no known trip count, or if the text is not HLO.
        NotImplementedError: if a collective is of another kind or form.
    """
    reader = _OverlapReader(parse_module(text))
    copies = (x for name, runs in reader.places.items() for x in reader.copies(name, runs))
    return tuple(copy for copy in copies if copy.written_bytes >= at_least)


def axes(transfer: ScheduledCollective, mesh: Mesh) -> set[str]:
    """The mesh axes along which a collective moves data."""
    places = np.stack(np.unravel_index(range(mesh.size), mesh.devices.shape), axis=1)
    moved = [np.ptp(places[list(group)], axis=0) > 0 for group in transfer.groups]
    return {name for name, moves in zip(mesh.axis_names, np.any(moved, 0), strict=True) if moves}


@dataclass(frozen=True)
class _Holds:
    """What a computation runs, at any depth."""

    attention: bool = False
    product: bool = False

    def __or__(self, other: _Holds) -> _Holds:
        return _Holds(self.attention or other.attention, self.product or other.product)


@dataclass
class _OverlapReader:
    """Finds what runs beneath each collective of a program, and its copies."""

    module: HloModule
    places: dict[str, int] = field(default_factory=dict)
    """The computations that send something, and how often each runs."""
    _held: dict[str, _Holds] = field(default_factory=dict)
    _attention: dict[str, list[tuple[int, bool]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.traffic = TrafficReader(self.module)
        self.traffic.traffic()
        self._visit(self.module.entry, 1)

    def _visit(self, computation: str, runs: int) -> None:
        self.places[computation] = self.places.get(computation, 0) + runs
        for instruction in self.module.computations[computation]:
            if instruction.opcode in _CONTROL_FLOW:
                for callee, times in zip(callees(instruction), _times(instruction), strict=True):
                    if any(map(self.collectives, self.module.computations[callee])):
                        self._visit(callee, runs * times)

    def listed(self, computation: str, runs: int) -> Iterator[ScheduledCollective]:
        """The collectives of a computation, which runs so often."""
        instructions = self.module.computations[computation]
        for start, instruction in enumerate(instructions):
            collectives = self.collectives(instruction)
            if not collectives or instruction.opcode in _CONTROL_FLOW:
                continue
            beneath = _beneath(instructions, start, computation)
            traffic = self.traffic.instruction_traffic(computation, instruction)
            after, of = self.progress(computation, start)
            yield ScheduledCollective(
                name=instruction.name,
                kind=" and ".join(dict.fromkeys(map(_kind, collectives))),
                computation=self.label(computation),
                runs=runs,
                asynchronous=beneath is not None,
                received_bytes=traffic.received_bytes,
                attention=tuple(_kernel(x) for x in beneath or () if self.attends(x)),
                products=tuple(_kernel(x) for x in beneath or () if self.multiplies(x)),
                after=after,
                of=of,
                groups=tuple(group for x in collectives for group in self.groups(x)),
                op_name=_kernel(instruction).op_name,
            )

    def collectives(self, instruction: Instruction) -> list[Instruction]:
        """The collectives that an instruction starts, itself or in what it calls."""
        if instruction.opcode.endswith(("-done", "-update")):
            return []
        if _kind(instruction) in COLLECTIVES:
            return [instruction]
        return [
            found
            for callee in callees(instruction)
            for inner in self.module.computations[callee]
            for found in self.collectives(inner)
        ]

    def groups(self, collective: Instruction) -> list[tuple[int, ...]]:
        if _kind(collective) == "collective_permute":
            return source_target_pairs(collective)
        return device_groups(self.module, collective)

    def copies(
        self, computation: str, runs: int, conditional: str = "", in_rounds: bool = False
    ) -> Iterator[Copy]:
        """The copies of a computation; the other arguments are fields of `Copy`."""
        results = self.traffic.results(computation)
        for position, instruction in enumerate(self.module.computations[computation]):
            after, of = self.progress(computation, position)
            repeated = in_rounds or computation != self.module.entry or 0 < after < of
            if instruction.opcode == "conditional" and self.attends(instruction):
                for branch in callees(instruction):
                    if branch not in self.places:
                        # A conditional that attends is part of a round.
                        yield from self.copies(branch, runs, instruction.name, in_rounds=True)
            elif self.copies_only(instruction):
                result = instruction.result
                if instruction.opcode == "copy-start":
                    # The result of a copy-start holds its source too.
                    result = results[instruction.operand_names[0]]
                yield Copy(
                    name=instruction.name,
                    computation=self.label(computation),
                    runs=runs,
                    written_bytes=num_bytes(result),
                    conditional=conditional,
                    in_rounds=repeated,
                )

    def progress(self, computation: str, position: int) -> tuple[int, int]:
        """Numbers of attention kernels, before a position and in all, in the pass of the next."""
        kernels = self.attention(computation)
        following = [backward for place, backward in kernels if place > position]
        if not kernels:
            return 0, 0
        of_pass = following[0] if following else kernels[-1][1]
        places = [place for place, backward in kernels if backward == of_pass]
        return sum(place < position for place in places), len(places)

    def attention(self, computation: str) -> list[tuple[int, bool]]:
        """The place of each attention kernel, and whether it is of the backward pass."""
        if computation not in self._attention:
            self._attention[computation] = [
                (place, BACKWARD in _kernel(x).op_name)
                for place, x in enumerate(self.module.computations[computation])
                if self.attends(x)
            ]
        return self._attention[computation]

    def label(self, computation: str) -> str:
        return ENTRY if computation == self.module.entry else computation

    def attends(self, instruction: Instruction) -> bool:
        holds = self.holds(instruction)
        looped = instruction.opcode.removesuffix("-start") in _CONTROL_FLOW
        return holds.attention or (looped and holds.product)

    def multiplies(self, instruction: Instruction) -> bool:
        return self.holds(instruction).product and not self.attends(instruction)

    def holds(self, instruction: Instruction) -> _Holds:
        """What an instruction runs; the -done of an asynchronous operation runs nothing."""
        if instruction.opcode.endswith(("-done", "-update")):
            return _Holds()
        target = _TARGET.search(instruction.attributes)
        name = target[1] if target and "custom-call" in instruction.opcode else ""
        holds = _Holds(
            attention=bool(_ATTENTION_TARGET.match(name)),
            product=instruction.opcode.endswith("dot") or bool(_PRODUCT_TARGET.match(name)),
        )
        for callee in callees(instruction):
            if callee not in self._held:
                self._held[callee] = _Holds()
                for inner in self.module.computations[callee]:
                    self._held[callee] |= self.holds(inner)
            holds |= self._held[callee]
        return holds

    def copies_only(self, instruction: Instruction) -> bool:
        opcode = instruction.opcode.removesuffix("-start")
        if opcode != "fusion":
            return opcode in _MOVES
        opcodes = {
            inner.opcode
            for callee in callees(instruction)
            for inner in self.module.computations[callee]
        }
        return bool(opcodes & _MOVES) and opcodes <= _MOVES | _VIEWS


def _times(instruction: Instruction) -> list[int]:
    """How often one run of an instruction runs each of its `callees`."""
    if instruction.opcode == "while":
        # If the count is not known, the loop sends nothing, or `TrafficReader` had refused it.
        count = trip_count(instruction) or 0
        return [count + 1, count]
    return [1] * len(callees(instruction))


def _beneath(
    instructions: list[Instruction], start: int, computation: str
) -> list[Instruction] | None:
    """What runs while the collective at `start` is under way; None if it is synchronous."""
    if not instructions[start].opcode.endswith("-start"):
        return None
    pending = {instructions[start].name}
    for end in range(start + 1, len(instructions)):
        instruction = instructions[end]
        if pending & set(instruction.operand_names):
            if instruction.opcode.endswith("-update"):
                pending.add(instruction.name)
            elif instruction.opcode.endswith("-done"):
                # XLA marks a pair that it keeps although nothing is to run meanwhile.
                together = '"is_sync":true' in instructions[start].attributes
                return None if together else instructions[start + 1 : end]
    raise UnsupportedError(
        "A collective must end in the computation in which it starts; got "
        f"{instructions[start].name} in {computation} without its -done. Compile without the "
        "option that moves it to the next iteration, such as xla_gpu_enable_pipelined_p2p."
    )


def _kernel(instruction: Instruction) -> Kernel:
    op_name = _OP_NAME.search(instruction.attributes)
    return Kernel(
        name=instruction.name, result=instruction.result, op_name=op_name[1] if op_name else ""
    )


def _kind(instruction: Instruction) -> str:
    return instruction.opcode.removesuffix("-start").replace("-", "_")
