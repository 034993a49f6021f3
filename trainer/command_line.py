"""The command line of train.py and sample.py. Imports no jax: `--help` must be fast."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, NoReturn, TypeVar

import tyro

from startrail_jax.errors import InputError
from trainer.processes.options import Distributed

Settings = TypeVar("Settings")


@dataclass(frozen=True, kw_only=True)
class Command(Generic[Settings]):
    """What a command line asks for."""

    settings: Annotated[Settings, tyro.conf.arg(name="")]
    """What to do."""
    distributed: Distributed = field(default_factory=Distributed)
    """The processes that share the work."""


def parse(
    arguments: Sequence[str], *, default: Settings, prog: str, description: str | None
) -> Command[Settings]:
    """Reads flags; on a mistake, prints a message and exits with status 2.

    Args:
        arguments: the command line, without the words before the flags.
        default: the settings that apply where there is no flag.
        prog: name of the program and the words before the flags, for `--help`.
        description: text for `--help`.
    """
    kind: Any = Command[type(default)]
    try:
        return tyro.cli(
            kind,
            prog=prog,
            description=description,
            default=Command(settings=default),
            args=arguments,
        )
    except InputError as error:  # Of several settings together: tyro reports those of one.
        exit_with_usage_error(error)


def exit_with_usage_error(message: object) -> NoReturn:
    """Prints a message about the command line, and exits with status 2."""
    print(message, file=sys.stderr)
    sys.exit(2)
