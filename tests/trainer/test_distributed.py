"""Several processes: how they start, that they train as one does, and how they fail."""

import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import train
from programs import shared_programs
from tests.faults import failures, run_folders
from trainer.checkpoints.checksums import Checksums
from trainer.errors import RunError
from trainer.network.options import Distributed
from trainer.network.secret import VARIABLE
from trainer.processes import distributed
from trainer.processes.distributed import start

REPOSITORY = Path(train.__file__).parent


def given(**changes):
    return Distributed(**{"coordinator": "localhost:7777", "processes": 2, "index": 1, **changes})


# How processes start.


def test_start_does_nothing_for_one_process():
    start(Distributed())
    assert not jax.distributed.is_initialized()


@pytest.fixture
def preemption_service(monkeypatch):
    monkeypatch.setenv(VARIABLE, "of the processes of a test")
    yield
    jax.config.update("jax_enable_preemption_service", True)


@pytest.mark.usefixtures("preemption_service")
def test_start_where_it_cannot_be_raises():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=rf"port that is free.*127.0.0.1:{port}: Addr"):
            start(given(coordinator=f"127.0.0.1:{port}", index=0))
    with pytest.raises(RuntimeError, match=r"Process 0 must wait at .*refused.* for 0.1 s\. Start"):
        start(given(coordinator=f"localhost:{port}", start_timeout=0.1))
    jax.devices()
    with pytest.raises(RuntimeError, match=r"Process 0 must be able to join.*must be called befor"):
        start(given(coordinator=f"localhost:{failures.free_port()}", processes=1, index=0))


STARTING = """
import jax
from trainer.processes import distributed
from trainer.processes.distributed import start
from trainer.network.options import Distributed
from trainer.run.exit import exit_on_user_errors
with exit_on_user_errors():
    leave = start(Distributed({})).leave
    print(jax.process_index(), jax.process_count(), jax.device_count())
    leave()
"""


def starting(options, program=STARTING, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", program.format(options)],
        cwd=REPOSITORY,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            VARIABLE: "of the processes of a test",
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_slurm_job():
    """The number of a job for which the port that jax derives from it is free."""
    while True:
        job = random.randrange(1 << 12)
        try:
            socket.create_server(("", 65535 - (1 << 12) + 1 + job)).close()
        except OSError:
            continue
        return job


def test_slurm_says_which_process_this_is():
    job = str(free_slurm_job())
    processes = [
        starting(
            "on=True",
            SLURM_JOB_ID=job,
            SLURM_STEP_NODELIST="localhost",
            SLURM_NTASKS="2",
            SLURM_PROCID=index,
            SLURM_LOCALID=index,
            JAX_NUM_CPU_DEVICES="3",
        )
        for index in ("0", "1")
    ]
    # A process without a launcher, and one whose others do not start.
    processes += [
        starting("on=True"),
        starting(f"coordinator='localhost:{failures.free_port()}', processes=2, index=0, "
                 "start_timeout=1.0"),
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for index in (0, 1):
        assert processes[index].returncode == 0, outputs[index]
        assert outputs[index][0].splitlines()[-1] == f"{index} 2 6"
    assert [process.returncode for process in processes[2:]] == [1, 1]
    assert re.match(
        r"RunError: --distributed needs processes that SLURM.*got none of them\. Start them so, or "
        r"give --distributed.coordinator",
        outputs[2][1],
    )
    assert "All 2 processes must start within 1 s; got fewer. Start the others" in outputs[3][1]


SLURM = {"SLURM_JOB_ID": "5", "SLURM_STEP_NODELIST": "node[07-09]", "SLURM_NTASKS": "6",
         "SLURM_PROCID": "4", "SLURM_LOCALID": "1"}  # fmt: skip
OPEN_MPI = {"OMPI_MCA_orte_hnp_uri": "20480.0;tcp://10.0.0.1,10.1.0.1:34911",
            "OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_RANK": "4",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1"}  # fmt: skip


@pytest.mark.parametrize(("launcher", "host"), [(SLURM, "node07"), (OPEN_MPI, "10.0.0.1")])
def test_launcher_is_asked_by_what_jax_has(launcher, host, monkeypatch):
    """It is private: this tells of a version of jax that has it elsewhere."""
    of_jax = ("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT", "JAX_LOCAL_DEVICE_IDS")
    for name in (*SLURM, *OPEN_MPI, *of_jax):
        monkeypatch.delenv(name, raising=False)
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    options, devices = distributed._ask_launcher(Distributed(on=True))
    assert options == Distributed(on=True, coordinator=f"{host}:61445", processes=6, index=4)
    assert devices == [1]


@pytest.mark.parametrize("lacks", ["module", "function", "argument"])
def test_jax_that_asks_launchers_elsewhere_is_named(lacks, monkeypatch):
    place = "jax._src.clusters"
    if lacks == "module":
        monkeypatch.setitem(sys.modules, place, None)
    elif lacks == "function":
        monkeypatch.delattr(f"{place}.ClusterEnv.auto_detect_unset_distributed_params")
    else:
        detect = f"{place}.ClusterEnv.auto_detect_unset_distributed_params"
        monkeypatch.setattr(detect, lambda coordinator_address: None)
    message = rf"is not public; got jax {re.escape(jax.__version__)} without it .*--distributed.coo"
    with pytest.raises(RunError, match=message):
        distributed._ask_launcher(Distributed(on=True))


# How processes leave.

# The watch over all processes ends when they have left jax, where each waits for all others.
LEAVING = """
import os, signal, sys
import jax
from trainer.processes import distributed
from trainer.processes.distributed import start
from trainer.processes.heartbeat import heartbeat
from trainer.network.options import Distributed
from trainer.run.exit import exit_on_user_errors

def last():
    happens = os.environ["HAPPENS"]
    if happens:
        os.kill(os.getpid(), getattr(signal, happens))
    leave()

with exit_on_user_errors():
    options, leave = start(Distributed({}, timeout=3.0))
    with heartbeat(options, {{}}, last):
        print(jax.device_count(), flush=True)
print("over")
"""


@pytest.mark.slow
def test_process_that_is_lost_while_jax_leaves_ends_all_without_a_trace():
    pairs = []
    for victim, happens in ((0, "SIGKILL"), (1, "SIGSTOP"), (0, "")):
        where = f"coordinator='localhost:{failures.free_port()}', processes=2"
        own = [happens if index == victim else "" for index in (0, 1)]
        pair = [
            starting(f"{where}, index={index}", LEAVING, HAPPENS=own[index]) for index in (0, 1)
        ]
        pairs.append((pair, victim, happens))
    everyone = [process for pair, *_ in pairs for process in pair]
    try:
        for pair, victim, happens in pairs:
            other = pair[1 - victim]
            output, errors = other.communicate(timeout=300)
            if not happens:
                more = pair[victim].communicate(timeout=300)
                assert [process.returncode for process in pair] == [0, 0], (errors, more)
                assert output.endswith("2\nover\n")
                continue
            assert other.returncode == 1
            lost = rf"process {victim} of 2 \(.*\) (exited without|has given no sign)"
            assert re.search(
                rf"(?m)^process {1 - victim} of 2 .* another process failed: {lost}", errors
            )
            # jax says this where its GPU plugin is installed without the libraries of a GPU.
            ours = [line for line in errors.splitlines() if "cuda_plugin_extension" not in line]
            assert len(ours) == 1, errors
    finally:
        for process in everyone:
            process.kill()
            process.communicate()


# Training.

STEPS = 6


def losses(run_dir):
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    return [record["train_loss"] for record in records] + [records[-1]["validation_loss"]]


def flags_of(count, run_dir, data):
    flags = f"{failures.FLAGS} --devices 4 --steps {STEPS} --checkpoint.every 2"
    if count > 1:
        flags += " --sample-length 2"
    flags = [*flags.split(), "--checkpoint.keep", "100", "--data.path", str(data)]
    return [*flags, "--run-dir", str(run_dir)]


def train_in(count, run_dir, data):
    """Trains in some processes; returns what they printed."""
    flags = flags_of(count, run_dir, data)
    with failures.Processes(count, flags, folder=data.parent) as processes:
        statuses = processes.wait(seconds=failures.HANGS_AFTER_SECONDS)
        assert statuses == [0] * count, processes.outputs()
        return [processes.output(index) for index in range(count)]


def train_here(run_dir, data, capsys):
    """Trains in this process; returns what `train_in` returns."""
    capsys.readouterr()
    train.train(train.read_command_line(flags_of(1, run_dir, data)).settings)
    return [capsys.readouterr().out]


def change_checksum(checkpoint):
    checksums = Checksums.read(checkpoint)
    assert checksums is not None
    name, (kind, value) = next(iter(checksums.arrays.items()))
    checksums.arrays[name] = (kind, f"{int(value, 16) ^ 1:016x}")
    checksums.write(checkpoint)


@pytest.mark.slow
@shared_programs()
def test_any_number_of_processes_trains_alike_and_goes_on_with_the_run_of_another(tmp_path, capsys):
    data = failures.write_data(tmp_path)
    run_dir = tmp_path / "from_the_beginning"
    train_here(run_dir, data, capsys)
    expected = losses(run_dir)
    for count, after in ((4, 2), (1, 4)):
        before, run_dir = run_dir, tmp_path / f"{after}_by_others"
        shutil.copytree(before, run_dir)
        for step in range(after + 4, STEPS + 1, 2):
            shutil.rmtree(run_dir / "checkpoints" / str(step))
        # The newest one is damaged: all processes go on from the one before.
        change_checksum(run_dir / "checkpoints" / str(after + 2))
        first, *others = (
            train_in(count, run_dir, data) if count > 1 else train_here(run_dir, data, capsys)
        )
        assert f"after step {after}\n" in first
        assert f"{after + 2}.damaged. The checkpoint of step {after} is used" in first
        assert (f"in {count} processes" in first) == (count > 1)
        assert "nodes: " not in first  # The processes are on one machine.
        assert ("--- continued by the model" in first) == (count > 1)
        for output in others:
            lines = output.splitlines()
            # Threads of Gloo write to the same output, and so does jax if it has a plugin for GPUs.
            not_ours = ("[Gloo]", "peer ran", "cuda_plugin")
            assert [x for x in lines if not any(word in x for word in not_ours)] == []
        np.testing.assert_allclose(losses(run_dir), expected, rtol=1e-5)


# Failures.


@pytest.mark.slow
def test_failures_end_all_processes_and_training_goes_on(tmp_path, capsys):
    # A worker that is killed is the same to the others: test_heartbeat.py.
    names = ["process 0 killed", "wrong data", "disk full", "worker stopped"]
    by_name = {case.name: case for case in failures.CASES}
    cases = [by_name[name] for name in [*names, "SIGTERM to a worker"]]
    outcomes = failures.fail(cases, count=2, folder=tmp_path, timeout=8)
    assert [outcome.case for outcome in outcomes] == cases
    assert all(outcome.seconds < failures.END_SECONDS for outcome in outcomes)
    assert [outcome.statuses for outcome in outcomes] == [
        *((-9, 1), (1, 1), (1, 1), (1, 1), (0, 0)),
    ]
    assert outcomes[-1].began_after >= 9
    assert len(capsys.readouterr().out.splitlines()) == len(cases)


def test_processes_that_end_by_themselves_are_found_out(tmp_path):
    with (
        failures.Processes(1, ["--mesh.taem", "2"], folder=tmp_path) as processes,
        pytest.raises(
            run_folders.CheckFailed, match=r"must go on; process 0 ended[\s\S]*mesh.team"
        ),
    ):
        processes.wait_for(lambda: False)
