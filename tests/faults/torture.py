"""Attacks training in every way for a given time, and prints what it survived.

    python tests/faults/torture.py                                  # 2 minutes
    python tests/faults/torture.py --seed 1 --minutes 60 --only flip power
    python tests/faults/torture.py --flips 1000 --only flip         # at least so many flipped bits

The attacks take turns until the time is over, each at least once:

    flip       one bit of one file of the newest checkpoint is flipped, in checkpoints of one and of
               two processes, with and without ZeRO 3. It must be noticed and the checkpoint before
               be used, or change no bit of the state that is read.
    power      training is killed, and of what it had not flushed to the disk (by `os.fsync`) all or
               half is lost (tests/faults/power.py), with one and with two checkpoints kept. It must
               go on from the newest checkpoint, or from the one before, with the same degrees, and
               its losses must be those of an undisturbed run, bit for bit.
    kill       training is killed by SIGKILL at random moments (tests/faults/crash.py). In the end,
               its losses must be those of an undisturbed run, bit for bit.
    failure    one of two processes is killed or stopped, or its disk is full
               (tests/faults/failures.py). All must end with a message, and the run must go on.

It exits with status 1 if something was not survived, and then keeps its folder.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.faults import crash, failures, power
from tests.faults.run_folders import REPOSITORY, CheckFailed, environment, newest_whole

FLIPS_IN_TURN = 20
POWER_FAILURES_IN_TURN = 4
POWERED, POWERED_STEPS = (1, 3), 30 * crash.EVERY
"""Number of processes, ZeRO level and steps of the run whose power fails."""
FLAGS = [*failures.FLAGS.split(), "--checkpoint.keep", "2"]
CASES = [case for case in failures.CASES if case.happen is not None and not case.good]


class Torture:
    """A folder with runs, and the attacks on them. Each attack yields the parts that it tried."""

    def __init__(self, folder: Path, seed: int) -> None:
        """Writes the data; runs are made by the attack that needs them.

        Args:
            folder: for data and runs. What an attack has not survived stays there.
            seed: decides what is attacked, where and when.
        """
        self.folder = folder
        self.random = np.random.default_rng(seed)
        self._data = failures.write_data(folder)
        self._number = 0
        self._expected: dict[tuple[Path, int], Any] = {}

    def new_folder(self, name: str) -> Path:
        """A new folder for one attack."""
        self._number += 1
        path = self.folder / f"{self._number}-{name}"
        path.mkdir()
        return path

    def flip(self) -> Iterator[str]:
        """Flips bits in checkpoints of all kinds."""
        for processes in (1, 2):
            for zero in (0, 3):
                run_dir = self.finished_run(processes, zero)
                for _ in range(FLIPS_IN_TURN // 4):
                    where = self._flip_one(run_dir)
                    yield f"{processes} processes, ZeRO {zero}: {where}"

    def _flip_one(self, run_dir: Path) -> str:
        folder = self.new_folder("flip")
        copy = folder / "checkpoints"
        newest = newest_whole(run_dir)
        for step in (newest - crash.EVERY, newest):
            shutil.copytree(run_dir / "checkpoints" / str(step), copy / str(step))
        files = sorted(x for x in (copy / str(newest)).rglob("*") if x.is_file())
        sizes = [path.stat().st_size for path in files]
        # Half of them in a random file, as small files matter too; and half in a random place.
        weights = np.array([size > 0 if self.random.random() < 0.5 else size for size in sizes])
        path = files[self.random.choice(len(files), p=weights / weights.sum())]
        content = bytearray(path.read_bytes())
        bit = int(self.random.integers(8 * len(content)))
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        where = f"bit {bit} of {path.relative_to(copy)}"
        step, notes = self.check_restored(run_dir, copy, where)
        if step != newest and not notes:
            raise CheckFailed(f"{where}: step {step} was used without a word.")
        shutil.rmtree(folder)
        return where

    def check_restored(self, reference: Path, checkpoints: Path, what: str) -> tuple[int, list]:
        """Restores the newest whole checkpoint; every bit must be that of an undisturbed run."""
        step, found, notes = _restore(reference, checkpoints)
        expected = self._states(reference, step)
        if found != expected:
            raise CheckFailed(f"{what}: the state of step {step} is not that which was saved.")
        return step, notes

    def _states(self, reference: Path, step: int) -> Any:
        """The state and the position in the data that an undisturbed run has saved."""
        if (reference, step) not in self._expected:
            kept = self.new_folder("kept")
            shutil.copytree(reference / "checkpoints" / str(step), kept / str(step))
            self._expected[reference, step] = _restore(reference, kept)[1]
        return self._expected[reference, step]

    def finished_run(self, processes: int, zero: int) -> Path:
        """The folder of an undisturbed run, which is made when it is first asked for."""
        run_dir = self.folder / f"whole-{processes}-{zero}"
        if not run_dir.exists():
            # Bits are flipped in the newest of two checkpoints; power fails at any of them.
            steps = POWERED_STEPS if (processes, zero) == POWERED else 2 * crash.EVERY
            flags = self.flags(run_dir, processes, steps=steps, zero=zero, keep=1000)
            with failures.Processes(processes, flags, folder=self.folder) as started:
                if any(started.wait(seconds=failures.HANGS_AFTER_SECONDS)):
                    raise CheckFailed(f"The run must end.\n{started.outputs()}")
        return run_dir

    def flags(self, run_dir: Path, devices: int, *, steps: int, zero: int, keep: int) -> list[str]:
        """Flags of train.py."""
        where = ["--data.path", str(self._data), "--run-dir", str(run_dir)]
        sizes = ["--devices", str(max(devices, 2)), "--steps", str(steps), "--zero", str(zero)]
        return [*FLAGS, *where, *sizes, "--checkpoint.keep", str(keep)]

    def power(self) -> Iterator[str]:
        """Kills a run, takes away what was not flushed, and restores what is left."""
        reference = self.finished_run(*POWERED)
        keep = int(self.random.integers(1, 3))
        folder = self.new_folder("power")
        run_dir, flushed = folder / "run", folder / "flushed"
        processes, zero = POWERED
        flags = self.flags(run_dir, processes, steps=POWERED_STEPS, zero=zero, keep=keep)
        process = subprocess.Popen(
            [sys.executable, "-c", power.PROGRAM, str(flushed), *flags],
            cwd=REPOSITORY,
            env=environment(self.folder / "compiled") | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
            stdout=(folder / "output.log").open("wb"),
            stderr=subprocess.STDOUT,
        )
        after = int(self.random.integers(1, 6)) * crash.EVERY
        deadline = time.monotonic() + failures.HANGS_AFTER_SECONDS
        try:
            while newest_whole(run_dir) < after:
                if process.poll() is not None or time.monotonic() > deadline:
                    output = (folder / "output.log").read_text()
                    raise CheckFailed(f"The run must save step {after}.\n{output}")
                time.sleep(0.001)
            time.sleep(self.random.uniform(0, 0.5))
        finally:
            process.kill()
            process.wait()
        newest = newest_whole(run_dir)
        for number in range(POWER_FAILURES_IN_TURN):
            out = folder / f"after-{number}"
            survives = 0.5 * (number % 2)
            power.after_power_failure(run_dir, flushed, out, self.random, survives)
            what = f"keep {keep}, step {newest} was saved: {out}"
            step, _ = self.check_restored(reference, out / "checkpoints", what)
            if step < newest - crash.EVERY:
                raise CheckFailed(f"{what}, and only step {step} is left.")
            self._go_on(reference, run_dir, out, what)
            yield what
        shutil.rmtree(folder)

    def _go_on(self, reference: Path, run_dir: Path, out: Path, what: str) -> None:
        """Trains what a power failure has left to the end."""
        for name in ("config.json", "mesh.json"):
            kept = (out / name).read_text() if (out / name).exists() else None
            if kept != (run_dir / name).read_text():
                raise CheckFailed(f"{what}, and {name} is not what was written: {kept!r}.")
        processes, zero = POWERED
        flags = self.flags(out, processes, steps=POWERED_STEPS, zero=zero, keep=1)
        with failures.Processes(processes, flags, folder=self.folder) as started:
            if any(started.wait(seconds=failures.HANGS_AFTER_SECONDS)):
                raise CheckFailed(f"{what}, and the run must go on.\n{started.outputs()}")
        found, expected = crash.losses(out), crash.losses(reference)
        if found != expected:
            raise CheckFailed(f"{what}: the losses must be {expected}; got {found}.")

    def kill(self) -> Iterator[str]:
        """Kills training twice and lets it finish."""
        folder = self.new_folder("kill")
        (folder.parent / "compiled").mkdir(exist_ok=True)
        (folder / "compiled").symlink_to(folder.parent / "compiled")
        with contextlib.redirect_stdout(None):
            kills = crash.crash(2, seed=int(self.random.integers(2**31)), folder=folder)
        yield from map(crash.describe, kills)
        shutil.rmtree(folder)

    def failure(self) -> Iterator[str]:
        """Kills or stops one of two processes, or fills its disk, and starts them once more."""
        folder = self.new_folder("failure")
        case = CASES[int(self.random.integers(len(CASES)))]
        again = [x for x in failures.CASES if x.name == "SIGTERM to a worker"]
        with contextlib.redirect_stdout(None):
            first, _ = failures.fail([case, *again], count=2, folder=folder, timeout=20)
        if first.seconds > 30:
            raise CheckFailed(f"{case.name}: all must end within 30 s; got {first.seconds:.0f} s.")
        yield failures.describe(first)
        shutil.rmtree(folder)


def _restore(reference: Path, checkpoints: Path) -> tuple[int, Any, list[str]]:
    """Step, state and position of the newest whole checkpoint, on one device; and what was said."""
    from trainer.checkpoints.checkpoint import Checkpoints

    notes: list[str] = []
    with Checkpoints(checkpoints, keep=1000, note=notes.append) as opened:
        arrays, position = opened.restore(_shapes(reference))
        assert opened.restored is not None
        found = [np.asarray(x).tobytes() for x in _leaves(arrays)]
        return opened.restored, (found, position), notes


_SHAPES: dict[Path, Any] = {}


def _shapes(reference: Path) -> Any:
    """The shapes of the state of a run, for one device."""
    if reference not in _SHAPES:
        import startrail_jax as st
        from trainer.config import MeshConfig
        from trainer.parallel.step import Program
        from trainer.tasks import TASKS, load_train_config

        config = load_train_config(reference / "config.json")
        config = replace(config, mesh=MeshConfig(), zero=0, devices=1)
        mesh = st.make_mesh(st.Degrees(), axis_type="auto")
        objective = TASKS[config.kind].make_objective(config)
        program = Program(config, st.Attention(mesh, causal=True), objective)
        _SHAPES[reference] = program.state_shapes
    return _SHAPES[reference]


def _leaves(tree: Any) -> list[Any]:
    import jax

    return jax.tree.leaves(tree)


ATTACKS = ("flip", "power", "kill", "failure")


def torture(
    attacks: list[str],
    *,
    folder: Path,
    seed: int,
    seconds: float,
    flips: int = 0,
    turns: int = 1,
) -> dict[str, tuple[int, int, float]]:
    """Lets attacks take turns until the time is over.

    Args:
        attacks: some of `ATTACKS`.
        folder: folder for all runs.
        seed: decides what is attacked, where and when.
        seconds: the time; the turn that has begun is finished.
        flips: the least number of flipped bits, if these are among the attacks.
        turns: the least number of turns of each attack.

    Returns:
        How much of each attack was tried, how much survived, and its seconds.
    """
    began = time.monotonic()
    tortured = Torture(folder, seed)
    table: dict[str, tuple[int, int, float]] = dict.fromkeys(attacks, (0, 0, 0.0))
    turn = 0
    while True:
        late = turn >= turns and time.monotonic() > began + seconds
        wanted = [
            name for name in attacks if not late or (name == "flip" and table[name][0] < flips)
        ]
        if not wanted:
            return table
        for name in wanted:
            if turn >= turns and time.monotonic() > began + seconds and name != "flip":
                continue
            since = time.monotonic()
            tried, survived, spent = table[name]
            try:
                for what in getattr(tortured, name)():
                    tried, survived = tried + 1, survived + 1
                    print(f"{name:<10} survived  {what}", flush=True)
            except Exception as error:  # Also what a library raises over a damaged file.
                tried += 1
                message = str(error) if isinstance(error, CheckFailed) else traceback.format_exc()
                print(f"{name:<10} FAILED    {message}", flush=True)
            table[name] = tried, survived, spent + time.monotonic() - since
        turn += 1


def describe(table: dict[str, tuple[int, int, float]]) -> str:
    """The table, as text."""
    lines = [f"{'attack':<12}{'tried':>8}{'survived':>10}{'seconds':>9}"]
    for name, (tried, survived, seconds) in table.items():
        lines.append(f"{name:<12}{tried:>8}{survived:>10}{seconds:>9.0f}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    import jax

    jax.config.update("jax_platforms", "cpu")
    folder = Path(tempfile.mkdtemp(prefix="torture-"))
    table = torture(
        args.only, folder=folder, seed=args.seed, seconds=60 * args.minutes, flips=args.flips
    )
    print(f"\n{describe(table)}")
    if any(tried != survived or not tried for tried, survived, _ in table.values()):
        print(f"FAILED: what is left of it lies in {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return 0


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line of the benchmark; see --help."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of all attacks")
    parser.add_argument("--minutes", type=float, default=2, help="time for all attacks together")
    parser.add_argument("--flips", type=int, default=0, help="least number of flipped bits")
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=list(ATTACKS), help="attacks")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
