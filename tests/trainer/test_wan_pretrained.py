"""A Wan in the format of diffusers: read, trained, and written; an error for all that differs."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import startrail_jax as st
from pretrained import save_adapters, save_in_types
from programs import make_program, make_wan_config
from refusals import refused
from startrail_jax.errors import InputError, UnsupportedError
from train import read_command_line
from trainer.config import LoraConfig, MeshConfig
from trainer.dit.export import main as export
from trainer.dit.wan.config import FlowConfig
from trainer.dit.wan.config_json import DEFAULTS, model_of, read_config, to_values
from trainer.dit.wan.export import LORA_FILE, export_wan
from trainer.dit.wan.pretrained import open_wan
from trainer.parallel.state import initial_state
from trainer.pretrained import import_pretrained

REFERENCES = Path(__file__).parents[1] / "parity" / "wan"
CASES = sorted(path.name for path in REFERENCES.iterdir())
TENSORS = "diffusion_pytorch_model.safetensors"


def make_config(folder, run_dir, **changes):
    model = dataclasses.replace(read_config(folder), dtype="float32", text_tokens=4)
    changes = dict(devices=1, steps=0) | changes
    return dataclasses.replace(
        make_wan_config(size=(2, 4, 4)), model=model, init_from=folder, run_dir=run_dir, **changes
    )


@pytest.mark.slow_except_every(3)
@pytest.mark.parametrize("mesh", [{}, dict(devices=8, mesh=MeshConfig(tensor=2, ring=4))])
@pytest.mark.parametrize("name", CASES)
def test_what_is_imported_is_exported_bit_for_bit(name, mesh, tmp_path):
    folder = REFERENCES / name
    config = make_config(folder, tmp_path / "run", **mesh)
    import_pretrained(config)
    export([str(config.run_dir), str(tmp_path / "out")])
    one, other = (load_file(x / TENSORS) for x in (folder, tmp_path / "out"))
    assert one.keys() == other.keys()
    for name, x in one.items():
        np.testing.assert_array_equal(other[name], x)
    one, other = (json.loads((x / "config.json").read_text()) for x in (folder, tmp_path / "out"))
    assert other == {key: x for key, x in one.items() if key != "_diffusers_version"}


def copied(folder, type_of):
    """A copy of a reference whose tensors have other types, and these tensors."""
    shutil.copytree(REFERENCES / "t2v", folder, copy_function=shutil.copyfile)
    return save_in_types(folder, type_of, TENSORS)


def is_wide(name):
    """diffusers keeps tables, norms and the embedding of times in float32 in a model of 16 bits."""
    return any(part in name for part in ("scale_shift_table", "norm", "time_embedder"))


def test_tensors_keep_their_types(tmp_path):
    folder = tmp_path / "mixed" / "transformer"
    tensors = copied(folder, lambda name: "float32" if is_wide(name) else "bfloat16")
    config = make_config(folder.parent, tmp_path / "run")
    import_pretrained(config)
    export_wan(config.run_dir, config, tmp_path / "out", shard_bytes=4000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    found = {name: x for file in files for name, x in load_file(file).items()}
    for name, x in tensors.items():
        assert found[name].dtype == x.dtype
        np.testing.assert_array_equal(found[name], x)
    # What is wide among others of 16 bits stays so.
    export_wan(config.run_dir, config, tmp_path / "half", dtype="float16")
    for name, x in load_file(tmp_path / "half" / TENSORS).items():
        assert x.dtype.name == ("float32" if is_wide(name) else "float16")


@pytest.mark.slow_except_every(3)
@pytest.mark.parametrize(
    ("file", "activations"),
    [
        ("float32", "float32"),
        ("float32", "bfloat16"),
        ("float16", "bfloat16"),
        ("mixed", "bfloat16"),
    ],
)
def test_adapters_are_exported_alone_or_merged(file, activations, tmp_path):
    """Added to the tensors of the file, whatever the type in which a run keeps them."""
    targets = ("query", "out", "up", "down")
    kinds = {True: "float32", False: "bfloat16"}
    folder = tmp_path / "folder"
    base = copied(folder, lambda name: kinds[is_wide(name)] if file == "mixed" else file)
    lora = LoraConfig(rank=2, alpha=3.0, targets=targets)
    config = make_config(folder, tmp_path / "run", lora=lora)
    model = dataclasses.replace(config.model, dtype=activations)
    config = dataclasses.replace(config, model=model)
    import_pretrained(config)
    save_adapters(config)
    export([str(config.run_dir), str(tmp_path / "alone")])
    export([str(config.run_dir), str(tmp_path / "merged"), "--merge"])
    adapters = load_file(tmp_path / "alone" / LORA_FILE)
    merged = load_file(tmp_path / "merged" / TENSORS)
    of_peft = load_file(tmp_path / "alone" / "adapter_model.safetensors")
    for name, x in adapters.items():
        named = name.replace("transformer.", "base_model.model.", 1)
        np.testing.assert_array_equal(of_peft[named], x)
    stems = {name.removeprefix("transformer.").rpartition(".lora_A")[0] for name in adapters} - {""}
    # Both attentions have adapters.
    of_block = ("attn1.to_q", "attn1.to_out.0", "attn2.to_q", "attn2.to_out.0")
    of_block = (*of_block, "ffn.net.0.proj", "ffn.net.2")
    assert stems == {f"blocks.{i}.{name}" for i in range(2) for name in of_block}
    assert base.keys() == merged.keys()
    for name, x in merged.items():
        assert x.dtype == base[name].dtype
        stem = name.removesuffix(".weight")
        if stem not in stems or not name.endswith(".weight"):
            np.testing.assert_array_equal(x, base[name])
            continue
        a, b = (adapters[f"transformer.{stem}.lora_{x}.weight"].astype(np.float64) for x in "AB")
        wanted = base[name].astype(np.float64) + b @ a
        rounded = 2 * float(ml_dtypes.finfo(x.dtype).eps) if file != "float32" else 1e-5
        np.testing.assert_allclose(x.astype(np.float64), wanted, rtol=rounded, atol=1e-6)


def test_a_folder_is_enough_to_begin_with(tmp_path):
    folder = tmp_path / "Wan-Diffusers" / "transformer"
    shutil.copytree(REFERENCES / "i2v_2_1", folder)
    flags = f"--init-from {folder.parent} --lora.rank 4 --model.dtype float32"
    config = read_command_line(flags.split()).settings
    assert (config.kind, config.run_dir.name) == ("wan", "Wan-Diffusers")
    assert config.optimizer.learning_rate == 1e-4
    assert config.model == dataclasses.replace(read_config(folder), dtype="float32")
    assert (config.model.first_frame, config.model.image_dim) == ("channels", 6)
    assert config.diffusion == FlowConfig(shift=3.0)
    # A recipe keeps what the folder does not say.
    flags = f"dit_video --init-from {REFERENCES / 't2v'} --model.first-frame time"
    model = read_command_line(flags.split()).settings.model
    assert (model.text_tokens, model.first_frame, model.heads) == (2, "time", 2)


def test_models_in_other_formats_are_named(tmp_path):
    """A Wan as it was first published, and a pipeline of another kind."""
    for number, (name, values) in enumerate(
        (("config.json", {"_class_name": "WanModel", "dim": 1536}), ("model_index.json", {}))
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / name).write_text(json.dumps(values))
        with refused(InputError, "a model whose name ends in -Diffusers"):
            read_command_line(["--init-from", str(folder)])


@pytest.mark.parametrize(
    ("name", "index", "expected"),
    [
        ("transformer", {"boundary_ratio": 0.875}, (0.875, 1.0)),
        ("transformer_2", {"boundary_ratio": 0.875}, (0.0, 0.875)),
        ("transformer", {"boundary_ratio": None}, (0.0, 1.0)),
    ],
)
def test_two_models_have_their_own_times(name, index, expected, tmp_path):
    shutil.copytree(REFERENCES / "t2v", tmp_path / name)
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    for first in ([], ["wan_1_3b"]):
        flags = [*first, "--init-from", str(tmp_path / name)]
        assert read_command_line(flags).settings.diffusion.range == expected


def test_state_begins_with_the_weights_and_their_average(tmp_path):
    config = make_config(REFERENCES / "t2v", tmp_path / "run", ema_decay=0.9, steps=1)
    program = make_program(config, st.Degrees())
    with open_wan(config, program.state_shapes.base) as initial:
        state = program.begin_with(initial.read(program.state_shapes.base))
    again = initial_state(config, program.optimizer, state.weights)
    for x, y in zip(*map(jax.tree.leaves, (state, again)), strict=True):
        np.testing.assert_array_equal(x, y)


def test_published_models_are_known():
    """The config.json of the models of Wan-AI, as far as they differ from the defaults."""
    small = dict(num_attention_heads=12, ffn_dim=8960, num_layers=30)
    image = dict(in_channels=36, image_dim=1280, added_kv_proj_dim=5120)
    fast = dict(num_attention_heads=24, ffn_dim=14_336, num_layers=30)
    of_5b = fast | dict(in_channels=48, out_channels=48)
    widths = [model_of(x, "it").width for x in ({}, small, image, of_5b)]
    assert widths == [5120, 1536, 5120, 3072]
    known = DEFAULTS | {"_class_name": "WanTransformer3DModel"}
    for values in ({}, small, image, of_5b, dict(cross_attn_norm=False, eps=1e-5)):
        assert to_values(model_of(values, "it")) == known | values


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        (dict(vace_layers=[0]), UnsupportedError, "vace_layers"),
        (dict(num_layers=0), InputError, "num_layers"),
        (dict(ffn_dim="8960"), InputError, "ffn_dim"),
        (dict(patch_size=[2, 2]), InputError, "patch_size"),
        (dict(patch_size=4), InputError, "patch_size"),
        (dict(qk_norm=None), UnsupportedError, "qk_norm"),
        (dict(image_dim=1280), UnsupportedError, "added_kv_proj_dim"),
        (dict(pos_embed_seq_len=514), UnsupportedError, "pos_embed_seq_len"),
        (dict(in_channels=20), UnsupportedError, "in_channels"),
        (dict(eps=True), InputError, "eps"),
    ],
)
def test_models_that_are_not_supported_are_refused(values, error, words):
    with refused(error, words):
        model_of(values, "config.json")


@pytest.mark.parametrize(
    ("damage", "flags", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), {}, "init_from"),
        (lambda folder: (folder / "config.json").write_text("{}"), {}, "init_from"),
        (lambda folder: (folder / TENSORS).unlink(), {}, TENSORS),
        (lambda folder: (folder / TENSORS).write_bytes(b"1"), {}, "whole safetensors file"),
        (lambda folder: save_file({"x": np.zeros(2)}, folder / TENSORS), {}, "not in the files"),
        (lambda folder: None, {"text_norm": False}, "model.text_norm=False"),
    ],
)
def test_folder_that_is_not_that_of_the_model_is_refused(damage, flags, words, tmp_path):
    folder = tmp_path / "folder"
    shutil.copytree(REFERENCES / "t2v", folder)
    config = make_config(folder, tmp_path / "run")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **flags))
    damage(folder)
    shapes = make_program(config, st.Degrees()).state_shapes.base
    with refused(InputError, words), open_wan(config, shapes):
        pass


def test_there_must_be_adapters_to_merge(tmp_path):
    config = make_config(REFERENCES / "t2v", tmp_path / "run")
    import_pretrained(config)
    with refused(InputError, "--merge"):
        export_wan(config.run_dir, config, tmp_path / "out", merge=True)
