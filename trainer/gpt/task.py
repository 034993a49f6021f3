"""The task of a language model. Imports no jax: `--help` must be fast."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
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
    with_scores,
    with_tokenizer,
    with_vocabulary,
)
from trainer.run.settings import CHECKPOINTS_FOLDER
from trainer.task import Exporter, InitialWeights, Sampler, Smaller, Task, with_rate_of_adapters


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
        if length.isdecimal() and config.sample.length >= int(length):
            sample = replace(config.sample, length=int(length) // 2)
            config = replace(config, sample=sample)
        folder = flag("--init-from")
        if folder is not None:
            config = with_model_of(Path(folder), config)
        if flag("--objective") == "reward":
            config = with_scores(config)
        return with_rate_of_adapters(config, flag)

    def after_flags(
        self, config: GPTTrainConfig, flag: Callable[[str], str | None]
    ) -> GPTTrainConfig:
        chosen = flag("--data.tokenizer") is not None
        # No recipe names a tokenizer: this one is from the config.json of a run.
        inherited = config.data.tokenizer is not None and not chosen
        config = with_tokenizer(config, by_user=chosen)
        if chosen and flag("--model.vocab-size") is None:
            config = with_vocabulary(config)
        asks = any(flag(name) is not None for name in ("--data.loss", "--objective"))
        is_new = asks and config.data.end_of_document is None
        # Without the flag, the pretrained model is from the config.json of a run too.
        of_run = not chosen and (inherited or flag("--init-from") is None)
        by_user = flag("--data.begin-of-document") is not None
        config = with_beginning(config, by_user=by_user, inherited=inherited)
        by_user = flag("--data.end-of-document") is not None
        return with_ending(config, by_user=by_user, inherited=of_run and not is_new)

    def make_objective(self, config: GPTTrainConfig) -> Any:
        from trainer.gpt.objective import NextToken, OfRollouts

        return NextToken(config) if config.row_loss is None else OfRollouts(config)

    def sizes(self, config: GPTTrainConfig) -> Any:
        from trainer.gpt.sizes import sizes_of

        return sizes_of(config)

    def smaller(self, config: GPTTrainConfig, to: Smaller) -> GPTTrainConfig:
        from trainer.gpt.smaller import smaller_gpt

        return smaller_gpt(config, to)

    def drawn_data(self, config: GPTTrainConfig, layout: Any) -> Dataset:
        from trainer.gpt.smaller import drawn_text

        return drawn_text(config, layout)

    def settled(self, data: Dataset, config: GPTTrainConfig, layout: Any) -> Dataset:
        from trainer.gpt.smaller import with_drawn_experts

        return with_drawn_experts(data, config, layout)

    def inputs(self, config: GPTTrainConfig) -> list[tuple[str, Path | None]]:
        # A run has a copy of some tokenizers.
        names = ("validation_path", "chat_template")
        others = [(f"data.{name}", getattr(config.data, name)) for name in names]
        return [*(("data.path", path) for path in config.data.path), *others]

    def open_data(self, config: GPTTrainConfig, layout: Any) -> Dataset:
        from trainer.gpt.dataset import open_dataset

        path, remark = config.data.tokenizer, ""
        if copy := kept_tokenizer(path, config, config.run_dir):
            config = replace(config, data=replace(config.data, tokenizer=copy))
            remark += f"; tokenizer: {copy}, as {path} is gone"
        data = open_dataset(config, layout)
        return replace(data, description=data.description + remark)

    def initial_weights(
        self, config: GPTTrainConfig, weights: Any
    ) -> AbstractContextManager[InitialWeights | None]:
        from trainer.checkpoints.reading import newest_first
        from trainer.gpt.pretrained.initial import open_pretrained

        if config.init_from is None or any(newest_first(config.run_dir / CHECKPOINTS_FOLDER)):
            return nullcontext()
        return open_pretrained(config, weights)

    def sample(
        self, run_dir: Path, config: GPTTrainConfig, options: TextOptions, mesh: Any, session: Any
    ) -> None:
        from trainer.gpt.sample import sample_text

        sample_text(run_dir, config, options, mesh, session)

    def sampler(self, program: Any, data: Any) -> Sampler | None:
        from trainer.gpt.sample import Continuation

        return Continuation(program, data.corpus) if program.config.sample.length else None

    def exporter(self, config: GPTTrainConfig, note: Callable[[str], None]) -> Exporter | None:
        from trainer.gpt.export.during import StepExporter

        return None if config.export.every is None else StepExporter(config, note)
