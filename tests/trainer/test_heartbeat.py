"""The heartbeat of processes, with threads for processes: who is lost, who says so, who stops."""

import json
import re
import selectors
import socket
import threading
import time
from types import SimpleNamespace

import jax
import pytest

from strangers import Strangers
from trainer.errors import StorageError
from trainer.network import timing
from trainer.network.connection import Connection
from trainer.network.door import Door, knock
from trainer.network.options import Distributed
from trainer.processes import worker
from trainer.processes.coordinator import Coordinator, coordinate
from trainer.processes.heartbeat import heartbeat
from trainer.processes.worker import Worker, join, secret_of_heartbeat

TIMEOUT = 2.0


@pytest.fixture(autouse=True)
def ends(monkeypatch):
    """The messages of the processes that end; in these tests the process goes on."""
    said = []

    def end(message):
        said.append(message)
        if threading.current_thread() is threading.main_thread():
            raise SystemExit

    monkeypatch.setattr(worker, "end_now", end)
    monkeypatch.setattr(timing, "BEAT", 0.1)
    monkeypatch.setattr(timing, "VERDICT", 0.5)
    monkeypatch.setattr(timing, "FAREWELL", 1.0)
    yield said
    # Threads that outlive their test would call the real `end_now`, which ends the tests.
    for thread in threading.enumerate():
        if thread.name.startswith("heartbeat"):
            thread.join(300)
            assert not thread.is_alive()


def wait_until(condition):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def in_threads(*actions):
    """Runs functions at the same time; returns their results."""
    results = [None] * len(actions)

    def run(index, action):
        results[index] = action()

    threads = [threading.Thread(target=run, args=x, daemon=True) for x in enumerate(actions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    return results


def coordinated(count, timeout=TIMEOUT):
    options = Distributed(coordinator="localhost:7777", processes=count, index=0, timeout=timeout)
    return coordinate(options, count)


def begin(count, timeout=TIMEOUT):
    meeting = coordinated(count, timeout)
    return in_threads(*(lambda i=i: join(meeting, i, timeout) for i in range(count)))


OPEN = []


@pytest.fixture(autouse=True)
def close_connections(ends):
    yield
    while OPEN:
        OPEN.pop().close()


def connect(meeting, index):
    """The connection of a process that joins and then does nothing."""
    plain = socket.create_connection(("localhost", meeting["port"]))
    OPEN.append(plain)
    knock(plain, secret_of_heartbeat(meeting["token"]), time.monotonic() + 300)
    line = Connection(plain)
    line.send("join", index=index, host="far", flags={})
    return line


def begin_with_silent(count, timeout=TIMEOUT):
    """Begins a heartbeat in which the last process never says anything."""
    meeting = coordinated(count, timeout)
    line = connect(meeting, count - 1)
    return line, in_threads(*(lambda i=i: join(meeting, i, timeout) for i in range(count - 1)))


def is_refused(port):
    try:
        socket.create_connection(("localhost", port)).close()
    except ConnectionRefusedError:
        return True
    return False


def leave(workers):
    in_threads(*(one.leave for one in workers))


def test_one_process_needs_no_heartbeat():
    with heartbeat(Distributed()) as agree:
        assert not agree(False)
        assert agree(True)


@pytest.mark.slow
def test_all_leave_together(ends):
    workers = begin(3)
    left = threading.Thread(target=workers[1].leave, daemon=True)
    left.start()
    time.sleep(2 * TIMEOUT)  # A process that waits for the others is not lost.
    assert left.is_alive()
    in_threads(workers[0].leave, workers[2].leave)
    left.join(300)
    assert not left.is_alive()
    assert ends == []


def test_last_act_is_done_when_all_are_done(ends):
    workers, acts = begin(3), []
    barrier = threading.Barrier(3)  # As that of jax, which waits for all processes.

    def act():
        acts.append(threading.get_ident())
        barrier.wait(300)

    first = threading.Thread(target=workers[1].leave, args=[act], daemon=True)
    first.start()
    assert not workers[0].agree(False)
    assert acts == []
    in_threads(lambda: workers[0].leave(act), lambda: workers[2].leave(act))
    first.join(300)
    assert len(set(acts)) == 3
    assert ends == []


@pytest.mark.parametrize("happens", ["gone", "silent", "raises"])
@pytest.mark.slow_except_every(3)
def test_process_that_is_lost_during_the_last_act_ends_all(happens, ends):
    line, workers = begin_with_silent(2)
    over = threading.Event()

    def act():
        over.wait()  # Until the other process comes, which it never does.

    leaving = threading.Thread(target=workers[0].leave, args=[act], daemon=True)
    leaving.start()
    line.send("done")
    wait_until(lambda: "leave" in [message["kind"] for message in line.receive()])
    if happens == "gone":
        line.close()
    if happens == "raises":
        line.send("failed", why="RuntimeError: the barrier broke")
    wait_until(lambda: ends)
    over.set()
    leaving.join(300)
    (message,) = ends
    what = {
        "gone": " exited without reporting an error",
        "silent": " has given no sign of life for 2 s",
        "raises": ": RuntimeError: the barrier broke",
    }
    assert f"process 1 of 2 (far){what[happens]}" in message


@pytest.mark.parametrize("wishing", [0, 2])
def test_all_stop_at_the_same_call(wishing, ends):
    workers = begin(3)
    answers = [[], [], []]

    def loop(index):
        for call in range(1000):
            answers[index].append(workers[index].agree(index == wishing and call >= 50))
            # Each goes as fast as it can, but at most one step ahead, as in training.
            while min(map(len, answers)) < len(answers[index]) - 1:
                time.sleep(0.001)

    in_threads(*(lambda i=i: loop(i) for i in range(3)))
    assert answers[0] == answers[1] == answers[2]
    first = answers[0].index(True)
    assert first >= 50
    assert all(answers[0][first:])
    leave(workers)
    assert ends == []


def test_wish_that_comes_when_others_are_done_stops_nobody(ends):
    workers = begin(2)
    for one in workers:
        assert not one.agree(False)
    left = threading.Thread(target=workers[1].leave, daemon=True)
    left.start()
    assert not workers[0].agree(True)
    workers[0].leave()
    left.join(300)
    assert ends == []


def test_process_that_is_gone_ends_all(ends):
    line, _ = begin_with_silent(3)
    line.close()
    wait_until(lambda: len(ends) == 2)
    host = socket.gethostname()
    assert sorted(ends) == [
        f"process {index} of 3 ({host}) ends because another process failed: process 2 of 3 (far) "
        "exited without reporting an error. Fix that; then the same command goes on from the "
        "newest whole checkpoint."
        for index in (0, 1)
    ]


def test_process_that_is_silent_ends_all(ends):
    since = time.monotonic()
    begin_with_silent(3)
    wait_until(lambda: len(ends) == 2)
    assert time.monotonic() - since > TIMEOUT
    for message in ends:
        assert "process 2 of 3 (far) has given no sign of life for 2 s (stopped, or " in message


@pytest.mark.slow
def test_process_0_is_not_blamed_while_it_waits_for_the_one_that_is_silent(monkeypatch, ends):
    # It waits for longer than a process may be silent.
    monkeypatch.setattr(timing, "FAREWELL", 2.0)
    begin_with_silent(2, timeout=1.0)
    wait_until(lambda: ends)
    (message,) = ends
    assert "process 1 of 2 (far) has given no sign of life for 1 s" in message


@pytest.mark.parametrize("happens", ["gone", "silent"])
@pytest.mark.slow_except_every(2)
def test_without_process_0_the_others_end(happens, ends):
    with socket.create_server(("localhost", 0)) as server:
        meeting = {"hosts": ["localhost"], "port": server.getsockname()[1], "token": "x"}
        workers = []
        joining = threading.Thread(target=lambda: workers.append(join(meeting, 1, TIMEOUT)))
        joining.start()
        entrance = Door(server, secret_of_heartbeat("x"))
        wait_until(lambda: OPEN.extend(entrance.serve(0.1)[0]) or OPEN)
        line = Connection(OPEN[0])
        assert line.receive_one(10.0)["index"] == 1
        line.send("joined", names=["process 0 of 2 (a)", "process 1 of 2 (b)"])
        joining.join(300)
        if happens == "gone":
            line.close()
        wait_until(lambda: ends)
        line.close()
    (message,) = ends
    what = {
        "gone": "exited without reporting an error",
        "silent": "has given no sign of life for 2 s",
    }
    assert f"(b) ends because another process failed: process 0 of 2 (a) {what[happens]}" in message


def fail_with(one, error):
    with pytest.raises(SystemExit):
        one.fail(error)


@pytest.mark.parametrize("failing", [0, 1])
def test_error_ends_all_and_is_shown_by_all(failing, ends):
    workers = begin(2)
    fail_with(workers[failing], StorageError("it broke.\nin detail"))
    wait_until(lambda: len(ends) == 2)
    host = socket.gethostname()
    name = f"process {failing} of 2 ({host})"
    assert f"{name}: StorageError: it broke.\nin detail" in ends
    (other,) = (message for message in ends if not message.startswith(f"{name}: "))
    assert f" ends because another process failed: {name}: StorageError: it broke. Fix" in other


def test_failed_collective_is_not_blamed_for_the_death_that_it_comes_of(monkeypatch, ends):
    line, workers = begin_with_silent(3)

    def wait_for_verdict(_):
        line.close()
        wait_until(lambda: len(ends) == 2)

    monkeypatch.setattr(
        worker, "time", SimpleNamespace(monotonic=time.monotonic, sleep=wait_for_verdict)
    )
    try:
        raise RuntimeError from jax.errors.JaxRuntimeError("Gloo: connection closed")
    except RuntimeError as error:
        with pytest.raises(SystemExit):
            workers[1].fail(error)
    assert all(
        "process 2 of 3 (far) exited without reporting an error" in message for message in ends[:2]
    )


def test_failed_collective_is_blamed_when_nobody_died(ends):
    workers = begin(2)
    fail_with(workers[1], jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"))
    wait_until(lambda: len(ends) == 2)
    assert all("JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory" in x for x in ends)


def test_strangers_are_not_let_in(ends):
    meeting = coordinated(2)
    with Strangers(meeting["port"]):
        for index in (2, -1, "1", None, [1]):
            assert connect(meeting, index).receive_one(10.0) == {}
        workers = in_threads(*(lambda i=i: join(meeting, i, TIMEOUT) for i in range(2)))
        assert all(isinstance(one, Worker) for one in workers)
        leave(workers)
    # All are there, so nobody else can come.
    wait_until(lambda: is_refused(meeting["port"]))
    assert ends == []


def test_process_that_does_not_know_the_token_is_not_let_in(monkeypatch):
    monkeypatch.setattr(timing, "JOIN", 1.0)
    meeting = coordinated(2)
    with pytest.raises(RuntimeError, match=r"Process 1 must reach process 0 by TCP"):
        join({**meeting, "token": "guessed"}, 1, TIMEOUT)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"seed": "--seed 1", "steps": "--steps 5"}, r"--seed 1, and process 0 --seed 0: all must"),
        ({"seed": "--seed 0"}, r"none, and process 0 --steps 5: all must have the same flags"),
        (
            {"seed": "--seed 0", "steps": "--steps 6", "tokens": "--tokens 7"},
            r"--steps 6 --tokens 7, and process 0 --steps 5: ",
        ),
    ],
)
def test_processes_with_other_flags_are_refused_by_all(flags, message):
    meeting = coordinated(3)
    of_0 = {"seed": "--seed 0", "steps": "--steps 5"}

    def refused(index):
        with pytest.raises(RuntimeError) as caught:
            join(meeting, index, TIMEOUT, flags if index == 1 else of_0)
        return str(caught.value)

    one, *others = in_threads(*(lambda i=i: refused(i) for i in range(3)))
    assert others == [one, one]
    assert re.match(rf"All processes must join; got: process 1 of 3 \(.*\) has {message}", one)


@pytest.mark.slow
def test_who_was_stopped_does_not_blame_the_others(monkeypatch, ends):
    workers = begin(2)
    select = selectors.DefaultSelector.select
    resumed = time.monotonic() + TIMEOUT + 1

    def stopped(self, timeout=None):
        found = select(self, 0)
        time.sleep(max(resumed - time.monotonic(), 0) or timeout)
        return found

    monkeypatch.setattr(selectors.DefaultSelector, "select", stopped)
    time.sleep(TIMEOUT + 1.5)
    monkeypatch.setattr(selectors.DefaultSelector, "select", select)
    leave(workers)
    assert ends == []


@pytest.mark.slow
def test_suspension_outside_of_waiting_does_not_count_as_silence(monkeypatch, ends):
    workers = begin(2)
    tell, is_readable = Coordinator._tell, worker.is_readable
    resumed = time.monotonic() + TIMEOUT + 1

    def suspended_after(self, kind, **values):
        tell(self, kind, **values)
        time.sleep(max(resumed - time.monotonic(), 0))

    def suspended_longer(connection):
        time.sleep(max(resumed + 0.5 - time.monotonic(), 0))
        return is_readable(connection)

    monkeypatch.setattr(worker, "is_readable", suspended_longer)
    time.sleep(0.3)  # Until the coordinator has received all that was sent.
    monkeypatch.setattr(Coordinator, "_tell", suspended_after)
    time.sleep(TIMEOUT + 2)
    leave(workers)
    assert ends == []


def test_error_in_the_heartbeat_itself_is_told_to_all(monkeypatch):
    monkeypatch.setattr(Coordinator, "_follow", lambda _: {}["x"])
    with pytest.MonkeyPatch.context() as patch:
        said = []
        patch.setattr(worker, "end_now", said.append)
        begin(2)
        wait_until(lambda: len(said) == 2)
    assert all("the heartbeat in process 0 of 2 (" in x and "KeyError: 'x'" in x for x in said)


@pytest.mark.slow
def test_process_that_does_not_join_is_named(monkeypatch):
    monkeypatch.setattr(timing, "JOIN", 3.0)
    meeting = coordinated(2)
    with pytest.raises(
        RuntimeError, match=r"must join; got: process 1 of 2 did not join within 3 s"
    ):
        join(meeting, 0, TIMEOUT)


def test_process_0_that_cannot_be_reached_is_named(monkeypatch):
    monkeypatch.setattr(timing, "JOIN", 0.1)
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    meeting = {"hosts": ["localhost", "127.0.0.1"], "port": port, "token": "x"}
    message = rf"Process 1 must reach process 0 by TCP.*localhost, 127.0.0.1, port {port}\. Open"
    with pytest.raises(RuntimeError, match=message):
        join(meeting, 1, TIMEOUT)


def test_messages_are_read_in_whatever_pieces_they_come():
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there, pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "setsockopt", lambda *_: None)  # The socket is not one of TCP.
        line = Connection(here)
        data = json.dumps({"kind": "a", "text": "x\ny" * 1000}).encode() + b'\n{"kind": "b"}\n'
        found = []
        for start in range(0, len(data), 1500):
            there.sendall(data[start : start + 1500])
            found += line.receive()
        assert [message["kind"] for message in found] == ["a", "b"]
        there.close()
        assert line.receive() is None
    assert re.fullmatch(r"(x\ny)+", found[0]["text"])
