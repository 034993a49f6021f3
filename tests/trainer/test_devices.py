"""The devices of one process and of several."""

from types import SimpleNamespace

import jax
import pytest

from refusals import refused
from startrail_jax.errors import InputError
from trainer import session as sessions
from trainer.config import Distributed
from trainer.processes import select_devices, unused_gpus
from trainer.session import joined

pytestmark = pytest.mark.quick


def fake_devices(monkeypatch, *counts):
    devices = [
        SimpleNamespace(process_index=process, platform="gpu", id=(process, number))
        for process, count in enumerate(counts)
        for number in range(count)
    ]
    monkeypatch.setattr(jax, "devices", lambda: devices)


def test_select_devices_takes_as_many_of_each_process(monkeypatch):
    fake_devices(monkeypatch, 4, 4)
    assert [x.id for x in select_devices(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len(select_devices(None)) == 8
    with refused(InputError, processes=2):
        select_devices(3)
    fake_devices(monkeypatch, 2, 3, 2)
    with refused(InputError, "got 2"):
        select_devices(3)
    # Before the processes meet.
    monkeypatch.setattr(jax, "devices", None)
    with refused(InputError, processes=2):
        select_devices(3, processes=2)


def test_gpus_that_jax_does_not_use_are_noted(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert unused_gpus("cpu", None, tmp_path) is None
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    said = str(unused_gpus("cpu", None, tmp_path))
    assert said.startswith("NOTE: this machine has 2 NVIDIA GPUs, but jax computes on the CPU.")
    assert "pip install -e '.[train,cuda13]'" in said
    assert unused_gpus("gpu", None, tmp_path) is None
    assert unused_gpus("cpu", "cpu", tmp_path) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert unused_gpus("cpu", None, tmp_path) is None


def test_programs_say_which_gpus_they_do_not_use_first(monkeypatch):
    monkeypatch.setattr(sessions, "unused_gpus", lambda platform, wanted: f"NOTE {platform}")
    with joined(Distributed(), 2) as session:
        assert session.description[0] == "NOTE cpu"
