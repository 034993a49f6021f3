"""The data of a run that trains on rollouts: rows of whole rollouts, or these as documents."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from models.parts.gpt import recurrences_of
from startrail_jax.errors import InputError
from startrail_jax.tokens.documents import DocumentSizes, first_of_rows
from startrail_jax.tokens.layout import Layout
from trainer.data.dataset import Arriving
from trainer.data.files import RECORD_KINDS, Files, Kind, find_files, kind_of
from trainer.gpt.batches import (
    NumbersOf,
    TextDataset,
    TokenBatch,
    TokenExample,
    counting,
    in_layout_order,
    rows_of,
)
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
from trainer.gpt.documents import TokenDocuments, sizes_of
from trainer.gpt.objectives.distill import TEACHER
from trainer.gpt.objectives.preference import REFERENCES
from trainer.gpt.rollouts.pairs import PairReader
from trainer.gpt.rollouts.records import LISTS
from trainer.gpt.rollouts.store import Form, Stored, StoredRollouts, store_rollouts
from trainer.gpt.tokenizer import text_tokenizer
from trainer.gpt.trees import Tree, TreeLimits, as_trees, joined, merged, trees_within


class PackedRollouts:
    """Rows of rollouts, by their number: a `trainer.data.dataset.Source`. A rollout is in one row,
    and rollouts keep their order."""

    def __init__(self, documents: TokenDocuments, seq_len: int) -> None:
        """Decides which rollouts, or trees of them, share a row."""
        self._documents = documents
        self._firsts = first_of_rows(np.cumsum(documents.sizes.lengths), seq_len)
        self.num_tokens = int(documents.sizes.lengths.sum())
        """Number of tokens in the rows."""
        self.share_of_padding = 1 - self.num_tokens / max(len(self) * seq_len, 1)

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
    if data.follow:
        return (_followed(config, layout, cache),)
    reader_of = functools.cache(partial(_pair_reader, config))
    inputs = find_inputs(data)
    check_effects(data, inputs, form=form_name)
    opened = []
    for found in inputs:
        fraction, parts = data.validation_fraction, {"train": found.files}
        if found.validation is not None:
            fraction, parts = 0.0, parts | {"val": found.validation}
        elif loss is not None and not loss.holds_out and fraction == DataConfig.validation_fraction:
            fraction = 0.0
        stored = _stored(config, parts, data.cache or cache, fraction, reader_of)
        opened.append(_opened(config, layout, found, stored))
    return tuple(opened)


def _stored(
    config: GPTTrainConfig,
    parts: dict[str, Files],
    cache: Path | None,
    fraction: float,
    reader_of: Callable[[Any], PairReader],
) -> Stored:
    """Reads the files of a path. `reader_of` gives what reads pairs in files of a kind."""
    loss, files = config.row_loss, parts["train"]
    form_name = "rollouts" if loss is None else loss.form
    for part in parts.values():
        if part.kind not in RECORD_KINDS:
            raise InputError(
                f"{form_name.capitalize()} must be JSONL or tables; got {part.kind} files in "
                f"{part.name!r}. Give *.jsonl, *.parquet or *.arrow files (--data.path)."
            )
    form, read = _form(config), None
    if form_name == "pairs":
        reader = reader_of(files.kind)
        form, read = replace(form, pairs=reader.digest), reader.read
    stored = store_rollouts(parts, form, cache, fraction, read)
    _check_lengths(stored.parts, files.name, fraction)
    return stored


def _form(config: GPTTrainConfig) -> Form:
    loss = config.row_loss
    arrays = {} if loss is None else loss.arrays
    return Form(
        vocab_size=config.model.vocab_size,
        longest=config.seq_len,
        lists=tuple(name for name in arrays if name in (*LISTS, *REFERENCES)),
        advantages="advantages" in arrays,
        deviation=loss is None or getattr(loss, "deviation", True),
        teacher=arrays[TEACHER[0]][1][0] if TEACHER[0] in arrays else None,
        replay=config.replay,
        ignored=config.data.ignored_keys,
    )


def _followed(config: GPTTrainConfig, layout: Layout, cache: Path) -> TextDataset:
    """The rollouts of files that are yet to appear in a folder; those held out are there."""
    data, (folder,) = config.data, config.data.path
    if not folder.is_dir():
        raise InputError(
            "data.follow needs a folder as data.path, in which files appear; got "
            f"{str(folder)!r}, which is none. Make it, or leave out --data.follow."
        )
    reader_of = functools.cache(partial(_pair_reader, config))
    held_out, shown = None, {"shown": "a new document"}
    if data.validation_path is not None:
        files = find_files(data.validation_path, "data.validation_path")
        stored = _stored(config, {"train": files}, data.cache or cache, 0.0, reader_of)
        held_out = _rows(config, stored.parts["train"])[1]
        shown = {"held_out": (_stream(config, files.name, stored.parts["train"].tokens),)}

    def opened(path: Path) -> PackedRollouts:
        files = Files(name=str(path), kind=kind_of(path), paths={path.name: path})
        stored = _stored(config, {"train": files}, None, 0.0, reader_of)
        return _rows(config, stored.parts["train"])[1]

    count = "nothing" if held_out is None else f"{len(held_out):,} rows"
    times = "once" if data.epochs_a_file is None else f"{data.epochs_a_file} times"
    corpus = _corpus(
        config,
        str(folder),
        description=f"{folder}: files that appear in it, each trained on {times}; {count} held out",
        digest="",
        **shown,
    )
    return _dataset(
        config,
        layout,
        corpus,
        train=[],
        held_out=held_out or [],
        arriving=Arriving(folder=folder, open=opened, epochs=data.epochs_a_file, nothing=[]),
    )


def _pair_reader(config: GPTTrainConfig, kind: Kind) -> PairReader:
    """Turns the pairs of files of a kind into tokens."""
    data, loss = config.data, config.row_loss
    check_bytes(data, config.model.vocab_size)
    tokenizer, template = text_tokenizer(data, vocab_size=config.model.vocab_size), None
    if data.tokenizer is not None:
        template = ChatTemplate.find(data.tokenizer, data.chat_template)
    return PairReader(
        tokenizer=tokenizer,
        template=template,
        kind=kind,
        references=loss is not None and bool(loss.arrays),
        ends=loss is not None and loss.counts == "ends",
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


def _rows(
    config: GPTTrainConfig, rollouts: StoredRollouts
) -> tuple[TokenDocuments, PackedRollouts]:
    """Rollouts as documents, and in rows."""
    loss, arrays = config.row_loss, config.arrays
    adds_to_one = loss is not None and loss.mean_over == "examples"
    read = partial(rollouts.example, reads=tuple(arrays or ()), adds_to_one=adds_to_one)
    documents = TokenDocuments(
        sizes=DocumentSizes(lengths=rollouts.lengths), read=read, numbers=arrays
    )
    if config.shares_prefixes:
        documents = _trees(config, rollouts, documents)
    elif rollouts.documents is not None and config.whole_documents:
        documents = replace(documents, sizes=sizes_of(map(read, range(len(rollouts)))))
    return documents, PackedRollouts(documents, config.seq_len)


def _trees(
    config: GPTTrainConfig, rollouts: StoredRollouts, documents: TokenDocuments
) -> TokenDocuments:
    """Rollouts that share beginnings as one document each, or pairs as trees of two answers."""
    has_states = bool(recurrences_of(config.model))
    limits = TreeLimits(tokens=config.seq_len, levels=2 if has_states else None)
    ends, read = rollouts.ends, documents.read
    if rollouts.documents is not None:
        within = replace(limits, shared=1)
        trees_of = [trees_within(read(i), within) for i in range(len(rollouts))]
        return replace(
            documents,
            read=lambda number: as_trees(read(number), trees_of[number]),
            sizes=_sizes(trees_of),
            trees=True,
        )

    def tokens_of(number: int) -> Any:
        here = slice(int(ends[number - 1]) if number else 0, int(ends[number]))
        return rollouts.tokens[here], rollouts.weights[here] > 0

    trees = joined(len(rollouts), tokens_of, limits)
    return replace(
        documents,
        read=lambda number: merged(trees[number], [*map(read, trees[number].members)]),
        sizes=_sizes([[tree] for tree in trees]),
        trees=True,
    )


def _sizes(trees_of: list[list[Tree]]) -> DocumentSizes:
    """The sizes of documents that consist of these trees."""
    stretches = [
        (number, *stretch)
        for number, trees in enumerate(trees_of)
        for tree in trees
        for stretch in zip(tree.shared, tree.lengths, strict=True)
    ]
    lengths = np.array([sum(tree.tokens for tree in trees) for trees in trees_of], np.int64)
    return DocumentSizes(lengths=lengths, stretches=np.array(stretches, np.int64).reshape(-1, 3))


def _opened(config: GPTTrainConfig, layout: Layout, found: Input, stored: Stored) -> TextDataset:
    """The rows of the rollouts of a path."""
    parts = stored.parts
    made = {part: _rows(config, rollouts) for part, rollouts in parts.items()}
    rows = {part: of_part for part, (_, of_part) in made.items()}
    counts = [
        f"{x.description}{_shared(len(x.tokens), rows[part].num_tokens)}, in "
        f"{len(rows[part]):,} rows ({rows[part].share_of_padding:.0%} padding)"
        for part, x in parts.items()
    ]
    if "val" not in parts:
        counts.append("nothing")
    stream, held_out = (
        _stream(config, found.files.name, parts[part].tokens)
        for part in ("train", "val" if "val" in parts else "train")
    )
    corpus = _corpus(
        config,
        found.files.name,
        train=(stream,),
        held_out=(held_out,),
        description=described(found.files, found.validation, counts),
        digest=stored.digest,
        tokens=stored.tokens,
        shown="held-out text" if "val" in parts else "text of the data",
    )
    return _dataset(
        config,
        layout,
        corpus,
        train=rows["train"],
        held_out=rows.get("val", []),
        documents=made["train"][0] if config.whole_documents else None,
    )


def _shared(tokens: int, left: int) -> str:
    """What the log says of shared beginnings."""
    if tokens == left:
        return ""
    return f", of which shared beginnings leave {left:,} to compute"


def _stream(config: GPTTrainConfig, name: str, tokens: Any) -> Stream:
    return Stream(name=name, tokens=tokens, vocab_size=config.model.vocab_size)


def _corpus(config: GPTTrainConfig, name: str, **others: Any) -> Corpus:
    """The tokens of rollouts, by default those of an empty document, and what turns them into text,
    if that is known."""
    tokenizer, vocab_size = None, config.model.vocab_size
    if config.data.tokenizer is not None or 256 <= vocab_size <= MOST_FOR_BYTES:
        tokenizer = text_tokenizer(config.data, vocab_size=vocab_size)
    end = None if tokenizer is None else tokenizer.end_of_document
    empty = _stream(config, name, np.array([end or 0], np.int32))
    made: dict[str, Any] = {
        "train": (empty,),
        "held_out": (empty,),
        "end_of_document": end,
        "unit": "token" if tokenizer is None else tokenizer.unit,
        "decode": None if tokenizer is None else tokenizer.decode,
    }
    return Corpus(**made | others)


def _dataset(config: GPTTrainConfig, layout: Layout, corpus: Corpus, **others: Any) -> TextDataset:
    loss = config.row_loss
    if loss is not None:  # It has units of its own.
        is_of_tokens = loss.mean_over == "tokens"
        others["loss_unit"] = f"per {'token' if is_of_tokens else loss.form.removesuffix('s')}"
    options = {"layout": layout, "length": config.seq_len, "arrays": config.arrays}
    options["trees"] = config.shares_prefixes
    collate = partial(collate_rollouts, **options)
    return TextDataset.of(corpus, collate=collate, **others)


def collate_rollouts(
    rows: list[Sequence[TokenExample]],
    numbers: list[int],
    *,
    layout: Layout,
    length: int,
    arrays: NumbersOf | None,
    trees: bool,
) -> TokenBatch:
    """A batch in layout order."""
    made = rows_of(rows, length, arrays, trees=trees)
    return counting(in_layout_order(made, layout), numbers)
