"""`--verify`: red for each fault that is put in, naming the check, and green without one."""

import dataclasses
import functools
import json
import re
import runpy
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import startrail_jax as st
import train
import trainer.gpt.batches
import trainer.gpt.rollouts.dataset  # Before a fault is in what it imports.
import trainer.verify.run
from models.experts import _Dispatch
from models.parts.experts import ExpertsConfig
from models.parts.gated_delta import LinearConfig
from models.parts.kda import KDAConfig
from models.parts.ssd import SSDConfig
from programs import REPOSITORY, SMALL, TINY, make_config
from startrail_jax.linear.scan import Line
from startrail_jax.masks import Window
from startrail_jax.rings import collectives, concentric, score_units
from startrail_jax.rings.concentric import Concentric
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.gpt.config import DataConfig
from trainer.gpt.task import GPTTask
from trainer.parallel.partition import Partition
from trainer.parallel.step import Program
from trainer.task import Smaller
from trainer.verify import checks, ways
from trainer.verify.bounds import AFTER_STEPS, FLOAT32
from trainer.verify.first_batch import first_batch, fitting
from trainer.verify.report import Check, Verdicts
from trainer.verify.results import Apart, Results
from verify_cases import drawn

EIGHT = st.Degrees.startrail(8, c=2)
RING = st.Degrees(ring=8)
EXPERTS = dict(feed_forwards=("experts", "mlp"), experts=ExpertsConfig(count=8, width=16))
HYBRID = dict(mixers=("linear", "attention"), linear=LinearConfig(key_heads=2))


def small(model=None, **changes):
    return make_config(SMALL | (model or {}), seq_len=64, batch_size=2, **changes)


def program_of(config, degrees):
    mesh = st.make_mesh(degrees, devices=jax.devices()[: degrees.num_devices], axis_type="auto")
    return ways.program_of(config, mesh)


@functools.cache
def tokens():
    """A file of tokens, a twelfth of which end a document."""
    import tempfile
    from pathlib import Path

    path = Path(tempfile.mkdtemp()) / "tokens.bin"
    np.random.default_rng(0).integers(12, size=4000).astype("<u2").tofile(path)
    return path


def of_data(config):
    data = DataConfig(path=(tokens(),), end_of_document=0)
    return dataclasses.replace(config, data=data, run_dir=tokens().parent / "run")


def all_checks(config, degrees, folder):
    """The checks in their order, computed as they are asked for."""
    jax.clear_caches()
    program = program_of(config, degrees)
    if config.data.path:
        yield from first_batch(fitting(program), program)
    cut = checks.cut_of(config, program)
    yield from checks.gradients(cut)
    yield from checks.steps(cut, folder)


def first_wrong(found):
    return next((check.name for check in found if not check.ok), None)


def shifted_positions(patch):
    def shifted(batch, layout, order=trainer.gpt.batches.in_layout_order):
        found = order(batch, layout)
        if layout.degree > 1:
            share = found.positions.shape[1] // layout.degree
            found.positions[:, share : 2 * share] += 1
        return found

    patch.setattr(trainer.gpt.batches, "in_layout_order", shifted)


def labels_after_the_split(patch):
    def shifted(batch, layout, order=trainer.gpt.batches.in_layout_order):
        found = order(batch, layout)
        if layout.degree == 1:
            return found
        return found._replace(targets=np.roll(found.tokens, -1, axis=1))

    patch.setattr(trainer.gpt.batches, "in_layout_order", shifted)


def one_step_less(patch):
    offsets = concentric.ring_offsets
    patch.setattr(concentric, "ring_offsets", lambda *x: offsets(*x)[:-1])


def wrong_scale(patch):
    def merged(partials, merge=concentric.merge_precisely):
        out, *others = merge(partials)
        return out * (1.001 if len(partials) > 1 else 1), *others

    patch.setattr(concentric, "merge_precisely", merged)


def next_document_seen(patch):
    """The last key of each device has the id of the next document."""

    def units(self, shards, *, queries_first, of=Concentric._units):
        q, k, v, query_ids, key_ids = shards
        if key_ids is not None and self.schedule.num_shards > 1:
            key_ids = key_ids.at[:, -1].add(1)
        return of(self, (q, k, v, query_ids, key_ids), queries_first=queries_first)

    patch.setattr(Concentric, "_units", units)


def short_window(patch):
    def seen(*arguments, of=score_units.visibility_and_scores, **distance):
        visibility, scores = of(*arguments, **distance)
        mask = visibility.mask
        (behind,) = distance.values()
        if isinstance(mask, Window) and not (isinstance(behind, int) and behind == 0):
            narrow = Window(mask.left - 1, mask.right)
            visibility = dataclasses.replace(visibility, mask=narrow)
        return visibility, scores

    patch.setattr(score_units, "visibility_and_scores", seen)


def mean_of_means(patch):
    def local(self, sharded, sums, slots, weights, batch, of=Program._local_sum):
        total, metrics = of(self, sharded, sums, slots, weights, batch)
        return total / jnp.maximum(jnp.sum(batch.weights), 1), metrics

    patch.setattr(Program, "_local_sum", local)
    patch.setattr(
        Program, "_total_weight", lambda self, batch: self.partition.sum_over_tokens(jnp.ones(()))
    )


def unsummed_gradient(patch):
    """Of vectors, the devices along `team` take what the first of them has."""

    def summed(self, gradient, split, of=Partition._sum):
        if split.vector and "team" in self.replicas:
            is_first = lax.axis_index("team") == 0
            gradient = jnp.where(is_first, gradient, 0)
        return of(self, gradient, split)

    patch.setattr(Partition, "_sum", summed)


def other_replica(patch):
    """After the steps, one device has another value in a weight."""

    def train(step, state, batch, of=checks._train):
        state, losses = of(step, state, batch)

        def changed(x):
            shards = [shard.data for shard in x.addressable_shards]
            shards[-1] = shards[-1].at[0].add(1e-6)
            return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)

        weights = {**state.weights, "norm": jax.tree.map(changed, state.weights["norm"])}
        return state._replace(weights=type(state.weights)(weights)), losses

    patch.setattr(checks, "_train", train)


def dropped_state(patch):
    """Device 3 begins anew."""

    def both(self, near, far, first, of=Line._both):
        found = of(self, near, far, first)
        if self.axis.degree == 1:
            return found
        return tuple(jnp.where(collectives.index(self.axis) == 3, 0, x) for x in found)

    patch.setattr(Line, "_both", both)


def lost_tokens(patch):
    def sent(self, rows, token, x, shares, of=_Dispatch.sent):
        received, to, by = of(self, rows, token, x, shares)
        is_last = lax.axis_index(self._axes) == lax.axis_size(self._axes) - 1
        return received, jnp.where(is_last, self._experts, to), by

    patch.setattr(_Dispatch, "sent", sent)


def shard_of_another(patch):
    def restore(self, shapes, settings=None, of=Checkpoints.restore):
        state, data = of(self, shapes, settings)

        def swapped(x):
            shards = [shard.data for shard in x.addressable_shards]
            if len(shards) == 1 or x.is_fully_replicated:
                return x
            order = [jax.device_put(y, z.device) for y, z in zip(shards[::-1], shards, strict=True)]
            return jax.make_array_from_single_device_arrays(x.shape, x.sharding, order)

        return jax.tree.map(swapped, state), data

    patch.setattr(Checkpoints, "restore", restore)


WINDOW = dict(windows=(20,))
FAULTS = {
    "positions of a shard off by one": (shifted_positions, of_data(small()), EIGHT, "first batch"),
    "labels shifted after the split": (
        labels_after_the_split, of_data(small()), EIGHT, "first batch",
    ),
    "a ring step left out": (one_step_less, small(), RING, "float64"),
    "a wrong scale in the merge": (wrong_scale, small(), EIGHT, "float64"),
    "the next document seen": (next_document_seen, small(), RING, "float64"),
    "a window one token short": (
        short_window,
        small(WINDOW, attention=dataclasses.replace(small().attention, exchange="rings")),
        RING, "float64",
    ),
    "a mean of means": (mean_of_means, small(), EIGHT, "float64"),
    "a gradient that is not summed": (unsummed_gradient, small(), EIGHT, "float64"),
    "another replica": (other_replica, small(), EIGHT, "replicas"),
    "a dropped state": (dropped_state, small(HYBRID), RING, "float64"),
    "lost tokens of an expert": (
        lost_tokens, small(EXPERTS, zero=3, experts="dispatch"), EIGHT, "float64",
    ),
    "the shard of another rank": (shard_of_another, small(zero=3), EIGHT, "checkpoint on the mesh"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.slow_except_every(6)
def test_verify_finds_a_fault_and_names_the_check(name, monkeypatch, tmp_path):
    put_in, config, degrees, expected = FAULTS[name]
    put_in(monkeypatch)
    wrong = first_wrong(all_checks(config, degrees, tmp_path / "verify"))
    assert wrong is not None
    assert expected in wrong


def test_verify_writes_its_numbers_and_the_run_then_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = [*TINY.split(), "--devices", "4", "--mesh.c", "2", "--data.path", str(tokens())]
    flags += ["--data.end-of-document", "0", "--steps", "1", "--run-dir", "run"]
    verifying = train.read_command_line([*flags, "--verify"]).settings
    assert train.train(verifying).verified
    shown = capsys.readouterr().out
    found = json.loads((tmp_path / "run" / "verify.json").read_text())
    assert found["ok"]
    assert found["mesh"]["team"] == found["mesh"]["group"] == 2
    assert "verify" not in found["settings"]
    assert found["settings"]["seq_len"] == "--seq-len 32"
    names = [check["name"] for check in found["checks"]]
    page = (REPOSITORY / "docs" / "verify.md").read_text()
    assert re.findall(r"^(?:ok|-) +(\S.*?)  ", page.partition("\n## ")[0], re.M) == names
    assert re.findall(r"^(?:ok|-) +(\S.*?)  ", shown, re.M) == names
    for check in found["checks"]:
        assert check["ok"]
        assert check["most"] is None or check["value"] <= check["most"]
    for bound in (FLOAT32, AFTER_STEPS):
        assert f"at most {bound:.2g}" in page
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert train.train(train.read_command_line(flags).settings).is_whole


@pytest.mark.parametrize("is_right", [True, False])
def test_status_says_whether_something_is_wrong(is_right, monkeypatch, tmp_path):
    monkeypatch.setattr(trainer.verify.run, "verify", lambda *_: is_right)
    flags = [*TINY.split(), "--devices", "2", "--run-dir", str(tmp_path / "run"), "--verify"]
    monkeypatch.setattr(sys, "argv", ["train.py", *flags])
    status = 0
    try:
        runpy.run_path(str(REPOSITORY / "train.py"), run_name="__main__")
    except SystemExit as ended:
        status = ended.code
    assert status == (0 if is_right else 1)


@pytest.mark.quick
def test_report_shows_bounds_and_names_what_is_wrong():
    shown = []
    report = Verdicts(shown.append)
    for value, most, least in ((1e-6, 1e-5, None), (3, None, None), (0.4, None, 0.5)):
        report.add(Check(name=f"check {value}", value=value, most=most, least=least, unit="GB/s"))
    assert [line.split()[0] for line in shown] == ["ok", "-", "WRONG"]
    report.is_whole = True
    assert not report.ok
    assert "1 of 2 checks" in report.summary
    assert report.summary.endswith("check 0.4")
    assert not Check(name="x", value=np.nan, most=1.0).ok


def test_results_that_are_not_finite_are_wrong():
    right = Results(1.0, {"x": np.ones(3)})
    for loss, gradient in ((np.nan, 1.0), (1.0, np.inf), (1.0, np.nan)):
        apart = Apart.of(Results(loss, {"x": np.array([1, gradient, 1])}), right)
        assert max(apart.loss, apart.gradient) == np.inf


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.slow_except_every(20)
def test_verify_is_green_without_a_fault(seed, tmp_path):
    config, degrees = drawn(seed)
    found = list(all_checks(config, degrees, tmp_path / "verify"))
    assert [str(check) for check in found if not check.ok] == []
    assert len(found) >= 9


@pytest.mark.slow
def test_a_run_in_bfloat16_is_compared_with_the_error_of_one_device(tmp_path, compile_well):
    config = of_data(small(dict(dtype="bfloat16")))
    found = {check.name: check for check in all_checks(config, EIGHT, tmp_path / "verify")}
    assert all(check.ok for check in found.values())
    for name in ("first batch: gradients", "the run's type: gradients"):
        assert 1e-3 < found[name].value < found[name].most < 0.5
    assert found["float64: gradients"].most == FLOAT32


@pytest.mark.parametrize("keeps", [True, False])
def test_narrow_models_keep_the_channels_of_heads_that_kernels_need(keeps):
    sizes = dict(mixers=("linear", "ssd", "kda", "attention"), layers=4, head_dim=64)
    sizes |= dict(linear=LinearConfig(key_heads=2, value_dim=128), kda=KDAConfig(rank=96))
    config = small(sizes | dict(ssd=SSDConfig(groups=2, state_dim=128)))
    model = GPTTask().smaller(config, Smaller(tokens=32, channels=64, head_dim=keeps)).model
    of_heads = model.head_dim, model.linear.key_dim, model.linear.value_dim
    of_heads = *of_heads, model.ssd.head_dim, model.ssd.state_dim, model.kda.head_dim
    assert of_heads == ((64, 64, 128, 64, 128, 64) if keeps else (16,) * 6)
    assert model.kda.rank == 64


@pytest.mark.quick
def test_a_short_run_whose_data_are_yet_to_come_has_a_part_to_verify(tmp_path):
    data = DataConfig(path=(tmp_path,), follow=True)
    config = make_config(SMALL, seq_len=32, batch_size=2, objective="policy", data=data)
    part = fitting(program_of(config, RING))
    assert not part.of_data
    assert part.config.num_tokens == 32
