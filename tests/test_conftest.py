"""Guards of the tests: against those that are skipped unseen, and a process full of programs."""

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

import conftest
import parts

pytestmark = pytest.mark.quick


def skipped(reason):
    return SimpleNamespace(skipped=True, outcome="skipped", longrepr=("file.py", 1, reason))


@pytest.mark.parametrize("reason", conftest.ALLOWED_SKIPS)
def test_skip_for_missing_hardware_stays_a_skip(reason):
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


@pytest.mark.parametrize("module", parts.FIRST_OF_EVERY)
def test_parts_name_tests_that_exist(module):
    """Else a renamed test would be in the first part whole."""
    text = (Path(__file__).parent / module).read_text()
    assert [x for x in parts.FIRST_OF_EVERY[module] if f"\ndef {x}(" not in text] == []


def test_first_part_and_rest_make_all_tests(monkeypatch):
    monkeypatch.setattr(parts, "FIRST_OF_EVERY", {"a.py": {"grid": 3, "slow": 0}})
    names = [*(f"a.py::grid[{i}]" for i in range(7)), "a.py::slow", "a.py::other"]
    items = [SimpleNamespace(nodeid=f"tests/{name}") for name in names]
    first, rest = parts.of_part("first", items), parts.of_part("rest", items)
    assert first == [items[i] for i in (0, 3, 6, 8)]
    assert rest == [item for item in items if item not in first]
    assert parts.of_part("all", items) == items


@pytest.mark.parametrize(
    ("arguments", "part"),
    [([], "first"), (["tests/op"], "all"), (["-m", "gpu"], "all"), (["-k", "grid"], "all"),
     (["-m", "quick"], "first"), (["-m", "quick", "tests/op"], "all"),
     (["--part", "rest"], "rest"), (["--part", "first", "tests/op"], "first")],
)  # fmt: skip
def test_tests_that_are_asked_for_run_whole(pytestconfig, arguments, part):
    """Only a run of everything, without a word, is the first part; so is a first look at it."""
    config = pytest.Config.fromdictargs({}, ["--rootdir", str(pytestconfig.rootpath), *arguments])
    parts.settle(config)
    assert config.option.part == part
