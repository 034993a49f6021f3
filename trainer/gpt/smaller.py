"""A smaller run of a language model with the same kinds of layers, and random data for it.

Imports no jax at first: a task does.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from models.config import GPTConfig
from trainer.gpt.config import GPTTrainConfig
from trainer.gpt.objectives.distill import TEACHER
from trainer.gpt.objectives.preference import REFERENCES
from trainer.gpt.objectives.replay import EXPERTS, Replay
from trainer.gpt.rollouts.records import LISTS
from trainer.task import Smaller

_DIM = 16
"""Channels of a head, where they need not be those of the run."""


def smaller_gpt(config: GPTTrainConfig, to: Smaller) -> GPTTrainConfig:
    """`Task.smaller`."""
    model = _one_of_each(config.model)
    share = min(to.tokens or config.seq_len, config.seq_len) / config.seq_len
    length = round(config.seq_len * share)

    def shorter(window: Any, least: int) -> Any:
        is_within = isinstance(window, int) and window < config.seq_len
        return max(least, round(window * share)) if is_within else window

    model = replace(model, windows=tuple(shorter(x, 3) for x in model.windows))
    data = replace(config.data, longest_document=shorter(config.data.longest_document, 4))
    if data.longest_document is not None and data.longest_document >= length:
        data = replace(data, longest_document=None)
    lora = config.lora
    if to.channels is not None:
        model = _narrow(model, to.channels, least_words=_least_words(config), keeps=to.head_dim)
        if lora.rank is not None:
            rank = min(lora.rank, 8)
            lora = replace(lora, rank=rank, alpha=rank * lora.scale)
    return replace(
        config,
        model=model,
        data=data,
        lora=lora,
        seq_len=length,
        sample=replace(config.sample, length=0, every=None),
    )


def _one_of_each(model: GPTConfig) -> GPTConfig:
    """A layer of each kind, in the order of the model; two, if there is one kind."""
    patterns = zip(
        model.layer_mixers,
        model.layer_feed_forwards,
        model.layer_windows,
        model.layer_bases,
        strict=True,
    )
    kinds = [*dict.fromkeys(patterns)]
    if len(kinds) == 1:
        kinds *= min(model.layers, 2)
    mixers, feeds, windows, bases = zip(*kinds, strict=True)
    named: Any = [tuple("none" if x is None else x for x in xs) for xs in (windows, bases)]
    return replace(
        model,
        layers=len(kinds),
        mixers=mixers,
        feed_forwards=feeds,
        windows=named[0],
        rope=replace(model.rope, bases=named[1]),
    )


def _narrow(model: GPTConfig, channels: int, *, least_words: int, keeps: bool) -> GPTConfig:
    """The model with so many channels, and with all its heads and experts. It keeps the channels of
    heads, or has few."""

    def fewer(channels: int) -> int:
        return channels if keeps else min(channels, _DIM)

    rope = model.rope
    dim = fewer(model.head_dim)
    if dim < model.head_dim and rope.channels is not None:
        rope = replace(rope, channels=max(2, rope.channels * dim // model.head_dim // 2 * 2))
    linear, ssd, own = model.linear, model.ssd, model.global_attention
    if "global_attention" in model.layer_mixers:
        whole = own.head_dim or model.head_dim
        own = replace(own, head_dim=fewer(whole))
        if own.rotary_pairs is not None:
            pairs = own.rotary_pairs * fewer(whole) // whole
            most = (rope.channels or fewer(whole)) // 2
            own = replace(own, rotary_pairs=min(max(1, pairs), most))
    latent = model.latent
    if "latent" in model.layer_mixers:
        key_dim = latent.key_dim or model.head_dim
        latent = replace(
            latent,
            key_dim=fewer(key_dim),
            value_dim=fewer(latent.value_dim or key_dim),
            rank=min(latent.rank, channels),
            query_rank=latent.query_rank and min(latent.query_rank, channels),
            rotary_dim=fewer(latent.rotary_dim),
        )
    if "linear" in model.layer_mixers:
        key_dim = linear.key_dim or model.head_dim
        value_dim = fewer(linear.value_dim or key_dim)
        linear = replace(linear, key_dim=fewer(key_dim), value_dim=value_dim)
    kda = model.kda
    if "kda" in model.layer_mixers:
        rank = kda.rank and min(kda.rank, channels)
        kda = replace(kda, head_dim=fewer(kda.head_dim or model.head_dim), rank=rank)
    if "ssd" in model.layer_mixers:
        head_dim = fewer(ssd.head_dim or model.head_dim)
        ssd = replace(ssd, head_dim=head_dim, state_dim=fewer(ssd.state_dim))
    experts = model.experts
    if "experts" in model.layer_feed_forwards:
        shared = min(experts.shared_width, channels)
        experts = replace(experts, width=channels, shared_width=shared)
    return replace(
        model,
        vocab_size=min(model.vocab_size, max(256, least_words)),
        width=min(model.width, channels),
        mlp_width=min(model.mlp_width, channels),
        rope=rope,
        linear=linear,
        kda=kda,
        ssd=ssd,
        global_attention=own,
        latent=latent,
        experts=experts,
        head_dim=dim,
    )


def _least_words(config: GPTTrainConfig) -> int:
    """Words that the objective needs."""
    return 2 * config.distill.top_k if config.objective == "distill" else 0


def with_drawn_experts(data: Any, config: GPTTrainConfig, layout: Any) -> Any:
    """`Task.settled`."""
    if "experts" not in config.model.layer_feed_forwards or not config.data.mask_documents:
        return data
    if config.replay is not None:  # The data name them.
        return data
    replay = Replay.of_model(config.model)
    documents = data.documents
    if documents is not None:
        read_before = documents.read

        def read(number: int) -> Any:
            example, rng = read_before(number), np.random.default_rng((2, number))
            chosen = {EXPERTS: _experts(rng, len(example.tokens), replay)}
            return example._replace(numbers={**(example.numbers or {}), **chosen})

        arrays = {**(documents.numbers or {}), **replay.arrays}
        documents = replace(documents, read=read, numbers=arrays)

    def collate(examples: list[Any], numbers: list[int]) -> Any:
        batch = data.collate(examples, numbers)
        rows, length = batch.tokens.shape
        natural = [_experts(np.random.default_rng((1, n % 2**31)), length, replay) for n in numbers]
        chosen = layout.permute(np.stack(natural)) if rows else np.zeros((0, length, 0, 0))
        return batch._replace(numbers={**(batch.numbers or {}), EXPERTS: chosen})

    return replace(data, collate=collate, documents=documents)


def _arrays(config: GPTTrainConfig) -> Any:
    """The numbers that random documents have: those of the objective, and experts."""
    if "experts" not in config.model.layer_feed_forwards:
        return config.arrays
    return (config.arrays or {}) | Replay.of_model(config.model).arrays


def _experts(rng: np.random.Generator, length: int, replay: Replay) -> Any:
    """Experts of tokens, each once, [length, layers, k]."""
    order = rng.random((length, replay.layers, replay.count)).argsort(axis=-1)
    return order[..., : replay.top_k].astype(replay.arrays[EXPERTS][0])


def drawn_text(config: GPTTrainConfig, layout: Any) -> Any:
    """`Task.drawn_data`."""
    from trainer.data.dataset import Dataset, Drawn
    from trainer.gpt.batches import collate
    from trainer.gpt.documents import TokenDocuments, sizes_of
    from trainer.gpt.rollouts.dataset import collate_rollouts

    words, length = config.model.vocab_size, config.seq_len
    common: dict[str, Any] = {"held_out": [], "description": "random tokens", "loss_unit": ""}
    if not config.data.mask_documents:
        row = Drawn(
            make=lambda rng: rng.integers(words, size=length + 1, dtype=np.int32), seed=config.seed
        )
        return Dataset(train=row, collate=partial(collate, layout=layout), **common)
    rows, documents = Drawn(make=partial(_row, config), seed=config.seed), None
    if config.whole_documents:
        every = [example for n in range(len(rows)) for example in rows[n]]
        documents = TokenDocuments(
            sizes=sizes_of(every),
            read=every.__getitem__,
            numbers=_arrays(config),
            trees=config.shares_prefixes,
        )
    options: Any = {"arrays": _arrays(config), "trees": config.shares_prefixes}
    join = partial(collate_rollouts, layout=layout, length=length, **options)
    return Dataset(train=rows, documents=documents, collate=join, **common)


def _row(config: GPTTrainConfig, rng: np.random.Generator) -> list[Any]:
    """Examples of a row: short ones, which lie on one device, and ones over several."""
    length, found = config.seq_len, []
    longest = min(config.data.longest_document or length, length)
    left = length - int(rng.integers(0, max(length // 8, 2)))  # The rest is padding.
    is_pair = getattr(config.row_loss, "form", None) == "pairs"
    least = 4 if is_pair else 2
    while left >= least:
        most = longest if rng.random() < 0.3 else max(longest // 8, least)
        count = int(min(rng.integers(least, max(most, least) + 1), left))
        found.append(_example(config, rng, count, is_pair=is_pair))
        left -= count
    return found


def _example(config: GPTTrainConfig, rng: np.random.Generator, count: int, *, is_pair: bool) -> Any:
    from trainer.gpt.batches import TokenExample

    words, loss = config.model.vocab_size, config.row_loss
    tokens, targets = rng.integers(words, size=(2, count)).astype(np.int32)
    weights = (rng.random(count) < 0.8).astype(np.float32)
    documents = ends = None
    if is_pair or config.shares_prefixes:
        answers = 2 if is_pair else int(min(rng.integers(1, 5), count))
        borders = np.sort(rng.permutation(np.arange(1, count))[: answers - 1])
        borders = np.append(borders, count)
        lengths = np.diff(borders, prepend=0)
        documents = np.repeat(np.arange(answers, dtype=np.int32), lengths)
        if getattr(loss, "counts", "targets") == "ends":
            weights[:] = 0
        weights[borders - 1] = 1
        if config.shares_prefixes:
            ends = np.repeat(borders, lengths).astype(np.int32)
            ends[: rng.integers(borders[0])] = count
    weights[-1] = 1
    total = weights.sum()
    usual = -np.log(words) + 0.3 * rng.standard_normal((len(LISTS), count))
    constants = {
        "advantages": rng.standard_normal(),
        "rewards": rng.standard_normal(),
        "counts": total,
        **{name: -total / 2 * np.log(words) + rng.standard_normal() for name in REFERENCES},
    }
    numbers: dict[str, Any] = dict(zip(LISTS, usual.astype(np.float32), strict=True))
    numbers |= {name: np.full(count, x, np.float32) for name, x in constants.items()}
    if config.objective == "distill":
        numbers |= _teacher(rng, count, words, config.distill.top_k)
    arrays = _arrays(config) or {}
    if EXPERTS in arrays:
        numbers[EXPERTS] = _experts(rng, count, Replay.of_model(config.model))
    adds_to_one = loss is not None and loss.mean_over == "examples"
    return TokenExample(
        tokens,
        targets,
        (weights / total).astype(np.float32) if adds_to_one else weights,
        documents,
        {name: numbers[name] for name in arrays} or None,
        ends,
    )


def _teacher(rng: np.random.Generator, count: int, words: int, top_k: int) -> dict[str, Any]:
    """What is read of a teacher."""
    logits = rng.standard_normal((count, words))
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    ids = np.argsort(-logprobs, axis=-1)[:, :top_k].astype(np.int32)
    kept = np.take_along_axis(logprobs, ids, axis=-1)
    rest = np.log1p(-np.exp(kept).sum(-1))
    values = ids, kept.astype(np.float32), rest.astype(np.float32)
    return dict(zip(TEACHER, values, strict=True))
