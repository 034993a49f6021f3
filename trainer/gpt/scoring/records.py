"""The records of score.py: the tokens of each line, and the line with its scores."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from startrail_jax.errors import InputError
from trainer.data.documents import Document, Record, check_unicode, read_records
from trainer.data.files import RECORD_KINDS, Files, find_files
from trainer.gpt.batches import TokenExample
from trainer.gpt.chat.examples import example_of
from trainer.gpt.chat.template import ChatTemplate
from trainer.gpt.config import DataConfig, GPTTrainConfig
from trainer.gpt.corpus import MOST_FOR_BYTES
from trainer.gpt.objectives.preference import REFERENCES
from trainer.gpt.objectives.replay import EXPERTS, Replay
from trainer.gpt.rollouts.pairs import PairReader
from trainer.gpt.rollouts.records import (
    NO_TARGET,
    TOKENS,
    length_of,
    of_each_answer,
    read_rollout,
)
from trainer.gpt.scoring.options import ScoreOptions
from trainer.gpt.tokenizer import text_tokenizer

REWARD, REWARDS = "reward", ("chosen_reward", "rejected_reward")
"""The keys of a reward: of a record, and of both answers of a pair."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoredRecord:
    """A record whose tokens are scored."""

    place: str
    fields: dict[str, Any]
    """What is written beside the scores."""
    example: TokenExample
    """Its tokens up to the last that has a target."""
    length: int
    """Number of its tokens, and of the entries of its lists."""
    is_pair: bool = False
    """Whether it has two answers, of which sums of log-probabilities, or rewards, are written."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordReader:
    """Turns the records of DATA into tokens."""

    files: Files
    options: ScoreOptions
    data: DataConfig
    """The settings of the data of the model."""
    vocab_size: int
    rewards: bool
    """Whether the model gives rewards: then the last token that counts is read, and it alone
    counts."""
    replay: Replay | None
    """The experts that records must name; None for none."""

    @classmethod
    def of(cls, path: Path, options: ScoreOptions, config: GPTTrainConfig) -> RecordReader:
        """Reads nothing but the names of files."""
        files = find_files(path, "DATA")
        if files.kind not in RECORD_KINDS:
            raise InputError(
                f"DATA must be JSONL or tables; got {files.kind} files in {files.name!r}. Give "
                "files *.jsonl, *.parquet or *.arrow."
            )
        data, model = config.data, config.model
        if options.tokenizer != data.tokenizer:  # The ids of another mean nothing in it.
            data = replace(data, begin_of_document=None, end_of_document=None)
        data = replace(data, tokenizer=options.tokenizer)
        return cls(
            files=files,
            options=options,
            data=data,
            vocab_size=model.vocab_size,
            rewards=model.scores,
            replay=Replay.of_model(model) if options.replay_experts else None,
        )

    def read(self, on_read: Callable[[int], None]) -> Iterator[ScoredRecord]:
        """The records in order. `on_read` is told of every number of bytes read."""
        for part in filter(None, (self.files, self.files.validation)):
            records = read_records(part, on_read)
            for record in itertools.chain.from_iterable(map(of_each_answer, records)):
                found = self._of(record)
                if len(found.example.tokens) > self.options.seq_len:
                    raise InputError(
                        "A record must fit a row; got "
                        f"{len(found.example.tokens):,} tokens in {record.place!r}, with seq_len="
                        f"{self.options.seq_len:,}. Use a larger --seq-len."
                    )
                yield found

    def _of(self, record: Record) -> ScoredRecord:
        options = self.options
        keys = (REWARD, *REWARDS) if self.rewards else (options.key, *REFERENCES)
        if written := [x for x in keys if x in record.fields]:
            another = "" if self.rewards else "Give another --key, or remove it."
            raise InputError(
                f"A record must not have the key that is written; got {written[0]} in "
                f"{record.place!r}. {another or 'Remove it.'}"
            )
        ignored = {x: record.fields[x] for x in options.ignored_keys if x in record.fields}
        fields = {key: x for key, x in record.fields.items() if key not in ignored}
        plain = replace(record, fields=fields)
        if TOKENS in fields:
            rollout = read_rollout(plain, self.vocab_size, replay=self.replay)
            arrays = rollout.tokens, rollout.targets, rollout.weights
            return self._scored(record, record.fields, *arrays, rollout.lists.get(EXPERTS))
        if self.replay is not None:
            raise InputError(
                "replay_experts needs rollouts, which have tokens and experts; got "
                f"{', '.join(fields) or 'nothing'} in {record.place!r}. Leave it out."
            )
        if self.data.tokenizer is None and not 256 <= self.vocab_size <= MOST_FOR_BYTES:
            raise InputError(
                "A record must have tokens, or text that a tokenizer turns into these; got "
                f"{', '.join(fields) or 'nothing'} in {record.place!r}, and no tokenizer beside "
                "the model. Give --tokenizer."
            )
        found = self._of_pair(plain) if "chosen" in fields else self._of_text(plain)
        found.fields.update(ignored)
        return found

    # Opened for the first record without tokens.

    @functools.cached_property
    def _pairs(self) -> PairReader:
        path, template = self.data.tokenizer, None
        if path is not None:
            template = ChatTemplate.find(path, self.options.chat_template)
        return PairReader(
            tokenizer=text_tokenizer(self.data, vocab_size=self.vocab_size),
            template=template,
            kind=self.files.kind,
            references=False,
            ends=self.rewards,
        )

    def _of_pair(self, record: Record) -> ScoredRecord:
        options = self.options
        if not self.rewards and (options.entropy or options.top_k or options.key != "ref_logprobs"):
            raise InputError(
                f"Of pairs, {' and '.join(REFERENCES)} are written; got entropy={options.entropy}, "
                f"top_k={options.top_k}, key={options.key!r}. Leave these out."
            )
        ((_, pair),) = self._pairs.read([record])
        example = TokenExample(pair.tokens, pair.targets, pair.weights, pair.documents)
        return ScoredRecord(
            place=record.place, fields={**record.fields}, example=example, length=0, is_pair=True
        )

    def _of_text(self, record: Record) -> ScoredRecord:
        options, tokenizer = self.options, self._pairs.tokenizer
        if isinstance(words := record.fields.get(options.text_key), str):
            check_unicode(words, record.place)
            (tokens,) = tokenizer.encode([Document(key=record.key, place=record.place, text=words)])
            counted: Any = np.ones(len(tokens))
        else:
            template = self._pairs.template
            example = example_of(
                record, self.files.kind, template, messages=options.messages, loss=options.loss
            )
            ((tokens, counted),) = tokenizer.encode_parts([example])
        tokens = tokens.astype(np.int32)
        weights = np.append(counted[1:], 0).astype(float)
        fields = {TOKENS: tokens.tolist(), "weights": weights.tolist()}
        targets = np.append(tokens[1:], np.int32(NO_TARGET))
        return self._scored(record, fields, tokens, targets, weights)

    def _scored(
        self,
        record: Record,
        fields: dict[str, Any],
        tokens: Any,
        targets: Any,
        weights: Any,
        experts: Any = None,
    ) -> ScoredRecord:
        n = length_of((weights > 0) if self.rewards else (targets != NO_TARGET))
        numbers = None if experts is None else {EXPERTS: experts[:n]}
        weights = np.asarray(weights, np.float32)
        example = TokenExample(tokens[:n], targets[:n], weights[:n], numbers=numbers)
        if self.rewards:
            if not n:
                raise InputError(
                    "A record must have a token that counts, the last of which gets the reward; "
                    f"got none in {record.place!r}. Mend or remove the line."
                )
            read = np.append(tokens[:n], targets[n - 1])
            is_last = np.arange(n + 1) == n
            example = TokenExample(read, np.full_like(read, NO_TARGET), is_last.astype(np.float32))
        return ScoredRecord(place=record.place, fields=fields, example=example, length=len(tokens))


def with_rewards(record: ScoredRecord, scores: Float32[np.ndarray, "n one"]) -> dict[str, Any]:
    """The line of a record with the scores of the tokens that count."""
    found = _digits(scores[record.example.weights > 0, 0])
    names = REWARDS if record.is_pair else (REWARD,)
    return {**record.fields, **dict(zip(names, found, strict=True))}


def with_scores(
    record: ScoredRecord, scores: Float32[np.ndarray, "n numbers"], options: ScoreOptions
) -> dict[str, Any]:
    """The line of a record. Entries of a token without a target are 0, as are ids of a teacher."""
    if record.is_pair:
        counted, documents = record.example.weights > 0, record.example.documents
        sums = (scores[counted & (documents == side), 0].sum(dtype=np.float64) for side in (0, 1))
        return {**record.fields, **dict(zip(REFERENCES, map(float, sums), strict=True))}
    count, k = record.length, options.top_k or 0
    padded = np.zeros((count, scores.shape[1]), np.float32)
    padded[: len(scores)] = np.where(
        (record.example.targets != NO_TARGET)[:, None], scores, np.float32(0)
    )
    found = {**record.fields, options.key: _digits(padded[:, 0])}
    if options.entropy:
        found["entropy"] = _digits(padded[:, 1])
    if k:
        found["teacher"] = {
            "ids": padded[:, 2 : 2 + k].astype(int).tolist(),
            "logprobs": [_digits(x) for x in padded[:, 2 + k :]],
        }
    return found


def _digits(x: Float32[np.ndarray, " n"]) -> list[float]:
    """Numbers with the digits that float32 has."""
    return [float(f"{value:.8g}") for value in x.tolist()]
