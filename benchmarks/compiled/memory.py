"""Shows how much of a GPU's memory a training step takes, compiled on a machine that has no GPU.

    pip install --no-deps jax-cuda13-pjrt==<version of jax>
    python benchmarks/compiled/memory.py --mesh.team 4       # all recipes, all rows: 20 minutes
    python benchmarks/compiled/memory.py --recipes gpt_7b --rows "recipe|zero"
    python benchmarks/compiled/memory.py --recipes gpt_8b_gqa --target h100 --devices 32 \\
        --seq-len 262144 --mesh.team 2 --rows recipe --details
    python benchmarks/compiled/memory.py --arithmetic        # compiles nothing
    python benchmarks/compiled/memory.py --random 20 --seed 0   # settings drawn at random

Each row is a recipe of configs/ with its own settings, or with the changes that the row names. The
mesh is the one that train.py takes for that recipe, for these flags and so many devices; a row that
train.py refuses gives the reason. The columns are in GiB of one device:

    state     weights, optimizer and batch: the program's arguments
    rest      everything else that the step needs at a time, on the device
    host      what waits in the host's memory
    peak      what the device needs in all; memory of state that the step has used up is used again
    formula   `startrail_jax.planner.memory`: its state is exact, its sum an estimate
    fits      whether the peak is within what jax takes of the GPU: 75 % of it by default, or
              92 % with XLA_PYTHON_CLIENT_MEM_FRACTION=.92

Programs are compiled, not run. The memory of NCCL, cuDNN's workspaces and gaps of the allocator
come on top, hence 92 %. XLA is told of an A100 of 80 GB, whatever size the row is compared with,
because it tries to save memory by itself only where a program needs more than that.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import replace

import jax

from benchmarks.compiled.deviceless import target_names
from benchmarks.compiled.drawn import drawn
from benchmarks.compiled.step import Reading, Row, formula_of, read
from configs import RECIPES
from startrail_jax.devices.degrees import Degrees
from startrail_jax.errors import UserError
from startrail_jax.planner.memory import GIB, Footprint
from trainer.config import MeshConfig, TrainConfig
from trainer.gpt.config import GPTTrainConfig
from trainer.gpt.lora.settings import LoraConfig
from trainer.parallel.degrees import choose_degrees
from trainer.run.exit import exit_on_user_errors

GPU_GIB = {"a100": 40, "h100": 80, "h200": 141}
"""Memory of the GPUs that recipes are compared with: of A100 the smaller one."""

FRACTIONS = {0.75: "yes", 0.92: "with .92"}
"""Shares of a GPU's memory that jax takes: by default, and as many runs set it."""

# Recipe: target, devices.
HARDWARE = {
    "gpt_7b": ("h200", 64),
    "gpt_3b": ("a100", 32),
    "gpt_8b_gqa": ("h200", 64),
    "llama3_8b_1m": ("h100", 8),
    "qwen3_8b_1m": ("h100", 8),
    "dit_1b": ("a100", 32),
}


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    print(f"jax {jax.__version__}; GiB of one device")
    if args.random is not None:
        compare_drawn(args.random, args.seed, compiles=not args.arithmetic, details=args.details)
        return
    for recipe in args.recipes:
        target, num_devices = HARDWARE[recipe]
        target, num_devices = args.target or target, args.devices or num_devices
        config = RECIPES[recipe]()
        degrees = choose_degrees(
            replace(config.mesh, **args.mesh), num_devices, config.attention_call
        )
        named = describe(degrees)
        if args.seq_len is not None:
            if not isinstance(config, GPTTrainConfig):
                raise SystemExit(f"--seq-len is for GPTs; got recipe {recipe}. Leave it out.")
            config = replace(config, seq_len=args.seq_len)
        print(f"\n{recipe}, {config.num_tokens} tokens, {num_devices} x {target}: {named}")
        print(f"{'':<32}{'state':>8}{'rest':>8}{'host':>8}{'peak':>8}{'formula':>9}  fits")
        for row in rows(config):
            if not re.search(args.rows, row.name):
                continue
            try:
                formula = formula_of(row.config, degrees)
            except UserError as error:
                print(f"{row.name:<32}train.py refuses it: {error}")
                continue
            reading = None if args.arithmetic else read(row, degrees, target)
            print(line(row, formula, reading, GPU_GIB[target]), flush=True)
            if args.details:
                print(formula.table())
    print("\nnext: python train.py RECIPE with the flags of a row that fits, on those devices")


def compare_drawn(count: int, seed: int, *, compiles: bool, details: bool) -> None:
    """Prints peak and formula of runs that are drawn at random, and how far they are apart."""
    print(f"\n{count} runs drawn with seed {seed}, on H100s")
    print(f"{'':>4}{'peak':>8}{'formula':>9}{'apart':>8}  mesh; model and settings")
    errors = []
    for number, (row, degrees) in enumerate(drawn(count, seed), 1):
        formula = formula_of(row.config, degrees)
        estimate = formula.device_bytes
        if compiles:
            peak = read(row, degrees, "h100").peak
            errors.append(abs(estimate / peak - 1))
            columns = f"{peak / GIB:>8.2f}{estimate / GIB:>9.2f}{estimate / peak - 1:>+8.1%}"
        else:
            columns = f"{'':>8}{estimate / GIB:>9.2f}{'':>8}"
        print(f"{number:>4}{columns}  {describe(degrees)}; {row.name}", flush=True)
        if details:
            print(formula.table())
    if errors:
        near = sum(error <= 0.1 for error in errors)
        print(f"{near} of {count} within 10 %, the furthest {max(errors):.1%} apart")


def describe(degrees: Degrees) -> str:
    """The degrees above 1."""
    return ", ".join(f"{name} {n}" for name, n in vars(degrees).items() if n > 1)


def rows(config: TrainConfig) -> Iterator[Row]:
    """The recipe, and then one factor changed at a time."""
    yield Row("as the recipe", config)
    for level in (0, 1, 2):
        yield Row(f"zero {level}", replace(config, zero=level))
    for axes in (("team",), ("ring", "team")):
        yield Row(f"zero over {' and '.join(axes)}", replace(config, zero_axes=axes))
    yield Row("remat full", replace(config, remat="full"))
    yield Row("remat none", replace(config, remat="none", offload=False))
    yield Row("offload", replace(config, offload=True))
    for tile in (None, 512):
        yield Row(f"tile {tile}".lower(), replace(config, tile=tile))
    for parts in (2, 4, 8):
        attention = replace(config.attention, head_chunks=parts)
        yield Row(f"heads in {parts} parts", replace(config, attention=attention))
    two = replace(config, batch_size=2 * config.batch_size)
    yield Row("2 sequences", two)
    yield Row("2 sequences, accumulation 2", replace(two, accumulation=2))
    yield Row("float32", replace(config, model=replace(config.model, dtype="float32")))
    yield Row("without donation", config, donate=False)
    if isinstance(config, GPTTrainConfig):
        yield Row("lora of rank 16", replace(config, lora=LoraConfig(rank=16)))


def line(row: Row, formula: Footprint, reading: Reading | None, gpu_gib: float) -> str:
    if reading is None:
        state = formula.state_bytes + formula["batch"]
        peak = formula.device_bytes
        sizes = (state, peak - state, formula.host_bytes, peak, peak)
    else:
        host, peak = reading.host, reading.peak
        sizes = (reading.arguments, reading.temporary, host, peak, formula.device_bytes)
    *columns, arithmetic = (f"{size / GIB:.2f}" for size in sizes)
    fits = (word for part, word in FRACTIONS.items() if peak <= part * gpu_gib * GIB)
    text = f"{row.name:<32}" + "".join(f"{column:>8}" for column in columns)
    text += f"{arithmetic:>9}  {next(fits, 'no')}"
    return text if reading is None else f"{text:<92}({reading.seconds:.0f} s)"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line of the benchmark; see --help."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", nargs="+", choices=HARDWARE, help="by default all of them")
    parser.add_argument("--rows", help="regular expression: only the rows it finds")
    parser.add_argument("--target", choices=target_names(), help="GPU; by default the recipe's")
    parser.add_argument("--devices", type=int, help="number of them; by default the recipe's")
    parser.add_argument("--seq-len", type=int, help="tokens in a sequence")
    for role in MeshConfig().degrees:
        help_text = "degree of parallelism; by default that of train.py"
        parser.add_argument(f"--mesh.{role}", dest=role, type=int, help=help_text)
    parser.add_argument("--random", type=int, metavar="N", help="so many drawn runs, no recipes")
    parser.add_argument("--seed", type=int, help="seed of these runs; by default 0")
    parser.add_argument("--arithmetic", action="store_true", help="the formula alone")
    parser.add_argument("--details", action="store_true", help="parts of the formula")
    args = parser.parse_args(argv)
    args.mesh = {
        role: degree for role in MeshConfig().degrees if (degree := getattr(args, role)) is not None
    }
    check_args(parser, args)
    args.recipes, args.rows = args.recipes or list(HARDWARE), args.rows or ""
    args.seed = args.seed or 0
    return args


def check_args(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the program if a flag makes no sense, or none beside the others."""
    for name in ("random", "devices"):
        number = getattr(args, name)
        if number is not None and number < 1:
            parser.error(f"--{name} must be at least 1; got {number}. Use more, or leave it out.")
    if args.random is None:
        if args.seed is not None:
            parser.error(
                f"--seed is that of drawn runs; got --seed {args.seed} without --random. Add "
                "--random 20, or leave it out."
            )
        return
    names = ("recipes", "rows", "target", "devices", "seq_len")
    others = [f"--{x.replace('_', '-')}" for x in names if getattr(args, x) is not None]
    others += [f"--mesh.{role}" for role in args.mesh]
    if others:
        parser.error(
            "--random draws models, settings and meshes, all for H100s; got --random "
            f"{args.random} with {', '.join(others)}. Leave these out, or --random."
        )


if __name__ == "__main__":
    with exit_on_user_errors():
        main()
