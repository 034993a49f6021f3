"""Settings of a run of a diffusion transformer, and of drawing from it.

Imports no jax: `--help` must be fast.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from models.checks import check_minimum, check_range
from models.sizes import check_dit_width
from startrail_jax.errors import InputError
from trainer.config import SampleConfig, TrainConfig
from trainer.places import check_on_disk
from trainer.task import SampleOptions

Flag = Callable[[str], str | None]


def read_size(size: str, name: str = "data.sizes") -> tuple[int, int, int]:
    """Frames, height and width of 21x60x104."""
    if not re.fullmatch("[1-9][0-9]{0,5}(x[1-9][0-9]{0,5}){2}", size):
        raise InputError(
            f"{name} must be FRAMESxHEIGHTxWIDTH, three numbers from 1 to 999999; got {size!r}. "
            "Write them as 21x60x104."
        )
    frames, height, width = map(int, size.split("x"))
    return frames, height, width


def name_of(size: tuple[int, int, int]) -> str:
    """21x60x104."""
    return "x".join(map(str, size))


def with_sizes(config: Any, folder: Path, sizes: Sequence[tuple[int, int, int]], flag: Flag) -> Any:
    """A config with the sizes of a folder of data, the largest first, unless a flag gives others.
    `flag` as in `Task.before_flags`."""
    if not sizes or flag("--size") is not None:
        return config
    data = replace(config.data, path=folder, sizes=tuple(map(name_of, sizes[1:])))
    # A flag sets another patch later.
    patch = (1, 1, 1) if flag("--model.patch") else config.model.patch
    model = replace(config.model, patch=patch)
    return replace(config, model=model, size=sizes[0], data=data)


def check_data_sizes(sizes: tuple[str, ...], path: Path | None, what: str) -> None:
    """Raises ValueError unless `data.sizes` can be read, and belong to a folder."""
    for size in sizes:
        read_size(size)
    if sizes and path is None:
        raise InputError(
            f"data.sizes needs a folder of encoded {what}; got sizes={sizes} without data.path. "
            "Leave it out, or give --data.path."
        )


@dataclass(frozen=True, kw_only=True)
class DenoiserConfig:
    """Sizes that all diffusion transformers have."""

    channels: int
    """Number of channels of a latent or of an image."""
    patch: tuple[int, int, int] = (1, 2, 2)
    """Frames, height and width of a patch; each patch is a token."""
    width: int
    """Number of channels of the residual stream."""
    layers: int
    """Number of blocks."""
    heads: int
    """Number of attention heads, a divisor of `width`."""
    mlp_width: int
    """Number of hidden channels of the MLP."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the activations; weights and the output are float32."""

    def __post_init__(self) -> None:
        for name in ("channels", "width", "layers", "heads", "mlp_width"):
            check_minimum(f"model.{name}", getattr(self, name), 1)
        for size in self.patch:
            check_minimum("model.patch", size, 1)
        check_dit_width(width=self.width, heads=self.heads, prefix="model.")

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads: as many as query heads."""
        return self.heads

    @property
    def head_dim(self) -> int:
        """Number of channels of a head."""
        return self.width // self.heads


@dataclass(frozen=True, kw_only=True)
class DiTConfig(DenoiserConfig):
    """Sizes of the model: the keyword arguments of `models.dit.DiT`."""

    classes: int
    """Number of classes that the model can draw; 0 for a model without classes."""
    text_dim: int | None = None
    """Number of channels of an embedded token of text, for a model that draws what a caption says.
    The default is a model without texts; a folder of images with encoded captions decides."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_minimum("model.classes", self.classes, 0)
        check_minimum("model.text_dim", self.text_dim, 1)
        if self.classes and self.text_dim is not None:
            raise InputError(
                "A DiT learns classes or texts; got model.classes="
                f"{self.classes}, model.text_dim={self.text_dim}. Use --model.classes 0, or leave "
                "--model.text-dim out."
            )


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig:
    """What the model learns to predict, and at which noise levels."""

    target: Literal["flow", "v", "eps"] = "flow"
    """What the model predicts: "flow" is the velocity of rectified flow
    (https://arxiv.org/abs/2209.03003); "v" (https://arxiv.org/abs/2202.00512) and "eps", the noise,
    belong to diffusion with a cosine schedule."""
    times: Literal["uniform", "logit_normal"] = "uniform"
    """Distribution of the times at which the model is trained; "logit_normal" prefers the middle
    (https://arxiv.org/abs/2403.03206)."""
    dropout: float = 0.1
    """Fraction of the examples that are shown without their class or text, so that samples can be
    drawn with guidance."""

    def __post_init__(self) -> None:
        way_out = "Use 0.1, or 0 for a model that is drawn without guidance."
        check_range("diffusion.dropout", self.dropout, "at least 0 and below 1", way_out)


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """Latents to train on."""

    path: Path | None = None
    """A folder of images that `python -m trainer.dit.encode` has written; or an *.npz file with the
    arrays `latents` [N F H W C] and, for a model with classes, `labels` [N]. The default is the
    handwritten digits that come with scikit-learn."""
    validation_fraction: float = 0.1
    """Fraction of the examples that is held out."""
    latent_scale: float = 1.0
    """Factor by which latents are multiplied when they are read, such as 0.18215 for those of
    Stable Diffusion; samples are divided by it. Latents should have a root mean square of about 1,
    like the noise."""
    sizes: tuple[str, ...] = ()
    """More sizes beside `size`, as FRAMESxHEIGHTxWIDTH, such as 1x24x40; `size` must be the
    largest. A batch holds images of one size. The default, with a folder, is the sizes in it."""
    pixels: bool = False
    """Whether the folder holds pixels in place of latents. The folder decides about the default."""
    text_tokens: int | None = None
    """Number of tokens to which texts are filled up, for a model with `text_dim`: at least those of
    the longest. What fills them up is not seen. The folder decides about the default."""

    def __post_init__(self) -> None:
        check_on_disk("data.path", self.path)
        check_data_sizes(self.sizes, self.path, "images")
        check_minimum("data.text_tokens", self.text_tokens, 1)
        fraction, way_out = self.validation_fraction, "Leave it out for 1."
        check_range("data.validation_fraction", fraction, "above 0 and below 1", "Use 0.1.")
        check_range("data.latent_scale", self.latent_scale, "above 0 and finite", way_out)
        if self.latent_scale != 1 and not self.holds_latents:
            raise InputError(
                "data.latent_scale needs latents, of a folder or an *.npz file; got "
                f"latent_scale={self.latent_scale}, path={self.path}. Leave it out: images have "
                "values from -1 to 1."
            )

    @property
    def holds_latents(self) -> bool:
        """Whether the data are latents, which cannot be shown as an image."""
        return self.path is not None and not self.pixels


@dataclass(frozen=True, kw_only=True)
class DenoiserTrainConfig(TrainConfig):
    """A training run of any diffusion transformer."""

    causal: ClassVar[bool] = False

    size: tuple[int, int, int]
    """Frames, height and width of a latent or of an image; an image has one frame."""
    block_frames: int | None = None
    """Latent frames of a block, in models that draw a video block after block: a token sees its own
    block and those before. By default, all tokens see each other."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for size in self.size:
            check_minimum("size", size, 1)
        for size in self.sizes:
            if any(n % patch for n, patch in zip(size, self.model.patch, strict=True)):
                raise InputError(
                    "model.patch must divide every size, in frames, height and width; got "
                    f"patch={self.model.patch}, size={size}. Change one of them."
                )
        for size in self.sizes:
            if math.prod(size) > math.prod(self.size):
                raise InputError(
                    "size must be the largest of the sizes, as the memory of a step is that of its "
                    f"examples; got size={self.size} and {size} in data.sizes. Exchange them."
                )
        if len(set(self.sizes)) < len(self.sizes):
            raise InputError(
                "data.sizes must name each size once, and size is one of them; got "
                f"size={self.size}, sizes={self.data.sizes}. Leave the second out."
            )

        if self.block_frames is None:
            return
        check_minimum("block_frames", self.block_frames, 1)
        if self.block_frames % self.model.patch[0] or len({x * y for _, x, y in self.sizes}) > 1:
            raise InputError(
                "block_frames must be a multiple of the frames of a patch, and frames of all sizes "
                f"must have as many tokens; got block_frames={self.block_frames}, "
                f"patch={self.model.patch}, sizes={self.sizes}. Change one of them."
            )

    @property
    def sizes(self) -> tuple[tuple[int, int, int], ...]:
        """All sizes of latents or of images: `size`, and those of `data.sizes`."""
        return (self.size, *map(read_size, self.data.sizes))

    def of_size(self, size: tuple[int, int, int]) -> Self:
        """The same with one size."""
        return replace(self, size=size, data=replace(self.data, sizes=()))

    @property
    def block_tokens(self) -> int:
        """Tokens of a block; 0 where all tokens see each other."""
        return self.tokens_of((self.block_frames or 0, *self.size[1:]))

    @property
    def attention_of_model(self) -> dict[str, Any]:
        from startrail_jax.masks import BlockCausal

        if not self.block_tokens:
            return {"causal": False}
        return {"causal": None, "mask": BlockCausal(self.block_tokens)}

    @property
    def num_tokens(self) -> int:
        """Number of tokens of an image, or of a video of the largest size."""
        return self.tokens_of(self.size)

    def tokens_of(self, size: tuple[int, int, int]) -> int:
        """Number of tokens of an image or a video."""
        return math.prod(size) // math.prod(self.model.patch)

    @property
    def patch_elements(self) -> int:
        """Number of values of a latent in a patch."""
        return math.prod(self.model.patch) * self.model.channels


@dataclass(frozen=True, kw_only=True)
class ImageSampleConfig(SampleConfig):
    """Images that the model draws during training and at its end, with the averaged weights if
    there are any."""

    images: int = 4
    """Number of images of each class, of the first ten; or of each of ten captions that are held
    out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_minimum("sample.images", self.images, 1)
        if self.every is None and self.images != type(self).images:
            raise InputError(
                f"sample.images needs sample.every; got images={self.images} and no samples. Give "
                "--sample.every, or leave it out."
            )


@dataclass(frozen=True, kw_only=True)
class DiTTrainConfig(DenoiserTrainConfig):
    """A training run of a diffusion transformer."""

    kind: ClassVar[str] = "dit"

    model: DiTConfig
    """Sizes of the model."""
    diffusion: DiffusionConfig = field(default_factory=DiffusionConfig)
    """What the model learns to predict."""
    data: ImageConfig = field(default_factory=ImageConfig)
    """Data to train on."""
    sample: ImageSampleConfig = field(default_factory=ImageSampleConfig)
    """Images that are drawn during training, in the folder `samples` of the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.model.text_dim is None) != (self.data.text_tokens is None):
            raise InputError(
                "model.text_dim and data.text_tokens belong together; got "
                f"text_dim={self.model.text_dim}, text_tokens={self.data.text_tokens}. A folder "
                "that is encoded with --text-encoder gives both: leave them out, or set both."
            )

    @property
    def steps_between_samples(self) -> int | None:
        return self.sample.every


@dataclass(frozen=True, kw_only=True)
class ImageOptions(SampleOptions):
    """What sample.py draws from a run of a diffusion transformer."""

    classes: tuple[int | str, ...] | None = None
    """Classes to draw, one row of the grid for each: numbers, or names of the folders of images.
    The default is the first ten."""
    prompt: tuple[str, ...] | None = None
    """Captions to draw, one row of the grid for each, by a model of texts; '' is no text. The
    default is the captions of ten images that are held out."""
    text_encoder: Path | None = None
    """Folder of the model with which the captions were encoded, for `prompt`. Needs the extra
    video."""
    size: str | None = None
    """Size to draw, as FRAMESxHEIGHTxWIDTH, of those that the run trains on. The default is the
    largest."""
    decode: Path | None = None
    """Folder of the AutoencoderKL with which the images were encoded: it makes a PNG file of
    latents. Needs the extra video."""
    decode_device: str = "cpu"
    """Device of PyTorch for `decode` and `text_encoder`. "cuda" needs memory that jax has left:
    XLA_PYTHON_CLIENT_MEM_FRACTION=0.6."""
    samples: int = 8
    """Number of images in a row."""
    sampler: Literal["euler", "heun", "ddim"] | None = None
    """Method that turns noise into an image: "euler" or "heun" for a model of rectified flow,
    "ddim" for a model that predicts v or eps. The default is the first that fits the model."""
    steps: int = 50
    """Number of steps of the sampler; "heun" evaluates the model twice in each."""
    guidance: float | None = None
    """Strength of classifier-free guidance. 1 draws what the model has learnt; more makes images
    more typical of their class or caption. The default is 1.5, or 1 for a model without
    guidance."""
    batch_size: int = 64
    """Number of images that are drawn at a time; fewer need less memory."""
    seed: int = 0
    """Seed of the noise; the images do not depend on the mesh."""
    scale: int | None = None
    """Size of an image pixel in pixels of the PNG file. The default makes every image at least 64
    pixels wide."""
    out: Path | None = None
    """File to write: *.png, or *.npz for latents. It must not exist. The default is samples.png or
    samples.npz in the folder of the run, or samples-2.png and so on where there are others."""

    def __post_init__(self) -> None:
        check_on_disk("decode", self.decode)
        check_on_disk("text_encoder", self.text_encoder)
        for name in ("samples", "steps", "batch_size", "scale"):
            check_minimum(name, getattr(self, name), 1)
        if any(self.prompt or ()) and self.text_encoder is None:
            raise InputError(
                f"--prompt is encoded by the model of a folder; got {self.prompt} without "
                "--text-encoder. Add --text-encoder FOLDER, that of the captions of the run."
            )
        if self.text_encoder is not None and not self.prompt:
            raise InputError(
                f"--text-encoder encodes --prompt; got {str(self.text_encoder)!r} alone. Add "
                "--prompt 'a kite', or leave it out."
            )
        if self.prompt is not None and self.classes is not None:
            raise InputError(
                "A model draws classes or captions; got --classes and --prompt. Leave one out."
            )
