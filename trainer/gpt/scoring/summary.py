"""Whether a trainer gives tokens the probabilities that an engine gave them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float32

from trainer.gpt.scoring.records import ScoredRecord

LISTED = 10
CLOSE = (0.9, 1.1)
"""Ratios that are no sign of a fault."""


@dataclass
class Rewards:
    """What is said at the end of the rewards of records."""

    records: int = 0
    total: float = 0.0
    pairs: int = 0
    margins: float = 0.0
    """Sum of the differences between chosen and rejected answers."""
    right: int = 0
    """Number of pairs whose chosen answer has the higher reward."""

    def add(self, record: ScoredRecord, scores: Float32[np.ndarray, " n"]) -> None:
        """Counts the rewards of a record."""
        found = scores[record.example.weights > 0].astype(np.float64)
        if record.is_pair:
            self.pairs += 1
            self.margins += float(found[0] - found[1])
            self.right += int(found[0] > found[1])
        else:
            self.records += 1
            self.total += float(found[0])

    def lines(self) -> Iterator[str]:
        """The lines to print."""
        if self.records:
            yield f"{self.records:,} records, mean reward {self.total / self.records:.6g}"
        if self.pairs:
            yield (
                f"{self.pairs:,} pairs, mean margin {self.margins / self.pairs:.6g}, "
                f"{self.right / self.pairs:.2%} with the higher reward for the chosen answer"
            )


@dataclass
class Summary:
    """What is said at the end, of all tokens that count."""

    tokens: int = 0
    total: float = 0.0
    """Sum of the log-probabilities."""
    compared: int = 0
    ratios: float = 0.0
    """Sum of the ratios of the trainer's to the engine's probability."""
    outside: int = 0
    worst: list[tuple[float, int, str, int, float, float]] = field(default_factory=list)

    def add(self, record: ScoredRecord, logprobs: Float32[np.ndarray, " n"]) -> None:
        """Counts the tokens of a record."""
        counted = np.flatnonzero(record.example.weights > 0)
        self.tokens += len(counted)
        self.total += float(logprobs[counted].sum(dtype=np.float64))
        engine: Any = record.fields.get("logprobs")
        if engine is None:
            return
        theirs = np.array([math.nan if x is None else x for x in engine], np.float64)[counted]
        apart = logprobs[counted].astype(np.float64) - theirs
        ratios = np.exp(apart)
        self.compared += len(counted)
        self.ratios += float(ratios.sum())
        self.outside += int(np.count_nonzero((ratios < CLOSE[0]) | (ratios > CLOSE[1])))
        for place in np.argsort(-np.abs(apart))[:LISTED].tolist():
            token = int(counted[place])
            found = abs(float(apart[place])), self.compared + place, record.place, token
            own, other = float(logprobs[token]), float(theirs[place])
            heapq.heappush(self.worst, (*found, own, other))
            if len(self.worst) > LISTED:
                heapq.heappop(self.worst)

    def lines(self) -> Iterator[str]:
        """The lines to print."""
        if not self.tokens:
            yield "no token counts"
            return
        mean = self.total / self.tokens
        yield f"{self.tokens:,} tokens that count, mean log-probability {mean:.6g}"
        if self.compared:
            yield (
                f"beside the engine's logprobs: mean ratio {self.ratios / self.compared:.6g}, "
                f"{self.outside / self.compared:.2%} outside {CLOSE[0]} to {CLOSE[1]}; the worst:"
            )
            for *_, place, token, own, other in sorted(self.worst, reverse=True):
                yield f"  {place} token {token}: {own:.6g}, engine {other:.6g}"
