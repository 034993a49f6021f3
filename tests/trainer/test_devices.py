"""The devices of one process and of several."""

from types import SimpleNamespace

import jax
import pytest

from refusals import refused
from startrail_jax.errors import InputError
from trainer.processes.devices import select_devices

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
