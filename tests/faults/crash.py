"""Kills training at random moments and shows that no work before the last checkpoint is lost.

    python tests/faults/crash.py                            # 10 kills
    python tests/faults/crash.py --kills 50 --seed 1 --moments call
    python tests/faults/crash.py --kills 20 -- --devices 8 --seq-len 512 \\
        --data.batches documents --data.mask-documents --data.end-of-document 0

The benchmark trains a small GPT on simulated devices without disturbance. Then it trains the same
GPT in another folder, kills the program with SIGKILL, starts the same command again, kills it
again, and so on, and lets the last start finish. What follows `--` are flags of train.py that come
after the benchmark's own. The moments of the kills take turns:

    save      up to 20 ms after the folder of an unfinished checkpoint appeared
    step      up to 300 ms after a random step was reported
    start     up to 2.5 s after the first line of a start, while folders are opened, unfinished
              checkpoints are removed and the newest one is read
    call      just before one of the first 200 calls that change the run folder: files opened for
              writing, folders made, renamed and removed, what is flushed to the disk
    power     up to 500 ms after a random step was reported; then all or half of what this start has
              not flushed to the disk is lost (tests/faults/power.py)

The benchmark checks that

* a run continues from the newest complete checkpoint that the kill left, and that this is the last
  or the last but one that training had reached, because one may be unfinished;
* metrics.jsonl has the loss of every step exactly once in the end, and each loss is, bit for bit,
  that of the undisturbed run.

It prints a line for each start of the program, which takes a few seconds, and exits with status 1
if a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from tests.faults import power
from tests.faults.run_folders import (
    REPOSITORY,
    CheckFailed,
    environment,
    newest_whole,
    unfinished,
)

EVERY = 3
"""Number of steps between checkpoints: so few that training is nearly always saving one."""
MOMENTS = ("save", "step", "start", "call", "power")
SECONDS_AFTER = {"save": 0.02, "step": 0.3, "start": 2.5, "power": 0.5}
HANGS_AFTER_SECONDS = 300
CALLS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink")
"""The audit events of Python that change a folder; of `open`, only if it is for writing."""
FIRST_CALLS = 200
SELF_KILLING = "from tests.faults.crash import run; run()"
"""A program for `python -c`: a run folder, the number of a call, and the flags of train.py."""

FLAGS = (
    "--devices 2 --model.width 32 --model.layers 2 --model.heads 2 --model.kv-heads 1 "
    "--model.head-dim 16 --model.mlp-width 64 --batch-size 2 --seq-len 32 --log-every 1 "
    f"--checkpoint.every {EVERY} --evaluate-every 1000000 --validation-sequences 2 "
    "--sample-length 0 --no-tensorboard"
)


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One start of the program and its end by SIGKILL."""

    moment: str
    """One of `MOMENTS`."""
    began_after: int | None
    """The step that the program went on from, 0 at the beginning; None if it was killed before."""
    last_step: int
    """The last step in metrics.jsonl after the kill."""
    whole: int
    """The step of the newest whole checkpoint after the kill, 0 if there is none."""
    unfinished: tuple[str, ...]
    """The folders of unfinished checkpoints after the kill."""


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        try:
            crash(args.kills, seed=args.seed, folder=Path(folder), moments=args.moments,
                  flags=args.flags)  # fmt: skip
        except CheckFailed as failure:
            print(f"FAILED: {failure}", file=sys.stderr)
            return 1
    return 0


def crash(
    num_kills: int,
    *,
    seed: int,
    folder: Path,
    moments: Sequence[str] = MOMENTS,
    flags: Sequence[str] = (),
) -> list[Kill]:
    """Trains without and with kills, and compares.

    Args:
        num_kills: how often to kill the program.
        seed: seed of the moments of the kills.
        folder: folder for the data and both runs.
        moments: those of `MOMENTS` that take turns.
        flags: further flags of train.py.

    Returns:
        The kills, in order.

    Raises:
        CheckFailed: if a run does not go on as it should or ends in other losses.
    """
    random = np.random.default_rng(seed)
    data = folder / "tokens.bin"
    random.integers(0, 256, 20_000).astype("<u2").tofile(data)
    # Saves take most of the time, and a kill loses the steps of at most two of them.
    steps = EVERY * (8 + 6 * num_kills)
    flags = [*FLAGS.split(), "--data.path", str(data), "--steps", str(steps), *flags]

    undisturbed = folder / "undisturbed"
    started = time.perf_counter()
    TrainingProcess(undisturbed, flags).finish()
    seconds = time.perf_counter() - started
    expected = losses(undisturbed)
    check_steps(expected, steps)
    print(f"undisturbed: {steps} steps in {seconds:.1f} s", flush=True)

    run_dir = folder / "killed"
    kills: list[Kill] = []
    for number in range(num_kills):
        moment = moments[number % len(moments)]
        call = int(random.integers(FIRST_CALLS)) if moment == "call" else None
        flushed = folder / f"flushed-{number}" if moment == "power" else None
        process = TrainingProcess(run_dir, flags, killed_before_call=call, flushed=flushed)
        if moment == "start":
            process.read_until_step(0)
        elif moment != "call":
            # Not near the end of the run, which might be over before the kill.
            first, last = (int(steps * (number + x) / (num_kills + 1)) for x in (0.3, 0.7))
            process.read_until_step(int(random.integers(first, last)))
        if moment == "save":
            process.wait_for_save()
        if moment == "call":
            process.be_killed()
        else:
            process.wait(random.uniform(0, SECONDS_AFTER[moment]))
            process.kill()
        if flushed is not None:
            lose_power(run_dir, flushed, random)
        kill = Kill(
            moment=moment,
            began_after=process.began_after,
            last_step=last_step(run_dir),
            whole=newest_whole(run_dir),
            unfinished=unfinished(run_dir),
        )
        check_beginning(process, kills)
        check_kill(kill)
        kills.append(kill)
        print(f"{number + 1:>3}  {describe(kill)}", flush=True)

    process = TrainingProcess(run_dir, flags)
    process.finish()
    check_beginning(process, kills)
    print(f"     from step {process.began_after} to the end", flush=True)
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


class TrainingProcess:
    """`train.py` as a process, whose output is read while it runs."""

    def __init__(
        self,
        run_dir: Path,
        flags: Sequence[str],
        *,
        killed_before_call: int | None = None,
        flushed: Path | None = None,
    ) -> None:
        """Starts it.

        Args:
            run_dir: the folder of the run.
            flags: all other flags.
            killed_before_call: the number, from 0, of the call that changes the run folder, in
                place of which the process kills itself; None for none.
            flushed: a new folder for what the process flushes; None to keep nothing.
        """
        self._run_dir = run_dir
        program = ["train.py"]
        if killed_before_call is not None:
            program = ["-c", SELF_KILLING, str(run_dir), str(killed_before_call)]
        if flushed is not None:
            program = ["-c", power.PROGRAM, str(run_dir), str(flushed)]
        self._process = subprocess.Popen(
            [sys.executable, *program, *flags, "--run-dir", str(run_dir)],
            cwd=REPOSITORY,
            env=environment(run_dir.parent / "compiled"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._watchdog = threading.Timer(HANGS_AFTER_SECONDS, self._process.kill)
        self._watchdog.start()
        self._output: list[str] = []
        self.began_after: int | None = None
        """The step that the process went on from; None until that is known."""

    def read_until_step(self, step: int) -> None:
        """Returns when `step` or a later one is reported; for 0, when anything is printed."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if self._note(line) >= step:
                return
        self._refuse_end()

    def wait_for_save(self) -> None:
        """Returns when there is an unfinished checkpoint."""
        while not unfinished(self._run_dir):
            self.wait(0.001)

    def wait(self, seconds: float) -> None:
        """Waits for some seconds, in which the process must not end."""
        time.sleep(seconds)
        if self._process.poll() is not None:
            self._refuse_end()

    def kill(self) -> None:
        """Kills the process with SIGKILL, and reads what it had printed."""
        self._process.send_signal(signal.SIGKILL)
        self.be_killed()

    def be_killed(self) -> None:
        """Waits until the process is killed, and reads what it had printed."""
        self._read_rest()
        if self._process.returncode != -signal.SIGKILL:
            self._refuse_end()

    def finish(self) -> None:
        """Waits for the end of the process, which must have status 0."""
        output = self._read_rest()
        if self._process.returncode != 0:
            raise CheckFailed(
                f"The program must end with status 0; got {self._process.returncode}.\n{output}"
            )

    def _refuse_end(self) -> NoReturn:
        raise CheckFailed(f"The program must not end before it is killed.\n{self._read_rest()}")

    def _read_rest(self) -> str:
        """Waits for the end of the process; returns all that it printed."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._note(line)
        self._process.stdout.close()
        self._process.wait()
        self._watchdog.cancel()
        return "".join(self._output)

    def _note(self, line: str) -> int:
        """Keeps a line; returns the step that it reports, or 0."""
        self._output.append(line)
        if match := re.match(r"going on with .* after step (\d+)$", line):
            self.began_after = int(match[1])
        match = re.match(r"step (\d+)/", line)
        if match and self.began_after is None:
            self.began_after = 0
        return int(match[1]) if match else 0


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
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(x["step"], x["train_loss"]) for x in records if "train_loss" in x]


def last_step(run_dir: Path) -> int:
    """The last step with a training loss in metrics.jsonl; 0 if there is none."""
    return max((step for step, _ in losses(run_dir)), default=0)


def check_beginning(process: TrainingProcess, kills: Sequence[Kill]) -> None:
    """Raises an error unless the process went on from the checkpoint that the last kill left."""
    expected = kills[-1].whole if kills else 0
    if process.began_after not in (None, expected):
        raise CheckFailed(
            f"A run must go on from its newest whole checkpoint; got step {process.began_after}, "
            f"where that of step {expected} was whole."
        )


def check_kill(kill: Kill) -> None:
    """Raises an error if fewer steps were saved than the metrics imply.

    The metrics of a step are written before its checkpoint is begun, and that waits for the
    checkpoint before. So the metrics of the next step show that a checkpoint was begun, and that
    the one before it is whole.
    """
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


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line of the benchmark; see --help."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10, help="how often to kill it")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    parser.add_argument("--moments", nargs="+", choices=MOMENTS, default=MOMENTS, help="when")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="after --: flags of train.py")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
