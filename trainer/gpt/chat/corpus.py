"""The data of a run whose loss counts answers only: rows to train on, and rows held out.

Tokens are written as they are made: the memory does not grow with the number of examples.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from startrail_jax.errors import InputError
from startrail_jax.tokens.layout import Layout
from trainer.data.cache import filled_folder
from trainer.data.files import RECORD_KINDS, map_tokens
from trainer.data.progress_bar import shown_progress
from trainer.gpt.batches import TextDataset
from trainer.gpt.chat.examples import ChatExample, read_examples
from trainer.gpt.chat.packing import EncodedExamples, PackedExamples, collate_rows
from trainer.gpt.chat.template import ChatTemplate
from trainer.gpt.config import DataConfig
from trainer.gpt.corpus import (
    Corpus,
    Stream,
    check_bytes,
    check_effects,
    described,
    find_inputs,
    open_text,
)
from trainer.gpt.documents import hint
from trainer.gpt.encoding import (
    Text,
    TextTokenizer,
    VectorWriter,
    check_lengths,
    chunks,
    largest_share,
    share_of_key,
)
from trainer.gpt.tokenizer import FileTokenizer, beginning_of

# Changes when the same examples give other files than before.
FORMAT = 5
# Changes when the same examples give other tokens, or others count.
DIGEST = 1
PARTS = ("train", "val")
ENDS_FILE = ".ends.json"
VECTORS = {"tokens": None, "counted": np.dtype(np.uint8), "ends": np.dtype(np.int64)}
"""Name of each vector of a part, and its data type; None for that of the tokenizer."""


@dataclass(frozen=True)
class Ends:
    """How the answers of all examples end."""

    ends: list[str]
    """The special tokens that end an answer of a conversation."""
    within: list[str]
    """The special tokens that stand elsewhere in an answer."""
    has_completions: bool
    """Whether some examples are completions, which end as documents do."""
    is_open: bool
    """Whether an answer of a conversation ends with a text that is no special token."""

    def description(self, tokenizer: TextTokenizer) -> str:
        """A part of the line of the log."""
        parts = []
        if self.has_completions:
            parts.append(f"completions end with {_name_of_end(tokenizer)}")
        if self.ends and isinstance(tokenizer, FileTokenizer):
            names = [f"{x!r}, id {tokenizer.id_of(x)}" for x in self.ends]
            parts.append(f"answers of conversations end with {' and '.join(names)}")
        if self.is_open:
            parts.append(
                "some answers of conversations end with a text that is no single token, at which "
                "samples do not stop"
            )
        if inner := sorted({*self.ends}.intersection(self.within)):
            names = ", ".join(map(repr, inner))
            parts.append(f"samples do not stop at {names}, which stands within answers too")
        return "; ".join(parts)


def open_examples(
    config: DataConfig, layout: Layout, *, vocab_size: int, seq_len: int, cache: Path
) -> tuple[TextDataset, ...]:
    """Opens each path of a config whose data are examples, in JSONL files or tables. Tokens that a
    tokenizer makes of text are kept in `config.cache`, or else in `cache`."""
    inputs = find_inputs(config)
    check_effects(config, inputs, form="examples")
    for found in (x for both in inputs for x in (both.files, both.validation)):
        if found is not None and found.kind not in RECORD_KINDS:
            raise InputError(
                f"With data.loss={config.loss!r} the data must be JSONL or tables; got "
                f"{found.kind} files in {found.name!r}. Give *.jsonl, *.parquet or *.arrow files "
                "(--data.path), or leave out --data.loss."
            )
    check_bytes(config, vocab_size)
    template, folder = None, config.cache
    if config.tokenizer is not None:
        template = ChatTemplate.find(config.tokenizer, config.chat_template)
        folder = folder or cache
    texts = [open_text(x.files, x.validation, config, vocab_size) for x in inputs]
    encoded = [_encode_examples(text, template, folder) for text in texts]
    tokenizer = texts[0].tokenizer
    if isinstance(tokenizer, FileTokenizer):
        _check_beginning([part for x in encoded for part in x.parts], config, tokenizer)
    stops = _stops([x.ends for x in encoded], tokenizer)
    return tuple(
        _open_encoded(text, found, template, layout, stops, vocab_size=vocab_size, seq_len=seq_len)
        for text, found in zip(texts, encoded, strict=True)
    )


def _stops(several: Sequence[Ends], tokenizer: TextTokenizer) -> tuple[int, ...]:
    """The tokens that end answers and stand within none, so that a sample may stop there."""
    if not isinstance(tokenizer, FileTokenizer):
        return ()
    ends, within = {x for y in several for x in y.ends}, {x for y in several for x in y.within}
    return tuple(tokenizer.id_of(x) for x in sorted(ends - within))


def _open_encoded(
    text: Text,
    encoded: _Encoded,
    template: ChatTemplate | None,
    layout: Layout,
    stops: tuple[int, ...],
    *,
    vocab_size: int,
    seq_len: int,
) -> TextDataset:
    """The rows of the examples of a path."""
    config, (parts, tokens, ends) = text.config, encoded
    files, validation = text.files, text.validation
    sources = (files, validation or files)
    rows, streams, counts = [], [], []
    longest = config.longest_document
    flag = "--seq-len" if longest is None else "--data.longest-document"
    for part, source in zip(parts, sources, strict=True):
        if isinstance(text.tokenizer, FileTokenizer):
            text.tokenizer.check_largest(int(part.tokens.max()), source.name)
        rows.append(PackedExamples(part, seq_len, name=source.name, longest=longest))
        streams.append(Stream(name=source.name, tokens=part.tokens, vocab_size=vocab_size))
        counts.append(_describe(part, rows[-1], flag))
    documents = rows[0].documents if config.batches == "documents" else None
    in_rows = documents is None and config.mask_documents
    tokenizer = text.tokenizer
    corpus = Corpus(
        train=(streams[0],),
        held_out=(streams[1],),
        end_of_document=tokenizer.end_of_document,
        unit=tokenizer.unit,
        decode=tokenizer.decode,
        description=described(files, validation, counts)
        + f"; {ends.description(tokenizer)}"
        + (hint(rows[0].lengths, seq_len, layout) if in_rows else ""),
        digest=_hash([DIGEST, text.digest], template)[:16],
        tokens=tokens,
        stops=stops,
    )
    collate = partial(collate_rows, layout=layout, mask_documents=config.mask_documents)
    return TextDataset.of(
        corpus, train=rows[0], held_out=rows[1], documents=documents, collate=collate
    )


class _Encoded(NamedTuple):
    """The examples of a path."""

    parts: list[EncodedExamples]
    """Those to train on, and those held out."""
    tokens: str
    """A hash of the former."""
    ends: Ends


def _encode_examples(text: Text, template: ChatTemplate | None, cache: Path | None) -> _Encoded:
    """The tokens of the examples of a path."""
    key = _hash([FORMAT, text.key, text.config.messages, text.config.loss], template)[:32]
    with filled_folder(cache, key, lambda x: _write(text, template, x)) as (folder, sums):
        parts = [
            EncodedExamples(**{x: map_tokens(folder / f"{part}.{x}.npy", "") for x in VECTORS})
            for part in PARTS
        ]
        ends = Ends(**json.loads((folder / ENDS_FILE).read_text(encoding="utf-8")))
    train = " ".join(sums[f"{PARTS[0]}.{vector}.npy"] for vector in VECTORS)
    return _Encoded(parts, hashlib.sha256(train.encode()).hexdigest(), ends)


def _hash(text: list[Any], template: ChatTemplate | None) -> str:
    """A hash of what tells the text, and of what else decides which tokens there are and count."""
    values = [*text, None if template is None else template.digest]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def _write(text: Text, template: ChatTemplate | None, folder: Path) -> None:
    """Writes each vector of each part to a file, as examples are read."""
    with ExitStack() as stack:
        writers = {
            part: {
                vector: stack.enter_context(
                    VectorWriter(folder / f"{part}.{vector}.npy", dtype or text.tokenizer.dtype)
                )
                for vector, dtype in VECTORS.items()
            }
            for part in PARTS
        }
        ends, within, has_completions, is_open = set[str](), set[str](), False, False
        told = stack.enter_context(shown_progress(f"tokenising {text.files.name}", text.size))
        for chunk in chunks(_assign(text, template, told)):
            encoded = text.tokenizer.encode_parts([example for _, example in chunk])
            for (part, example), (tokens, counted) in zip(chunk, encoded, strict=True):
                if not counted[1:].any():
                    raise InputError(
                        "An example must have an answer after its first token, which the loss can "
                        f"count; got none in {example.place!r}. Mend or remove the line."
                    )
                writers[part]["tokens"].add(tokens)
                writers[part]["counted"].add(counted)
                end = np.array([writers[part]["tokens"].length], np.int64)
                writers[part]["ends"].add(end)
                if example.conversation is None:
                    has_completions = True
                else:
                    ends |= example.conversation.ends
                    within |= example.conversation.within
                    is_open |= example.conversation.is_open
    answers = {"ends": sorted(ends), "within": sorted(within)}
    answers |= {"has_completions": has_completions, "is_open": is_open}
    (folder / ENDS_FILE).write_text(json.dumps(answers), encoding="utf-8")
    counts = [writers[part]["ends"].length for part in PARTS]
    check_lengths(counts, "examples", text.files, text.validation, text.config)


def _assign(
    text: Text, template: ChatTemplate | None, on_read: Callable[[int], None]
) -> Iterator[tuple[str, ChatExample]]:
    """Every example, and its part."""
    train, held_out = PARTS
    config = text.config
    options: dict[str, Any] = {"ignored": config.ignored_keys, "messages": config.messages}
    options |= {"loss": config.loss}
    most = -1.0
    if text.validation is None:
        examples = read_examples(text.files, template, **options)
        most = largest_share((share_of_key(x.key) for x in examples), config.validation_fraction)
    options |= {"on_read": on_read}
    for example in read_examples(text.files, template, **options):
        yield held_out if share_of_key(example.key) <= most else train, example
    if text.validation is not None:
        for example in read_examples(text.validation, template, **options):
            yield held_out, example


def _check_beginning(
    parts: Sequence[EncodedExamples], config: DataConfig, tokenizer: FileTokenizer
) -> None:
    """Warns if conversations lack the token that prompts begin with, or raises if it is in vain."""
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


def _describe(part: EncodedExamples, rows: PackedExamples, flag: str) -> str:
    cut = f", {rows.num_cut:,} of which lose their end to {flag}" if rows.num_cut else ""
    if rows.num_left_out:
        cut += f", {rows.num_left_out:,} left out, whose answers begin after {flag}"
    return (
        f"{len(part.ends):,} examples{cut}, {len(part.tokens):,} tokens, {rows.num_counted:,} of "
        f"them counted, in {len(rows):,} rows ({rows.share_of_padding:.0%} padding)"
    )
