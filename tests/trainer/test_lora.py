"""Low-rank adapters: trained beside a frozen model, on every mesh, and taken to other programs."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import pretrained
import sample
import startrail_jax as st
import train
from models.config import ExpertsConfig, RopeConfig
from programs import SMALL, make_config, make_program, train_steps
from refusals import refused
from startrail_jax.errors import InputError
from trainer.checkpoints.reading import CheckpointError
from trainer.config import LoraConfig
from trainer.data.batches import place
from trainer.gpt.batches import next_token_batch
from trainer.gpt.export.writing import export_run
from trainer.gpt.lora import peft_config, text_prefix
from trainer.gpt.pretrained.initial import open_pretrained
from trainer.parallel.state import bytes_of_device, describe_state
from trainer.pretrained import import_pretrained
from trainer.pretrained import read_command_line as read_import
from trainer.tasks import load_train_config
from trainer.weights.adapters import restore_model

ALL = ("query", "key", "value", "out", "gate", "up", "down")
EVERY = (*ALL, "out_gate", "decay", "beta")
EXPERTS = ("expert_gate", "expert_up", "expert_down")
CONFIG = make_config(
    SMALL | dict(dtype="bfloat16"), seq_len=64, lora=LoraConfig(rank=4, targets=ALL)
)
MIXED = make_config(
    SMALL
    | dict(
        feed_forwards=("mlp", "experts"), experts=ExpertsConfig(count=4, width=32, balance_loss=0.0)
    ),
    seq_len=64,
    steps=3,
    lora=LoraConfig(rank=4, targets=(*ALL, *EXPERTS)),
)


def batch(program, tokens):
    layout = program.attention.layout
    return place(next_token_batch(tokens, layout=layout), program.batch_sharding)


def random_batch(program, seed=0):
    return batch(program, np.random.default_rng(seed).integers(48, size=(4, 65)))


def steps_of(program, state):
    """Losses and norms of three steps, from a state of the host."""
    found, _ = train_steps(program, state, (random_batch(program, step) for step in range(3)))
    return found.ravel().tolist()


@pytest.fixture(scope="module")
def one_device():
    """A state whose adapters add something, and the losses of its steps on one device."""
    program = make_program(MIXED, st.Degrees())
    state = jax.device_get(program.initialise())
    rng = np.random.default_rng(0)
    weights = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype) / 8, state.weights)
    state = state._replace(weights=weights)
    return state, steps_of(program, state)


@pytest.mark.slow
def test_adapters_begin_with_the_logits_of_the_model_bit_for_bit():
    """In bfloat16, where sums of products are rounded."""
    base = make_program(dataclasses.replace(CONFIG, lora=LoraConfig()), st.Degrees())
    adapted = make_program(CONFIG, st.Degrees())
    before, state = base.initialise(), adapted.initialise()
    tokens = random_batch(base)
    expected = jax.jit(base.outputs)(before.weights, tokens)
    found = jax.jit(adapted.outputs)(state.model, tokens)
    np.testing.assert_array_equal(expected, found)
    assert np.asarray(expected).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("degrees", "changes"),
    [
        (
            st.Degrees.startrail(8, c=2),
            dict(zero=2, gradient_accumulation=2, remat="attention_saved", tile=8),
        ),
        (st.Degrees(data=2, ring=2, tensor=2), dict(zero=3)),
        (st.Degrees(head=2, tensor=4), dict(zero=1, remat="full")),
    ],
    ids=str,
)
def test_losses_do_not_depend_on_the_mesh(one_device, degrees, changes):
    state, expected = one_device
    found = steps_of(make_program(dataclasses.replace(MIXED, **changes), degrees), state)
    np.testing.assert_allclose(found, expected, rtol=2e-5)


def test_frozen_weights_have_no_gradient_and_no_wide_copy():
    """In the program that XLA gets; and the state is that of the closed form, to the byte."""
    config = make_config(
        dict(dtype="bfloat16"), lora=LoraConfig(rank=4, targets=ALL), ema_decay=0.9
    )
    program = make_program(config, st.Degrees())
    shapes = program.state_shapes
    text = program.train_step.lower(shapes, program.batch_shapes).as_text()
    assert "tensor<3x64x80xbf16>" in text
    assert "tensor<3x64x80xf32>" not in text
    products = set(re.findall(r"dot_general.* -> tensor<(\S+)>", text))
    assert "64x4xf32" in products  # The gradient of an adapter.
    assert not products & {f"{a}x{b}xf32" for a, b in [(64, 80), (80, 64), (64, 96), (96, 64)]}

    formula = program.memory()
    assert formula.state_bytes == bytes_of_device(shapes)
    assert formula["frozen weights"] == bytes_of_device(shapes.frozen)
    adapters = bytes_of_device(shapes.weights)
    assert formula["gradients"] == formula["weights"] == formula["average"] == adapters
    lines = describe_state(shapes)
    assert lines[0] == "model: 0.11 million parameters, of which adapters are trained: 0.01 million"
    size = f"{bytes_of_device(shapes.frozen) / 2**20:.1f} MiB in bfloat16"
    assert lines[1].endswith(f", frozen weights {size}")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    lora = LoraConfig(rank=3, alpha=5.0, targets=ALL, base_dtype="bfloat16")
    folder = tmp_path_factory.mktemp("lora")
    with pretrained.three_steps(folder, devices=8, lora=lora) as (config, losses):
        yield config, losses.train


@pytest.mark.slow
def test_run_goes_on_from_its_checkpoint_to_the_same_bits(run):
    config, losses = run
    assert losses[2] < losses[0]
    checkpoints = config.run_dir / "checkpoints"
    last = (checkpoints / "3" / "checksums.json").read_text()
    shutil.rmtree(checkpoints / "3")
    # The weights of the model are those that the run has saved.
    assert train.train(config).train == losses[2:]
    assert (checkpoints / "3" / "checksums.json").read_text() == last
    names = json.loads(last)["arrays"]
    assert all("lora_" in name for name in names if name.startswith("weights/"))
    moments = [name for name in names if name.startswith("optimizer/") and "blocks" in name]
    assert len(moments) == 2 * 2 * len(ALL)
    frozen = json.loads((config.run_dir / "frozen" / "0" / "checksums.json").read_text())["arrays"]
    kinds = {name.removesuffix("/value"): kind for name, (kind, _) in frozen.items()}
    assert kinds["frozen/blocks/mlp/up/kernel"].startswith("bfloat16")
    assert kinds["frozen/norm/scale"].startswith("float32")
    assert len(kinds) == 12


def logits_of(weights, program):
    tokens = pretrained.reference_of("llama")["tokens"]
    return np.asarray(program.outputs(weights, batch(program, tokens)))


@pytest.mark.slow
def test_export_and_samples_give_the_logits_of_the_adapters(run, tmp_path, capsys):
    """Merged into the weights; and as PEFT has them, B A beside every kernel of transformers."""
    config, _ = run
    config = load_train_config(config.run_dir / "config.json")
    adapted = make_program(dataclasses.replace(config, zero=0, devices=1), st.Degrees())
    weights, step = restore_model(config.run_dir, config, adapted.state_shapes.model, note=print)
    assert step == 3
    expected = logits_of(weights, adapted)

    # Over eight devices, each of which holds a part of the frozen weights.
    prompt = pretrained.reference_of("llama")["tokens"][0, :8]
    flags = ["--prompt", " ".join(map(str, prompt)), "--tokens", "1", "--temperature", "0"]
    capsys.readouterr()
    sample.sample([str(config.run_dir), *flags])
    assert capsys.readouterr().out.split() == [str(expected[0, 7].argmax())]

    merged = tmp_path / "merged"
    done = export_run(config.run_dir, config, merged, merge=True, dtype="float32")
    assert (done.dtype, done.files) == ("float32", 1)
    plain = dataclasses.replace(config, lora=LoraConfig(), init_from=merged, zero=0, devices=1)
    program = make_program(plain, st.Degrees())
    with open_pretrained(plain, program.state_shapes.weights) as initial:
        weights = initial.read(program.state_shapes.weights)
    found = logits_of(weights, program)
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()

    adapters = tmp_path / "adapters"
    done = export_run(config.run_dir, config, adapters)
    described = json.loads((adapters / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"]) == (3, 5.0)
    assert described["base_model_name_or_path"] == str(config.init_from)
    assert not (adapters / "config.json").exists()
    tensors = load_file(adapters / "adapter_model.safetensors")
    assert {re.sub(r"[.]\d+[.]", ".0.", name) for name in tensors} == {
        f"base_model.model.model.layers.0.{name}.lora_{letter}.weight"
        for letter in "AB"
        for name in (
            *(f"self_attn.{x}_proj" for x in "qkvo"),
            *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
        )
    }
    assert set(described["target_modules"]) == {name.split(".")[-3] for name in tensors}
    whole = load_file(merged / "model.safetensors")
    original = load_file(config.init_from.parent / "model.safetensors")
    for name, b in tensors.items():
        if "lora_B" in name:
            base = name.removeprefix("base_model.model.").replace("lora_B.", "")
            added = 5 / 3 * b @ tensors[name.replace("lora_B", "lora_A")]
            assert np.abs(added).max() > 1e-3
            rounded = original[base].astype("bfloat16").astype(np.float32)
            np.testing.assert_allclose(rounded + added, whole[base], atol=1e-6)


@pytest.mark.slow
def test_adapters_of_a_model_that_flags_changed_are_not_exported_without_it(run, tmp_path):
    """PEFT would put them on the model of the folder, which computes something else."""
    config, _ = run
    rope = RopeConfig(scaling="linear", factor=2.0)
    changed = dataclasses.replace(config.model, rope=rope, windows=(5,))
    other = dataclasses.replace(config, model=changed)
    match = r"with windows=\('none',\) there and \(5,\) here, .*scaling=none there .*Use --merge"
    with pytest.raises(InputError, match=match):
        export_run(config.run_dir, other, tmp_path / "out")
    # Types of activations are no part of the model.
    half = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="bfloat16"))
    moved = dataclasses.replace(half, init_from=Path("models/mine"))
    base, notes = config.model, []
    assert peft_config(half, base, "llama", note=notes.append)["base_model_name_or_path"] == str(
        config.init_from
    )
    assert notes == []
    described = peft_config(moved, base, "llama", note=notes.append)
    assert described["base_model_name_or_path"] == "models/mine"
    assert notes[0].startswith("the adapters name 'models/mine' as their model, which is no folder")


@pytest.mark.slow
def test_adapters_are_never_exchanged(run, tmp_path):
    """Neither their rank when a run goes on, nor a file that is damaged."""
    config, _ = run
    other = dataclasses.replace(config, lora=LoraConfig(rank=4), allow_changes=True)
    with refused(InputError, "--lora.rank"):
        train.train(other)
    copy = shutil.copytree(config.run_dir, tmp_path / "run")
    path = copy / "frozen" / "0" / "checksums.json"
    path.write_text(path.read_text().replace('"step": 0', '"step": 1'))
    shapes = make_program(dataclasses.replace(config, zero=0), st.Degrees()).state_shapes.model
    with refused(CheckpointError, "frozen/0"):
        restore_model(copy, config, shapes, note=print)


@pytest.mark.slow
def test_import_for_adapters_needs_space_for_one_copy_of_the_model(tmp_path, monkeypatch):
    model = pretrained.REFERENCES / "llama"
    size = (model / "model.safetensors").stat().st_size
    run = dict(steps=0, devices=1, run_dir=tmp_path / "run", tensorboard=False)
    config = pretrained.make_config(model, lora=LoraConfig(rank=1), **run)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=size))
    import_pretrained(config)
    assert (tmp_path / "run/checkpoints/0").is_dir()


MERGED = [
    ("qwen3_5", "mixed", None, "bfloat16"),
    ("llama", "float32", "float32", "float32"),
    ("llama", "float32", "bfloat16", "bfloat16"),
    ("qwen3_moe", "float32", "bfloat16", "float32"),
    ("llama", "float16", None, "bfloat16"),
    ("llama", "bfloat16", None, "bfloat16"),
]


def merged_run(family, kind, base_dtype, activations, folder):
    """A run with random adapters on a model whose file has this type; and the tensors of both."""
    model = shutil.copytree(
        pretrained.REFERENCES / family, folder / "model", copy_function=shutil.copyfile
    )
    mixed = {True: "float32", False: "bfloat16"}
    wide = ("A_log", "norm")
    tensors = pretrained.save_in_types(
        model, lambda name: mixed[any(x in name for x in wide)] if kind == "mixed" else kind
    )
    lora = LoraConfig(rank=2, targets=("query", "value"), base_dtype=base_dtype)
    config = pretrained.make_config(model, steps=0, devices=1, run_dir=folder / "run", lora=lora)
    model = dataclasses.replace(config.model, dtype=activations)
    config = dataclasses.replace(config, model=model, tensorboard=False)
    import_pretrained(config)
    pretrained.save_adapters(config)
    return config, tensors


@pytest.mark.slow_except_every(3)
@pytest.mark.parametrize("row", MERGED, ids=str)
def test_adapters_are_added_to_the_tensors_of_the_file(row, tmp_path):
    """Once rounded, if the file has 16 bits; all others are those of the file, bit for bit."""
    config, tensors = merged_run(*row, tmp_path)
    notes, out = [], tmp_path / "out"
    export_run(config.run_dir, config, out, merge=True, note=notes.append)
    export_run(config.run_dir, config, tmp_path / "adapters")
    adapters = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    described = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    found = load_file(out / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert notes == []
    changed = 0
    for name, x in found.items():
        assert x.dtype == tensors[name].dtype, name
        key = "base_model.model." + name.removesuffix("weight")
        if f"{key}lora_A.weight" not in adapters:
            np.testing.assert_array_equal(x, tensors[name], err_msg=name)
            continue
        a, b = (adapters[f"{key}lora_{x}.weight"].astype(np.float64) for x in "AB")
        alpha = described["alpha_pattern"].get(name.split(".")[-2], described["lora_alpha"])
        total = tensors[name].astype(np.float64) + alpha / len(a) * b @ a
        apart = np.abs(x.astype(np.float64) - total).max() / np.abs(total).max()
        assert apart <= max(1e-6, float(ml_dtypes.finfo(x.dtype).eps) / 2), name
        changed += 1
    assert changed


def test_adapters_are_added_to_no_other_model(tmp_path):
    """Without the files, what the run has kept is taken, and said; other files are refused."""
    config, tensors = merged_run("llama", "float32", "bfloat16", "bfloat16", tmp_path)
    model, notes, out = config.init_from, [], tmp_path / "out"
    name = "model.layers.1.mlp.down_proj.weight"
    for changed in ("numbers", "types"):
        others = {**tensors, name: tensors[name] + 1}
        if changed == "types":
            others = {x: y.astype("bfloat16") for x, y in tensors.items()}
        save_file(others, model / "model.safetensors")
        with refused(InputError, "with which the run began", str(model), "move the folder away"):
            export_run(config.run_dir, config, out, merge=True)
        assert not out.exists()
    shutil.rmtree(model)
    export_run(config.run_dir, config, out, merge=True, note=notes.append)
    (note,) = notes
    assert "rounded to bfloat16" in note
    found = load_file(out / "model.safetensors")[name]
    np.testing.assert_array_equal(found, tensors[name].astype("bfloat16").astype("float32"))


@pytest.mark.quick
def test_flags_and_exports_that_do_not_fit_raise(tmp_path):
    model = str(pretrained.REFERENCES / "llama")
    flags = ["--lora.rank", "8", "--lora.targets", "key", "down"]
    lora = read_import([model, *flags]).settings.lora
    assert (lora, lora.scale) == (LoraConfig(rank=8, targets=("key", "down")), 2.0)
    with refused(InputError, "got gate, and no layer has one"):
        make_config(dict(mlp="gelu"), lora=LoraConfig(rank=1, targets=("gate",)))
    with refused(InputError, merge=True):
        export_run(tmp_path, make_config(), tmp_path / "out", merge=True)
    with refused(InputError, "--merge"):
        export_run(tmp_path, CONFIG, tmp_path / "out")


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("qwen3_5", EVERY),
        ("qwen3_5", ("key", "out_gate")),
        ("qwen3_5", ("value", "query", "beta")),
        ("olmo_hybrid", EVERY),
        ("qwen3_next", EVERY),
        ("qwen3_next", ("key", "out_gate", "decay")),
        ("glm4", ALL),
        ("glm4", ("query", "up")),
        ("glm4_moe", ("gate", "value")),
        ("deepseek_v2", ("query", "latent", "value", "down")),
        ("deepseek_v3", ("query_down", "latent", "key", "out")),
        ("deepseek_v3", ("query", "rotated", "value", "gate")),
        ("kimi_linear", ("decay_down", "decay", "beta", "latent", "up")),
        ("kimi_linear_rank", ("query_down", "out_gate_down", "out_gate", "key", "out")),
        ("moonlight", ("query", "key", "value", "rotated", "latent")),
        ("nemotron_h", ("query", "value", "out_gate", "step", "up")),
        ("nemotron_h", ("key", "step")),
        ("nemotron3", ("latent_in", "up", "query")),
        ("granite", (*ALL, "step")),
        ("granite", ("up", "step", "key")),
        ("gemma4", ALL),
        ("gemma4", ("key", "value")),
        ("gemma4_values", ("query", "value")),
    ],
)
def test_adapters_of_rows_of_a_tensor_are_those_that_are_merged(family, targets, tmp_path):
    """Three projections of a Qwen3.5 and two of a GLM 4 are rows of one tensor: one adapter."""
    base, merged, tensors, described = pretrained.with_adapters(family, targets, tmp_path)
    wanted = {*described["target_modules"]}
    wanted |= {x.split(".")[-2] for x in described.get("target_parameters", ())}
    seen = set()
    for name in base:
        # Files of Nemotron-H have another name for the model, and of Kimi Linear for some modules.
        in_memory = name.replace("backbone.", "model.").removesuffix("weight")
        in_memory = in_memory.replace("self_attn.f_", "self_attn.forget_gate.f_")
        in_memory = in_memory.replace("block_sparse_moe.shared", "mlp.shared")
        key = f"base_model.model.{in_memory}"
        module = name.split(".")[-2]
        if f"{key}lora_A.weight" not in tensors:
            np.testing.assert_array_equal(base[name], merged[name], err_msg=name)
            # In transformers, experts are no modules of such names, and biases lie in modules.
            named = ".experts." in name or name.endswith(".bias")
            assert named or module not in wanted
            continue
        a, b = tensors[f"{key}lora_A.weight"], tensors[f"{key}lora_B.weight"]
        assert len(a) == described["rank_pattern"].get(module, 2) == b.shape[1]
        scale = described["alpha_pattern"].get(module, described["lora_alpha"]) / len(a)
        assert scale == 1.5
        added = merged[name].astype(np.float64) - base[name]
        np.testing.assert_allclose(added, scale * (b @ a), atol=1e-4, err_msg=name)
        seen.add(module)
    assert seen == wanted
    of_modules = [x for x in base if x.endswith(".weight") and ".experts." not in x]
    adapted = [x for x in of_modules if x.split(".")[-2] in seen]
    assert len(tensors) == 2 * len(adapted)


@pytest.mark.parametrize(
    ("family", "targets"), [("gemma3_images", ALL), ("glm4v_moe", (*ALL, *EXPERTS))]
)
def test_adapters_of_a_model_of_images_are_in_its_text_model(family, targets, tmp_path, capsys):
    """Its tower of images has modules of the same names."""
    base, _, tensors, described = pretrained.with_adapters(family, targets, tmp_path)
    assert "transformers.AutoModelForImageTextToText loads" in capsys.readouterr().out
    text, parameters = "model.language_model.layers.", described.get("target_parameters", ())
    assert all(x.startswith(f"base_model.model.{text}") for x in tensors)

    def is_adapted(name):  # As PEFT decides.
        module, weight = name.removesuffix(".weight"), name
        named = any(f".{weight}".endswith(f".{x}") for x in parameters)
        return named or bool(re.fullmatch(described["target_modules"], module))

    matrices = [x for x in base if "_proj.weight" in x and ".experts." not in x]
    for name in matrices:
        assert is_adapted(name.replace("model.", "model.language_model.", 1))
        assert not is_adapted(name.replace("model.", "model.visual.", 1))
        assert not is_adapted(name.replace("model.", "model.vision_tower.vision_model.encoder.", 1))
    assert 2 * len(matrices) == len([x for x in tensors if ".experts." not in x])


@pytest.mark.parametrize(
    ("family", "kind", "there", "is_of_images"),
    [
        *[("gemma3_images", None, x, True) for x in (True, False)],
        # transformers takes the text model of a Qwen3.5 alone.
        *[("qwen3_5", "qwen3_5", x, False) for x in (True, False)],
        ("qwen3", None, True, False),
    ],
)
def test_adapters_are_named_as_in_the_model_that_is_loaded(
    family, kind, there, is_of_images, tmp_path
):
    folder = tmp_path / "model"
    shutil.copytree(pretrained.REFERENCES / family, folder)
    config = pretrained.make_config(folder, init_text_only=True, lora=LoraConfig(rank=2))
    if kind is not None:
        values = json.loads((folder / "config.json").read_text()) | {"model_type": kind}
        (folder / "config.json").write_text(json.dumps(values))
    text = {"gemma3_images": "gemma3_text", "qwen3_5": "qwen3_5_text"}.get(family, family)
    if not there:
        shutil.rmtree(folder)
    found = text_prefix(config, text)
    assert found == ("model.language_model." if is_of_images else "model.")


def test_matrices_that_peft_refuses_are_exported_whole_alone(tmp_path):
    with refused(
        InputError, "got lora.targets with out, which is mixer.out_proj.weight", "--merge"
    ):
        pretrained.with_adapters("nemotron_h", ("query", "out"), tmp_path)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("qwen3_moe", EXPERTS),
        ("gpt_oss", EXPERTS),
        ("gpt_oss", ("query", "expert_up")),
        ("mixtral", ("expert_up", "expert_gate")),
        ("olmoe", ("expert_down",)),
        ("glm4_moe", EXPERTS),
        ("nemotron3", ("expert_up",)),
        ("nemotron3", ("expert_up", "expert_down")),
        ("granite_moe", EXPERTS),
        ("granite_moe", ("expert_gate",)),
    ],
)
def test_adapters_of_experts_are_those_that_are_merged(family, targets, tmp_path):
    """PEFT adds them to the parameters of all experts, with gates and projections up in one."""
    base, merged, tensors, described = pretrained.with_adapters(family, targets, tmp_path)
    fused = bool({"expert_up", "expert_gate"} & {*targets})
    down = "expert_down" in targets
    first, module = "gate_up_proj", "mlp.experts"
    if family == "nemotron3":
        first, module = "up_proj", "mixer.experts"
    if family == "granite_moe":
        module = "block_sparse_moe.experts"
    parameters = {first: fused, "down_proj": down}
    wanted = [f"{module}.{x}" for x in sorted(parameters) if parameters[x]]
    assert described["target_parameters"] == sorted(wanted)
    assert described["target_modules"] == ["q_proj"] * ("query" in targets)
    added = {x: merged[x].astype(np.float64) - base[x] for x in base}
    of_experts = [x for x in base if ".experts." in x or "block_sparse_moe." in x]
    assert of_experts
    for layer in sorted({x.split(".")[2] for x in of_experts}):
        for name, is_adapted in parameters.items():
            key = f"layers.{layer}.{module}."
            delta = whole_of_experts(added, f"model.{key}", name, family)
            if not is_adapted:
                np.testing.assert_array_equal(delta, 0)
                continue
            key = f"base_model.model.model.{key}"
            key += "base_layer." if down and name == first else ""
            a, b = (tensors.pop(f"{key}lora_{x}.weight") for x in "AB")
            rank = described["rank_pattern"].get(f"{module}.{name}", 2)
            alpha = described["alpha_pattern"].get(f"{module}.{name}", described["lora_alpha"])
            a, b = a.reshape(len(delta), rank, -1), b.reshape(len(b), rank, len(delta))
            product = alpha / rank * np.einsum("ore,eri->eoi", b, a)
            np.testing.assert_allclose(delta, product, atol=1e-4)
    assert not [x for x in tensors if ".experts." in x]


def whole_of_experts(tensors, prefix, name, family):
    """[experts, outputs, inputs] of one layer, from the tensors of a folder."""
    if family == "gpt_oss":
        return tensors[prefix + name].swapaxes(1, 2)
    if family == "granite_moe":
        both = {"gate_up_proj": "input_linear", "down_proj": "output_linear"}
        return tensors[f"{prefix.removesuffix('experts.')}{both[name]}.weight"]
    prefix = prefix.replace("mlp", "block_sparse_moe") if family == "mixtral" else prefix
    names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    if family == "nemotron3":
        prefix, names = prefix.replace("model.", "backbone."), names[1:]
    count = sum(x.startswith(prefix) for x in tensors) // len(names)
    names = names[-1:] if name == "down_proj" else names[:-1]
    rows = [
        np.concatenate([tensors[f"{prefix}{expert}.{x}.weight"] for x in names])
        for expert in range(count)
    ]
    return np.stack(rows)
