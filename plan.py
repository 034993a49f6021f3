"""Finds the fastest mesh for a training run on a cluster. Needs no devices.

    python plan.py gpt_7b --nodes 8 --gpus-per-node 8 --gpu h100 --port 50GB/s --seq-len 512K
    python plan.py runs/mine/config.json --nodes 4 --gpus-per-node 8 --gpu a100_40 --port 100Gb/s \\
        --ports 1 --zero 3 --remat full
    python plan.py Qwen3-8B --nodes 1 --gpus-per-node 8 --gpu h100 --seq-len 128K

The first word is a recipe of configs/, the config.json of a run, or the folder or the config.json
of a model in the format of Hugging Face. Flags of train.py, such as --model.windows, --lora.rank,
--batch-size and --mesh.head, change what is planned; the command that is printed keeps them.
"""

from __future__ import annotations

import trainer.packages  # noqa: F401  First: it says what is not installed.

# isort: split

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from configs import RECIPES
from startrail_jax.errors import InputError, UserError
from train import read_command_line
from trainer.command_line import flag_of
from trainer.config import TrainConfig
from trainer.printable import printable, say
from trainer.tasks import TASKS

if TYPE_CHECKING:
    from trainer.gpt.pretrained.plan_model import FileModel
    from trainer.planner.hardware import Gpu
    from trainer.planner.models import ModelSizes
    from trainer.planner.planning import Plan

CARRIER = "gpt_7b"
"""The recipe that takes the flags for a file whose model is no GPT of this program."""
SEARCHED = {
    "--mesh.order": "The plan finds the order.",
    "--attention.inner": "The plan finds the inner ring.",
    "--attention.head-chunks": "Plans are made for 1.",
    "--gradient-accumulation": "Plan the --batch-size of a part.",
    "--zero-axes": "Plans are made for all axes.",
    "--data.batches": "Give the --lengths of documents.",
    "--plan": "train.py --plan measures the devices at hand.",
}
"""Flags of `train.py` that change a step, and that plans do not take -> what to do."""


class Planned(NamedTuple):
    """What is planned."""

    sizes: ModelSizes
    run: tuple[str, ...]
    """Words of a command of `train.py`; none if it does not take the model."""
    config: TrainConfig
    """The settings beside the model."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python plan.py",
        usage="%(prog)s RUN --nodes N --gpus-per-node N --gpu GPU [--port RATE] [flags]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    cluster = made.add_argument_group("cluster")
    cluster.add_argument("--nodes", type=int, help="number of nodes")
    cluster.add_argument("--gpus-per-node", type=int, help="number of GPUs in each node")
    cluster.add_argument("--gpu", help="a100_40, a100_80, h100, h200 or b200")
    cluster.add_argument(
        "--port", help="rate of one port of a node: 50GB/s (bytes) or 400Gb/s (bits)"
    )
    cluster.add_argument(
        "--ports", type=int, help="ports of a node, which its GPUs share; default: one for each GPU"
    )
    cluster.add_argument(
        "--inside", help="rate between the GPUs of a node; default: that of NVLink"
    )
    cluster.add_argument(
        "--half-duplex",
        action="store_true",
        help="a port does not send and receive at the same time",
    )
    cluster.add_argument("--latency", help="latency of a message through a port, such as 10us")
    cluster.add_argument("--peak-flops", help="dense 16-bit FLOP/s of a GPU, such as 989T")
    cluster.add_argument("--memory", help="memory of a GPU, such as 80GiB")
    cluster.add_argument(
        "--efficiency", type=float, help="measured share of the peak that matrix products reach"
    )
    run = made.add_argument_group("run", "All flags of train.py are taken too.")
    run.add_argument("--seq-len", help="tokens in a sequence, such as 512K")
    run.add_argument(
        "--lengths",
        help="tokens of the documents that fill the sequences: lognormal:MEDIAN,MEAN, a text file "
        "with a number on each line, or 28K+8x4K for prompts of 28K tokens, each with 8 answers "
        "of 4K; default: one document for each sequence",
    )
    run.add_argument(
        "--allow-unknown",
        action="store_true",
        help="plan a config.json of an architecture that is not known here, as a decoder with "
        "attention and a gated MLP in every layer; the plan says what it assumes",
    )
    search = made.add_argument_group(
        "search", "The plan tries all values of the flags that you leave out, and of --mesh flags."
    )
    search.add_argument("--zero", type=int, nargs="+", help="ZeRO levels to try, from 0 to 3")
    search.add_argument(
        "--remat",
        nargs="+",
        help="values of --remat to try, of none, products_saved, projections_saved, "
        "attention_saved, full",
    )
    for name, text in (
        ("offload", "whether saved arrays move to the host"),
        ("tile", "whether loss and MLP run on tiles of tokens"),
    ):
        search.add_argument(
            f"--{name}", action=argparse.BooleanOptionalAction, default=None, help=text
        )
    search.add_argument(
        "--memory-fraction",
        type=float,
        default=0.92,
        help="share of a GPU's memory that a step may take; default: 0.92",
    )
    shown = made.add_argument_group("output")
    shown.add_argument("--top", type=int, default=8, help="number of settings to show; default: 8")
    shown.add_argument("--json", action="store_true", help="print JSON")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the plan, or a message about a mistake in the command line. The exit status is 1 if
    nothing fits the memory, 2 on a mistake."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    run = words.pop(0) if words and not words[0].startswith("-") else None
    args, flags = parser().parse_known_args(words)
    try:
        found = _plan(run, flags, args)
    except UserError as error:
        say(str(error))
        return 2
    try:
        text = json.dumps(found.as_dict(), indent=2) if args.json else str(found)
        print(printable(text), flush=True)
    except BrokenPipeError:
        # A reader such as `head` has closed the pipe. The rest must not fail at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if found.reason is not None else 1


def _plan(run: str | None, flags: list[str], args: argparse.Namespace) -> Plan:
    # NumPy takes longer to import than the help may take.
    from trainer.planner.command import OWN
    from trainer.planner.planning import plan
    from trainer.planner.search import REMAT, Search

    if run is None:
        raise InputError(
            "The first word must name what is planned: a recipe, a config.json, or the folder of a "
            f"model; got none. Recipes: {', '.join(RECIPES)}."
        )
    _check_cluster_flags(args)
    planned = find_run(run, flags, seq_len=args.seq_len, allow_unknown=args.allow_unknown)
    config = planned.config
    options = Search(
        degrees=config.mesh.given,
        zero=tuple(args.zero or (0, 1, 2, 3)),
        remat=tuple(args.remat or REMAT),
        offload=(False, True) if args.offload is None else (args.offload,),
        tiled=(False, True) if args.tile is None else (args.tile,),
        offload_optimizer=config.offload_optimizer,
        gradient_dtype=config.attention.gradient_dtype,
        exchange=config.attention.exchange,
        memory_fraction=args.memory_fraction,
    )
    typed = ("nodes", "gpus_per_node", "port", "ports", "inside", "half_duplex", "latency")
    return plan(
        **{name: getattr(args, name) for name in (*typed, "seq_len", "lengths", "top")},
        gpu=_gpu(args),
        model=planned.sizes,
        run=planned.run or (OWN,),
        options=options,
    )


def find_run(
    run: str, flags: Sequence[str] = (), *, seq_len: str | None = None, allow_unknown: bool = False
) -> Planned:
    """What a command line names.

    Args:
        run: a recipe, the config.json of a run, or the folder or config.json of a model in the
            format of Hugging Face.
        flags: flags of `train.py`.
        seq_len: tokens in a sequence, such as "512K"; None for that of the recipe.
        allow_unknown: whether to plan a model of an unknown architecture: see `find_model`.

    Raises:
        InputError: if there is no such model, or a flag has no effect on a plan.
    """
    from trainer.planner.quantities import parse_count

    flags = list(flags)
    for name, way_out in SEARCHED.items():
        if flag_of(flags, name) is not None:
            raise InputError(f"{name} must be left out of a plan; got it. {way_out}")
    length = [] if seq_len is None else ["--seq-len", str(parse_count(seq_len, "--seq-len"))]
    if run not in RECIPES:
        # Its readers of packed tensors import numpy and jaxtyping, which no recipe needs.
        from trainer.gpt.pretrained.plan_model import find_model, is_file_model

        if is_file_model(run):
            return _of_file(find_model(run, allow_unknown=allow_unknown), run, flags, length)
    config = _read([run, *flags, *length])
    sizes = replace(TASKS[config.kind].sizes(config), name=run)
    return Planned(sizes, (run, *flags), config)


def _of_file(file: FileModel, run: str, flags: list[str], length: list[str]) -> Planned:
    """The plan of a model in the format of Hugging Face."""
    changes = [x for x in flags if x.startswith(("--model.", "--lora."))]
    if changes and not file.run:
        raise InputError(
            f"{changes[0]} needs a recipe, or a model that --init-from takes; got {run!r}. Plan a "
            "recipe with such sizes."
        )
    if not changes:  # No file but the config.json is needed.
        config = _read([CARRIER, *flags])
        batch = config.batch_size
        sizes = replace(file.sizes, batch=batch, average=config.ema_decay is not None)
        return Planned(sizes, (*file.run, *flags) if file.run else (), config)
    config = _read([*file.run, *flags, *length])
    sizes = replace(TASKS[config.kind].sizes(config), name=run)
    return Planned(sizes if length else replace(sizes, seq_len=None), (*file.run, *flags), config)


def _read(words: list[str]) -> TrainConfig:
    config = read_command_line(words).settings
    if config.optimizer.kind != "adamw":
        raise InputError(
            f"A plan needs optimizer.kind='adamw'; got {config.optimizer.kind!r}, whose memory is "
            "not predicted. Leave it out."
        )
    return config


def _check_cluster_flags(args: argparse.Namespace) -> None:
    missing = [x for x in ("nodes", "gpus_per_node", "gpu") if getattr(args, x) is None]
    if missing:
        raise InputError(
            "The cluster must be described by --nodes, --gpus-per-node and --gpu; got no "
            f"{' and no '.join(map(_flag, missing))}. Write for example --nodes 8 --gpus-per-node "
            "8 --gpu h100 --port 50GB/s; train.py --plan show measures the devices at hand."
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _gpu(args: argparse.Namespace) -> Gpu:
    from trainer.planner.hardware import find_gpu
    from trainer.planner.quantities import parse_bytes, parse_flops

    gpu = find_gpu(args.gpu)
    if args.peak_flops is not None:
        gpu = replace(gpu, peak_flops=parse_flops(args.peak_flops, "--peak-flops"))
    if args.memory is not None:
        gpu = replace(gpu, memory_bytes=parse_bytes(args.memory, "--memory"))
    if args.efficiency is not None:
        if not 0 < args.efficiency <= 1:
            raise InputError(
                f"--efficiency must be above 0 and at most 1; got {args.efficiency}. Use 0.7."
            )
        gpu = replace(gpu, matrix_efficiency=args.efficiency)
    return gpu


if __name__ == "__main__":
    raise SystemExit(main())
