"""The tensors of a Hugging Face checkpoint, and the weights that they hold.

Both rotate the channel pairs (i, i + head_dim / 2).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from models.config import GPTConfig
from models.periods import layers_of
from startrail_jax.errors import InputError
from trainer.gpt.pretrained.families.table import FAMILIES
from trainer.weights.places import Place, Share


def places(
    shapes: Mapping[str, tuple[int, ...]], model: GPTConfig, family: str
) -> Iterator[tuple[str, Place]]:
    """The place of every weight of a model."""
    of_family = FAMILIES[family]
    tables = of_family.tables(model)

    def place(path: str) -> Place:
        stack, _, weight = path.partition("/")
        if stack not in tables:
            name, groups = of_family.of_model[path]
            return Place(tensors=(name,), stacked=False, shape=shapes[path], groups=groups)
        if weight not in tables[stack]:
            raise InputError(
                f"The weights of a model must be those of its family; got {path}, which no model "
                f"of kind {family} has. Leave out flags --model.*."
            )
        name, groups = tables[stack][weight]
        names = [
            f"{of_family.prefix}layers.{layer}.{name}"
            for layer in layers_of(stack, model.layer_mixers, model.layer_feed_forwards)
        ]
        _, *shape = shapes[path]
        experts = None
        if "{}" in name:
            experts, *shape = shape
            names = [x.format(expert) for x in names for expert in range(experts)]
        return Place(
            tensors=tuple(names),
            stacked=True,
            experts=experts,
            shape=tuple(shape),
            groups=groups,
        )

    for path in shapes:
        stack, _, weight = path.partition("/")
        table = tables.get(stack, {})
        tensor, _ = table.get(weight, ("", ()))
        of_tensor = (f"{stack}/{x}" for x, (name, _) in table.items() if name == tensor)
        beside = [x for x in of_tensor if x in shapes]
        if not beside[1:]:
            yield path, place(path)
            continue
        groups, dim = of_family.row_groups(tensor, model), of_family.dim_of_rows(tensor)
        share = Share(
            index=beside.index(path),
            sizes=tuple(place(x).tensor_shape[dim] // groups for x in beside),
            groups=groups,
            dim=dim,
            columns=of_family.takes_turns(tensor),
        )
        yield path, replace(place(path), share=share)


PREFIXES_OF_TEXT = {"model.language_model.": "model.", "language_model.": ""}
"""Prefixes of the names of the tensors of a text model: in a model of images -> in a folder of the
text model alone. Some models have the head inside, and others outside."""
IMAGES = (
    *("model.visual.", "vision_tower.", "multi_modal_projector."),
    *("model.vision_tower.", "model.multi_modal_projector.", "model.embed_vision."),
)
"""Prefixes of the names of tensors for images."""
OTHER_PARTS = (*IMAGES, "model.audio_tower.", "model.embed_audio.", "mtp.")
"""Prefixes of the names of all tensors that are no part of the text model: tensors for images and
sound, and heads that predict more than one token."""


def part_of(name: str) -> str | None:
    """The prefix of the other part of a model to which a tensor belongs; None for the text
    model."""
    return next((prefix for prefix in OTHER_PARTS if name.startswith(prefix)), None)


def layer_behind(name: str, layers: int) -> str | None:
    """The prefix of a tensor of a layer behind the last, which predicts more than one token; None
    for others."""
    found = re.match(r"(model\.layers\.(\d+)\.)", name_of_text(name))
    return found[1] if found and int(found[2]) >= layers else None


def part_of_scores(name: str) -> str | None:
    """`part_of` for a model of scores, to which the head that predicts tokens is another part."""
    head = "lm_head."
    return head if name_of_text(name).startswith(head) else part_of(name)


def name_of_text(name: str) -> str:
    """The name of a tensor of a text model, as in a folder of the text model alone."""
    for prefix, alone in PREFIXES_OF_TEXT.items():
        if name.startswith(prefix):
            return alone + name.removeprefix(prefix)
    return name
