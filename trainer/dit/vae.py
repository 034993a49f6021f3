"""The VAE of images: an `AutoencoderKL` of the library diffusers, on PyTorch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, UInt8

from startrail_jax.errors import InputError
from trainer.data.opening import read_object, reading
from trainer.errors import MissingPackageError
from trainer.sums import sha256_of

KIND = "AutoencoderKL"
PIXELS_AT_A_TIME = 2**20
"""Pixels that a GPU encodes at a time, unless an image has more."""


class VaeSizes(NamedTuple):
    """What the config of a VAE says."""

    channels: int
    """Channels of a latent."""
    pixels_of_latent: int
    """Height and width, in pixels, of a position of a latent."""
    mean: tuple[float, ...]
    """What is subtracted from each channel of a latent, which is then divided by `deviation`."""
    deviation: tuple[float, ...]


def vae_sizes(folder: Path, option: str) -> VaeSizes:
    """The sizes of a VAE, which is not loaded.

    Raises:
        ValueError: if the folder holds none, or another kind.
    """
    path = folder / "config.json"
    values = read_object(path) if path.is_file() else {}
    kind = values.get("_class_name")
    if kind != KIND:
        got = f"one of {kind}" if kind else "none"
        way_out = "Give the folder of another VAE."
        if (folder / "vae" / "config.json").is_file():
            way_out = f"Give {str(folder / 'vae')!r}."
        raise InputError(
            f"{option} must be a folder of diffusers with the config.json of an {KIND}; got "
            f"{got} in {str(folder)!r}. {way_out}"
        )
    # What a config does not say are the defaults of diffusers.
    channels, colours = values.get("latent_channels", 4), values.get("in_channels", 3)
    scale, shift = values.get("scaling_factor", 0.18215), values.get("shift_factor")
    mean, deviation = values.get("latents_mean"), values.get("latents_std")
    if colours != 3 or not scale or (mean is None) != (deviation is None) or (mean and shift):
        raise InputError(
            f"{option} must be a VAE of RGB images, whose latents have a scaling_factor, and a "
            "shift_factor or latents_mean with latents_std; got in_channels="
            f"{colours}, scaling_factor={scale}, shift_factor={shift}, latents_mean={mean} in "
            f"{str(path)!r}. Give another."
        )
    mean = mean or [shift or 0.0] * channels
    deviation = [x / scale for x in deviation or [1.0] * channels]
    blocks = values.get("block_out_channels", (64,))
    return VaeSizes(channels, 2 ** (len(blocks) - 1), tuple(mean), tuple(deviation))


def digest_of_vae(folder: Path) -> str:
    """A hash of the config and the weights of a VAE."""
    with reading(folder):
        files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
        content = [sha256_of(file) for file in files]
    return hashlib.sha256("".join(content).encode()).hexdigest()[:16]


def require_weights(info: dict[str, Any], rule: str, folder: Path) -> None:
    """Raises ValueError if a library found too few weights in a folder: it leaves them random.
    `info` is its `output_loading_info`."""
    if missing := [*info["missing_keys"], *info["mismatched_keys"]]:
        raise InputError(
            f"{rule}; got {len(missing)} too few in {str(folder)!r}, such as {missing[0]!r}. "
            "Download it again."
        )


class ImageVae:
    """A VAE, loaded in float32."""

    def __init__(self, folder: Path, *, option: str, device: str | None = None) -> None:
        """Loads it, on a GPU if there is one."""
        sizes = vae_sizes(folder, option)
        try:
            import torch  # pyright: ignore[reportMissingImports]
            from diffusers import (  # pyright: ignore[reportMissingImports]
                AutoencoderKL,
            )
        except ImportError as error:
            raise MissingPackageError(
                f"Images are encoded and decoded with diffusers and PyTorch; got {error}. Run: pip "
                "install -e '.[video]'"
            ) from error
        try:
            model, found = AutoencoderKL.from_pretrained(
                folder,
                local_files_only=True,
                use_safetensors=True,
                torch_dtype=torch.float32,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise InputError(
                f"{option} must be a whole folder of an {KIND}, with safetensors; got "
                f"{str(folder)!r}: {error}. Download it again."
            ) from error
        require_weights(found, f"{option} must hold all weights of its {KIND}", folder)
        self._torch = torch
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._vae: Any = model.to(self._device).eval()
        self._mean, self._deviation = (
            torch.tensor(x, device=self._device).view(1, -1, 1, 1)
            for x in (sizes.mean, sizes.deviation)
        )

    def encode(self, images: UInt8[np.ndarray, "N H W 3"]) -> Float32[np.ndarray, "N h w C"]:
        """The latents of images with pixels from 0 to 255: the mean of the distribution of each,
        normalised."""
        _, height, width, _ = images.shape
        # A CPU gains nothing by several at a time, which would round otherwise.
        step = max(PIXELS_AT_A_TIME // (height * width), 1) if self._device != "cpu" else 1
        found = []
        for first in range(0, len(images), step):
            part = self._torch.tensor(images[first : first + step], device=self._device)
            pixels = (part.float() / 127.5 - 1).permute(0, 3, 1, 2)
            with self._torch.no_grad():
                latents = self._vae.encode(pixels).latent_dist.mode()
            latents = (latents - self._mean) / self._deviation
            found.append(latents.permute(0, 2, 3, 1).cpu().numpy())
        return np.concatenate(found)

    def decode(
        self, latents: Sequence[Float32[np.ndarray, "h w C"]]
    ) -> list[UInt8[np.ndarray, "H W 3"]]:
        """The images of latents, one at a time."""
        found = []
        for latent in latents:
            x = self._torch.tensor(latent, device=self._device).permute(2, 0, 1)[None]
            with self._torch.no_grad():
                pixels = self._vae.decode(x * self._deviation + self._mean, return_dict=False)[0]
            scaled = (pixels[0].permute(1, 2, 0).clamp(-1, 1) + 1) * 127.5
            found.append(scaled.round().cpu().numpy().astype(np.uint8))
        return found
