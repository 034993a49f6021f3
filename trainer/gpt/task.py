"""The task of a language model. Imports no jax: `--help` must be fast."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from trainer.data.dataset import Dataset
from trainer.gpt.config import GPTTrainConfig, TextOptions
from trainer.gpt.pretrained.defaults import (
    kept_tokenizer,
    pretrained,
    with_beginning,
    with_ending,
    with_model_of,
    with_tokenizer,
    with_vocabulary,
)
from trainer.run.settings import CHECKPOINTS_FOLDER
from trainer.task import InitialWeights, Task, with_rate_of_adapters


class GPTTask(Task[GPTTrainConfig, TextOptions]):
    """A GPT that learns to predict the next token, and then continues texts."""

    config_class = GPTTrainConfig
    options_class = TextOptions
    example_flags = "--samples 3 --temperature 0.5"

    def pretrained(self, folder: Path) -> GPTTrainConfig:
        return pretrained(folder)

    def before_flags(
        self, config: GPTTrainConfig, flag: Callable[[str], str | None]
    ) -> GPTTrainConfig:
        length = flag("--seq-len") or ""
        if length.isdecimal() and config.sample_length >= int(length):
            config = replace(config, sample_length=int(length) // 2)
        folder = flag("--init-from")
        if folder is not None:
            config = with_model_of(Path(folder), config)
        return with_rate_of_adapters(config, flag)

    def after_flags(
        self, config: GPTTrainConfig, flag: Callable[[str], str | None]
    ) -> GPTTrainConfig:
        chosen = flag("--data.tokenizer") is not None
        # No recipe names a tokenizer: this one is from the config.json of a run.
        inherited = config.data.tokenizer is not None and not chosen
        config = with_tokenizer(config, given=chosen)
        if chosen and flag("--model.vocab-size") is None:
            config = with_vocabulary(config)
        is_new = flag("--data.loss") is not None and config.data.end_of_document is None
        # Without the flag, the pretrained model is from the config.json of a run too.
        of_run = not chosen and (inherited or flag("--init-from") is None)
        given = flag("--data.begin-of-document") is not None
        config = with_beginning(config, given=given, inherited=inherited)
        given = flag("--data.end-of-document") is not None
        return with_ending(config, given=given, inherited=of_run and not is_new)

    def make_objective(self, config: GPTTrainConfig) -> Any:
        from trainer.gpt.objective import NextToken

        return NextToken(config)

    def inputs(self, config: GPTTrainConfig) -> dict[str, Path | None]:
        # A run has a copy of some tokenizers.
        names = ("path", "validation_path", "chat_template")
        return {f"data.{name}": getattr(config.data, name) for name in names}

    def open_data(self, config: GPTTrainConfig, layout: Any) -> Dataset:
        path, remark = config.data.tokenizer, ""
        if copy := kept_tokenizer(path, config, config.run_dir):
            config = replace(config, data=replace(config.data, tokenizer=copy))
            remark += f"; tokenizer: {copy}, as {path} is gone"
        data: Any = self._open_data(config, layout)
        return replace(data, description=data.description + remark)

    def _open_data(self, config: GPTTrainConfig, layout: Any) -> Dataset:
        from trainer.gpt.batches import Sequences, TextDataset, collate
        from trainer.gpt.chat.forms import has_examples
        from trainer.gpt.corpus import open_corpus
        from trainer.gpt.documents import first_lengths, hint, text_documents

        # Beside the run, so that the next run finds the tokens too.
        data, cache = config.data, config.run_dir.parent / "tokens"
        if has_examples(data):
            from trainer.gpt.chat.corpus import open_examples

            sizes = {"vocab_size": config.model.vocab_size, "seq_len": config.seq_len}
            return open_examples(data, layout, cache=cache, **sizes)
        corpus = open_corpus(data, vocab_size=config.model.vocab_size, cache=cache)
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

    def initial_weights(
        self, config: GPTTrainConfig, weights: Any
    ) -> AbstractContextManager[InitialWeights | None]:
        from trainer.checkpoints.reading import newest_first
        from trainer.gpt.pretrained.initial import open_pretrained

        if config.init_from is None or any(newest_first(config.run_dir / CHECKPOINTS_FOLDER)):
            return nullcontext()
        return open_pretrained(config, weights)

    def sample(
        self, run_dir: Path, config: GPTTrainConfig, options: TextOptions, session: Any
    ) -> None:
        from trainer.gpt.sample import sample_text

        sample_text(run_dir, config, options, session)

    def sample_after_training(
        self, program: Any, weights: Any, data: Any, interrupted: Callable[[], bool]
    ) -> Iterable[str]:
        from trainer.gpt.sample import continue_text

        if not program.config.sample_length:
            return ()
        prompt, text = continue_text(program, weights, data.corpus, interrupted=interrupted)
        return f"--- held-out text\n{prompt}", f"--- continued by the model\n{text}"
