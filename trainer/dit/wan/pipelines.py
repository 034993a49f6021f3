"""The models beside the transformer in a folder of Wan: VAE, text encoder and image encoder.

They are those of the libraries diffusers and transformers, on PyTorch; nothing else imports it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, UInt8

from startrail_jax.errors import InputError
from trainer.data.opening import read_object, reading
from trainer.dit.wan.config_json import INDEX
from trainer.errors import MissingPackageError

PIPELINES = ("WanPipeline", "WanImageToVideoPipeline")
PARTS = ("vae", "text_encoder")
"""Subfolders whose configs tell one model from another."""


class PipelineSizes(NamedTuple):
    """What the configs of VAE and text encoder say."""

    channels: int
    """Channels of a latent."""
    text_dim: int
    """Channels of an embedded token of text."""
    frames_of_latent: int
    """Frames of a video for each frame of a latent but the first, which is one frame."""
    pixels_of_latent: int
    """Height and width, in pixels, of a position of a latent."""


class TorchModels:
    """VAE and encoders, loaded from the folder of a pipeline."""

    def __init__(self, folder: Path, *, texts: bool, device: str | None = None) -> None:
        """Loads them, on a GPU if there is one; without `texts`, to encode videos alone."""
        self.sizes = pipeline_sizes(folder)
        try:
            import torch  # pyright: ignore[reportMissingImports]
            from diffusers import (  # pyright: ignore[reportMissingImports]
                DiffusionPipeline,
            )
        except ImportError as error:
            raise MissingPackageError(
                f"Videos are encoded and decoded with diffusers and PyTorch; got {error}. Run: pip "
                "install -e '.[video]'"
            ) from error
        self._torch = torch
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        absent: dict[str, Any] = {"transformer": None, "transformer_2": None}
        if not texts:
            absent |= {"text_encoder": None, "tokenizer": None, "image_encoder": None}
        try:
            pipeline: Any = DiffusionPipeline.from_pretrained(
                folder, local_files_only=True, **absent
            )
        except (OSError, ValueError) as error:
            raise InputError(
                f"--model must be a whole folder of diffusers; got {str(folder)!r}: {error}. "
                "Download it again."
            ) from error
        pipeline.set_progress_bar_config(disable=True)
        self._pipeline: Any = pipeline.to(self._device)
        self._vae: Any = pipeline.vae.eval()
        config = self._vae.config
        shape = (1, config.z_dim, 1, 1, 1)
        self._mean, self._deviation = (
            torch.tensor(x, device=self._device).view(shape)
            for x in (config.latents_mean, config.latents_std)
        )

    def text(self, caption: str, *, most: int) -> Float32[np.ndarray, "S D"]:
        """A caption as the text encoder gives it, without padding."""
        with self._torch.no_grad():
            found, _ = self._pipeline.encode_prompt(
                caption, do_classifier_free_guidance=False, max_sequence_length=most + 1
            )
        text = found[0].float().cpu().numpy()
        # The pipeline fills up with zeros.
        count = int(np.flatnonzero(text.any(axis=1)).max(initial=-1)) + 1
        if count > most:
            raise InputError(
                f"A caption must have at most {most} tokens; got {caption[:40]!r}... with more. "
                "Shorten it."
            )
        return text[:count]

    def video(self, frames: UInt8[np.ndarray, "N H W 3"]) -> dict[str, Float32[np.ndarray, "..."]]:
        """What a model takes of a video of 1 + 4 n frames with pixels from 0 to 255: `latent`, and
        what its kind of pipeline begins with."""
        pipeline = self._pipeline
        pixels = self._torch.tensor(frames, device=self._device, dtype=self._vae.dtype)
        pixels = (pixels / 127.5 - 1).permute(3, 0, 1, 2)[None]
        found = {"latent": self._encoded(pixels)}
        if type(pipeline).__name__ == "WanImageToVideoPipeline":
            if not pipeline.config.expand_timesteps:
                # Grey frames follow the first one.
                pixels[:, :, 1:] = 0
                found["given"] = self._encoded(pixels)
            if getattr(pipeline, "image_encoder", None) is not None:
                from PIL import Image

                with self._torch.no_grad():
                    image = pipeline.encode_image(Image.fromarray(frames[0]), self._device)
                found["image"] = image[0].float().cpu().numpy()
        return found

    def _encoded(self, pixels: Any) -> Float32[np.ndarray, "F H W C"]:
        with self._torch.no_grad():
            latent = self._vae.encode(pixels).latent_dist.mode()
        latent = (latent - self._mean) / self._deviation
        return latent[0].permute(1, 2, 3, 0).float().cpu().numpy()

    def decoded(self, latent: Float32[np.ndarray, "F H W C"]) -> UInt8[np.ndarray, "N H W 3"]:
        """The frames of a latent."""
        x = self._torch.tensor(np.moveaxis(latent, -1, 0)[None], device=self._device)
        x = (x * self._deviation + self._mean).to(self._vae.dtype)
        with self._torch.no_grad():
            pixels = self._vae.decode(x, return_dict=False)[0][0].permute(1, 2, 3, 0).float()
        scaled = (pixels.clamp(-1, 1) + 1) * 127.5
        return scaled.round().cpu().numpy().astype(np.uint8)


def check_pipeline(folder: Path) -> None:
    """Raises ValueError unless a folder holds a pipeline of Wan."""
    path = folder / INDEX
    kind = read_object(path).get("_class_name") if path.is_file() else None
    if kind not in PIPELINES:
        got = f" with {kind or 'none'}" if folder.is_dir() else ", no such folder"
        raise InputError(
            f"The folder of a model must hold {INDEX} of {' or '.join(PIPELINES)}, and the "
            f"subfolders {', '.join(PARTS)} and tokenizer; got {str(folder)!r}{got}. Download a "
            "model whose name ends in -Diffusers as a whole, and give its folder."
        )


def pipeline_sizes(folder: Path) -> PipelineSizes:
    """The sizes of the models of a pipeline, which are not loaded."""
    check_pipeline(folder)
    vae, text_encoder = (read_object(folder / part / "config.json") for part in PARTS)
    # What a config does not say are the defaults of diffusers and transformers.
    return PipelineSizes(
        channels=vae.get("z_dim", 16),
        text_dim=text_encoder.get("d_model", 512),
        frames_of_latent=vae.get("scale_factor_temporal", 4),
        pixels_of_latent=vae.get("scale_factor_spatial", 8),
    )


def digest_of(folder: Path) -> str:
    """A hash of the configs of VAE and text encoder and of the kind of pipeline, on which depends
    what is made of a video."""
    index = read_object(folder / INDEX)
    kind = [index.get(x) for x in ("_class_name", "image_encoder", "expand_timesteps")]
    with reading(folder):
        content = b"".join((folder / part / "config.json").read_bytes() for part in PARTS)
    return hashlib.sha256(content + json.dumps(kind).encode()).hexdigest()[:16]
