"""How processes find each other at one address, among strangers and strays."""

import json
import re
import socket
import threading
import time

import pytest

from benchmarks import failures
from trainer.processes import rendezvous
from trainer.processes.options import Distributed


def given(**changes):
    return Distributed(**{"coordinator": "localhost:7777", "processes": 2, "index": 1, **changes})


def meeting(port, **changes):
    options = given(coordinator=f"localhost:{port}", start_timeout=20.0, **changes)
    results = []

    def meet():
        try:
            results.append(rendezvous.meet(options, time.monotonic() + options.start_timeout))
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
    greet(port, index=1, processes=4).close()  # The process is then started again.
    time.sleep(0.2)
    one = greet(port, index=1, processes=4)
    time.sleep(0.2)
    for changes, message in (
        ({"processes": 4}, r"index must be different in every process; got index=1 in two of"),
        ({"processes": 3}, r"processes must be the same in all processes; got 3 in process 1, an"),
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
    # Another run may meet there now, and a stray process finds nobody.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("localhost", port))
    for connection in (one, *strangers):
        connection.close()


def test_wrong_host_is_not_waited_for_long(monkeypatch):
    monkeypatch.setattr(rendezvous, "UNKNOWN_HOST_SECONDS", 0.0)
    for host in ("no.such.host.invalid", "a" * 70):
        with pytest.raises(RuntimeError, match=rf"Process 0 must wait at .* from {host}:7777 for"):
            rendezvous.meet(given(coordinator=f"{host}:7777"), time.monotonic() + 300)
