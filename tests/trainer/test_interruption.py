"""Signals become a flag, and afterwards the earlier handlers are restored."""

import os
import signal
from dataclasses import replace

import pytest

import train
from configs.gpt import gpt_tiny
from models.config import GPTConfig
from trainer.gpt import sample as sampling
from trainer.gpt.config import TextSampleConfig
from trainer.run.interruption import SIGNALS, interruption


@pytest.fixture
def own_handler():
    """A handler that notes signals; pytest itself may have changed the default."""
    seen = []
    before = {number: signal.signal(number, lambda n, _: seen.append(n)) for number in SIGNALS}
    yield seen
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_sets_the_flag_and_handlers_come_back(own_handler, number):
    with interruption() as interrupted:
        assert not interrupted(1)
        os.kill(os.getpid(), number)
        assert interrupted(1)
        os.kill(os.getpid(), signal.SIGTERM)  # A second signal changes nothing.
        assert interrupted(1)
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


@pytest.mark.slow
def test_signal_during_the_final_sample_ends_a_whole_run(own_handler, tmp_path, monkeypatch):
    """The run is saved before its sample, so the program has succeeded."""

    def sample(self, weights, step, interrupted):
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupted()
        return ()

    monkeypatch.setattr(sampling.Continuation, "__call__", sample)
    model = GPTConfig(width=16, layers=1, heads=2, kv_heads=1, head_dim=4, mlp_width=16)
    config = replace(gpt_tiny(), model=model, devices=1, seq_len=16, batch_size=1, steps=1,
                     validation_sequences=1, sample=TextSampleConfig(length=4), tensorboard=False,
                     run_dir=tmp_path)  # fmt: skip
    losses = train.train(config)
    assert len(losses.train) == 1
    assert losses.validation is not None
    assert own_handler == []
