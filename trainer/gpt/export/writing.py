"""Writes the weights of a run as a folder that the library transformers loads."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from startrail_jax.errors import InputError, UnsupportedError
from trainer.data.cache import check_new, write_folder
from trainer.data.opening import read_object
from trainer.gpt.chat.stops import read_stops
from trainer.gpt.chat.template import TEMPLATE_FILE
from trainer.gpt.config import TOKENIZER, GPTTrainConfig
from trainer.gpt.lora import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    peft_config,
    peft_tensors,
    text_prefix,
)
from trainer.gpt.objective import NextToken
from trainer.gpt.pretrained.config_json import describe, text_values
from trainer.gpt.pretrained.defaults import (
    TEMPLATES_FOLDER,
    eos_of,
    files_of_tokenizer,
    kept_folder,
)
from trainer.gpt.pretrained.families.table import (
    FAMILIES,
    family_of,
    rotary_values,
    score_values,
    to_values,
)
from trainer.gpt.pretrained.initial import GENERATION, copy_file, kept_files, open_pretrained
from trainer.gpt.pretrained.plain import plain, without_rope
from trainer.gpt.pretrained.rope import ROPE, rope_length
from trainer.gpt.pretrained.tensors import places
from trainer.gpt.pretrained.values import CONFIG, LENGTH
from trainer.gpt.tokenizer import FileTokenizer
from trainer.parallel.partition import path_name, split_adapters
from trainer.weights.adapters import (
    base_weights,
    check_merge,
    restore_model,
    shapes_on_host,
    write_merged,
)
from trainer.weights.types import ExportTypes
from trainer.weights.writing import write_file

Dtype = Literal["float32", "bfloat16", "float16"]
SHARD_BYTES = 2 * 10**9
"""Bytes of the tensors of one file, which are in memory together."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Facts about an export."""

    step: int
    dtype: str
    """Data types of the tensors."""
    files: int
    """Number of files with tensors."""


def export_run(
    run_dir: Path,
    config: GPTTrainConfig,
    out: Path,
    *,
    step: int | None = None,
    dtype: Dtype | None = None,
    merge: bool = False,
    shard_bytes: int = SHARD_BYTES,
    note: Any = print,
) -> Exported:
    """Writes the weights of a checkpoint, by default the newest whole one; the folder appears only
    when it is whole. `dtype` and `merge` are those of `Export.of_run`. A file has at most
    `shard_bytes` of tensors, unless one tensor has more. `note` is called with remarks about the
    checkpoint."""
    check_new("OUT", out)
    export = Export.of_run(run_dir, config, dtype=dtype, merge=merge, note=note)
    weights, restored_step = restore_model(
        run_dir, config, export.shapes, step=step, only_trained=export.apart, note=note
    )
    written = ""

    def write(folder: Path) -> None:
        nonlocal written
        written = export.write(by_path(weights), folder, shard_bytes=shard_bytes, note=note)

    write_folder(out, write, option="OUT")
    return Exported(step=restored_step, dtype=written, files=len(list(out.glob("*.safetensors"))))


def by_path(weights: Any) -> dict[str, Any]:
    """Weights by their paths."""
    return {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(weights)}


@dataclass(frozen=True, kw_only=True)
class Export:
    """How the weights of a run are written, and what is written beside them."""

    config: GPTTrainConfig
    family: str
    apart: bool
    """Whether adapters are exported by themselves."""
    dtype: str
    """Type of the tensors whose type is not known."""
    types: ExportTypes
    described: tuple[str, dict[str, Any]]
    """Name and content of the file that describes the model."""
    generation: dict[str, Any]
    """Content of generation_config.json; empty for that of `beside`, if it is there."""
    beside: dict[str, Path]
    """Files to copy, by name."""

    @classmethod
    def of_run(
        cls,
        run_dir: Path,
        config: GPTTrainConfig,
        *,
        dtype: Dtype | None = None,
        merge: bool = False,
        note: Any = print,
    ) -> Export:
        """Reads what the folder of a run has beside checkpoints. By default, each tensor has the
        type that it had in the pretrained model, or float32 without one; `dtype` applies to all
        tensors but those in float32 among others of 16 bits. Adapters are float32 by default, and
        exported by themselves unless `merge` adds them to the weights."""
        kept = kept_folder(run_dir)
        values = read_object(kept / CONFIG) if (kept / CONFIG).is_file() else None
        before: Any = "float32" if values is None else values.get("torch_dtype")
        apart, ids = config.has_adapters and not merge, dict[str, int | None]()
        check_merge(config, run_dir, merge=merge)
        default_dtype = before if before in get_args(Dtype) and not apart else "float32"
        weight_dtype, types = dtype or default_dtype, ExportTypes.of_run(kept, dtype, default_dtype)
        family: str = family_of(config.model)
        if values is not None and family == family_of(describe(values, CONFIG).model):
            family = values["model_type"]  # Two families may have the same models.
        beside = files_beside_weights(config, kept)
        if apart:
            base = None if values is None else describe(values, CONFIG).model
            name, described = ADAPTER_CONFIG, peft_config(config, base, family, note=note)
        else:
            name, described = CONFIG, config_values(config, values, weight_dtype, note=note)
            if ids := token_ids(config, beside.get(TOKENIZER), kept / TOKENIZER):
                described |= ids
                # It has those of the tokenizer that the model came with.
                beside.pop(GENERATION, None)
        ends = [described.get("eos_token_id")] if ids else eos_of(kept)
        generation = _with_stops(read_stops(run_dir), ends, beside)
        if generation and not apart:
            described["eos_token_id"] = generation["eos_token_id"]
        pad = described.get("pad_token_id")
        stops = *read_stops(run_dir), *ends, config.data.end_of_document
        if config.model.scores and pad is not None and pad in stops:
            described["pad_token_id"] = None
            note(
                f"{CONFIG} has no pad_token_id: answers end with the token {pad}, which "
                "transformers would take for padding, and score the token before it"
            )
        return cls(
            config=config,
            family=family,
            apart=apart,
            dtype=weight_dtype,
            types=types,
            described=(name, described),
            generation=generation,
            beside=beside,
        )

    @functools.cached_property
    def shapes(self) -> Any:
        """Shapes of the weights on the host."""
        return shapes_on_host(NextToken(self.config))

    def write(
        self,
        arrays: Mapping[str, Any],
        folder: Path,
        *,
        shard_bytes: int = SHARD_BYTES,
        note: Any = print,
    ) -> str:
        """Writes weights by their paths, those of adapters alone if they are exported by
        themselves, and the files beside them; returns the types of the tensors."""
        config, written = self.config, self.dtype
        if self.apart:
            dtype, text = jnp.dtype(self.dtype), text_prefix(config, self.family)
            tensors = peft_tensors(dict(arrays), dtype, config.model, self.family, text)
            write_file(folder / ADAPTER_FILE, tensors)
        else:
            of_model = partial(places, model=config.model, family=self.family)
            options: dict[str, Any] = {"shard_bytes": shard_bytes}

            def open_base() -> Any:
                return open_pretrained(config, split_adapters(self.shapes)[1])

            with base_weights(arrays, of_model, config, open_base, self.types, note=note) as base:
                written = write_merged(
                    arrays, of_model, config.lora, folder, self.types.of, base=base, **options
                )
        for file, path in self.beside.items():
            copy_file(path, folder / file)
        if self.generation:
            (folder / GENERATION).write_text(
                json.dumps(self.generation, indent=2) + "\n", encoding="utf-8"
            )
        name, described = self.described
        # Last: a kill leaves a hidden folder without it.
        (folder / name).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        return written


def _with_stops(
    stops: Sequence[int], ends: Sequence[Any], beside: dict[str, Path]
) -> dict[str, Any]:
    """The generation_config.json of a model that has learnt to end answers with the tokens `stops`,
    in place of the one `beside` the weights; empty without such tokens."""
    if not stops:
        return {}
    values = read_object(beside.pop(GENERATION)) if GENERATION in beside else {}
    return {**values, "eos_token_id": [*stops, *(x for x in ends if x not in (None, *stops))]}


def files_beside_weights(config: GPTTrainConfig, kept: Path) -> dict[str, Path]:
    """Files to export beside weights and config.json: name -> file. The tokenizer of the data, and
    the files beside it, come first, since the model has learnt its ids. If the data has no
    tokenizer, or has that of the pretrained model, the run's copy of the pretrained model's files
    is taken."""
    data = config.data
    files = kept_files(kept)
    pretrained_tokenizer = None if config.init_from is None else config.init_from / TOKENIZER
    tokenizer = data.tokenizer
    if tokenizer is not None and not (tokenizer == pretrained_tokenizer and TOKENIZER in files):
        _require_file(tokenizer, "data.tokenizer")
        # The files of one tokenizer belong together.
        files = {name: path for name, path in files.items() if name == GENERATION}
        files |= files_of_tokenizer(tokenizer.parent) | {TOKENIZER: tokenizer}
    if data.chat_template is not None:
        _require_file(data.chat_template, "data.chat_template")
        # It is that of conversations with tools too.
        files = {name: path for name, path in files.items() if TEMPLATES_FOLDER not in name}
        files[TEMPLATE_FILE] = data.chat_template
    return files


def _require_file(path: Path, name: str) -> None:
    if not path.is_file():
        raise InputError(
            f"{name} of a run must be there for its export; got {str(path)!r}, which is gone or "
            f"elsewhere than under {str(Path.cwd())!r}. Put it back, or correct {name} in the "
            "config.json of the run; null leaves it out."
        )


def token_ids(config: GPTTrainConfig, tokenizer: Path | None, kept: Path) -> dict[str, int | None]:
    """The special tokens of config.json, if the exported tokenizer is not `kept`, the one that the
    model came with, which may not exist."""
    if tokenizer is None or tokenizer == kept:
        return {}
    if kept.is_file() and kept.read_bytes() == tokenizer.read_bytes():
        return {}
    end = config.data.end_of_document
    opened = FileTokenizer(tokenizer, end_of_document=end, vocab_size=config.model.vocab_size)
    return {
        "bos_token_id": None,
        "eos_token_id": opened.end_of_document,
        "pad_token_id": None,
    }


def config_values(
    config: GPTTrainConfig, values: Mapping[str, Any] | None, dtype: str, *, note: Any = print
) -> dict[str, Any]:
    """The config.json of a run: its pretrained model's, with the changes of the run."""
    model = config.model
    if values is not None and model.scores:
        values = {**values, **score_values(text_values(values, CONFIG)["model_type"])}
    if values is None:
        exported = to_values(model, length=config.seq_len, dtype=dtype)
    else:
        described = describe(values, CONFIG)
        family = FAMILIES[described.family]
        length_key = family.in_file(LENGTH)
        exported = {family.in_file(key): value for key, value in values.items()}
        exported["torch_dtype"] = dtype
        if plain(described.model).rope != plain(model).rope:
            # The positions are stretched: the model is for longer sequences now.
            length = rope_length(model.rope, max(described.length, config.seq_len))
            exported = {name: value for name, value in exported.items() if name not in ROPE}
            exported |= rotary_values(model) | {length_key: length}
        if without_rope(described.model) != without_rope(model):
            # Flags have changed more than positions.
            length = exported.get(length_key, config.seq_len)
            exported = {name: value for name, value in exported.items() if name != "layer_types"}
            tokens = {name: x for name, x in exported.items() if name.endswith("_token_id")}
            exported |= to_values(model, length=length, dtype=dtype) | tokens
        length = exported.get(length_key)
        if isinstance(length, int) and config.seq_len > length:
            # Servers refuse or cut what is longer.
            raised = exported | {length_key: config.seq_len}
            if _same_model(raised, exported):
                exported = raised
            else:
                note(
                    f"{CONFIG} keeps {length_key}={length}, on which its model "
                    f"depends, though the rows of the run have {config.seq_len} tokens"
                )
    again = describe(exported, CONFIG).model
    assert without_rope(again) == without_rope(model), "a config.json says what it was made of"
    return exported


def _same_model(values: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    try:
        return describe(values, CONFIG).model == describe(other, CONFIG).model
    except UnsupportedError:
        return False
