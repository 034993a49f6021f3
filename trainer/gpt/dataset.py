"""The data of a run of a language model: of one path, or of several that are mixed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from typing import Any

from startrail_jax.tokens.layout import Layout
from trainer.data.mixture import Mixture, drawn, fractions_of
from trainer.gpt.batches import Sequences, TextDataset, collate
from trainer.gpt.chat.corpus import open_examples
from trainer.gpt.chat.forms import has_examples, has_rollouts
from trainer.gpt.config import GPTTrainConfig
from trainer.gpt.corpus import Corpus, joined, open_corpora
from trainer.gpt.documents import (
    TokenDocuments,
    first_lengths,
    hint,
    mixed_documents,
    text_documents,
)
from trainer.gpt.rollouts.dataset import open_rollouts


def open_dataset(config: GPTTrainConfig, layout: Layout) -> TextDataset:
    """Opens everything that a config names, and mixes it."""
    # Beside the run, so that the next run finds the tokens too.
    data, cache = config.data, config.run_dir.parent / "tokens"
    vocab_size, seq_len = config.model.vocab_size, config.seq_len
    if has_rollouts(config):
        several = open_rollouts(config, layout, cache)
    elif has_examples(data):
        several = open_examples(data, layout, vocab_size=vocab_size, seq_len=seq_len, cache=cache)
    else:
        corpora = open_corpora(data, vocab_size=vocab_size, cache=cache)
        several = tuple(_of_corpus(corpus, config, layout) for corpus in corpora)
    if len(several) == 1:
        return several[0]
    return _mixed(several, config)


def _of_corpus(corpus: Corpus, config: GPTTrainConfig, layout: Layout) -> TextDataset:
    """The rows, or the whole documents, of the tokens of a path."""
    data = config.data
    end = corpus.end_of_document if data.mask_documents else None
    begins_too = end is not None and end == data.begin_of_document
    train, held_out = (Sequences(x, config.seq_len) for x in (corpus.train, corpus.held_out))
    description = corpus.description
    if train.left_out > config.seq_len and not config.whole_documents:
        description += (
            f"; {train.left_out:,} {corpus.unit}s are not trained on, as they fill no sequence "
            f"of --seq-len {config.seq_len} in their file"
        )
    if held_out.is_filled:
        description += f"; held-out sequences are filled up to --seq-len {config.seq_len}"
    documents = None
    if config.whole_documents:
        documents = text_documents(corpus.train, end, config.seq_len, begins_too=begins_too)
    elif data.mask_documents:
        lengths = first_lengths(corpus.train[0], end, config.seq_len, begins_too=begins_too)
        description += hint(lengths, config.seq_len, layout)
    if documents is None and train.is_filled:
        longest = max(map(len, corpus.train))
        warnings.warn(
            f"What there is to train on is shorter than a sequence: at most {longest:,} "
            f"{corpus.unit}s in one place, with --seq-len {config.seq_len}. Sequences are "
            "filled up with padding, which takes time and memory and teaches nothing. Use more "
            f"data, or --seq-len {longest - 1}.",
            stacklevel=2,
        )
    return TextDataset.of(
        corpus,
        train=train,
        held_out=held_out,
        documents=documents,
        collate=partial(
            collate,
            layout=layout,
            end_of_document=end,
            begins_too=begins_too,
            longest=data.longest_document,
        ),
        description=description,
    )


def _mixed(several: Sequence[TextDataset], config: GPTTrainConfig) -> TextDataset:
    """Data of several paths, whose rows or tokens have shares as their weights."""
    weights = fractions_of(config.data.weights, len(several))
    found = [x.documents for x in several if isinstance(x.documents, TokenDocuments)]
    shares = _shares(several, config, weights)
    lines = [f"{share} {x.description}" for share, x in zip(shares, several, strict=True)]
    held_out: Any = [x.held_out for x in several]
    if config.data.validation_path is not None:
        held_out = held_out[0]
    elif any(map(len, held_out)):
        held_out = Mixture(sources=tuple(held_out), weights=weights)
    else:
        held_out = []
    return TextDataset.of(
        joined([x.corpus for x in several], weights),
        train=Mixture(sources=tuple(x.train for x in several), weights=weights),
        held_out=held_out,
        documents=mixed_documents(found, weights) if found else None,
        collate=several[0].collate,
        description="\n".join((f"a mixture of {len(several)} paths", *lines)),
    )


def _shares(
    several: Sequence[TextDataset], config: GPTTrainConfig, weights: Sequence[Fraction]
) -> list[str]:
    """The share of each path, and how often a run reads its rows."""
    shares = [float(weight / sum(weights)) for weight in weights]
    if config.whole_documents:
        return [f"  {share:.2%} of the tokens:" for share in shares]
    rows = drawn(config.steps * config.batch_size, weights)
    passes = [n / len(x.train) for n, x in zip(rows, several, strict=True)]
    pairs = zip(shares, passes, strict=True)
    return [f"  {share:.2%} of the rows, {times:.3g} passes in this run:" for share, times in pairs]
