"""Settings of a run of a Wan, and of drawing videos from it. Imports no jax: `--help` is fast."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from models.checks import check_minimum, check_range
from models.parts.dit import wan_weights
from models.weights import projections
from startrail_jax.errors import InputError
from trainer.config import LoraConfig
from trainer.dit.config import DenoiserConfig, DenoiserTrainConfig, check_data_sizes
from trainer.places import check_on_disk
from trainer.task import SampleOptions

MASK_CHANNELS = 4
"""Frames of a video for each frame of a latent, each of which is given or not."""


@dataclass(frozen=True, kw_only=True)
class WanConfig(DenoiserConfig):
    """Sizes of the model. The defaults are those of Wan 2.1, text to video."""

    channels: int = 16
    """Number of channels of a latent."""
    text_dim: int = 4096
    """Number of channels of an embedded token of text."""
    text_tokens: int = 512
    """Number of tokens to which texts are filled up with zeros."""
    time_channels: int = 256
    """Number of sines and cosines in which a time is coded."""
    first_frame: Literal["none", "channels", "time"] = "none"
    """How the model is given the first frame of a video: not at all ("none"); as latents and a mask
    in more channels ("channels", image to video of Wan 2.1 and 2.2); or as tokens of time 0
    ("time", the 5B model of Wan 2.2)."""
    image_dim: int | None = None
    """Number of channels of an embedded token of the first frame (image to video of Wan 2.1). By
    default there are no such tokens."""
    text_norm: bool = True
    """Whether what attends to the text is normalised."""
    norm_eps: float = 1e-6
    """What norms add to the variance or the mean square."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("text_dim", "text_tokens", "time_channels", "image_dim"):
            check_minimum(f"model.{name}", getattr(self, name), 1)
        if self.image_dim is not None and self.first_frame != "channels":
            raise InputError(
                "model.image_dim is for models with model.first_frame='channels'; got "
                f"image_dim={self.image_dim}, first_frame={self.first_frame!r}. Change one of them."
            )

    @property
    def given_channels(self) -> int:
        """Channels beside the noisy latent: a mask, and the latent of what is given."""
        return MASK_CHANNELS + self.channels if self.first_frame == "channels" else 0


@dataclass(frozen=True, kw_only=True)
class FlowConfig:
    """The times at which the model is trained, from 0, a video, to 1, noise."""

    times: Literal["uniform", "logit_normal"] = "uniform"
    """Distribution of the times before the shift; "logit_normal" prefers the middle
    (https://arxiv.org/abs/2403.03206)."""
    shift: float = 1.0
    """Moves times towards noise: t becomes shift * t / (1 + (shift - 1) * t). Wan is used with 3
    for 480 lines and 5 for 720."""
    range: tuple[float, float] = (0.0, 1.0)
    """The least and the largest time after the shift. Each of the two models of Wan 2.2 has a range
    of its own, which `init_from` finds: 0.875 to 1 and 0 to 0.875, or split at 0.9."""
    dropout: float = 0.1
    """Fraction of the examples that are shown with an empty caption, so that videos can be drawn
    with guidance."""

    def __post_init__(self) -> None:
        way_out = "Use 0.1, or 0 where captions are never empty."
        check_range("diffusion.dropout", self.dropout, "at least 0 and below 1", way_out)
        way_out = "Use 1 for none, 3 for 480 lines, 5 for 720."
        check_range("diffusion.shift", self.shift, "above 0 and finite", way_out)
        low, high = self.range
        if not 0 <= low < high <= 1:
            raise InputError(
                "diffusion.range must be two rising numbers from 0 to 1; got "
                f"range={low} {high}. Leave it out for all times."
            )


@dataclass(frozen=True, kw_only=True)
class ClipConfig:
    """Videos to train on."""

    path: Path | None = None
    """A folder that `python -m trainer.dit.encode` has written. The default is videos of moving
    digits, which are made on the fly."""
    validation_fraction: float = 0.1
    """Fraction of the examples that is held out."""
    sizes: tuple[str, ...] = ()
    """More sizes of latents beside `size`, as FRAMESxHEIGHTxWIDTH, such as 21x60x104; `size` must
    be the largest. A batch holds videos of one size. The default, with `path`, is the sizes that
    the folder holds."""

    def __post_init__(self) -> None:
        check_on_disk("data.path", self.path)
        fraction = self.validation_fraction
        check_range("data.validation_fraction", fraction, "above 0 and below 1", "Use 0.1.")
        check_data_sizes(self.sizes, self.path, "videos")


@dataclass(frozen=True, kw_only=True)
class WanTrainConfig(DenoiserTrainConfig):
    """A training run of a Wan."""

    kind: ClassVar[str] = "wan"

    model: WanConfig
    """Sizes of the model."""
    diffusion: FlowConfig = field(default_factory=FlowConfig)
    """Times and captions."""
    data: ClipConfig = field(default_factory=ClipConfig)
    """Data to train on."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Low-rank adapters, of self-attention, of attention to the text, and of the MLP."""

    init_from: Path | None = None
    """A folder of a pretrained Wan in the format of diffusers, or its subfolder `transformer`. Its
    config.json defines the model; flags --model.* change it."""
    size: tuple[int, int, int]
    """Frames, height and width of a latent. 81 frames of 480 x 832 pixels are 21 60 104 for Wan 2.1
    and 2.2, and 21 30 52 for the 5B model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_on_disk("init_from", self.init_from)
        weights = wan_weights(image=False, text_norm=self.model.text_norm)
        self.lora.check_targets(projections(weights))

    @property
    def is_of_digits(self) -> bool:
        """Whether videos are moving digits, of pixels; others are latents."""
        return self.data.path is None and self.model.channels == 1

    @property
    def has_adapters(self) -> bool:
        return self.lora.rank is not None


@dataclass(frozen=True, kw_only=True)
class VideoOptions(SampleOptions):
    """What sample.py draws from a run of a Wan."""

    prompt: tuple[str, ...] | None = None
    """Captions, one row of the contact sheet for each: of moving digits, such as "seven left", or
    with `decode` any. The default is one of the held-out captions."""
    prompt_embeddings: tuple[Path, ...] = ()
    """Files *.safetensors with an embedded caption as `text` [S D], such as those of encoded
    videos. Models that begin with a frame take `given` and `image` from them too."""
    image: Path | None = None
    """The first frame of the videos, for a model that begins with one; `decode` must be given."""
    decode: Path | None = None
    """Folder of the model in the format of diffusers: its VAE makes mp4 files, and its text encoder
    embeds `prompt`. Needs the extra video."""
    decode_device: str = "cpu"
    """Device of PyTorch for that. "cuda" needs memory that jax has left:
    XLA_PYTHON_CLIENT_MEM_FRACTION=0.6."""
    rate: int = 16
    """Frames in a second of mp4 files."""
    size: str | None = None
    """Size to draw, as FRAMESxHEIGHTxWIDTH, of those that the run trains on, or any one of a model
    that was imported. The default is the largest."""
    samples: int = 1
    """Number of videos for each caption."""
    sampler: Literal["unipc", "euler"] = "unipc"
    """Method that turns noise into a video: UniPC (https://arxiv.org/abs/2302.04867) of order 2, as
    in Wan, or Euler's."""
    steps: int = 50
    """Number of steps of the sampler."""
    shift: float | None = None
    """Moves the times of the steps towards noise. The default is `diffusion.shift` of the run."""
    guidance: float | None = None
    """Strength of classifier-free guidance. The default is 5, as in Wan, 2 for moving digits, or 1
    for a new model with `diffusion.dropout` 0."""
    other_run: Path | None = None
    """Run of the other model of Wan 2.2 A14B: each predicts at the times of its
    `diffusion.range`. Both are in memory. The run itself predicts at all times."""
    other_guidance: float | None = None
    """Strength of guidance of the other model. The default is `guidance`."""
    batch_size: int = 1
    """Number of videos that are drawn at a time; fewer need less memory."""
    seed: int = 0
    """Seed of the noise; the videos do not depend on the mesh."""
    out: Path | None = None
    """What to write, which must not exist: *.npz for latents, *.png for a contact sheet of digits,
    or with `decode` a folder for mp4 files and a contact sheet. The default is `samples` in the
    folder of the run, with what it ends in, or samples-2 and so on where there are others."""

    def __post_init__(self) -> None:
        for name in ("samples", "steps", "batch_size", "rate"):
            check_minimum(name, getattr(self, name), 1)
        check_on_disk("image", self.image)
        check_on_disk("decode", self.decode)
        if self.image is not None and self.decode is None:
            raise InputError(
                f"--image is encoded by the VAE of a folder; got {str(self.image)!r} without "
                "--decode. Add --decode FOLDER."
            )
        if self.other_guidance is not None and self.other_run is None:
            raise InputError(
                f"--other-guidance is that of a second model; got {self.other_guidance} without "
                "--other-run. Leave it out."
            )
        if self.prompt_embeddings and (self.prompt or self.image):
            raise InputError(
                "--prompt-embeddings hold captions and first frames; got --prompt or --image too. "
                "Leave one of them out."
            )
