"""Examples to tokens: which are held out, and the vectors of both parts, in files or in memory.

Tokens are written as they are made, so that the memory that this takes does not grow with the
number of examples.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from startrail_jax.errors import InputError
from trainer.data.cache import filled_folder
from trainer.data.documents import Document
from trainer.data.files import map_tokens
from trainer.data.progress import shown_progress
from trainer.gpt.chat.examples import read_examples
from trainer.gpt.chat.packing import EncodedExamples
from trainer.gpt.chat.template import ChatTemplate
from trainer.gpt.encoding import (
    Text,
    VectorWriter,
    check_lengths,
    chunks,
    share_of_key,
)
from trainer.gpt.tokenizer import BORDER

# Changes when the same examples give other files than before.
FORMAT = 2
# Changes when the same examples give other tokens, or others count.
DIGEST = 1
PARTS = ("train", "val")
VECTORS = {"tokens": None, "counted": np.dtype(np.uint8), "ends": np.dtype(np.int64)}
"""Name of each vector of a part, and its data type; None for that of the tokenizer."""

Writers = dict[str, VectorWriter]


def encode_examples(
    text: Text, template: ChatTemplate | None, cache: Path | None
) -> tuple[tuple[EncodedExamples, EncodedExamples], str]:
    """The examples to train on and those held out, and a hash of the former.

    Args:
        text: the files, and the tokenizer.
        template: turns messages into text; None if there is none.
        cache: folder for the tokens; None to keep them in memory.

    Raises:
        OSError: if tokens cannot be cached.
        ValueError: if a line is not an example, or one of the parts has none.
    """
    key = hash_of([FORMAT, text.key], template)[:32]
    with filled_folder(cache, key, lambda x: _write_to_folder(text, template, x)) as (folder, sums):
        return _parts(folder), _hash_of_train(sums)


def digest_of(text: Text, template: ChatTemplate | None, train: EncodedExamples) -> str:
    """A hash of what a run trains on.

    Runs of earlier versions did not count tokens at a border. Where there are none, nothing has
    changed for them, and the hash is theirs.
    """
    values = [DIGEST, text.digest]
    counts_borders = int(train.counted.max(initial=0)) == BORDER
    return hash_of(values, template, *(["borders count"] if counts_borders else []))[:16]


def hash_of(text: list[Any], template: ChatTemplate | None, *others: str) -> str:
    """A hash of what tells the text, and of what else decides which tokens there are and count."""
    values = [*text, None if template is None else template.digest, *others]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def _hash_of_train(sums: Mapping[str, str]) -> str:
    text = " ".join(sums[_file_name(PARTS[0], vector)] for vector in VECTORS)
    return hashlib.sha256(text.encode()).hexdigest()


def _file_name(part: str, vector: str) -> str:
    return f"{part}.{vector}.npy"


def _parts(folder: Path) -> tuple[EncodedExamples, EncodedExamples]:
    train, held_out = (
        EncodedExamples(**{x: map_tokens(folder / _file_name(part, x), "") for x in VECTORS})
        for part in PARTS
    )
    return train, held_out


def _write_to_folder(text: Text, template: ChatTemplate | None, folder: Path) -> None:
    with ExitStack() as stack:
        files = {
            (part, vector): stack.enter_context((folder / _file_name(part, vector)).open("wb"))
            for part in PARTS
            for vector in VECTORS
        }
        told = stack.enter_context(shown_progress(f"tokenising {text.files.name}", text.size))
        _write(text, template, files, told)


def _write(
    text: Text,
    template: ChatTemplate | None,
    files: Mapping[tuple[str, str], io.BufferedIOBase],
    on_read: Callable[[int], None] = lambda size: None,
) -> None:
    """Writes each vector of each part to its file."""
    writers: dict[str, Writers] = {part: {} for part in PARTS}
    for (part, vector), file in files.items():
        writers[part][vector] = VectorWriter(file, VECTORS[vector] or text.tokenizer.dtype)
    for chunk in chunks(_assign(text, template, on_read)):
        encoded = text.tokenizer.encode_parts([example for _, example in chunk])
        for (part, example), (tokens, counted) in zip(chunk, encoded, strict=True):
            _add(writers[part], tokens, counted, example)
    counts = [writers[part]["ends"].length for part in PARTS]
    check_lengths(counts, "examples", text.files, text.validation, text.config)
    for part, vector in files:
        writers[part][vector].finish()


def _add(writers: Writers, tokens: np.ndarray, counted: np.ndarray, example: Document) -> None:
    if not counted[1:].any():
        raise InputError(
            "An example must have an answer after its first token, which the loss can count; got "
            f"none in {example.place!r}. Mend or remove the line."
        )
    writers["tokens"].add(tokens)
    writers["counted"].add(counted)
    writers["ends"].add(np.array([writers["tokens"].length], np.int64))


def _assign(
    text: Text, template: ChatTemplate | None, on_read: Callable[[int], None]
) -> Iterator[tuple[str, Document]]:
    """Every example, and its part."""
    train, held_out = PARTS
    most = -1.0 if text.validation is not None else _largest_share(text, template)
    ignored = text.config.ignored_keys
    for example in read_examples(text.files, template, ignored, on_read):
        yield held_out if share_of_key(example.key) <= most else train, example
    if text.validation is not None:
        for example in read_examples(text.validation, template, ignored, on_read):
            yield held_out, example


def _largest_share(text: Text, template: ChatTemplate | None) -> float:
    """The largest `share_of_key` of the examples that are held out.

    Where `held_out` gives all examples to one part, one example is held out.
    """
    shares, found = [], set()
    largest = math.nextafter(text.config.held_out, 0)
    for example in read_examples(text.files, template, text.config.ignored_keys):
        shares.append(share_of_key(example.key))
        found.add(shares[-1] <= largest)
        if len(found) == 2:  # Of many examples, the first few are enough to know it.
            return largest
    return min(shares) if len(shares) > 1 else largest
