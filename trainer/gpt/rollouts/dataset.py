"""The data of a run that trains on rollouts: rows of whole rollouts, or these as documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from startrail_jax.errors import InputError
from startrail_jax.tokens.layout import Layout
from trainer.data.files import RECORD_KINDS, Files
from trainer.gpt.batches import (
    NumbersOf,
    TextDataset,
    TokenBatch,
    TokenExample,
    counting,
    in_layout_order,
    rows_of,
)
from trainer.gpt.chat.packing import first_of_rows
from trainer.gpt.chat.template import ChatTemplate
from trainer.gpt.config import DataConfig, GPTTrainConfig
from trainer.gpt.corpus import (
    MOST_FOR_BYTES,
    Corpus,
    Input,
    Stream,
    check_bytes,
    check_effects,
    described,
    find_inputs,
)
from trainer.gpt.documents import TokenDocuments
from trainer.gpt.objectives.distill import TEACHER
from trainer.gpt.objectives.preference import REFERENCES
from trainer.gpt.rollouts.pairs import PairReader
from trainer.gpt.rollouts.records import LISTS
from trainer.gpt.rollouts.store import Form, Stored, StoredRollouts, store_rollouts
from trainer.gpt.tokenizer import text_tokenizer


class PackedRollouts:
    """Rows of rollouts, by their number: a `trainer.data.dataset.Source`. A rollout is in one row,
    and rollouts keep their order."""

    def __init__(self, rollouts: StoredRollouts, documents: TokenDocuments, seq_len: int) -> None:
        """Decides which rollouts share a row."""
        self._documents = documents
        self._firsts = first_of_rows(np.cumsum(documents.lengths), seq_len)
        self.share_of_padding = 1 - len(rollouts.tokens) / max(len(self) * seq_len, 1)

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def __getitem__(self, index: int) -> list[TokenExample]:
        first, last = self._firsts[index : index + 2].tolist()
        return [self._documents.read(number) for number in range(first, last)]


def open_rollouts(config: GPTTrainConfig, layout: Layout, cache: Path) -> tuple[TextDataset, ...]:
    """Opens each path of a config whose data are rollouts."""
    data, loss = config.data, config.row_loss
    form_name = "rollouts" if loss is None else loss.form
    if not data.path:
        raise InputError(
            f"objective={config.objective!r} trains on {form_name}; got no data.path. Give the "
            "file with them, *.jsonl (docs/posttraining.md)."
        )
    data.check_rollouts()
    inputs = find_inputs(data)
    check_effects(data, inputs, form=form_name)
    arrays = {} if loss is None else loss.arrays
    form = Form(
        vocab_size=config.model.vocab_size,
        longest=config.seq_len,
        lists=tuple(name for name in arrays if name in (*LISTS, *REFERENCES)),
        advantages="advantages" in arrays,
        deviation=loss is None or getattr(loss, "deviation", True),
        teacher=arrays[TEACHER[0]][1][0] if TEACHER[0] in arrays else None,
        replay=config.replay,
        ignored=data.ignored_keys,
    )
    opened = []
    for found in inputs:
        for files in filter(None, (found.files, found.validation)):
            if files.kind not in RECORD_KINDS:
                raise InputError(
                    f"{form_name.capitalize()} must be JSONL or tables; got {files.kind} files in "
                    f"{files.name!r}. Give *.jsonl, *.parquet or *.arrow files (--data.path)."
                )
        fraction, parts = data.validation_fraction, {"train": found.files}
        if found.validation is not None:
            fraction, parts = 0.0, parts | {"val": found.validation}
        elif loss is not None and not loss.holds_out and fraction == DataConfig.validation_fraction:
            fraction = 0.0
        read = None
        if form_name == "pairs":
            ends = loss is not None and loss.counts == "ends"
            reader = _pair_reader(config, found.files, references=bool(arrays), ends=ends)
            form, read = replace(form, pairs=reader.digest), reader.read
        stored = store_rollouts(parts, form, data.cache or cache, fraction, read)
        _check_lengths(stored.parts, found.files.name, fraction)
        opened.append(_opened(config, layout, found, stored))
    return tuple(opened)


def _pair_reader(
    config: GPTTrainConfig, files: Files, *, references: bool, ends: bool
) -> PairReader:
    """Turns the pairs of files into tokens."""
    data = config.data
    check_bytes(data, config.model.vocab_size)
    tokenizer, template = text_tokenizer(data, vocab_size=config.model.vocab_size), None
    if data.tokenizer is not None:
        template = ChatTemplate.find(data.tokenizer, data.chat_template)
    return PairReader(
        tokenizer=tokenizer,
        template=template,
        kind=files.kind,
        references=references,
        ends=ends,
    )


def _check_lengths(stored: dict[str, StoredRollouts], name: str, fraction: float) -> None:
    counts = {part: len(x) for part, x in stored.items()}
    if not all(counts.values()):
        found = " and ".join(f"{n} in {part}" for part, n in counts.items())
        ways = ", --data.validation-path, or another --data.validation-fraction" if fraction else ""
        raise InputError(
            "Each part of the data must have a rollout with a token that counts; got "
            f"{found} of {name!r}. Give more data{ways}."
        )


def _opened(config: GPTTrainConfig, layout: Layout, found: Input, stored: Stored) -> TextDataset:
    """The rows of the rollouts of a path."""
    loss, vocab_size = config.row_loss, config.model.vocab_size
    arrays = config.arrays
    adds_to_one = loss is not None and loss.mean_over == "examples"
    parts, documents, rows = stored.parts, {}, {}
    for part, rollouts in parts.items():
        documents[part] = TokenDocuments(
            lengths=rollouts.lengths,
            read=partial(rollouts.example, reads=tuple(arrays or ()), adds_to_one=adds_to_one),
            numbers=arrays,
        )
        rows[part] = PackedRollouts(rollouts, documents[part], config.seq_len)
    tokenizer = None
    if config.data.tokenizer is not None or 256 <= vocab_size <= MOST_FOR_BYTES:
        tokenizer = text_tokenizer(config.data, vocab_size=vocab_size)
    counts = [
        f"{x.description}, in {len(rows[part]):,} rows ({rows[part].share_of_padding:.0%} padding)"
        for part, x in parts.items()
    ]
    if "val" not in parts:
        counts.append("nothing")
    name = found.files.name
    stream, held_out = (
        Stream(name=name, tokens=parts[part].tokens, vocab_size=vocab_size)
        for part in ("train", "val" if "val" in parts else "train")
    )
    corpus = Corpus(
        train=(stream,),
        held_out=(held_out,),
        end_of_document=None if tokenizer is None else tokenizer.end_of_document,
        unit="token" if tokenizer is None else tokenizer.unit,
        decode=None if tokenizer is None else tokenizer.decode,
        description=described(found.files, found.validation, counts),
        digest=stored.digest,
        tokens=stored.tokens,
        shown="held-out text" if "val" in parts else "text of the data",
    )
    # A loss of rows has units of its own.
    per = "token" if loss is None or not adds_to_one else loss.form.removesuffix("s")
    return TextDataset.of(
        corpus,
        **({} if loss is None else {"loss_unit": f"per {per}"}),
        train=rows["train"],
        held_out=rows.get("val", []),
        documents=documents["train"] if config.whole_documents else None,
        collate=partial(collate_rollouts, layout=layout, length=config.seq_len, arrays=arrays),
    )


def collate_rollouts(
    rows: list[Sequence[TokenExample]],
    numbers: list[int],
    *,
    layout: Layout,
    length: int,
    arrays: NumbersOf | None,
) -> TokenBatch:
    """A batch in layout order."""
    return counting(in_layout_order(rows_of(rows, length, arrays), layout), numbers)
