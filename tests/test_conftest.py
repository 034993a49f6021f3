"""The guard against tests that are skipped unseen."""

from types import SimpleNamespace

import pytest

import conftest


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
