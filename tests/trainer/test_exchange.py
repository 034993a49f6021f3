"""What processes tell each other before they train."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import train
from tests.faults import failures
from trainer.network.secret import VARIABLE
from trainer.processes import exchange
from trainer.processes.exchange import Peers, first_does, peers


def test_one_process_gathers_what_it_gives():
    assert (peers().index, peers().count) == (0, 1)
    assert peers().gather({"bad": [[3, "größe"]]}) == [{"bad": [[3, "größe"]]}]
    with pytest.raises(ZeroDivisionError):
        first_does(lambda: 1 // 0, peers())


def test_error_between_two_looks_is_raised(monkeypatch):
    may_fail, wait = threading.Event(), exchange.wait

    def fail():
        may_fail.wait(300)
        raise RuntimeError("no network")

    def look(futures, seconds):
        found = wait(futures, 0 if not may_fail.is_set() else seconds)
        may_fail.set()
        wait(futures, 10)  # It fails right after the first look.
        return found

    monkeypatch.setattr(exchange, "wait", look)
    with pytest.raises(RuntimeError, match="no network"):
        first_does(fail, Peers(index=0, count=2, gather=lambda value: [value, False]))


GATHERING = """
import sys, time
from pathlib import Path
from trainer.network.options import Distributed
from trainer.processes.distributed import start
from trainer.processes.exchange import first_does, peers
from trainer.processes.heartbeat import heartbeat
index = int(sys.argv[2])
options = Distributed(coordinator=f"localhost:{sys.argv[1]}", processes=2, index=index)
# Both leave together: jax ends a process that has lost its coordinator.
options, leave = start(options)
made = Path(sys.argv[3])
with heartbeat(options, last=leave):
    first_does(lambda: (time.sleep(1.2), made.touch(exist_ok=False)), peers())
    assert made.exists()
    print(peers().index, peers().count, peers().gather(["x"] * index))
"""


@pytest.mark.slow
def test_two_processes_gather_what_both_give(tmp_path):
    port = str(failures.free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", GATHERING, port, index, str(tmp_path / "made")],
            cwd=Path(train.__file__).parent,
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "JAX_NUM_CPU_DEVICES": "1",
                VARIABLE: "a secret of the test",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in ("0", "1")
    ]
    try:
        outputs = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for index, (output, error) in enumerate(outputs):
        assert output.splitlines()[-1:] == [f"{index} 2 [[], ['x']]"], error
