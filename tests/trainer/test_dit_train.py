"""The training program with diffusion transformers: going on after a stop, and what it refuses."""

from dataclasses import replace

import numpy as np
import pytest
import tyro
from PIL import Image

import sample
import train
from configs.dit import dit_1b, dit_digits
from programs import interrupt_after
from refusals import refused
from startrail_jax.errors import InputError
from trainer.dit.config import DiTTrainConfig
from trainer.run.settings import save_config

pytestmark = pytest.mark.usefixtures("shared")

TINY = (
    "--model.width 16 --model.layers 2 --model.heads 8 --model.mlp-width 32 --batch-size 4 "
    "--validation-sequences 4 --log-every 1 --no-tensorboard --checkpoint.every 1000 --devices 8"
)


def run(folder, flags="", *, steps):
    flags = f"{TINY} --steps {steps} --run-dir {folder} {flags}"
    return train.train(tyro.cli(DiTTrainConfig, default=dit_digits(), args=flags.split()))


@pytest.mark.slow
def test_an_interrupted_run_goes_on_on_another_mesh(tmp_path, monkeypatch):
    """With its noise and the average of its weights, by which it is measured."""
    flags = "--diffusion.target v --model.layers 1"
    undisturbed = run(tmp_path / "undisturbed", flags, steps=6)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3)
        first = run(tmp_path / "run", f"{flags} --mesh.c 1 --zero 3", steps=6)
    assert len(first.train) == 3
    second = run(tmp_path / "run", flags, steps=6)
    np.testing.assert_allclose(first.train + second.train, undisturbed.train, rtol=1e-5)
    np.testing.assert_allclose(second.validation, undisturbed.validation, rtol=1e-5)


@pytest.mark.slow
def test_images_during_training_are_those_of_sample_py(tmp_path):
    """On the mesh of training, with its ZeRO; the losses are those without images."""
    plain = run(tmp_path / "plain", steps=3)
    for zero, mesh in ((2, "--mesh.c 1"), (3, "--mesh.data 2 --mesh.head 4")):
        folder = tmp_path / str(zero)
        flags = f"{mesh} --zero {zero} --sample.every 2 --sample.images 2"
        np.testing.assert_allclose(run(folder, flags, steps=3).train, plain.train, rtol=1e-5)
        assert {x.name for x in (folder / "samples").iterdir()} == {"step-2.png", "step-3.png"}
        sample.sample([str(folder), "--samples", "2"])
        drawn = (Image.open(x) for x in (folder / "samples" / "step-3.png", folder / "samples.png"))
        during, after = (np.asarray(image).astype(int) for image in drawn)
        assert np.unique(after).size > 50
        assert abs(during - after).max() <= 1


def test_average_is_neither_begun_nor_left_by_a_run_that_goes_on(tmp_path):
    config = replace(dit_digits(), run_dir=tmp_path)
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    save_config(config, tmp_path / "config.json")
    with refused(InputError, "--ema-decay"):
        run(tmp_path, "--ema-decay None --allow-changes", steps=1)


def test_dit_1b_is_of_512k_tokens():
    config = dit_1b()
    assert config.num_tokens == 2**19
    assert (config.model.layers, config.model.heads, config.model.width) == (24, 24, 1536)
