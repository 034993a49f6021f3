"""Pairs of answers to a prompt in JSONL files and tables, as the library TRL has them."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from startrail_jax.errors import InputError
from startrail_jax.values import is_real, real
from trainer.data.documents import Record
from trainer.data.files import Kind
from trainer.gpt.chat.examples import OTHERS, ChatExample, example_of
from trainer.gpt.chat.forms import of_sharegpt
from trainer.gpt.chat.template import ChatTemplate
from trainer.gpt.encoding import TextTokenizer
from trainer.gpt.objectives.preference import REFERENCES
from trainer.gpt.rollouts.records import NO_TARGET, Rollout, checked_fields
from trainer.printable import shortened

ANSWERS = ("chosen", "rejected")
KEYS = ("prompt", *ANSWERS, *OTHERS, *REFERENCES)
"""What a record may hold."""
AT_A_TIME = 64
"""Number of pairs that are tokenised at a time."""


@dataclass(frozen=True, kw_only=True)
class PairReader:
    """Turns pairs into tokens: the chosen answer with its prompt, and then the rejected one."""

    tokenizer: TextTokenizer
    template: ChatTemplate | None
    """That of conversations; None without a tokenizer."""
    kind: Kind
    """Kind of the files."""
    references: bool
    """Whether every pair must have the log-probabilities of a reference."""
    ends: bool = False
    """Whether the last token of each answer alone counts, which is read then, for its score; else
    answers count as targets."""

    @property
    def digest(self) -> str:
        """A hash of what decides the tokens of pairs."""
        template = None if self.template is None else self.template.digest
        values = [self.tokenizer.digest, self.tokenizer.end_of_document, template, self.ends]
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()

    def read(self, records: Iterable[Record]) -> Iterator[tuple[Record, Rollout]]:
        """The pairs, in order. Each is a rollout of two documents, of which the answers count.

        Raises:
            InputError: if a record holds something else; the message names the line.
        """
        records = iter(records)
        while chunk := list(itertools.islice(records, AT_A_TIME)):
            examples = [x for record in chunk for x in self.examples(record)]
            encoded = self.tokenizer.encode_parts(examples)
            for number, record in enumerate(chunk):
                yield record, self._pair(record, encoded[2 * number : 2 * number + 2])

    def examples(self, record: Record) -> tuple[ChatExample, ChatExample]:
        """Both answers of a record with their prompt."""
        needed: dict[str, str] = dict.fromkeys(ANSWERS, "Add it.")
        if self.references:
            needed |= dict.fromkeys(REFERENCES, "score.py writes it, with the reference.")
        fields = checked_fields(record, KEYS, needed, noun="pair")
        prompt, answers = fields.get("prompt"), [fields[name] for name in ANSWERS]
        others = {name: fields[name] for name in OTHERS if name in fields}
        parts = [prompt, *answers] if prompt is not None else answers
        if all(isinstance(x, str) for x in parts) and prompt is not None:
            given = [{"prompt": prompt, "completion": x} for x in answers]
        elif all(isinstance(x, list) for x in parts):
            talks = [of_sharegpt(x, record.place) for x in answers]
            before = of_sharegpt(prompt, record.place) if prompt else _common(*talks)
            if not prompt:
                talks = [x[len(before) :] for x in talks]
            before = [{**x, "train": False} if _speaks(x) else x for x in before]
            given = [{"messages": [*before, *talk], **others} for talk in talks]
        else:
            raise InputError(
                "A pair must have texts under prompt, chosen and rejected, or lists of messages; "
                f"got {shortened(fields)} in {record.place!r}. Mend or remove the line."
            )
        chosen, rejected = (
            example_of(
                replace(record, fields=x), self.kind, self.template,
                messages="messages", loss="answers",
            )
            for x in given
        )  # fmt: skip
        return chosen, rejected

    def _pair(self, record: Record, encoded: Any) -> Rollout:
        documents, weights, lists = [], [], {}
        for side, (tokens, counted) in enumerate(encoded):
            if not counted[1:].any():
                raise InputError(
                    "Each answer of a pair must have a token that counts; got none in "
                    f"{ANSWERS[side]} of {record.place!r}. Mend or remove the line."
                )
            # What follows the last token that counts is left out.
            n = int(np.flatnonzero(counted)[-1])
            whole = tokens[: n + 1].astype(np.int32)
            if self.ends:
                documents.append(np.append(whole, np.int32(NO_TARGET)))
                weights.append((np.arange(n + 1) == n).astype(np.float32))
            else:
                documents.append(whole)
                weights.append((counted[1 : n + 1] != 0).astype(np.float32))
        sizes = [len(x) for x in weights]
        for name in REFERENCES:
            value = real(record.fields.get(name))
            if value is None:
                continue
            if not is_real(value):
                raise InputError(
                    f"{name} must be a finite number; got {shortened(value)} in "
                    f"{record.place!r}. Mend or remove the line."
                )
            lists[name] = np.full(sum(sizes), value, np.float32)
        return Rollout(
            place=record.place,
            tokens=np.concatenate([x[:-1] for x in documents]),
            targets=np.concatenate([x[1:] for x in documents]),
            weights=np.concatenate(weights),
            documents=np.repeat(np.arange(2, dtype=np.int32), sizes),
            lists=lists,
            reward=None,
            group=None,
        )


def _speaks(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _common(chosen: Any, rejected: Any) -> list[Any]:
    """The messages with which both conversations begin."""
    pairs = itertools.takewhile(lambda x: x[0] == x[1], zip(chosen, rejected, strict=False))
    return [first for first, _ in pairs]
