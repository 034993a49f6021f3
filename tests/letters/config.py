"""Settings of a run that learns to fill in letters."""

from dataclasses import dataclass, field
from typing import ClassVar

from trainer.config import TrainConfig
from trainer.task import SampleOptions


@dataclass(frozen=True, kw_only=True)
class LettersModelConfig:
    width: int = 8
    layers: int = 2
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 6
    mlp_width: int = 20
    dtype: str = "float32"


@dataclass(frozen=True, kw_only=True)
class LettersDataConfig:
    rows: int = 20
    letters: str = "abcde"


@dataclass(frozen=True, kw_only=True)
class LettersConfig(TrainConfig):
    kind: ClassVar[str] = "letters"
    causal: ClassVar[bool] = False

    model: LettersModelConfig = field(default_factory=LettersModelConfig)
    data: LettersDataConfig = field(default_factory=LettersDataConfig)
    length: int = 16
    smallness: float = 0.01
    """Weight of the auxiliary loss."""

    @property
    def num_tokens(self):
        return self.length

    @property
    def alphabet(self):
        """The letters, and the blank that stands for a missing one."""
        return f"{self.data.letters}_"


@dataclass(frozen=True, kw_only=True)
class LettersOptions(SampleOptions):
    text: str = "a_a"
