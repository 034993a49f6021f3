"""Windows, packed documents and batches: the same every time, whatever the mesh and the hosts."""

import functools
import json
from contextlib import closing
from unittest import mock

import chex
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as hst
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from refusals import refused
from startrail_jax.errors import InputError
from startrail_jax.tokens.layout import Layout
from trainer.data import batches, order
from trainer.data.dataset import Dataset, Groups
from trainer.gpt.batches import PADDING, Sequences, TokenBatch, next_token_batch
from trainer.gpt.batches import collate as collate_sequences
from trainer.gpt.corpus import Stream

pytestmark = pytest.mark.quick

NATURAL = Layout("contiguous", 1)


def stream(tokens, *, name="a.bin", vocab_size=1000):
    return Stream(name=name, tokens=np.asarray(tokens), vocab_size=vocab_size)


def counted(num_windows, seq_len=3):
    """Windows whose first tokens are 0, seq_len, 2 seq_len, ..."""
    return Sequences([stream(np.arange(num_windows * seq_len + 1))], seq_len)


def training(sequences, *, layout=NATURAL, batch_size=5, seed=0, end_of_document=None, **options):
    return order.TrainingBatches(
        sequences,
        collate=collate(layout, end_of_document),
        batch_size=batch_size,
        seed=seed,
        **options,
    )


def collate(layout=NATURAL, end_of_document=None):
    options = {"layout": layout, "end_of_document": end_of_document}
    return functools.partial(collate_sequences, **options)


def firsts(iterator, count):
    """The first tokens of the rows of the next `count` batches."""
    return [next(iterator).tokens[:, 0].tolist() for _ in range(count)]


# Windows.


def test_sequences_cut_every_stream_into_windows():
    short, long, longer = stream([7, 8, 9]), stream(np.arange(8)), stream(np.arange(10, 17))
    sequences = Sequences([short, long, short, longer], 3)
    assert [sequences[index].tolist() for index in range(len(sequences))] == [
        [0, 1, 2, 3],
        [3, 4, 5, 6],
        [10, 11, 12, 13],
        [13, 14, 15, 16],
    ]


def test_sequences_read_no_more_than_their_window(tmp_path):
    tokens = np.zeros(1 << 20, np.uint16)
    tokens[[999, 1031]] = 7
    tokens.tofile(tmp_path / "a.bin")
    mapped = np.memmap(tmp_path / "a.bin", np.uint16, "r")
    # The tokens around the window lie beyond the vocabulary, but are not read.
    sequences = Sequences([stream(mapped, vocab_size=7)], 10)
    assert len(sequences) == 104_857
    assert sequences[101].tolist() == [0] * 11
    with refused(InputError, "vocab_size=7"):
        sequences[99]


def test_streams_that_are_all_shorter_than_a_sequence_are_filled_up():
    sequences = Sequences([stream([3, 4]), stream([5]), stream([6, 7, 8, 9, 1])], 5)
    assert sequences.is_filled
    assert [sequences[index].tolist() for index in range(len(sequences))] == [
        [3, 4, -1, -1, -1, -1],
        [6, 7, 8, 9, 1, -1],
    ]
    assert not Sequences([stream([3, 4]), stream(np.arange(6))], 5).is_filled


@pytest.mark.parametrize("end_of_document", [None, 0])
@pytest.mark.parametrize("layout", [NATURAL, Layout("zigzag", 4)])
def test_what_a_sequence_is_filled_up_with_does_not_count(layout, end_of_document):
    tokens = [7, 8, 0, 9, 4]
    options = {"layout": NATURAL, "end_of_document": end_of_document}
    short = next_token_batch(np.array([tokens]), **options)
    filled = next_token_batch(
        Sequences([stream(tokens)], 16)[0][None], **options | {"layout": layout}
    )
    filled = jax.tree.map(layout.unpermute, filled)
    # The last token has no target, but others may see it.
    assert filled.tokens[0].tolist() == [*tokens, *[0] * 11]
    chex.assert_trees_all_equal(jax.tree.map(lambda x: x[:, :4], filled), short)
    assert not filled.weights[:, 4:].any()
    assert [x.dtype.name for x in jax.tree.leaves(filled)] == [
        x.dtype.name for x in jax.tree.leaves(short)
    ]
    if end_of_document is not None:
        assert filled.segment_ids[0].tolist() == [0, 0, 0, 1, 1, *[PADDING] * 11]


@pytest.mark.parametrize("lengths", [[], [1], [0, 1]])
def test_data_without_a_token_and_its_target_raise(lengths):
    streams = [stream(np.zeros(length, int), name=f"{length}.bin") for length in lengths]
    given = "at most 1 tokens, in '1.bin'" if lengths else "no tokens"
    with refused(InputError, "must have at least 2 tokens", f"; got {given}. Use more"):
        Sequences(streams, 5)


# Batches.


def test_documents_of_a_window_are_told_apart():
    # 5 6 0 (which began before the window), 0 (empty) and 7 8 9 (which goes on after it).
    batch = next_token_batch(
        np.array([[5, 6, 0, 0, 7, 8, 9], [0, 1, 2, 3, 4, 5, 0]], np.uint8),
        layout=NATURAL,
        end_of_document=0,
    )
    assert batch.tokens.tolist() == [[5, 6, 0, 0, 7, 8], [0, 1, 2, 3, 4, 5]]
    assert batch.targets.tolist() == [[6, 0, 0, 7, 8, 9], [1, 2, 3, 4, 5, 0]]
    assert batch.segment_ids.tolist() == [[0, 0, 0, 1, 2, 2], [0, 1, 1, 1, 1, 1]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 0, 1], [0, 0, 1, 2, 3, 4]]
    assert batch.weights.tolist() == [[1, 1, 0, 0, 1, 1], [0, 1, 1, 1, 1, 1]]
    assert [x.dtype.name for x in jax.tree.leaves(batch)] == ["int32"] * 4 + ["float32"]


@pytest.mark.parametrize("end_of_document", [None, 0])
@pytest.mark.parametrize("longest", [1, 3, 7, 50])
def test_pieces_of_long_documents_are_documents(longest, end_of_document):
    tokens = np.random.default_rng(0).integers(9, size=(3, 42))
    options = {"layout": NATURAL, "end_of_document": end_of_document}
    batch = next_token_batch(tokens, **options, longest=longest)
    whole = next_token_batch(tokens, **options)
    chex.assert_trees_all_equal(batch[:2], whole[:2])
    np.testing.assert_array_equal(batch.weights, whole.weights)
    for row in range(3):
        ids = np.zeros(41) if whole.segment_ids is None else whole.segment_ids[row]
        places = [
            (document, place // longest, place % longest)
            for document, n in enumerate(np.unique(ids, return_counts=True)[1])
            for place in range(n)
        ]
        pieces = sorted({x[:2] for x in places})
        assert batch.positions[row].tolist() == [x[2] for x in places]
        assert batch.segment_ids[row].tolist() == [pieces.index(x[:2]) for x in places]


@pytest.mark.parametrize("end_of_document", [None, 3])
@pytest.mark.parametrize(
    ("layout", "length", "filled"),
    [
        (Layout("contiguous", 3), 42, 42),
        (Layout("zigzag", 3), 42, 42),
        # Rows of any length are filled up with what does not count.
        (Layout("zigzag", 4), 43, 48),
    ],
)
def test_layout_permutes_every_array(layout, length, filled, end_of_document):
    windows = np.random.default_rng(0).integers(5, size=(5, length + 1))
    options = {"end_of_document": end_of_document}
    batch = next_token_batch(windows, layout=layout, **options)
    natural = next_token_batch(windows, layout=NATURAL, **options)
    np.testing.assert_array_equal(natural.tokens, windows[:, :-1])
    found = jax.tree.map(layout.unpermute, batch)
    chex.assert_trees_all_equal(jax.tree.map(lambda x: x[:, :length], found), natural)
    assert found.tokens.shape == (5, filled)
    assert not found.weights[:, length:].any()
    if end_of_document is None:
        assert natural.segment_ids is None
        np.testing.assert_array_equal(natural.positions, [range(length)] * 5)
        np.testing.assert_array_equal(natural.weights, 1)
    else:
        assert (found.segment_ids[:, length:] == PADDING).all()


# The order of training.


def test_every_epoch_holds_all_windows_in_another_order():
    # 7 windows in batches of 5: the second batch lies in two epochs.
    given = np.concatenate(firsts(training(counted(7)), 7)).tolist()
    epochs = [given[start : start + 7] for start in range(0, 35, 7)]
    assert [sorted(epoch) for epoch in epochs] == [[0, 3, 6, 9, 12, 15, 18]] * 5
    assert len({tuple(epoch) for epoch in epochs}) == 5
    # One window is enough.
    assert firsts(training(counted(1)), 2) == [[0] * 5] * 2


def test_order_depends_on_the_seed_alone():
    sequences = counted(97)
    first = firsts(training(sequences), 40)
    assert firsts(training(sequences), 40) == first
    for seed in [1, 2**40]:
        other = firsts(training(sequences, seed=seed), 40)
        assert other != first
        # Nor is an epoch of one seed an epoch of another.
        assert np.concatenate(other)[:97].tolist() != np.concatenate(first)[97:194].tolist()


def test_order_is_that_of_earlier_versions():
    # A run that goes on after an update must not see its data again.
    assert firsts(training(counted(97, seq_len=1), seed=3), 2) == [
        [19, 52, 83, 35, 92],
        [73, 85, 30, 91, 67],
    ]


@pytest.mark.parametrize(
    ("before", "now", "windows", "words"),
    [
        ({}, {}, 12, ["windows=12", "windows=11"]),
        ({}, {"batch_size": 6}, 11, ["batch_size=6", "batch_size=5"]),
        ({}, {"seed": 1}, 11, ["seed=1", "seed=0"]),
        ({"digest": "ab"}, {"digest": "cd"}, 11, ["content=cd", "content=ab"]),
        ({"tokens": "12"}, {"tokens": "34"}, 11, ["tokens=34", "tokens=12"]),
    ],
)
def test_position_in_another_order_raises_unless_a_new_one_is_asked_for(
    before, now, windows, words
):
    state = {**training(counted(11), **before).get_state(), "batches": 2}
    with refused(InputError, *words):
        training(counted(windows), **now).set_state(state)
    after = training(counted(windows), **now)
    after.set_state(state, new_order=True)
    assert firsts(after, 3) == firsts(training(counted(windows), **now), 3)


@pytest.mark.parametrize("new_order", [False, True])
@pytest.mark.parametrize("content", [{}, {"digest": "ab"}, {"digest": "ab", "tokens": "12"}])
def test_position_in_the_same_order_goes_on(content, new_order):
    """Checkpoints of earlier versions tell neither content nor tokens."""
    before = training(counted(11), **content)
    firsts(before, 2)
    state = before.get_state()
    assert state.pop("content", None) == content.get("digest")
    assert state.pop("tokens", None) == content.get("tokens")
    assert state == {"batches": 2, "windows": 11, "batch_size": 5, "seed": 0}
    after = training(counted(11), digest="ab", tokens="12")
    next(after)
    after.set_state(json.loads(json.dumps(before.get_state())), new_order=new_order)
    assert firsts(after, 1) == firsts(training(counted(11)), 3)[2:]
    assert after.get_state()["content"] == "ab"


HOSTS = hst.lists(hst.integers(0, 3), min_size=12, max_size=12)
LAYOUTS = hst.builds(Layout, hst.sampled_from(["contiguous", "zigzag"]), hst.integers(1, 3))


@given(
    windows=hst.integers(1, 40),
    batch_size=hst.integers(1, 12),
    seed=hst.integers(0, 3),
    runs=hst.lists(hst.tuples(HOSTS, LAYOUTS, hst.integers(0, 5)), min_size=1, max_size=4),
)
def test_order_is_that_of_one_host_for_any_hosts_and_layouts_and_stops(
    windows, batch_size, seed, runs
):
    """Each run goes on with the rows divided among other hosts, as a mesh divides them."""
    sequences = counted(windows, seq_len=12)
    options = {"batch_size": batch_size, "seed": seed, "end_of_document": 4}
    natural, state = training(sequences, **options), None
    for host_of_row, layout, steps in runs:
        rows = [[i for i in range(batch_size) if host_of_row[i] == host] for host in range(4)]
        hosts = {
            tuple(own): training(sequences, **options, layout=layout, rows=own)
            for own in rows
            if own
        }
        for host in hosts.values():
            if state is not None:
                host.set_state(json.loads(json.dumps(state)))
        for _ in range(steps):
            whole = jax.tree.map(layout.permute, next(natural))
            for own, host in hosts.items():
                chex.assert_trees_all_equal(next(host), jax.tree.map(lambda x: x[[*own]], whole))  # noqa: B023
        (state, *others) = [host.get_state() for host in hosts.values()]
        assert all(other == state for other in others)


def test_hosts_read_nothing_else():
    starts = []

    class Recorded(Stream):
        def read(self, start, stop):
            starts.append(start)
            return super().read(start, stop)

    whole = firsts(training(counted(23), batch_size=4), 20)
    recorded = Recorded(name="a.bin", tokens=np.arange(70), vocab_size=70)
    part = training(Sequences([recorded], 3), batch_size=4, rows=[2])
    assert firsts(part, 5) == [[batch[2]] for batch in whole[:5]]
    assert set(starts) <= {batch[2] for batch in whole}


def test_error_of_a_reading_thread_reaches_the_caller():
    tokens = np.arange(100) % 40
    iterator = training(Sequences([stream(tokens, vocab_size=39)], 3))
    with refused(InputError, "vocab_size=39"):
        firsts(iterator, 20)


# Groups.


def in_groups(groups, *, batch_size, seed=0, **options):
    return order.TrainingBatches(
        range(len(groups)),
        collate=lambda examples, numbers: np.array([examples, numbers]),
        batch_size=batch_size,
        seed=seed,
        groups=np.asarray(groups),
        **options,
    )


@given(
    sizes=hst.lists(hst.integers(1, 13), min_size=1, max_size=4),
    batch_size=hst.integers(1, 5),
    seed=hst.integers(0, 9),
)
def test_batches_are_of_one_group_and_hold_each_example_once_an_epoch(sizes, batch_size, seed):
    groups = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    in_groups = order.GroupOrder(groups, batch_size=batch_size, seed=seed)
    epochs = 6
    # Of each group, the batches that begin in its first orders.
    count = sum(-(-epochs * size // batch_size) for size in sizes)
    seen = [[] for _ in sizes]
    for step in range(count):
        numbers = in_groups.numbers(step, range(batch_size))
        (group,) = set(groups[numbers])
        seen[group] += numbers
    for group, (size, numbers) in enumerate(zip(sizes, seen, strict=True)):
        assert 0 <= len(numbers) - epochs * size < batch_size
        for epoch in range(epochs):
            of_epoch = numbers[epoch * size : (epoch + 1) * size]
            assert sorted(of_epoch) == np.flatnonzero(groups == group).tolist()


def test_groups_are_mixed_and_neither_seeds_nor_epochs_share_their_order():
    groups = np.repeat([0, 1], 40)
    orders = [
        [order.GroupOrder(groups, batch_size=4, seed=seed).numbers(step, [0]) for step in steps]
        for seed, steps in ((0, range(20)), (0, range(20, 40)), (1, range(20)))
    ]
    kinds = [groups[np.ravel(order)].tolist() for order in orders]
    assert all(sum(kind) == 10 and kind != sorted(kind) for kind in kinds)
    assert len(set(map(tuple, kinds))) == 3
    assert len({str(order) for order in orders}) == 3


def test_batches_of_groups_go_on_where_they_were_and_hosts_read_their_rows_alone():
    groups = [0, 1, 1, 0, 2, 1, 1, 0, 1]
    whole = in_groups(groups, batch_size=2)
    wanted = [next(whole).tolist() for _ in range(12)]
    begun = in_groups(groups, batch_size=2)
    for _ in range(5):
        next(begun)
    again = in_groups(groups, batch_size=2)
    again.set_state(json.loads(json.dumps(begun.get_state())))
    assert [next(again).tolist() for _ in range(7)] == wanted[5:]
    part = in_groups(groups, batch_size=2, rows=[1])
    assert [next(part)[:, 0].tolist() for _ in range(5)] == [[x[1], y[1]] for x, y in wanted[:5]]
    # Row r of batch k is example k * batch_size + r of the run.
    assert [x[1] for x in wanted] == [[2 * k, 2 * k + 1] for k in range(12)]


def test_feed_of_groups_tells_their_shapes_and_mean_tokens():
    lengths, train = np.array([8, 4, 6]), np.array([0, 0, 1, 1, 1])
    data = Dataset(
        train=range(5),
        held_out=range(1),
        collate=lambda rows, _: np.zeros((len(rows), lengths[train[rows[0]]]), np.int32),
        groups=Groups(train, np.array([2]), lengths, ("high", "low", "none")),
        description="",
        loss_unit="",
    )
    feed = batches.Feed(data, sharding=sharding((1, 1)), shape=(2, 8), seed=0, num_held_out=1)
    with closing(feed):
        # Of the last group there is nothing to train on.
        assert [x.shape for x in feed.kinds()] == [(2, 8), (2, 4)]
        assert {feed.next().shape for _ in range(9)} == {(2, 8), (2, 4)}
        found = feed.description
    # A long run has 2 rows of 8 for 3 of 4: 28 tokens in 5 rows.
    assert found.tokens_per_batch == pytest.approx(2 * 28 / 5)
    assert found.mean_length == round((2 * 8**2 + 3 * 4**2) / 28)
    assert found.line.endswith("2 of high (8 tokens), 3 of low (4 tokens), 0 of none (6 tokens)")


@pytest.mark.parametrize(
    ("groups", "batch_size", "few"),
    [
        (None, 5, None),
        (None, 6, "(5 examples)"),
        ([0, 0, 1, 1, 1], 2, None),
        ([0, 0, 1, 1, 1], 3, "(2 of high)"),
        ([0, 0, 1, 1, 1], 4, "(2 of high, 3 of low)"),
    ],
)
def test_batch_larger_than_the_data_is_said(groups, batch_size, few):
    if groups is not None:
        groups = Groups(np.array(groups), np.array([0]), np.array([4, 4, 4]), ("high", "low", "no"))
    data = Dataset(
        train=range(5),
        held_out=range(1),
        collate=lambda rows, _: np.zeros((len(rows), 4), np.int32),
        groups=groups,
        description="",
        loss_unit="",
    )
    shape = (batch_size, 4)
    with closing(
        batches.Feed(data, sharding=sharding((1, 1)), shape=shape, seed=0, num_held_out=1)
    ) as feed:
        notes = [line for line in feed.lines if line.startswith("NOTE: ")]
    assert len(notes) == (few is not None)
    assert all(few in note and f"a batch of {batch_size} " in note for note in notes)


# Validation.


def test_validation_has_the_same_examples_and_numbers_whatever_their_groups():
    def found(groups):
        made = order.validation_batches(
            range(9), collate=lambda *rows: rows, batch_size=4, count=5, groups=groups
        )
        for examples, _ in made:
            assert groups is None or len({groups[x] for x in examples}) == 1
        assert all(len(examples) == len(numbers) == 4 for examples, numbers in made)
        rows = [row for batch in made for row in zip(*batch, strict=True)]
        return sorted((x, n) for x, n in rows if n != order.NO_EXAMPLE), len(made)

    one, count = found(None)
    assert count == 2
    assert found(np.array([0, 1, 1, 0, 2, 1, 1, 0, 1])) == (one, 3)


@pytest.mark.parametrize(
    ("windows", "options", "expected"),
    [
        # Spread evenly: 4 of 11 windows, as 2 batches: windows 0, 2, 5, 8.
        (11, dict(batch_size=2), [[0, 6], [15, 24]]),
        # Rounded up to whole batches.
        (6, dict(batch_size=3), [[0, 3, 6], [9, 12, 15]]),
        (6, dict(batch_size=3, rows=[0, 2]), [[0, 6], [9, 15]]),
    ],
)
def test_validation_windows_are_spread_evenly_in_whole_batches(windows, options, expected):
    found = order.validation_batches(counted(windows), collate=collate(), count=4, **options)
    assert [batch.tokens[:, 0].tolist() for batch in found] == expected


@pytest.mark.parametrize(("windows", "batch_size"), [(2, 4), (5, 2), (10, 4)])
def test_validation_of_few_windows_has_each_once(windows, batch_size):
    found = order.validation_batches(
        counted(windows), collate=collate(), batch_size=batch_size, count=64
    )
    weights = np.concatenate([batch.weights for batch in found])
    firsts = np.concatenate([batch.tokens[:, 0] for batch in found])
    assert len(weights) - windows < batch_size
    assert firsts[weights.any(axis=1)].tolist() == list(range(0, 3 * windows, 3))
    assert weights.sum() == 3 * windows


# Devices.


def sharding(shape=(2, 4)):
    devices = np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape)
    return NamedSharding(Mesh(devices, ("data", "ring")), PartitionSpec("data", "ring"))


def numbered(batch_size=6, seq_len=8):
    arrays = np.arange(5 * batch_size * seq_len, dtype=np.int32).reshape(5, batch_size, seq_len)
    return TokenBatch(*arrays[:4], arrays[4].astype(np.float32))


def test_place_puts_every_array_on_its_devices():
    batch = numbered()
    placed = batches.place(batch, sharding())
    chex.assert_trees_all_equal(jax.device_get(placed), batch)
    assert all(x.sharding == sharding() for x in jax.tree.leaves(placed))
    assert [x.dtype.name for x in jax.tree.leaves(placed)] == ["int32"] * 4 + ["float32"]
    assert batches.place(batch._replace(segment_ids=None), sharding()).segment_ids is None


def test_process_reads_the_rows_of_its_devices():
    whole = sharding((3, 2))
    assert batches.local_rows(whole, (6, 8)) == (0, 1, 2, 3, 4, 5)
    # Another process holds the middle of the batch.
    addressable = whole.devices_indices_map((6, 8))
    held = {device: addressable[device] for device in whole.mesh.devices[[0, 2]].flat}
    part = mock.Mock(spec=NamedSharding, addressable_devices_indices_map=lambda shape: held)
    assert batches.local_rows(part, (6, 8)) == (0, 1, 4, 5)


def test_place_finds_the_rows_of_a_device_among_those_of_its_process(monkeypatch):
    read = []

    def make(shape, sharding, callback, *, dtype):
        read.append((shape, callback((slice(4, 6), slice(2, 4))).tolist(), dtype.name))
        return jax.numpy.zeros(())

    monkeypatch.setattr(jax, "make_array_from_callback", make)
    rows = (0, 1, 4, 5)
    batch = jax.tree.map(lambda x: x[list(rows)], numbered())
    batches.place(batch, sharding((3, 2)), batch_size=6, rows=rows)
    assert read[0] == ((6, 8), [[34, 35], [42, 43]], "int32")
    assert read[4] == ((6, 8), [[226, 227], [234, 235]], "float32")
