"""The command line of train.py and sample.py. Imports no jax: `--help` must be fast."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import Annotated, Any, Generic, NoReturn, TypeVar, get_type_hints

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from startrail_jax.errors import InputError
from trainer.config import Distributed
from trainer.printable import printable
from trainer.run.settings import settings_of

Settings = TypeVar("Settings")

# Setting -> what other programs call it. A name may stand at several settings, of which a program
# has one.
OTHER_NAMES = {
    "optimizer.kind": "optimizer optim opt optimizer-type",
    "optimizer.schedule": "lr-schedule lr-scheduler lr-scheduler-type lr-decay-style",
    "optimizer.decay-fraction": "decay-steps lr-wsd-decay-iters",
    "optimizer.learning-rate": "lr max-lr peak-lr optimizer.lr optim.lr",
    "optimizer.final-learning-rate": "min-lr final-lr lr-end",
    "optimizer.weight-decay": "wd",
    "optimizer.clip-norm": "clip grad-clip clip-grad clip-grad-norm max-grad-norm",
    "optimizer.warmup-fraction": "warmup-steps warmup-iters warmup-ratio lr-warmup-steps",
    "optimizer.beta1": "adam-beta1",
    "optimizer.beta2": "adam-beta2",
    "steps": "epochs num-epochs num-train-epochs max-steps max-iters num-steps n-steps iters "
    "iterations train-steps total-steps train-iters num-train-steps training.steps",
    "batch-size": "bs b batch global-batch-size train-batch-size per-device-train-batch-size "
    "training.local-batch-size training.global-batch-size",
    "accumulation": "accum grad-accum gradient-accumulation gradient-accumulation-steps",
    "seq-len": "block-size context context-length context-len ctx-len max-length max-seq-len "
    "max-seq-length seq-length sequence-length n-ctx seqlen training.seq-len",
    "size": "image-size img-size resolution",
    "model.layers": "n-layer n-layers num-layers num-hidden-layers depth",
    "model.width": "n-embd d-model dim hidden-size hidden-dim embed-dim n-embed",
    "model.heads": "n-head n-heads num-heads num-attention-heads",
    "model.kv-heads": "n-kv-heads num-kv-heads num-key-value-heads num-query-groups",
    "model.mlp-width": "d-ff ffn-dim ffn-hidden-size intermediate-size mlp-dim",
    "model.vocab-size": "n-vocab",
    "model.dtype": "precision mixed-precision bf16 fp16",
    "model.classes": "num-classes",
    "data.path": "data dataset data-path data-dir train-data train-file input",
    "data.tokenizer": "tokenizer-path tokenizer-file",
    "data.validation-path": "val-data valid-data eval-data validation-file",
    "mesh.data": "dp data-parallel data-parallel-size",
    "mesh.tensor": "tp tensor-parallel tensor-parallel-size tensor-model-parallel-size",
    "mesh.head": "ulysses ulysses-degree sp-ulysses-degree",
    "mesh.ring": "ring-degree cp context-parallel context-parallel-size sp "
    "parallelism.context-parallel-degree",
    "devices": "gpus num-gpus n-gpus num-devices n-devices world-size nproc-per-node",
    "zero": "fsdp zero-stage zero-level",
    "remat": "checkpointing activation-checkpointing gradient-checkpointing recompute",
    "offload": "cpu-offload",
    "run-dir": "out out-dir output output-dir save-dir log-dir logdir workdir work-dir resume "
    "resume-from-checkpoint load exp-name",
    "init-from": "from-pretrained pretrained model-name-or-path model-path hf-checkpoint load-hf",
    "lora.rank": "lora-r lora-rank lora.r",
    "lora.alpha": "lora-alpha",
    "lora.targets": "lora-target-modules target-modules lora.target-modules",
    "checkpoint.every": "save-every save-interval save-steps ckpt-every checkpoint-every",
    "checkpoint.keep": "save-total-limit keep-checkpoints",
    "log-every": "log-interval logging-steps print-every",
    "evaluate-every": "eval-every eval-interval eval-steps eval-iters val-every",
    "ema-decay": "ema",
    "tokens": "max-tokens max-new-tokens num-tokens n-tokens length",
    "samples": "num-samples n-samples n num-return-sequences",
    "temperature": "temp",
    "prompt": "start text",
    "prompt-file": "file input-file",
    "guidance": "cfg cfg-scale guidance-scale",
    "classes": "class label labels",
}


# What must be said of names that count something else.
REMARKS = {
    "epochs num-epochs num-train-epochs": "which counts batches: an epoch has as many as the data "
    "have tokens or images, over those of a batch",
    "warmup-steps warmup-iters lr-warmup-steps decay-steps lr-wsd-decay-iters": "which is a "
    "fraction of the steps",
    "per-device-train-batch-size training.local-batch-size": "which counts the sequences of all "
    "devices together",
}


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
    if unknown := list(_other_names(arguments, default)):
        exit_with_usage_error("\n".join(unknown))
    kind: Any = Command[type(default)]
    registry = ConstructorRegistry()
    registry.struct_rule(_with_whole_paragraphs)
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


def _with_whole_paragraphs(info: StructTypeInfo) -> StructConstructorSpec | None:
    """How tyro makes settings, with help texts that it may break at the width of the terminal.

    By itself, tyro keeps the line breaks of docstrings that are indented, and breaks again between
    them.
    """
    given: Any = info.default
    if not is_dataclass(info.type) or not isinstance(given, info.type) or type(given) is Command:
        return None
    types, docs = get_type_hints(info.type, include_extras=True), _docstrings_of(info.type)
    return StructConstructorSpec(
        instantiate=info.type,
        fields=tuple(
            StructFieldSpec(x.name, types[x.name], getattr(given, x.name), docs.get(x.name))
            for x in fields(info.type)
            if x.init
        ),
    )


def _docstrings_of(kind: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, each paragraph as one line."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if not is_dataclass(one):
            continue
        (tree,) = ast.parse(dedent(inspect.getsource(one))).body
        assert isinstance(tree, ast.ClassDef)
        for target, text in pairwise(tree.body):
            if not (isinstance(target, ast.AnnAssign) and isinstance(target.target, ast.Name)):
                continue
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                paragraphs = str(text.value.value).split("\n\n")
                joined = "\n\n".join(" ".join(x.split()) for x in paragraphs)
                found[target.target.id] = joined
    return found


def parse_run(
    task: Any, arguments: list[str], *, default: Settings, prog: str, description: str | None
) -> Command[Settings]:
    """Reads the flags of a run; on a mistake, prints a message and exits with status 2.

    Args:
        task: `trainer.task.Task` of the run, which knows what follows from flags.
        arguments: as for `parse`, and so are the others.
    """
    flag = partial(flag_of, arguments)
    default = task.before_flags(default, flag)
    command = parse(arguments, default=default, prog=prog, description=description)
    return replace(command, settings=task.after_flags(command.settings, flag))


def flag_of(arguments: list[str], name: str) -> str | None:
    """The value of a flag, which decides about the defaults of the others; None without it."""
    i = _place_of(arguments, name)
    if i is None:
        return None
    _, equals, value = arguments[i].partition("=")
    return value if equals else (arguments[i + 1 : i + 2] or [None])[0]


def with_value(arguments: list[str], name: str, value: Path) -> list[str]:
    """The command line with another value of a flag that it has."""
    i = _place_of(arguments, name)
    assert i is not None
    after = i + 1 if "=" in arguments[i] else i + 2
    return [*arguments[:i], f"{name}={value}", *arguments[after:]]


def _place_of(arguments: list[str], name: str) -> int | None:
    """Where a flag is in the command line; None if it is not there. The last one counts."""
    flags = [argument.partition("=")[0].replace("_", "-") for argument in arguments]
    return max((i for i, flag in enumerate(flags) if flag == name), default=None)


def _other_names(arguments: Sequence[str], default: Any) -> Iterator[str]:
    """A line for each flag that has another name here; tyro knows only names that look alike."""
    names = [name.replace("_", "-") for name in settings_of(default)]
    others = {other: name for name, words in OTHER_NAMES.items() for other in words.split()
              if name in names}  # fmt: skip
    for argument in arguments:
        flag = argument.partition("=")[0].replace("_", "-")
        word = flag.removeprefix("--")
        if not flag.startswith("--") or word in names:
            continue
        meant = [others[word]] if word in others else []
        meant += [name for name in names if name.rpartition(".")[2] == word]
        if meant:
            flags = " or ".join(f"--{name}" for name in dict.fromkeys(meant))
            remarks = [f", {text}" for words, text in REMARKS.items() if word in words.split()]
            yield (
                f"Unrecognized option {argument}: it is {flags} here{''.join(remarks)}; --help "
                "says what it does."
            )


def exit_with_usage_error(message: object) -> NoReturn:
    """Prints a message about the command line, and exits with status 2."""
    print(printable(str(message)), file=sys.stderr)
    sys.exit(2)
