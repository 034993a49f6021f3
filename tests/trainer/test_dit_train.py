"""The training program with diffusion transformers: going on after a stop, and what it refuses."""

from dataclasses import replace

import numpy as np
import pytest
import tyro
from PIL import Image

import train
from configs.dit import dit_1b, dit_digits
from programs import interrupt_after, shared_programs
from refusals import refused
from startrail_jax.errors import InputError
from trainer.dit.config import DiTTrainConfig, ImageConfig
from trainer.run.settings import save_config

TINY = (
    "--model.width 16 --model.layers 2 --model.heads 8 --model.mlp-width 32 --batch-size 4 "
    "--validation-sequences 4 --log-every 1 --no-tensorboard --checkpoint.every 1000 --devices 8"
)


def run(folder, flags="", *, steps):
    flags = f"{TINY} --steps {steps} --run-dir {folder} {flags}"
    return train.train(tyro.cli(DiTTrainConfig, default=dit_digits(), args=flags.split()))


@pytest.fixture(autouse=True, scope="module")
def shared():
    with shared_programs():
        yield


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


def test_average_is_neither_begun_nor_left_by_a_run_that_goes_on(tmp_path):
    config = replace(dit_digits(), run_dir=tmp_path)
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    save_config(config, tmp_path / "config.json")
    with refused(InputError, "--ema-decay"):
        run(tmp_path, "--ema-decay None --allow-changes", steps=1)


def images(folder, count=12):
    for number in range(count):
        path = folder / "images" / f"{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(number)
        Image.fromarray(rng.integers(256, size=(8, 8), dtype=np.uint8)).save(path)
    return f"--data.path {folder / 'images'} --model.classes 2"


@pytest.mark.slow
def test_damaged_image_costs_no_step_and_the_run_goes_on_when_it_is_restored(tmp_path):
    """Its pixels are met in step 3, and step 2 is saved."""
    data = f"{images(tmp_path)} --devices 1 --mesh.c 1 --model.layers 1"
    whole = run(tmp_path / "whole", data, steps=5)
    bad = tmp_path / "images" / "1" / "9.png"
    content = bad.read_bytes()
    bad.write_bytes(content[:-30])
    with refused(InputError, "9.png' must be a whole image"):
        run(tmp_path / "run", data, steps=5)
    assert [x.name for x in (tmp_path / "run" / "checkpoints").iterdir()] == ["2"]
    bad.write_bytes(content)
    after = run(tmp_path / "run", data, steps=5)
    assert after.train == whole.train[2:]
    assert after.validation == whole.validation


def images_of_sizes(folder):
    """Images of three proportions, in two classes; of one there is less than a batch."""
    shapes = [(8, 8)] * 7 + [(12, 6)] * 9 + [(5, 10)] * 3
    for number, shape in enumerate(shapes):
        path = folder / "images" / f"{number % 2}" / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(number)
        Image.fromarray(rng.integers(256, size=shape, dtype=np.uint8)).save(path)
    return (
        f"--data.path {folder / 'images'} --model.classes 2 --model.layers 1 "
        "--data.sizes 8x4 4x8 --data.resize crop"
    )


@pytest.mark.slow
def test_a_run_on_images_of_several_sizes_goes_on_bit_for_bit_and_on_another_mesh(
    tmp_path, monkeypatch, capsys
):
    flags = images_of_sizes(tmp_path)
    whole = run(tmp_path / "whole", flags, steps=8)
    shown = capsys.readouterr().out
    assert "of 8x8 (16 tokens)" in shown
    assert "of 8x4 (8 tokens)" in shown
    for name, later, same in (("same", "", True), ("other", "--devices 1 --mesh.c 1", False)):
        with monkeypatch.context() as patch:
            interrupt_after(patch, 3)
            first = run(tmp_path / name, flags, steps=8)
        second = run(tmp_path / name, f"{flags} {later}", steps=8)
        losses, validation = first.train + second.train, second.validation
        if same:
            assert (losses, validation) == (whole.train, whole.validation)
        else:
            np.testing.assert_allclose(losses, whole.train, rtol=1e-5)
            np.testing.assert_allclose(validation, whole.validation, rtol=1e-5)


def test_run_does_not_go_on_with_other_sizes(tmp_path):
    flags = images_of_sizes(tmp_path)
    data = ImageConfig(path=tmp_path / "images", sizes=("8x4", "4x8"), resize="crop")
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    save_config(replace(dit_digits(), data=data, run_dir=tmp_path), tmp_path / "config.json")
    with refused(InputError, "--data.sizes 8x4 4x8"):
        run(tmp_path, flags.replace("8x4 4x8", "4x8"), steps=1)


def test_dit_1b_is_of_512k_tokens():
    config = dit_1b()
    assert config.num_tokens == 2**19
    assert (config.model.layers, config.model.heads, config.model.width) == (24, 24, 1536)
