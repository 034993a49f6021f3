"""Documents of all lengths: each once an epoch, in a row that holds it, and equal work for all."""

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

import startrail_jax as st
from refusals import refused
from startrail_jax.errors import InputError
from startrail_jax.tokens import documents
from startrail_jax.tokens.documents import BatchPart, DocumentCost, PartStream, summary

UNSENT = DocumentCost(hop=0)


def published_lengths(count, seed=0):
    """Lengths with the quantiles of rows of fine-tuning data that Megatron-Bridge#3316 gives."""
    drawn = np.random.default_rng(seed).exponential(18_372, 2 * count)
    return np.ceil(drawn[drawn <= 140_459])[:count].astype(int)


def drawn_lengths(kind, count, longest, seed):
    """Random lengths of a random profile, from 0 to `longest` tokens."""
    rng = np.random.default_rng(seed)
    middle = rng.uniform(0.01, 0.5)
    drawn = {
        "exponential": lambda: rng.exponential(middle, count),
        "lognormal": lambda: rng.lognormal(np.log(middle), rng.uniform(0.1, 2), count),
        "equal": lambda: np.full(count, rng.uniform(0.01, 1)),
        "uniform": lambda: rng.uniform(0, 2 * middle, count),
        "two": lambda: rng.choice(rng.uniform(0.01, 1, 2), count),
        "halves": lambda: rng.uniform(0.5, 0.6, count) * 0.5 ** rng.integers(0, 7, count),
    }[kind]()
    return np.clip(np.rint(drawn * longest), 0, longest).astype(int)


KINDS = ["exponential", "lognormal", "equal", "uniform", "two", "halves"]


@some.composite
def profiles(draw, most=300):
    devices = draw(some.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 32]))
    share = draw(some.sampled_from([1, 7, 64, 2048, 16384]))
    kind, count = draw(some.sampled_from(KINDS)), draw(some.integers(1, most))
    lengths = drawn_lengths(kind, count, devices * share, draw(some.integers(0, 2**32 - 1)))
    return lengths, devices, share


def assert_right(parts, lengths, devices, share, numbers):
    """Each of these documents is in one row, and each part fills the devices."""
    assert parts == sorted(parts, key=lambda part: part.c)
    for part in parts:
        assert devices % part.c == 0
        assert len(part.rows) == devices // part.c
        assert any(part.rows)
        assert all(sum(lengths[x] for x in row) <= part.c * share for row in part.rows)
    placed = [x for part in parts for row in part.rows for x in row]
    assert sorted(placed) == sorted(x for x in numbers if lengths[x] > 0)


@given(profiles())
@settings(max_examples=100)
def test_every_token_is_in_one_part_and_fits(profile):
    lengths, devices, share = profile
    parts = st.parts(lengths, devices, share=share)
    assert_right(parts, lengths, devices, share, range(len(lengths)))
    assert parts == st.parts(lengths.tolist(), devices, share=share)


def least_seconds(lengths, devices, share, cost):
    """Equal work in the fewest parts: Fekete and Schepers, New classes of fast lower bounds."""
    size, lengths = devices * share, lengths.astype(np.int64)
    fewest = -(-int(lengths.sum()) // size)
    shortest = np.unique(lengths[2 * lengths <= size])
    for epsilon in (0, *shortest[:: len(shortest) // 20 + 1].tolist()):
        rounded = np.where(lengths > size - epsilon, size, np.where(lengths < epsilon, 0, lengths))
        for k in range(1, 20):
            # In units of 1 / (k * size), to be whole numbers.
            scaled = rounded * (k + 1)
            weights = np.where(scaled % size == 0, rounded * k, scaled // size * size)
            fewest = max(fewest, -(-int(weights.sum()) // (k * size)))
    pairs = int((lengths * (lengths + 1) // 2).sum())
    return cost.token * share * fewest + cost.pair * pairs / devices


@pytest.mark.parametrize("examples", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_time_is_near_the_least_for_random_profiles(examples):
    @given(profiles())
    @settings(max_examples=examples)
    def check(profile):
        lengths, devices, share = profile
        parts = st.parts(lengths, devices, share=share, cost=UNSENT)
        found = summary([parts], lengths, devices, share=share, cost=UNSENT)
        least = least_seconds(lengths, devices, share, UNSENT)
        # Whole parts only: one more is allowed.
        assert found.seconds <= 1.1 * least + UNSENT.token * share

    check()


@pytest.mark.parametrize("examples", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_devices_have_equal_work_in_random_profiles(examples):
    @given(some.data())
    @settings(max_examples=examples)
    def check(data):
        devices = data.draw(some.sampled_from([1, 2, 4, 6, 8, 12, 16, 32]))
        kind, seed = data.draw(some.sampled_from(KINDS)), data.draw(some.integers(0, 2**32 - 1))
        lengths = drawn_lengths(kind, 2000, devices * 4096, seed)
        parts = st.parts(lengths, devices, share=4096)
        assert summary([parts], lengths, devices, share=4096).balance <= 1.1

    check()


@given(profiles(most=60))
@settings(max_examples=50)
def test_parts_take_no_longer_than_rows_over_all_devices(profile):
    lengths, devices, share = profile
    seconds = [
        summary([found], lengths, devices, share=share).seconds
        for found in (
            st.parts(lengths, devices, share=share),
            st.parts(lengths, devices, share=share, degrees=[devices]),
        )
    ]
    assert seconds[0] <= 1.02 * seconds[1]


def test_short_documents_stay_alone_and_long_ones_spread():
    # As in the docstring of the module.
    parts = st.parts([30, 10, 10, 10, 10, 10], 4, share=10)
    assert parts == [
        BatchPart(c=1, rows=((2,), (3,), (4,), (5,))),
        BatchPart(c=4, rows=((0, 1),)),
    ]


def test_summary_counts_what_is_there():
    parts = st.parts([30, 10, 10, 10, 10, 5], 4, share=10)
    cost = DocumentCost(token=1, pair=2, hop=3)
    found = summary([parts], [30, 10, 10, 10, 10, 5], 4, share=10, cost=cost)
    assert (found.tokens, found.places, found.alone) == (75, 80, 35)
    assert found.padding == pytest.approx(5 / 80)
    assert found.parts == {1: 1, 4: 1}
    # One row of 30 and 10 tokens on four devices; rows of 10, 10, 10 and 5 on one each.
    busiest = (10 + 2 * (465 + 55) / 4) + (10 + 2 * 55)
    mean = (10 + 2 * (465 + 55) / 4) + (10 + 2 * (3 * 55 + 15) / 4)
    assert found.seconds == pytest.approx(busiest + 3 * 10 * 3)
    assert found.balance == pytest.approx(busiest / mean)


def test_pairs_of_a_window_are_those_that_are_visible():
    cost = DocumentCost(windows=(3, None, 100))
    lengths = np.array([0, 1, 3, 9])
    for n, found in zip(lengths, cost.visible_pairs(lengths), strict=True):
        query, key = np.indices((n, n))
        seen = [(key <= query) & (query - key < window) for window in (3, n + 1, 100)]
        assert found == pytest.approx(np.sum(seen) / 3)


@pytest.mark.parametrize("windows", [(None,), (3,), (None, 4, 4)])
def test_pairs_of_trees_are_those_that_are_visible(windows):
    """Counted in the mask written out, where a window counts tokens of a branch."""
    ends = np.array([[12, 12, 12, 12, 12, 7, 7, 10, 9, 10, 12, 12, 15, 14, 15, -1]])
    place = np.arange(16)
    seen = (place[:, None] >= place) & (place[:, None] < ends)
    seen &= ends.T >= 0
    at = seen.sum(1)
    counted = [(seen & (at[:, None] - at < (window or 99))).sum() for window in windows]
    np.testing.assert_allclose(DocumentCost(windows=windows).tree_pairs(ends), np.mean(counted))


def test_trees_are_divided_by_what_they_see():
    """A group of 8 answers takes less than a text of its length, so the texts are apart."""
    group = np.concatenate([np.full(40, 104), np.repeat(np.arange(48, 105, 8), 8)])[None]
    cost, lengths = DocumentCost(pair=1.0), [104, 104, 104, 104]
    (tree,), (text, *_) = cost.tree_pairs(group), cost.visible_pairs(np.array(lengths))
    assert tree < 0.7 * text
    seen = [text, tree, text, tree]
    options = {"share": 208, "cost": cost, "degrees": [1]}
    (part,) = st.parts(lengths, 2, pairs=seen, **options)
    assert sorted(sorted(row) for row in part.rows) in ([[0, 1], [2, 3]], [[0, 3], [1, 2]])
    (step,) = [next(PartStream(lengths, 2, parts_per_step=1, pairs=lambda _: seen, **options))]
    assert step == [part]
    assert summary([step], lengths, 2, share=208, cost=cost, pairs=seen).balance == 1
    assert summary([step], lengths, 2, share=208, cost=cost).seconds == 208 + 2 * text


@pytest.mark.parametrize("devices", [8, 16, 64])
def test_published_lengths_leave_little_padding_and_equal_work(devices):
    lengths = published_lengths(4096)
    share = -(-140_459 // devices)
    parts = st.parts(lengths, devices, share=share)
    found = summary([parts], lengths, devices, share=share)
    assert found.padding < 0.01
    assert found.balance < 1.01
    packed = st.parts(lengths, devices, share=share, degrees=[devices])
    rows = summary([packed], lengths, devices, share=share)
    assert rows.alone == 0
    # On a network where a hop takes as long as the matrices: each row would go to all devices.
    slow = DocumentCost(hop=1)
    parts = st.parts(lengths, devices, share=share, cost=slow)
    found, rows = (summary([x], lengths, devices, share=share, cost=slow) for x in (parts, packed))
    assert rows.seconds / found.seconds > 1.9


def test_degrees_limit_the_programs():
    lengths = published_lengths(500)
    parts = st.parts(lengths, 8, share=17_558, degrees=[8, 2])
    assert {part.c for part in parts} == {2, 8}
    assert_right(parts, lengths, 8, 17_558, range(len(lengths)))


def test_empty_documents_are_in_no_part():
    assert st.parts([0, 5, 0, 1], 1, share=6) == [BatchPart(c=1, rows=((1, 3),))]
    assert st.parts([0], 4, share=6) == []
    assert st.parts([], 4, share=6) == []
    assert summary([[]], [0], 4, share=6).padding == 0


def test_one_document_alone_is_served():
    assert st.parts([1], 1, share=1) == [BatchPart(c=1, rows=((0,),))]
    (part,) = st.parts([6 * 5], 6, share=5)
    assert part == BatchPart(c=6, rows=((0,),))
    (part,) = st.parts([1], 12, share=5)
    assert sum(map(len, part.rows)) == 1


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"lengths": [3, 33]}, "lengths[1]=33, where 4 devices of share=8"),
        ({"lengths": [20], "degrees": [1, 2]}, "lengths[0]=20, where 2 devices of share=8"),
        ({"lengths": [3, -1]}, "lengths[1]=-1"),
        ({"lengths": [3.0]}, "float64"),
        ({"lengths": np.ones((1, 1), int)}, "[1, 1]"),
        ({"devices": 0}, "devices=0"),
        ({"devices": "8"}, "devices='8'"),
        ({"share": 0}, "share=0"),
        ({"share": 4.0}, "share=4.0"),
        ({"degrees": [3]}, "degrees=[3]"),
        ({"degrees": []}, "degrees=[]"),
        ({"degrees": 3}, "degrees=[3]"),
        ({"degrees": [1, 2.0]}, "degrees=[1, 2.0]"),
        ({"cost": {}}, "cost={}"),
        ({"pairs": [1.0, 2.0]}, "each of the 1 documents; got float64 [2]"),
        ({"pairs": [-1.0]}, "numbers from 0 on"),
    ],
)
def test_what_cannot_be_assigned_is_refused(given, named):
    with refused(InputError, named):
        st.parts(**{"lengths": [3], "devices": 4, "share": 8, **given})


def test_costs_that_mean_nothing_are_refused():
    for values in (
        *({"token": 0}, {"pair": -1.0}, {"hop": float("nan")}, {"pair": float("inf")}),
        *({"windows": windows} for windows in ((), (0,), (None, -2))),
    ):
        with refused(InputError, **values):
            DocumentCost(**values)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"lengths": [0, 0]}, "Some document must"),
        ({"parts_per_step": 0}, "parts_per_step=0"),
        ({"window": 0}, "window=0"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_series_that_cannot_be_are_refused(given, named):
    with refused(InputError, named):
        PartStream(**{"lengths": [3], "devices": 4, "share": 8, "parts_per_step": 1, **given})


def stream_of(lengths, devices=8, **changes):
    given = {"share": 64, "parts_per_step": 4, "window": 40, "seed": 3}
    return PartStream(lengths, devices, **{**given, **changes})


def epoch_of(stream):
    """The steps of the epoch that begins."""
    epoch, steps = stream.epoch, []
    while (step := next(stream)) and stream.epoch == epoch:
        steps.append(step)
    return steps


def documents_of(steps):
    return [x for step in steps for part in step for row in part.rows for x in row]


LENGTHS = drawn_lengths("exponential", 300, 8 * 64, seed=1)


@given(profiles(), some.integers(1, 500), some.integers(0, 9))
@settings(max_examples=30)
def test_an_epoch_has_every_document_once(profile, window, seed):
    lengths, devices, share = profile
    if not lengths.any():
        return
    given = {"share": share, "parts_per_step": 3, "window": window, "seed": seed}
    steps = epoch_of(PartStream(lengths, devices, **given))
    assert sorted(documents_of(steps)) == np.flatnonzero(lengths).tolist()
    for step in steps:
        assert_right(step, lengths, devices, share, documents_of([step]))
    assert steps == epoch_of(PartStream(lengths.tolist(), devices, **given))


def test_epochs_and_seeds_have_other_orders():
    stream = stream_of(LENGTHS)
    first = documents_of(epoch_of(stream))
    # The step that ended the first epoch was the first of the second.
    second = documents_of(epoch_of(stream))
    assert first != second
    assert first != documents_of(epoch_of(stream_of(LENGTHS, seed=4)))
    assert sorted(first[:40]) != list(range(40))


def test_order_does_not_change():
    """A run that goes on would see data twice if it did."""
    assert next(stream_of(LENGTHS)) == [
        BatchPart(c=1, rows=((210,), (202,), (31, 215), (284,), (), (), (), ())),
        BatchPart(c=8, rows=((99, 28),)),
        BatchPart(c=8, rows=((157, 104, 7),)),
        BatchPart(c=8, rows=((225, 280, 152, 283),)),
    ]


def test_steps_have_nearly_as_many_tokens():
    lengths = published_lengths(8192)
    stream = PartStream(lengths, 8, share=17_558, parts_per_step=7, window=2048)
    tokens = [sum(lengths[documents_of([step])]) for step in epoch_of(stream)]
    assert 0.9 < np.mean(tokens) / 1_000_000 < 1.1
    # A step has 7 parts, and some have one fewer.
    assert 6 / 7 - 0.05 < min(tokens) / 1_000_000 < max(tokens) / 1_000_000 < 1.05


@given(some.integers(0, 80))
def test_a_resumed_series_is_the_uninterrupted_one(steps):
    before = stream_of(LENGTHS)
    for _ in range(steps):
        next(before)
    state = json.loads(json.dumps(before.get_state()))
    after = stream_of(LENGTHS)
    after.set_state(state)
    assert after.get_state() == before.get_state()
    assert [next(after) for _ in range(70)] == [next(before) for _ in range(70)]
    assert after.epoch == before.epoch


def test_a_state_is_that_of_its_step_only():
    stream = stream_of(LENGTHS)
    next(stream)
    state = stream.get_state()
    kept = json.dumps(state)
    next(stream)
    assert json.dumps(state) == kept


@given(some.lists(some.tuples(some.sampled_from([4, 6, 8, 16]), some.integers(0, 7)), max_size=5))
@settings(max_examples=30)
def test_on_other_devices_every_document_still_comes_once(changes):
    stream = stream_of(LENGTHS)
    steps = [next(stream) for _ in range(2)]
    for devices, count in changes:
        state = json.loads(json.dumps(stream.get_state()))
        stream = stream_of(LENGTHS, devices, share=512 // 4, parts_per_step=3)
        stream.set_state(state)
        found = [next(stream) for _ in range(count)]
        assert all(len(part.rows) * part.c == devices for step in found for part in step)
        if stream.epoch:
            return
        steps += found
    steps += epoch_of(stream)
    assert sorted(documents_of(steps)) == np.flatnonzero(LENGTHS).tolist()


def test_a_state_of_another_series_is_refused():
    state = stream_of(LENGTHS).get_state()
    for changes in ({"seed": 4}, {"window": 41}):
        with refused(InputError, **changes):
            stream_of(LENGTHS, **changes).set_state(state)
    with refused(InputError, documents=299):
        stream_of(LENGTHS[:-1]).set_state(state)
    others = LENGTHS.copy()
    others[7] += 1
    with refused(InputError, "checksum_of_lengths="):
        stream_of(others).set_state(state)
    with refused(InputError, "what get_state returned; got one without", "epoch"):
        stream_of(LENGTHS).set_state({})
    with refused(InputError, "lengths must be a series of whole numbers"):
        stream_of([[1, 2], [3]])


def test_windows_are_assigned_when_they_are_reached(monkeypatch):
    assigned, parts = [], documents._Assignment.parts

    def recorded(self, lengths, numbers, pairs):
        assigned.append(len(numbers))
        return parts(self, lengths, numbers, pairs)

    monkeypatch.setattr(documents._Assignment, "parts", recorded)
    lengths = published_lengths(1_000_000)
    next(PartStream(lengths, 8, share=17_558, parts_per_step=7, window=500))
    assert assigned == [500]


def test_the_host_needs_no_jax():
    program = (
        "import sys, startrail_jax as st; st.parts([3, 5], 2, share=4); "
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
