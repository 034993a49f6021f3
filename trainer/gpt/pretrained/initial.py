"""The weights of a pretrained model as the first weights of a run, on any mesh."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from startrail_jax.errors import InputError
from trainer import durable
from trainer.data.opening import read_object, reading
from trainer.gpt.config import TOKENIZER, GPTTrainConfig
from trainer.gpt.pretrained.config_json import read_description, text_values
from trainer.gpt.pretrained.defaults import GENERATION, files_of_tokenizer
from trainer.gpt.pretrained.families.table import FAMILIES
from trainer.gpt.pretrained.tensors import (
    IMAGES,
    layer_behind,
    name_of_text,
    part_of,
    part_of_scores,
    places,
)
from trainer.gpt.pretrained.values import CONFIG
from trainer.gpt.tokenizer import check_tokenizer_of_model
from trainer.parallel.partition import path_name
from trainer.run.folder import KEPT_FOLDER
from trainer.sums import write_sums
from trainer.weights.files import open_tensors
from trainer.weights.initial import TensorWeights
from trainer.weights.types import keep_types

TIED = {"lm_head.weight": "model.embed_tokens.weight"}


@dataclass(frozen=True, kw_only=True)
class Pretrained(TensorWeights):
    """The weights in the folder of a pretrained model, which fit the model of a run."""

    def keep(self, run_dir: Path) -> None:
        """Copies the files beside the weights into a run folder, and notes the types of the
        tensors. The type in config.json becomes one of these."""
        source, folder = self.tensors.folder, run_dir / KEPT_FOLDER
        folder.mkdir(exist_ok=True)
        for name, path in kept_files(source).items():
            copy_file(path, folder / name)
        values = text_values(read_object(source / CONFIG), CONFIG)
        declared = values.get("dtype") or values.get("torch_dtype")
        if declared not in self.tensors.types.values():
            declared = self.tensors.largest_kind
        values = {k: v for k, v in values.items() if k != "dtype"} | {"torch_dtype": declared}
        keep_types(folder, self.tensors)
        (folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        write_sums(folder)
        durable.flush_files(folder, 0)
        durable.flush(folder.parent)


def kept_files(folder: Path) -> dict[str, Path]:
    """The files beside the weights of a model for tokenization and generation, by their path in its
    folder."""
    generation = folder / GENERATION
    generation_file = {GENERATION: generation} if generation.is_file() else {}
    return files_of_tokenizer(folder) | generation_file


def copy_file(source: Path, target: Path) -> None:
    """Copies a file of a tokenizer; raises ValueError if it cannot be read."""
    with reading(source):
        content = source.read_bytes()
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(content)


@contextmanager
def open_pretrained(config: GPTTrainConfig, shapes: Any) -> Iterator[Pretrained]:
    """The weights in the folder `config.init_from`, compared with the model."""
    folder = config.init_from
    assert folder is not None, "the caller asks for it"
    described, model = read_description(folder), config.model
    # A model of words that becomes one of scores has another head.
    is_new = model.scores and not described.model.scores
    of_part = part_of_scores if is_new else part_of
    predicts = FAMILIES[described.family].predicting is not None

    def part(name: str) -> str | None:
        return (layer_behind(name, model.layers) if predicts else None) or of_part(name)

    with open_tensors(folder, name_of=name_of_text, part_of=part) as tensors:
        leaves = jax.tree_util.tree_leaves_with_path(shapes)
        named = {path_name(path): tuple(x.shape) for path, x in leaves}
        by_weight = dict(places(named, model, described.family))
        absent = [path for path in by_weight if is_new and path.partition("/")[0] == model.head]
        for path in absent:
            del by_weight[path]
        needed = {name: place.whole_shape for place in by_weight.values() for name in place.tensors}
        tensors = FAMILIES[described.family].adapt(tensors, needed)
        images = sum(tensors.left_out.get(prefix, 0) for prefix in IMAGES)
        if images and not config.init_text_only:
            raise InputError(
                "A model must be of text alone, or --init-text-only must say that its text model "
                f"is taken alone; got {str(folder)!r} with {images} tensors for images. Add it."
            )
        tensors.check(needed, tied=TIED if model.tied_head and not model.scores else {})
        begin = config.data.begin_of_document
        remark = check_tokenizer_of_model(folder / TOKENIZER, model.vocab_size, begin)
        size = sum(jnp.dtype(x.dtype).itemsize * x.size for _, x in leaves)
        dtype = jnp.dtype(max((x for _, x in leaves), key=lambda x: x.size).dtype)
        left_out = longer = ""
        for prefix, count in tensors.left_out.items():
            left_out += f"; without {count} tensors {prefix}*, which are no part of the text model"
        if absent:
            left_out += f"; {', '.join(absent)} is new, and 0 at first"
        if config.seq_len > described.length:
            longer = (
                f"; it is made for sequences of {described.length:,} tokens, and seq_len is "
                f"{config.seq_len:,}: --model.rope.scaling stretches its positions"
            )
        yield Pretrained(
            tensors=tensors,
            places=by_weight,
            absent=tuple(absent),
            description=f"initial weights: {folder}, a model of kind {described.family} with "
            f"{len(needed)} tensors of {tensors.kinds}, {size / 2**30:.2f} GiB in {dtype}{left_out}"
            f"{longer}{remark}",
        )
