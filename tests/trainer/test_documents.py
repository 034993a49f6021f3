"""Batches of whole documents: each token once and in its place, with the gradients of rows."""

import copy
import dataclasses
import functools

import jax
import numpy as np
import pytest

import startrail_jax as st
import train
from configs.gpt import gpt_tiny
from models.config import LinearConfig, RopeConfig
from programs import SMALL, compile_gradients, make_config, placed, records_of, train_steps
from programs import make_program as program_of
from refusals import refused
from startrail_jax.analysis import hlo
from startrail_jax.errors import InputError
from startrail_jax.masks import Window
from startrail_jax.tokens.layout import Layout
from tests.faults import failures
from trainer.config import AttentionConfig, LoraConfig, MeshConfig, OptimizerConfig
from trainer.data.batches import place
from trainer.data.dataset import Dataset
from trainer.data.order import PartBatches
from trainer.gpt.batches import PADDING, in_layout_order, next_token_batch
from trainer.gpt.chat.packing import EncodedExamples, PackedExamples
from trainer.gpt.config import DataConfig, TextSampleConfig
from trainer.gpt.corpus import Stream, open_corpora
from trainer.gpt.documents import text_documents
from trainer.gpt.objective import NextToken
from trainer.gpt.task import GPTTask
from trainer.parallel.checks import make_attention
from trainer.parallel.splits import make_parts
from trainer.parallel.step import Program
from trainer.weights.adapters import restore_model

LONGEST = 96
END = 7
CONFIG = make_config(
    SMALL, data=DataConfig(batches="documents", draw=24), batch_size=6, seq_len=LONGEST
)
LENGTHS = np.array([96, 3, 50, 17, 1, 88, 23, 24, 12, 5, 61, 40, 2, 13, 30, 7, 9, 11, 96, 25, 0, 4])


def text(lengths, seed=0):
    """A stream of documents of so many tokens before the one that ends them."""
    rng = np.random.default_rng(seed)
    parts = [np.append(8 + rng.integers(40, size=n), END) for n in lengths]
    return Stream(name="text", tokens=np.concatenate(parts).astype(np.uint16), vocab_size=48)


DOCUMENTS = text_documents([text(LENGTHS)], END, LONGEST)


@functools.cache
def make_program(degrees, order=None, **changes):
    devices, nodes = jax.devices()[: degrees.num_devices], 2 if order else None
    mesh = st.make_mesh(degrees, "auto", devices, order=order, devices_per_node=nodes)
    config = dataclasses.replace(CONFIG, **changes)
    objective = NextToken(config)
    return Program(config, make_attention(mesh, config, objective), objective)


def batches_of(program, documents, seed=3):
    data = Dataset(
        train=[], held_out=[], collate=list, documents=documents, description="", loss_unit=""
    )
    return PartBatches(program.parts, data, seed=seed)


def documents_in(program, batch):
    """The documents of a batch, from the shards of all devices: tokens, targets, weights."""
    parts, found = program.parts, []
    for k in range(batch.count):
        split = parts.splits[batch.split[k]]
        rows = {}
        for place_, (row, rank) in enumerate(split.places):
            rows.setdefault(row, {})[rank] = jax.tree.map(
                lambda x, p=place_, k=k: x[k, p], batch.parts
            )
        for shards in rows.values():
            whole = jax.tree.map(
                lambda *xs: np.concatenate(xs), *(shards[r] for r in range(split.c))
            )
            row = jax.tree.map(lambda x, s=split: s.layout.unpermute(x, axis=0), whole)
            for segment in range(row.segment_ids.max() + 1):
                here = np.flatnonzero(row.segment_ids == segment)
                np.testing.assert_array_equal(np.diff(here), 1)
                np.testing.assert_array_equal(row.positions[here], np.arange(len(here)))
                found.append((row.tokens[here], row.targets[here], row.weights[here]))
            assert not row.weights[row.segment_ids == PADDING].any()
    return found


def assert_all_once(seen):
    """Each of `DOCUMENTS` is once among the results of `documents_in`."""
    wanted = (DOCUMENTS.read(number).tokens for number in range(len(DOCUMENTS.sizes.lengths)))
    assert sorted(tuple(tokens) for tokens, *_ in seen) == sorted(map(tuple, wanted))


MESHES = [
    st.Degrees(),
    st.Degrees(ring=3),
    st.Degrees.startrail(8, c=2),
    st.Degrees(data=2, team=2, ring=2),
    st.Degrees(data=3, ring=2),
    st.Degrees(tensor=2, data=2, head=2),
]


@pytest.mark.parametrize("degrees", MESHES, ids=str)
@pytest.mark.parametrize("order", [None, "rings_inside"])
@pytest.mark.slow_except_every(4)
def test_every_token_of_an_epoch_is_once_on_its_device(degrees, order):
    if order and degrees.num_devices % 2:
        order = None  # No nodes of two.
    program = make_program(degrees, order)
    series, seen = batches_of(program, DOCUMENTS), []
    while len(seen) < np.count_nonzero(LENGTHS):
        seen += documents_in(program, next(series))
    assert_all_once(seen)
    for tokens, targets, weights in seen:
        np.testing.assert_array_equal(targets[:-1], tokens[1:])
        assert targets[-1] == END
        assert weights.all()
    series.close()


def test_documents_are_cut_at_the_longest_and_at_ends_of_streams():
    streams = [text([200, 0, 0, 3]), text([2, 90]), text([1, 5])]
    streams[1] = dataclasses.replace(streams[1], tokens=streams[1].tokens[:-1])  # No end.
    documents = text_documents(streams, END, LONGEST)
    assert documents.sizes.lengths.tolist() == [96, 96, 8, 3, 2, 89, 1, 5]
    first, second, third = (documents.read(i) for i in range(3))
    np.testing.assert_array_equal(
        np.concatenate([first.tokens, second.tokens, third.tokens, third.targets[-1:]]),
        streams[0].tokens[:201],
    )
    whole = text_documents(streams[:1], None, LONGEST)  # A file is one document.
    assert whole.sizes.lengths.tolist() == [96, 96, 14]
    with refused(InputError, "got 3 tokens"):
        text_documents([dataclasses.replace(streams[0], tokens=np.array([END] * 3))], END, LONGEST)


@pytest.mark.parametrize(
    "flags", [{}, {"mask_documents": False}, {"batches": "documents"}], ids=str
)
@pytest.mark.parametrize("degree", [1, 4])
def test_log_of_rows_says_what_whole_documents_would_save(tmp_path, flags, degree):
    """40 documents of 4 tokens and 10 of 30, in rows of 32."""
    np.save(tmp_path / "a.npy", text([4] * 42 + [30] * 10).tokens)
    given = DataConfig(
        path=(tmp_path / "a.npy",), end_of_document=END, validation_fraction=0.02, **flags
    )
    if given.mask_documents is False:
        given = dataclasses.replace(given, end_of_document=None)
    config = dataclasses.replace(CONFIG, data=given, seq_len=32, run_dir=tmp_path / "run")
    found = GPTTask().open_data(config, Layout("zigzag", degree)).description
    assert ("would not leave" in found) == (not flags and degree > 1)
    if not flags and degree > 1:
        assert "with --data.batches documents, 37% of the tokens" in found


def test_of_examples_only_what_is_counted_has_a_weight():
    tokens, ends = np.arange(1, 31), np.array([4, 20, 23, 30])
    counted = np.array([0, 0, 1, 1] + [0] * 3 + [1] * 13 + [0, 1, 1] + [0, 0, 0, 1, 1, 0, 1])
    part = EncodedExamples(tokens=tokens, counted=counted, ends=ends)
    documents = PackedExamples(part, 10, name="chat").documents
    assert documents.sizes.lengths.tolist() == [3, 10, 2, 6]
    row = documents.rows([[0, 2], [3]], 12)
    assert row.tokens.tolist()[0] == [1, 2, 3, 21, 22] + [0] * 7
    assert row.targets.tolist()[0] == [2, 3, 4, 22, 23] + [0] * 7
    assert row.weights.tolist()[0] == [0, 1, 1, 1, 1] + [0] * 7
    assert row.weights.tolist()[1] == [0, 0, 1, 1, 0, 1] + [0] * 6


def numbers_in(program, batch, documents):
    count = len(documents.sizes.lengths)
    read = {tuple(documents.read(number).tokens): number for number in range(count)}
    return [read[tuple(tokens)] for tokens, *_ in documents_in(program, batch)]


def single_rows(program, numbers, documents):
    """The same documents, each in a row of its own; rows that are left have padding."""
    rows = [[number] for number in numbers]
    rows += [[]] * (program.config.batch_size - len(numbers))
    batch = documents.rows(rows, program.config.seq_len)
    return place(in_layout_order(batch, program.attention.layout), program.batch_sharding)


PATTERN = dataclasses.replace(
    CONFIG.model,
    windows=(9, "none"),
    rope=RopeConfig(bases=(100.0, 1000.0)),
    sinks=True,
    softcap=3.0,
)
HYBRID = dataclasses.replace(
    CONFIG.model,
    mixers=("linear", "attention"),
    linear=LinearConfig(heads=4, key_heads=2, key_dim=4, norm_eps=1e-3),
)
SETTINGS = {
    "hybrid": (st.Degrees.startrail(8, c=2), {"model": HYBRID, "remat": "attention_saved"}),
    "hybrid, three": (st.Degrees(ring=3), {"model": HYBRID, "zero": 3}),
    "StarTrail": (st.Degrees.startrail(8, c=2), {}),
    "Ring, zero 3": (st.Degrees(ring=8), {"zero": 3, "tile": 8}),
    "data, zero 2": (st.Degrees(data=2, team=2, ring=2), {"zero": 2, "remat": "attention_saved"}),
    "three, zero 1": (st.Degrees(ring=3), {"zero": 1}),
    "six, full remat": (st.Degrees(ring=3, head=2), {"remat": "full", "batch_size": 3}),
    "tensor, zero 3": (st.Degrees(tensor=2, head=2, ring=2), {"zero": 3}),
    "other layers": (st.Degrees(team=2, ring=2), {"model": PATTERN, "zero": 3}),
    "rings inside nodes": (st.Degrees.startrail(8, c=2), {"order": "rings_inside"}),
    "heads in parts": (
        st.Degrees(team=4, group=2),
        {"attention": AttentionConfig(head_chunks=2, keep_gathered=True)},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("degrees", "changes"), SETTINGS.values(), ids=SETTINGS.keys())
def test_gradients_are_those_of_single_rows_on_one_device(degrees, changes):
    program = make_program(degrees, **changes)
    series = batches_of(program, DOCUMENTS)
    host = next(series)
    series.close()
    numbers = numbers_in(program, host, DOCUMENTS)
    assert len(numbers) > program.parts.most
    alone = make_program(
        st.Degrees(), data=DataConfig(), batch_size=len(numbers), model=program.config.model
    )
    state = jax.device_get(alone.initialise())
    wanted, expected = compile_gradients(alone)(
        state.weights, single_rows(alone, numbers, DOCUMENTS)
    )
    weights = placed(state.weights, program.state_shapes.weights)
    loss, gradients = compile_gradients(program)(weights, program.parts.place(host))
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    leaves = jax.tree_util.tree_leaves_with_path(expected)
    for (path, x), found, weight in zip(
        leaves, jax.tree.leaves(gradients), jax.tree.leaves(weights), strict=True
    ):
        assert found.sharding.is_equivalent_to(weight.sharding, x.ndim)
        np.testing.assert_allclose(found, x, atol=1e-5 * np.abs(x).max(), err_msg=str(path))


@pytest.mark.parametrize(
    ("model", "windows"), [(CONFIG.model, (16, 16)), (PATTERN, (9, 16))], ids=["alike", "pattern"]
)
@pytest.mark.parametrize("degrees", [st.Degrees(ring=8), st.Degrees.startrail(8, c=2)], ids=str)
@pytest.mark.slow_except_every(4)
def test_rows_of_short_documents_send_only_what_these_see(degrees, model, windows):
    """Losses and gradients are those of one device that has no windows but those of the model."""
    rows = {"batch_size": 2, "seq_len": 512, "model": model}
    cut = make_program(degrees, data=DataConfig(longest_document=16), **rows)
    alone = make_program(st.Degrees(), data=DataConfig(), **rows)
    sequences = np.resize(text(MIXED).tokens, (2, 513))
    options = {"end_of_document": END, "longest": 16}
    batches = {
        program: place(
            next_token_batch(sequences, layout=program.attention.layout, **options),
            program.batch_sharding,
        )
        for program in (cut, alone)
    }
    state = jax.device_get(alone.initialise())
    wanted, expected = compile_gradients(alone)(state.weights, batches[alone])
    weights = placed(state.weights, cut.state_shapes.weights)
    compiled = compile_gradients(cut)
    loss, gradients = compiled(weights, batches[cut])
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5 * np.abs(y).max()),
        gradients,
        expected,
    )
    traffic = hlo.read_traffic(compiled.as_text())
    call = {name: SMALL[name] for name in ("heads", "kv_heads", "head_dim")}
    call |= {"batch": 2, "seq_len": 512, "dtype": "float32", "layout": "zigzag", "packed": True}
    seen = [st.communication(degrees, mask=Window(x - 1, 0), **call) for x in windows]
    sent = max(x["collective_permute"] + x["all_gather"] for x in traffic.received_by_device)
    # XLA may send the segment ids once for all layers.
    assert 0.95 <= sent / sum(x.total.received_bytes for x in seen) <= 1


STEPS = 30
MIXED = np.concatenate([LENGTHS, np.tile([12, 11, 10, 22], 10)])
"""Lengths of which batches of every window have parts of all degrees."""


def single_row_steps(config, state, batches, documents):
    """Losses and the last state of steps on one device, with a row for each document."""
    data, most = DataConfig(), max(map(len, batches))
    alone = dataclasses.replace(config, data=data, batch_size=most, zero=0)
    program = program_of(alone, st.Degrees())
    rows = (single_rows(program, numbers, documents) for numbers in batches)
    losses, state = train_steps(program, state, rows)
    return losses[:, 0].tolist(), state


def assert_same_training(found, wanted):
    """Of (losses, weights): the losses fall, and both agree."""
    losses, weights = zip(found, wanted, strict=True)
    assert len(losses[0]) == STEPS
    assert losses[1][-1] < losses[1][0] - 0.05
    np.testing.assert_allclose(*losses, rtol=1e-5)
    leaves = jax.tree_util.tree_leaves_with_path(weights[1])
    for x, (path, y) in zip(jax.tree.leaves(weights[0]), leaves, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5, err_msg=str(path))


ADAPTERS = {
    "lora": LoraConfig(rank=4, targets=("query", "value", "out", "up", "down")),
    "optimizer": OptimizerConfig(learning_rate=1e-2),
}
RUNS = {
    "StarTrail": (st.Degrees.startrail(8, c=2), {}),
    "tensor, zero 3": (st.Degrees(tensor=2, head=2, ring=2), {"zero": 3}),
    "LoRA, zero 3": (st.Degrees(data=2, head=2, ring=2), ADAPTERS | {"zero": 3}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("degrees", "changes"), RUNS.values(), ids=RUNS.keys())
def test_training_is_that_of_single_rows_on_one_device(degrees, changes):
    program = make_program(degrees, steps=STEPS, **changes)
    documents = text_documents([text(MIXED)], END, LONGEST)
    state, series = program.initialise(), batches_of(program, documents)
    first, losses, batches, seen = jax.device_get(state), [], [], set()
    for _ in range(STEPS):
        host = next(series)
        batches.append(numbers_in(program, host, documents))
        seen |= {program.parts.splits[i].c for i in host.split[: host.count]}
        state, metrics = program.train_step(state, program.parts.place(host))
        losses.append(float(metrics.loss))
    series.close()
    assert seen == {split.c for split in program.parts.splits}
    wanted, expected = single_row_steps(program.config, first, batches, documents)
    assert_same_training((losses, state.weights), (wanted, expected.weights))


@pytest.mark.slow
@pytest.mark.parametrize("changes", ["--mesh.c 1 --zero 3", "--lora.rank 4"])
def test_two_processes_train_as_one_device_on_single_rows(tmp_path, changes):
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("train", "val"):
        np.save(folder / f"{name}.npy", text(MIXED).tokens)
    sizes = " ".join(f"--model.{x.replace('_', '-')} {n}" for x, n in SMALL.items())
    flags = (
        f"{sizes} {changes} --devices 8 --seq-len {LONGEST} --batch-size 6 --steps {STEPS} "
        "--log-every 1 --optimizer.learning-rate 1e-2 --data.batches documents --data.draw 24 "
        f"--data.end-of-document {END} --sample.length 0 --no-tensorboard "
        f"--data.path {folder} --run-dir {tmp_path / 'run'}"
    ).split()
    with failures.Processes(2, flags, folder=tmp_path) as processes:
        processes.end()
    losses = [x["train_loss"] for x in records_of(tmp_path / "run") if "train_loss" in x]

    config = train.read_command_line(flags).settings
    program = program_of(config, st.Degrees(ring=8))
    weights, _ = restore_model(config.run_dir, config, program.state_shapes.model, note=print)
    data = GPTTask().open_data(config, program.attention.layout)
    series = PartBatches(program.parts, data, seed=config.seed)
    batches = [numbers_in(program, next(series), data.documents) for _ in range(STEPS)]
    series.close()
    first = jax.device_get(program.initialise())
    wanted, expected = single_row_steps(config, first, batches, data.documents)
    assert_same_training((losses, weights), (wanted, expected.model))


@pytest.mark.parametrize(
    ("per_node", "expected"),
    [(None, st.Degrees(data=2, head=4)), (2, st.Degrees(data=2, ring=2, head=2))],
)
def test_rows_on_several_nodes_have_the_degrees_of_the_fewest_bytes_between_nodes(
    per_node, expected
):
    """A device receives least with Ulysses, but nodes send each other less in a ring."""
    model = dataclasses.replace(CONFIG.model, heads=32, kv_heads=8)
    nodes = MeshConfig(devices_per_node=per_node)
    program = make_program(st.Degrees(ring=8), model=model, mesh=nodes)
    _, attentions = make_parts(program.config, program.attention, program.objective)
    found = {x.degrees.sequence: x.degrees for x in attentions}
    assert (found[2], found[4]) == (st.Degrees(data=4, ring=2), expected)


@pytest.mark.parametrize("order", ["rings_inside", "collectives_inside", "context_first"])
def test_devices_that_share_a_row_share_a_node(order):
    """As far as they fit into one, whichever axes of the mesh lie inside the nodes."""
    for degrees in (st.Degrees(ring=2, team=2, group=2), st.Degrees(data=2, ring=2, team=2)):
        program = make_program(degrees, order)
        shape = program.parts.most, program.parts.devices, program.parts.share
        indices = program.parts.sharding.devices_indices_map(shape)
        devices = {index[1].start or 0: device.id for device, index in indices.items()}
        for split in program.parts.splits:
            rows = {}
            for place_, (row, _) in enumerate(split.places):
                rows.setdefault(row, []).append(devices[place_])
            for held in rows.values():
                assert max(held) - min(held) == split.c - 1 or split.c == degrees.sequence


@pytest.mark.slow
def test_documents_on_one_device_send_nothing():
    """A program whose documents all fit one device has no collective but those of weights."""
    program = make_program(st.Degrees.startrail(8, c=2))
    alone = program.parts.splits[0]
    assert alone.c == 1
    program = copy.copy(program)
    program.parts = dataclasses.replace(program.parts, splits=(alone,))
    program._models = program._models[:1]
    traffic = hlo.read_traffic(compile_gradients(program).as_text())
    assert {kind for kind, size in traffic.by_collective.items() if size} == {"all_reduce"}


def test_batches_go_on_where_they_were():
    program = make_program(st.Degrees.startrail(8, c=2))
    series = batches_of(program, DOCUMENTS)
    states, rest = [series.get_state()], []
    for _ in range(7):
        rest.append(next(series))
        states.append(series.get_state())
    for done in (0, 1, 4):
        again = batches_of(program, DOCUMENTS)
        again.set_state(states[done])
        for batch in rest[done:]:
            jax.tree.map(np.testing.assert_array_equal, next(again), batch)
        again.close()
    other = batches_of(program, text_documents([text(LENGTHS[1:])], END, LONGEST))
    with refused(InputError, documents=20):
        other.set_state(states[2])
    other.set_state(states[2], new_order=True)
    assert other.get_state()["documents"]["epoch"] == 0
    with refused(InputError, "A run must"):
        other.set_state({"batches": 3})
    series.close()
    other.close()


@pytest.mark.parametrize(
    "degrees", [st.Degrees(data=3, ring=2), st.Degrees.startrail(4, c=2)], ids=["6", "4"]
)
def test_other_devices_go_on_with_all_documents_once(degrees):
    before = make_program(st.Degrees.startrail(8, c=2), batch_size=1)
    series = batches_of(before, DOCUMENTS)
    program = make_program(degrees, batch_size=degrees.data)
    seen = documents_in(before, next(series))
    others = batches_of(program, DOCUMENTS)
    others.set_state(series.get_state())
    while len(seen) < np.count_nonzero(LENGTHS):
        seen += documents_in(program, next(others))
    assert_all_once(seen)
    series.close()
    others.close()


@pytest.mark.parametrize("windows", [("none",), (8, "none"), (16, 8)], ids=str)
def test_a_document_costs_what_its_layers_compute(windows):
    model = dataclasses.replace(CONFIG.model, windows=windows)
    program = make_program(st.Degrees(ring=4), model=model)
    cost, lengths = program.parts.cost, np.array([1, 7, 40, 300])
    counted = cost.token * lengths + cost.pair * cost.visible_pairs(lengths)
    flops = [n * program.objective.sizes.flops_per_token(n) for n in lengths.tolist()]
    np.testing.assert_allclose(counted / counted[0], np.divide(flops, flops[0]), rtol=1e-6)


def test_settings_that_documents_or_their_rows_cannot_have_are_refused():
    for changes in ({"gradient_accumulation": 2}, {"attention": AttentionConfig(inner=2)}):
        with refused(InputError, "of a"):
            make_program(st.Degrees(ring=4), **changes)
    for data in (
        {"longest_document": 0},
        {"longest_document": 8, "mask_documents": False},
        {"longest_document": 8, "batches": "documents"},
        {"longest_document": LONGEST},
    ):
        with refused(InputError, "data.longest_document", **data):
            dataclasses.replace(CONFIG, data=DataConfig(**data))
    with refused(InputError, tensor=4, kv_heads=2):
        make_program(st.Degrees(tensor=4, ring=2))


def test_token_that_ends_and_begins_documents_belongs_to_the_one_that_it_begins(tmp_path):
    """Three documents with that token on both sides; the second is empty, and has one alone."""
    tokens = np.array([END, 8, 9, END, END, END, 10, 11, END])
    documents = [[END, 8, 9, END], [END], [END, 10, 11, END]]
    stream = Stream(name="text", tokens=tokens, vocab_size=48)
    found = text_documents([stream], END, LONGEST, begins_too=True)
    examples = [found.read(n) for n in range(len(found.sizes.lengths))]
    read = [[*x.tokens.tolist(), x.targets[-1].item()] for x in examples]
    assert read == [x for x in documents if len(x) > 1]
    # A row from each place, as rows begin and end anywhere.
    numbers = np.repeat(range(3), [4, 1, 4])
    for start in (0, 3, 4, 5, 6):
        row = np.pad(tokens[start:], (0, start), constant_values=PADDING)
        batch = next_token_batch(
            row[None], layout=Layout("contiguous", 1), end_of_document=END, begins_too=True
        )
        ids = batch.segment_ids[0]
        expected = numbers[start:-1] - numbers[start]
        np.testing.assert_array_equal(ids[: len(expected)], expected)
        same = numbers[start:-1] == numbers[start + 1 :]
        np.testing.assert_array_equal(batch.weights[0][: len(same)], same)
    np.save(tmp_path / "a.npy", np.tile(tokens, 30))
    given = DataConfig(path=(tmp_path / "a.npy",), begin_of_document=END, end_of_document=END)
    data = GPTTask().open_data(
        dataclasses.replace(
            gpt_tiny(), data=given, seq_len=8, sample=TextSampleConfig(), run_dir=tmp_path
        ),
        Layout("contiguous", 1),
    )
    batch = data.collate([data.train[0]], [0])
    np.testing.assert_array_equal(batch.segment_ids[0], numbers[:8])
    with refused(InputError, "data.begin_of_document must be left out"):
        open_corpora(dataclasses.replace(given, begin_of_document=3), vocab_size=48)
