"""Types of the tensors of a pretrained model, which an export of a run takes again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from trainer.data.opening import read_object
from trainer.weights.files import Tensors

TYPES = "types.json"
"""File beside a kept config.json: the type of every tensor of the pretrained model."""


def keep_types(folder: Path, tensors: Tensors) -> None:
    """Notes in what a run keeps of its pretrained model which types its tensors have."""
    text = json.dumps(tensors.types, indent=2)
    (folder / TYPES).write_text(text + "\n", encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class ExportTypes:
    """The type of every tensor that is exported."""

    requested: str | None
    """The type that the user asks for; None for those of the pretrained model."""
    default: str = "float32"
    """The type of tensors of which none is noted."""
    noted: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_run(cls, kept: Path, requested: str | None, default: str = "float32") -> ExportTypes:
        """Those of a run that keeps this folder of its pretrained model, which may not exist."""
        path = kept / TYPES
        noted = read_object(path) if path.is_file() else {}
        return cls(requested=requested, default=default, noted=noted)

    def before(self, name: str) -> str:
        """The type that a tensor had in the pretrained model."""
        return self.noted.get(name, self.default)

    def of(self, name: str) -> Any:
        """The type of a tensor. One that was float32 among others of 16 bits, such as the decay
        rates of a hybrid, has no other type than float32: 16 bits would be too few for it."""
        before = self.before(name)
        is_wide = before == "float32" and {*self.noted.values()} > {"float32"}
        return jnp.dtype(before if self.requested is None or is_wide else self.requested)
