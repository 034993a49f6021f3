"""Makes one of several processes fail in every way, and shows that all exit and training continues.

python tests/faults/failures.py                         # 2 processes
python tests/faults/failures.py --processes 4
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.faults.run_folders import REPOSITORY, CheckFailed, exit_status, newest_whole

END_SECONDS = 60
"""Time in which all processes must end."""
HANGS_AFTER_SECONDS = 180
"""Time after which a process that neither ends nor goes on counts as hanging."""
SEQ_LEN = 32
NUM_TOKENS = 1_000_000

# Every device holds a part of the state, so that every process writes to a checkpoint.
FLAGS = (
    "--mesh.c 1 --zero 3 --model.width 32 --model.layers 1 --model.heads 2 "
    f"--model.kv-heads 1 --model.head-dim 16 --model.mlp-width 64 --seq-len {SEQ_LEN} "
    "--batch-size 2 --log-every 1 --checkpoint.every 3 --validation-every 1000000 "
    "--validation-sequences 2 --sample.length 0 --no-tensorboard "
)
# A process is killed when the process that started it ends, however that happens.
_BEGINNING = "import ctypes, runpy; ctypes.CDLL(None).prctl(1, 9); "
_MODULE = "runpy.run_module({!r}, run_name='__main__', alter_sys=True)"
TRAIN = _MODULE.format("train")
IMPORT = _MODULE.format("trainer.pretrained")
"""The command that imports a pretrained model, as Python; `TRAIN` is train.py."""


class Processes:
    """A command in several processes. A context manager that leaves none behind."""

    def __init__(
        self,
        count: int,
        flags: Sequence[str],
        *,
        folder: Path,
        own_flags: Mapping[int, Sequence[str]] | None = None,
        program: str = TRAIN,
    ) -> None:
        """Starts them, each with its own further flags; a single one without `--distributed`."""
        # No compilation cache: of programs that it reads, XLA loses the order of messages.
        variables = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_ENABLE_COMPILATION_CACHE": "false",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        self.port = free_port()
        """Where process 0 listens while they start."""
        coordinator = f"127.0.0.1:{self.port}"
        self.count = count
        self._logs = [folder / f"process-{index}.log" for index in range(count)]
        self._all: list[subprocess.Popen[bytes]] = []
        for index, log in enumerate(self._logs):
            where = ["--distributed.coordinator", coordinator]
            where += ["--distributed.processes", str(count), "--distributed.index", str(index)]
            own = (own_flags or {}).get(index, ())
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [
                        sys.executable,
                        "-c",
                        _BEGINNING + program,
                        *flags,
                        *(where if count > 1 else []),
                        *own,
                    ],
                    cwd=REPOSITORY,
                    env=variables,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            self._all.append(process)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *error: Any) -> None:
        for process in self._all:
            process.kill()
            process.wait()

    def output(self, index: int) -> str:
        return self._logs[index].read_text(encoding="utf-8")

    def outputs(self) -> str:
        return "".join(f"--- process {index}\n{self.output(index)}" for index in range(self.count))

    def says(self, index: int, pattern: str, seconds: float = 5) -> bool:
        """Whether a process prints a pattern: its last line comes from another program."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.output(index))):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return found is not None

    def pid(self, index: int) -> int:
        return self._all[index].pid

    def signal(self, index: int, number: int) -> None:
        self._all[index].send_signal(number)

    def wait_for(self, condition: Callable[[], bool], every: float = 0.02) -> None:
        """Waits until a condition holds, asked every so many seconds; all must run until then."""
        deadline = time.monotonic() + HANGS_AFTER_SECONDS
        while not condition():
            ended = [i for i, process in enumerate(self._all) if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                what = f"process {ended[0]} ended" if ended else "they hung"
                raise CheckFailed(f"The processes must go on; {what}.\n{self.outputs()}")
            time.sleep(every)

    def wait(self, which: Sequence[int] | None = None, seconds: float = END_SECONDS) -> list[int]:
        """Waits for the end of all processes, or of some; returns the statuses of all."""
        deadline = time.monotonic() + seconds
        for index in range(self.count) if which is None else which:
            try:
                self._all[index].wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                raise CheckFailed(
                    f"All must end within {seconds:g} s; process {index} has not.\n{self.outputs()}"
                ) from None
        return [process.returncode for process in self._all]

    def end(self, status: int = 0, seconds: float = HANGS_AFTER_SECONDS) -> None:
        """Waits for the end of all processes, which must have this status."""
        found = self.wait(seconds=seconds)
        if found != [status] * self.count:
            raise CheckFailed(f"All must end with status {status}; got {found}.\n{self.outputs()}")


@dataclass(frozen=True, kw_only=True)
class FailureCase:
    """Something that happens to one process, or to all."""

    name: str
    victim: int | None
    """Index of the process, from the end if negative; None for all processes."""
    says: str
    """Pattern of what all processes that were not killed must print; `{}` is the victim's index."""
    happen: Callable[[Processes, int], None] | None
    """Makes it happen, given the victim; None to spoil its data."""
    good: bool = False
    """Whether all processes must end with status 0."""


def signal_it(number: int) -> Callable[[Processes, int], None]:
    """What happens in a case: the victim gets a signal."""
    return lambda processes, victim: processes.signal(victim, number)


def fill_disk(processes: Processes, victim: int) -> None:
    """Limits the size of the files that a process writes, as a full disk would."""
    _, hard = resource.prlimit(processes.pid(victim), resource.RLIMIT_FSIZE)
    resource.prlimit(processes.pid(victim), resource.RLIMIT_FSIZE, (20_000, hard))


def terminate_all(processes: Processes, _: int) -> None:
    for index in range(processes.count):
        processes.signal(index, signal.SIGTERM)


# The last line of all others, whose C++ ends them.
LOST = r"\nThis process ends because process {} was lost: [^\n]*\n\Z"
CASES = (
    FailureCase(name="worker killed", victim=-1, says=LOST, happen=signal_it(signal.SIGKILL)),
    FailureCase(name="process 0 killed", victim=0, says=LOST, happen=signal_it(signal.SIGKILL)),
    FailureCase(name="worker stopped", victim=-1, says=LOST, happen=signal_it(signal.SIGSTOP)),
    FailureCase(name="process 0 stopped", victim=0, says=LOST, happen=signal_it(signal.SIGSTOP)),
    FailureCase(
        name="wrong data",
        victim=-1,
        says=r"process {} on \S+: InputError: .*vocab_size; got id 3000 at token \d+",
        happen=None,
    ),
    FailureCase(
        name="disk full",
        victim=-1,
        says=r"process {} on \S+: CheckpointError: The checkpoint of step \d+ could",
        happen=fill_disk,
    ),
    FailureCase(
        name="SIGTERM to a worker", victim=-1, says="", happen=signal_it(signal.SIGTERM), good=True
    ),
    FailureCase(name="SIGTERM to all", victim=None, says="", happen=terminate_all, good=True),
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    case: FailureCase
    began_after: int
    """The step that this start went on from."""
    seconds: float
    """Time from what happened until the last process had ended."""
    statuses: tuple[int, ...]
    """Statuses of the processes; a process that a signal killed has a negative one."""
    message: str
    """The last message of process 0, or of process 1 if process 0 was the victim."""
    whole: int
    """The step of the newest whole checkpoint after the case."""


def fail(
    cases: Sequence[FailureCase], *, count: int, folder: Path, timeout: float = 10
) -> list[Outcome]:
    """Starts a run in several processes for each case, one after the other, in one run folder."""
    data, copy = write_data(folder), folder / "copy.bin"
    run_dir = folder / "run"
    flags = [*FLAGS.split(), "--data.path", str(data), "--run-dir", str(run_dir)]
    flags += ["--devices", str(count), "--steps", "100000", "--distributed.timeout", str(timeout)]
    outcomes: list[Outcome] = []
    for case in cases:
        victim = 0 if case.victim is None else case.victim % count
        shutil.copyfile(data, copy)
        own = {} if case.happen else {victim: ["--data.path", str(copy), "--allow-changes"]}
        before = newest_whole(run_dir)
        with Processes(count, flags, folder=folder, own_flags=own) as processes:
            begin(processes, run_dir, before)
            if case.happen is None:
                spoil(copy)
            else:
                case.happen(processes, victim)
            outcome = _end(case, processes, victim, run_dir)
        if outcome.began_after != before:
            raise CheckFailed(
                f"A run must go on from its newest whole checkpoint; got step "
                f"{outcome.began_after} where that of step {before} was whole."
            )
        outcomes.append(outcome)
        print(describe(outcome), flush=True)
    return outcomes


def begin(processes: Processes, run_dir: Path, before: int) -> None:
    """Waits for a new checkpoint and a step after it."""
    processes.wait_for(lambda: before < newest_whole(run_dir) < last_reported(processes.output(0)))


def _end(case: FailureCase, processes: Processes, victim: int, run_dir: Path) -> Outcome:
    """Waits for the end of all processes and checks how they ended."""
    since = time.monotonic()
    stopped = case.name.endswith("stopped")
    others = [index for index in range(processes.count) if index != victim]
    if stopped:
        processes.wait(others)
        processes.signal(victim, signal.SIGCONT)
    statuses = processes.wait()
    seconds = time.monotonic() - since
    if any((status == 0) != case.good for status in statuses):
        good = "0" if case.good else "another than 0"
        raise CheckFailed(f"All statuses must be {good}; got {statuses}.\n{processes.outputs()}")
    for index in range(processes.count):
        is_victim = index == victim and case.says == LOST
        if not is_victim and not processes.says(index, case.says.format(victim)):
            raise CheckFailed(
                f"Process {index} must name process {victim}; it does not.\n{processes.outputs()}"
            )
    speaker = 1 if victim == 0 and not case.good else 0
    output = processes.output(speaker)
    whole = newest_whole(run_dir)
    if case.good and f"interrupted after step {whole}, " not in output:
        raise CheckFailed(f"The last step must be saved; got step {whole}.\n{processes.outputs()}")
    said = re.search(case.says.format(victim) if case.says else r"interrupted after .*", output)
    assert said is not None
    return Outcome(
        case=case,
        began_after=began_after(processes.output(0)) or 0,
        seconds=seconds,
        statuses=tuple(statuses),
        message=" ".join(said[0].split()),
        whole=whole,
    )


def describe(outcome: Outcome) -> str:
    statuses = ", ".join(map(str, outcome.statuses))
    message = outcome.message if len(outcome.message) < 60 else outcome.message[:57] + "..."
    return (
        f"{outcome.case.name:<20} from step {outcome.began_after:<4} {outcome.seconds:5.1f} s  "
        f"status {statuses:<12} step {outcome.whole} whole  {message}"
    )


def write_data(folder: Path) -> Path:
    path = folder / "tokens.bin"
    np.random.default_rng(0).integers(0, 256, NUM_TOKENS).astype("<u2").tofile(path)
    return path


def spoil(path: Path) -> None:
    """Writes tokens beyond the vocabulary to a file that a program has mapped into its memory."""
    tokens = np.memmap(path, "<u2", "r+")
    # So many that a window hits one within some batches.
    tokens[:: 20 * SEQ_LEN] = 3000
    tokens.flush()


def began_after(output: str) -> int | None:
    """The step that a process went on from, 0 at the beginning; None until that is known."""
    match = re.search(r"^going on with .* after step (\d+)$", output, re.MULTILINE)
    if match is None:
        return 0 if last_reported(output) else None
    return int(match[1])


def last_reported(output: str) -> int:
    """The last step that a process has reported in its output; 0 if there is none."""
    return max(map(int, re.findall(r"^step (\d+)/", output, re.MULTILINE)), default=0)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2, help="number of processes: 2, 4 or 8")
    parser.add_argument("--timeout", type=float, default=20, help="--distributed.timeout")
    args = parser.parse_args()
    return exit_status(
        lambda folder: fail(CASES, count=args.processes, folder=folder, timeout=args.timeout)
    )


if __name__ == "__main__":
    sys.exit(main())
