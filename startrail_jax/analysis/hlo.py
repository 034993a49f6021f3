"""Reads compiled programs: which collectives run, how often, and what every device receives.

The text is XLA's optimised HLO of one program, `jax.jit(f).lower(...).compile().as_text()`, from
any backend. A loop counts as often as it runs, a pair of -start and -done counts once.
`startrail_jax.analysis.cost` states the same quantities in closed form and in the same words.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "collective_permute", "reduce_scatter")
"""Kinds of collective, in the words of `jax.lax`; `startrail_jax.analysis.cost` uses the same."""

# The -start of an asynchronous pair has everything.
_LATER_HALVES = ("-done", "-update")

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

_PAIRS = re.compile(r"\bsource_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_LISTED_GROUPS = re.compile(r"\breplica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA_GROUPS = re.compile(r"\breplica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH_GROUPS = re.compile(
    r"\breplica_groups=mesh\[([^\]]+)\](?:, device_ids=\(([\d,]+)\))? \{([^}]*)\}"
)


@dataclass(frozen=True, kw_only=True)
class ProgramTraffic:
    """The collectives of one execution of a compiled program."""

    counts: dict[str, int]
    """How often a collective of each kind runs; one that XLA combined of several counts once."""
    received_by_device: tuple[dict[str, int], ...]
    """Bytes that each device receives, split by kind of collective."""

    @property
    def by_collective(self) -> dict[str, int]:
        """What the device that receives most receives, split by kind of collective."""
        return max(self.received_by_device, key=lambda received: sum(received.values()))

    @property
    def received_bytes(self) -> int:
        """What the device that receives most receives, in bytes."""
        return sum(self.by_collective.values())


def read_traffic(text: str) -> ProgramTraffic:
    """Counts the collectives of a compiled program and the bytes that its devices receive.

    Of a group of n devices each receives

        all_gather           (n - 1) shards
        all_reduce           2 (n - 1) / n of the buffer, rounded up
        all_to_all           (n - 1) / n of the buffer
        reduce_scatter       (n - 1) / n of the buffer that is summed
        collective_permute   the buffer, if another device sends to it

    which is what rings and direct exchanges move. A loop's body counts as often as XLA knows that
    it runs; of a conditional the branch counts in which a device receives most.

    Args:
        text: optimised HLO, whole: `compiled.as_text()`.

    Returns:
        Counts and bytes; kinds that do not occur are 0.

    Raises:
        ValueError: if a loop with collectives has no known trip count, or the text is not HLO.
        NotImplementedError: if the program holds a collective of another kind or form.
    """
    return TrafficReader(parse_program(text)).traffic()


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction of a computation."""

    name: str
    opcode: str
    result: str
    """Type of the result, as text."""
    operands: str
    """The operands, as text."""
    attributes: str
    """Everything after the operands."""

    @property
    def operand_names(self) -> list[str]:
        """Names of the operands; newer texts give them bare, older ones after their types."""
        bare = _ARRAY.sub("", _COMMENT.sub("", self.operands))
        names = (name.strip(" %()") for name in bare.split(","))
        return [name for name in names if name]


@dataclass(frozen=True, kw_only=True)
class Program:
    """A compiled program: its computations, with instructions in the order of the text.

    Optimised programs are scheduled: the order of the text is the order of execution.
    """

    num_replicas: int
    num_partitions: int
    entry: str
    computations: dict[str, list[Instruction]]

    @property
    def num_devices(self) -> int:
        """Devices that the program runs on."""
        return self.num_replicas * self.num_partitions


def parse_program(text: str) -> Program:
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
        raise ValueError(
            "The text must hold one HLO module with one entry computation; got "
            f"{len(modules)} modules and {len(entries)} entries in {text[:40]!r}. "
            "Pass compiled.as_text() of jax.jit(f).lower(...).compile()."
        )
    sizes = {key: int(value) for key, value in re.findall(r"\b(\w+)=(\d+)\b", modules[0])}
    return Program(
        num_replicas=sizes.get("replica_count", 1),
        num_partitions=sizes.get("num_partitions", 1),
        entry=entries[0],
        computations=computations,
    )


def _parse_instruction(name: str, text: str) -> Instruction:
    match = _OPCODE.search(text)
    if match is None:
        raise ValueError(
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
class _Tally:
    """Runs of each kind of collective, and bytes per device and kind."""

    received: list[Counter[str]]
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, other: _Tally, times: int = 1) -> None:
        for kind, count in other.counts.items():
            self.counts[kind] += times * count
        for mine, theirs in zip(self.received, other.received, strict=True):
            for kind, size in theirs.items():
                mine[kind] += times * size


class TrafficReader:
    """Adds up a program's collectives, each computation once; raises as `read_traffic` does."""

    def __init__(self, program: Program):
        self.program = program
        self.tallies: dict[str, _Tally] = {}
        self._results: dict[str, dict[str, str]] = {}

    def traffic(self) -> ProgramTraffic:
        """The whole program's."""
        return self._traffic_of(self.computation(self.program.entry))

    def instruction_traffic(self, computation: str, instruction: Instruction) -> ProgramTraffic:
        """That of one run of one instruction of `computation`, with all that it calls.

        Of an asynchronous pair the -start has everything, and the -done nothing.
        """
        tally = self.empty()
        if not instruction.opcode.endswith(_LATER_HALVES):
            self.instruction(instruction, self.results(computation), tally)
        return self._traffic_of(tally)

    def _traffic_of(self, tally: _Tally) -> ProgramTraffic:
        return ProgramTraffic(
            counts={kind: tally.counts[kind] for kind in COLLECTIVES},
            received_by_device=tuple(
                {kind: received[kind] for kind in COLLECTIVES} for received in tally.received
            ),
        )

    def empty(self) -> _Tally:
        return _Tally([Counter() for _ in range(self.program.num_devices)])

    def computation(self, name: str) -> _Tally:
        if name not in self.tallies:
            tally = self.empty()
            for instruction in self.program.computations[name]:
                if not instruction.opcode.endswith(_LATER_HALVES):
                    self.instruction(instruction, self.results(name), tally)
            self.tallies[name] = tally
        return self.tallies[name]

    def results(self, name: str) -> dict[str, str]:
        """Types of the results of a computation's instructions."""
        if name not in self._results:
            instructions = self.program.computations[name]
            self._results[name] = {x.name: x.result for x in instructions}
        return self._results[name]

    def instruction(self, instruction: Instruction, results: dict[str, str], tally: _Tally) -> None:
        opcode = instruction.opcode.removesuffix("-start")
        kind = opcode.replace("-", "_")
        if kind in COLLECTIVES:
            sizes = [num_bytes(results[name]) for name in instruction.operand_names]
            tally.counts[kind] += 1
            for device, size in self.received(kind, instruction, sizes).items():
                tally.received[device][kind] += size
        elif opcode in _UNREAD:
            raise NotImplementedError(
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

    def loop(self, instruction: Instruction, tally: _Tally) -> None:
        match = _required(_LOOP, instruction)
        condition, body = self.computation(match[1]), self.computation(match[2])
        count = trip_count(instruction)
        if count is not None:
            tally.add(body, count)
            tally.add(condition, count + 1)
        elif body.counts or condition.counts:
            raise ValueError(
                "A loop that holds collectives must have a known trip count; got "
                f"{instruction.name} (body {match[2]}) with {dict(body.counts + condition.counts)} "
                "and none. Give the loop static bounds, as in lax.fori_loop(0, 3, ...) or lax.scan."
            )

    def conditional(self, instruction: Instruction, tally: _Tally) -> None:
        branches = [self.computation(name) for name in callees(instruction)]
        busiest = self.empty()
        for branch in branches:
            # Union of counters: the larger count of each kind.
            busiest.counts |= branch.counts
        for device in range(self.program.num_devices):
            received = (branch.received[device] for branch in branches)
            busiest.received[device] = max(received, key=lambda counter: sum(counter.values()))
        tally.add(busiest)

    def received(self, kind: str, instruction: Instruction, sizes: list[int]) -> dict[int, int]:
        """Bytes that every participating device receives; `sizes` are those of the operands."""
        if kind == "collective_permute":
            pairs = source_target_pairs(instruction)
            return {target: sum(sizes) for source, target in pairs if source != target}
        return {
            device: _received_in_group(kind, len(group), sizes)
            for group in device_groups(self.program, instruction)
            for device in group
        }


def callees(instruction: Instruction) -> list[str]:
    """Computations that an instruction runs; of a loop its condition and then its body."""
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
    """How often a loop runs, or None if XLA does not know."""
    match = _TRIP_COUNT.search(loop.attributes)
    return int(match[1]) if match else None


def source_target_pairs(permute: Instruction) -> list[tuple[int, ...]]:
    """(sender, receiver) of every message of a collective-permute, to oneself included."""
    return _numbers(_required(_PAIRS, permute)[1])


def device_groups(program: Program, instruction: Instruction) -> list[tuple[int, ...]]:
    """Groups of devices that a collective with replica groups joins.

    Raises:
        NotImplementedError: if it does not join devices by their global ids.
    """
    attributes, partitions = instruction.attributes, program.num_partitions
    # Without global ids these kinds join replicas, once per partition or over all of them.
    global_ids = "use_global_device_ids=true" in attributes or "all-to-all" in instruction.opcode
    if partitions > 1 and (program.num_replicas > 1 or not global_ids):
        raise NotImplementedError(
            "Collectives must join devices by their global ids; got "
            f"{instruction.name} on {program.num_replicas} replicas of {partitions} partitions. "
            "Use jit and shard_map, which compile to it."
        )
    if match := _LISTED_GROUPS.search(attributes):
        return _numbers(match[1]) or [tuple(range(program.num_devices))]
    if match := _IOTA_GROUPS.search(attributes):
        return _iota_groups(match)
    return _mesh_groups(_required(_MESH_GROUPS, instruction))


def _received_in_group(kind: str, n: int, sizes: list[int]) -> int:
    """Bytes that each of `n` devices receives if each puts in operands of `sizes` bytes."""
    if kind == "all_gather":
        return (n - 1) * sum(sizes)
    if kind == "all_reduce":
        # Combined ones are separate sums.
        return sum(-(-2 * (n - 1) * size // n) for size in sizes)
    # An all_to_all may have one operand for each device: only together do they split evenly.
    return (n - 1) * sum(sizes) // n


def _iota_groups(match: re.Match[str]) -> list[tuple[int, ...]]:
    """`[groups,size]<=[dims]T(permutation)`: the ids 0, 1, ... in `dims`, transposed, reshaped."""
    size, dims = int(match[2]), _ints(match[3])
    permutation = _ints(match[4]) if match[4] else range(len(dims))
    strides = _strides(dims)
    ids = [
        sum(index * strides[dim] for index, dim in zip(indices, permutation, strict=True))
        for indices in itertools.product(*(range(dims[dim]) for dim in permutation))
    ]
    return [tuple(ids[start : start + size]) for start in range(0, len(ids), size)]


def _mesh_groups(match: re.Match[str]) -> list[tuple[int, ...]]:
    """`mesh['x'=2,'y'=4] {'y'}`: groups along the named axes; `'y':(2)2` is a part of an axis."""
    axes = {name.strip("'"): int(size) for name, size in re.findall(r"([^,=]+)=(\d+)", match[1])}
    strides = dict(zip(axes, _strides(list(axes.values())), strict=True))
    ids = _ints(match[2]) if match[2] else range(math.prod(axes.values()))
    # Each reference is a digit of the device's position: (stride, size).
    digits = []
    for name, before, size in re.findall(r"'?([^,:']+)'?(?::\((\d+)\)(\d+))?", match[3]):
        degree = int(size) if size else axes[name]
        after = axes[name] // (int(before) * degree) if size else 1
        digits.append((strides[name] * after, degree))
    groups: dict[int, list[int]] = {}
    for position, device in enumerate(ids):
        first = position - sum(stride * (position // stride % size) for stride, size in digits)
        groups.setdefault(first, []).append(device)
    return [tuple(group) for group in groups.values()]


def num_bytes(result: str) -> int:
    """Bytes of an array, or of all arrays of a tuple."""
    total = 0
    for dtype, dims in _ARRAY.findall(result):
        total += -(-math.prod(_ints(dims.replace("<=", ""))) * _num_bits(dtype) // 8)
    return total


def _num_bits(dtype: str) -> int:
    """Bits of an element: `bf16` has 16, `f8e4m3fn` 8; a `pred` takes a byte."""
    if match := re.match(r"(?:bf|f|s|u|c)(\d+)", dtype):
        return int(match[1])
    return 8 if dtype == "pred" else 0


def _required(pattern: re.Pattern[str], instruction: Instruction) -> re.Match[str]:
    match = pattern.search(instruction.attributes)
    if match is None:
        raise NotImplementedError(
            f"The attributes of {instruction.opcode} must be in a form that is read here; got "
            f"{instruction.name} with {instruction.attributes[:200]!r}. Add the form to "
            "startrail_jax/analysis/hlo.py."
        )
    return match


def _names(text: str) -> list[str]:
    return [name.strip(" %") for name in text.split(",") if name.strip()]


def _ints(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _numbers(text: str) -> list[tuple[int, ...]]:
    """`{0,1},{2,3}` as tuples."""
    return [tuple(_ints(group)) for group in re.findall(r"\{([\d,]*)\}", text)]


def _strides(dims: Sequence[int]) -> list[int]:
    """Strides of a row-major array."""
    return [math.prod(dims[dim + 1 :]) for dim in range(len(dims))]
