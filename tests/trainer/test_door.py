"""The door of process 0: who gets in, what strangers can take, and where the secret comes from."""

import ipaddress
import os
import socket
import threading
import time
from contextlib import contextmanager

import pytest

from refusals import refused
from startrail_jax.errors import InputError
from strangers import GIGABYTE, Strangers, is_closed
from trainer.errors import RunError, StorageError
from trainer.network import door, secret, timing
from trainer.network.door import Door, NotLetInError, knock, listen
from trainer.network.options import Distributed
from trainer.network.secret import Secret, find_secret

SECRET = Secret(value="correct horse battery", place="a test")


def given(**changes):
    return Distributed(**{"coordinator": "localhost:7777", "processes": 2, "index": 1, **changes})


@contextmanager
def opened():
    """A door that lets in until the block ends; yields its port and whom it let in."""
    listener, admitted, over = listen(given()), [], threading.Event()
    port = listener.getsockname()[1]

    def serve():
        with Door(listener, SECRET) as entrance:
            while not over.is_set():
                admitted.extend(entrance.serve(0.05)[0])
                assert len(entrance._strangers) <= door.MOST_STRANGERS

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield port, admitted
    finally:
        over.set()
        thread.join(300)
        for connection in admitted:
            connection.close()
        assert not thread.is_alive()


def wait_until(condition):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def comes(port, known=SECRET):
    """Connects to a port and knocks there, as a process does, which tries again."""
    deadline = time.monotonic() + 300
    while True:
        connection = socket.create_connection(("localhost", port), 20)
        try:
            knock(connection, known, deadline)
            return connection
        except (NotLetInError, OSError):
            connection.close()
            if known is not SECRET or time.monotonic() > deadline:
                raise


def test_door_lets_in_who_knows_the_secret_among_strangers(monkeypatch):
    monkeypatch.setattr(timing, "GREETING", 1.0)
    with opened() as (port, admitted), Strangers(port) as strangers:
        with comes(port) as connection:
            wait_until(lambda: admitted)
            # What is sent after the proof is for the one who let it in.
            connection.sendall(b"hello")
            admitted[0].settimeout(300)
            assert admitted[0].recv(10) == b"hello"
            admitted[0].sendall(b"welcome")
            assert connection.recv(10) == b"welcome"
        with socket.create_connection(("localhost", port)) as idle:
            assert is_closed(idle)
        assert len(admitted) == 1
    assert strangers.sent < GIGABYTE / 10


def test_newest_strangers_are_kept(monkeypatch):
    monkeypatch.setattr(door, "MOST_STRANGERS", 3)
    with opened() as (port, _):
        others = [socket.create_connection(("localhost", port)) for _ in range(5)]
        assert [is_closed(other) for other in others[:2]] == [True, True]
        assert not is_closed(others[2], 0.2)
        comes(port).close()
        for other in others:
            other.close()


def test_door_without_a_free_file_stays_open(monkeypatch):
    accept, failures = socket.socket.accept, [OSError(24, "Too many open files")] * 3

    def accept_later(self):
        if failures:
            raise failures.pop()
        return accept(self)

    with opened() as (port, admitted):
        with socket.create_connection(("localhost", port)) as stranger:
            assert stranger.recv(100)
            monkeypatch.setattr(socket.socket, "accept", accept_later)
            comes(port).close()
            assert is_closed(stranger)
        wait_until(lambda: len(admitted) == 1)
    assert not failures


def test_other_secret_is_refused_by_both_sides():
    other = Secret(value="incorrect horse battery", place="VARIABLE")
    with opened() as (port, admitted):
        with refused(NotLetInError, "All processes must"):
            comes(port, other)
        assert admitted == []
    # One who listens there and does not know the secret learns nothing to send back.
    here, there = socket.socketpair()
    with here, there:
        there.sendall(b"0" * 32 + b"\n")

        def reflect():
            there.sendall(there.recv(1 << 10)[-secret.PROOF_LENGTH :])

        thread = threading.Thread(target=reflect)
        thread.start()
        with pytest.raises(NotLetInError):
            knock(here, SECRET, time.monotonic() + 300)
        thread.join(300)


@pytest.mark.parametrize("sends", [b"", b"HTTP/1.1 400 Bad Request\r\n"])
def test_knocking_where_nobody_answers_ends(sends):
    here, there = socket.socketpair()
    with here, there:
        there.sendall(sends)
        with pytest.raises(TimeoutError):
            knock(here, SECRET, time.monotonic() + 0.1)
        there.close()
        with pytest.raises(ConnectionError, match="no answer"):
            knock(here, SECRET, time.monotonic() + 300)


# Where process 0 listens.


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("127.0.0.1", "::1")),
        ({"coordinator": "127.0.0.1:7777"}, ("127.0.0.1",)),
        ({"coordinator": "no.such.host.invalid:7777", "bind": "127.0.0.1"}, ("127.0.0.1",)),
        ({"bind": "0.0.0.0"}, ("0.0.0.0",)),
        ({"bind": "::"}, ("::",)),
    ],
)
def test_process_0_listens_where_it_is_told(options, expected):
    if expected == ("::",) and not socket.has_dualstack_ipv6():
        expected = ()
    if not expected:
        with pytest.raises(OSError, match=r".+"):
            listen(given(**options))
        return
    with listen(given(**options)) as listener:
        assert listener.getsockname()[0] in expected


def test_name_that_is_a_loopback_address_only_here_opens_all_interfaces(monkeypatch, capsys):
    resolve = socket.getaddrinfo

    def resolve_as_debian(host, *arguments, **options):
        return resolve("127.0.1.1" if host == "node001" else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_as_debian)
    with listen(given(coordinator="node001:7777")) as listener:
        assert ipaddress.ip_address(listener.getsockname()[0]).is_unspecified
    assert "here node001 is an address that other machines cannot reach" in capsys.readouterr().err


def test_address_of_another_machine_is_refused():
    with pytest.raises(OSError, match=r"annot assign requested address|Can't assign"):
        listen(given(coordinator="192.0.2.1:7777"))


# Where the secret comes from.

LONG = "0123456789abcdef"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.delenv(secret.VARIABLE, raising=False)


def test_process_0_makes_up_a_secret_that_the_others_find(tmp_path):
    folder, found = tmp_path / "runs" / "new", []
    later = time.monotonic() + 300
    waiting = threading.Thread(target=lambda: found.append(find_secret(given(), folder, later)))
    waiting.start()
    made = find_secret(given(index=0), folder, later)
    waiting.join(300)
    assert found == [made]
    assert len(made.value) == 64
    (path,) = folder.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    # The next start finds it, and it is another one in another folder.
    assert find_secret(given(index=0), folder, later) == made
    assert find_secret(given(index=0), tmp_path, later).value != made.value
    assert made.value not in repr(made)


def test_secret_is_taken_from_the_nearest_place(tmp_path, monkeypatch):
    find_secret(given(index=0), tmp_path, 0.0)
    monkeypatch.setenv(secret.VARIABLE, f"{LONG}-env")
    assert find_secret(given(), tmp_path, 0.0).value == f"{LONG}-env"
    path = tmp_path / "given"
    path.write_text(f"{LONG}-file\n")
    path.chmod(0o440)
    assert find_secret(given(secret_file=path), tmp_path, 0.0).value == f"{LONG}-file"
    assert find_secret(given(secret_file=path), None, 0.0).place == str(path)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602])
def test_secret_that_others_may_read_is_refused(tmp_path, mode):
    path = tmp_path / "given"
    path.write_text(LONG)
    path.chmod(mode)
    with pytest.raises(InputError, match=rf"with mode {mode:04o}. Run: chmod 600 {path} "):
        find_secret(given(secret_file=path), None, 0.0)


def test_secret_that_is_not_there_is_asked_for(tmp_path, monkeypatch):
    with refused(InputError, "STARTRAIL_SECRET"):
        find_secret(given(), None, 0.0)
    with pytest.raises(RunError, match=rf"process 0 puts a secret.*got no {tmp_path}/secret withi"):
        find_secret(given(), tmp_path, 0.0)
    with refused(StorageError, "secret_file"):
        find_secret(given(secret_file=tmp_path / "none"), tmp_path, 0.0)
    (tmp_path / "file").touch()
    with refused(StorageError, "Process 0 must"):
        find_secret(given(index=0), tmp_path / "file" / "run", 0.0)
    (tmp_path / "secret").write_bytes(b"\xff" * 20)
    with refused(StorageError, "secret"):
        find_secret(given(), tmp_path, 0.0)
    monkeypatch.setenv(secret.VARIABLE, "short")
    with refused(InputError, "The secret of a run must") as caught:
        find_secret(given(), tmp_path, 0.0)
    assert "short" not in str(caught.value)
    assert os.environ[secret.VARIABLE] == "short"
