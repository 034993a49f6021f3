"""Signals become a flag, and the handlers come back."""

import os
import signal

import pytest

from startrail_jax.training.interruption import SIGNALS, interruption


@pytest.fixture
def own_handler():
    """Another handler than the default, which pytest may have changed itself."""
    seen = []
    before = {number: signal.signal(number, lambda n, _: seen.append(n)) for number in SIGNALS}
    yield seen
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_sets_the_flag_and_handlers_come_back(own_handler, number):
    with interruption() as interrupted:
        assert not interrupted()
        os.kill(os.getpid(), number)
        assert interrupted()
        os.kill(os.getpid(), signal.SIGTERM)  # A second one changes nothing.
        assert interrupted()
    assert own_handler == []
    os.kill(os.getpid(), number)
    assert own_handler == [number]


@pytest.mark.parametrize("first", SIGNALS)
def test_second_signal_from_the_keyboard_interrupts_at_once(own_handler, first):
    def insist():
        with interruption():
            os.kill(os.getpid(), first)
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("not reached")

    with pytest.raises(KeyboardInterrupt):
        insist()
    os.kill(os.getpid(), signal.SIGINT)
    assert own_handler == [signal.SIGINT]
