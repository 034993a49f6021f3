"""Samples from a run of train.py, with sequence-parallel attention.

    python sample.py runs/gpt_tiny --prompt "def main("
    python sample.py runs/gpt_tiny --prompt-file LONG.txt --tokens 100 --temperature 0
    cat LONG.txt | python sample.py runs/gpt_tiny --samples 3 --top-k 40 --top-p 0.9
    python sample.py runs/gpt_tiny --devices 8 --mesh.team 1 --prompt "import "
    python sample.py runs/dit_digits --classes 3 7 --samples 10       # runs/dit_digits/samples.png
    python sample.py runs/gpt_tiny --help       # all flags, with that run's values

The first word is the folder of a run, whose newest checkpoint is read; the run may be going on.
Prompt, keys and values lie sharded over all devices, and so do images: both may be longer than what
fits one. Text comes on standard output as it is made, images as a file, the rest on standard error.
"""

from __future__ import annotations

import dataclasses
import io
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

import tyro

from trainer.config import (
    SHARDED_AXES,
    MeshConfig,
    TrainConfig,
)
from trainer.dit.config import DiTTrainConfig
from trainer.gpt.config import GPTTrainConfig
from trainer.processes.distributed import start
from trainer.processes.options import Distributed

CLASSES_SHOWN = 10
LEAST_PIXELS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextOptions:
    """What to draw from a run of a GPT."""

    prompt: str | None = None
    """Text to continue; token ids, where the data of the run are tokens and no tokenizer is given.
    By default what comes on standard input."""
    prompt_file: Path | None = None
    """A UTF-8 file to continue, as it is."""
    tokens: int = 256
    """Tokens to add; fewer where the document ends before."""
    samples: int = 1
    """Continuations to draw, all at once."""
    temperature: float = 0.8
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int | None = None
    """Number of tokens to choose from, the likeliest. By default all."""
    top_p: float = 1.0
    """Probability of the tokens to choose from, the likeliest."""
    seed: int = 0
    """Of the draws: the same on every mesh."""
    tokenizer: Path | None = None
    """A tokenizer.json. By default that of the run."""
    devices: int | None = None
    """Devices to use. By default as the run, or all of them where there are fewer."""
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    """Degrees of parallelism. By default as the run, where they fit the devices."""
    zero: Literal[0, 3] = 0
    """3 splits the weights over devices, which collect them for every token: for models that fit
    no device. By default 3 where the run splits them, else 0."""

    @classmethod
    def of_run(cls, config: GPTTrainConfig) -> TextOptions:
        """Those that a run suggests."""
        return cls(
            temperature=config.temperature,
            tokenizer=config.data.tokenizer,
            devices=config.devices,
            mesh=config.mesh,
            zero=3 if config.zero == 3 else 0,
        )

    def __post_init__(self) -> None:
        for name in ("tokens", "samples"):
            _check_at_least_1(name, getattr(self, name))
        if self.prompt is not None and self.prompt_file is not None:
            raise ValueError(
                "The prompt must be given once; got --prompt and --prompt-file "
                f"{str(self.prompt_file)!r}. Leave one of them out."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """What to draw from a run of a diffusion transformer."""

    classes: tuple[int, ...] | None = None
    """Classes to draw, one row of the grid for each. By default all of them, or the first ten."""
    captions: tuple[str, ...] | None = None
    """Texts to draw, one row for each, where the model takes text; with `classes`, as many."""
    samples: int = 8
    """Images in a row."""
    sampler: Literal["euler", "heun", "ddim"] | None = None
    """How noise becomes an image: "euler" or "heun" for a model of rectified flow, "ddim" for one
    that predicts v or eps. By default the first that fits."""
    steps: int = 50
    """Steps of the sampler; "heun" asks the model twice in each."""
    guidance: float | None = None
    """1 draws what the model has learnt; more makes images more typical of class or caption. By
    default 1.5, or 1 for a model that cannot be guided."""
    batch_size: int = 64
    """Images drawn at a time; fewer need less memory."""
    seed: int = 0
    """Of the noise: the same images on every mesh."""
    scale: int | None = None
    """Pixels of the PNG for one of an image. By default as many as make images 64 wide or more."""
    out: Path | None = None
    """The file: *.png, or *.npz for latents. By default samples.png, or samples.npz, of the run."""
    devices: int | None = None
    """Devices to use. By default as the run, or all of them where there are fewer."""
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    """Degrees of parallelism. By default as the run, where they fit the devices."""

    @classmethod
    def of_run(cls, config: DiTTrainConfig) -> ImageOptions:
        """Those that a run suggests."""
        return cls(devices=config.devices, mesh=config.mesh)

    def __post_init__(self) -> None:
        for name in ("samples", "steps", "batch_size"):
            _check_at_least_1(name, getattr(self, name))
        if self.scale is not None:
            _check_at_least_1("scale", self.scale)
        if None not in (self.classes, self.captions) and len(self.classes or ()) != len(
            self.captions or ()
        ):
            raise ValueError(
                "classes and captions must be as many, as each row has one of both; got "
                f"classes={self.classes}, captions={self.captions}. Leave one of them out."
            )


def sample_text(
    run_dir: Path, config: GPTTrainConfig, options: TextOptions, devices: list[Any], degrees: Any
) -> None:
    """Continues a prompt with the model of a run, and writes the text as it comes.

    Raises:
        ValueError: if options, run and prompt do not fit each other or the devices.
        CheckpointError: if there is no checkpoint, or it cannot be read.
    """
    # Not at the top of the file: `--help` and a mistyped flag need none of this.
    import startrail_jax as st
    from trainer.gpt.generation import (
        Generator,
        Sampling,
    )
    from trainer.gpt.text import (
        TextStream,
        encode_prompt,
        open_tokenizer,
    )
    from trainer.run.checkpoint import restore_weights
    from trainer.run.folder import CHECKPOINTS_FOLDER

    sampling = Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )
    data = dataclasses.replace(config.data, tokenizer=options.tokenizer)
    tokenizer = open_tokenizer(data, vocab_size=config.model.vocab_size)
    prompt = encode_prompt(tokenizer, _read_prompt(options))

    mesh = st.make_mesh(degrees, axis_type="auto", devices=devices)
    generator = Generator(
        config.model,
        st.Attention(mesh, causal=True),
        sampling,
        zero=options.zero,
        zero_axes=config.zero_axes,
        tile=config.tile,
    )
    generator.check_prompt(prompt)
    weights, step = restore_weights(run_dir / CHECKPOINTS_FOLDER, generator.weight_shapes)
    _note(f"model: {run_dir} after step {step}")
    _note(f"prompt: {len(prompt):,} {tokenizer.unit}s")
    if len(prompt) + options.tokens > config.seq_len:
        _note(
            f"prompt and sample make {len(prompt) + options.tokens:,} tokens: the model was "
            f"trained on sequences of {config.seq_len:,}"
        )

    # The first sample is shown as it comes; the others, drawn beside it, wait for their turn.
    streams = [TextStream(tokenizer, prompt) for _ in range(options.samples)]
    waiting = ["" for _ in streams]

    def show(row: int, text: str) -> None:
        if row:
            waiting[row] += text
        else:
            _print(text, end="")

    _head(0, options.samples)
    for tokens in generator(
        weights,
        [prompt] * options.samples,
        num_tokens=options.tokens,
        end_of_document=tokenizer.end_of_document,
    ):
        for row, token in enumerate(tokens):
            if token is not None:
                show(row, streams[row].add(token))
    for row, stream in enumerate(streams):
        show(row, stream.end())
        if row:
            _head(row, options.samples)
        _print(waiting[row])


def sample_images(
    run_dir: Path, config: DiTTrainConfig, options: ImageOptions, devices: list[Any], degrees: Any
) -> None:
    """Draws images with the model of a run, and writes them as one file.

    Raises:
        ValueError: if options and run do not fit each other or the devices.
        OSError: if the file cannot be written.
        CheckpointError: if there is no checkpoint, or it cannot be read.
    """
    import jax
    import numpy as np

    import startrail_jax as st
    from trainer.dit.diffusion import SAMPLERS
    from trainer.dit.drawing import (
        Drawing,
        save_grid,
        to_pixels,
    )
    from trainer.parallel.step import Program
    from trainer.parallel.tiling import largest_tile
    from trainer.run.checkpoint import restore_weights
    from trainer.run.folder import CHECKPOINTS_FOLDER
    from trainer.tasks import make_objective

    labels, captions = _rows(config, options)
    out = _image_file(run_dir, config, options)
    mesh = st.make_mesh(degrees, axis_type="auto", devices=devices)
    attention = st.Attention(mesh, causal=config.causal)
    rows = math.ceil(min(options.batch_size, len(labels)) / degrees.data) * degrees.data
    tokens = rows // degrees.data * attention.layout.padded_length(config.num_tokens)
    share = tokens // (degrees.sequence * degrees.tensor)
    config = dataclasses.replace(
        config,
        batch_size=rows,
        mesh=MeshConfig(data=degrees.data),
        zero=3 if config.zero == 3 else 0,
        zero_axes=SHARDED_AXES,
        tile=None if config.tile is None else largest_tile(config.tile, share),
        accumulation=1,
        remat="none",
        offload=False,
    )
    program = Program(config, attention, make_objective(config))
    can_be_guided = config.diffusion.dropout and (config.model.classes or captions is not None)
    guidance = options.guidance
    drawing = Drawing(
        program,
        sampler=options.sampler or SAMPLERS[config.diffusion.target][0],
        steps=options.steps,
        guidance=(1.5 if can_be_guided else 1.0) if guidance is None else guidance,
        rows=rows,
    )
    weights, step = restore_weights(run_dir / CHECKPOINTS_FOLDER, program.state_shapes.weights)
    _note(f"model: {run_dir} after step {step}")
    images = list(drawing.draw(weights, labels=labels, captions=captions, seed=options.seed))
    if jax.process_index() == 0:
        if out.suffix == ".npz":
            np.savez(out, latents=np.stack(images), labels=np.array(labels))
        else:
            pixels = [to_pixels(image) for image in images]
            scale = options.scale or math.ceil(LEAST_PIXELS / pixels[0].shape[1])
            save_grid(pixels, out, columns=options.samples, scale=scale)
    _note(f"{len(images)} images: {out}")


def _rows(config: DiTTrainConfig, options: ImageOptions) -> tuple[list[int], list[bytes] | None]:
    """Class and caption of every image, row by row of the grid."""
    model, classes, captions = config.model, options.classes, options.captions
    if captions is not None and not model.caption_length:
        raise ValueError(
            "--captions need a model that takes text; got one of caption_length=0. Leave them out."
        )
    for label in classes or ():
        if not 0 <= label < model.classes:
            way_out = (
                f"Choose from 0 to {model.classes - 1}." if model.classes else "Leave them out."
            )
            raise ValueError(
                f"--classes must be of the {model.classes} classes of the model; got {label}. "
                f"{way_out}"
            )
    if classes is None and captions is None:
        classes = tuple(range(min(model.classes, CLASSES_SHOWN))) or None
    count = len(classes or captions or (None,))
    labels = classes or (model.classes,) * count
    texts = captions or ("",) * count
    repeated = [row for row in range(count) for _ in range(options.samples)]
    return (
        [labels[row] for row in repeated],
        [texts[row].encode() for row in repeated] if model.caption_length else None,
    )


def _image_file(run_dir: Path, config: DiTTrainConfig, options: ImageOptions) -> Path:
    """The file to write, before any work is done for it."""
    suffixes = (".npz",) if config.data.holds_latents else (".png", ".npz")
    out = options.out or run_dir / f"samples{suffixes[0]}"
    if out.suffix not in suffixes:
        what = "latents, which are no pixels" if config.data.holds_latents else "images"
        raise ValueError(
            f"--out must end in {' or '.join(suffixes)} for {what}; got {str(out)!r}. Rename it."
        )
    if not out.parent.is_dir():
        raise ValueError(
            f"--out must lie in a folder that there is; got {str(out)!r}. Make {out.parent}."
        )
    return out


def _read_prompt(options: TextOptions) -> str:
    """The text to continue.

    Raises:
        ValueError: if it cannot be read or is not UTF-8.
    """
    if options.prompt is not None:
        return options.prompt
    file = options.prompt_file
    if file is None and sys.stdin is None:
        raise ValueError(
            "There must be a prompt; got none, and a standard input that is closed. Give --prompt "
            "or --prompt-file."
        )
    try:
        raw = sys.stdin.buffer.read() if file is None else file.read_bytes()
        return raw.decode()
    except UnicodeDecodeError as error:
        place = "standard input" if file is None else repr(str(file))
        raise ValueError(
            f"The prompt must be UTF-8; got the byte {error.object[error.start]:#04x} at offset "
            f"{error.start} of {place}. Convert it to UTF-8."
        ) from error
    except OSError as error:
        raise ValueError(
            f"--prompt-file must be a file that can be read; got {str(file)!r}: "
            f"{error.strerror}. Correct the path."
        ) from error


def _devices_and_degrees(
    options: Any, config: TrainConfig, processes: int | None
) -> tuple[list[Any], Any]:
    """As asked for; where that is no more than what the run had, as the devices allow."""
    from trainer.parallel.degrees import choose_degrees
    from trainer.processes.devices import select_devices

    try:
        devices = select_devices(options.devices, processes=processes)
        return devices, choose_degrees(options.mesh, len(devices))
    except ValueError:
        if (options.devices, options.mesh) != (config.devices, config.mesh):
            raise
    devices = select_devices(None, processes=processes)
    _note(f"the devices and degrees of the run do not fit {len(devices)} devices: others are used")
    return devices, choose_degrees(MeshConfig(), len(devices))


def _head(row: int, samples: int) -> None:
    if samples > 1:
        _print(f"--- sample {row + 1}")


def _print(text: str, end: str = "\n") -> None:
    """On standard output, by one process of all."""
    import jax

    if jax.process_index() == 0:
        print(text, end=end, flush=True)


def _note(line: str) -> None:
    import jax

    if jax.process_index() == 0:
        print(line, file=sys.stderr, flush=True)


def _check_at_least_1(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(
            f"{name} must be at least 1; got {name}={value}. Leave it out for the default."
        )


Draw = Callable[[Path, Any, Any, list[Any], Any], None]
DRAWS: dict[str, tuple[type[Any], Draw]] = {
    "gpt": (TextOptions, sample_text),
    "dit": (ImageOptions, sample_images),
}
"""By kind of run: its options, and what draws from it."""

Options = TypeVar("Options")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command(Generic[Options]):
    """What a command line asks for."""

    options: Annotated[Options, tyro.conf.arg(name="")]
    """What to draw."""
    distributed: Distributed = dataclasses.field(default_factory=Distributed)
    """The processes that share the work."""


def read_command_line(arguments: list[str]) -> tuple[Path, TrainConfig, Command[Any]]:
    """The run, its config, and what is asked of it; on a mistake, exits with status 2.

    Raises:
        ValueError: if the folder is not that of a run.
    """
    from trainer.run.folder import CONFIG_FILE
    from trainer.tasks import load_train_config

    describing = {"prog": "sample.py RUN_DIR", "description": __doc__}
    if not arguments or arguments[0].startswith("-"):
        if {"-h", "--help"} & set(arguments):
            tyro.cli(Command[TextOptions], args=["--help"], **describing)
        given = repr(arguments[0]) if arguments else "nothing"
        print(
            f"The first word must be the folder of a run; got {given}. Use the --run-dir of "
            "train.py.",
            file=sys.stderr,
        )
        sys.exit(2)
    run_dir = Path(arguments[0])
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        what = "a folder without one" if run_dir.is_dir() else "no such folder"
        raise ValueError(
            f"The first word must be the folder of a run, with its {CONFIG_FILE}; got "
            f"{str(run_dir)!r}, {what}. Use the --run-dir of train.py."
        )
    config = load_train_config(path)
    kind, _ = DRAWS[config.kind]
    try:
        command = tyro.cli(
            Command[kind],
            args=arguments[1:],
            default=Command(options=kind.of_run(config)),
            **describing,
        )
    except ValueError as error:  # Of the options as a whole: tyro reports those of their parts.
        print(error, file=sys.stderr)
        sys.exit(2)
    return run_dir, config, command


def sample(arguments: list[str]) -> None:
    """Draws from a run, as a command line says."""
    run_dir, config, command = read_command_line(arguments)
    from trainer.parallel.degrees import describe_degrees
    from trainer.processes.devices import require_divisible
    from trainer.processes.heartbeat import heartbeat
    from trainer.run.settings import flags_of

    options, distributed = command.options, command.distributed
    if options.devices != config.devices:
        require_divisible(options.devices, distributed.known_processes)
    start(distributed)
    devices, degrees = _devices_and_degrees(options, config, distributed.known_processes)
    flags = flags_of(options, but=("prompt_file", "tokenizer", "out"))
    with heartbeat(distributed, {"kind": f"a run of kind {config.kind}", **flags}):
        _note(f"devices: {len(devices)} x {devices[0].device_kind}")
        _note(f"mesh: {describe_degrees(options.mesh, degrees)}")
        DRAWS[config.kind][1](run_dir, config, options, devices, degrees)


@contextmanager
def end_with_reader() -> Iterator[None]:
    """Ends the program with status 0 when who reads its output has enough, as `head`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What a model writes may be any character, and the output of few.
        sys.stdout.reconfigure(errors="replace")
    try:
        yield
    except BrokenPipeError:
        # Python writes what is left when it ends, which would fail again.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                os.dup2(nowhere, stream.fileno())
        sys.exit(0)


if __name__ == "__main__":
    from trainer.run.exit import exit_on_ctrl_c, exit_on_user_errors

    # Outermost, so that one of several processes ends with the others.
    with exit_on_ctrl_c(), exit_on_user_errors(), end_with_reader():
        sample(sys.argv[1:])
