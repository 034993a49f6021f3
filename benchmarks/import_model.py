"""Imports a model from a folder over simulated devices: time, and the memory of each process.

    python benchmarks/import_model.py FOLDER                     # in one process
    python benchmarks/import_model.py FOLDER --processes 1 2 4 --lora-rank 16

`python -m trainer.gpt.pretrained` imports the folder of a Hugging Face model over 8 simulated
devices: its weights are read, split over all devices and saved as a checkpoint, which is removed
at the end. With --lora-rank they stay bfloat16; else they become float32. A line has

    s           seconds from the start of the processes to their end
    anonymous   the largest memory of a process that belongs to it alone, in GiB: its share of the
                weights, as devices are simulated here, the parts of them that are read or
                compressed, Python and jax
    resident    the largest memory in all, in GiB, with the pages of files that are mapped into it
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

# For a checkout that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.faults.failures import IMPORT, Processes
from tests.faults.run_folders import CheckFailed

GIB = 2**30
DEVICES = 8
POLL_SECONDS = 0.05
HANGS_AFTER_SECONDS = 3600


@dataclass
class Memory:
    """The largest memory of a process so far, in bytes."""

    anonymous: int = 0
    resident: int = 0

    def look(self, pid: int) -> None:
        """Looks at a process, which may have ended."""
        try:
            text = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return
        fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        if "RssAnon" in fields:
            self.anonymous = max(self.anonymous, _bytes(fields["RssAnon"]))
            self.resident = max(self.resident, _bytes(fields["VmHWM"]))


def _bytes(field: str) -> int:
    return int(field.split()[0]) * 1024


def import_model(folder: Path, processes: int, flags: list[str]) -> tuple[float, list[Memory]]:
    """Imports a model.

    Returns:
        Seconds, and the memory of each process.

    Raises:
        CheckFailed: if the import fails.
    """
    with tempfile.TemporaryDirectory() as name:
        command = [str(folder), "--run-dir", f"{name}/run", *flags]
        command += ["--devices", str(DEVICES), "--no-tensorboard", "--checkpoint.keep", "1"]
        memory = [Memory() for _ in range(processes)]
        start = time.monotonic()
        with Processes(processes, command, folder=Path(name), program=IMPORT) as running:
            while any(running.is_running(index) for index in range(processes)):
                for index, found in enumerate(memory):
                    found.look(running.pid(index))
                if time.monotonic() - start > HANGS_AFTER_SECONDS:
                    raise CheckFailed(f"An import must end.\n{running.outputs()}")
                time.sleep(POLL_SECONDS)
            if any(running.wait()):
                raise CheckFailed(f"An import must succeed.\n{running.outputs()}")
        return time.monotonic() - start, memory


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of a Hugging Face model")
    parser.add_argument("--processes", type=int, nargs="+", default=[1])
    parser.add_argument("--lora-rank", type=int, default=0, help="0 for none")
    options = parser.parse_args()
    flags = ["--lora.rank", str(options.lora_rank)] if options.lora_rank else []
    print(f"{'processes':>9}{'s':>8}{'anonymous':>11}{'resident':>10}")
    for count in options.processes:
        seconds, memory = import_model(options.folder, count, flags)
        most = [max(getattr(x, name) for x in memory) / GIB for name in ("anonymous", "resident")]
        print(f"{count:>9}{seconds:>8.1f}{most[0]:>11.2f}{most[1]:>10.2f}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except CheckFailed as error:
        sys.exit(str(error))
