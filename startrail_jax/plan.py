"""Finds the fastest setting for a cluster and a model. Needs no devices.

    python -m startrail_jax.plan --nodes 8 --gpus-per-node 8 --gpu h100 --port 50GB/s \\
        --model gpt_7b --seq-len 512K
    python -m startrail_jax.plan --nodes 4 --gpus-per-node 8 --gpu a100_40 --port 100Gb/s \\
        --ports 1 --model path/of/config.json --seq-len 128K --zero 3 --remat full
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import types
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from startrail_jax.errors import InputError, UserError

DEGREES = ("data", "group", "ring", "team", "head", "tensor")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m startrail_jax.plan",
        usage="%(prog)s --nodes N --gpus-per-node N --gpu GPU [--port RATE] --model MODEL [flags]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
    model = made.add_argument_group("model")
    model.add_argument(
        "--model",
        help="a name, such as llama3_8b or that of a recipe, or a config.json of Hugging Face; or "
        "leave it out and give the sizes below",
    )
    model.add_argument(
        "--allow-unknown",
        action="store_true",
        help="plan a config.json of an architecture that is not known here, as a decoder with "
        "attention and a gated MLP in every layer; the plan says what it assumes",
    )
    for name in ("width", "layers", "heads", "kv-heads", "head-dim", "mlp-width", "outputs"):
        model.add_argument(f"--{name}", help="size of the model, without --model or to change it")
    model.add_argument(
        "--windows",
        nargs="+",
        help="tokens that a token of each layer attends to, such as 512 512 512 none; the list "
        "repeats, and none means all earlier tokens",
    )
    model.add_argument(
        "--qk-norm",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="whether the heads of queries and keys are normalised",
    )
    model.add_argument(
        "--lora-rank",
        help="rank of adapters of queries and values, trained in place of all other weights",
    )
    model.add_argument("--seq-len", help="tokens in a sequence, such as 512K")
    model.add_argument(
        "--batch", help="sequences in a batch, over all GPUs; default: that of the recipe, or 1"
    )
    model.add_argument(
        "--lengths",
        help="tokens of the documents that fill the sequences: lognormal:MEDIAN,MEAN, or a text "
        "file with a number on each line; default: one document for each sequence",
    )
    search = made.add_argument_group(
        "search",
        "The planner tries all values of flags that you leave out, but for the last three.",
    )
    for role in DEGREES:
        search.add_argument(f"--{role}", type=int, help=f"fixed {role} degree of the mesh")
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
        "--offload-optimizer",
        action="store_true",
        help="keep the moments of the optimizer on the host",
    )
    search.add_argument(
        "--gradient-dtype",
        default="float32",
        help="dtype of the gradients of attention that devices send: float32 (default) or bfloat16",
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
    args = parser().parse_args(arguments)
    try:
        found = _plan(args)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        print(json.dumps(found.as_dict(), indent=2) if args.json else found, flush=True)
    except BrokenPipeError:
        # A reader such as `head` has closed the pipe. The rest must not fail at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if found.reason is not None else 1


def _plan(args: argparse.Namespace) -> Any:
    # NumPy takes longer to import than the help may take.
    from startrail_jax.planner.planning import plan
    from startrail_jax.planner.search import REMAT, Search

    _check_cluster_flags(args)
    options = Search(
        degrees={role: value for role in DEGREES if (value := getattr(args, role)) is not None},
        zero=tuple(args.zero or (0, 1, 2, 3)),
        remat=tuple(args.remat or REMAT),
        offload=(False, True) if args.offload is None else (args.offload,),
        tiled=(False, True) if args.tile is None else (args.tile,),
        offload_optimizer=args.offload_optimizer,
        gradient_dtype=args.gradient_dtype,
        memory_fraction=args.memory_fraction,
    )
    typed = ("nodes", "gpus_per_node", "port", "ports", "inside", "half_duplex", "latency")
    return plan(
        **{name: getattr(args, name) for name in (*typed, "seq_len", "batch", "lengths", "top")},
        gpu=_gpu(args),
        model=_model(args),
        options=options,
    )


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


def _gpu(args: argparse.Namespace) -> Any:
    from startrail_jax.planner.hardware import find_gpu
    from startrail_jax.planner.quantities import parse_bytes, parse_flops

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


def _model(args: argparse.Namespace) -> Any:
    from startrail_jax.planner.command import CHANGED
    from startrail_jax.planner.config_json import find_model
    from startrail_jax.planner.models import ModelSizes
    from startrail_jax.planner.quantities import parse_count, parse_window

    options = {"qk_norm", "windows", "lora_rank"}
    others = {"seq_len", "batch", *options}
    names = {field.name for field in fields(ModelSizes)} & set(vars(args)) - others
    sizes: dict[str, Any] = {
        name: parse_count(value, _flag(name))
        for name in sorted(names)
        if (value := getattr(args, name)) is not None
    }
    if args.qk_norm is not None:
        sizes["qk_norm"] = args.qk_norm
    if args.lora_rank is not None:
        sizes["lora_rank"] = parse_count(args.lora_rank, "--lora-rank")
    if args.windows is not None:
        sizes["windows"] = tuple(map(parse_window, args.windows))
    if args.model is not None:
        model = find_model(args.model, allow_unknown=args.allow_unknown)
        if set(sizes) - {"lora_rank"}:
            sizes["name"] = f"{model.name}{CHANGED}"
        return replace(model, **sizes)
    missing = sorted(names - set(sizes) - {"kv_heads"})
    if missing:
        flags = " ".join(_flag(name) for name in missing)
        raise InputError(
            f"--model must be given, or all sizes; got neither --model nor {flags}. Write for "
            "example --model gpt_7b."
        )
    return ModelSizes(**{"name": "given by flags", "kv_heads": sizes["heads"], **sizes})


class _Module(types.ModuleType):
    """Makes this module callable, because importing it replaces `st.plan` by the module."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        from startrail_jax.planner.planning import plan

        return plan(*arguments, **named)


sys.modules[__name__].__class__ = _Module

if __name__ == "__main__":
    sys.exit(main())
