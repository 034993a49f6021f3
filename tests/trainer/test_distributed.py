"""Several processes: how they start, that they train as one does, and how they fail."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import train
from programs import REPOSITORY, change_checksum, records_of, shared_programs
from refusals import refused
from rollout_cases import make_rollouts, write_rollouts
from tests.faults import failures
from trainer import processes
from trainer.config import Distributed
from trainer.errors import RunError
from trainer.processes import gather, require_same_flags, together
from trainer.run import lost

# How processes start.


def test_one_process_starts_nothing():
    with together(Distributed()):
        assert not jax.distributed.is_initialized()
    assert gather({"bad": [[3, "größe"]]}) == [{"bad": [[3, "größe"]]}]


STARTING = """
import time
import jax
from pathlib import Path
from trainer.config import Distributed
from trainer.processes import first_does, gather, together
made = Path({folder!r}, "made")
with together(Distributed({options}), Path({folder!r})):
    first_does(lambda: (time.sleep(1.2), made.touch(exist_ok=False)))
    assert made.exists()
    index = jax.process_index()
    print(index, jax.process_count(), jax.device_count(), gather(["x"] * index))
"""


def starting(options, folder, program=STARTING, **environment):
    source, pipe = program.format(options=options, folder=str(folder)), subprocess.PIPE
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    return subprocess.Popen(
        [sys.executable, "-c", source],
        **dict(cwd=REPOSITORY, env=environment, stdout=pipe, stderr=pipe, text=True),
    )


def listens(port, process):
    """Waits until a process listens at a port of this host."""
    while process.poll() is None:
        try:
            return socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            time.sleep(0.1)
    raise AssertionError(process.communicate())


def ends(processes, *others):
    """The statuses and the outputs of processes; the others are killed then."""
    try:
        outputs = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in (*processes, *others):
            process.kill()
        for process in others:
            process.communicate()
    return [process.returncode for process in processes], outputs


def free_slurm_job():
    """The number of a job for which the port that jax derives from it is free."""
    while True:
        job = random.randrange(1 << 12)
        try:
            socket.create_server(("", 65535 - (1 << 12) + 1 + job)).close()
        except OSError:
            continue
        return job


def test_slurm_says_which_process_this_is(tmp_path):
    job = dict(SLURM_JOB_ID=str(free_slurm_job()), SLURM_STEP_NODELIST="localhost")
    job |= dict(SLURM_NTASKS="2", JAX_NUM_CPU_DEVICES="3")
    statuses, outputs = ends(
        [
            starting("on=True", tmp_path, **job, SLURM_PROCID=index, SLURM_LOCALID=index)
            for index in ("0", "1")
        ]
    )
    assert statuses == [0, 0], outputs
    for index, (output, _) in enumerate(outputs):
        assert output.splitlines()[-1] == f"{index} 2 6 [[], ['x']]"


def test_processes_that_cannot_start_say_why(tmp_path):
    first_at, second_at = (failures.free_port() for _ in range(2))
    three, other = (f"processes=3, coordinator='127.0.0.1:{x}'" for x in (first_at, second_at))
    waiting = starting(f"{other}, index=0, start_timeout=300.0", tmp_path / "waiting")
    listens(second_at, waiting)
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # It does not listen, and keeps the port.
        nowhere = f"processes=2, coordinator='127.0.0.1:{silent.getsockname()[1]}'"
        options = (
            "on=True",
            f"processes=2, coordinator='127.0.0.1:{taken.getsockname()[1]}', index=0",
            f"{three}, index=0, start_timeout=3.0",
            f"{other}, index=1, start_timeout=2.0",
            f"{nowhere}, index=1, start_timeout=1.0",
        )
        statuses, outputs = ends(
            [starting(own, tmp_path / str(number)) for number, own in enumerate(options)], waiting
        )
    assert statuses == [1] * 5, outputs
    alone, on_taken, first, second, lost = (errors for _, errors in outputs)
    assert "RunError: --distributed needs processes that SLURM" in alone
    assert "RunError: Process 0 must be able to start; got OSError: [Errno 98]" in on_taken
    assert "RunError: All 3 processes must start within 3 s; got fewer. Start the o" in first
    assert "RunError: All 3 processes must start within 2 s; got fewer, but process 0 is" in second
    assert "; got no process 0 at 127.0.0.1:" in lost


# How processes fail.

FATAL = "F1128 client.h:80] Terminating process because the JAX distributed service detected fatal "
UNHEALTHY = "errors. UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):\n"
TRACE = "*** Check failure stack trace: ***\n    @ 0x7f7501e40634  absl::SendToLog()\n"
CRASHED = "The tasks have crashed. Check the task logs\n"
BEAT = "errors. DEADLINE_EXCEEDED\n\nRPC: /xla.coordination.CoordinationService/Heartbeat\n"
LEADER = "errors. UNAVAILABLE: Failed to send RPC to coordination service. Either the leader\n"


@pytest.mark.parametrize(
    ("parts", "shown", "last"),
    [
        (["W1128 careful\n", TRACE], 2, None),
        (["a\n", FATAL + UNHEALTHY, "1\n", CRASHED, TRACE], 1, "process 1 was lost"),
        ([FATAL, UNHEALTHY + "12\n3\n" + CRASHED + TRACE], 0, "processes 3, 12 were lost"),
        ([UNHEALTHY + "2, 5\n" + CRASHED, FATAL + "errors.\n" + TRACE], 1, "processes 2, 5 were"),
        (
            [UNHEALTHY + "/job:x/replica:0/task:4\n" + CRASHED, FATAL + "errors.\n", TRACE],
            2,
            "process 4 was",
        ),
        (["a\n", "b\n", FATAL + LEADER, TRACE[:5], TRACE[5:], TRACE], 2, "process 0 was lost"),
        ([FATAL + LEADER], 1, "process 0 was lost"),
        ([FATAL + BEAT + TRACE], 0, "process 0 was lost"),
        ([FATAL, UNHEALTHY + "1\n7\n" + CRASHED + TRACE], 0, "because it was suspended or cut off"),
        ([FATAL + "errors.\n" + TRACE], 0, "another one was lost: see above"),
    ],
)
def test_process_that_is_lost_is_named_in_the_last_line(parts, shown, last):
    """In place of the stack trace of jax, with all else as it was."""
    with subprocess.Popen(
        [sys.executable, lost.__file__, "7"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdin is not None
        assert program.stderr is not None
        for part in parts:
            program.stdin.write(part)
            program.stdin.flush()
            time.sleep(0.05)
        program.stdin.close()
        found = program.stderr.read()
    for part in parts[:shown]:
        assert found.startswith(part)
        found = found.removeprefix(part)
    if last is None:
        assert found == ""
    else:
        assert "@ 0x" not in found
        line = found.splitlines()[-1]
        assert line.startswith("This process ends because ")
        assert last in line


FAILING = """
import sys, time
import jax
from pathlib import Path
from trainer.config import Distributed
from trainer.processes import first_does, together
with together(Distributed({options}), Path({folder!r})):
    jax.devices()
    first_does(lambda: None)
    if jax.process_index() == 1:
        raise ValueError("of process 1\\nand more")
    time.sleep(600)
"""


def test_error_of_one_process_ends_all_and_is_found_in_the_run_folder(tmp_path):
    # Those of an earlier start count for nothing.
    old = tmp_path / "failures" / "0.txt"
    old.parent.mkdir()
    old.write_text("process 0 on host: ValueError: of yesterday")
    where = f"coordinator='127.0.0.1:{failures.free_port()}', processes=3"
    statuses, outputs = ends(
        [starting(f"{where}, index={index}", tmp_path, FAILING) for index in range(3)]
    )
    assert statuses == [1, 1, 1], outputs
    error = f"process 1 on {socket.gethostname()}: ValueError: of process 1"
    written = (tmp_path / "failures" / "1.txt").read_text()
    assert written.startswith(f"{error}\n\nTraceback")
    assert "and more" in written
    assert old.read_text().endswith("of yesterday")
    for index in (0, 2):
        assert (
            f"This process ends because another process failed: {error} (see" in outputs[index][1]
        )
    assert "Traceback" in outputs[1][1]


def test_memory_that_is_exhausted_is_no_failure_of_another_process():
    def wrapped(text):
        try:
            raise jax.errors.JaxRuntimeError(text)
        except jax.errors.JaxRuntimeError as error:
            outer = RunError("a step failed")
            outer.__cause__ = error
            return outer

    assert processes._may_be_of_another(wrapped("UNKNOWN: connection closed by peer"))
    reset = ValueError("UNKNOWN: Gloo AllGather failed: Read error: Connection reset by peer")
    assert processes._may_be_of_another(reset)
    assert not processes._may_be_of_another(wrapped("RESOURCE_EXHAUSTED: out of memory"))
    assert not processes._may_be_of_another(ValueError("of this process"))


def test_flags_that_differ_are_named_in_all_processes(monkeypatch):
    flags = {"kind": "a run", "steps": "--steps 3", "seed": "--seed 1"}

    def of_another(**changes):
        other = {x: y for x, y in {**flags, **changes}.items() if y is not None}
        monkeypatch.setattr(processes, "gather", lambda mine: [mine, other])
        require_same_flags(flags)

    of_another()
    with refused(RunError, "got --steps 4 in process 1 and --steps 3 in process 0"):
        of_another(steps="--steps 4")
    with refused(RunError, "got none in process 1 and --seed 1 in process 0"):
        of_another(seed=None)


# Training.

STEPS = 6


def losses(run_dir):
    records = records_of(run_dir)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    return [record["train_loss"] for record in records] + [records[-1]["validation_loss"]]


def train_in(count, run_dir, data, capsys):
    """Trains in some processes, or in this one alone; returns what they printed."""
    flags = f"{failures.FLAGS} --devices 4 --steps {STEPS} --checkpoint.every 2"
    flags = [*flags.split(), "--checkpoint.keep", "100", "--data.path", str(data)]
    flags += ["--run-dir", str(run_dir)]
    if count == 1:
        capsys.readouterr()
        train.train(train.read_command_line(flags).settings)
        return [capsys.readouterr().out]
    flags += ["--sample.length", "2"]
    with failures.Processes(count, flags, folder=data.parent) as processes:
        processes.end()
        return [processes.output(index) for index in range(count)]


@pytest.mark.slow
@shared_programs()
def test_any_number_of_processes_trains_alike_and_goes_on_with_the_run_of_another(tmp_path, capsys):
    data = failures.write_data(tmp_path)
    run_dir = tmp_path / "from_the_beginning"
    train_in(1, run_dir, data, capsys)
    expected = losses(run_dir)
    for count, after in ((4, 2), (1, 4)):
        before, run_dir = run_dir, tmp_path / f"{after}_by_others"
        shutil.copytree(before, run_dir)
        for step in range(after + 4, STEPS + 1, 2):
            shutil.rmtree(run_dir / "checkpoints" / str(step))
        # The newest one is damaged: all processes go on from the one before.
        change_checksum(run_dir / "checkpoints" / str(after + 2))
        first, *others = train_in(count, run_dir, data, capsys)
        assert f"after step {after}\n" in first
        assert f"It is removed, and the checkpoint of step {after} is used" in first
        assert (f"in {count} processes" in first) == (count > 1)
        assert "nodes: " not in first  # The processes are on one machine.
        assert ("--- continued by the model" in first) == (count > 1)
        for output in others:
            lines = output.splitlines()
            # Threads of Gloo write to the same output, and so does jax if it has a plugin for GPUs.
            not_ours = ("[Gloo]", "peer ran", "cuda_plugin")
            assert [x for x in lines if not any(word in x for word in not_ours)] == []
        np.testing.assert_allclose(losses(run_dir), expected, rtol=1e-5)


@pytest.mark.slow
def test_processes_follow_files_and_export_as_one_does(tmp_path):
    """With ZeRO 3, no process has whole weights."""
    (tmp_path / "rollouts").mkdir()
    for seed in range(3):
        path = tmp_path / "rollouts" / f"step_{seed}.jsonl"
        write_rollouts(path, make_rollouts(count=10, longest=20, seed=seed))
    exports = {}
    for count in (1, 2):
        run_dir = tmp_path / f"in_{count}"
        flags = f"{failures.FLAGS} --devices 4 --zero 3 --steps 3 --objective policy --data.follow"
        flags = [*flags.split(), "--data.path", str(tmp_path / "rollouts"), "--batch-size", "4"]
        flags += ["--run-dir", str(run_dir), "--export.every", "1", "--seq-len", "48"]
        with failures.Processes(count, flags, folder=tmp_path) as processes:
            processes.end()
        folders = sorted((run_dir / "exported").iterdir())
        assert [x.name for x in folders] == [f"step_00000{step}" for step in range(4)]
        exports[count] = [load_file(x / "model.safetensors") for x in folders]
    for one, two in zip(exports[1], exports[2], strict=True):
        assert one.keys() == two.keys()
        for name, x in one.items():
            np.testing.assert_allclose(two[name], x, atol=1e-5, err_msg=name)


def verifying(data, run_dir):
    flags = f"{failures.FLAGS} --devices 8 --mesh.data 2 --mesh.devices-per-node 4 --verify"
    others = ["--distributed.timeout", "8", "--data.path", str(data), "--run-dir", str(run_dir)]
    return [*flags.split(), *others]


@pytest.mark.slow
def test_processes_verify_a_run_together(tmp_path):
    flags = verifying(failures.write_data(tmp_path), tmp_path / "run")
    with failures.Processes(2, flags, folder=tmp_path) as processes:
        processes.end(seconds=5 * failures.HANGS_AFTER_SECONDS)  # Some 40 programs are compiled.
        assert "nothing is wrong" in processes.output(0)
    found = json.loads((tmp_path / "run" / "verify.json").read_text())
    assert found["ok"]
    names = {check["name"] for check in found["checks"]}
    assert {"first batch: gradients", "float64: gradients", "ZeRO: loss", "replicas"} <= names
    assert {"checkpoint on the mesh", "checkpoint on one device", "links: axis ring"} <= names


@pytest.mark.slow
def test_process_that_dies_while_a_run_is_verified_ends_all(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "verify.json").write_text('{"ok": true}')  # Of a check before.
    flags = verifying(failures.write_data(tmp_path), run_dir)
    with failures.Processes(2, flags, folder=tmp_path) as processes:
        assert processes.says(0, "first batch: loss", seconds=failures.HANGS_AFTER_SECONDS)
        processes.signal(1, signal.SIGKILL)
        assert 0 not in processes.wait()
    found = run_dir / "verify.json"
    assert not found.exists() or not json.loads(found.read_text())["ok"]


# Failures.


@pytest.mark.slow
def test_failures_end_all_processes_and_training_goes_on(tmp_path, capsys):
    names = ["process 0 killed", "wrong data", "disk full", "worker stopped", "worker killed"]
    by_name = {case.name: case for case in failures.CASES}
    cases = [by_name[name] for name in [*names, "SIGTERM to a worker"]]
    outcomes = failures.fail(cases, count=2, folder=tmp_path, timeout=8)
    assert [outcome.case for outcome in outcomes] == cases
    assert all(outcome.seconds < failures.END_SECONDS for outcome in outcomes)
    # jax aborts a process, with a signal, unless that has seen the failure by itself before.
    killed, *failed, worker_killed, stopped = [outcome.statuses for outcome in outcomes]
    assert worker_killed == (-6, -9)
    assert killed == (-9, -6)
    assert failed[:2] == [(1, 1), (1, 1)]
    assert 0 not in failed[2]
    assert stopped == (0, 0)
    assert outcomes[-1].began_after >= 9
    assert len(capsys.readouterr().out.splitlines()) == len(cases)
