"""Settings of a run of a diffusion transformer, and of drawing from it.

Imports no jax: `--help` must be fast.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

from models.sizes import check_dit_width
from startrail_jax.errors import InputError
from trainer.config import TrainConfig, check_minimum
from trainer.places import check_on_disk
from trainer.task import SampleOptions


@dataclass(frozen=True, kw_only=True)
class DiTConfig:
    """Sizes of the model: the keyword arguments of `models.dit.DiT`."""

    channels: int
    """Number of channels of a latent or of an image."""
    classes: int
    """Number of classes that the model can draw; 0 for a model without classes."""
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
        check_minimum("model.classes", self.classes, 0)
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
    """Fraction of the examples that are shown without their class, so that samples can be drawn
    with guidance."""

    def __post_init__(self) -> None:
        if not 0 <= self.dropout < 1:
            raise InputError(
                "diffusion.dropout must be at least 0 and below 1; got "
                f"dropout={self.dropout}. Use 0.1, or 0 for a model that is drawn without guidance."
            )


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """Images or latents to train on."""

    path: Path | None = None
    """A folder of images, with a subfolder for each class, or an *.npz file of latents. The default
    is the handwritten digits that come with scikit-learn."""
    validation_fraction: float = 0.1
    """Fraction of the examples that is held out."""
    resize: Literal["crop", "pad", "stretch"] | None = None
    """How images of another size are changed to `size`: "crop" scales an image until it covers the
    size, and cuts the edges off; "pad" scales it until it fits, and adds black edges; "stretch"
    changes its proportions. By default, images of another size are an error."""
    sizes: tuple[str, ...] = ()
    """More sizes of images beside `size`, as HEIGHTxWIDTH, such as 192x320; `size` must be the
    largest. An image is changed to the size of the nearest proportions and, among sizes of equal
    proportions, to the size of the nearest area. A batch holds images of one size."""
    latent_scale: float = 1.0
    """Factor by which latents are multiplied when they are read, such as 0.18215 for those of
    Stable Diffusion; samples are divided by it. Latents should have a root mean square of about 1,
    like the noise."""
    class_names: tuple[str, ...] = ()
    """Names of the classes, in the order of their labels, for sample.py. The default are the
    subfolders of a folder of images, in their order."""

    def __post_init__(self) -> None:
        check_on_disk("data.path", self.path)
        if not 0 < self.validation_fraction < 1:
            raise InputError(
                "data.validation_fraction must be above 0 and below 1; got "
                f"validation_fraction={self.validation_fraction}. Use 0.1."
            )
        if not 0 < self.latent_scale < math.inf:
            raise InputError(
                "data.latent_scale must be above 0 and finite; got "
                f"latent_scale={self.latent_scale}. Leave it out for 1."
            )
        if self.latent_scale != 1 and not self.holds_latents:
            raise InputError(
                "data.latent_scale needs latents, an *.npz file; got "
                f"latent_scale={self.latent_scale}, path={self.path}. Leave it out: images have "
                "values from -1 to 1."
            )
        for name in ("resize", "sizes"):
            if getattr(self, name) and (self.path is None or self.holds_latents):
                raise InputError(
                    f"data.{name} needs a folder of images; got {name}={getattr(self, name)!r}, "
                    f"path={self.path}. Leave it out, or give --data.path."
                )
        for size in self.sizes:
            if not re.fullmatch("[1-9][0-9]{0,5}x[1-9][0-9]{0,5}", size):
                raise InputError(
                    "data.sizes must be HEIGHTxWIDTH, two numbers from 1 to 999999; got "
                    f"{size!r}. Write them as 192x320."
                )

    @property
    def holds_latents(self) -> bool:
        """Whether the data are latents, which cannot be shown as an image."""
        return self.path is not None and self.path.suffix == ".npz"


@dataclass(frozen=True, kw_only=True)
class DiTTrainConfig(TrainConfig):
    """A training run of a diffusion transformer."""

    kind: ClassVar[str] = "dit"
    causal: ClassVar[bool] = False

    model: DiTConfig
    """Sizes of the model."""
    diffusion: DiffusionConfig = field(default_factory=DiffusionConfig)
    """What the model learns to predict."""
    data: ImageConfig = field(default_factory=ImageConfig)
    """Data to train on."""

    size: tuple[int, int, int]
    """Frames, height and width of a latent or of an image; an image has one frame."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for size in self.size:
            check_minimum("size", size, 1)
        if self.data.sizes and self.size[0] > 1:
            raise InputError(
                "data.sizes are for images, which have one frame; got "
                f"sizes={self.data.sizes}, size={self.size}. Leave them out, or use --size 1 "
                f"{self.size[1]} {self.size[2]}."
            )
        for name, size in zip(("size", *self.data.sizes), self.sizes, strict=True):
            where = "size" if name == "size" else "data.sizes"
            if any(n % patch for n, patch in zip(size, self.model.patch, strict=True)):
                raise InputError(
                    f"model.patch must divide {where}, in frames, height and width; got "
                    f"patch={self.model.patch}, size={size}. Change one of them."
                )
            if math.prod(size) > math.prod(self.size):
                raise InputError(
                    "size must be the largest of the sizes, as the memory of a step is that of "
                    f"its images; got size={self.size} and {name} in data.sizes. Exchange them."
                )
        names = self.data.class_names
        if names and (len(names) != self.model.classes or len(set(names)) < len(names)):
            raise InputError(
                "data.class_names must name each of model.classes, each once; got "
                f"class_names={names}, classes={self.model.classes}. Leave them out."
            )
        if len(set(self.sizes)) < len(self.sizes):
            raise InputError(
                "data.sizes must name each size once, and size is one of them; got "
                f"size={self.size}, sizes={self.data.sizes}. Leave the second out."
            )

    @property
    def num_tokens(self) -> int:
        """Number of tokens of an image of `size`, the largest."""
        return math.prod(self.size) // math.prod(self.model.patch)

    @property
    def sizes(self) -> tuple[tuple[int, int, int], ...]:
        """Frames, height and width of all sizes: `size`, and those of `data.sizes`."""
        others = (tuple(map(int, size.split("x"))) for size in self.data.sizes)
        return (self.size, *((1, height, width) for height, width in others))

    @property
    def names_of_sizes(self) -> tuple[str, ...]:
        """The sizes as HEIGHTxWIDTH."""
        return tuple(f"{height}x{width}" for _, height, width in self.sizes)

    def of_size(self, size: tuple[int, int, int]) -> DiTTrainConfig:
        """The same with one size."""
        return replace(self, size=size, data=replace(self.data, sizes=()))

    @property
    def patch_elements(self) -> int:
        """Number of values in a patch."""
        return math.prod(self.model.patch) * self.model.channels


@dataclass(frozen=True, kw_only=True)
class ImageOptions(SampleOptions):
    """What sample.py draws from a run of a diffusion transformer."""

    classes: tuple[str, ...] | None = None
    """Classes to draw, by name or by label, one row of the grid for each. Where all names are
    numbers, they are meant. The default is the first ten classes."""
    size: str | None = None
    """Size to draw, as HEIGHTxWIDTH, of those that the run trains on. The default is the
    largest."""
    samples: int = 8
    """Number of images in a row."""
    sampler: Literal["euler", "heun", "ddim"] | None = None
    """Method that turns noise into an image: "euler" or "heun" for a model of rectified flow,
    "ddim" for a model that predicts v or eps. The default is the first that fits the model."""
    steps: int = 50
    """Number of steps of the sampler; "heun" evaluates the model twice in each."""
    guidance: float | None = None
    """Strength of classifier-free guidance. 1 draws what the model has learnt; more makes images
    more typical of their class. The default is 1.5, or 1 for a model without guidance."""
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
        for name in ("samples", "steps", "batch_size"):
            check_minimum(name, getattr(self, name), 1)
        if self.scale is not None:
            check_minimum("scale", self.scale, 1)
