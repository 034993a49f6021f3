"""A pretrained model that is in an object store. Imports no jax."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from trainer.data.stored.copies import copy_of
from trainer.data.stored.listing import list_stored
from trainer.places import check_input

SUFFIXES = (".safetensors", ".json", ".jinja", ".model", ".txt")
"""Weights and what describes them. A repository may have the same weights in other forms too."""


def copy_of_model(url: Path, cache: Path) -> Path:
    """The copy of the folder of a model, without its subfolders, which is made once.

    Args:
        url: the folder, such as hf://Qwen/Qwen3-8B or gs://bucket/models/mine, as a path.
        cache: the folder below which the copy is.

    Raises:
        ImportError: if the package of the store is missing.
        OSError: if the store cannot be read, or the folder has no space.
        ValueError: if the URL cannot be used, or nothing is there.
    """
    check_input("init_from", url)
    stored = list_stored(
        url, "init_from", lambda key: "/" not in key and PurePosixPath(key).suffix in SUFFIXES
    )
    return copy_of(stored, "init_from", cache)
