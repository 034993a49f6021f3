"""Guards of the tests: against those that are skipped unseen, and a process full of programs."""

import signal
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

import conftest

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
