"""The flags of `python -m startrail_jax.verify`, and what runs in which order."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args

import jax

from startrail_jax.blocks import BACKENDS
from startrail_jax.errors import BalanceWarning, InputError, ShapeWarning, UserError
from startrail_jax.linear.rules import RULES
from startrail_jax.linear.vjp import BLOCKS
from startrail_jax.rings.options import Exchange
from startrail_jax.testing import simulate_devices
from startrail_jax.tokens.layout import KINDS
from startrail_jax.verify.cases import Case, DenseCase, StateCase
from startrail_jax.verify.exactness import check_exactness
from startrail_jax.verify.report import Report
from startrail_jax.verify.schemes import NAMES
from startrail_jax.verify.speed import measure

T = TypeVar("T")

_DTYPES = ("float32", "bfloat16", "float16")
_TOKENS = {"cpu": 256, "default": 8192}
"""Tokens of a device by default."""


def main(argv: list[str] | None = None) -> int:
    """Verifies the op as the flags say; 0 if all is right, 1 if something is wrong."""
    parser = make_parser()
    flags = parser.parse_args(argv)
    check_flags(parser, flags)
    try:
        start_devices(flags)
        report = Report(case=make_case(flags), flags=_jsonable(flags))
        with warnings.catch_warnings():
            for kind in (BalanceWarning, ShapeWarning):
                warnings.simplefilter("ignore", kind)
            run(report, flags.samples)
    except UserError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    if flags.json is not None:
        report.write(flags.json)
    return 0 if report.ok else 1


def run(report: Report, samples: int) -> None:
    """Checks and measures all schemes, one after another."""
    case = report.case
    schemes, _ = case.schemes
    report.begin()
    report.begin_exactness()
    for scheme in schemes:
        report.add_exactness(scheme, _or_failure(lambda x=scheme: check_exactness(case, x)))
    report.begin_speed()
    for scheme in schemes:
        report.add_speed(scheme, _or_failure(lambda x=scheme: measure(case, x, samples)))
    report.end()


def _or_failure(function: Callable[[], T]) -> T | str:
    """What a function returns, or what XLA raised, such as that the memory is too small."""
    try:
        return function()
    except jax.errors.JaxRuntimeError as error:
        return (str(error).strip().splitlines() or ["JaxRuntimeError"])[0][:200]


def start_devices(flags: argparse.Namespace) -> None:
    """Simulates devices and joins other processes, as the flags say."""
    if flags.simulate is not None:
        simulate_devices(flags.simulate)
    if flags.coordinator is not None:
        jax.distributed.initialize(
            flags.coordinator,
            flags.processes,
            flags.index,
            # Even with an address jax would look for SLURM, and give each process one GPU.
            cluster_detection_method="deactivate",
        )
    elif flags.distributed:
        try:
            jax.distributed.initialize()
        except ValueError as error:
            raise InputError(
                "--distributed needs processes that SLURM, Open MPI or Kubernetes started and that "
                f"jax recognises; got {error}. Start them so, or give --coordinator, --processes "
                "and --index."
            ) from error


def make_case(flags: argparse.Namespace) -> Case:
    """What the flags say, with their defaults for these devices, which also stand in `flags`."""
    devices = jax.devices()
    if flags.simulate is not None and jax.process_count() == 1:
        devices = devices[: flags.simulate]
    platform = devices[0].platform
    if flags.dtype is None:
        flags.dtype = "float32" if platform == "cpu" else "bfloat16"
    if flags.seq_len is None:
        flags.seq_len = len(devices) * _TOKENS.get(platform, _TOKENS["default"])
    if flags.kv_heads is None:
        flags.kv_heads = flags.heads
    if flags.value_head_dim is None:
        flags.value_head_dim = flags.head_dim
    common: dict[str, Any] = {
        name: getattr(flags, name)
        for name in ("seq_len", "heads", "kv_heads", "head_dim", "value_head_dim", "dtype")
    }
    common |= dict(documents=flags.documents, layout=flags.layout, rows=flags.batch)
    common |= dict(devices=tuple(devices), data=flags.data, tensor=flags.tensor)
    given = {"scale": flags.scale, "backend": flags.backend}
    options = {name: x for name, x in given.items() if x is not None}
    if flags.rule is not None:
        return StateCase(**common, options={"rule": flags.rule, **options})
    options |= dict(softcap=flags.softcap, exchange=flags.exchange)
    options |= dict(head_chunks=flags.head_chunks, keep_gathered=flags.keep_gathered)
    mask, width = "full" if flags.full else "causal", 0
    for name in ("window", "block_causal"):
        if getattr(flags, name) is not None:
            mask, width = name.replace("_", "-"), getattr(flags, name)
    wanted = tuple(flags.schemes)
    return DenseCase(**common, options=options, mask=mask, width=width, wanted=wanted)


def make_parser() -> argparse.ArgumentParser:
    """All flags."""
    parser = argparse.ArgumentParser(
        prog="python -m startrail_jax.verify",
        description="Verifies the op on the devices at hand: exactness of both passes beside "
        "float64, bytes of the compiled programs beside the closed form, and speed, for every "
        "scheme that fits. The exit status is 1 if anything is wrong.",
    )
    call = parser.add_argument_group("call")
    call.add_argument("--heads", type=_count, default=8, help="query heads, or states (8)")
    call.add_argument("--kv-heads", type=_count, help="key heads (as many as query heads)")
    call.add_argument("--head-dim", type=_count, default=64, help="channels of a head (64)")
    call.add_argument("--value-head-dim", type=_count, help="those of a value (as --head-dim)")
    call.add_argument("--seq-len", type=_count, help="tokens of a row, as timed (8,192 a device; "
                      "256 on CPUs)")  # fmt: skip
    call.add_argument("--batch", type=_count, default=1, help="rows, as timed (1)")
    call.add_argument("--dtype", choices=_DTYPES, help="of inputs (bfloat16; float32 on CPUs)")
    masks = call.add_mutually_exclusive_group()
    masks.add_argument("--causal", action="store_true", help="a causal mask, the default")
    masks.add_argument("--full", action="store_true", help="no mask")
    masks.add_argument("--window", type=_count, metavar="W", help="a causal window of W keys")
    masks.add_argument("--block-causal", type=_count, metavar="N", help="causal in blocks of N")
    call.add_argument("--documents", action="store_true", help="pack four documents and padding "
                      "in each row")  # fmt: skip
    call.add_argument("--softcap", type=float, help="soft cap of the logits")
    call.add_argument("--scale", type=float, help="factor of the logits (head_dim ** -0.5)")
    call.add_argument("--rule", choices=tuple(RULES), help="linear attention by this rule")
    how = parser.add_argument_group("how it is computed")
    how.add_argument("--backend", choices=sorted({"auto", *BACKENDS, *BLOCKS}), help="kernels")
    how.add_argument("--layout", choices=KINDS, help="order of the tokens (contiguous; both for "
                     "linear attention)")  # fmt: skip
    exchanges = get_args(Exchange)
    how.add_argument("--exchange", choices=exchanges, default="auto", help="messages (auto)")
    how.add_argument("--head-chunks", type=_count, default=1, help="parts of the heads (1)")
    how.add_argument("--keep-gathered", action="store_true", help="keep units for backward")
    how.add_argument("--schemes", nargs="+", choices=NAMES, default=list(NAMES), help="(all)")
    how.add_argument("--data", type=_count, default=1, help="shards of the batch (1)")
    how.add_argument("--tensor", type=_count, default=1, help="shards of the heads (1)")
    where = parser.add_argument_group("where")
    where.add_argument("--simulate", type=_count, metavar="N", help="N CPU devices a process")
    where.add_argument("--distributed", action="store_true", help="several processes that SLURM, "
                       "Open MPI or Kubernetes started")  # fmt: skip
    where.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0")
    where.add_argument("--processes", type=_count, help="number of processes")
    where.add_argument("--index", type=int, help="index of this process, from 0 on")
    parser.add_argument("--samples", type=_count, default=5, help="calls that are timed (5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all of it there")
    return parser


def check_flags(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    """Ends the program, with status 2, if flags contradict each other."""
    heads, kv_heads = flags.heads, flags.kv_heads or flags.heads
    if heads % kv_heads:
        parser.error(f"--kv-heads must divide --heads; got {kv_heads} and {heads}.")
    of_processes = [flags.coordinator, flags.processes, flags.index]
    if any(x is not None for x in of_processes) and None in of_processes:
        parser.error(
            "--coordinator, --processes and --index go together. Give all three, or "
            "--distributed alone under a launcher."
        )
    if flags.processes is not None and not 0 <= flags.index < flags.processes:
        parser.error(
            f"--index must be from 0 to {flags.processes - 1} with --processes "
            f"{flags.processes}; got {flags.index}."
        )
    if flags.batch % flags.data:
        parser.error(
            f"--data must divide --batch; got {flags.data} and {flags.batch}. Use "
            f"--batch {-(-flags.batch // flags.data) * flags.data}."
        )
    if flags.json is not None and not flags.json.resolve().parent.is_dir():
        parser.error(f"--json must name a file in a folder that exists; got {flags.json}.")
    backends = BLOCKS if flags.rule else ("auto", *BACKENDS)
    if flags.backend is not None and flags.backend not in backends:
        kind = "linear attention" if flags.rule else "attention"
        parser.error(
            f"--backend must be one of {', '.join(backends)} for {kind}; got {flags.backend}."
        )
    if flags.rule is None:
        return
    of_softmax = ("full", "window", "block_causal", "softcap", "keep_gathered")
    given = [name for name in of_softmax if getattr(flags, name)]
    defaults = dict(exchange="auto", head_chunks=1, schemes=list(NAMES))
    given += [name for name, x in defaults.items() if getattr(flags, name) != x]
    if given:
        parser.error(
            f"--rule is for linear attention, which has no --{given[0].replace('_', '-')}. Leave "
            "one of the two out."
        )


def _count(text: str) -> int:
    number = int(text) if text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1; got {text!r}")
    return number


def _jsonable(flags: argparse.Namespace) -> dict[str, Any]:
    return {name: str(x) if isinstance(x, Path) else x for name, x in vars(flags).items()}
