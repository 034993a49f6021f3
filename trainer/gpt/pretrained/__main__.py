"""Imports a pretrained model: a run of no steps, whose checkpoint holds the weights of the model.

    python -m trainer.gpt.pretrained Qwen3-8B                        # runs/Qwen3-8B
    python -m trainer.gpt.pretrained Qwen3-8B --run-dir runs/mine --devices 8
    python -m trainer.gpt.pretrained Qwen3-8B --help    # all flags, which are those of train.py

FOLDER is a model in the format of Hugging Face: config.json, *.safetensors and tokenizer.json.
sample.py and trainer.gpt.export take the run. To train the model, give it to train.py --init-from.
"""

from __future__ import annotations

import trainer.packages  # noqa: F401  First: it says what is not installed.

# isort: split

import sys
from dataclasses import replace
from pathlib import Path

from trainer.command_line import Command, exit_with_usage_error, parse_run
from trainer.gpt.config import GPTTrainConfig
from trainer.gpt.pretrained.defaults import pretrained
from trainer.gpt.task import GPTTask
from trainer.printable import printable

PROG = "python -m trainer.gpt.pretrained FOLDER"


def read_command_line(arguments: list[str]) -> Command[GPTTrainConfig]:
    """What a command line asks for; on a mistake, prints a message and exits with status 2."""
    if not arguments or arguments[0].startswith("-"):
        if {"-h", "--help"} & set(arguments):
            print(printable(__doc__ or ""))
            sys.exit()
        given = repr(arguments[0]) if arguments else "nothing"
        exit_with_usage_error(f"The first word must be the folder of a model; got {given}.")
    folder, *flags = arguments
    default = replace(pretrained(Path(folder)), steps=0)
    flags = ["--init-from", folder, *flags]
    return parse_run(GPTTask(), flags, default=default, prog=PROG, description=__doc__)


if __name__ == "__main__":
    from trainer.run.exit import exit_on_user_errors

    # Outermost, so that one of several processes ends with the others.
    with exit_on_user_errors():
        wanted = read_command_line(sys.argv[1:])
        from trainer.gpt.pretrained.importing import import_pretrained

        import_pretrained(wanted.settings, wanted.distributed)
