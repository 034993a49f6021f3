"""Bytes between each pair of devices, as a compiled program sends them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from startrail_jax.analysis.hlo import (
    Instruction,
    Tally,
    TrafficReader,
    device_groups,
    parse_module,
    source_target_pairs,
)
from startrail_jax.traffic.algorithms import NCCL, Algorithm
from startrail_jax.traffic.ports import Messages


def read_messages(text: str, algorithms: Mapping[str, Algorithm] = NCCL) -> Messages:
    """The messages of one execution of a compiled program.

    Loops count as often as they run; for each device, a conditional counts as the branch in which
    it receives most.

    Args:
        text: the whole text of the program, `compiled.as_text()`.
        algorithms: collective -> how it is divided into messages, from member to member in the
            order in which the program lists a group.

    Raises:
        ValueError, NotImplementedError: as `startrail_jax.analysis.hlo.read_traffic`.
    """
    reader = _MessageReader(parse_module(text))
    reader.algorithms = algorithms
    tally = reader.computation(reader.module.entry)
    sizes = {
        (source, target): size
        for target, received in enumerate(tally.received)
        for source, size in received.items()
    }
    return Messages.of(reader.module.num_devices, sizes)


class _MessageReader(TrafficReader):
    """Tallies what each device receives by its sender, in place of the kind of collective."""

    algorithms: Mapping[str, Algorithm]

    def record(self, kind: str, instruction: Instruction, sizes: list[int], tally: Tally) -> None:
        received = self.received(kind, instruction, sizes)
        if kind == "collective_permute":
            for source, target in source_target_pairs(instruction):
                if source != target:
                    tally.received[target][source] += received[target]
            return
        for group in device_groups(self.module, instruction):
            for targets, share in self.algorithms[kind](len(group)):
                for source, target in zip(group, np.array(group)[targets].tolist(), strict=True):
                    if source != target:
                        size = received[target] * share.numerator // share.denominator
                        tally.received[target][source] += size
