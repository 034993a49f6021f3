"""The training program: its flags, what it refuses, and going on after a stop."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import tyro

import train
from configs.dit import dit_digits
from configs.gpt import RECIPES, gpt_tiny
from models.config import RopeConfig
from programs import interrupt_after, logged_steps, run_python
from refusals import refused
from startrail_jax.errors import InputError, UnsupportedError
from trainer.config import AttentionConfig, MeshConfig
from trainer.gpt.config import GPTTrainConfig, TextSampleConfig
from trainer.loop import Losses
from trainer.run.folder import current_versions

pytestmark = pytest.mark.usefixtures("shared")

TINY = (
    "--model.width 24 --model.layers 2 --model.heads 8 --model.kv-heads 2 --model.head-dim 4 "
    "--model.mlp-width 32 --seq-len 64 --batch-size 4 --validation-sequences 4 --log-every 1 "
    "--sample.length 0 --no-tensorboard --checkpoint.every 1000 "
)


RING = "--devices 8 --mesh.c 1 --zero 3"


def parse(flags):
    return tyro.cli(GPTTrainConfig, default=gpt_tiny(), args=flags.split())


def run(folder, flags="", *, steps):
    return train.train(parse(f"{TINY} --steps {steps} --run-dir {folder} {flags}"))


@pytest.mark.slow
def test_a_run_on_whole_documents_goes_on_with_each_of_them_once(tmp_path, monkeypatch, capsys):
    flags = f"{RING} --data.batches documents --data.draw 64"
    undisturbed = run(tmp_path / "undisturbed", flags, steps=5)
    assert "of the tokens are sent nowhere" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3)
        first = run(tmp_path / "run", flags, steps=5)
    assert first.train + run(tmp_path / "run", flags, steps=5).train == undisturbed.train
    with refused(InputError, "--data.batches documents there, rows now"):
        run(tmp_path / "run", RING, steps=5)


@pytest.mark.slow
def test_an_interrupted_run_goes_on_as_if_nothing_had_been(tmp_path, monkeypatch, capsys):
    undisturbed = run(tmp_path / "undisturbed", RING, steps=7)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 4)
        first = run(tmp_path / "run", RING, steps=7)
    assert (len(first.train), first.validation) == (4, None)
    *_, advice, last = capsys.readouterr().out.splitlines()
    assert advice.startswith("to go on: ")
    assert f"train.py {tmp_path / 'run'}/config.json, or the same command" in advice
    assert last == f"interrupted after step 4, which is saved in {tmp_path / 'run'}"
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    (entry,) = json.loads((tmp_path / "run/versions.json").read_text())
    assert entry == {"after_step": 0, "versions": current_versions()}
    older = {"after_step": 0, "versions": current_versions() | {"jax": "0.1"}}
    (tmp_path / "other/versions.json").write_text(json.dumps([older]))

    same = run(tmp_path / "run", RING, steps=7)
    assert "other versions" not in capsys.readouterr().out
    assert first.train + same.train == undisturbed.train
    assert same.validation == undisturbed.validation

    # Fewer devices, C = 2, other shards of the state, and rings inside of two nodes.
    degrees = {"data": 1, "group": 1, "ring": 8, "team": 1, "head": 1, "tensor": 1}
    assert json.loads((tmp_path / "other/mesh.json").read_text()) == {"degrees": degrees}
    changed = "--devices 4 --mesh.c 2 --zero 1 --attention.keep-gathered"
    placed = "--mesh.order rings_inside --mesh.devices-per-node 2"
    other = run(tmp_path / "other", f"{changed} {placed}", steps=7)
    out = capsys.readouterr().out
    assert "nodes: 2 of 2 devices; axes from slow to fast: group, team; across nodes: group" in out
    assert f"began with: jax 0.1 there, {jax.__version__} now\n" in out
    assert len(other.train) == 3
    np.testing.assert_allclose(first.train + other.train, undisturbed.train, rtol=1e-5)
    np.testing.assert_allclose(other.validation, undisturbed.validation, rtol=1e-5)
    for folder in ("run", "other"):
        assert logged_steps(tmp_path / folder) == list(range(1, 8))

    # The newest checkpoint is damaged: the run goes on from the one before.
    (tmp_path / "run" / "checkpoints" / "7" / "checksums.json").write_text("{}")
    again = run(tmp_path / "run", f"{RING} --checkpoint.every 1", steps=7)
    assert again == Losses(undisturbed.train[4:], undisturbed.validation, is_whole=True)
    assert "the checkpoint of step 4 is used: steps 5 to 7 are lost" in capsys.readouterr().out
    assert logged_steps(tmp_path / "run") == list(range(1, 8))
    # What a save took is in the metrics of a later step.
    later = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-2:]
    assert max(json.loads(line).get("checkpoint_seconds", 0) for line in later) > 0

    # A run that has all its steps is measured again.
    again = run(tmp_path / "undisturbed", RING, steps=7)
    assert again == Losses([], undisturbed.validation, is_whole=True)


@pytest.mark.slow
def test_samples_during_training_change_no_loss(tmp_path, capsys):
    plain = run(tmp_path / "plain", RING, steps=5)
    for zero in (1, 3):
        flags = f"{RING} --zero {zero} --sample.every 2 --sample.length 8"
        assert run(tmp_path / str(zero), flags, steps=5).train == pytest.approx(plain.train)
        out = capsys.readouterr().out
        assert [x for x in range(9) if f"samples after step {x}:" in out] == [2, 4]
        assert out.count("--- continued by the model") == 3


@pytest.mark.quick
def test_flags_set_the_config():
    config = parse("--mesh.order head_first --mesh.devices-per-node 4")
    assert config.mesh == MeshConfig(default_c=2, order=("head_first",), devices_per_node=4)
    config = parse("--mesh.order data group team ring head tensor")
    assert config.mesh.order == ("data", "group", "team", "ring", "head", "tensor")
    config = parse("--mesh.team 4 --mesh.group 1 --steps 700 --model.kv-heads 4 --zero 3")
    assert config.mesh == MeshConfig(default_c=2, team=4, group=1)
    assert parse("--mesh.c 4 --mesh.ring 2").mesh.degrees == dict(
        data=None, team=4, group=4, ring=2, head=None, tensor=None
    )
    assert (config.steps, config.model.kv_heads, config.zero) == (700, 4, 3)
    config = parse("--model.windows 512 512 none --model.rope.bases 1e4 none")
    assert config.model.layer_windows == (512, 512, None, 512)
    assert config.model.layer_bases == (1e4, None, 1e4, None)
    assert parse("") == gpt_tiny()
    assert gpt_tiny().seq_len >= 1024


def test_every_recipe_has_a_run_folder_of_its_own():
    assert len({recipe().run_dir for recipe in RECIPES.values()}) == len(RECIPES)


GLOBAL = RopeConfig(scaling="linear", factor=2.0, stretches="global")
LLAMA3 = dict(scaling="llama3", factor=2.0, original_length=9, turns=(1.0, 4.0))
# Changes that the error names with their values; or a change, and the words that it must have.
WRONG_PARTS = {
    None: [
        *({name: 0} for name in ("steps", "devices", "tile", "non_finite_limit")),
        *(
            {"seed": -1},
            {"gradient_accumulation": 3},
            ({"sample": TextSampleConfig(length=1024)}, "sample.length=1024, seq_len=1024"),
        ),
        *({"profile": x} for x in ((3, 2), (800, 801))),
        ({"attention": AttentionConfig(keep_gathered=True), "remat": "full"}, "remat='full'"),
        ({"mesh": MeshConfig(data=3)}, "batch_size=3"),
        ({"offload": True}, "remat='auto'"),
        ({"offload": True, "remat": "none"}, "remat='none'"),
        ({"zero": 1, "zero_axes": ()}, "zero=1"),
        ({"zero": 1, "zero_axes": ("team", "team")}, "zero_axes"),
        ({"zero_axes": ("team",)}, "zero=0"),
    ],
    "mesh": [
        *({"team": 0}, {"c": 0}, {"devices_per_node": 0}),
        ({"c": 4, "group": 2}, "got mesh.c=4 and mesh.group=2. Give one of them"),
        ({"c": 4, "team": 4, "group": 2}, "mesh.team=4 and mesh.group=2"),
        ({"order": ("ring", "team")}, "each of data ring group team head tensor once;"),
        ({"order": ("ring",)}, "--mesh.order"),
        *(({"order": x}, "must be a named order") for x in ((), ("head_first", "rings_inside"))),
    ],
    "model": [
        *({name: 0} for name in ("vocab_size", "scale_dim")),
        *({"softcap": 0.0}, {"norm_eps": 0.0}, {"kv_heads": 3}, {"head_dim": 5}),
        *({"windows": ()}, {"windows": (0,)}),
        ({"windows": (9,) * 9}, "layers=4"),
        ({"rope": GLOBAL, "windows": (9,)}, "stretches='global'"),
    ],
    "model.rope": [
        *({"bases": (1.0,)}, {"bases": ()}, {"scaling": "yarn"}),
        ({"factor": 0.5}, "must be at least 1; got factor=0.5"),
        *({"turns": (4.0, 1.0)}, {"attention_factor": 1.0}),
        *(({name: x}, "scaling='none'") for name, x in (("factor", 2.0), ("original_length", 9))),
        ({"scaling": "yarn", "factor": 2.0}, "_length=None"),
        (LLAMA3, "turns=(1.0, 4.0"),
    ],
    "optimizer": [
        *({"learning_rate": 0.0}, {"clip_norm": float("inf")}),
        *({"warmup_fraction": 1.0}, {"weight_decay": -1.0}),
        ({"momentum": 0.9}, "optimizer.kind='muon'"),
        ({"kind": "lion", "epsilon": 1e-6}, "kind='lion'"),
        ({"decay_fraction": 0.1}, "optimizer.schedule='wsd'"),
        ({"schedule": "wsd", "warmup_fraction": 0.9}, "warmup_fraction=0.9"),
        ({"schedule": "wsd", "decay_fraction": 1.0}, "decay_fraction=1.0"),
    ],
    "data": [{"validation_fraction": 1.0}, {"end_of_document": -1}],
    "checkpoint": [{"keep": 0}],
    "lora": [
        ({"alpha": 3.0}, "lora.alpha needs adapters; got alpha=3.0 without a rank"),
        ({"rank": 0}, "lora.rank must be at least 1; got lora.rank=0"),
        ({"rank": 1, "alpha": -1.0}, "lora.alpha must be above 0 and finite; got alpha=-1.0"),
        ({"rank": 1, "targets": ("up", "up")}, "each once; got targets=up up"),
        ({"rank": 1, "targets": ()}, "each once; got targets=none"),
    ],
}
NPZ = {"path": Path("x.npz")}


WRONG_PARTS_OF_A_DIT = {
    None: [
        {"ema_decay": 1.0},
        ({"size": (1, 7, 8)}, "patch=(1, 2, 2"),
        ({"size": (0, 8, 8)}, "size=0"),
    ],
    "model": [
        *({"heads": 5}, {"classes": -1}),
        ({"width": 7, "heads": 1}, "width=7"),
        ({"patch": (1, 0, 2)}, "model.patch"),
    ],
    "diffusion": [{"dropout": 1.0}],
    "data": [
        *({"validation_fraction": 0.0}, {"latent_scale": 0.5}),
        ({"latent_scale": 0.0} | NPZ, "latent_scale=0.0"),
    ],
}


@pytest.mark.parametrize(
    ("recipe", "part", "row"),
    [
        (recipe, part, row)
        for recipe, table in ((gpt_tiny, WRONG_PARTS), (dit_digits, WRONG_PARTS_OF_A_DIT))
        for part, rows in table.items()
        for row in rows
    ],
)
def test_config_that_cannot_be_raises(recipe, part, row):
    config = recipe()
    for name in part.split(".") if part else ():
        config = getattr(config, name)
    change, *words = row if isinstance(row, tuple) else (row,)
    with refused(InputError, *words, **{} if words else change):
        replace(config, **change)


@pytest.mark.parametrize(
    ("flags", "error", "words"),
    [
        ("--mesh.head 16", InputError, ["product of the mesh degrees must", " 16 for 8 devices"]),
        ("--mesh.team 16", InputError, ["mesh degrees must divide", "team=16", "for 8 devices"]),
        ("--model.heads 4 --mesh.head 8", InputError, ["heads must be divisible by head * tensor"]),
        ("--mesh.ring 3", InputError, ["product of the mesh degrees must divide", "for 8 devices"]),
        (
            *("--devices 65", InputError),
            ["devices must be at most the number of devices; got devices=65, and there are 64"],
        ),
        (
            *("--model.mlp-width 33 --mesh.tensor 2", InputError),
            ["tensor must divide", "mlp", "size 33"],
        ),
        (
            *("--zero 3 --zero-axes data", InputError),
            ["zero=3 needs an axis", "Use --zero-axes ring group"],
        ),
        ("--offload --remat full", UnsupportedError, ["offload needs GPUs", "platform 'cpu'"]),
    ],
)
def test_what_does_not_fit_is_refused_before_there_is_a_run(flags, error, words, tmp_path):
    with refused(error, *words):
        run(tmp_path / "run", f"--devices 8 {flags}", steps=1)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_profile_traces_the_steps(tmp_path):
    run(tmp_path, f"{RING} --profile 2 3", steps=7)
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


def test_program_trains_evaluates_and_samples(tmp_path):
    flags = TINY.replace("--no-tensorboard", "") + (
        "--steps 3 --log-every 3 --validation-every 2 --sample.length 32 --sample.every 1 "
        "--devices 4 --mesh.data 2"
    )
    result = run_python("train.py", *flags.split(), "--run-dir", tmp_path)
    assert result.returncode == 0, result.stderr
    assert "mesh: data 2, group 1, ring 1, team 1, head 2, tensor 1\n" in result.stdout
    assert "step 3/3  train loss" in result.stdout
    assert "step 2/3  validation loss" in result.stdout
    lines = result.stdout.splitlines()
    last = [line for line in lines if line.startswith("validation loss")]
    assert len(last) == 1
    words = last[0].split()
    assert words[:2] + words[3:] == ["validation", "loss", "nats/byte"]
    assert 4.0 < float(words[2]) < 6.0
    starts = [x for x in lines if x.startswith(("samples after", "---", "step", "validation loss"))]
    sample = ["--- held-out text", "--- continued by the model"]
    assert starts[0:3] == ["samples after step 1:", *sample]
    assert starts[4:7] == ["samples after step 2:", *sample]
    assert starts[-3:] == [last[0], *sample]
    after = lines[lines.index(last[0]) + 1 :]
    assert "--- held-out text" in after
    assert list((tmp_path / "tensorboard").iterdir())
    (viewer,) = [line for line in lines if line.startswith("metrics in a browser: ")]
    assert viewer.endswith(f" -m tensorboard.main --logdir {tmp_path}/tensorboard")
    assert lines[-2].startswith("loss curve: ")
    assert lines[-1].startswith("next: ")
    assert lines[-1].endswith(f" sample.py {tmp_path}")

    # A run's own config is a recipe.
    again = train.read_command_line([str(tmp_path / "config.json"), "--steps", "2"])
    same = parse(f"{flags} --steps 2 --run-dir {tmp_path}")
    assert again.settings == same


def test_program_help_is_fast_and_lists_the_flags():
    script = "import sys, train; sys.argv[1:] = ['--help']; train.read_command_line(['--help'])"
    result = run_python("-X", "importtime", "-c", script)
    assert result.returncode == 0
    for name in ("data", "team", "ring", "group", "head", "tensor"):
        assert f"--mesh.{name}" in result.stdout
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "tyro" in imported
    assert not imported & {"jax", "flax", "numpy", "grain", "orbax"}
