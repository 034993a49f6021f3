"""Draws samples from a run of train.py, with sequence-parallel attention.

    python sample.py runs/gpt_tiny                                    # begins at a new line
    python sample.py runs/gpt_tiny --prompt "def main("
    python sample.py runs/gpt_tiny --prompt-file LONG.txt --tokens 100 --temperature 0
    cat LONG.txt | python sample.py runs/gpt_tiny --samples 3 --top-k 40 --top-p 0.9
    python sample.py runs/Qwen3-8B --chat --prompt "What is a ring?"
    python sample.py runs/gpt_tiny --devices 8 --mesh.c 1 --prompt "import "
    python sample.py runs/dit_digits --classes 3 7 --samples 10       # runs/dit_digits/samples.png
    python sample.py runs/gpt_tiny --help       # all flags, with the values of that run

The first word is the folder of a run. Its newest checkpoint is read, even while the run is still
training. Prompt, keys, values and images are sharded over all devices, so they may be larger than
the memory of one device. Text is printed to standard output as it is generated, images are written
to a file, and everything else is printed to standard error.
"""

from __future__ import annotations

import trainer.packages  # noqa: F401  First: it says what is not installed.

# isort: split

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.command_line import Command, exit_with_usage_error, parse
from trainer.config import TrainConfig
from trainer.run.commands import command as advised
from trainer.run.settings import KIND_WITHOUT_NAME, config_of
from trainer.tasks import TASKS, load_train_config

PROG = "sample.py RUN_DIR"


def sample(arguments: list[str]) -> None:
    """Draws from a run, as a command line says."""
    run_dir, config, command = read_command_line(arguments)
    # Imported here, as they import jax: `--help` and a mistyped flag must be fast.
    from trainer.session import on_mesh_of_flags

    options, kind = command.settings, f"a run of kind {config.kind}"
    flags = options, command.distributed, config, run_dir
    with on_mesh_of_flags(*flags, kind=kind) as (session, mesh):
        task = TASKS[config.kind]
        task.sample(run_dir, config, options, mesh, session)
        session.note(f"next: {advised('sample.py', run_dir)} {task.example_flags}")


def read_command_line(arguments: list[str]) -> tuple[Path, TrainConfig, Command[Any]]:
    """The run, its config, and what is asked of it.

    On a mistake in the flags, prints a message and exits with status 2.
    """
    if not arguments or arguments[0].startswith("-"):
        if {"-h", "--help"} & set(arguments):
            options = TASKS[KIND_WITHOUT_NAME].options_class()
            parse(["--help"], default=options, prog=PROG, description=__doc__)
        given = repr(arguments[0]) if arguments else "nothing"
        exit_with_usage_error(
            f"The first word must be the folder of a run; got {given}. Use the --run-dir of "
            "train.py."
        )
    run_dir = Path(arguments[0])
    config = load_train_config(config_of(run_dir, "The first word"))
    options = TASKS[config.kind].options_class.of_run(config)
    command = parse(arguments[1:], default=options, prog=PROG, description=__doc__)
    return run_dir, config, command


@contextmanager
def end_with_reader() -> Iterator[None]:
    """Ends the program with status 0 when the reader of its output, such as `head`, has ended."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A model may generate any character, and the encoding of the output may lack some.
        sys.stdout.reconfigure(errors="replace")
    try:
        yield
    except BrokenPipeError:
        # When Python exits it writes what is still in its buffers, which would fail again.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                os.dup2(nowhere, stream.fileno())
        sys.exit(0)


if __name__ == "__main__":
    from trainer.run.exit import exit_on_user_errors

    # Outermost, so that one of several processes ends with the others.
    with exit_on_user_errors(), end_with_reader():
        sample(sys.argv[1:])
