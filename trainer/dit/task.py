"""The task of a diffusion transformer. Imports no jax: `--help` must be fast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from trainer.data.dataset import Dataset
from trainer.dit.config import DiTTrainConfig, ImageOptions, with_sizes
from trainer.task import Sampler, Smaller, Task


class DiTTask(Task[DiTTrainConfig, ImageOptions]):
    """A diffusion transformer that learns to remove noise from images, and then draws images."""

    config_class = DiTTrainConfig
    options_class = ImageOptions
    example_flags = "--samples 10 --seed 1"

    def before_flags(
        self, config: DiTTrainConfig, flag: Callable[[str], str | None]
    ) -> DiTTrainConfig:
        folder = flag("--data.path")
        if folder is None or config.data.path is not None or not Path(folder).is_dir():
            return config
        from trainer.dit.encoded_images import ENCODED, extent_of, read_about

        about, path = read_about(Path(folder) / ENCODED), Path(folder)
        sizes, text_tokens = extent_of(path)
        # What a flag gives is set later, and compared with the folder when it is opened.
        classes = config.model.classes if about.classes is None else len(about.classes)
        model = replace(config.model, channels=about.channels, classes=classes)
        data = replace(config.data, path=path, pixels=about.pixels)
        if about.text_dim is not None and flag("--model.text-dim") != "None":
            model = replace(model, classes=0, text_dim=about.text_dim)
            data = replace(data, text_tokens=max(text_tokens, 1))
        config = replace(config, model=model, data=data)
        return config if flag("--size") else with_sizes(config, path, sizes, flag)

    def make_objective(self, config: DiTTrainConfig) -> Any:
        from trainer.dit.objective import Denoising

        return Denoising(config)

    def sizes(self, config: DiTTrainConfig) -> Any:
        from trainer.dit.sizes import sizes_of

        return sizes_of(config)

    def smaller(self, config: DiTTrainConfig, to: Smaller) -> DiTTrainConfig:
        from trainer.dit.smaller import smaller_dit

        return smaller_dit(config, to)

    def drawn_data(self, config: DiTTrainConfig, layout: Any) -> Dataset:
        from trainer.dit.smaller import drawn_images

        return drawn_images(config, layout)

    def inputs(self, config: DiTTrainConfig) -> list[tuple[str, Path | None]]:
        return [("data.path", config.data.path)]

    def open_data(self, config: DiTTrainConfig, layout: Any) -> Dataset:
        from trainer.dit.batches import image_batch
        from trainer.dit.images import open_images

        return open_images(config, partial(image_batch, config=config, layout=layout))

    def sampler(self, program: Any, data: Any) -> Sampler | None:
        from trainer.dit.sample import GridSampler

        return None if program.config.sample.every is None else GridSampler(program, data)

    def sample(
        self, run_dir: Path, config: DiTTrainConfig, options: ImageOptions, mesh: Any, session: Any
    ) -> None:
        from trainer.dit.sample import sample_images

        sample_images(run_dir, config, options, mesh, session)
