"""Guards of the tests: against those that are skipped unseen, and a process full of programs."""

import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import compile_cache
import conftest

pytestmark = pytest.mark.quick


def skipped(reason):
    return SimpleNamespace(skipped=True, outcome="skipped", longrepr=("file.py", 1, reason))


@pytest.mark.parametrize("reason", conftest.ALLOWED_SKIPS)
def test_skip_for_a_reason_that_is_allowed_stays_a_skip(reason):
    report = conftest.refuse_other_skips(skipped(f"Skipped: {reason}"))
    assert report.outcome == "skipped"


def test_any_other_skip_is_a_failure():
    report = conftest.refuse_other_skips(skipped("Skipped: could not import 'flax'"))
    assert report.outcome == "failed"
    assert "could not import 'flax'" in report.longrepr


def test_expected_failure_is_no_skip():
    report = SimpleNamespace(skipped=True, outcome="skipped", wasxfail="", longrepr="")
    assert conftest.refuse_other_skips(report).outcome == "skipped"


def test_programs_of_a_module_are_freed():
    """Else a worker crashes after some thousand programs: it has no more maps of memory."""

    module = conftest.forget_programs.__wrapped__()
    next(module)
    double = jax.jit(lambda x: x + x)
    double(1.0)
    assert double._cache_size() == 1
    next(module, None)
    assert double._cache_size() == 0


def test_kept_programs_send_no_messages():
    """XLA loses the order of messages of a program that it reads from a file."""
    folder = Path(jax.config.jax_compilation_cache_dir)
    before = {path.name for path in folder.glob(compile_cache.ENTRIES)}
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    of_device = partial(jax.shard_map, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    x = np.arange(2.0)

    def named(name, function):
        function.__name__ = name
        return jax.jit(function)(x)

    named("adds_up", of_device(lambda x: x + jax.lax.psum(x, "x")))
    named("sends", of_device(lambda x: jax.lax.ppermute(x, "x", [(0, 1), (1, 0)])))
    named("sends_nothing", lambda x: 3 * x)
    subprocess.run(["true"], check=True)  # Before a program is started, they are gone.
    new = {path.name for path in folder.glob(compile_cache.ENTRIES)} - before
    assert not [name for name in new if "adds_up" in name or "jit_sends-" in name]
    assert [name for name in before | new if "sends_nothing" in name]


def test_process_that_only_hands_out_tests_is_known():
    """It starts the others before it imports anything that takes long."""
    options = {"numprocesses": 2, "collectonly": False}
    config = SimpleNamespace(getoption=lambda name, default=None: options[name])
    assert not conftest.runs_tests(config)
    config.workerinput = {}
    assert conftest.runs_tests(config)
    del config.workerinput
    options["numprocesses"] = None
    assert conftest.runs_tests(config)


def test_ctrl_c_reaches_the_programs_that_tests_start():
    """Even if pytest was started in the background by a shell that ignores SIGINT there."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        conftest.heed_ctrl_c()
        show = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
        shown = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert shown.stdout.strip() == "True"


def test_every_nth_row_of_a_test_is_fast():
    """Of each test by itself, in the order of its rows."""

    class Row:
        def __init__(self, nodeid, every):
            self.nodeid, self.every, self.marks = nodeid, every, []

        def get_closest_marker(self, name):
            assert name == "slow_except_every"
            return self.every and pytest.mark.slow_except_every(self.every).mark

        def add_marker(self, name):
            self.marks.append(name)

    grid = [Row(f"tests/a.py::grid[{i}]", 3) for i in range(7)]
    other = [Row(f"tests/b.py::grid[{i}]", 2) for i in range(2)]
    unmarked = Row("tests/a.py::unmarked", None)
    rows = [*grid, *other, unmarked]
    conftest.pytest_collection_modifyitems(rows)
    assert [row for row in rows if not row.marks] == [*grid[::3], other[0], unmarked]
    assert {mark for row in rows for mark in row.marks} == {"slow"}


def test_slow_tests_run_only_if_asked_for(pytestconfig):
    """By an option of every call, so that `pytest` and `pytest tests` run the same."""
    assert pytestconfig.getini("addopts")[-2:] == ["-m", "not slow"]
