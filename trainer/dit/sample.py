"""Samples of images: what sample.py draws from a run of a diffusion transformer."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float32

import startrail_jax as st
from startrail_jax.errors import InputError
from trainer.config import SHARDED_AXES, MeshConfig
from trainer.dit.config import DiTTrainConfig, ImageOptions
from trainer.dit.diffusion import SAMPLERS, Predict, sample
from trainer.dit.drawing import Drawing, save_grid, to_pixels
from trainer.dit.objective import Denoising
from trainer.errors import StorageError
from trainer.objective import Objective
from trainer.parallel.step import Program
from trainer.run.folder import writing
from trainer.session import Session
from trainer.weights.adapters import restore_model

DEFAULT_GUIDANCE = 1.5
CLASSES_SHOWN = 10
LEAST_PIXELS = 64
"""Width of an image in a PNG file, at least."""


def sample_images(
    run_dir: Path, config: DiTTrainConfig, options: ImageOptions, mesh: Mesh, session: Session
) -> None:
    """Draws images with the model of a run, and writes all of them to one file, a new one."""
    labels = rows_of_grid(config, options)
    what = "images"
    if config.data.holds_latents:
        what = "latents, which are no pixels"
    out = file_to_write(run_dir, options.out, _suffixes(config), what, session)
    rows = min(options.batch_size, len(labels))
    program = program_to_draw(config, mesh, Denoising, rows)
    grid = _GridOfClasses(program, options)
    shapes = program.state_shapes.model
    weights, step = restore_model(run_dir, config, shapes, note=session.note)
    session.note(f"model: {run_dir} after step {step}")
    images = grid.draw(weights)
    if session.is_first:
        place = save_new(out, lambda file: grid.write(images, file, out.suffix))
        session.note(
            f"{len(images)} {'latents' if config.data.holds_latents else 'images'}: {place}"
        )


class GridSampler:
    """Draws images while a run trains, into its folder `samples`: a `trainer.task.Sampler`."""

    def __init__(self, program: Program) -> None:
        """Compiles nothing yet."""
        config: Any = program.config
        self._config = config
        options = ImageOptions(samples=config.sample.images)
        count = min(options.batch_size, len(rows_of_grid(config, options)))
        attention = program.attention
        drawing = _config_to_draw(config, attention, count)
        self._grid = _GridOfClasses(Program(drawing, attention, Denoising(drawing)), options)

    def __call__(self, weights: Any, step: int, interrupted: Callable[[], bool]) -> tuple[str, ...]:
        """Writes step-N.png, or latents to step-N.npz."""
        if interrupted():
            return ()
        images = self._grid.draw(weights)
        run_dir, suffix = self._config.run_dir, _suffixes(self._config)[0]
        path = run_dir / "samples" / f"step-{step}{suffix}"
        if jax.process_index() == 0:
            with writing(run_dir):
                path.parent.mkdir(exist_ok=True)
                with _written_beside(path, lambda x: self._grid.write(images, x, suffix)) as part:
                    part.replace(path)
        return (f"{len(images)} {'latents' if suffix == '.npz' else 'images'}: {path}",)


class _GridOfClasses:
    """Images of some classes, which a program draws."""

    def __init__(self, program: Program, options: ImageOptions) -> None:
        config: Any = program.config
        self._config, self._options = config, options
        self._labels = rows_of_grid(config, options)
        model, target = config.model, config.diffusion.target
        is_guided = bool(config.diffusion.dropout and model.classes)
        guidance = options.guidance
        if guidance is None:
            guidance = DEFAULT_GUIDANCE if is_guided else 1.0
        if guidance != 1 and not is_guided:
            raise InputError(
                "guidance other than 1 needs a model that has learnt to draw with a class and "
                f"without; got guidance={guidance}, classes={model.classes}, dropout="
                f"{config.diffusion.dropout}. Use guidance=1."
            )
        sampler = options.sampler or SAMPLERS[target][0]

        def draw_sample(predict: Predict, noise: Array) -> Array:
            return sample(target, sampler, predict, noise, options.steps)

        self._drawing = Drawing(program, sample=draw_sample, guidance=guidance)

    def draw(self, weights: Any) -> list[Float32[np.ndarray, "F H W C"]]:
        """The images, row by row of the grid, in the scale of the data."""
        given = np.array(self._labels, np.int32)
        without = np.full_like(given, self._config.model.classes)
        seed = self._options.seed
        drawn = self._drawing.draw(weights, given=given, without=without, seed=seed)
        return [x / np.float32(self._config.data.latent_scale) for x in drawn]

    def write(
        self, images: Sequence[Float32[np.ndarray, "F H W C"]], file: IO[bytes], suffix: str
    ) -> None:
        """Writes a PNG file, or an *.npz file of images or latents and their labels."""
        if suffix == ".npz":
            np.savez(file, latents=np.stack(images), labels=np.array(self._labels))
            return
        pixels = [to_pixels(image) for image in images]
        scale = self._options.scale or math.ceil(LEAST_PIXELS / pixels[0].shape[1])
        save_grid(pixels, file, columns=self._options.samples, scale=scale)


def _suffixes(config: DiTTrainConfig) -> tuple[str, ...]:
    """Kinds of files of samples, the default first."""
    return (".npz",) if config.data.holds_latents else (".png", ".npz")


def program_to_draw(
    config: Any, mesh: Mesh, objective: Callable[[Any], Objective], rows: int
) -> Program:
    """The program of a run on another mesh, to draw `rows` examples at a time, rounded up to a
    multiple of the data degree."""
    attention = st.Attention(mesh, **config.attention_of_model)
    for_drawing = dataclasses.replace(
        _config_to_draw(config, attention, rows),
        mesh=MeshConfig(data=attention.degrees.data),
        zero=3 if config.zero == 3 else 0,
        zero_axes=SHARDED_AXES,
    )
    return Program(for_drawing, attention, objective(for_drawing))


def _config_to_draw(config: Any, attention: st.Attention, rows: int) -> Any:
    data = attention.degrees.data
    return dataclasses.replace(
        config,
        batch_size=math.ceil(rows / data) * data,
        gradient_accumulation=1,
        remat="none",
        offload=False,
    )


def save_new(path: Path, write: Callable[[IO[bytes]], None]) -> Path:
    """Writes a file in a place where there is none, and returns the place: if `path` exists, it is
    name-2.suffix, name-3.suffix and so on. No reader sees a part of the file."""
    with _written_beside(path, write) as part:
        place, number = path, 1
        while True:
            try:
                place.touch(exist_ok=False)  # Another program may look for a name now.
                return part.replace(place)
            except FileExistsError:
                number += 1
                place = path.with_stem(f"{path.stem}-{number}")


@contextmanager
def _written_beside(path: Path, write: Callable[[IO[bytes]], None]) -> Iterator[Path]:
    """A whole file beside a path, to be moved there."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            write(file)
        yield part
    finally:
        part.unlink(missing_ok=True)


def rows_of_grid(config: DiTTrainConfig, options: ImageOptions) -> list[int]:
    """Class of every image, row by row of the grid."""
    count = config.model.classes
    wrong = [label for label in options.classes or () if not 0 <= label < count]
    if wrong:
        way_out = f"Choose from 0 to {count - 1}." if count else "Leave them out."
        raise InputError(
            f"--classes must be of the {count} classes of the model; got {wrong[0]}. {way_out}"
        )
    labels = range(min(count, CLASSES_SHOWN)) if options.classes is None else options.classes
    return [label for label in labels or [count] for _ in range(options.samples)]


def file_to_write(
    run_dir: Path, wanted: Path | None, suffixes: tuple[str, ...], what: str, session: Session
) -> Path:
    """The file to write, which is checked before anything is drawn: `wanted`, which must end in one
    of `suffixes`, or a default that ends in the first."""
    out = wanted or run_dir / f"samples{suffixes[0]}"
    if out.suffix not in suffixes:
        raise InputError(
            f"--out must end in {' or '.join(suffixes)} for {what}; got {str(out)!r}. Rename it."
        )
    if not out.parent.is_dir():
        raise InputError(
            f"--out must lie in a folder that exists; got {str(out)!r}. Make {out.parent}."
        )
    if session.is_first and wanted is not None and out.exists():
        raise InputError(
            f"--out must be a new file; got {str(out)!r}, which exists. Give another name, or "
            "remove it."
        )
    if session.is_first and not os.access(out.parent, os.W_OK):
        raise StorageError(
            f"--out must lie in a folder that can be written; got {str(out)!r}. Give another: "
            f"--out {out.name}."
        )
    return out
