"""The devices of one process and of several."""

from types import SimpleNamespace

import jax
import pytest

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
    with pytest.raises(ValueError, match=r"devices=3, processes=2\. Use --devices 4"):
        select_devices(3)
    fake_devices(monkeypatch, 2, 3, 2)
    with pytest.raises(
        ValueError, match=r"must see the same number of .* got 2 and 3 and 2 in .* 2\."
    ):
        select_devices(3)
    # Before the processes meet.
    monkeypatch.setattr(jax, "devices", None)
    with pytest.raises(ValueError, match=r"devices=3, processes=2\. Use --devices 4"):
        select_devices(3, processes=2)
