"""Tiny pretrained models of `tests/parity/make_references.py`, and what is computed with them."""

import dataclasses
import functools
import json
import shutil
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

import startrail_jax as st
import train
from programs import make_program, options, shared_programs
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.config import LoraConfig
from trainer.data.opening import read_object
from trainer.gpt.batches import next_token_batch
from trainer.gpt.export.writing import export_run
from trainer.gpt.lora import peft_config, peft_tensors, text_prefix
from trainer.gpt.pretrained.config_json import read_description
from trainer.gpt.pretrained.defaults import pretrained as config_of
from trainer.gpt.pretrained.families.experts import BALANCE
from trainer.gpt.pretrained.families.table import FAMILIES, MULTIMODAL
from trainer.gpt.pretrained.initial import open_pretrained
from trainer.gpt.pretrained.tensors import places
from trainer.parallel.partition import path_name
from trainer.parallel.state import TrainState
from trainer.pretrained import import_pretrained
from trainer.tasks import load_train_config
from trainer.weights.adapters import write_merged
from trainer.weights.places import by_tensor

REFERENCES = Path(__file__).parent / "parity" / "references"
CASES = sorted(path.name for path in REFERENCES.glob("*"))
SCHEMES = {
    "one device": st.Degrees(),
    "StarTrail, C = 2": st.Degrees.startrail(8, c=2),
    "2D-Attention": st.Degrees(head=2, ring=4),
    "Ring Attention and tensor parallelism": st.Degrees(ring=2, tensor=4),
}
LOGITS, GRADIENTS = 1e-5, 1e-4
"""Largest difference, relative to the largest number of the array."""


def make_config(folder, **changes):
    """The config of a run that begins with a tiny model, in float32 and without ZeRO."""
    config = config_of(folder)
    model = dataclasses.replace(config.model, dtype="float32")
    data = dataclasses.replace(config.data, mask_documents=False)
    has_images = read_object(folder / "config.json").get("model_type") in MULTIMODAL
    options = dict(batch_size=2, seq_len=32, zero=0, remat="none", init_text_only=has_images)
    return dataclasses.replace(config, **dict(model=model, data=data) | options | changes)


def write_reward_model(path, head):
    """The tiny Qwen3 with a head [1, width] for rewards, as transformers saves it."""
    folder, tensors = REFERENCES / "qwen3", {"score.weight": head.astype(np.float32)}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    values = read_object(folder / "config.json") | {"pad_token_id": 0}
    values |= {"architectures": ["Qwen3ForSequenceClassification"]}
    values |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(values))
    return path


@contextmanager
def three_steps(folder, **changes):
    """The config and the losses of a run of three steps from a pretrained model, which is gone
    then."""
    model = shutil.copytree(REFERENCES / "llama", folder / "model")
    tokens = reference_of("llama")["tokens"]
    (folder / "data").mkdir()
    for name in ("train", "val"):
        np.save(folder / "data" / f"{name}.npy", tokens.ravel().astype(np.uint16))
    config = make_config(model, steps=3, run_dir=folder / "run", tensorboard=False, **changes)
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, path=(folder / "data",)),
        zero=3,
        validation_sequences=1,
        optimizer=dataclasses.replace(config.optimizer, learning_rate=3e-2),
        checkpoint=dataclasses.replace(config.checkpoint, every=2),
    )
    with shared_programs():
        losses = train.train(config)
        (model / "model.safetensors").rename(folder / "model.safetensors")
        yield config, losses


def with_adapters(family, targets, folder, size=1.0):
    """Random weights of a reference, in `base` and with adapters in `merged`; and the adapters."""
    lora = LoraConfig(rank=2, alpha=3.0, targets=targets)
    config = make_config(REFERENCES / family, lora=lora)
    kind = read_description(REFERENCES / family).family
    shapes = make_program(config, st.Degrees()).state_shapes.model
    rng = np.random.default_rng(0)
    arrays = {
        path_name(path): (size * rng.normal(size=x.shape)).astype(np.float32)
        for path, x in jax.tree_util.tree_leaves_with_path(shapes)
    }
    found = []
    for name, of_base in (("base", LoraConfig(rank=1, alpha=1e-30)), ("merged", lora)):
        (folder / name).mkdir()
        of_model, kept = functools.partial(places, model=config.model, family=kind), folder / name
        write_merged(arrays, of_model, of_base, kept, lambda _: np.float32, shard_bytes=10**9)
        found.append(load_file(kept / "model.safetensors"))
    text = text_prefix(config, kind)
    tensors = peft_tensors(arrays, np.float32, config.model, kind, text)
    return *found, tensors, peft_config(config, None, kind, note=print)


def save_adapters(config):
    """Makes a checkpoint with random adapters the only one of an imported run."""
    rng = np.random.default_rng(0)
    weights = jax.tree.map(
        lambda x: jax.device_put(rng.normal(size=x.shape).astype(np.float32), x.sharding),
        make_program(config, st.Degrees(tensor=2)).state_shapes.weights,
    )
    shutil.rmtree(config.run_dir / "checkpoints")
    with Checkpoints(config.run_dir / "checkpoints", keep=1) as checkpoints:
        checkpoints.save(1, TrainState(weights, ()), {})


def save_in_types(folder, type_of, file="model.safetensors"):
    """Gives the tensors of a model other types, by their names; returns them."""
    tensors = {name: x.astype(type_of(name)) for name, x in load_file(folder / file).items()}
    save_file(tensors, folder / file)
    return tensors


def compute(folder, tokens, scheme):
    """Logits, loss and gradients of a checkpoint, under the names that PyTorch gives them."""
    config = make_config(folder)
    found, rows = _compute(config, tokens, scheme)
    # No gradient reaches what is a buffer in transformers.
    for name in [x for x in rows if x.endswith(("e_score_correction_bias", "layer_scalar"))]:
        assert not rows.pop(name).any()
    has_loss = BALANCE in FAMILIES[read_description(folder).family].keys
    if has_loss and "experts" in config.model.layer_feed_forwards:
        # With and without the balancing loss, for a factor of 1.
        experts = dataclasses.replace(config.model.experts, balance_loss=1.0)
        model = dataclasses.replace(config.model, experts=experts)
        other, of_other = _compute(dataclasses.replace(config, model=model), tokens, scheme)
        found["balance"] = other["loss"] - found["loss"]
        for name, x in of_other.items():
            if name.endswith((".gate.weight", ".router.weight", ".router.layer.weight")):
                found[f"gradient of the balance {name}"] = x - rows[name]
    return found | {f"gradient {name}": x for name, x in rows.items()}


def _compute(config, tokens, scheme):
    program = make_program(config, SCHEMES[scheme])
    layout = program.attention.layout
    batch = jax.tree.map(
        lambda x, shape: jax.device_put(x, shape.sharding),
        next_token_batch(tokens, layout=layout),
        program.batch_shapes,
    )
    shapes = program.state_shapes.weights
    with open_pretrained(program.config, shapes) as initial:
        weights = initial.read(shapes)
        places = initial.places

    def run(weights, batch):
        return program.gradients(weights, batch), program.outputs(weights, batch)

    compiled = jax.jit(run).lower(weights, batch).compile(options(program))
    (loss, gradients), logits = compiled(weights, batch)
    found = {"loss": np.asarray(loss), "logits": layout.unpermute(np.asarray(logits))}
    return found, tensors_of(gradients, places)


def tensors_of(weights, places):
    """What is given for each weight, by the names of a pretrained model's tensors."""
    arrays = {
        path_name(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(weights)
    }
    tensors = {}
    for name, parts in by_tensor(places).items():
        rows = [
            places[path].to_tensor(places[path].weight_of(arrays[path], number))
            for path, number in parts
        ]
        share = places[parts[0][0]].share
        tensors[name] = rows[0] if share is None else share.joined(rows)
    return tensors


def compare(found, reference):
    """Asserts that all is as near as it must be; returns the largest differences."""
    assert found.keys() == reference.keys() - {"tokens"}
    # An expert that no token chose has no gradient: there, any difference is one.
    errors = {
        name: float(np.abs(x - reference[name]).max() / (np.abs(reference[name]).max() or 1))
        for name, x in found.items()
    }
    assert all(map(np.isfinite, errors.values())), errors
    gradients = max(error for name, error in errors.items() if name.startswith("gradient"))
    assert errors["logits"] <= LOGITS, errors
    assert errors["loss"] <= GRADIENTS, errors
    assert errors.get("balance", 0) <= LOGITS, errors
    assert gradients <= GRADIENTS, errors
    return f"{errors['logits']:.1e} {errors['loss']:.1e} {gradients:.1e}"


def reference_of(name):
    with np.load(REFERENCES / name / "reference.npz") as file:
        return dict(file)


def import_and_export(folder, run_dir, out, **options):
    """Imports a checkpoint into a run of no steps, and exports that."""
    config = make_config(folder, steps=0, run_dir=run_dir, devices=1, tensorboard=False)
    import_pretrained(config)
    return export_run(run_dir, load_train_config(run_dir / "config.json"), out, **options)
