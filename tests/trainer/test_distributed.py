"""Several processes: how they start, that they train as one does, and how they fail."""

import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

import train
from benchmarks import failures
from trainer.processes import distributed
from trainer.processes.devices import select_devices
from trainer.processes.distributed import (
    Distributed,
    start,
)
from trainer.run import exit as program_exit
from trainer.run.checkpoint import (
    CheckpointError,
    Checkpoints,
)
from trainer.run.exit import (
    describe,
    end_now,
    exit_on_user_errors,
)

REPOSITORY = Path(train.__file__).parent


def given(**changes):
    return Distributed(**{"coordinator": "localhost:7777", "processes": 2, "index": 1, **changes})


# How processes start.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index": None}, r"must be given together; got coordinator=.*, processes=2, index=None"),
        ({"coordinator": None}, r"must be given together; got coordinator=None.*Give the missing"),
        ({"index": 2}, r"index must be at least 0 and below .*; got index=2, processes=2"),
        ({"index": -1}, r"index must be at least 0.*; got index=-1, processes=2"),
        ({"processes": 0, "index": 0}, r"index must be .* below .*; got index=0, processes=0"),
        ({"coordinator": "localhost"}, r"must be a host and a port; got coordinator='localhost'"),
        ({"coordinator": ":7777"}, r"must be a host and a port; got coordinator=':7777'"),
        ({"coordinator": "localhost:http"}, r"a host and a port; got .*free there, such as"),
        ({"coordinator": "localhost:70000"}, r"a host and a port; got coordinator='localhost:7000"),
        ({"timeout": 0.0}, r"distributed.timeout must be above 0; got timeout=0.0"),
        ({"start_timeout": -1.0}, r"distributed.start_timeout must be above 0; got start_timeout="),
    ],
)
def test_processes_that_cannot_be_raise(changes, message):
    with pytest.raises(ValueError, match=message):
        given(**changes)


def test_flags_say_which_process_this_is():
    flags = ["--distributed.coordinator", "[::1]:7777", "--distributed.processes", "2"]
    command = train.read_command_line([*flags, "--distributed.index", "0", "--mesh.team", "1"])
    assert command.distributed == given(coordinator="[::1]:7777", index=0)
    assert command.distributed.several
    assert command.distributed.coordinator_host == "::1"
    assert command.config.mesh.team == 1
    assert train.read_command_line(["--distributed"]).distributed == Distributed(on=True)
    assert not train.read_command_line([]).distributed.several
    # It does not change what the run is.
    assert "distributed" not in vars(command.config)


def test_start_does_nothing_for_one_process():
    start(Distributed())
    assert not jax.distributed.is_initialized()


@pytest.fixture
def preemption_service():
    yield
    jax.config.update("jax_enable_preemption_service", True)


@pytest.mark.usefixtures("preemption_service")
def test_start_where_it_cannot_be_raises():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=rf"port that is free.*localhost:{port}: Addr"):
            start(given(coordinator=f"localhost:{port}", index=0))
    with pytest.raises(RuntimeError, match=r"Process 0 must wait at .*refused.* for 0.1 s\. Start"):
        start(given(coordinator=f"localhost:{port}", start_timeout=0.1))
    jax.devices()
    with pytest.raises(RuntimeError, match=r"Process 0 must be able to join.*must be called befor"):
        start(given(coordinator=f"localhost:{failures.free_port()}", processes=1, index=0))


def meeting(port, **changes):
    options = given(coordinator=f"localhost:{port}", start_timeout=20.0, **changes)
    results = []

    def meet():
        try:
            results.append(distributed._meet(options, time.monotonic() + options.start_timeout))
        except RuntimeError as error:
            results.append(str(error))

    thread = threading.Thread(target=meet, daemon=True)
    thread.start()
    return thread, results


def connect(port):
    deadline = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection(("localhost", port))
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def greet(port, **greeting):
    connection = connect(port)
    connection.sendall(json.dumps(greeting).encode() + b"\n")
    return connection


def test_processes_meet_at_a_port_of_their_own():
    port = failures.free_port()
    leader, address = meeting(port, index=0, processes=4)
    strangers = [connect(port) for _ in range(3)]
    strangers[0].sendall(b"[" * 1000 + b"\n")
    strangers[1].sendall(b"GET / HTTP/1.1\r\n\r\n")
    greet(port, index=1, processes=4).close()  # It is started again.
    time.sleep(0.2)
    one = greet(port, index=1, processes=4)
    time.sleep(0.2)
    for changes, message in (
        ({"processes": 4}, r"index must be another in every process; got index=1 in two\. Number"),
        ({"processes": 3}, r"processes must be the same in all; got 3 in process 1, and 4 in pro"),
    ):
        thread, results = meeting(port, index=1, **changes)
        thread.join(20)
        assert re.match(rf"distributed\.{message}", *results)
    others = [meeting(port, index=index, processes=4) for index in (3, 2)]
    for thread, _ in (*others, (leader, None)):
        thread.join(20)
        assert not thread.is_alive()
    assert [results for _, results in others] == [address, address]
    assert address[0] == f"localhost:{json.loads(one.recv(100))['port']}" != f"localhost:{port}"
    # A run of its own may meet there now, and a stray process finds nobody.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("localhost", port))
    for connection in (one, *strangers):
        connection.close()


def test_wrong_host_is_not_waited_for_long(monkeypatch):
    monkeypatch.setattr(distributed, "UNKNOWN_HOST_SECONDS", 0.0)
    for host in ("no.such.host.invalid", "a" * 70):
        with pytest.raises(RuntimeError, match=rf"Process 0 must wait at .* from {host}:7777 for"):
            distributed._meet(given(coordinator=f"{host}:7777"), time.monotonic() + 300)


STARTING = """
import jax
from trainer.processes.distributed import Distributed, start
from trainer.run.exit import exit_on_user_errors
with exit_on_user_errors():
    start(Distributed({}))
    print(jax.process_index(), jax.process_count(), jax.device_count())
"""


def starting(options, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", STARTING.format(options)],
        cwd=REPOSITORY,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_slurm_job():
    """A job for which the port that jax makes of it is free."""
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
    # No launcher, and others that do not come.
    processes += [
        starting("on=True"),
        starting(f"coordinator='localhost:{failures.free_port()}', processes=2, index=0, "
                 "start_timeout=1.0"),
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for index in (0, 1):
        assert processes[index].returncode == 0, outputs[index]
        assert outputs[index][0].splitlines()[-1] == f"{index} 2 6"
    assert [process.returncode for process in processes[2:]] == [1, 1]
    assert re.match(
        r"RuntimeError: --distributed needs processes that SLURM.*got ValueError: coord.* should "
        r"be defined\. Start them so, or give --distributed.coordinator",
        outputs[2][1],
    )
    assert "All 2 processes must start within 1 s; got fewer. Start the others" in outputs[3][1]


# Devices.


def fake_devices(monkeypatch, *counts):
    devices = [
        SimpleNamespace(process_index=process, platform="gpu", id=(process, number))
        for process, count in enumerate(counts)
        for number in range(count)
    ]
    monkeypatch.setattr(jax, "devices", lambda: devices)


def test_select_devices_takes_as_many_of_each_process(monkeypatch):
    fake_devices(monkeypatch, 4, 4)
    assert [x.id for x in select_devices(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len(select_devices(None)) == 8
    with pytest.raises(ValueError, match=r"devices=3, processes=2\. Use --devices 4"):
        select_devices(3)
    fake_devices(monkeypatch, 2, 3, 2)
    with pytest.raises(ValueError, match=r"must see as many devices; got 2 and 3 and 2 in .* 2\."):
        select_devices(3)
    # Before the processes meet.
    monkeypatch.setattr(jax, "devices", None)
    with pytest.raises(ValueError, match=r"devices=3, processes=2\. Use --devices 4"):
        select_devices(3, processes=2)


# Errors.


def own_error():
    try:
        given(index=2)
    except ValueError as error:
        return error


def test_one_of_several_ends_without_waiting_for_the_others(monkeypatch):
    said = []
    monkeypatch.setattr(program_exit, "end_now", said.append)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    with pytest.raises(SystemExit), exit_on_user_errors():
        raise own_error()
    assert said == [describe(own_error())]
    assert said[0].startswith("ValueError: distributed.index must be")
    with pytest.raises(KeyboardInterrupt), exit_on_user_errors():
        raise KeyboardInterrupt
    assert said[1:] == ["KeyboardInterrupt"]
    with pytest.raises(SystemExit), exit_on_user_errors():
        sys.exit(2)
    assert len(said) == 2


def test_describe_keeps_the_traceback_of_a_library():
    with pytest.raises(ValueError, match="Expecting") as caught:
        json.loads("{")
    message = describe(caught.value)
    assert message.startswith("Traceback")
    assert "json/decoder.py" in message
    assert describe(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_end_now_does_not_wait():
    script = (
        "import atexit, threading; from trainer.run.exit import end_now; "
        "atexit.register(print, 'not reached'); print('so far', end=''); "
        "threading.Thread(target=end_now, args=['over']).start(); threading.Event().wait()"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (result.returncode, result.stdout, result.stderr) == (1, "so far", "over\n")
    assert end_now.__annotations__["return"] == "NoReturn"


@pytest.mark.parametrize(
    ("broadcast", "message"),
    [
        (
            [None, 6],
            r"got step 0 as the newest here, and step 6 in process 0, in .*Use a --run-",
        ),
        ([5, 0], r"must see the same folder of checkpoints; got another one in process 0, in "),
    ],
)
def test_processes_that_see_other_checkpoints_are_refused(
    broadcast, message, tmp_path, monkeypatch
):
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        assert checkpoints.begin_after() == 0

        def one_to_all(x):
            first = broadcast.pop(0)
            return x if first is None else np.int32(first)

        monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", one_to_all)
        with pytest.raises(CheckpointError, match=message):
            checkpoints.begin_after()
        assert list(tmp_path.iterdir()) == []


# Training.

STEPS = 8


def losses(run_dir):
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    return [record["train_loss"] for record in records] + [records[-1]["validation_loss"]]


def train_in(count, run_dir, data):
    """What its processes printed."""
    flags = f"{failures.FLAGS} --devices 4 --steps {STEPS} --checkpoint.every 2"
    if count == 2:
        flags += " --sample-length 2"
    flags = [*flags.split(), "--checkpoint.keep", "100", "--data.path", str(data)]
    flags += ["--run-dir", str(run_dir)]
    with failures.Processes(count, flags, folder=data.parent) as processes:
        statuses = processes.wait(seconds=failures.HANGS_AFTER_SECONDS)
        assert statuses == [0] * count, processes.outputs()
        return [processes.output(index) for index in range(count)]


def test_any_number_of_processes_trains_alike_and_goes_on_with_the_run_of_another(tmp_path):
    data, _ = failures.write_data(tmp_path)
    run_dir = tmp_path / "from_the_beginning"
    train_in(1, run_dir, data)
    expected = losses(run_dir)
    for count, after in ((2, 2), (4, 4), (1, 6)):
        before, run_dir = run_dir, tmp_path / f"{after}_by_others"
        shutil.copytree(before, run_dir)
        for step in range(after + 2, STEPS + 1, 2):
            shutil.rmtree(run_dir / "checkpoints" / str(step))
        first, *others = train_in(count, run_dir, data)
        assert f"after step {after}\n" in first
        assert (f"in {count} processes" in first) == (count > 1)
        assert ("--- continued by the model" in first) == (count == 2)
        for output in others:
            lines = output.splitlines()
            # Threads of Gloo write at the same time; and jax, where it has a plugin for GPUs.
            not_ours = ("[Gloo]", "peer ran", "cuda_plugin")
            assert [x for x in lines if not any(word in x for word in not_ours)] == []
        np.testing.assert_allclose(losses(run_dir), expected, rtol=1e-5)


# Failures.


def test_failures_end_all_processes_and_training_goes_on(tmp_path, capsys):
    names = ["process 0 killed", "worker killed", "wrong data", "disk full", "worker stopped"]
    by_name = {case.name: case for case in failures.CASES}
    cases = [by_name[name] for name in [*names, "SIGTERM to a worker"]]
    outcomes = failures.fail(cases, count=2, folder=tmp_path, timeout=8)
    assert [outcome.case for outcome in outcomes] == cases
    assert all(outcome.seconds < failures.END_SECONDS for outcome in outcomes)
    assert [outcome.statuses for outcome in outcomes] == [
        *((-9, 1), (1, -9), (1, 1), (1, 1), (1, 1), (0, 0)),
    ]
    assert outcomes[-1].began_after >= 9
    assert len(capsys.readouterr().out.splitlines()) == len(cases)


def test_processes_that_end_by_themselves_are_found_out(tmp_path):
    with (
        failures.Processes(1, ["--mesh.taem", "2"], folder=tmp_path) as processes,
        pytest.raises(failures.Failure, match=r"must go on; process 0 ended[\s\S]*mesh.team"),
    ):
        processes.wait_for(lambda: False)
