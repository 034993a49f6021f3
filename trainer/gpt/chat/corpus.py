"""The data of a run whose loss counts answers only: rows to train on, and rows held out."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path

import numpy as np

from startrail_jax.errors import InputError
from startrail_jax.tokens.layout import Layout
from trainer.data.files import RECORD_KINDS
from trainer.gpt.batches import TextDataset
from trainer.gpt.chat.encoding import digest_of, encode_examples
from trainer.gpt.chat.packing import EncodedExamples, PackedExamples, collate_rows
from trainer.gpt.chat.template import ChatTemplate
from trainer.gpt.config import DataConfig
from trainer.gpt.corpus import Corpus, Stream, check_effects, find_parts, open_text
from trainer.gpt.documents import ExampleDocuments
from trainer.gpt.encoding import TextTokenizer
from trainer.gpt.tokenizer import FileTokenizer, beginning_of


def open_examples(
    config: DataConfig, layout: Layout, *, vocab_size: int, seq_len: int, cache: Path
) -> TextDataset:
    """Opens the JSONL files or tables that `config` names.

    Args:
        config: what to read; its `loss_on` is "completion".
        layout: order of the tokens of a batch.
        vocab_size: number of token ids that the model knows.
        seq_len: number of tokens in a sequence.
        cache: folder for the tokens that a tokenizer makes of text, unless `config.cache` names
            one.

    Raises:
        OSError: if tokens cannot be cached.
        ValueError: if the data cannot be read, are of another kind, are beyond the vocabulary, or
            leave nothing to train on or to hold out; or if `config` asks for a token in front of
            documents that no example gets.
    """
    files, validation = find_parts(config)
    check_effects(config, files, validation)
    for found in filter(None, (files, validation)):
        if found.kind not in RECORD_KINDS:
            raise InputError(
                "With data.loss_on='completion' the data must be JSONL or tables; got "
                f"{found.kind} files in {found.name!r}. Give *.jsonl, *.parquet or *.arrow files "
                "(--data.path), or leave out --data.loss-on."
            )
    text = open_text(files, validation, config, vocab_size)
    template, folder = None, config.cache
    if config.tokenizer is not None:
        template = ChatTemplate.find(config.tokenizer, config.chat_template)
        folder = folder or cache
    parts, tokens = encode_examples(text, template, folder)
    if isinstance(text.tokenizer, FileTokenizer):
        _check_beginning(parts, config, text.tokenizer)
    sources = (files, validation or files)
    rows, streams, counts = [], [], []
    for part, source in zip(parts, sources, strict=True):
        if isinstance(text.tokenizer, FileTokenizer):
            text.tokenizer.check_largest(int(part.tokens.max()), source.name)
        rows.append(PackedExamples(part, seq_len, name=source.name))
        streams.append(Stream(name=source.name, tokens=part.tokens, vocab_size=vocab_size))
        counts.append(_describe(part, rows[-1]))
    place = "" if validation is None else f" from {validation.name}"
    tokenizer = text.tokenizer
    corpus = Corpus(
        train=(streams[0],),
        held_out=(streams[1],),
        end_of_document=tokenizer.end_of_document,
        unit=tokenizer.unit,
        decode=tokenizer.decode,
        description=f"{files.name}: {counts[0]} to train on; {counts[1]} held out{place}"
        f"{files.remark}; completions end with {_name_of_end(tokenizer)}",
        digest=digest_of(text, template, parts[0]),
        tokens=tokens,
    )
    collate = partial(collate_rows, layout=layout, mask_documents=config.mask_documents)
    documents = ExampleDocuments(rows[0]) if config.batches == "documents" else None
    return TextDataset.of(
        corpus, train=rows[0], held_out=rows[1], documents=documents, collate=collate
    )


def _check_beginning(
    parts: tuple[EncodedExamples, EncodedExamples], config: DataConfig, tokenizer: FileTokenizer
) -> None:
    """Warns if conversations lack the token that documents and prompts begin with.

    A template that does not write it decides for the examples, but not for the prompts of
    sample.py.

    Raises:
        ValueError: if no example has it and the tokenizer does not ask for it, so that it was
            given in vain.
    """
    begin = config.begin_of_document
    if begin is None:
        return
    assert config.tokenizer is not None, "without one, the token is refused before"
    firsts = [part.tokens[np.append(0, part.ends[:-1])] for part in parts]
    lacking = sum(int(np.count_nonzero(first != begin)) for first in firsts)
    examples = sum(map(len, firsts))
    if not lacking:
        return
    name = tokenizer.name_of(begin)
    if lacking == examples and beginning_of(config.tokenizer) != begin:
        raise InputError(
            "data.begin_of_document must be left out where no example begins with it; got "
            f"begin_of_document={begin}, which is {name!r}, for conversations, which begin as "
            "their chat template says. Write the token at the beginning of the template "
            "(--data.chat-template), or give --data.begin-of-document None."
        )
    warnings.warn(
        f"{lacking:,} of {examples:,} examples do not begin with {name!r}, as prompts of sample.py "
        "do: their chat template does not write it. Write it at the beginning of the template "
        "(--data.chat-template), or give --data.begin-of-document None.",
        stacklevel=3,
    )


def _name_of_end(tokenizer: TextTokenizer) -> str:
    end = tokenizer.end_of_document
    if isinstance(tokenizer, FileTokenizer):
        return f"{tokenizer.name_of(end)!r}, id {end}"
    return f"the byte {end}" if end < 256 else f"id {end}"


def _describe(part: EncodedExamples, rows: PackedExamples) -> str:
    cut = f", {rows.num_cut:,} of which lose their end to --seq-len" if rows.num_cut else ""
    if rows.num_left_out:
        cut += f", {rows.num_left_out:,} left out, whose answers begin after --seq-len"
    return (
        f"{len(part.ends):,} examples{cut}, {len(part.tokens):,} tokens, {rows.num_counted:,} of "
        f"them counted, in {len(rows):,} rows ({rows.share_of_padding:.0%} padding)"
    )
