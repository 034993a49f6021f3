"""How processes find each other at one address, among strangers and strays."""

import json
import re
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from strangers import Strangers, is_closed
from tests.faults import failures
from trainer.errors import RunError
from trainer.network import rendezvous, waiting
from trainer.network.door import knock
from trainer.network.options import Distributed
from trainer.network.secret import Secret
from trainer.processes import distributed


def given(**changes):
    return Distributed(**{"coordinator": "localhost:7777", "processes": 2, "index": 1, **changes})


SECRET = Secret(value="correct horse battery", place="a test")


def meeting(port, known=SECRET, **changes):
    """Meets in a thread; results in connections, the connection to process 0, or an error."""
    options = given(coordinator=f"localhost:{port}", **{"start_timeout": 30.0, **changes})
    meet = rendezvous.receive_others if options.index == 0 else rendezvous.find_process_0
    results = []

    def run():
        try:
            results.append(meet(options, known, time.monotonic() + options.start_timeout))
        except RuntimeError as error:
            results.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def test_process_that_waits_says_so_again_and_again(monkeypatch, capsys):
    said, show = threading.Semaphore(0), print
    monkeypatch.setattr(waiting, "SECONDS_BEFORE_LINE", 0.02)
    monkeypatch.setattr(waiting, "SECONDS_BETWEEN_LINES", 0.02)

    def say(*what, **where):
        show(*what, **where)
        said.release()

    def find(*_):
        for _ in range(3):
            assert said.acquire(timeout=300)
        raise RunError("not there")

    monkeypatch.setattr(waiting, "print", say, raising=False)
    monkeypatch.setattr(distributed, "find_process_0", find)
    with pytest.raises(RunError):
        distributed._connect(given(), Path("unused"), SECRET, 0.0)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 2
    assert lines[0] == (
        "process 1 of 2 waits for process 0 and the others at localhost:7777, for 0 s so far"
    )
    time.sleep(0.1)
    assert capsys.readouterr().err.count("\n") <= 1  # It is over.


def connect(port):
    deadline = time.monotonic() + 300
    while True:
        try:
            return socket.create_connection(("localhost", port))
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def greet(port, **greeting):
    connection = connect(port)
    knock(connection, SECRET, time.monotonic() + 300)
    connection.sendall(json.dumps(greeting).encode() + b"\n")
    return connection


def refusal(port, **changes):
    thread, results = meeting(port, **changes)
    thread.join(300)
    return results[0]


def test_processes_meet_among_strangers():
    port = failures.free_port()
    leader, at_0 = meeting(port, index=0, processes=4)
    connect(port).close()
    with Strangers(port):
        greet(port, index=1, processes=4).close()  # The process is then started again.
        for odd in ({}, {"index": 9, "processes": 4}, {"index": "1", "processes": 4}):
            with greet(port, **odd) as refused:
                assert is_closed(refused)
        # Whether the first one is gone yet, process 0 says.
        while "two of them" in refusal(port, index=1, processes=3):
            pass
        one = greet(port, index=1, processes=4)
        several = (
            r"distributed\.processes must be the same in all processes; got 3 in process 1, an"
        )
        assert re.match(several, refusal(port, index=1, processes=3))
        twice = r"distributed\.index must be different in every process; got index=1 in two of"
        assert re.match(twice, refusal(port, index=1, processes=4))
        others = [meeting(port, index=index, processes=4) for index in (3, 2)]
        leader.join(300)
        (connections,) = at_0
        assert sorted(connections) == [1, 2, 3]
        # Nobody listens there any longer, and a stray process finds nobody.
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("localhost", port))
    assert all(not results for _, results in others)
    for connection in connections.values():
        rendezvous.tell_to_go_on(connection)
    assert json.loads(one.recv(100)) == {"kind": "go"}
    for thread, results in others:
        thread.join(300)
        results[0].close()
    for connection in (one, *connections.values()):
        connection.close()


def test_process_with_another_secret_is_refused(monkeypatch):
    monkeypatch.setattr(rendezvous, "OTHER_SECRET_SECONDS", 0.0)
    port = failures.free_port()
    leader, at_0 = meeting(port, index=0)
    other = Secret(value="incorrect horse battery", place="VARIABLE")
    assert re.match(r"All processes must know the same secret; got", refusal(port, known=other))
    thread, results = meeting(port)
    leader.join(300)
    rendezvous.tell_to_go_on(at_0[0][1])
    thread.join(300)
    for connection in (results[0], at_0[0][1]):
        connection.close()


def test_start_that_is_not_complete_tells_of_strangers(monkeypatch):
    monkeypatch.setattr(rendezvous, "OTHER_SECRET_SECONDS", 0.0)
    port = failures.free_port()
    receive = rendezvous._Reception.receive
    monkeypatch.setattr(
        rendezvous._Reception, "receive", lambda self, left: receive(self, min(left, 0.05))
    )
    leader, at_0 = meeting(port, index=0)
    assert "same secret" in refusal(port, known=Secret(value="incorrect", place="x"))
    # The time to start is over.
    later = SimpleNamespace(**{**vars(time), "monotonic": lambda: time.monotonic() + 60})
    monkeypatch.setattr(rendezvous, "time", later)
    leader.join(300)
    assert re.match(r"All 2 processes must start .* fewer\. 1 connections were closed", at_0[0])


def test_wrong_host_is_not_waited_for_long(monkeypatch):
    monkeypatch.setattr(rendezvous, "UNKNOWN_HOST_SECONDS", 0.0)
    for host in ("no.such.host.invalid", "a" * 70):
        with pytest.raises(RuntimeError, match=rf"Process 0 must wait at .* from {host}:7777 for"):
            rendezvous.find_process_0(
                given(coordinator=f"{host}:7777"), SECRET, time.monotonic() + 300
            )
