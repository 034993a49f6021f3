"""Samples of images: what sample.py draws from a run of a diffusion transformer."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
from jaxtyping import Array

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
from trainer.session import Session
from trainer.weights.adapters import restore_model

DEFAULT_GUIDANCE = 1.5
CLASSES_SHOWN = 10
LEAST_PIXELS = 64
"""Width of an image in a PNG file, at least."""


def sample_images(
    run_dir: Path, config: DiTTrainConfig, options: ImageOptions, session: Session
) -> None:
    """Draws images with the model of a run, and writes all of them to one file, a new one."""
    labels = rows_of_grid(config, options)
    is_latent = config.data.holds_latents
    what = "latents, which are no pixels" if is_latent else "images"
    suffixes = (".npz",) if is_latent else (".png", ".npz")
    out = file_to_write(run_dir, options.out, suffixes, what, session)
    rows = min(options.batch_size, len(labels))
    program = program_to_draw(config, session, Denoising, rows)
    model, target = config.model, config.diffusion.target
    guidance = options.guidance
    if guidance is None:
        is_guided = config.diffusion.dropout and model.classes
        guidance = DEFAULT_GUIDANCE if is_guided else 1.0
    if guidance != 1 and not (config.diffusion.dropout and model.classes):
        raise InputError(
            "guidance other than 1 needs a model that has learnt to draw with a class and without; "
            f"got guidance={guidance}, classes={model.classes}, dropout="
            f"{config.diffusion.dropout}. Use guidance=1."
        )
    sampler = options.sampler or SAMPLERS[target][0]

    def draw_sample(predict: Predict, noise: Array) -> Array:
        return sample(target, sampler, predict, noise, options.steps)

    drawing = Drawing(program, sample=draw_sample, guidance=guidance)
    shapes = program.state_shapes.model
    weights, step = restore_model(run_dir, config, shapes, note=session.note)
    session.note(f"model: {run_dir} after step {step}")
    given = np.array(labels, np.int32)
    without = np.full_like(given, model.classes)
    drawn = drawing.draw(weights, given=given, without=without, seed=options.seed)
    # Back to the scale of the data.
    images = [x / np.float32(config.data.latent_scale) for x in drawn]

    def write(file: IO[bytes]) -> None:
        if out.suffix == ".npz":
            np.savez(file, latents=np.stack(images), labels=np.array(labels))
        else:
            pixels = [to_pixels(image) for image in images]
            scale = options.scale or math.ceil(LEAST_PIXELS / pixels[0].shape[1])
            save_grid(pixels, file, columns=options.samples, scale=scale)

    if session.is_first:
        what = "latents" if is_latent else "images"
        session.note(f"{len(images)} {what}: {save_new(out, write)}")


def program_to_draw(
    config: Any, session: Session, objective: Callable[[Any], Objective], rows: int
) -> Program:
    """The program of a run on another mesh, to draw `rows` examples at a time, rounded up to a
    multiple of the data degree."""
    attention = st.Attention(session.mesh, **config.attention_of_model)
    data = attention.degrees.data
    for_drawing = dataclasses.replace(
        config,
        batch_size=math.ceil(rows / data) * data,
        mesh=MeshConfig(data=data),
        zero=3 if config.zero == 3 else 0,
        zero_axes=SHARDED_AXES,
        gradient_accumulation=1,
        remat="none",
        offload=False,
    )
    return Program(for_drawing, attention, objective(for_drawing))


def save_new(path: Path, write: Callable[[IO[bytes]], None]) -> Path:
    """Writes a file in a place where there is none, and returns the place: if `path` exists, it is
    name-2.suffix, name-3.suffix and so on. No reader sees a part of the file."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            write(file)
        place, number = path, 1
        while True:
            try:
                place.touch(exist_ok=False)  # Another program may look for a name now.
                return part.replace(place)
            except FileExistsError:
                number += 1
                place = path.with_stem(f"{path.stem}-{number}")
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
