"""What can be set for a run of a diffusion transformer. Imports no jax: `--help` is to be fast."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from models.sizes import check_dit_width
from trainer.config import TrainConfig, check_minimum


@dataclass(frozen=True, kw_only=True)
class DiTConfig:
    """Sizes of the model: the keyword arguments of `models.dit.DiT`."""

    channels: int
    """Channels of a latent, or of an image."""
    classes: int
    """Classes that a sample can be asked for; 0 for none."""
    caption_length: int = 0
    """Bytes of text that a sample can be asked for, which images attend to; 0 for none."""
    patch: tuple[int, int, int] = (1, 2, 2)
    """Frames, height and width of what becomes a token."""
    width: int
    """Channels of the residual stream."""
    layers: int
    """Number of blocks."""
    heads: int
    """Attention heads, a divisor of `width`."""
    mlp_width: int
    """Hidden channels of the MLP."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations; weights and the output are float32."""

    def __post_init__(self) -> None:
        for name in ("channels", "width", "layers", "heads", "mlp_width"):
            check_minimum(f"model.{name}", getattr(self, name), 1)
        for name in ("classes", "caption_length"):
            check_minimum(f"model.{name}", getattr(self, name), 0)
        for size in self.patch:
            check_minimum("model.patch", size, 1)
        check_dit_width(width=self.width, heads=self.heads, prefix="model.")

    @property
    def kv_heads(self) -> int:
        """Key and value heads: as many as query heads."""
        return self.heads

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.width // self.heads

    @property
    def mlp(self) -> str:
        """Kind of MLP."""
        return "gelu"


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig:
    """What the model learns of noise, and at which times."""

    target: Literal["flow", "v", "eps"] = "flow"
    """What it predicts: the velocity of rectified flow (https://arxiv.org/abs/2209.03003), or, of
    the diffusion with a cosine schedule, v (https://arxiv.org/abs/2202.00512) or the noise."""
    times: Literal["uniform", "logit_normal"] = "uniform"
    """Density of the times that it learns; "logit_normal" has more in the middle
    (https://arxiv.org/abs/2403.03206)."""
    dropout: float = 0.1
    """Share of the examples that lose class and caption, where they have any, so that samples can
    be guided."""

    def __post_init__(self) -> None:
        if not 0 <= self.dropout < 1:
            raise ValueError(
                "diffusion.dropout must be at least 0 and below 1; got "
                f"dropout={self.dropout}. Use 0.1, or 0 for samples that are not to be guided."
            )


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """What images or latents to read."""

    path: Path | None = None
    """A folder of images, with one of its own for each class, or an *.npz file of latents. By
    default the handwritten digits that come with scikit-learn."""
    held_out: float = 0.1
    """Share of the examples that is held out."""

    def __post_init__(self) -> None:
        if not 0 < self.held_out < 1:
            raise ValueError(
                f"data.held_out must be above 0 and below 1; got held_out={self.held_out}. Use 0.1."
            )

    @property
    def holds_latents(self) -> bool:
        """Whether the data are no pixels that could be shown."""
        return self.path is not None and self.path.suffix == ".npz"


@dataclass(frozen=True, kw_only=True)
class DiTTrainConfig(TrainConfig):
    """A run of a diffusion transformer."""

    kind: ClassVar[str] = "dit"
    causal: ClassVar[bool] = False

    model: DiTConfig
    """Sizes of the model."""
    diffusion: DiffusionConfig = field(default_factory=DiffusionConfig)
    """What the model learns."""
    data: ImageConfig = field(default_factory=ImageConfig)
    """What to read."""

    size: tuple[int, int, int]
    """Frames, height and width of a latent, or of an image of one frame."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for size in self.size:
            check_minimum("size", size, 1)
        if any(size % patch for size, patch in zip(self.size, self.model.patch, strict=True)):
            raise ValueError(
                "model.patch must divide size, in frames, height and width; got "
                f"patch={self.model.patch}, size={self.size}. Change one of them."
            )

    @property
    def num_tokens(self) -> int:
        return math.prod(self.grid)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Patches in frames, height and width."""
        frames, height, width = (n // m for n, m in zip(self.size, self.model.patch, strict=True))
        return frames, height, width

    @property
    def patch_elements(self) -> int:
        """Numbers in a patch: those that become a token."""
        return math.prod(self.model.patch) * self.model.channels
