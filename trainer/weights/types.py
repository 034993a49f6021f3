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
    """Notes the types of a pretrained model's tensors in the run's folder of kept files."""
    text = json.dumps(tensors.types, indent=2)
    (folder / TYPES).write_text(text + "\n", encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class ExportTypes:
    """The type of every tensor that is exported."""

    requested: str | None
    """The type that the user asks for; None for the types of the pretrained model."""
    default: str = "float32"
    """The type of tensors without a noted type."""
    noted: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_run(cls, kept: Path, requested: str | None, default: str = "float32") -> ExportTypes:
        """The types of a run, from its folder of kept files, which may not exist."""
        path = kept / TYPES
        noted = read_object(path) if path.is_file() else {}
        return cls(requested=requested, default=default, noted=noted)

    def before(self, name: str) -> str:
        """The type that a tensor had in the pretrained model."""
        return self.noted.get(name, self.default)

    def of(self, name: str) -> Any:
        """The type of a tensor. A tensor that was float32 among others of 16 bits, such as the
        decay rates of a hybrid, stays float32: 16 bits would be too few."""
        before = self.before(name)
        is_wide = before == "float32" and {*self.noted.values()} > {"float32"}
        return jnp.dtype(before if self.requested is None or is_wide else self.requested)
