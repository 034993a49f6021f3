"""The task of a Wan. Imports no jax: `--help` must be fast."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from trainer.config import OptimizerConfig
from trainer.data.dataset import Dataset
from trainer.dit.config import with_sizes
from trainer.dit.wan.config import FlowConfig, VideoOptions, WanTrainConfig
from trainer.dit.wan.config_json import folder_of, is_of_diffusers, range_of, read_config
from trainer.run.settings import CHECKPOINTS_FOLDER
from trainer.task import InitialWeights, Smaller, Task, with_rate_of_adapters


class WanTask(Task[WanTrainConfig, VideoOptions]):
    """A Wan that learns to remove noise from the latents of videos, and then draws videos."""

    config_class = WanTrainConfig
    options_class = VideoOptions

    def pretrained(self, folder: Path) -> WanTrainConfig | None:
        if not is_of_diffusers(folder) and folder_of(folder) is None:
            return None
        return WanTrainConfig(
            model=read_config(folder),
            diffusion=FlowConfig(shift=3.0, range=range_of(folder)),
            optimizer=OptimizerConfig(
                learning_rate=1e-5, final_share=1.0, weight_decay=0.01, beta2=0.999
            ),
            init_from=folder,
            steps=1000,
            batch_size=8,
            size=(21, 60, 104),
            zero=3,
            run_dir=Path("runs") / folder.resolve().name,
        )

    def before_flags(
        self, config: WanTrainConfig, flag: Callable[[str], str | None]
    ) -> WanTrainConfig:
        pretrained = flag("--init-from")
        if pretrained is not None:
            config = with_model_of(Path(pretrained), config)
        config = with_rate_of_adapters(config, flag)
        folder = flag("--data.path")
        if folder is None or config.data.path is not None or not Path(folder).is_dir():
            return config
        from trainer.dit.wan import clips

        if flag("--size") is not None:
            return config
        sizes = clips.sizes_of(clips.read_lines(Path(folder)))
        return with_sizes(config, Path(folder), sizes, flag)

    def initial_weights(
        self, config: WanTrainConfig, weights: Any
    ) -> AbstractContextManager[InitialWeights | None]:
        from trainer.checkpoints.reading import newest_first
        from trainer.dit.wan.pretrained import open_wan

        if config.init_from is None or any(newest_first(config.run_dir / CHECKPOINTS_FOLDER)):
            return nullcontext()
        return open_wan(config, weights)

    def make_objective(self, config: WanTrainConfig) -> Any:
        from trainer.dit.wan.objective import VideoFlow

        return VideoFlow(config)

    def sizes(self, config: WanTrainConfig) -> Any:
        from trainer.dit.wan.sizes import sizes_of

        return sizes_of(config)

    def smaller(self, config: WanTrainConfig, to: Smaller) -> WanTrainConfig:
        from trainer.dit.wan.smaller import smaller_wan

        return smaller_wan(config, to)

    def drawn_data(self, config: WanTrainConfig, layout: Any) -> Dataset:
        from trainer.dit.wan.smaller import drawn_clips

        return drawn_clips(config, layout)

    def inputs(self, config: WanTrainConfig) -> list[tuple[str, Path | None]]:
        return [("data.path", config.data.path)]

    def open_data(self, config: WanTrainConfig, layout: Any) -> Dataset:
        from trainer.dit.wan.batches import clip_batch
        from trainer.dit.wan.clips import open_clips

        return open_clips(config, partial(clip_batch, config=config, layout=layout))

    def sample(
        self, run_dir: Path, config: WanTrainConfig, options: VideoOptions, mesh: Any, session: Any
    ) -> None:
        from trainer.dit.wan.sample import sample_videos

        sample_videos(run_dir, config, options, mesh, session)


def with_model_of(folder: Path, config: WanTrainConfig) -> WanTrainConfig:
    """A config with the model of a folder; what config.json does not say stays as it is."""
    model, own = read_config(folder), config.model
    if {model.first_frame, own.first_frame} <= {"none", "time"}:
        model = replace(model, first_frame=own.first_frame)
    model = replace(model, text_tokens=own.text_tokens, dtype=own.dtype)
    diffusion = replace(config.diffusion, range=range_of(folder))
    return replace(config, model=model, diffusion=diffusion, init_from=folder)
