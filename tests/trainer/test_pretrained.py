"""Pretrained models in the format of Hugging Face: what is read and refused, and the way back."""

import copy
import dataclasses
import functools
import itertools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import transformers
from flax.traverse_util import unflatten_dict
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import sample
import startrail_jax as st
import train
from configs.gpt import gpt_tiny, kimi_linear_48b_1m, moonlight_16b_128k
from models.config import GPTConfig, RopeConfig
from models.parts.attention import GlobalConfig, Keys, keys_of
from models.parts.gpt import gpt_weights
from peak import Peak, needs_linux
from pretrained import REFERENCES, import_and_export, make_config, reference_of, save_in_types
from programs import make_program, weight_shapes
from refusals import refused
from startrail_jax.errors import InputError, UnsupportedError
from tests.faults import failures
from trainer import durable
from trainer.checkpoints.checksums import Checksums
from trainer.checkpoints.reading import CheckpointError
from trainer.config import LoraConfig
from trainer.data.opening import read_object
from trainer.errors import NonFiniteError, StorageError
from trainer.gpt.chat.stops import keep_stops
from trainer.gpt.config import DataConfig, TextOptions
from trainer.gpt.export import __main__ as export_command
from trainer.gpt.export.writing import config_values, export_run, files_beside_weights, token_ids
from trainer.gpt.pretrained.config_json import (
    NAMES,
    ONLY,
    READ,
    describe,
    read_description,
    text_values,
)
from trainer.gpt.pretrained.defaults import with_tokenizer
from trainer.gpt.pretrained.families.experts import BALANCE
from trainer.gpt.pretrained.families.table import FAMILIES, family_of, to_values
from trainer.gpt.pretrained.initial import Pretrained, open_pretrained
from trainer.gpt.pretrained.plain import plain, without_losses
from trainer.gpt.pretrained.tensors import places
from trainer.gpt.pretrained.values import with_floats
from trainer.gpt.sample import tokenizer_of_run
from trainer.gpt.tokenizer import check_tokenizer_of_model
from trainer.parallel.partition import Partition, path_name
from trainer.planner.gpt import sizes_of_gpt
from trainer.pretrained import import_pretrained
from trainer.pretrained import read_command_line as read_import
from trainer.run.settings import result_flags, save_config
from trainer.sums import SUMS_FILE
from trainer.tasks import TASKS, load_train_config
from trainer.weights import initial as initial_weights
from trainer.weights.adapters import write_merged

LLAMA = REFERENCES / "llama"
KNOWN = json.loads((LLAMA / "config.json").read_text())
WITHOUT_ROPE = {key: x for key, x in KNOWN.items() if key != "rope_parameters"}


SIZES = dict(
    vocab_size=48, width=16, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_width=24, norm_eps=1e-5
)


def tensors_of(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "numpy") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def copied(name, folder):
    return shutil.copytree(REFERENCES / name, folder / name, copy_function=shutil.copyfile)


@pytest.fixture
def model(tmp_path):
    return copied("llama", tmp_path)


def change(folder, **values):
    """Changes a config.json; None takes a value out."""
    path = folder / "config.json"
    known = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: x for key, x in known.items() if x is not None}))


def change_tensors(folder, **tensors):
    known = tensors_of(folder) | tensors
    save_file({k: x for k, x in known.items() if x is not None}, folder / "model.safetensors")


def shapes_of(config, ring=1, level=0, dtype=jnp.float32):
    """Of the weights of a run in a ring of so many devices."""
    mesh = st.make_mesh(st.Degrees(ring=ring), "auto", jax.devices()[:ring])
    shapes = {
        path: jax.ShapeDtypeStruct(shape, dtype) for path, shape in weight_shapes(config).items()
    }
    partition = Partition(mesh, gpt_weights(config.model), level)
    return partition.sharded(unflatten_dict(shapes, sep="/"))


def open_it(folder, **changes):
    """Opens a model as a run would, whose weights nobody reads."""
    config = make_config(folder)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **changes))
    with open_pretrained(config, shapes_of(config)) as initial:
        return initial.description


GEMMA = dict(
    mlp="geglu", scaled_embedding=True, norms="both", norm_offset=True, tied_head=True,
    scale_dim=6, kv_heads=1, head_dim=4, mlp_width=12,
)  # fmt: skip
STRETCHED = dict(bases=(100.0, 1000.0), scaling="linear", factor=4.0, stretches="global")
YARN = dict(bases=(100.0,), scaling="yarn", factor=4.0, original_length=8)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("llama_linear", dict(rope=RopeConfig(scaling="linear", factor=2.0), dtype="bfloat16")),
        ("mistral", dict(windows=(5,))),
        ("qwen2", dict(qkv_bias=True, windows=("none", 5))),
        ("qwen3", dict(qk_norm=True, tied_head=True)),
        (
            "smollm3",
            dict(tied_head=True, rope=RopeConfig(bases=(2e6, "none")), windows=("none", 5)),
        ),
        (
            "gemma2",
            GEMMA | dict(windows=(5, "none"), softcap=2.0, output_softcap=3.0, dtype="bfloat16"),
        ),
        (
            "gemma3",
            GEMMA
            | dict(windows=(5, "none"), qk_norm=True, rope=RopeConfig(**STRETCHED))
            | dict(dtype="bfloat16"),
        ),
        ("qwen2_yarn", dict(qkv_bias=True, dtype="bfloat16", rope=RopeConfig(**YARN))),
    ],
)
def test_config_of_each_family_becomes_a_model(name, options):
    described = read_description(REFERENCES / name)
    assert described.model == GPTConfig(**SIZES | {"dtype": "float32"} | options)
    assert described.length == 32


def test_config_of_older_versions_is_read():
    values = {key: x for key, x in WITHOUT_ROPE.items() if key not in ("dtype", "head_dim")}
    values |= dict(rope_theta=7e5, torch_dtype="bfloat16", hidden_size=64)
    read = describe(values | dict(rope_scaling=None), "config.json").model
    assert (read.dtype, read.head_dim, read.rope.bases) == ("bfloat16", 16, (7e5,))

    def rope(kind="yarn", outer=None, **scaling):
        given = values | dict(rope_scaling=dict(rope_type=kind, **scaling)) | (outer or {})
        return describe(given, "config.json").model.rope

    llama3 = dict(factor=8.0, low_freq_factor=1.5, high_freq_factor=4.0)
    assert rope("llama3", **llama3, original_max_position_embeddings=8192) == RopeConfig(
        bases=(7e5,), scaling="llama3", factor=8.0, original_length=8192, turns=(4.0, 1.5)
    )
    sharp = rope(factor=1.0, attention_factor=1.3, original_max_position_embeddings=8)
    assert (sharp.scaling, sharp.factor, sharp.attention_factor) == ("yarn", 1.0, 1.3)
    scales = dict(factor=4.0, mscale=2.0, mscale_all_dim=1.0)
    assert rope(**scales).original_length == 32
    expected = (0.2 * np.log(4) + 1) / (0.1 * np.log(4) + 1)
    assert rope(**scales).attention_factor == pytest.approx(expected)
    # A factor that is left out follows from the lengths.
    lengths = rope(factor=None, original_max_position_embeddings=8)
    assert (lengths.scaling, lengths.factor, lengths.original_length) == ("yarn", 4.0, 8)
    assert rope(**scales, outer={"original_max_position_embeddings": 16}).original_length == 16
    del values["rope_theta"]
    old_name = values | dict(rope_scaling=dict(type="yarn", factor=4.0))
    assert describe(old_name, "config.json").model.rope.scaling == "yarn"


SMOLLM3 = dict(model_type="smollm3", architectures=["SmolLM3ForCausalLM"])
LAYERS = {
    letters: [{"s": "sliding_attention", "f": "full_attention"}[x] for x in letters]
    for letters in ("s", "f", "ss", "ff")
}


QWEN2 = dict(model_type="qwen2", architectures=["Qwen2ForCausalLM"], sliding_window=7)
GEMMA2 = dict(model_type="gemma2", architectures=["Gemma2ForCausalLM"], sliding_window=7)
GEMMA3 = dict(model_type="gemma3_text", architectures=["Gemma3ForCausalLM"], sliding_window=7)
MISTRAL = dict(model_type="mistral", architectures=["MistralForCausalLM"])
SEVEN = dict(sliding_window=7)


@pytest.mark.parametrize(
    ("values", "window"),
    [
        (QWEN2, None),
        (QWEN2 | dict(use_sliding_window=True, max_window_layers=0), 7),
        (QWEN2 | dict(use_sliding_window=True, max_window_layers=2), None),
        (QWEN2 | dict(use_sliding_window=True, layer_types=LAYERS["ss"]), 7),
        (QWEN2 | dict(use_sliding_window=True, max_window_layers=1), ("none", 7)),
        (SMOLLM3 | SEVEN | dict(use_sliding_window=True, no_rope_layers=[0, 1]), (7, "none")),
        (SMOLLM3 | SEVEN | dict(use_sliding_window=False), None),
        (GEMMA3, 7),
        (GEMMA3 | dict(sliding_window_pattern=2), (7, "none")),
        (GEMMA3 | dict(layer_types=LAYERS["ff"]), None),
        (GEMMA2, (7, "none")),
        (MISTRAL | SEVEN, 7),
        # Published files have these, and nobody reads them.
        (SMOLLM3 | SEVEN | dict(use_sliding_window=False, max_window_layers=28), None),
        (GEMMA2 | dict(sliding_window_size=4096), (7, "none")),
        (dict(layer_types=LAYERS["ff"]), None),
        (dict(sliding_window=None), None),
        (dict(sliding_window=KNOWN["max_position_embeddings"]), None),
        (dict(layer_types=LAYERS["ff"], sliding_window=3, use_sliding_window=False), None),
    ],
)
def test_windows_are_those_of_transformers(values, window):
    model = describe(WITHOUT_ROPE | values, "config.json").model
    assert model.windows == (window if isinstance(window, tuple) else (window or "none",))


def test_gemma_says_what_it_leaves_out():
    """Versions of transformers differ in what they write; null is no soft cap, and none is one."""
    known = WITHOUT_ROPE | GEMMA3 | {"num_hidden_layers": 6}
    del known["head_dim"]
    older = known | dict(rope_theta=1e6, rope_local_base_freq=2e4, sliding_window_pattern=3)
    older |= dict(rope_scaling=dict(rope_type="linear", factor=8.0))
    model = describe(older, "config.json").model
    assert model.rope == RopeConfig(
        bases=(2e4, 2e4, 1e6), scaling="linear", factor=8.0, stretches="global"
    )
    assert (model.head_dim, model.scale_dim, model.softcap) == (256, None, None)
    known |= dict(model_type="gemma2", architectures=["Gemma2ForCausalLM"])
    model = describe(known, "config.json").model
    assert (model.softcap, model.output_softcap, model.rope) == (50.0, 30.0, RopeConfig())
    model = describe(known | dict(attn_logit_softcapping=None), "config.json").model
    assert (model.softcap, model.output_softcap) == (None, 30.0)


def scaled(kind, **values):
    return dict(rope_parameters=dict(rope_type=kind, **values))


def by_last_key(*configs):
    """Rows for which the error must name the last key."""
    return [(values, list(values)[-1]) for values in configs]


UNSUPPORTED = [
    *by_last_key(
        *({"attention_bias": True}, {"mlp_bias": True}, {"partial_rotary_factor": 0.5}),
        *({"quantization_config": {"bits": 4}}, {"is_causal": False}, {"is_encoder_decoder": 0}),
        GEMMA3 | dict(use_bidirectional_attention=True),
        GEMMA3 | dict(attn_logit_softcapping=20.0),
        *(GEMMA2 | dict(sliding_window_pattern=3), GEMMA2 | dict(hidden_activation=None)),
        QWEN2 | dict(layer_types=["full_attention", "linear"]),
        # Here transformers makes another model of them.
        MISTRAL | dict(layer_types=LAYERS["ff"]),
    ),
    (dict(model_type="gemma"), "model_type='gemma'"),
    (dict(architectures=["LlamaModel"]), "'LlamaForCausalLM'"),
    (dict(hidden_act="gelu"), "'silu'"),
    (GEMMA3 | dict(hidden_activation="silu"), "'gelu_pytorch_tanh'"),
    (scaled("longrope"), "'longrope'"),
    (scaled(["yarn"]), "'yarn'"),
    (scaled("default", mrope=1), "'default'"),
    (
        GEMMA3 | dict(rope_parameters={"sliding_attention": dict(rope_type="linear", factor=2)}),
        "sliding_attention",
    ),
    (QWEN2 | dict(layer_types=["full_attention", ["a"]]), "full_attention"),
    # The layers of transformers take no notice of windows here, but its cache does.
    (dict(layer_types=LAYERS["ss"], sliding_window=7), "window=7"),
    (dict(layer_types=LAYERS["ss"]), "No layer may have a sliding window"),
    (dict(sliding_window=7), "layer_types=None"),
    (dict(no_such_key=3), "no_such_key=3"),
    *[
        (family | dict(use_sliding_window=False, layer_types=LAYERS["ss"]), "_sliding_window=False")
        for family in (QWEN2, SMOLLM3)
    ],
    (GEMMA2 | dict(sliding_window=None), "sliding_attention"),
]


WRONG = [
    *by_last_key(
        *(dict(rms_norm_eps="x"), dict(tie_word_embeddings=1), dict(rope_parameters=[1])),
        *(dict(num_attention_heads=0), *(dict(num_hidden_layers=x) for x in (10**6, 2**31 - 1))),
        *(SMOLLM3 | dict(no_rope_layers=x) for x in (5, [1, None])),
        *(QWEN2 | dict(layer_types=LAYERS["f"]), QWEN2 | dict(head_dim=0)),
        SMOLLM3 | dict(no_rope_layer_interval=0),
    ),
    (dict(vocab_size="48"), "'48'"),
    (dict(num_attention_heads=3), "attention heads (3)"),
    (dict(layer_types=LAYERS["f"]), "layer_types"),
    (dict(rope_parameters=dict(rope_theta=10**400)), "rope_theta"),
    *[(scaled(kind, factor=None), "factor") for kind in ("linear", "llama3", "yarn")],
    (scaled("yarn", factor=0.5), "factor"),
]


@pytest.mark.parametrize(
    ("error", "values", "named"),
    [(UnsupportedError, *row) for row in UNSUPPORTED] + [(InputError, *row) for row in WRONG],
)
def test_config_that_is_wrong_or_not_supported_is_refused(error, values, named):
    with refused(error, named):
        describe(KNOWN | values, "config.json")


@pytest.mark.parametrize("folder", sorted(x.name for x in REFERENCES.iterdir()))
def test_null_is_nothing_where_transformers_reads_it_so(folder):
    """A null that it reads as something else is refused: it is no default."""
    values = with_floats(text_values(read_object(REFERENCES / folder / "config.json"), folder))
    family = FAMILIES[values["model_type"]]
    reader = transformers.CONFIG_MAPPING[values["model_type"]]

    def outcome(values):
        try:
            return describe(values, folder)
        except (InputError, UnsupportedError) as error:
            return str(error)

    def read(values):
        try:
            return reader(**copy.deepcopy(values)).to_dict()
        except Exception:
            return None

    found = {"nothing": 0, "something": 0}
    for key in sorted({*READ, *family.keys, *ONLY} - {*NAMES}):
        without = {name: x for name, x in values.items() if name != key}
        null = without | {key: None}
        only = {**ONLY, **family.only}.get(key, ())
        is_false = key not in family.keys and any(not x for x in only)
        if read(null) is not None and (is_false or read(null) == read(without)):
            assert outcome(null) == outcome(without), key
            found["nothing"] += 1
        elif outcome(null) != outcome(without):
            # What differs is refused, or is another model by the value that null is.
            found["something"] += 1
    assert min(found.values()) > 3
    assert "is_causal must be True" in outcome(values | {"is_causal": None})


@pytest.mark.parametrize(
    ("folder", "content", "named"),
    [
        ("here", None, "config.json"),
        ("here", "{", "config.json"),
        ("here", "[]", "config.json"),
        ("here/nowhere", None, "no such folder"),
        (LLAMA.with_name("lamma"), None, "no such folder"),
        (LLAMA / "model.safetensors", None, "a file"),
        (Path("Qwen/Qwen3-8B"), None, "init_from must"),
    ],
)
def test_folder_without_a_config_raises(folder, content, named, tmp_path):
    (tmp_path / "here").mkdir()
    if content:
        (tmp_path / "here/config.json").write_text(content)
    with refused(InputError, named):
        read_description(tmp_path / folder if isinstance(folder, str) else folder)


def test_run_in_the_place_of_a_model_names_the_two_ways_on(tmp_path):
    save_config(gpt_tiny(), tmp_path / "config.json")
    ways = (f"--run-dir {tmp_path} --allow-changes", f"trainer.gpt.export {tmp_path} exported")
    with refused(UnsupportedError, *ways):
        read_description(tmp_path)


@pytest.mark.parametrize(
    "name", ["qwen2", "qwen3", "qwen3_5", "qwen3_next", "gpt_oss", "granite", "granite_moe"]
)
def test_parts_of_weights_are_those_of_the_whole(name):
    config, family = make_config(REFERENCES / name), read_description(REFERENCES / name).family
    rng = np.random.default_rng(0)
    for path, place in places(weight_shapes(config), config.model, family):
        weight = rng.normal(size=place.shape)
        tensor = place.to_tensor(weight)
        assert tensor.shape == place.tensor_shape
        if (share := place.share) is not None:  # Of a tensor with other weights too.
            own = [rng.normal(size=tensor.shape) for _ in share.sizes]
            if not share.columns:
                shape, dim = tensor.shape, share.dim
                rows = [share.groups * size for size in share.sizes]
                shapes = [(*shape[:dim], size, *shape[dim + 1 :]) for size in rows]
                own = [rng.normal(size=size) for size in shapes]
            own[share.index] = tensor
            tensor = share.joined(own)
            assert tensor.shape == place.whole_shape
        whole = tuple(slice(0, size) for size in place.shape)
        np.testing.assert_array_equal(place.read(tensor, whole), weight, err_msg=path)
        for _ in range(9):
            ends = [np.sort(rng.choice(size + 1, 2, replace=False)) for size in place.shape]
            index = tuple(slice(*map(int, pair)) for pair in ends)
            np.testing.assert_array_equal(place.read(tensor, index), weight[index], err_msg=path)


class Counted:
    def __init__(self, tensor, counts):
        self.tensor, self.counts = tensor, counts

    def __getitem__(self, index):
        part = self.tensor[index]
        self.counts.append(part.nbytes)
        return part


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_each_device_reads_only_its_own_slices(name):
    """And eight devices get what one device gets."""
    config = make_config(REFERENCES / name)
    found = []
    for num_devices, level in ((1, 0), (8, 3)):
        shapes, counts = shapes_of(config, num_devices, level), []
        with open_pretrained(config, shapes) as initial:
            slices = initial.tensors.slices
            counted = {name: Counted(x, counts) for name, x in slices.items()}
            tensors = dataclasses.replace(initial.tensors, slices=counted)
            found.append(dataclasses.replace(initial, tensors=tensors).read(shapes))
        local = sum(
            shard.data.nbytes for x in jax.tree.leaves(found[-1]) for shard in x.addressable_shards
        )
        assert sum(counts) == local
    for (path, one), eight in zip(
        jax.tree_util.tree_leaves_with_path(found[0]), jax.tree.leaves(found[1]), strict=True
    ):
        np.testing.assert_array_equal(one, eight, err_msg=path_name(path))
    total = sum(x.nbytes for x in jax.tree.leaves(found[0]))
    assert sum(counts) < 1.1 * total


def test_devices_on_the_host_take_what_is_read_without_a_copy(monkeypatch):
    read_part, places_read = Pretrained._part, []

    def watched(self, *args):
        part = read_part(self, *args)
        places_read.append(part.ctypes.data)
        return part

    monkeypatch.setattr(Pretrained, "_part", watched)
    config = make_config(LLAMA)
    shapes = shapes_of(config, 2, 3)
    with open_pretrained(config, shapes) as initial:
        weights = initial.read(shapes)
    shards = [shard.data for x in jax.tree.leaves(weights) for shard in x.addressable_shards]
    assert sorted(x.unsafe_buffer_pointer() for x in shards) == sorted(places_read)


def write_llama(folder):
    """A Llama of so many random weights that they can be seen in the memory of a process."""
    model = GPTConfig(
        vocab_size=4000, width=1024, layers=2, heads=16, kv_heads=4, head_dim=64, mlp_width=2816,
        norm_eps=1e-5, dtype="bfloat16",
    )  # fmt: skip
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.normal(size=place.tensor_shape, scale=0.02).astype(jnp.bfloat16)
        for _, place in places(
            weight_shapes(dataclasses.replace(gpt_tiny(), model=model)), model, "llama"
        )
        for name in place.tensors
    }
    folder.mkdir()
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    values = to_values(model, length=8192, dtype="bfloat16")
    (folder / "config.json").write_text(json.dumps(values))
    return sum(x.size for x in arrays.values())


@needs_linux
def test_reading_takes_the_share_of_resident_memory(tmp_path):
    """Mapped files would count as well, and so all weights once more."""
    total = write_llama(tmp_path / "model")
    config = make_config(tmp_path / "model")
    shapes = shapes_of(config, 8, 3, jnp.bfloat16)
    # Several times, as libraries that the first reading loads are resident too, and what other
    # threads of the process need meanwhile.
    read, peaks = [], []
    for _ in range(4):
        with open_pretrained(config, shapes) as initial, Peak() as peak:
            read.append(jax.block_until_ready(initial.read(shapes)))
        peaks.append(peak.resident)
    assert sum(x.nbytes for x in jax.tree.leaves(read)) == 4 * 2 * total
    assert total < min(peaks) < 1.3 * 2 * total


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0), (0, 2, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_in_any_order_are_copied_whole(monkeypatch, order, dtype):
    monkeypatch.setattr(initial_weights, "TILE", 3)
    for shape in ((7, 11, 5), (1, 13, 1), (3, 0, 2)):
        block = np.random.default_rng(0).normal(size=shape).astype(jnp.bfloat16)
        values = block.transpose(order)
        target = np.full(values.shape, np.nan, jnp.dtype(dtype))
        initial_weights.fill(target, values)
        np.testing.assert_array_equal(target, values)


@pytest.mark.parametrize(("value", "dtype"), [(np.nan, "float32"), (1e30, "float16")])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_weights_that_are_no_finite_numbers_are_refused(model, name, value, dtype):
    """Also those that are too large for the type in which a run keeps them."""
    damaged = tensors_of(model)[name].copy()
    damaged.flat[-1] = value
    change_tensors(model, **{name: damaged})
    config = make_config(model)
    shapes = shapes_of(config, 2, dtype=jnp.dtype(dtype))
    with open_pretrained(config, shapes) as initial, refused(InputError, name, dtype):
        initial.read(shapes)


NORM, HEAD = "model.norm.weight", "lm_head.weight"


@pytest.mark.parametrize(
    ("error", "changes", "tensors", "named"),
    [
        (InputError, dict(mlp_width=32), {}, "layers.0.mlp.gate_proj.weight"),
        (InputError, dict(qkv_bias=True), {}, "q_proj.bias"),
        (InputError, dict(layers=1), {}, "model.layers.1"),
        (InputError, {}, {HEAD: None}, HEAD),
        # A head that is tied must be the embedding.
        (InputError, dict(tied_head=True), {}, "model.embed_tokens.weight"),
        (UnsupportedError, {}, {NORM: np.ones(16, np.int8)}, NORM),
    ],
)
def test_tensors_that_are_not_those_of_the_model_are_named(model, error, changes, tensors, named):
    change_tensors(model, **tensors)
    with refused(error, named):
        open_it(model, **changes)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_moe"])
def test_experts_in_one_tensor_are_those_of_a_tensor_for_each(name, rows, turned, tmp_path):
    """As Qwen3.5 is published: gates above projections up, of all experts; or transposed, as
    Qwen3-VL is. Experts with `rows` / 2 of the width make one tensor or the other square."""
    values = json.loads((REFERENCES / name / "config.json").read_text())
    width = values["hidden_size"] * rows // 2
    folder, plain = copied(name, tmp_path / "fused"), copied(name, tmp_path / "plain")
    for x in (folder, plain):
        change(x, moe_intermediate_size=width)
    tensors = tensors_of(folder)
    fused = {key: x for key, x in tensors.items() if ".experts." not in key}
    drawn = np.random.default_rng(0)
    layers = sorted({x.partition(".experts.")[0] for x in tensors if ".experts." in x})
    axes = (0, 2, 1) if turned else (0, 1, 2)
    for layer in layers:
        gate, up, down = drawn.normal(size=(3, 4, width, values["hidden_size"])).astype(np.float32)
        own = {"gate": gate, "up": up, "down": down.swapaxes(1, 2)}
        for kind, e in itertools.product(own, range(4)):
            tensors[f"{layer}.experts.{e}.{kind}_proj.weight"] = own[kind][e].copy()
        both = {"gate_up": np.concatenate([gate, up], axis=1), "down": own["down"]}
        for kind, x in both.items():
            fused[f"{layer}.experts.{kind}_proj"] = np.ascontiguousarray(x.transpose(axes))
    save_file(fused, folder / "model.safetensors")
    save_file(tensors, plain / "model.safetensors")
    one, other = (weights_of(x) for x in (plain, folder))
    for path, x in one.items():
        np.testing.assert_array_equal(x, other[path], err_msg=path)
    layer = f"{layers[0]}.experts"
    if rows == 3:  # One of two tensors is transposed, and neither is square.
        part = fused[f"{layer}.down_proj"].swapaxes(1, 2)
        save_file({**fused, f"{layer}.down_proj": part.copy()}, folder / "model.safetensors")
        with refused(InputError, f"{layer}.", "not in the files"):
            open_it(folder)
    del fused[f"{layer}.down_proj"]
    save_file(fused, folder / "model.safetensors")
    with refused(InputError, "experts.0.down_proj.weight", "not in the files"):
        open_it(folder)


def test_weights_that_a_family_does_not_have_are_named():
    folder = REFERENCES / "qwen3_moe"
    experts = dataclasses.replace(make_config(folder).model.experts, biases=True)
    words = "must be those of its family", "mlp/expert_down_bias", "of kind qwen3_moe has"
    with refused(InputError, *words):
        open_it(folder, experts=experts)


def weights_of(folder):
    config = make_config(folder)
    shapes = shapes_of(config, 2, level=3)
    with open_pretrained(config, shapes) as initial:
        weights = initial.read(shapes)
    return {path_name(x): np.asarray(y) for x, y in jax.tree_util.tree_leaves_with_path(weights)}


def test_numbers_in_mxfp4_are_unpacked(tmp_path):
    """Blocks of 32 numbers of 4 bits with an exponent, the lower four bits of a byte first."""
    values = json.loads((REFERENCES / "gpt_oss" / "config.json").read_text())
    values |= {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1}
    values |= {"layer_types": ["full_attention"], "quantization_config": {"quant_method": "mxfp4"}}
    folder = tmp_path / "packed"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    rng = np.random.default_rng(0)
    signs, steps = [1, -1], [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    tensors, expected = {}, {}
    model = read_description(folder).model
    for _, place in places(weight_shapes(make_config(folder)), model, "gpt_oss"):
        (name,) = place.tensors
        if name.endswith("_proj") and name not in expected:
            experts, width, outputs = place.whole_shape
            codes = rng.integers(0, 16, (experts, outputs, width // 32, 16, 2), np.uint8)
            exponents = rng.integers(120, 132, codes.shape[:3], np.uint8)
            tensors[f"{name}_blocks"] = codes[..., 0] | codes[..., 1] << 4
            tensors[f"{name}_scales"] = exponents
            found = np.zeros((experts, width, outputs), np.float32)
            for e, o, block, at, half in np.ndindex(codes.shape):
                code = codes[e, o, block, at, half]
                number = signs[code >> 3] * steps[code & 7]
                scale = 2.0 ** (int(exponents[e, o, block]) - 127)
                found[e, 32 * block + 2 * at + half, o] = number * scale
            expected[name] = found
        elif name not in expected:
            tensors[name] = rng.normal(size=place.whole_shape).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    found = weights_of(folder)
    gate_up = expected["model.layers.0.mlp.experts.gate_up_proj"]
    np.testing.assert_array_equal(
        found["expert_blocks/mlp/expert_gate/kernel"][0], gate_up[..., ::2]
    )
    np.testing.assert_array_equal(
        found["expert_blocks/mlp/expert_up/kernel"][0], gate_up[..., 1::2]
    )
    down = expected["model.layers.0.mlp.experts.down_proj"]
    np.testing.assert_array_equal(found["expert_blocks/mlp/expert_down/kernel"][0], down)


def test_tied_head_is_left_out_or_is_the_embedding(model):
    change_tensors(model, **{HEAD: tensors_of(model)["model.embed_tokens.weight"]})
    open_it(model, tied_head=True)
    change_tensors(model, **{HEAD: None})
    open_it(model, tied_head=True)
    # Old checkpoints have what follows from config.json.
    frequencies = np.ones(4, np.float32)
    change_tensors(model, **{"model.layers.0.self_attn.rotary_emb.inv_freq": frequencies})
    open_it(model, tied_head=True)


@pytest.mark.parametrize("length", [4, 100, -4])
def test_truncated_file_raises(model, length):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with refused(InputError, "model.safetensors' must be a whole"):
        open_it(model)


def test_missing_file_raises(tmp_path):
    folder = copied("qwen3", tmp_path)

    def refuses(*words):
        with refused(InputError, *words):
            open_it(folder)

    lost = folder / "model-00003-of-00004.safetensors"
    kept = lost.rename(tmp_path / "kept")
    refuses("00004.safetensors")
    shutil.copyfile(folder / "model-00001-of-00004.safetensors", lost)
    refuses("index.json")
    kept.rename(lost)
    index = folder / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    wrong = dict.fromkeys(("../kept", "a" * 5000, "a\0b", "\ud800", 5), "weight_map")
    for name, word in ((lost.name, "stray"), *wrong.items(), (["a"], "weight_map")):
        values["weight_map"]["stray"] = name
        index.write_text(json.dumps(values))
        refuses(word)
    index.unlink()
    (folder / "pytorch_model.bin").touch()
    refuses("pytorch_model.bin")


def add_tokenizer(folder, num_ids):
    words = {f"<{i}>": i for i in range(num_ids - 1)} | {"</s>": num_ids - 1}
    built = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<0>"))
    built.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    built.save(str(folder / "tokenizer.json"))


def test_log_says_which_tokens_this_program_does_not_add(model):
    """Llama and Mistral have always seen one first."""
    add_tokenizer(model, 48)
    assert "adds" not in open_it(model)
    built = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    built.post_processor = tokenizers.processors.TemplateProcessing(
        single="<1> $A", special_tokens=[("<1>", 1)]
    )
    built.save(str(model / "tokenizer.json"))
    assert "its tokenizer adds <1> to every text elsewhere, and this program adds" in open_it(model)
    assert check_tokenizer_of_model(model / "tokenizer.json", 48, 1).endswith(
        "; every document and every prompt of sample.py begins with <1>, and conversations as "
        "their template says"
    )


@pytest.mark.parametrize("name", ["llama", "llama3", "llama_linear", "qwen3"])
@pytest.mark.slow_except_every(3)
def test_export_of_an_import_is_the_same_bit_for_bit(name, tmp_path):
    """Of float32, bfloat16 and float16; and of several files."""
    source, run_dir, out = REFERENCES / name, tmp_path / "run", tmp_path / "out"
    done = import_and_export(source, run_dir, out, shard_bytes=8000)
    assert done.step == 0
    assert done.files > 1
    before, after = tensors_of(source), tensors_of(out)
    assert before.keys() == after.keys()
    for tensor, x in before.items():
        assert (after[tensor].dtype, after[tensor].tobytes()) == (x.dtype, x.tobytes()), tensor
    assert read_description(out) == read_description(source)
    # Nothing of the model is left out, and nothing is made up.
    values = json.loads((source / "config.json").read_text())
    values["torch_dtype"] = values.pop("dtype")
    assert json.loads((out / "config.json").read_text()) == values


def test_bad_model_leaves_no_run_and_no_text_is_read(model, tmp_path, monkeypatch):
    (model / "model.safetensors").unlink()
    monkeypatch.setattr(TASKS["gpt"], "open_data", lambda *_: pytest.fail("has read the text"))
    for begin, changes in ((import_pretrained, dict(steps=0)), (train.train, {})):
        with refused(InputError, "init_from must"):
            begin(make_config(model, devices=1, run_dir=tmp_path / "run", **changes))
        assert not (tmp_path / "run").exists()


def test_sample_of_an_import_begins_with_the_likeliest_token(model, tmp_path, capsys):
    add_tokenizer(model, 48)
    reference = reference_of("llama")
    config = make_config(model, steps=0, devices=1, run_dir=tmp_path / "run", tensorboard=False)
    import_pretrained(with_tokenizer(config))
    likeliest = reference["logits"][0].argmax(-1)
    last = np.flatnonzero(likeliest < 47)[-1]
    prompt = " ".join(f"<{token}>" for token in reference["tokens"][0, : last + 1])
    capsys.readouterr()
    sample.sample([str(config.run_dir), "--prompt", prompt, "--tokens", "1", "--temperature", "0"])
    assert capsys.readouterr().out.split() == [f"<{likeliest[last]}>"]


def test_command_line_takes_the_model_from_the_folder(model, tmp_path):
    add_tokenizer(model, 40)
    command = read_import([str(model)]).settings
    assert command.model == read_description(model).model
    assert (command.steps, command.seq_len, command.run_dir) == (0, 32, Path("runs/llama"))
    assert command.data.tokenizer == model / "tokenizer.json"
    other = train.read_command_line(
        f"gpt_tiny --init_from={model} --model.rope.scaling yarn --model.rope.factor 4 "
        "--model.rope.original-length 8".split()
    ).settings
    assert other.batch_size == gpt_tiny().batch_size
    assert other.model.rope.scaling == "yarn"
    assert other.model.width == 16
    # Tokens need no tokenizer.
    np.save(tmp_path / "train.npy", np.zeros(99, np.uint16))
    data = dataclasses.replace(command.data, tokenizer=None, path=(tmp_path / "train.npy",))
    command = dataclasses.replace(command, data=data)
    assert with_tokenizer(command).data.tokenizer is None


def test_flags_stretch_the_global_layers_of_a_gemma(tmp_path):
    """As in transformers, which has no other Gemma 3; and without a scaling nothing changes."""
    folder = copied("gemma3", tmp_path)
    change(folder, rope_parameters=None, rope_theta=1e3, rope_local_base_freq=100.0)
    before = json.loads((folder / "config.json").read_text())
    flags = [str(folder), "--model.rope.scaling"]
    config = read_import([*flags, "linear", "--model.rope.factor", "4"]).settings
    assert config.model.rope.stretches == "global"
    values = config_values(config, before, "float32")
    assert values["rope_scaling"] == dict(rope_type="linear", factor=4.0)
    assert describe(values, "config.json").model == config.model
    old = dataclasses.replace(config, model=read_description(folder).model)
    all_layers = dataclasses.replace(old.model.rope, stretches="all")
    run = dataclasses.replace(old, model=dataclasses.replace(old.model, rope=all_layers))
    # The config.json of a run from before flags did this.
    assert config_values(run, before, "bfloat16") == {**before, "torch_dtype": "bfloat16"}
    assert result_flags(old) == result_flags(run)
    assert len(result_flags(config)) == len(result_flags(run)) + 1
    bad = dataclasses.replace(
        config.model, rope=dataclasses.replace(all_layers, scaling="ntk", factor=2.0)
    )
    with refused(UnsupportedError, "rope.stretches='all'"):
        config_values(dataclasses.replace(config, model=bad), before, "float32")


def test_flags_give_all_layers_of_a_pretrained_model_one_window_and_one_base():
    flags = [str(REFERENCES / "gemma3"), "--model.rope.bases", "500", "--model.windows", "none"]
    model = read_import(flags).settings.model
    assert (set(model.layer_bases), set(model.layer_windows)) == ({500}, {None})


def test_model_without_a_tokenizer_is_not_trained_on_bytes(model, tmp_path):
    """Its ids are no bytes; the same holds for samples of an import."""
    command = ["--init-from", str(model), "--run-dir", str(tmp_path / "run")]
    change(model, vocab_size=300)
    (model / "tokenizer.model").touch()
    with refused(InputError, "--data.tokenizer"):
        train.read_command_line(command)
    config = read_import([str(model), *command[2:]]).settings
    assert config.data.tokenizer is None
    kept = tmp_path / "run" / "pretrained"
    kept.mkdir(parents=True)
    (kept / "tokenizer.model").touch()
    with refused(InputError, "--tokenizer"):
        tokenizer_of_run(config.run_dir, config, None, note=print)
    # This program exports models of bytes without a tokenizer.
    (model / "tokenizer.model").unlink()
    assert train.read_command_line(command).settings.data.tokenizer is None
    change(model, vocab_size=32_000)
    with refused(InputError, vocab_size=32000):
        train.read_command_line(command)


@pytest.mark.slow
def test_config_of_a_run_gives_no_tokenizer_to_tokens_or_to_another_model(model, tmp_path):
    add_tokenizer(model, 40)
    other = shutil.copytree(model, tmp_path / "other")
    saved, own = tmp_path / "config.json", model / "tokenizer.json"
    config = read_import([str(model)]).settings
    save_config(config, saved)
    np.save(tmp_path / "train.npy", np.zeros(99, np.uint16))

    def found(*flags):
        return train.read_command_line([str(saved), "--steps", "1", *flags]).settings.data.tokenizer

    tokens = ("--data.path", str(tmp_path / "train.npy"))
    assert found() == own
    assert found(*tokens) is None
    assert found(*tokens, "--data.tokenizer", str(own)) == own  # The corpus refuses it.
    assert found("--init-from", str(other)) == other / "tokenizer.json"
    mine = tmp_path / "mine.json"
    save_config(dataclasses.replace(config, data=DataConfig(tokenizer=mine)), saved)
    assert found(*tokens) == found("--init-from", str(model)) == mine


def test_run_goes_on_with_its_copy_of_the_tokenizer(model, tmp_path):
    add_tokenizer(model, 48)
    text = tmp_path / "text"
    text.mkdir()
    for name in ("train", "val"):
        (text / f"{name}.txt").write_text("<1> <2> <3> <4> " * 20)
    config = with_tokenizer(make_config(model, run_dir=tmp_path / "run"))
    data = dataclasses.replace(config.data, path=(text,), cache=tmp_path / "tokens")
    config = dataclasses.replace(config, data=data)
    opened = TASKS["gpt"].open_data(config, st.Layout("contiguous", 1))
    kept = config.run_dir / "pretrained" / "tokenizer.json"
    kept.parent.mkdir(parents=True)
    (model / "tokenizer.json").rename(kept)
    again = TASKS["gpt"].open_data(config, st.Layout("contiguous", 1))
    assert again.digest == opened.digest
    assert again.description.endswith(f"; tokenizer: {kept}, as {data.tokenizer} is gone")
    notes = []
    options = TextOptions.of_run(config)
    used = tokenizer_of_run(config.run_dir, config, options.tokenizer, note=notes.append)
    assert used.ids("<3>") == [3]
    assert notes == [f"tokenizer: {kept}, as {data.tokenizer} is gone"]
    # It is no copy of another one.
    with refused(InputError, "mine.json"):
        tokenizer_of_run(config.run_dir, config, tmp_path / "mine.json", note=notes.append)


def test_no_steps_are_an_import_which_is_a_command_of_its_own(model, tmp_path, capsys):
    config = make_config(model, steps=0, devices=1, run_dir=tmp_path / "run")
    with refused(InputError, "trainer.pretrained"):
        train.train(config)
    assert not (tmp_path / "run").exists()
    with refused(InputError, steps=9):
        import_pretrained(dataclasses.replace(config, steps=9))
    with pytest.raises(SystemExit, match="2"):
        read_import(["--devices", "2"])
    assert "folder of a model; got '--devices'" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"^$"):
        read_import(["--help"])
    assert "python -m trainer.pretrained Qwen3-8B" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        train.read_command_line(["gpt_tiny", "--steps", "0"])
    assert "steps must be at least 1" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.slow
def test_run_begins_with_the_pretrained_weights_and_is_exported(model, tmp_path):
    """The first loss is that of the model; the run goes on without the folder."""
    reference = reference_of("llama")
    (tmp_path / "data").mkdir()
    tokens = reference["tokens"][0].astype(np.uint16)
    for name in ("train", "val"):
        np.save(tmp_path / "data" / f"{name}.npy", tokens)
    config = make_config(model, steps=2, devices=1, run_dir=tmp_path / "run", tensorboard=False)
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, path=(tmp_path / "data",)),
        batch_size=1,
        validation_sequences=1,
        optimizer=dataclasses.replace(config.optimizer, learning_rate=1e-2),
    )
    losses = train.train(config).train
    logits = reference["logits"][0]
    wanted = -np.mean(jax.nn.log_softmax(logits)[np.arange(32), tokens[1:]])
    np.testing.assert_allclose(losses[0], wanted, rtol=1e-6)
    assert losses[1] < losses[0]

    out = tmp_path / "out"
    done = export_run(config.run_dir, config, out, step=2)
    assert (done.step, done.dtype) == (2, "float32")
    before, after = tensors_of(model), tensors_of(out)
    assert before.keys() == after.keys()
    assert all((before[name] != after[name]).any() for name in before)
    half = export_run(config.run_dir, config, tmp_path / "half", dtype="bfloat16")
    assert half.dtype == "bfloat16"
    for name, x in tensors_of(tmp_path / "half").items():
        np.testing.assert_array_equal(x, after[name].astype(x.dtype))
    with refused(CheckpointError, "step 7"):
        export_run(config.run_dir, config, tmp_path / "other", step=7)

    shutil.rmtree(model)
    saved = load_train_config(config.run_dir / "config.json")
    assert saved.init_from == model
    assert train.train(saved).train == []
    with refused(InputError, "--init-from"):
        train.train(dataclasses.replace(saved, init_from=tmp_path / "other"))


def test_export_names_the_special_tokens_of_another_tokenizer(model, tmp_path):
    add_tokenizer(model, 40)
    config = make_config(model)
    config = dataclasses.replace(config, data=DataConfig(end_of_document=3))
    own, copy = model / "tokenizer.json", tmp_path / "copy.json"
    copy.write_bytes(own.read_bytes())
    assert token_ids(config, own, own) == token_ids(config, copy, own) == {}
    assert token_ids(config, None, own) == {}
    copy.write_bytes(own.read_bytes() + b" ")
    ids = dict(bos_token_id=None, eos_token_id=3, pad_token_id=None)
    assert token_ids(config, copy, own) == token_ids(config, own, tmp_path / "none") == ids


def test_export_names_what_ends_answers_and_has_all_templates(model, tmp_path):
    add_tokenizer(model, 40)
    (model / "generation_config.json").write_text('{"eos_token_id": [7, 9], "top_k": 5}')
    (model / "additional_chat_templates").mkdir()
    own = model / "additional_chat_templates" / "tool_use.jinja"
    own.write_text("{{ tools }}{{ messages }}")
    run_dir, out = tmp_path / "run", tmp_path / "out"
    import_and_export(model, run_dir, out)
    values = json.loads((out / "generation_config.json").read_text())
    assert values == {"eos_token_id": [7, 9], "top_k": 5}
    assert (out / "additional_chat_templates" / own.name).read_text() == own.read_text()
    # Of two runs over conversations.
    for stops in ([11, 7], [5]):
        keep_stops(run_dir, stops)
    config = load_train_config(run_dir / "config.json")
    export_run(run_dir, config, tmp_path / "tuned")
    values = json.loads((tmp_path / "tuned" / "generation_config.json").read_text())
    assert values == {"eos_token_id": [11, 7, 5, 9], "top_k": 5}
    read = json.loads((tmp_path / "tuned" / "config.json").read_text())
    assert read["eos_token_id"] == [11, 7, 5, 9]
    # A template that is chosen is that of conversations with tools too.
    chosen = dataclasses.replace(config.data, chat_template=own)
    beside = files_beside_weights(dataclasses.replace(config, data=chosen), run_dir / "pretrained")
    assert beside["chat_template.jinja"] == own
    assert not any("additional" in name for name in beside)
    kept = run_dir / "pretrained" / "additional_chat_templates" / own.name
    kept.write_text("other")
    with refused(InputError, "its checksum is another", str(kept)):
        export_run(run_dir, config, tmp_path / "damaged")


def test_export_has_the_tokenizer_and_the_template_of_the_data(tmp_path):
    """Those of the pretrained model do not fit ids that another tokenizer made."""
    kept, model, other = (tmp_path / name for name in ("kept", "model", "other"))
    for folder in (kept, model, other):
        folder.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            (folder / name).touch()
    (kept / "chat_template.jinja").touch()
    (other / "merges.txt").touch()

    def found(init_from, **data):
        data = dataclasses.replace(gpt_tiny().data, **data)
        config = dataclasses.replace(gpt_tiny(), init_from=init_from, data=data)
        return files_beside_weights(config, kept if init_from else tmp_path)

    of_model = {path.name: path for path in kept.iterdir()}
    assert found(model) == found(model, tokenizer=model / "tokenizer.json") == of_model
    named = {name: other / name for name in ("tokenizer_config.json", "merges.txt")}
    mine = (other / "tokenizer.json").rename(other / "mine.json")
    named["tokenizer.json"] = mine
    assert found(None, tokenizer=mine) == named
    template = tmp_path / "mine.jinja"
    template.touch()
    named |= {"generation_config.json": kept / "generation_config.json"}
    assert found(model, tokenizer=mine) == named
    named |= {"chat_template.jinja": template}
    assert found(model, tokenizer=mine, chat_template=template) == named
    mine.unlink()
    with refused(InputError, "data.tokenizer"):
        found(model, tokenizer=mine)


def test_export_that_fails_leaves_nothing(tmp_path, monkeypatch):
    run_dir, out = tmp_path / "run", tmp_path / "out"
    import_and_export(LLAMA, run_dir, out)
    config = load_train_config(run_dir / "config.json")
    with refused(InputError, "OUT must be a folder that does"):
        export_run(run_dir, config, out)
    with refused(InputError, "'gs://b/out'"):
        export_run(run_dir, config, Path("gs://b/out"))
    shutil.rmtree(out)

    def fail(error, kind, *words):
        def flush(*_):
            raise error

        with monkeypatch.context() as patch, refused(kind, *words):
            patch.setattr(durable, "flush_files", flush)
            export_run(run_dir, config, out)
        assert [path.name for path in tmp_path.iterdir()] == ["run"]

    fail(KeyboardInterrupt(), KeyboardInterrupt)
    fail(OSError(28, "No space left on device"), StorageError, "No space left")
    large = {"norm/scale": np.full(16, 1e6, np.float32)}
    with refused(NonFiniteError, "float16"):
        of_model = functools.partial(places, model=config.model, family="llama")
        dtype_of = {"model.norm.weight": np.float16}.get
        write_merged(large, of_model, LoraConfig(), tmp_path, dtype_of, shard_bytes=10**6)

    # A config.json that is damaged: the base of its positions, say, is in no other file.
    kept = run_dir / "pretrained/config.json"
    kept.write_text(kept.read_text().replace("10000", "10001", 1))
    with refused(InputError, str(kept)):
        export_run(run_dir, config, out)
    assert not out.exists()
    (kept.parent / SUMS_FILE).unlink()  # As in a run of an earlier version.
    export_run(run_dir, config, out)


def test_export_command(model, tmp_path, capsys):
    run_dir, out = tmp_path / "run", tmp_path / "out"
    with refused(InputError, "RUN_DIR"):
        export_command.main([str(run_dir), str(out)])
    add_tokenizer(model, 48)
    import_and_export(model, run_dir, tmp_path / "first")
    export_command.main([str(run_dir), str(out), "--step", "0", "--dtype", "bfloat16"])
    assert "after step 0, in bfloat16, in 1 file" in capsys.readouterr().err
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert (out / "tokenizer.json").read_text() == (model / "tokenizer.json").read_text()


@pytest.mark.slow_except_every(2)
@pytest.mark.parametrize(
    ("family", "wide", "declared"),
    [
        ("qwen3_5", ("A_log", "norm"), "bfloat16"),
        ("qwen3_next", ("A_log", "dt_bias"), "auto"),
        ("gpt_oss", ("norm", "sinks"), "bfloat16"),
        ("llama", ("lm_head",), None),
        ("llama", (), "bfloat16"),
    ],
)
def test_tensors_keep_their_types(family, wide, declared, tmp_path):
    """And those in float32 among others of 16 bits stay so with --dtype."""
    folder = copied(family, tmp_path)
    change(folder, dtype=declared)

    def type_of(name, narrow):
        return "float32" if any(x in name for x in wide) else narrow

    before = save_in_types(folder, lambda name: type_of(name, "bfloat16"))
    run_dir = tmp_path / "run"
    done = import_and_export(folder, run_dir, tmp_path / "out")
    assert done.dtype == ("bfloat16 and float32" if wide else "bfloat16")
    config = load_train_config(run_dir / "config.json")
    for dtype in (None, "bfloat16", "float16", "float32"):
        out = tmp_path / str(dtype)
        export_run(run_dir, config, out, dtype=dtype)
        after = tensors_of(out)
        assert after.keys() == before.keys()
        for name, x in after.items():
            kind = type_of(name, dtype or "bfloat16")
            assert x.dtype.name == kind, name
            np.testing.assert_array_equal(x, before[name].astype(kind))
        values = json.loads((out / "config.json").read_text())
        assert values["torch_dtype"] == (dtype or "bfloat16")


WINDOWS = (7, "none")
NO_SECOND = RopeConfig(bases=(1e4, "none"))


@pytest.mark.parametrize(
    "options",
    [
        *({}, dict(windows=(7,)), dict(qkv_bias=True, tied_head=True)),
        *(dict(qk_norm=True, windows=(9,)), dict(windows=WINDOWS)),
        *(dict(rope=NO_SECOND), dict(rope=NO_SECOND, windows=(7,))),
        dict(qk_norm=True, windows=("none", 7)),
        dict(rope=RopeConfig(bases=("none", 1e4))),
        GEMMA | dict(windows=(7,), output_softcap=3.0),
        GEMMA | dict(windows=("none", 7), softcap=3.0),
        GEMMA | dict(qk_norm=True, rope=RopeConfig(bases=(9.0,))),
        GEMMA | dict(qk_norm=True, windows=WINDOWS, rope=RopeConfig(bases=(9.0, 99.0))),
        dict(rope=RopeConfig(bases=(500.0,), scaling="linear", factor=2.0)),
        dict(rope=RopeConfig(scaling="llama3", factor=8.0, original_length=64, turns=(8.0, 1.0))),
        dict(rope=RopeConfig(scaling="yarn", factor=8.0, original_length=64)),
        dict(rope=RopeConfig(scaling="yarn", factor=8.0, original_length=64, attention_factor=1.5)),
    ],
)
def test_config_of_a_model_that_began_here_says_what_it_is(options):
    config = dataclasses.replace(gpt_tiny(), model=GPTConfig(**SIZES | options))
    values = config_values(config, None, "float32")
    assert plain(describe(values, "config.json").model) == config.model
    rope = config.model.rope
    length = values["max_position_embeddings"]
    assert length == max(config.seq_len, rope.factor * (rope.original_length or 0))
    if rope.scaling == "yarn":
        factor = rope.attention_factor or 0.1 * np.log(8) + 1
        assert values["rope_scaling"]["attention_factor"] == factor


@pytest.mark.parametrize(
    ("length", "scaling", "seq_len", "expected"),
    [
        (32, None, 16, 32),
        (32, None, 32, 32),
        (32, None, 128, 128),
        (16, dict(original_max_position_embeddings=8), 64, 64),
        # Without it, the length for which the positions were made is that of the model.
        (16, {}, 64, 16),
    ],
)
def test_config_of_longer_training_says_so(length, scaling, seq_len, expected):
    before = KNOWN | {"max_position_embeddings": length}
    if scaling is not None:
        llama3 = dict(rope_type="llama3", factor=2.0, low_freq_factor=1.0, high_freq_factor=4.0)
        before["rope_scaling"] = llama3 | scaling
    model, notes = describe(before, "config.json").model, []
    config = dataclasses.replace(make_config(LLAMA), model=model, seq_len=seq_len)
    values = config_values(config, before, "float32", note=notes.append)
    assert values["max_position_embeddings"] == expected
    assert describe(values, "config.json").model == model
    keeps = ["keeps max_position_embeddings=16" in note for note in notes]
    assert keeps == [True] * (expected == 16)


def test_config_of_stretched_positions_says_so():
    rope = RopeConfig(scaling="yarn", factor=4.0, original_length=32)
    config = make_config(LLAMA)
    model = dataclasses.replace(config.model, rope=rope)
    config = dataclasses.replace(config, model=model, seq_len=64)
    again = describe(config_values(config, KNOWN, "float32"), "config.json")
    assert (again.model, again.length) == (model, 128)
    # A larger base is all that "ntk" is.
    model = dataclasses.replace(model, rope=RopeConfig(scaling="ntk", factor=4.0), norm_eps=1e-3)
    values = config_values(dataclasses.replace(config, model=model), KNOWN, "float32")
    assert values["rope_theta"] == pytest.approx(1e4 * 4 ** (4 / 3))
    assert describe(values, "config.json").model.norm_eps == 1e-3


@pytest.mark.parametrize("options", [dict(mlp="gelu"), dict(qkv_bias=True, qk_norm=True)])
def test_model_of_no_family_is_not_exported(options, tmp_path):
    config = dataclasses.replace(gpt_tiny(), model=GPTConfig(**SIZES | options))
    with refused(UnsupportedError, "A model that is exported must"):
        export_run(tmp_path, config, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_two_processes_import_the_same_bits_as_one(tmp_path):
    model = [str(REFERENCES / "llama"), "--lora.rank", "2"]
    flags = [*model, "--devices", "2", "--no-tensorboard"]
    here = [*flags, "--run-dir", str(tmp_path / "here")]
    import_pretrained(read_import(here).settings)
    flags += ["--run-dir", str(tmp_path / "there")]
    with failures.Processes(2, flags, folder=tmp_path, program=failures.IMPORT) as processes:
        processes.end()
    for part in ("checkpoints", "frozen"):
        one, two = (Checksums.read(tmp_path / run / part / "0") for run in ("here", "there"))
        assert one is not None
        assert two is not None
        assert one.arrays == two.arrays
        # Each process has written its own part.
        assert list((tmp_path / "there" / part / "0").rglob("*process_1*"))


def folder_of_images(folder, *, tied=True):
    """The reference of Qwen3.5 as a part of a model of images and text."""
    folder.mkdir()
    source = REFERENCES / "qwen3_5"
    inner = json.loads((source / "config.json").read_text())
    outer = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"]}
    outer |= {"text_config": inner, "vision_config": {"depth": 1}, "tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps(outer))
    tensors = load_file(source / "model.safetensors")
    renamed = {f"model.language_model.{x.removeprefix('model.')}": y for x, y in tensors.items()}
    others = {
        name: np.zeros(2, np.float32) for name in ("model.visual.norm.weight", "mtp.fc.weight")
    }
    save_file(renamed | others, folder / "model.safetensors")
    return folder


def test_text_model_is_taken_of_one_of_images(tmp_path, capsys):
    folder = folder_of_images(tmp_path / "images")
    config = make_config(folder, init_text_only=False)
    shapes = make_program(config, st.Degrees()).state_shapes.weights
    with (
        refused(InputError, "--init-text-only", "1 tensors for images"),
        open_pretrained(config, shapes),
    ):
        pass
    config = dataclasses.replace(config, init_text_only=True)
    plain = make_config(REFERENCES / "qwen3_5")
    with open_pretrained(config, shapes) as images, open_pretrained(plain, shapes) as text:
        for found, expected in zip(
            jax.tree.leaves(images.read(shapes)), jax.tree.leaves(text.read(shapes)), strict=True
        ):
            np.testing.assert_array_equal(found, expected)
        for part in ("1 tensors model.visual.*", "1 tensors mtp.*"):
            assert part in images.description
    run, out = tmp_path / "run", tmp_path / "out"
    import_pretrained(dataclasses.replace(config, steps=0, run_dir=run, devices=1))
    export_run(run, load_train_config(run / "config.json"), out)
    assert json.loads((out / "config.json").read_text())["model_type"] == "qwen3_5_text"
    original = load_file(REFERENCES / "qwen3_5/model.safetensors")
    exported = load_file(out / "model.safetensors")
    assert exported.keys() == original.keys()
    assert all(np.array_equal(x, exported[name]) for name, x in original.items())
    with refused(InputError, "init_text_only needs a pretrained model"):
        dataclasses.replace(plain, init_from=None, init_text_only=True)


def test_layers_behind_the_last_are_left_out_and_said(tmp_path):
    """GLM 4.5 predicts a second token with a layer that transformers does not load either."""
    folder = copied("glm4_moe", tmp_path)
    change(folder, num_nextn_predict_layers=1)
    last = {name: x for name, x in tensors_of(folder).items() if ".layers.2." in name}
    change_tensors(folder, **{x.replace("layers.2.", "layers.3."): y for x, y in last.items()})
    assert f"{len(last)} tensors model.layers.3.*" in open_it(folder)
    import_and_export(folder, tmp_path / "run", tmp_path / "out")
    assert (
        tensors_of(tmp_path / "out").keys()
        == load_file(REFERENCES / "glm4_moe/model.safetensors").keys()
    )
    assert read_object(tmp_path / "out" / "config.json")["num_nextn_predict_layers"] == 0


@pytest.mark.parametrize(
    ("kind", "whole", "text", "tied"),
    [
        # As `tie_weights` of transformers has it.
        *[(x, True, False, True) for x in ("qwen3_vl", "mistral3", "glm4v")],
        *[("qwen3_vl_moe", False, True, False), ("mistral3", False, True, False)],
        *[("glm4v", False, True, True), ("glm4v_moe", None, True, True)],
        *[("glm4v", False, False, False), ("qwen3_vl", None, None, False)],
    ],
)
def test_the_whole_model_says_whether_the_embedding_is_the_head(kind, whole, text, tied):
    values = [{} if x is None else {"tie_word_embeddings": x} for x in (whole, text)]
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    given = {"model_type": kind, "text_config": sizes | values[1], **values[0]}
    assert describe(given, "config.json").model.tied_head == tied


def test_a_text_model_of_glm_has_what_its_config_does_not_say():
    text = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = describe({"model_type": "glm4v", "text_config": text}, "config.json").model
    # All channels turn, where a GLM 4 has half of them.
    assert (model.qkv_bias, model.rope.channels, model.rope.interleaved) == (True, None, True)
    text["partial_rotary_factor"] = 0.5
    model = describe({"model_type": "glm4v_moe", "text_config": text}, "config.json").model
    assert (model.qk_norm, model.rope.channels, model.rope.interleaved) == (False, 4, False)
    text |= {"use_qk_norm": True, "output_router_logits": True}
    with refused(UnsupportedError, "output_router_logits must be False"):
        describe({"model_type": "glm4v_moe", "text_config": text}, "config.json")
    text = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    text |= {"norm_topk_prob": False, "num_experts": 4}
    model = describe({"model_type": "qwen3_vl_moe", "text_config": text}, "config.json").model
    assert model.experts.normalised


OF_IMAGES = ("qwen3_vl", "gemma3_images", "mistral3", "gemma4_images", "glm4v", "glm4v_moe")


@pytest.mark.parametrize("name", [*OF_IMAGES, "qwen3_vl_moe"])
def test_models_of_images_need_a_flag(name):
    config = make_config(REFERENCES / name, init_text_only=False)
    shapes = make_program(config, st.Degrees()).state_shapes.weights
    names = [*load_file(REFERENCES / name / "model.safetensors")]
    of_images = ("model.visual.", "vision_tower.", "multi_modal_", "model.vision", "model.embed_v")
    images = sum(x.startswith(of_images) for x in names)
    with (
        refused(InputError, "--init-text-only", f"{images} tensors for images"),
        open_pretrained(config, shapes),
    ):
        pass


def test_a_text_config_of_another_type_has_its_own_defaults():
    text = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 32}
    given = {"model_type": "qwen3_vl", "tie_word_embeddings": True, "text_config": text}
    read = describe(given, "config.json")
    assert (read.family, read.length, read.model.tied_head) == ("qwen3", 128_000, True)
    assert (read.model.mlp_width, read.model.rope.bases) == (22_016, (500_000.0,))
    # As published.
    turns = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]}
    text |= {"model_type": "qwen3_vl_text", "rope_theta": 5e6, "rope_scaling": turns}
    assert describe(given, "config.json").model.rope.bases == (5e6,)
    for more, words in (
        ({"model_type": "qwen3"}, "an object with model_type qwen3_vl_text"),
        ({"residual_multiplier": 2}, "residual_multiplier=2"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
    ):
        with pytest.raises((InputError, UnsupportedError), match=words):
            describe(given | {"text_config": text | more}, "config.json")
    other = {"model_type": "mistral3", "text_config": {"model_type": "ministral3"}}
    with refused(
        InputError, "text_config must be an object with model_type mistral ", "ministral3"
    ):
        describe(other, "config.json")
    with refused(UnsupportedError, "quantization_config must be None"):
        describe(given | {"quantization_config": {"quant_method": "fp8"}}, "config.json")


def test_hybrids_that_are_no_family_are_not_exported():
    model = make_config(REFERENCES / "qwen3_5").model
    assert family_of(model) == "qwen3_5_text"
    changes = [
        dict(attention_gate=False), dict(norm_offset=False), dict(windows=(8,)), dict(sinks=True),
        dict(linear=dataclasses.replace(model.linear, largest_beta=2.0)),
        dict(linear=dataclasses.replace(model.linear, norm_eps=0.5)),
        dict(rope=dataclasses.replace(model.rope, bases=("none",))),
    ]  # fmt: skip
    for change in changes:
        with refused(UnsupportedError, "which none of them has together"):
            family_of(dataclasses.replace(model, **change))
    olmo = make_config(REFERENCES / "olmo_hybrid").model
    assert family_of(olmo) == "olmo_hybrid"
    for change in (
        dict(norms="both"), dict(qk_norm_over="head"),
        dict(linear=dataclasses.replace(olmo.linear, norms=None)),
        dict(linear=dataclasses.replace(olmo.linear, largest_beta=1.5)),
        dict(rope=RopeConfig(bases=("none", "none", "none", 9.0))),
    ):  # fmt: skip
        with refused(UnsupportedError, "which none of them has together"):
            family_of(dataclasses.replace(olmo, **change))
    # What layers of linear attention have no use for changes nothing.
    same = dataclasses.replace(model, rope=dataclasses.replace(model.rope, bases=(7.0, 100.0)))
    assert family_of(same) == "qwen3_5_text"
    assert plain(same) == plain(model)


def gemma4_of(**changes):
    """The values of the tiny Gemma 4 as published files have them, and changes of them."""
    values = read_object(REFERENCES / "gemma4" / "config.json")
    del values["per_layer_config"]
    return values | {"global_head_dim": 12, "num_global_key_value_heads": 2} | changes


def test_the_layers_of_gemma_4_have_the_sizes_of_their_type():
    own = GlobalConfig(head_dim=12, kv_heads=2, values_from_keys=True, rotary_pairs=3)
    model = make_config(REFERENCES / "gemma4").model
    assert model.global_attention == own
    assert (model.kv_heads, model.head_dim, model.scale_dim) == (4, 4, 1)
    assert model.layer_mixers == tuple(
        "attention" if window else "global_attention" for window in model.layer_windows
    )
    # Published files name the sizes of global layers, and files of transformers those of each.
    assert plain(describe(gemma4_of(), "config.json").model) == plain(model)
    # The heads of global layers are their own only where keys are values.
    other = describe(gemma4_of(attention_k_eq_v=False), "config.json").model
    assert keys_of(other)["global_attention"] == Keys(4, 12)
    every = {"sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
    every["full_attention"] = {"rope_type": "default", "rope_theta": 1000.0}
    alike = dict(attention_k_eq_v=False, global_head_dim=4, rope_parameters=every)
    same = describe(gemma4_of(**alike), "config.json").model
    assert (same.mixers, same.global_attention) == (("attention",), GlobalConfig())
    for x in (model, other, same):
        assert family_of(x) == "gemma4_text"
        values = to_values(x, length=32, dtype="float32")
        assert plain(describe(values, "again").model) == plain(x)


def test_a_stretched_gemma_4_is_told_again():
    objects = gemma4_of()["rope_parameters"]
    objects = objects | {"full_attention": {**objects["full_attention"], "factor": 4.0}}
    model = describe(gemma4_of(rope_parameters=objects), "config.json").model
    assert (model.rope.scaling, model.rope.factor, model.rope.stretches) == ("linear", 4, "global")
    values = to_values(model, length=32, dtype="float32")
    assert values["rope_parameters"] == objects
    assert plain(describe(values, "again").model) == plain(model)
    # Of shares that no float holds, transformers makes the pairs again.
    for pairs, dim in itertools.product(range(1, 40), (98, 110, 206)):
        share = dataclasses.replace(model.global_attention, head_dim=dim, rotary_pairs=pairs)
        of_share = dataclasses.replace(model, global_attention=share)
        written = to_values(of_share, length=32, dtype="float32")
        entry = written["rope_parameters"]["full_attention"]
        assert int(entry["partial_rotary_factor"] * dim // 2) == pairs


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(hidden_size_per_layer_input=256), "hidden_size_per_layer_input must be 0"),
        (dict(hidden_size_per_layer_input="left out"), "hidden_size_per_layer_input must be 0"),
        (dict(num_kv_shared_layers=2), "num_kv_shared_layers must be 0"),
        (dict(enable_moe_block=True), "enable_moe_block must be False"),
        (dict(use_bidirectional_attention="all"), "use_bidirectional_attention must be None or"),
        (dict(attention_bias=True), "attention_bias must be False"),
        (dict(layer_types=["full_attention"] * 5), "must be of type sliding_attention"),
        (dict(per_layer_config={"2": {"head_dim": 12}}), "per_layer_config must give head_dim"),
        (dict(per_layer_config={"1": {"head_dim": 8}}), "per_layer_config must give head_dim"),
        (dict(per_layer_config={x: {"skip": ["mlp"]} for x in "24"}), "must give head_dim"),
    ],
)
def test_gemma_4_that_is_not_supported_is_refused(changes, named):
    values = gemma4_of(**changes)
    values = {key: value for key, value in values.items() if value != "left out"}
    with refused(UnsupportedError, named, "'config.json'"):
        describe(values, "config.json")


def test_models_like_gemma_4_that_are_none_are_not_exported():
    model = make_config(REFERENCES / "gemma4").model
    own = functools.partial(dataclasses.replace, model.global_attention)
    for change in (
        dict(scale_dim=None), dict(value_norm=False), dict(layer_scalar=False), dict(softcap=2.0),
        dict(norm_offset=True), dict(qk_norm=False), dict(windows=(5, 4, "none", 5, "none")),
        dict(global_attention=own(values_from_keys=False)),
        dict(global_attention=own(rotary_pairs=1),
             rope=dataclasses.replace(model.rope, channels=2)),
    ):  # fmt: skip
        with refused(UnsupportedError, "which none of them has together"):
            family_of(dataclasses.replace(model, **change))


EXPERTS = {
    **{name: name for name in ("qwen3_moe", "mixtral", "gpt_oss", "olmoe", "qwen3_next")},
    "qwen3_5_moe": "qwen3_5_moe_text",
    "glm4_moe": "glm4_moe",
    "nemotron3": "nemotron_h",
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
    "kimi_linear": "kimi_linear",
    "granite_moe": "granitemoehybrid",
}


GRANITE = {  # As published, of Granite 4.0 H Tiny, without ids of tokens.
    "model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"],
    "attention_bias": False, "attention_multiplier": 0.0078125, "embedding_multiplier": 12,
    "hidden_act": "silu", "hidden_size": 1536, "init_method": "mup", "intermediate_size": 512,
    "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4, "logits_scaling": 6,
    "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64,
    "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 48,
    "mamba_proj_bias": False, "max_position_embeddings": 131_072,
    "normalization_function": "rmsnorm", "num_attention_heads": 12, "num_experts_per_tok": 6,
    "num_hidden_layers": 40, "num_key_value_heads": 4, "num_local_experts": 64,
    "position_embedding_type": "nope", "residual_multiplier": 0.22, "rms_norm_eps": 1e-5,
    "rope_scaling": None, "rope_theta": 10_000, "router_aux_loss_coef": 0.0,
    "shared_intermediate_size": 1024, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "vocab_size": 100_352,
}  # fmt: skip
DENSE_GRANITE = GRANITE | {
    **{"layer_types": ["attention"] * 40, "position_embedding_type": "rope", "rope_theta": 1e7},
    **{"num_local_experts": 0, "num_experts_per_tok": 0, "attention_multiplier": 0.125},
}


def test_a_granite_4_is_what_its_files_say():
    model = describe(GRANITE, "config.json").model
    assert (model.scale_dim, model.embedding_scale, model.residual_scale) == (16_384, 12, 0.22)
    assert (model.logit_divisor, model.head_dim, model.rope.bases) == (6, 128, ("none",))
    assert model.layer_mixers.count("attention") == 4
    assert model.feed_forwards == ("experts",)
    experts, ssd = model.experts, model.ssd
    assert (experts.count, experts.top_k, experts.width, experts.shared_width) == (64, 6, 512, 1024)
    assert (ssd.heads, ssd.head_dim, ssd.groups, ssd.state_dim, ssd.conv) == (48, 64, 1, 128, 4)
    dense = describe(DENSE_GRANITE, "config.json").model
    assert (dense.mixers, dense.feed_forwards, dense.mlp_width) == (("attention",), ("mlp",), 1024)
    assert (dense.rope.bases, dense.scale_dim) == ((1e7,), 64)
    older = {key: x for key, x in GRANITE.items() if key not in ("mamba_d_head",)}
    assert describe(older, "config.json").model == model
    for x, published in ((model, GRANITE), (dense, DENSE_GRANITE)):
        assert family_of(x) == "granitemoehybrid"
        values = to_values(x, length=131_072, dtype="bfloat16")
        assert plain(describe(values, "again").model) == plain(x)
        idle = {"init_method", "normalization_function", "attention_bias", "mamba_proj_bias"}
        idle |= {"mamba_chunk_size", "router_aux_loss_coef"}
        if x is dense:
            idle |= {key for key in published if key.startswith("mamba_")} | {"intermediate_size"}
        elif x.rope.bases == ("none",):
            idle |= {"rope_theta", "rope_scaling"}
        assert {key: values[key] for key in published if key not in idle} == {
            key: x for key, x in published.items() if key not in idle
        }


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(num_local_experts=0, output_router_logits=True), "output_router_logits must be"),
        (dict(attention_bias=True), "attention_bias must be False"),
        (dict(mamba_proj_bias=True), "mamba_proj_bias must be False"),
        (dict(time_step_limit=[0.0, 1.0]), "time_step_limit must be [0.0, inf]"),
        (dict(hidden_act="gelu"), "hidden_act must be 'silu' or 'swish'"),
        (dict(layer_types=["mamba", "conv"] * 20), "layer_types must be linear_attention or"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor must be 1.0 or None"),
    ],
)
def test_granite_4_that_is_not_supported_is_refused(changes, named):
    with refused(UnsupportedError, named, "'config.json'"):
        describe(GRANITE | changes, "config.json")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(embedding_multiplier=0), "embedding_multiplier must be above 0"),
        (dict(residual_multiplier=-0.5), "residual_multiplier must be above 0"),
        (dict(attention_multiplier=1e-300), "attention_multiplier must be a number whose square"),
        (dict(logits_scaling=None), "logits_scaling must be a finite number"),
        (dict(attention_multiplier="a"), "'attention_multiplier' with value 'a'"),
        (dict(num_local_experts=-1), "num_local_experts must be a whole number"),
        (dict(layer_types=["mamba"] * 40), "layer_types must be a list of types of layers, among"),
        (dict(mamba_chunk_size=0), "mamba_chunk_size must be a whole number from 1"),
        (dict(shared_intermediate_size=0), "shared_intermediate_size must be a whole number"),
        (dict(mamba_expand=3), "must be a config.json that transformers reads"),
    ],
)
def test_granite_4_with_wrong_numbers_is_refused(changes, named):
    with refused(InputError, named, "'config.json'"):
        describe(GRANITE | changes, "config.json")


@pytest.mark.parametrize("factor", [0.3, 2.0, 0.0078125, 3**-0.5])
def test_any_factor_of_attention_is_read_and_told_again(factor):
    model = describe(GRANITE | {"attention_multiplier": factor}, "config.json").model
    assert (model.scale_dim or model.head_dim) ** -0.5 == pytest.approx(factor, rel=1e-11)
    values = to_values(model, length=131_072, dtype="bfloat16")
    assert plain(describe(values, "again").model) == plain(model)


MOONLIGHT = {  # As published, of Moonlight 16B-A3B, without ids of tokens.
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False, "attention_dropout": 0.0, "aux_loss_alpha": 0.001, "ep_size": 1,
    "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 11_264, "kv_lora_rank": 512,
    "max_position_embeddings": 8192, "moe_intermediate_size": 1408, "moe_layer_freq": 1,
    "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": True,
    "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
    "num_key_value_heads": 16, "num_nextn_predict_layers": 0, "pretraining_tp": 1,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5,
    "rope_scaling": None, "rope_theta": 50_000.0, "routed_scaling_factor": 2.446,
    "scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False, "topk_group": 1,
    "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128,
    "vocab_size": 163_840,
}  # fmt: skip
YARN = dict(
    **dict(type="yarn", factor=40, mscale=1.0, mscale_all_dim=1.0, beta_fast=32, beta_slow=1),
    original_max_position_embeddings=4096,
)
DEEPSEEK = MOONLIGHT | {  # Of DeepSeek V3, whose files are in FP8.
    "hidden_size": 7168, "intermediate_size": 18_432, "first_k_dense_replace": 3, "n_group": 8,
    "max_position_embeddings": 163_840, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_attention_heads": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "rms_norm_eps": 1e-6, "rope_scaling": YARN, "rope_theta": 10_000,
    "routed_scaling_factor": 2.5, "topk_group": 4, "vocab_size": 129_280,
}  # fmt: skip


def test_a_deepseek_v3_is_what_its_files_say():
    model = describe(MOONLIGHT, "config.json").model
    latent, experts = model.latent, model.experts
    assert (model.mixers, model.heads, model.norm_eps) == (("latent",), 16, 1e-5)
    assert (latent.rank, latent.query_rank, latent.rotary_dim) == (512, None, 64)
    assert (latent.key_dim, latent.value_dim, latent.norm_eps) == (128, 128, 1e-6)
    assert model.layer_feed_forwards == ("mlp", *["experts"] * 26)
    assert (experts.count, experts.top_k, experts.shared_width) == (64, 6, 2816)
    assert (experts.scores, experts.choice_bias, experts.share_scale) == ("sigmoid", True, 2.446)
    assert (model.rope.bases, model.rope.interleaved) == ((50_000.0,), True)
    # Of each layer: query, latent, keys and values, output; and norms.
    attention = 2048 * 16 * 192 + 2048 * 576 + 512 * 16 * 256 + 16 * 128 * 2048 + 512
    of_experts = 64 * (3 * 2048 * 1408 + 2048 + 1) + 3 * 2048 * 2816
    total = 27 * (attention + 2 * 2048) + 26 * of_experts + 3 * 2048 * 11_264
    assert sizes_of_gpt(model, name="").elements == total + 2048 + 2 * 2048 * 163_840
    large = describe(DEEPSEEK, "config.json").model
    assert (large.latent.query_rank, large.experts.groups) == (1536, 8)
    sharper = 0.1 * np.log(40) + 1
    assert large.scale_dim**-0.5 == pytest.approx(192**-0.5 * sharper**2, rel=1e-11)
    assert (large.rope.attention_factor, large.rope.factor) == (1.0, 40)
    for x, published in ((model, MOONLIGHT), (large, DEEPSEEK)):
        assert family_of(x) == "deepseek_v3"
        values = to_values(x, length=8192, dtype="bfloat16")
        assert plain(describe(values, "again").model) == plain(x)
        idle = {"aux_loss_alpha", "ep_size", "seq_aux", "moe_layer_freq", "topk_method"}
        idle |= {"scoring_func", "pretraining_tp", "initializer_range", "attention_dropout"}
        idle |= {"use_cache", "rope_scaling", "num_nextn_predict_layers", "max_position_embeddings"}
        assert {key: values[key] for key in published if key not in idle} == {
            key: x for key, x in published.items() if key not in idle
        }


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(attention_bias=True), "attention_bias must be False"),
        (dict(topk_method="greedy"), "topk_method must be 'noaux_tc'"),
        (dict(scoring_func="softmax"), "scoring_func must be 'sigmoid'"),
        (dict(moe_layer_freq=2), "moe_layer_freq must be 1"),
        (dict(output_router_logits=True), "output_router_logits must be False"),
        (dict(rope_scaling={"type": "yarn", "beta": 2, "factor": 2}), "rope_type must be one of"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
        *[(dict(model_type=x), "indexer") for x in ("deepseek_v32", "glm_moe_dsa")],
    ],
)
def test_deepseek_v3_that_is_not_supported_is_refused(changes, named):
    with refused(UnsupportedError, named, "'config.json'"):
        describe(MOONLIGHT | changes, "config.json")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(num_key_value_heads=8), "num_key_value_heads must be 16, as all heads have keys"),
        (dict(kv_lora_rank=0), "kv_lora_rank must be a whole number"),
        (dict(head_dim=128), "head_dim must be qk_rope_head_dim, 64"),
        (dict(first_k_dense_replace=27), "first_k_dense_replace must be a whole number from 0"),
    ],
)
def test_deepseek_v3_with_wrong_numbers_is_refused(changes, named):
    with refused(InputError, named, "'config.json'"):
        describe(MOONLIGHT | changes, "config.json")


def test_models_like_deepseek_v3_that_are_none_are_not_exported():
    model = make_config(REFERENCES / "deepseek_v3").model
    own = functools.partial(dataclasses.replace, model.latent)
    assert family_of(model) == "deepseek_v3"
    for change in (
        dict(latent=own(norm_eps=1e-5)), dict(latent=own(rotary_dim=0)), dict(norms="both"),
        dict(rope=RopeConfig(bases=("none",))), dict(mixers=("latent", "attention", "latent")),
        dict(scale_dim=7.0, rope=RopeConfig(bases=(100.0,))),
        dict(experts=dataclasses.replace(model.experts, scores="softmax", choice_bias=False)),
    ):  # fmt: skip
        with refused(UnsupportedError, "which none of them has together"):
            family_of(dataclasses.replace(model, **change))


LITE = {  # As published, of DeepSeek V2 Lite, without ids of tokens.
    "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False, "aux_loss_alpha": 0.001, "first_k_dense_replace": 1,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10_944, "kv_lora_rank": 512,
    "max_position_embeddings": 163_840, "moe_intermediate_size": 1408, "moe_layer_freq": 1,
    "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False,
    "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
    "num_key_value_heads": 16, "q_lora_rank": None, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 10_000,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True,
    "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy",
    "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128, "vocab_size": 102_400,
}  # fmt: skip


def test_a_deepseek_v2_lite_is_what_its_files_say():
    model = describe(LITE, "config.json").model
    experts = model.experts
    assert (experts.scores, experts.normalised, experts.choice_bias) == ("softmax", False, False)
    assert (experts.count, experts.top_k, experts.shared_width) == (64, 6, 2816)
    assert model.rope.interleaved
    assert model.scale_dim**-0.5 == pytest.approx(192**-0.5 * (0.0707 * np.log(40) + 1) ** 2)
    # That of transformers.
    assert sizes_of_gpt(model, name="").elements == 15_706_484_224
    assert family_of(model) == "deepseek_v2"
    values = to_values(model, length=163_840, dtype="bfloat16")
    assert plain(describe(values, "again").model) == plain(model)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(topk_method="group_limited_greedy", n_group=8, topk_group=3), "topk_method must be"),
        (dict(norm_topk_prob=True), "norm_topk_prob must be False"),
        (dict(scoring_func="sigmoid"), "scoring_func must be 'softmax'"),
        (dict(rope_interleave=True), "got rope_interleave=True"),
    ],
)
def test_deepseek_v2_that_is_not_supported_is_refused(changes, named):
    with refused(UnsupportedError, named, "'config.json'"):
        describe(LITE | changes, "config.json")


FULL_LAYERS = [4, 8, 12, 16, 20, 24, 27]
KIMI = {  # As published, of Kimi Linear 48B-A3B, without ids of tokens.
    "model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"], "dtype": "bfloat16",
    "auto_map": {"AutoConfig": "configuration_kimi.KimiLinearConfig"}, "first_k_dense_replace": 1,
    "head_dim": 72, "hidden_act": "silu", "hidden_size": 2304, "initializer_range": 0.02,
    "intermediate_size": 9216, "kv_lora_rank": 512, "mla_use_nope": True,
    "linear_attn_config": {
        "full_attn_layers": FULL_LAYERS, "head_dim": 128, "num_heads": 32,
        "kda_layers": [i for i in range(1, 28) if i not in FULL_LAYERS],
        "short_conv_kernel_size": 4,
    },
    "model_max_length": 1_048_576, "moe_intermediate_size": 1024, "moe_layer_freq": 1,
    "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_attention_heads": 32,
    "num_expert_group": 1, "num_experts": 256, "num_experts_per_token": 8,
    "num_hidden_layers": 27, "num_key_value_heads": 32, "num_nextn_predict_layers": 0,
    "num_shared_experts": 1, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10_000.0,
    "routed_scaling_factor": 2.446, "tie_word_embeddings": False, "topk_group": 1,
    "use_cache": True, "use_grouped_topk": True, "v_head_dim": 128, "vocab_size": 163_840,
}  # fmt: skip


def test_a_kimi_linear_is_what_its_files_say():
    described = describe(KIMI, "config.json")
    model, kda, latent = described.model, described.model.kda, described.model.latent
    assert (described.length, model.norm_eps) == (1_048_576, 1e-5)
    mixers = ["latent" if i in FULL_LAYERS else "kda" for i in range(1, 28)]
    assert [*model.layer_mixers] == mixers
    assert model.layer_feed_forwards == ("mlp", *["experts"] * 26)
    assert (kda.heads, kda.head_dim, kda.of_model(model).rank, kda.conv) == (32, 128, 128, 4)
    assert (latent.rank, latent.query_rank, latent.rotary_dim) == (512, None, 64)
    assert (model.rope.bases, latent.norm_eps) == (("none",), 1e-6)
    experts = model.experts
    assert (experts.count, experts.top_k, experts.shared_width) == (256, 8, 1024)
    assert (experts.scores, experts.choice_bias, experts.share_scale) == ("sigmoid", True, 2.446)
    # That of transformers: 49,122,675,072 parameters, and the biases of 26 routers.
    assert sizes_of_gpt(model, name="").elements == 49_122_675_072 + 26 * 256
    assert family_of(model) == "kimi_linear"
    values = to_values(model, length=1_048_576, dtype="bfloat16")
    assert plain(describe(values, "again").model) == plain(model)
    idle = {"auto_map", "dtype", "head_dim", "initializer_range", "rope_theta", "use_cache"}
    assert {key: values.get(key) for key in KIMI.keys() - idle} == {
        key: x for key, x in KIMI.items() if key not in idle
    }


@pytest.mark.parametrize(
    ("recipe", "file"), [(moonlight_16b_128k, MOONLIGHT), (kimi_linear_48b_1m, KIMI)]
)
def test_recipes_of_latent_attention_are_the_published_models(recipe, file):
    published = describe(file, "config.json").model
    assert without_losses(recipe().model) == without_losses(published)


def test_types_of_layers_take_the_place_of_lists_of_layers():
    types = ["full_attention" if i in FULL_LAYERS else "linear_attention" for i in range(1, 28)]
    values = {key: x for key, x in KIMI.items() if key != "linear_attn_config"}
    of_types = values | {"layer_types": types, "mlp_layer_types": ["dense"] + ["sparse"] * 26}
    del of_types["first_k_dense_replace"]
    assert describe(of_types, "config.json") == describe(KIMI, "config.json")
    scattered = of_types | {"mlp_layer_types": ["sparse", "dense"] + ["sparse"] * 25}
    model = describe(scattered, "config.json").model
    assert model.layer_feed_forwards == ("experts", "mlp", *["experts"] * 25)
    again = to_values(model, length=64, dtype="bfloat16")
    assert plain(describe(again, "again").model) == plain(model)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(mla_use_nope=False), "mla_use_nope must be True"),
        (dict(moe_router_activation_func="softmax"), "moe_router_activation_func must be"),
        (dict(moe_layer_freq=2), "moe_layer_freq must be 1"),
        (dict(num_experts_per_tok=6), "got num_experts_per_token=8"),
        (dict(layer_types=["full_attention", "sliding_attention"]), "layer_types must be"),
        (dict(num_local_experts=256), "num_local_experts=256"),
    ],
)
def test_kimi_linear_that_is_not_supported_is_refused(changes, named):
    with refused(UnsupportedError, named, "'config.json'"):
        describe(KIMI | changes, "config.json")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            dict(full_attn_layers=[4]),
            "whose full_attn_layers and kda_layers name each layer from 1",
        ),
        (dict(full_attn_layers=[0, *FULL_LAYERS[1:]]), "name each layer from 1 to 27 once"),
        (dict(kda_layers=None), "kda_layers name each layer"),
        (dict(gate=1), "an object with no keys but full_attn_layers"),
        (dict(kda_layers=[*range(1, 28)], full_attn_layers=[]), "among them full_attention"),
        (dict(num_heads=0), "linear_num_heads must be a whole number"),
    ],
)
def test_kimi_linear_with_wrong_lists_of_layers_is_refused(changes, named):
    nested = {"linear_attn_config": KIMI["linear_attn_config"] | changes}
    with refused(InputError, named, "'config.json'"):
        describe(KIMI | nested, "config.json")


def test_kimi_linear_with_wrong_feed_forwards_is_refused():
    for kinds in (["sparse"], ["dense"] * 27, ["sparse"] * 26 + ["moe"]):
        with refused(InputError, "mlp_layer_types", "'config.json'"):
            describe(KIMI | {"mlp_layer_types": kinds}, "config.json")


def test_models_like_kimi_linear_that_are_none_are_not_exported():
    model = make_config(REFERENCES / "kimi_linear").model
    kda = functools.partial(dataclasses.replace, model.kda)
    assert family_of(model) == "kimi_linear"
    for change in (
        dict(kda=kda(rank=7)), dict(kda=kda(norm_eps=0.1)), dict(norms="both"),
        dict(rope=RopeConfig(bases=(100.0,))), dict(norm_offset=True),
        dict(latent=dataclasses.replace(model.latent, norm_eps=1e-5)),
        dict(experts=dataclasses.replace(model.experts, scores="softmax", choice_bias=False)),
    ):  # fmt: skip
        with refused(UnsupportedError, "which none of them has together"):
            family_of(dataclasses.replace(model, **change))


@pytest.mark.parametrize("length", [16, 4096])
def test_a_longer_kimi_linear_says_so_under_its_own_key(length):
    config = make_config(REFERENCES / "kimi_linear", seq_len=length)
    file = json.loads((REFERENCES / "kimi_linear" / "config.json").read_text(encoding="utf-8"))
    values = config_values(config, file, "float32")
    assert values["model_max_length"] == max(length, 32)
    assert "max_position_embeddings" not in values


@pytest.mark.parametrize("more", [{}, {"qkv_bias": True}, {"qk_norm": True}], ids=str)
def test_layers_without_a_feed_forward_are_not_exported_as_if_they_had_one(more):
    assert family_of(GPTConfig(**SIZES | more)) in ("llama", "qwen2", "qwen3")
    with refused(UnsupportedError, "feed_forwards=('mlp', 'none')", "none of them has together"):
        family_of(GPTConfig(**SIZES | more, feed_forwards=("mlp", "none")))


def test_models_like_granite_4_that_are_none_are_not_exported():
    model = make_config(REFERENCES / "granite").model
    assert family_of(model) == "granitemoehybrid"
    ssd = functools.partial(dataclasses.replace, model.ssd)
    for change in (
        dict(qk_norm=True), dict(ssd=ssd(least_step=0.1)), dict(ssd=ssd(norm_eps=0.1)),
        dict(ssd=ssd(heads=6)), dict(windows=(5,)), dict(norms="both"), dict(output_softcap=2.0),
        dict(feed_forwards=("mlp", "none")), dict(embedding_scale=1.0, scaled_embedding=True),
    ):  # fmt: skip
        with refused(UnsupportedError, "which none of them has together"):
            family_of(dataclasses.replace(model, **change))
    named = "embedding_scale=1.0, residual_scale=0.5, logit_divisor=1.0"
    with refused(UnsupportedError, named, "which none of them has together"):
        family_of(GPTConfig(**SIZES, residual_scale=0.5, qkv_bias=True))


@pytest.mark.parametrize("name", EXPERTS)
def test_a_config_of_experts_is_told_again(name):
    model = make_config(REFERENCES / name).model
    assert family_of(model) == EXPERTS[name]
    values = to_values(model, length=32, dtype="float32")
    assert plain(describe(values, "again").model) == plain(model)
    other_scores = "softmax" if model.experts.scores == "sigmoid" else "sigmoid"
    for change in (
        dict(scores=other_scores),
        dict(choice_bias=not model.experts.choice_bias),
        *([dict(biases=not model.experts.biases)] if model.experts.is_gated else []),
        dict(shared_width=0, shared_gate=False)
        if model.experts.shared_width
        else dict(shared_width=3),
    ):
        other = dataclasses.replace(model, experts=dataclasses.replace(model.experts, **change))
        with refused(UnsupportedError, "which none of them has together"):
            family_of(other)
    if BALANCE not in FAMILIES[EXPERTS[name]].keys:
        assert model.experts.balance_loss == 0
        return
    # A loss that balances experts changes no logits; transformers adds it if it is asked for.
    # Losses of layers, which are added up, are as strong as one of their mean.
    layers = model.layer_feed_forwards.count("experts")
    for over, factor in (("model", 0.25), ("layer", 0.25 / layers)):
        losses = dict(balance_loss=factor, balance_over=over, z_loss=0.5)
        balanced = dataclasses.replace(model, experts=dataclasses.replace(model.experts, **losses))
        values = to_values(balanced, length=32, dtype="float32")
        experts = describe(values, "again").model.experts
        assert (experts.balance_loss, experts.balance_over) == (0.25, "model")
