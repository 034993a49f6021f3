"""A note where the machine has a GPU that jax does not see."""

from pathlib import Path

import jax
import pytest

from configs.gpt import gpt_tiny
from trainer import session as sessions
from trainer.config import MeshConfig
from trainer.network.options import Distributed
from trainer.processes.hardware import DRIVER, PLUGINS, WINDOWS_DRIVER, unused_gpus
from trainer.session import joined
from trainer.task import SampleOptions

pytestmark = pytest.mark.quick

VERSIONS = {
    "535.104.05": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 2023\n",
    "580.65.06": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release B\n",
    "": "NVRM version: none\n",
}


def write(path, text=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def machine(root, *, gpus, driver=""):
    for number in range(gpus):
        write(root / f"dev/nvidia{number}")
    write(root / "dev/nvidiactl")
    write(root / DRIVER, VERSIONS[driver])
    return root


def note(root, platform="cpu", **options):
    return unused_gpus(platform, root=root, **({"environment": {}, "plugin": False} | options))


@pytest.mark.parametrize(
    ("driver", "extra"), [("535.104.05", "cuda12"), ("580.65.06", "cuda13"), ("", "cuda13")]
)
def test_note_names_the_line_that_installs_what_the_driver_runs(tmp_path, driver, extra):
    said = note(machine(tmp_path, gpus=8, driver=driver))
    named = f" (driver {driver})" if driver else ""
    begin, _, end = str(said).partition(": this machine")
    assert begin == "NOTE"
    assert end.startswith(f" has 8 NVIDIA GPUs{named}, but jax computes on the CPU. Install jax ")
    assert end.endswith(f" -m pip install -e '.[train,{extra}]'")
    assert f"\n{extra} = " in (Path(__file__).parents[2] / "pyproject.toml").read_text()


def test_plugin_that_finds_no_gpu_is_asked_why(tmp_path):
    said = str(note(machine(tmp_path, gpus=1), plugin=True))
    assert "has 1 NVIDIA GPU, but" in said
    assert said.endswith("""python -c 'import jax; jax.devices("cuda")' says why.""")
    assert all(name.startswith("jax_cuda") for name in PLUGINS)


def test_windows_has_no_device_files(tmp_path):
    assert note(tmp_path) is None
    write(tmp_path / WINDOWS_DRIVER)
    assert "has an NVIDIA GPU, but" in str(note(tmp_path))


@pytest.mark.parametrize(
    ("platform", "options"),
    [
        ("gpu", {}),
        ("tpu", {}),
        ("cpu", {"wanted": "cpu"}),
        ("cpu", {"environment": {"CUDA_VISIBLE_DEVICES": ""}}),
        ("cpu", {"environment": {"CUDA_VISIBLE_DEVICES": "-1"}}),
    ],
)
def test_nothing_is_said_where_all_is_as_intended(tmp_path, platform, options):
    assert note(machine(tmp_path, gpus=2), platform, **options) is None


def test_nothing_is_said_without_a_gpu(tmp_path):
    assert note(tmp_path) is None
    assert note(machine(tmp_path, gpus=0)) is None


def test_programs_say_it_first(monkeypatch):
    asked = []

    def unused(platform, *, wanted):
        asked.extend([platform, wanted])
        return "NOTE"

    monkeypatch.setattr(sessions, "unused_gpus", unused)
    options = SampleOptions(devices=2, mesh=MeshConfig())
    with joined(Distributed(), options, kind="a test", call=gpt_tiny().attention_call) as session:
        assert session.description[0] == "NOTE"
    assert asked == ["cpu", jax.config.jax_platforms]
