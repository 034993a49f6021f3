"""From a folder of images to drawn images: every command, with a tiny random VAE of diffusers.

pip install -e '.[video,images]'
python tests/parity/check_images.py     # 5 minutes; ends with an error if something differs
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from diffusers.image_processor import VaeImageProcessor
from PIL import Image, ImageOps

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

from trainer.dit.encoded_images import ImageLine, read_images  # noqa: E402

COLOURS = {"ant": (220, 30, 30), "bee": (30, 30, 220), "cat": (20, 20, 20), "é 10": (90, 200, 90)}
SIZES = ((48, 48), (40, 64), (72, 48))
"""Heights and widths of files."""
STATISTICS = {
    "scale": dict(scaling_factor=0.4),
    "shift": dict(scaling_factor=0.4, shift_factor=0.15),
    "mean": dict(scaling_factor=0.5, latents_mean=[0.1, -0.2, 0.3, 0.0],
                 latents_std=[0.5, 1.5, 2.0, 1.0]),
}  # fmt: skip
TINY = "--model.width 16 --model.layers 2 --model.heads 2 --model.mlp-width 32 --batch-size 4 "
TINY += "--model.dtype float32 --steps 30 --validation-sequences 4 --log-every 10 --zero 0 "
TINY += "--no-tensorboard --devices 4 --checkpoint.every 1000 --mesh.data 2"


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_images(folder / "images")
        for kind, statistics in STATISTICS.items():
            check(folder / kind, folder / "images", statistics)
        check_pixels(folder)
    print("all equal")


def make_images(folder):
    """Forty images of three sizes in four classes."""
    rng = np.random.default_rng(0)
    for number in range(40):
        name, rgb = list(COLOURS.items())[number % 4]
        height, width = SIZES[number % 3]
        pixels = np.full((height, width, 3), rgb, np.uint8)
        pixels[8:24, 8:24] = rng.integers(256, size=3)
        (folder / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / name / f"{number}.png")


def make_vae(folder, statistics):
    torch.manual_seed(0)
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 8, 8),
        norm_num_groups=4,
        **statistics,
    )
    vae.save_pretrained(folder)
    return vae.eval()


def expected(vae, path, height, width):
    """The latent of an image, as pipelines of diffusers prepare it."""
    image = ImageOps.fit(Image.open(path).convert("RGB"), (width, height), Image.Resampling.BICUBIC)
    with torch.no_grad():
        found = vae.encode(VaeImageProcessor().preprocess(image)).latent_dist.mode()
    config = vae.config
    if config.latents_mean is not None:
        mean, std = (
            torch.tensor(x).view(1, -1, 1, 1) for x in (config.latents_mean, config.latents_std)
        )
        found = (found - mean) * config.scaling_factor / std
    else:
        found = (found - (config.shift_factor or 0)) * config.scaling_factor
    return found[0].permute(1, 2, 0).numpy()


def check(folder, images, statistics):
    vae = make_vae(folder / "vae", statistics)
    out = folder / "encoded"
    encode = ["-m", "trainer.dit.encode", images, out, "--vae", folder / "vae", "--size", "48"]
    run(*encode, "--max-ratio", "2")
    lines = read_images(out)
    assert len(lines) == 40, len(lines)
    sizes = {line.size for line in lines.values()}
    assert sizes == {(1, 12, 12), (1, 10, 14), (1, 14, 10)}, sizes
    assert "40 images are as they were" in run(*encode, "--max-ratio", "2")
    worst = max(difference(vae, out, images, line) for line in lines.values())
    print(f"{folder.name}: latents differ from diffusers' by {worst:.2e} at most")
    assert worst < 1e-5, worst
    shown = run(
        "train.py", "dit_1b", "--data.path", out, "--run-dir", folder / "run", *TINY.split()
    )
    for size in ("1x12x12", "1x10x14", "1x14x10"):
        assert f"of {size}" in shown, shown
    print("\n".join(x for x in shown.splitlines() if "loss" in x and "step" in x))
    draw = ["sample.py", folder / "run", "--samples", "2", "--steps", "3"]
    shown = run(*draw, "--decode", folder / "vae", "--classes", "é 10", "0")
    assert "row: class 3, 'é 10'" in shown, shown
    drawn = np.asarray(Image.open(folder / "run" / "samples.png"))
    scale = 2  # To at least 64 pixels.
    assert drawn.shape == (2 * 49 * scale + scale, 2 * 49 * scale + scale, 3), drawn.shape
    run(*draw, "--size", "1x10x14", "--classes", "3", "0")
    with np.load(folder / "run" / "samples.npz") as file:
        assert file["latents"].shape == (4, 1, 10, 14, 4), file["latents"].shape
    # What is drawn is decoded as diffusers' pipelines do.
    run(*draw, "--classes", "3", "0")
    with np.load(folder / "run" / "samples-2.npz") as file:
        check_decoded(vae, file["latents"][0, 0], drawn[::scale, ::scale][1:49, 1:49])


def difference(vae, out, images, line: ImageLine):
    from safetensors.numpy import load_file

    found = load_file(out / "images" / line.file)["images"][line.row]
    wanted = expected(vae, images / line.image, *(4 * n for n in line.size[1:]))
    return float(np.abs(found - wanted).max())


def check_decoded(vae, latent, pixels):
    config, x = vae.config, torch.tensor(latent).permute(2, 0, 1)[None]
    if config.latents_mean is not None:
        mean, std = (
            torch.tensor(x).view(1, -1, 1, 1) for x in (config.latents_mean, config.latents_std)
        )
        x = x * std / config.scaling_factor + mean
    else:
        x = x / config.scaling_factor + (config.shift_factor or 0)
    with torch.no_grad():
        decoded = vae.decode(x, return_dict=False)[0]
    (image,) = VaeImageProcessor().postprocess(decoded, output_type="pil")
    apart = np.abs(np.asarray(image).astype(int) - pixels).max()
    assert apart <= 1, apart


def check_pixels(folder):
    out = folder / "pixels"
    run("-m", "trainer.dit.encode", folder / "images", out, "--pixels", "--size", "16")
    run("train.py", "dit_1b", "--data.path", out, "--run-dir", folder / "of_pixels", *TINY.split())
    run("sample.py", folder / "of_pixels", "--samples", "2", "--steps", "3")
    drawn = np.asarray(Image.open(folder / "of_pixels" / "samples.png"))
    assert drawn.shape == (4 * (4 * 17 + 1), 4 * (2 * 17 + 1), 3), drawn.shape


def run(*arguments):
    command = [sys.executable, *(str(x) for x in arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    shown = done.stdout + done.stderr
    assert not done.returncode, f"{' '.join(command)}\n{shown}"
    return shown


if __name__ == "__main__":
    main()
