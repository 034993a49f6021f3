"""Samples of videos: what sample.py draws from a run of a Wan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Float32

from startrail_jax.errors import InputError
from trainer.data.cache import write_folder
from trainer.dit.config import name_of
from trainer.dit.drawing import Below, Drawing, save_grid, to_pixels
from trainer.dit.flow_steps import euler, unipc
from trainer.dit.sample import file_to_write, program_to_draw, save_new, size_to_draw
from trainer.dit.wan.batches import Clip, clip_batch
from trainer.dit.wan.clips import open_clips, read_empty, read_tensors, tensors_of
from trainer.dit.wan.config import VideoOptions, WanTrainConfig
from trainer.dit.wan.digits import embedded
from trainer.dit.wan.objective import VideoFlow
from trainer.dit.wan.pipelines import TorchModels, pipeline_sizes
from trainer.dit.wan.videos import read_image, write_video
from trainer.run.settings import config_of, load_config, read_kind
from trainer.session import Session
from trainer.weights.adapters import restore_model

GUIDANCE, GUIDANCE_OF_DIGITS = 5.0, 2.0
SAMPLERS = {"unipc": unipc, "euler": euler}
CAPTIONS = ("seven left", "three down", "zero right", "five up")
"""What a model of moving digits draws by default."""
SCALE = 4
"""Pixels of a contact sheet for a pixel of a digit."""
FRAMES_SHOWN, SHEET_PIXELS = 8, 320
"""Frames of a video on a contact sheet, and the largest width of one."""


class _Model(NamedTuple):
    """A model that predicts at the times of its range."""

    folder: Path
    config: WanTrainConfig
    guidance: float


def sample_videos(
    run_dir: Path, config: WanTrainConfig, options: VideoOptions, mesh: Mesh, session: Session
) -> None:
    """Draws videos with the model of a run, and writes all of them to one file, a new one."""
    run, config = config, _of_size(config, options)
    models = _models(run_dir, run, options)
    suffixes, what = (".npz",), "latents, which are no pixels"
    if config.is_of_digits:
        suffixes, what = (".png", ".npz"), "digits"
    elif options.decode is not None:
        suffixes, what = ("",), "a folder"
    out = file_to_write(run_dir, options.out, suffixes, what, session)
    torch_models = _torch_models(config, options)
    wishes, empty = _wishes(run, config, options, torch_models)
    each = [clip for _, clip in wishes for _ in range(options.samples)]
    rows = min(options.batch_size, len(each))
    programs = [
        program_to_draw(_of_size(model.config, options), mesh, VideoFlow, rows) for model in models
    ]
    program, below = programs[0], None
    if len(models) > 1:
        below = Below(programs[1], models[1].guidance, models[0].config.diffusion.range[0])
    shift = config.diffusion.shift if options.shift is None else options.shift
    sample = partial(SAMPLERS[options.sampler], steps=options.steps, shift=shift)
    drawing = Drawing(program, sample=sample, guidance=models[0].guidance, below=below)
    restored = []
    for model, its in zip(models, programs, strict=True):
        shapes = its.state_shapes.model
        weights, step = restore_model(model.folder, model.config, shapes, note=session.note)
        session.note(f"model: {model.folder} after step {step}")
        restored.append(weights)
    for name, _ in wishes:
        session.note(f"row: {name}")
    objective: Any = program.objective
    numbers, layout = list(range(len(each))), program.attention.layout
    batch = clip_batch(each, numbers, empty=empty, config=config, layout=layout)
    given, without = (
        jax.tree.map(np.asarray, objective.asked(batch, jnp.full(len(each), dropped)))
        for dropped in (False, True)
    )
    weights = restored[0] if below is None else tuple(restored)
    drawn = drawing.draw(weights, given=given, without=without, seed=options.seed)
    videos = list(drawn)
    if config.model.first_frame == "time":  # The model takes the first one as it is.
        for video, clip in zip(videos, each, strict=True):
            video[0] = clip.latent[0]
    names = [name for name, _ in wishes for _ in range(options.samples)]

    def write_one(file: IO[bytes]) -> None:
        if out.suffix == ".npz":
            np.savez(file, latents=np.stack(videos), captions=np.array(names))
        else:
            save_grid([to_pixels(x) for x in videos], file, columns=options.samples, scale=SCALE)

    if not session.is_first:
        return
    if torch_models is None:
        session.note(f"{len(videos)} videos: {save_new(out, write_one)}")
        return
    number, place = 1, out
    while place.exists():
        number, place = number + 1, out.with_name(f"{out.name}-{number + 1}")
    write = partial(_write_videos, torch_models, videos, options.rate)
    write_folder(place, write, option="--out")
    session.note(f"{len(videos)} videos: {place}")


def _guidance(config: WanTrainConfig, wanted: float | None, flag: str) -> float:
    """The strength of guidance, which needs a model that has learnt to draw without a caption."""
    dropout = config.diffusion.dropout
    has_learnt = dropout or config.init_from
    if wanted is None:
        default = GUIDANCE_OF_DIGITS if config.is_of_digits else GUIDANCE
        return default if has_learnt else 1.0
    if wanted != 1 and not has_learnt:
        raise InputError(
            "guidance other than 1 needs a model that has learnt to draw without a caption; got "
            f"guidance={wanted}, dropout={dropout}. Use {flag} 1."
        )
    return wanted


def _models(run_dir: Path, run: WanTrainConfig, options: VideoOptions) -> list[_Model]:
    """The model of a run; and the other one of Wan 2.2, that of the lower times last."""
    folder, low_high = options.other_run, run.diffusion.range
    found = [_Model(run_dir, run, _guidance(run, options.guidance, "--guidance"))]
    if folder is None and low_high != (0, 1):
        raise InputError(
            f"A video needs all times from 0 to 1; got a run that has learnt {low_high}. Give the "
            "run of the other model, --other-run RUN, or the run itself if its model has them all."
        )
    if folder is None or folder.resolve() == run_dir.resolve():
        return found
    path = config_of(folder, "--other-run")
    if read_kind(path) != run.kind:
        raise InputError(
            f"--other-run must be the run of a Wan; got {str(folder)!r}. Give another folder."
        )
    other = load_config(WanTrainConfig, path)
    ranges = sorted([low_high, other.diffusion.range])
    if [0, ranges[0][1], 1] != [ranges[0][0], ranges[1][0], ranges[1][1]]:
        raise InputError(
            "The ranges of both models must fill 0 to 1, and meet; got diffusion.range "
            f"{low_high} and, of --other-run, {other.diffusion.range}. Give another run."
        )
    differing = [x for x, size in vars(run.model).items() if size != getattr(other.model, x)]
    if differing:
        raise InputError(
            "--other-run must have a model of the same sizes; got one that differs in "
            f"{', '.join(differing)}. Give another run."
        )
    wanted = options.guidance if options.other_guidance is None else options.other_guidance
    guidance = _guidance(other, wanted, "--other-guidance")
    found.append(_Model(folder, replace(other, size=run.size, data=run.data), guidance))
    return sorted(found, key=lambda model: model.config.diffusion.range, reverse=True)


def _write_videos(
    models: TorchModels,
    latents: Sequence[Float32[np.ndarray, "F H W C"]],
    rate: int,
    folder: Path,
) -> None:
    """Writes every video as an mp4 file, and some frames of each in a row of sheet.png."""
    rows = []
    for number, latent in enumerate(latents):
        frames = models.decoded(latent)
        write_video(folder / f"{number}.mp4", frames, rate=rate)
        shown = np.linspace(0, len(frames) - 1, min(FRAMES_SHOWN, len(frames))).round().astype(int)
        step = -(-frames.shape[2] // SHEET_PIXELS)
        rows.append(np.concatenate(list(frames[shown, ::step, ::step]), axis=1))
    with (folder / "sheet.png").open("wb") as file:
        save_grid(rows, file, columns=1, scale=1)


def _torch_models(config: WanTrainConfig, options: VideoOptions) -> TorchModels | None:
    """VAE and encoders, if they are wanted."""
    has_videos = config.data.path is not None
    if options.decode is None:
        if not has_videos and not config.is_of_digits:
            raise InputError(
                "A run without encoded videos needs the text encoder of its model; got no --decode "
                "FOLDER. Add it."
            )
        return None
    if config.is_of_digits:
        raise InputError(
            "--decode is for latents; got a run on moving digits, whose videos are pixels. Leave "
            "it out."
        )
    channels = pipeline_sizes(options.decode).channels
    if channels != config.model.channels:
        raise InputError(
            "--decode must be the folder of the model of the run, with latents of "
            f"{config.model.channels} channels; got {channels} in {str(options.decode)!r}. "
            "Give the other folder."
        )
    texts = not has_videos or options.prompt is not None or options.image is not None
    return TorchModels(options.decode, texts=texts, device=options.decode_device)


def _of_size(config: WanTrainConfig, options: VideoOptions) -> WanTrainConfig:
    """The config of the size to draw."""
    return config.of_size(size_to_draw(config, options.size, not config.steps))


def _wishes(
    run: WanTrainConfig,
    config: WanTrainConfig,
    options: VideoOptions,
    torch_models: TorchModels | None,
) -> tuple[list[tuple[str, Clip]], Float[np.ndarray, "S D"]]:
    """What is drawn, by its name, and the text of nothing. The latent of a clip is that of the
    first frame, if the model begins with one."""
    files, prompts, text_dim = options.prompt_embeddings, options.prompt, config.model.text_dim
    if config.is_of_digits:
        if files:
            raise InputError(
                "A model of moving digits draws captions; got --prompt-embeddings. Use --prompt, "
                "for example --prompt 'seven left'."
            )
        latent = np.zeros((*config.size, config.model.channels), np.float32)
        captions = prompts or CAPTIONS
        found = [(x, Clip(latent, embedded(x, text_dim))) for x in captions]
        return found, embedded("", text_dim)
    if config.data.path is not None:
        empty = read_empty(config.data.path)
    else:
        assert torch_models is not None, "without videos it is there"
        empty = torch_models.text("", most=config.model.text_tokens)
    if prompts is not None:
        if torch_models is None:
            raise InputError(
                "--prompt needs the text encoder of the model; got no --decode FOLDER. Add it, or "
                "use --prompt-embeddings FILE, a file of the folder `clips` of encoded videos."
            )
        first = _first_frame(config, options.image, torch_models)
        texts = [torch_models.text(x, most=config.model.text_tokens) for x in prompts]
        pairs = zip(prompts, texts, strict=True)
        return [(x, Clip(text=text, **first)) for x, text in pairs], empty
    if files:
        return [(str(path), _clip_of(path, config)) for path in files], empty
    if config.data.path is None:
        raise InputError(
            "A run without encoded videos has no captions; got no --prompt. Add --prompt 'a kite'."
        )
    held_out: Any = open_clips(run, list).held_out
    for index, number in enumerate(held_out.numbers):
        line = held_out.source.lines[number]
        if line.size == config.size:
            return [(line.caption, held_out[index])], empty
    raise InputError(
        f"A video of the size to draw must be held out; got none of {name_of(config.size)}. Use "
        "--prompt-embeddings FILE, or another --size."
    )


def _first_frame(
    config: WanTrainConfig, image: Path | None, torch_models: TorchModels
) -> dict[str, Any]:
    """What the model is given of the first frame; a latent of 0 if it begins with none."""
    model, (frames, height, width) = config.model, config.size
    if (image is None) != (model.first_frame == "none"):
        raise InputError(
            "--image must be given for a model that begins with a frame, and for no other; got "
            f"first_frame={model.first_frame!r}, image={image}. "
            f"{'Add' if image is None else 'Leave out'} --image."
        )
    latent = np.zeros((*config.size, model.channels), np.float32)
    if image is None:
        return {"latent": latent}
    sizes = torch_models.sizes
    count = (frames - 1) * sizes.frames_of_latent + 1
    pixels = sizes.pixels_of_latent
    shown = read_image(image, height * pixels, width * pixels)
    found = torch_models.video(np.repeat(shown[None], count, axis=0))
    missing = [x for x in tensors_of(model) if x not in ("text", *found)]
    if missing:
        raise InputError(
            f"--decode must be the folder of the model of the run, which gives {missing[0]}; got "
            "another. Give the folder with which the videos were encoded."
        )
    return {name: found[name] for name in ("latent", *tensors_of(model)) if name != "text"}


def _clip_of(path: Path, config: WanTrainConfig) -> Clip:
    """What a file asks for."""
    model = config.model
    names = [*tensors_of(model), *["latent"] * (model.first_frame == "time")]
    found = read_tensors(path, names)
    shape = (*config.size, model.channels)
    for name, x in found.items():
        is_latent = name in ("given", "latent")
        wanted = shape if is_latent else ("any", getattr(model, f"{name}_dim"))
        if x.shape != wanted and (is_latent or x.ndim != 2 or x.shape[1] != wanted[1]):
            raise InputError(
                f"{name} must have the shape [{', '.join(map(str, wanted))}] for this model and "
                f"size; got {list(x.shape)} in {str(path)!r}. Use a file that was "
                "encoded for this model."
            )
    return Clip(**{"latent": np.zeros(shape, np.float32)} | found)
