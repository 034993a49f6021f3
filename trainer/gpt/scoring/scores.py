"""Scores of tokens on any mesh: log-probabilities, entropies, and the likeliest tokens."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32

from models.gpt import GPT
from startrail_jax.errors import InputError
from trainer import durable
from trainer.data.batches import local_rows, place
from trainer.data.cache import storing
from trainer.data.progress_bar import shown_progress
from trainer.gpt.batches import TokenBatch, in_layout_order, rows_of
from trainer.gpt.config import DataConfig, GPTTrainConfig, TextSampleConfig
from trainer.gpt.objective import NextToken
from trainer.gpt.objectives.logprobs import logprobs_and_entropy
from trainer.gpt.pretrained.initial import open_pretrained
from trainer.gpt.scoring.options import ScoreOptions
from trainer.gpt.scoring.records import RecordReader, ScoredRecord, with_rewards, with_scores
from trainer.gpt.scoring.summary import Rewards, Summary
from trainer.parallel.checks import make_attention
from trainer.parallel.step import Program
from trainer.session import Session
from trainer.weights.adapters import restore_model


class _Scores(NextToken):
    """The log-probability of each target, the entropy, and the ids and log-probabilities of the
    likeliest tokens; or the score of each token, if the model gives these."""

    of_rows = True

    def __init__(self, config: GPTTrainConfig, options: ScoreOptions) -> None:
        super().__init__(config)
        self._options = options

    def numbers(
        self, model: GPT, hidden: Float[Array, "B T width"], batch: TokenBatch
    ) -> Float32[Array, "B T n"]:
        logits = model.logits(hidden)
        if self._config.model.scores:
            return logits
        logits /= self._options.temperature
        found: Any = [logprobs_and_entropy(logits, jnp.asarray(batch.targets))]
        if self._options.top_k is not None:
            highest, ids = lax.top_k(jax.nn.log_softmax(logits), self._options.top_k)
            found += [ids.astype(jnp.float32), highest]  # Float32 holds ids up to 2**24.
        return jnp.concatenate(found, axis=-1)


def config_to_score(config: GPTTrainConfig, options: ScoreOptions, data: int) -> GPTTrainConfig:
    """The settings of a forward pass on `data` shards of a batch."""
    model = config.model if options.dtype is None else replace(config.model, dtype=options.dtype)
    return replace(
        config,
        model=model,
        objective="reward" if model.scores else "next_token",
        **{name: type(loss)() for name, loss in config.row_losses.items()},
        seq_len=options.seq_len,
        batch_size=options.batch_size or data,
        zero=options.zero,
        tile=options.tile,
        experts="auto",
        replay_experts=False,
        remat="none",
        gradient_accumulation=1,
        offload=False,
        offload_optimizer=False,
        data=DataConfig(),
        sample=TextSampleConfig(),
        profile=None,
    )


def score_file(
    source: Path,
    data: Path,
    out: Path,
    config: GPTTrainConfig,
    options: ScoreOptions,
    mesh: Mesh,
    session: Session,
) -> None:
    """Writes the records of `data` with their scores to `out`, in their order.

    Args:
        source: the folder of a run, or of a pretrained model.
        config: that of the run, or of a run that would begin with the model.

    Raises:
        ValueError: if a record is wrong, or an option does not fit the model or the devices.
        OSError: if a file cannot be read or written.
        CheckpointError: if there is no checkpoint of the run, or it cannot be read.
    """
    if os.path.lexists(out):
        raise InputError(
            f"OUT must be a file that does not exist yet; got {str(out)!r}. Give another, or "
            "delete it."
        )
    options.check(rewards=config.model.scores)
    if options.top_k is not None and options.top_k > config.model.vocab_size:
        raise InputError(
            f"top_k must be at most model.vocab_size; got top_k={options.top_k}, vocab_size="
            f"{config.model.vocab_size}. Use a smaller --top-k."
        )
    rewards = config.model.scores
    records = RecordReader.of(data, options, config)
    scored = config_to_score(config, options, mesh.shape["data"])
    objective = _Scores(scored, options)
    program = Program(scored, make_attention(mesh, scored, objective), objective)
    weights = _weights(source, config, program.state_shapes.model, options, session)
    summary = Rewards() if rewards else Summary()
    line_of = with_rewards if rewards else partial(with_scores, options=options)
    part = out.with_name(f".{out.name}.part-{secrets.token_hex(4)}")
    files = records.files
    parts = filter(None, (files, files.validation))
    size = sum(path.stat().st_size for part in parts for path in part.paths.values())
    try:
        with storing(out.parent, "OUT"), shown_progress(f"scoring {files.name}", size) as advance:
            with open(part if session.is_first else os.devnull, "w", encoding="utf-8") as file:
                for record, scores in _scored(records, advance, program, weights):
                    summary.add(record, scores[:, 0])
                    if session.is_first:
                        line = line_of(record, scores)
                        file.write(json.dumps(line, ensure_ascii=False) + "\n")
            if session.is_first:
                durable.flush(part)
                durable.rename(part, out)
    finally:
        part.unlink(missing_ok=True)
    for line in summary.lines():
        session.note(line)
    session.note(f"scores: {out}")


def _weights(
    source: Path, config: GPTTrainConfig, shapes: Any, options: ScoreOptions, session: Session
) -> Any:
    if config.init_from is not None and source == config.init_from:
        with open_pretrained(config, shapes) as initial:
            session.note(initial.description)
            return initial.read(shapes)
    weights, step = restore_model(source, config, shapes, step=options.step, note=session.note)
    session.note(f"model: {source} after step {step}")
    return weights


def _scored(
    records: RecordReader, on_read: Callable[[int], None], program: Program, weights: Any
) -> Iterator[tuple[ScoredRecord, Float32[np.ndarray, "n numbers"]]]:
    """Each record with the scores of its tokens."""
    arrays = None if records.replay is None else records.replay.arrays
    batch_size, length = program.config.batch_size, program.config.num_tokens
    layout = program.attention.layout
    held = local_rows(program.batch_sharding, program.tokens_shape)
    for rows in _in_rows(records.read(on_read), batch_size, length):
        examples = [[record.example for record in row] for row in rows]
        batch = rows_of([examples[row] for row in held], length, arrays)
        batch = in_layout_order(batch._replace(weights=np.ones_like(batch.weights)), layout)
        placed = place(batch, program.batch_sharding, batch_size=batch_size, rows=held)
        found: Any = program.numbers(weights, placed)
        whole = np.asarray(multihost_utils.process_allgather(found, tiled=True))
        scores = layout.unpermute(whole.reshape(batch_size, program.tokens_shape[1], -1))
        for row, members in enumerate(rows):
            end = 0
            for record in members:
                start, end = end, end + len(record.example.tokens)
                yield record, scores[row, start:end]


def _in_rows(
    records: Iterator[ScoredRecord], count: int, length: int
) -> Iterator[Sequence[Sequence[ScoredRecord]]]:
    """Rows of records, in order, so many at a time; the last rows may be empty."""
    rows: list[list[ScoredRecord]] = [[]]
    filled = 0
    for record in records:
        if filled + len(record.example.tokens) > length:
            if len(rows) == count:
                yield rows
                rows = []
            rows.append([])
            filled = 0
        rows[-1].append(record)
        filled += len(record.example.tokens)
    if rows[-1]:
        yield [*rows, *([[]] * (count - len(rows)))]
