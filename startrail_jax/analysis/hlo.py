"""Reads compiled programs: which collectives run, how often, and what every device receives.

The input is the optimised HLO of one program as text, `jax.jit(f).lower(...).compile().as_text()`,
from any backend of XLA. `startrail_jax.traffic.cost` states the same quantities in closed form.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, TypeVar

from startrail_jax.analysis import replica_groups
from startrail_jax.errors import InputError, UnsupportedError
from startrail_jax.traffic import COLLECTIVES

T = TypeVar("T")

# An asynchronous collective is counted at its -start.
_LATER_HALVES = ("-done", "-update")

# Opcodes of collectives that are not counted.
_UNREAD = ("collective-broadcast", "ragged-all-to-all", "recv", "send")

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%?([\w.\-]+) = (.+)$")
_OPCODE = re.compile(r" ([a-z][a-z0-9\-]*)\(")
_COMMENT = re.compile(r"/\*.*?\*/")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{[^}]*\})?")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CALLEE = re.compile(r"\b(?:calls|to_apply)=%?([\w.\-]+)")
_CALLEES = re.compile(r"\b(?:calls|called_computations)=\{([^}]*)\}")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRUE_FALSE = re.compile(r"\b(?:true|false)_computation=%?([\w.\-]+)")
_LOOP = re.compile(r"\bcondition=%?([\w.\-]+), body=%?([\w.\-]+)")


@dataclass(frozen=True, kw_only=True)
class ProgramTraffic:
    """The collectives of one execution of a compiled program."""

    counts: dict[str, int]
    """Number of collectives of each kind that run; several that XLA has combined count as one."""
    received_by_device: tuple[dict[str, int], ...]
    """Bytes that each device receives, split by kind of collective."""

    @property
    def by_collective(self) -> dict[str, int]:
        """Bytes of the device that receives the most, split by kind of collective."""
        return max(self.received_by_device, key=lambda received: sum(received.values()))

    @property
    def received_bytes(self) -> int:
        """Bytes of the device that receives the most."""
        return sum(self.by_collective.values())


def read_traffic(text: str) -> ProgramTraffic:
    """Counts the collectives of a compiled program and the bytes that its devices receive.

    Each device of a group of n receives

        all_gather           (n - 1) shards
        all_reduce           2 (n - 1) / n of the buffer, rounded up
        all_to_all           (n - 1) / n of the buffer
        reduce_scatter       (n - 1) / n of the buffer that is summed
        collective_permute   the buffer, if another device sends to it

    which is what rings and direct exchanges move. The body of a loop counts as often as it runs.
    For each device, a conditional counts as the branch in which it receives most.

    Args:
        text: the whole text of the program, `compiled.as_text()`.

    Returns:
        Counts and bytes; both are 0 for kinds that do not occur.

    Raises:
        ValueError: if a loop with collectives has no known trip count, or if the text is not HLO.
        NotImplementedError: if the program has a collective of another kind or form.
    """
    return TrafficReader(parse_module(text)).traffic()


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction of a computation."""

    name: str
    """Name of its result."""
    opcode: str
    """Kind of the instruction, such as "all-gather-start"."""
    result: str
    """Type of its result, as text."""
    operands: str
    """Its operands, as text."""
    attributes: str
    """Everything after the operands, as text."""

    @property
    def operand_names(self) -> list[str]:
        """Names of the operands. Some versions of XLA print their types before them."""
        bare = _ARRAY.sub("", _COMMENT.sub("", self.operands))
        names = (name.strip(" %()") for name in bare.split(","))
        return [name for name in names if name]


@dataclass(frozen=True, kw_only=True)
class HloModule:
    """The computations of a compiled program, with instructions in the order of the text.

    Optimised programs are scheduled, so this is the order in which they run.
    """

    num_replicas: int
    """Replicas of the program, each of which runs on all partitions."""
    num_partitions: int
    """Partitions of the program (SPMD)."""
    entry: str
    """Name of the computation that runs first."""
    computations: dict[str, list[Instruction]]
    """Name -> instructions of each computation."""

    @property
    def num_devices(self) -> int:
        """Number of devices that the program runs on."""
        return self.num_replicas * self.num_partitions


def parse_module(text: str) -> HloModule:
    """Splits the text of a compiled program into computations and instructions.

    Raises:
        ValueError: if the text does not hold one HLO module with an entry computation.
    """
    modules = re.findall(r"^HloModule (.*)$", text, re.MULTILINE)
    computations: dict[str, list[Instruction]] = {}
    entries = []
    current: list[Instruction] = []
    for line in text.splitlines():
        if match := _INSTRUCTION.match(line):
            current.append(_parse_instruction(match[1], match[2]))
        elif match := _COMPUTATION.match(line):
            current = computations.setdefault(match[2], [])
            if match[1]:
                entries.append(match[2])
    if len(modules) != 1 or len(entries) != 1:
        raise InputError(
            "The text must hold one HLO module with one entry computation; got "
            f"{len(modules)} modules and {len(entries)} entries in {text[:40]!r}. "
            "Pass compiled.as_text() of jax.jit(f).lower(...).compile()."
        )
    sizes = {key: int(value) for key, value in re.findall(r"\b(\w+)=(\d+)\b", modules[0])}
    return HloModule(
        num_replicas=sizes.get("replica_count", 1),
        num_partitions=sizes.get("num_partitions", 1),
        entry=entries[0],
        computations=computations,
    )


def _parse_instruction(name: str, text: str) -> Instruction:
    match = _OPCODE.search(text)
    if match is None:
        raise InputError(
            f"An instruction must have an opcode; got {name} = {text[:60]!r}. "
            "Pass the text as XLA prints it."
        )
    start = end = match.end()
    depth = 1
    # A parenthesis in a string constant can only come after the operands that are read here.
    while depth and end < len(text):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        end += 1
    return Instruction(
        name=name,
        opcode=match[1],
        result=text[: match.start()],
        operands=text[start : end - 1],
        attributes=text[end:],
    )


@dataclass
class Tally:
    """Collectives and bytes that have been added up so far."""

    received: list[Counter[Any]]
    """Bytes that each device receives, by kind of collective."""
    counts: Counter[str] = field(default_factory=Counter)
    """Number of collectives that run."""

    def add(self, other: Tally, times: int = 1) -> None:
        for kind, count in other.counts.items():
            self.counts[kind] += times * count
        for mine, theirs in zip(self.received, other.received, strict=True):
            for kind, size in theirs.items():
                mine[kind] += times * size


class TrafficReader:
    """Adds up the collectives of a program; raises as `read_traffic` does.

    Args:
        module: the program.
        unknown_turns: turns of loops with collectives whose trip count is not known; None to raise.
    """

    def __init__(self, module: HloModule, unknown_turns: int | None = None):
        self.module = module
        self.unknown_turns = unknown_turns
        self.tallies: dict[str, Tally] = {}
        self._results: dict[str, dict[str, str]] = {}

    def traffic(self) -> ProgramTraffic:
        """The traffic of the whole program."""
        return self._traffic_of(self.computation(self.module.entry))

    def instruction_traffic(self, computation: str, instruction: Instruction) -> ProgramTraffic:
        """The traffic of one run of one instruction of `computation`, and of what it calls.

        An asynchronous collective counts at its -start; its -done has no traffic.
        """
        tally = self.empty()
        if not instruction.opcode.endswith(_LATER_HALVES):
            self.instruction(instruction, self.results(computation), tally)
        return self._traffic_of(tally)

    def _traffic_of(self, tally: Tally) -> ProgramTraffic:
        return ProgramTraffic(
            counts={kind: tally.counts[kind] for kind in COLLECTIVES},
            received_by_device=tuple(
                {kind: received[kind] for kind in COLLECTIVES} for received in tally.received
            ),
        )

    def empty(self) -> Tally:
        """A tally of nothing."""
        return Tally([Counter() for _ in range(self.module.num_devices)])

    def computation(self, name: str) -> Tally:
        """The tally of one run of a computation; each is added up once."""
        if name not in self.tallies:
            tally = self.empty()
            for instruction in self.module.computations[name]:
                if not instruction.opcode.endswith(_LATER_HALVES):
                    self.instruction(instruction, self.results(name), tally)
            self.tallies[name] = tally
        return self.tallies[name]

    def results(self, name: str) -> dict[str, str]:
        """Name -> type of the result, as text, for the instructions of a computation."""
        if name not in self._results:
            instructions = self.module.computations[name]
            self._results[name] = {x.name: x.result for x in instructions}
        return self._results[name]

    def instruction(self, instruction: Instruction, results: dict[str, str], tally: Tally) -> None:
        """Adds one instruction to a tally; `results` are those of its computation."""
        opcode = instruction.opcode.removesuffix("-start")
        kind = opcode.replace("-", "_")
        if kind in COLLECTIVES:
            sizes = [num_bytes(results[name]) for name in instruction.operand_names]
            tally.counts[kind] += 1
            self.record(kind, instruction, sizes, tally)
        elif opcode in _UNREAD:
            raise UnsupportedError(
                f"Collectives must be of the kinds {', '.join(COLLECTIVES)}; got "
                f"{instruction.name} = {opcode}. Compile without the option that introduces it."
            )
        elif opcode == "while":
            self.loop(instruction, tally)
        elif opcode == "conditional":
            self.conditional(instruction, tally)
        else:
            for name in callees(instruction):
                tally.add(self.computation(name))

    def record(self, kind: str, instruction: Instruction, sizes: list[int], tally: Tally) -> None:
        """Adds what the devices receive in one collective; `sizes` are bytes of its operands."""
        for device, size in self.received(kind, instruction, sizes).items():
            tally.received[device][kind] += size

    def loop(self, instruction: Instruction, tally: Tally) -> None:
        """Adds all turns of a loop to a tally."""
        match = _required(_LOOP, instruction)
        condition, body = self.computation(match[1]), self.computation(match[2])
        count = self.turns(instruction)
        if count is not None:
            tally.add(body, count)
            tally.add(condition, count + 1)
        elif body.counts or condition.counts:
            raise InputError(
                "A loop with collectives must have a known trip count; got "
                f"{instruction.name} (body {match[2]}) with {dict(body.counts + condition.counts)} "
                "and none. Give the loop static bounds, as in lax.fori_loop(0, 3, ...) or lax.scan."
            )

    def turns(self, loop: Instruction) -> int | None:
        """Number of turns of a loop, or None if that is not known."""
        count = trip_count(loop)
        has_collectives = self.computation(_required(_LOOP, loop)[2]).counts
        return self.unknown_turns if count is None and has_collectives else count

    def conditional(self, instruction: Instruction, tally: Tally) -> None:
        """Adds the busiest branch of a conditional to a tally."""
        branches = [self.computation(name) for name in callees(instruction)]
        busiest = self.empty()
        for branch in branches:
            # The union of counters takes the larger count of each kind.
            busiest.counts |= branch.counts
        for device in range(self.module.num_devices):
            received = (branch.received[device] for branch in branches)
            busiest.received[device] = max(received, key=lambda counter: sum(counter.values()))
        tally.add(busiest)

    def received(self, kind: str, instruction: Instruction, sizes: list[int]) -> dict[int, int]:
        """Bytes that each device that takes part receives.

        Args:
            kind: kind of the collective.
            instruction: the collective.
            sizes: bytes of its operands.
        """
        if kind == "collective_permute":
            pairs = source_target_pairs(instruction)
            return {target: sum(sizes) for source, target in pairs if source != target}
        return {
            device: _received_in_group(kind, len(group), sizes)
            for group in device_groups(self.module, instruction)
            for device in group
        }


def callees(instruction: Instruction) -> list[str]:
    """Names of the computations that an instruction runs; for a loop, condition and body."""
    if instruction.opcode == "conditional":
        names = _TRUE_FALSE.findall(instruction.attributes)
        return names or _names(_required(_BRANCHES, instruction)[1])
    if instruction.opcode == "while":
        return list(_required(_LOOP, instruction).groups())
    names = _CALLEE.findall(instruction.attributes)
    for group in _CALLEES.findall(instruction.attributes):
        names += _names(group)
    return names


def trip_count(loop: Instruction) -> int | None:
    """Number of turns of a loop, or None if XLA does not know."""
    match = _TRIP_COUNT.search(loop.attributes)
    return int(match[1]) if match else None


def source_target_pairs(permute: Instruction) -> list[tuple[int, ...]]:
    """(sender, receiver) of every message of a collective-permute; they may be the same device."""
    return _readable(replica_groups.read_pairs(permute.attributes), permute)


def device_groups(module: HloModule, instruction: Instruction) -> list[tuple[int, ...]]:
    """The groups of devices that a collective with replica groups joins.

    Raises:
        NotImplementedError: if it does not join devices by their global ids.
    """
    attributes, partitions = instruction.attributes, module.num_partitions
    # Without global ids these kinds join replicas, once per partition or over all of them.
    global_ids = "use_global_device_ids=true" in attributes or "all-to-all" in instruction.opcode
    if partitions > 1 and (module.num_replicas > 1 or not global_ids):
        raise UnsupportedError(
            "Collectives must join devices by their global ids; got "
            f"{instruction.name} on {module.num_replicas} replicas of {partitions} partitions. "
            "Use jit and shard_map, which compile to it."
        )
    groups = replica_groups.read_groups(attributes, module.num_devices)
    return _readable(groups, instruction)


def _received_in_group(kind: str, n: int, sizes: list[int]) -> int:
    """Bytes that each of `n` devices receives if each of them puts in operands of `sizes` bytes."""
    if kind == "all_gather":
        return (n - 1) * sum(sizes)
    if kind == "all_reduce":
        # Several operands are separate sums that XLA has combined.
        return sum(-(-2 * (n - 1) * size // n) for size in sizes)
    # An all_to_all may have one operand for each device; only all of them together split evenly.
    return (n - 1) * sum(sizes) // n


def num_bytes(result: str) -> int:
    """Bytes of an array, or of all arrays of a tuple."""
    total = 0
    for dtype, dims in _ARRAY.findall(result):
        size = math.prod(int(dim) for dim in dims.replace("<=", "").split(",") if dim)
        total += -(-size * _num_bits(dtype) // 8)
    return total


def _num_bits(dtype: str) -> int:
    """Bits that an element takes, such as 16 for `bf16` and 8 for `f8e4m3fn` and `pred`."""
    if match := re.match(r"(?:bf|f|s|u|c)(\d+)", dtype):
        return int(match[1])
    return 8 if dtype == "pred" else 0


def _required(pattern: re.Pattern[str], instruction: Instruction) -> re.Match[str]:
    return _readable(pattern.search(instruction.attributes), instruction)


def _readable(found: T | None, instruction: Instruction) -> T:
    """What was found in the attributes of an instruction; raises if nothing was."""
    if found is None:
        raise UnsupportedError(
            f"The attributes of {instruction.opcode} must be in a form that can be read; got "
            f"{instruction.name} with {instruction.attributes[:200]!r}. Add the form to "
            "startrail_jax/analysis/hlo.py or replica_groups.py."
        )
    return found


def _names(text: str) -> list[str]:
    return [name.strip(" %") for name in text.split(",") if name.strip()]
