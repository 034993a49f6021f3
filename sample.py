"""Samples from a run of train.py, with sequence-parallel attention.

    python sample.py runs/gpt_tiny --prompt "def main("
    python sample.py runs/gpt_tiny --prompt-file LONG.txt --tokens 100 --temperature 0
    cat LONG.txt | python sample.py runs/gpt_tiny --samples 3 --top-k 40 --top-p 0.9
    python sample.py runs/gpt_tiny --devices 8 --mesh.team 1 --prompt "import "
    python sample.py runs/gpt_tiny --help       # all flags, with that run's values

The first word is the folder of a run, whose newest checkpoint is read. Nothing is written there, so
the run may be going on. Prompt, keys and values lie sharded over all devices: prompts may be longer
than what fits one. The text comes on standard output as it is made, the rest on standard error.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import tyro

from startrail_jax.training.config import GPTTrainConfig, MeshConfig, TrainConfig


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
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 1; got {name}={getattr(self, name)}. Leave it out "
                    "for the default."
                )
        if self.prompt is not None and self.prompt_file is not None:
            raise ValueError(
                "The prompt must be given once; got --prompt and --prompt-file "
                f"{str(self.prompt_file)!r}. Leave one of them out."
            )


def sample_text(run_dir: Path, config: GPTTrainConfig, options: TextOptions) -> None:
    """Continues a prompt with the model of a run, and writes the text as it comes.

    Raises:
        ValueError: if options, run and prompt do not fit each other or the devices.
        CheckpointError: if there is no checkpoint, or it cannot be read.
    """
    # Not at the top of the file: `--help` and a mistyped flag need none of this.
    import startrail_jax as st
    from startrail_jax.training.checkpoint import restore_weights
    from startrail_jax.training.degrees import describe_degrees
    from startrail_jax.training.generation import Generator, Sampling
    from startrail_jax.training.run_folder import CHECKPOINTS_FOLDER
    from startrail_jax.training.sampling import TextStream, encode_prompt, open_tokenizer

    sampling = Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )
    data = dataclasses.replace(config.data, tokenizer=options.tokenizer)
    tokenizer = open_tokenizer(data, vocab_size=config.model.vocab_size)
    prompt = encode_prompt(tokenizer, _read_prompt(options))

    devices, degrees = _devices_and_degrees(options, config)
    _note(f"devices: {len(devices)} x {devices[0].device_kind}")
    _note(f"mesh: {describe_degrees(options.mesh, degrees)}")
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
            print(text, end="", flush=True)

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
        print(waiting[row])


def _read_prompt(options: TextOptions) -> str:
    """The text to continue.

    Raises:
        ValueError: if it cannot be read or is not UTF-8.
    """
    if options.prompt is not None:
        return options.prompt
    file = options.prompt_file
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


def _devices_and_degrees(options: TextOptions, config: TrainConfig) -> tuple[list[Any], Any]:
    """As asked for; where that is no more than what the run had, as the devices allow."""
    from startrail_jax.training.degrees import choose_degrees
    from startrail_jax.training.devices import select_devices

    try:
        devices = select_devices(options.devices)
        return devices, choose_degrees(options.mesh, len(devices))
    except ValueError:
        if (options.devices, options.mesh) != (config.devices, config.mesh):
            raise
    devices = select_devices(None)
    _note(f"the devices and degrees of the run do not fit {len(devices)} devices: others are used")
    return devices, choose_degrees(MeshConfig(), len(devices))


def _head(row: int, samples: int) -> None:
    if samples > 1:
        print(f"--- sample {row + 1}", flush=True)


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


Sampler = Callable[[Path, Any, Any], None]
SAMPLERS: dict[str, tuple[type[Any], Sampler]] = {"gpt": (TextOptions, sample_text)}
"""By kind of run: its options, and what draws from it."""


def read_command_line(arguments: list[str]) -> tuple[Path, TrainConfig, Any]:
    """The run, its config, and the options of its kind; on a mistake, exits with status 2.

    Raises:
        ValueError: if the folder is not that of a run, or of a kind that nothing can be drawn from.
    """
    from startrail_jax.training.run_folder import CONFIG_FILE, load_config

    describing = {"prog": "sample.py RUN_DIR", "description": __doc__}
    if not arguments or arguments[0].startswith("-"):
        if {"-h", "--help"} & set(arguments):
            tyro.cli(TextOptions, args=["--help"], **describing)
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
    config = load_config(TrainConfig, path)
    if config.kind not in SAMPLERS:
        raise ValueError(
            f"The run must be of kind {' or '.join(SAMPLERS)}; got {str(run_dir)!r} of kind "
            f"{config.kind!r}. Give the folder of another."
        )
    kind, _ = SAMPLERS[config.kind]
    return (
        run_dir,
        config,
        tyro.cli(kind, args=arguments[1:], default=kind.of_run(config), **describing),
    )


def sample(arguments: list[str]) -> None:
    """Draws from a run, as a command line says."""
    run_dir, config, options = read_command_line(arguments)
    SAMPLERS[config.kind][1](run_dir, config, options)


if __name__ == "__main__":
    from startrail_jax.training.errors import exit_on_own_errors

    with exit_on_own_errors():
        sample(sys.argv[1:])
