"""Samples of images: what sample.py draws from a run of a diffusion transformer."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32

import startrail_jax as st
from startrail_jax.errors import InputError
from trainer.config import SHARDED_AXES, MeshConfig
from trainer.data.dataset import Dataset
from trainer.dit.batches import texts_of
from trainer.dit.config import DiTTrainConfig, ImageOptions, name_of, read_size
from trainer.dit.diffusion import SAMPLERS, Predict, sample
from trainer.dit.drawing import Drawing, save_grid, to_pixels
from trainer.dit.encoded_images import KEPT, About, read_about
from trainer.dit.images import open_images
from trainer.dit.objective import Denoising, ImageRequest
from trainer.dit.texts import TextEncoder, digest_of_encoder
from trainer.dit.vae import ImageVae, digest_of_vae, vae_sizes
from trainer.errors import StorageError
from trainer.objective import Objective
from trainer.parallel.step import Program
from trainer.run.folder import writing
from trainer.session import Session
from trainer.weights.adapters import restore_model

DEFAULT_GUIDANCE = 1.5
ROWS_SHOWN = 10
LEAST_PIXELS = 64
"""Width of an image in a PNG file, at least."""


def sample_images(
    run_dir: Path, config: DiTTrainConfig, options: ImageOptions, mesh: Mesh, session: Session
) -> None:
    """Draws images with the model of a run, and writes all of them to one file, a new one."""
    kept = run_dir / KEPT
    about = read_about(kept) if kept.is_file() else None
    run, config = config, config.of_size(size_to_draw(config, options.size))
    suffixes, what = _suffixes(config), "images"
    if options.decode is not None:
        _check_decoder(config, about, options.decode, session)
        suffixes, what = (".png",), "decoded images"
    elif config.data.holds_latents:
        what = "latents, which are no pixels"
    out = file_to_write(run_dir, options.out, suffixes, what, session)
    rows = _rows_to_draw(run, options, about, session)
    decode = None
    if options.decode is not None and session.is_first:
        vae = ImageVae(options.decode, option="--decode", device=options.decode_device)
        decode = vae.decode
    count = min(options.batch_size, len(rows.asked.labels))
    program = program_to_draw(config, mesh, Denoising, count)
    grid = _Grid(program, options, rows, decode)
    for name in rows.names:
        session.note(f"row: {name}")
    shapes = program.state_shapes.model
    weights, step = restore_model(run_dir, config, shapes, note=session.note)
    session.note(f"model: {run_dir} after step {step}")
    images = grid.draw(weights)
    if session.is_first:
        place = save_new(out, lambda file: grid.write(images, file, out.suffix))
        session.note(f"{len(images)} {'latents' if out.suffix == '.npz' else 'images'}: {place}")


class _GridRows(NamedTuple):
    """What is drawn: rows of a grid with `samples` images each."""

    names: list[str]
    """What is drawn in each row, if there is a name for it."""
    asked: ImageRequest
    """What each image is drawn of."""
    arrays: dict[str, Any]
    """The same as arrays of *.npz files."""


def _rows_to_draw(
    config: DiTTrainConfig, options: ImageOptions, about: About | None, session: Session
) -> _GridRows:
    """What sample.py draws."""
    if config.model.text_dim is None and options.prompt is not None:
        raise InputError(
            "--prompt is for a model that has learnt captions; got one with "
            f"classes={config.model.classes}, text_dim=None. Leave it out."
        )
    if config.model.text_dim is None or options.classes is not None:
        names = (about.classes if about is not None else None) or ()
        return _rows_of_classes(config, rows_of_grid(config, options, names), names)
    if options.prompt is None:
        return _rows_of_examples(open_images(config, list).held_out, options.samples)
    texts = _encoded(config, options, about, session)
    names = [repr(prompt) if prompt else "no text" for prompt in options.prompt]
    return _rows_of_texts(texts, names, [*options.prompt], options.samples)


def _encoded(
    config: DiTTrainConfig, options: ImageOptions, about: About | None, session: Session
) -> list[Float[np.ndarray, "_ D"]]:
    """The embedded tokens of `options.prompt`."""
    prompts, folder, text_dim = options.prompt or (), options.text_encoder, config.model.text_dim
    if folder is None:
        return [np.zeros((0, text_dim or 0), np.float32) for _ in prompts]
    encoder = TextEncoder(folder, device=options.decode_device)
    if encoder.sizes.text_dim != text_dim:
        raise InputError(
            f"--text-encoder must be that of the captions of the run, of {text_dim} channels; got "
            f"{encoder.sizes.text_dim} in {str(folder)!r}. Give the other folder."
        )
    if about is not None and digest_of_encoder(folder) != about.text_model:
        session.note(
            f"warning: {folder} has other files than the text encoder with which the captions were "
            "encoded"
        )
    return encoder.encode(prompts)


def _rows_of_classes(config: DiTTrainConfig, labels: list[int], names: Sequence[str]) -> _GridRows:
    """Rows of classes; `labels` are those of all images."""
    found = [
        f"class {label}, {names[label] if label < len(names) else 'no class'!r}"
        for label in (dict.fromkeys(labels) if names else ())
    ]
    asked = ImageRequest(np.array(labels, np.int32))
    return _GridRows(found, asked, {"labels": np.array(labels)})


def _rows_of_examples(examples: Any, samples: int) -> _GridRows:
    """Rows of the texts of the first examples."""
    found: dict[str, Any] = {}
    for number in range(min(len(examples), ROWS_SHOWN)):
        example = examples[number]
        caption = example.caption
        name = f"text of example {examples.numbers[number]}" if caption is None else repr(caption)
        found.setdefault(name, example)
    captions = [example.caption or name for name, example in found.items()]
    texts = [example.text for example in found.values()]
    return _rows_of_texts(texts, [*found], captions, samples)


def _rows_of_texts(
    texts: list[Any], names: list[str], captions: list[str], samples: int
) -> _GridRows:
    length = max(1, *map(len, texts))
    each = texts_of([text for text in texts for _ in range(samples)], length)
    # The only class of a model without classes.
    asked = ImageRequest(np.zeros(len(each.counts), np.int32), each)
    return _GridRows(names, asked, {"captions": np.repeat(captions, samples)})


def _check_decoder(
    config: DiTTrainConfig, about: About | None, folder: Path, session: Session
) -> None:
    """Raises ValueError unless a VAE can decode the latents of a run."""
    if about is None or not config.data.holds_latents:
        got = "images, which are pixels" if not config.data.holds_latents else "an *.npz file"
        raise InputError(
            "--decode is for a run on latents of a folder that `python -m trainer.dit.encode` has "
            f"written; got a run on {got}. Leave it out."
        )
    channels = vae_sizes(folder, "--decode").channels
    if channels != config.model.channels:
        raise InputError(
            "--decode must be the VAE with which the images were encoded, with latents of "
            f"{config.model.channels} channels; got {channels} in {str(folder)!r}. Give the other "
            "folder."
        )
    if digest_of_vae(folder) != about.model:
        session.note(
            f"warning: {folder} has another config or other weights than the VAE with which the "
            "images were encoded"
        )


class GridSampler:
    """Draws images while a run trains, into its folder `samples`: a `trainer.task.Sampler`."""

    def __init__(self, program: Program, data: Dataset) -> None:
        """Compiles nothing yet. Of `data`, a model of texts draws what is held out."""
        config: Any = program.config
        self._config = config
        options = ImageOptions(samples=config.sample.images)
        if config.model.text_dim is None:
            rows = _rows_of_classes(config, rows_of_grid(config, options), ())
        else:
            rows = _rows_of_examples(data.held_out, options.samples)
        count = min(options.batch_size, len(rows.asked.labels))
        attention = program.attention
        drawing = _config_to_draw(config, attention, count)
        drawing_program = Program(drawing, attention, Denoising(drawing))
        self._grid = _Grid(drawing_program, options, rows)

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


class _Grid:
    """Images of some classes or texts, which a program draws."""

    def __init__(
        self,
        program: Program,
        options: ImageOptions,
        rows: _GridRows,
        decode: Callable[[Any], Any] | None = None,
    ) -> None:
        config: Any = program.config
        self._config, self._options = config, options
        self._rows, self._decode = rows, decode
        model, target = config.model, config.diffusion.target
        is_guided = bool(config.diffusion.dropout and (model.classes or model.text_dim))
        guidance = options.guidance
        if guidance is None:
            guidance = DEFAULT_GUIDANCE if is_guided else 1.0
        if guidance != 1 and not is_guided:
            raise InputError(
                "guidance other than 1 needs a model that has learnt to draw with a class or text "
                f"and without; got guidance={guidance}, classes={model.classes}, "
                f"text_dim={model.text_dim}, dropout={config.diffusion.dropout}. Use guidance=1."
            )
        sampler = options.sampler or SAMPLERS[target][0]

        def draw_sample(predict: Predict, noise: Array) -> Array:
            return sample(target, sampler, predict, noise, options.steps)

        self._drawing = Drawing(program, sample=draw_sample, guidance=guidance)

    def draw(self, weights: Any) -> list[Float32[np.ndarray, "F H W C"]]:
        """The images, row by row of the grid, in the scale of the data."""
        given, seed = self._rows.asked, self._options.seed
        texts = given.texts
        if texts is not None:
            texts = texts._replace(counts=np.zeros_like(texts.counts))
        without = ImageRequest(np.full_like(given.labels, self._config.model.classes), texts)
        drawn = self._drawing.draw(weights, given=given, without=without, seed=seed)
        return [x / np.float32(self._config.data.latent_scale) for x in drawn]

    def write(
        self, images: Sequence[Float32[np.ndarray, "F H W C"]], file: IO[bytes], suffix: str
    ) -> None:
        """Writes a PNG file, or an *.npz file of images or latents and their labels or captions."""
        if suffix == ".npz":
            np.savez(file, latents=np.stack(images), **self._rows.arrays)
            return
        if self._decode is None:
            pixels = [to_pixels(image) for image in images]
        else:
            pixels = self._decode([image[0] for image in images])
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


def rows_of_grid(
    config: DiTTrainConfig, options: ImageOptions, names: Sequence[str] = ()
) -> list[int]:
    """Class of every image, row by row of the grid; `names` are those of the classes."""
    count = config.model.classes
    asked: Any = options.classes or ()
    numbers = {name: number for number, name in enumerate(names)}
    if unknown := [x for x in asked if isinstance(x, str) and x not in numbers]:
        near = difflib.get_close_matches(unknown[0], names, n=1)
        way_out = f"Did you mean {near[0]!r}?" if near else "Use numbers from 0."
        raise InputError(
            f"--classes must be numbers, or names of classes of the run; got {unknown[0]!r}. "
            f"{way_out}"
        )
    asked = [numbers[x] if isinstance(x, str) else x for x in asked]
    wrong = [label for label in asked if not 0 <= label < count]
    if wrong:
        way_out = f"Choose from 0 to {count - 1}." if count else "Leave them out."
        raise InputError(
            f"--classes must be of the {count} classes of the model; got {wrong[0]}. {way_out}"
        )
    labels = range(min(count, ROWS_SHOWN)) if options.classes is None else asked
    return [label for label in labels or [count] for _ in range(options.samples)]


def size_to_draw(config: Any, wanted: str | None, is_any: bool = False) -> tuple[int, int, int]:
    """The size to draw of those of a run, or any one; the largest by default."""
    sizes = {name_of(size): size for size in config.sizes}
    if wanted is not None and is_any:
        sizes[wanted] = read_size(wanted, "--size")
    if wanted is not None and wanted not in sizes:
        raise InputError(
            "--size must be one that the run trains on, as FRAMESxHEIGHTxWIDTH; got "
            f"{wanted!r}. Choose from {', '.join(sizes)}."
        )
    return config.size if wanted is None else sizes[wanted]


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
