"""The command line of train.py and sample.py. Imports no jax: `--help` must be fast."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache, partial
from typing import Annotated, Any, Generic, NoReturn, TypeVar, get_type_hints

import docstring_parser
import tyro
from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from startrail_jax.errors import InputError
from trainer.config import ENDLESS, Distributed
from trainer.printable import say

Settings = TypeVar("Settings")
MEANT = {"data": "path", "lora": "rank", "wandb": "project"}
"""For groups of flags, the one that is meant by the name of the group alone."""


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
    """Reads flags, over `default`; on a mistake, prints a message and exits with status 2."""
    kind: Any = Command[type(default)]
    registry = ConstructorRegistry()
    registry.struct_rule(_with_whole_lines)
    registry.struct_rule(_in_boxes)
    try:
        with registry:
            return tyro.cli(
                kind,
                prog=prog,
                description=description,
                default=Command(settings=default),
                args=arguments,
            )
    except InputError as error:  # Of several settings together: tyro reports those of one.
        exit_with_usage_error(error)


def _with_whole_lines(info: StructTypeInfo) -> StructConstructorSpec | None:
    """Joins the lines of docstrings of fields: tyro keeps their ends, and wraps between them."""
    given: Any = info.default
    if not is_dataclass(info.type) or not isinstance(given, info.type) or type(given) is Command:
        return None
    types, docs = get_type_hints(info.type, include_extras=True), {}
    for kind in reversed(info.type.__mro__[:-1]):
        docs |= _docstrings_of_fields(kind)
    specs = {
        x.name: StructFieldSpec(x.name, types[x.name], getattr(given, x.name), docs.get(x.name))
        for x in fields(info.type)
        if x.init
    }
    groups = {
        title: [specs.pop(name) for name in names if name in specs]
        for title, names in getattr(info.type, "groups_of_flags", {}).items()
    }

    def instantiate(**values: Any) -> Any:
        for title in groups:
            values |= values.pop(title)
        return info.type(**values)

    boxes = [_box(title, members) for title, members in groups.items()]
    return StructConstructorSpec(instantiate, (*boxes, *specs.values()))


@cache
def _docstrings_of_fields(kind: type) -> dict[str, str]:
    """By name, on one line each. tyro asks many times, and each time the source would be parsed."""
    params = docstring_parser.parse_from_object(kind).params
    return {x.arg_name: " ".join((x.description or "").split()) for x in params}


class _Box(dict[str, StructFieldSpec]):
    """Flags that stand together in the help, without a prefix."""


def _box(title: str, members: list[StructFieldSpec]) -> StructFieldSpec:
    box = _Box({member.name: member for member in members})
    return StructFieldSpec(title, tyro.conf.OmitArgPrefixes[_Box], box, "")


def _in_boxes(info: StructTypeInfo) -> StructConstructorSpec | None:
    """The flags of a box."""
    if info.type is not _Box:
        return None
    box: Any = info.default
    return StructConstructorSpec(dict, tuple(box.values()))


def parse_run(
    task: Any, arguments: list[str], *, default: Settings, prog: str, description: str | None
) -> Command[Settings]:
    """Reads the flags of a run; on a mistake, prints a message and exits with status 2."""
    flag = partial(flag_of, arguments)
    for group, name in MEANT.items():
        if hasattr(default, group) and flag(f"--{group}") is not None:
            exit_with_usage_error(
                f"There is no flag --{group}. Did you mean --{group}.{name}? All flags that begin "
                f"with --{group} are in --help."
            )
    default = _with_schedule(task.before_flags(default, flag), flag)
    command = parse(arguments, default=default, prog=prog, description=description)
    return replace(command, settings=task.after_flags(command.settings, flag))


def _with_schedule(config: Any, flag: Callable[[str], str | None]) -> Any:
    """A config without a last learning rate, if a flag chooses a schedule that has none."""
    if flag("--optimizer.schedule") in ENDLESS:
        optimizer = replace(config.optimizer, final_share=None)
        return replace(config, optimizer=optimizer)
    return config


def flag_of(arguments: list[str], name: str) -> str | None:
    """The value of a flag, which decides about the defaults of the others; None without it."""
    flags = [argument.partition("=")[0].replace("_", "-") for argument in arguments]
    if name not in flags:
        return None
    i = len(flags) - 1 - flags[::-1].index(name)  # The last one counts.
    _, equals, value = arguments[i].partition("=")
    return value if equals else (arguments[i + 1 : i + 2] or [None])[0]


def exit_with_usage_error(message: object) -> NoReturn:
    """Prints a message about the command line, and exits with status 2."""
    say(str(message))
    sys.exit(2)
