"""The tunnel between jax's coordinator and its clients, with sockets for both."""

import socket
import stat
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from trainer.network import timing
from trainer.network.connection import Connection
from trainer.network.tunnel import LONGEST_SOCKET_PATH, Tunnel, private_folder


@contextmanager
def tunnels():
    """Yields client and coordinator, both tunnels, and whom they say they have lost."""
    lost = []
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("localhost", 0)))
        folders = [Path(stack.enter_context(private_folder())) for _ in range(2)]
        at_0, at_1 = ends = [Tunnel(folder / "jax", lost.append) for folder in folders]
        for one in ends:
            stack.callback(one.close)
        connection = socket.create_connection(listener.getsockname())
        at_0.serve({1: listener.accept()[0]})
        # Process 0 says that all are there as soon as its coordinator listens, and not before.
        coordinator = stack.enter_context(socket.socket(socket.AF_UNIX))
        coordinator.bind(str(folders[0] / "jax"))
        assert Connection(connection).receive_one(0.1) == {}
        coordinator.listen()
        assert Connection(connection).receive_one(10.0) == {"kind": "go"}
        at_1.enter(connection, 2)
        client = stack.enter_context(socket.socket(socket.AF_UNIX))
        client.connect(str(folders[1] / "jax"))
        served = stack.enter_context(coordinator.accept()[0])
        client.settimeout(300)
        served.settimeout(300)
        yield client, served, ends, lost


def read(connection, length):
    data = b""
    while len(data) < length:
        data += connection.recv(length - len(data))
    return data


def wait_until(condition):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_tunnel_carries_bytes_both_ways():
    data = bytes(range(256)) * 40_000
    with tunnels() as (client, served, _, lost):
        served.sendall(b"settings")
        assert read(client, 8) == b"settings"
        for here, there in ((client, served), (served, client)):
            sending = threading.Thread(target=here.sendall, args=[data])
            sending.start()
            assert read(there, len(data)) == data
            sending.join(300)
    assert lost == []


def test_what_was_sent_last_still_arrives(monkeypatch):
    # Whoever waited for this long would not be waited for.
    monkeypatch.setattr(timing, "FAREWELL", 300.0)
    data = bytes(range(256)) * 400
    with tunnels() as (client, served, ends, lost):
        for one in ends:
            one.leave()
        served.sendall(data)
        served.close()
        since = time.monotonic()
        ends[0].close()
        assert read(client, len(data)) == data
        client.close()
        ends[1].close()
        assert time.monotonic() - since < timing.FAREWELL
    assert lost == []


@pytest.mark.parametrize("index", [0, 1])
def test_process_that_is_gone_is_named_and_jax_does_not_see_it(index, monkeypatch):
    monkeypatch.setattr(timing, "FAREWELL", 0.05)
    with tunnels() as (client, served, ends, lost):
        ends[index].close()
        wait_until(lambda: lost)
        inside = client if index == 0 else served
        inside.settimeout(0.1)
        with pytest.raises(TimeoutError):
            inside.recv(1)
    assert lost == [f"process {index} of 2"]


def test_socket_is_in_a_folder_of_this_user_alone_with_a_short_path(monkeypatch, tmp_path):
    long = tmp_path / ("long" * 30)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with private_folder() as folder:
        assert len(f"{folder}/jax") < LONGEST_SOCKET_PATH
        assert stat.S_IMODE(Path(folder).stat().st_mode) == 0o700
    assert not Path(folder).exists()
