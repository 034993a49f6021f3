"""Kills training at random moments and shows that no work before the last checkpoint is lost.

    python tests/faults/crash.py                            # 10 kills
    python tests/faults/crash.py --kills 50 --seed 1 --moments call
    python tests/faults/crash.py --kills 20 -- --devices 8 --seq-len 512 \\
        --data.batches documents --data.mask-documents --data.end-of-document 0

What follows `--` are flags of train.py. The moments of the kills take turns:

    save      up to 20 ms after the folder of an unfinished checkpoint appeared
    step      up to 300 ms after a random step was reported
    start     up to 2.5 s after the first line of a start, while folders are opened, unfinished
              checkpoints are removed and the newest one is read
    call      just before one of the first 200 calls that change the run folder: files opened for
              writing, folders made, renamed and removed, what is flushed to the disk
    power     up to 500 ms after a random step was reported; then all or half of what this start has
              not flushed to the disk is lost (tests/faults/power.py)
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.faults import power
from tests.faults.failures import TRAIN, Processes, began_after, last_reported
from tests.faults.run_folders import CheckFailed, exit_status, newest_whole, unfinished

EVERY = 3
"""Number of steps between checkpoints: so few that training is nearly always saving one."""
MOMENTS = ("save", "step", "start", "call", "power")
SECONDS_AFTER = {"save": 0.02, "step": 0.3, "start": 2.5, "power": 0.5}
HANGS_AFTER_SECONDS = 900
CALLS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink")
"""The audit events of Python that change a folder; of `open`, only if it is for writing."""
FIRST_CALLS = 200
SELF_KILLING = "from tests.faults.crash import run; run()"
"""A program whose words are a run folder, the number of a call, and the flags of train.py."""

FLAGS = (
    "--devices 2 --model.width 32 --model.layers 2 --model.heads 2 --model.kv-heads 1 "
    "--model.head-dim 16 --model.mlp-width 64 --batch-size 2 --seq-len 32 --log-every 1 "
    f"--checkpoint.every {EVERY} --validation-every 1000000 --validation-sequences 2 "
    "--sample.length 0 --no-tensorboard"
)


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One start of the program and its end by SIGKILL."""

    moment: str
    began_after: int | None
    """The step that the program went on from, 0 at the beginning; None if it was killed before."""
    last_step: int
    whole: int
    """The step of the newest whole checkpoint after the kill, 0 if there is none."""
    unfinished: tuple[str, ...]


def crash(
    num_kills: int,
    *,
    seed: int,
    folder: Path,
    moments: Sequence[str] = MOMENTS,
    flags: Sequence[str] = (),
) -> list[Kill]:
    """Trains without and with kills, whose moments take turns, and compares."""
    random = np.random.default_rng(seed)
    data = folder / "tokens.bin"
    random.integers(0, 256, 20_000).astype("<u2").tofile(data)
    # Saves take most of the time, and a kill loses the steps of at most two of them.
    steps = EVERY * (8 + 6 * num_kills)
    flags = [*FLAGS.split(), "--data.path", str(data), "--steps", str(steps), *flags]

    undisturbed, run_dir = folder / "undisturbed", folder / "killed"
    started = time.perf_counter()
    with Processes(1, [*flags, "--run-dir", str(undisturbed)], folder=folder) as process:
        process.end(seconds=HANGS_AFTER_SECONDS)
    seconds = time.perf_counter() - started
    expected = losses(undisturbed)
    check_steps(expected, steps)
    print(f"undisturbed: {steps} steps in {seconds:.1f} s", flush=True)

    flags += ["--run-dir", str(run_dir)]
    kills: list[Kill] = []
    for number in range(num_kills):
        moment = moments[number % len(moments)]
        flushed, program, words = folder / f"flushed-{number}", TRAIN, []
        if moment == "call":
            program, words = SELF_KILLING, [str(run_dir), str(random.integers(FIRST_CALLS))]
        elif moment == "power":
            program, words = power.PROGRAM, [str(run_dir), str(flushed)]
        with Processes(1, [*words, *flags], folder=folder, program=program) as process:
            if moment == "start":
                process.wait_for(lambda: process.output(0) != "")
            elif moment != "call":
                # Not near the end of the run, which might be over before the kill.
                first, last = (int(steps * (number + x) / (num_kills + 1)) for x in (0.3, 0.7))
                step = int(random.integers(first, last))
                process.wait_for(lambda step=step: last_reported(process.output(0)) >= step)
            if moment == "save":
                process.wait_for(lambda: bool(unfinished(run_dir)), every=0.001)
            if moment != "call":
                time.sleep(random.uniform(0, SECONDS_AFTER[moment]))
                process.signal(0, signal.SIGKILL)
            process.end(-signal.SIGKILL, seconds=HANGS_AFTER_SECONDS)
            began = began_after(process.output(0))
        if moment == "power":
            lose_power(run_dir, flushed, random)
        kill = Kill(
            moment=moment,
            began_after=began,
            last_step=last_step(run_dir),
            whole=newest_whole(run_dir),
            unfinished=unfinished(run_dir),
        )
        check_beginning(began, kills)
        check_kill(kill)
        kills.append(kill)
        print(f"{number + 1:>3}  {describe(kill)}", flush=True)

    with Processes(1, flags, folder=folder) as process:
        process.end(seconds=HANGS_AFTER_SECONDS)
        began = began_after(process.output(0))
    check_beginning(began, kills)
    print(f"     from step {began} to the end", flush=True)
    got = losses(run_dir)
    check_steps(got, steps)
    differ = [step for step, loss in got if loss != dict(expected)[step]]
    if differ:
        raise CheckFailed(
            f"Losses must be those of an undisturbed run; got others in {len(differ)} steps, "
            f"first in step {differ[0]}."
        )
    in_save = sum(bool(kill.unfinished) for kill in kills)
    print(
        f"{num_kills} kills, {in_save} of them with a checkpoint unfinished: went on from the "
        f"newest whole one every time, and all {steps} losses are those of the undisturbed run"
    )
    return kills


def run() -> None:
    """Runs train.py, which kills itself in place of a call that changes the run folder."""
    folder, left = sys.argv.pop(1), int(sys.argv.pop(1))

    def count(path: str | bytes | os.PathLike) -> None:
        nonlocal left
        if os.fsdecode(path).startswith(folder):
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    def see(event: str, arguments: tuple) -> None:
        writes = event != "open" or bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
        if event in CALLS and writes and isinstance(arguments[0], str | bytes | os.PathLike):
            count(arguments[0])

    flush = os.fsync

    def fsync(descriptor: int) -> None:
        count(os.readlink(f"/proc/self/fd/{descriptor}"))
        flush(descriptor)

    os.fsync = fsync
    sys.addaudithook(see)
    sys.argv[0] = "train.py"
    runpy.run_path("train.py", run_name="__main__")


def lose_power(run_dir: Path, flushed: Path, random: np.random.Generator) -> None:
    """Leaves of a run what a disk could have kept: at least the checkpoint before the newest."""
    newest, left = newest_whole(run_dir), flushed.with_name(f"{flushed.name}-left")
    survives = random.choice([0.0, 0.5])
    power.after_power_failure(run_dir, flushed, left, random, survives)
    if newest_whole(left) < newest - EVERY:
        raise CheckFailed(
            f"After step {newest} was saved, a power failure must leave it or the one before; got "
            f"step {newest_whole(left)} in {left}."
        )
    shutil.rmtree(run_dir)
    left.rename(run_dir)


def losses(run_dir: Path) -> list[tuple[int, float]]:
    """Step and training loss of every whole line of metrics.jsonl that has a training loss."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(x["step"], x["train_loss"]) for x in records if "train_loss" in x]


def last_step(run_dir: Path) -> int:
    return max((step for step, _ in losses(run_dir)), default=0)


def check_beginning(began_after: int | None, kills: Sequence[Kill]) -> None:
    """Raises an error unless a start went on from the checkpoint that the last kill left."""
    expected = kills[-1].whole if kills else 0
    if began_after not in (None, expected):
        raise CheckFailed(
            f"A run must go on from its newest whole checkpoint; got step {began_after}, where "
            f"that of step {expected} was whole."
        )


def check_kill(kill: Kill) -> None:
    """Raises an error unless all but the last checkpoint that the metrics imply are whole."""
    begun = (kill.last_step - 1) // EVERY * EVERY
    if kill.whole < begun - EVERY:
        raise CheckFailed(
            f"After step {kill.last_step} the checkpoint of step {begun - EVERY} must be whole; "
            f"got that of step {kill.whole} as the newest."
        )


def check_steps(found: Sequence[tuple[int, float]], steps: int) -> None:
    """Raises an error unless there is one loss for every step, in order."""
    if [step for step, _ in found] != list(range(1, steps + 1)):
        raise CheckFailed(
            f"metrics.jsonl must have steps 1 to {steps} once, in order; got "
            f"{[step for step, _ in found]}."
        )


def describe(kill: Kill) -> str:
    begun = "?" if kill.began_after is None else kill.began_after
    saving = f", {' and '.join(kill.unfinished)} unfinished" if kill.unfinished else ""
    return (
        f"from step {begun:<5}killed ({kill.moment:<5}) at step {kill.last_step:<5}"
        f"step {kill.whole} whole{saving}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10, help="how often to kill it")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    parser.add_argument("--moments", nargs="+", choices=MOMENTS, default=MOMENTS, help="when")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="after --: flags of train.py")
    args = vars(parser.parse_args())
    return exit_status(lambda folder: crash(args.pop("kills"), folder=folder, **args))


if __name__ == "__main__":
    sys.exit(main())
