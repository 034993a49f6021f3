"""`python -m startrail_jax.verify`: right is ok, and every fault is WRONG in its column."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from startrail_jax.errors import InputError
from startrail_jax.linear.scan import Line
from startrail_jax.masks import Window
from startrail_jax.rings import collectives, concentric
from startrail_jax.rings.schedule import Schedule
from startrail_jax.tokens.layout import Runs
from startrail_jax.verify import command, report
from startrail_jax.verify.cases import DenseCase
from startrail_jax.verify.exactness import Cell
from startrail_jax.verify.schemes import NAMES, schemes_of
from tests.faults.failures import free_port

SMALL = "--heads 4 --kv-heads 2 --head-dim 8 --samples 1"
RESULTS = {"out", "lse", "dq", "dk", "dv"}
OF_STATES = {"out", "state", "dquery", "dkey", "dvalue", "ddecay", "dbeta", "dstate"}


def verify(flags, file, status=0):
    """What a verification writes, which ends with a status."""
    assert command.main([*f"{SMALL} {flags} --json {file}".split()]) == status
    found = json.loads(file.read_text())
    assert found["ok"] == (status == 0)
    return found


def wrong(found):
    """Scheme -> names of its wrong results, and "bytes" where a pass has others."""
    names = {}
    for scheme in found["exactness"]["schemes"]:
        cells = scheme["results"].items()
        names[scheme["scheme"][0]] = {name for name, cell in cells if not cell["ok"]}
    for scheme in found["speed"]["schemes"]:
        if not all(x["ok"] for x in scheme["passes"].values()):
            names[scheme["scheme"][0]].add("bytes")
    return names


# What is right is ok ------------------------------------------------------------------------------


def drawn_flags(seed):
    """Flags of 8 simulated devices."""
    rng = np.random.default_rng(seed)

    def one(*choices):
        return str(rng.choice(choices))

    flags = [one("", "--documents"), one("", "--layout zigzag"), one("", "--dtype bfloat16")]
    if seed % 3 == 2:
        flags += [f"--rule {one('kda', 'ssd', 'gated_delta')}", "--seq-len 64"]
        return " ".join(flags)
    flags += [one("", "--full", "--window 9", "--window 70", "--block-causal 16")]
    flags += [
        one("", "--softcap 2", "--head-chunks 2"),
        one("", "--data 2 --batch 2", "--tensor 2"),
    ]
    flags += [one("--heads 8 --kv-heads 4", "--heads 8 --kv-heads 8"), one("", "--exchange rings")]
    return " ".join([*flags, "--seq-len 128", f"--value-head-dim {one(8, 5)}"])


@pytest.mark.slow_except_every(12)
@pytest.mark.parametrize("seed", range(12))
def test_drawn_settings_are_ok(seed, tmp_path, capsys):
    found = verify(f"--simulate 8 {drawn_flags(seed)}", tmp_path / "verify.json")
    assert not any(wrong(found).values())
    output = capsys.readouterr().out
    assert "WRONG" not in output
    assert output.endswith("\nall ok\n")
    schemes = {x for scheme in found["exactness"]["schemes"] for x in scheme["scheme"]}
    if "--rule" not in drawn_flags(seed):
        assert schemes | set(found["left_out"]) == set(NAMES)


def test_json_has_what_it_must(tmp_path, capsys):
    flags = "--simulate 4 --seq-len 64 --schemes ring usp --window 20"
    found = verify(flags, tmp_path / "verify.json")
    assert found["versions"]["jax"] == jax.__version__
    assert set(found["versions"]) == {"python", "startrail_jax", "jax", "jaxlib", "cudnn"}
    assert found["devices"] == {
        **dict(platform="cpu", kinds={"cpu": 4}, count=4, processes=1, nodes=1)
    }
    assert "--xla_cpu_parallel_codegen_split_count=1" in found["xla_flags"]  # Of conftest.py.
    assert found["flags"]["window"] == 20
    assert found["flags"]["dtype"] == "float32"  # A default that depends on the devices.
    ring, usp = found["exactness"]["schemes"]
    assert ring["degrees"]["ring"] == 4
    assert usp["scheme"] == ["usp"]
    assert set(ring["results"]) == RESULTS
    assert ring["results"]["out"]["bound"] == 2e-6
    assert 0 < ring["results"]["out"]["error"] < 2e-6
    both = found["speed"]["schemes"][0]["passes"]["both"]
    assert both["received_bytes"] == both["closed_form_bytes"] > 0
    rate = both["received_bytes"] / both["seconds"] / 1e9
    assert both["gigabytes_per_second"] == pytest.approx(rate)
    pairs = sum(min(i + 1, 20) for i in range(64))
    assert both["flops"] == pytest.approx(2 * pairs * 4 * (4 * 8 + 3 * 8) / 4)
    assert f"{both['received_bytes']:,}  " in capsys.readouterr().out


def test_rows_that_the_reference_cannot_hold_are_cut_and_this_is_said():
    case = DenseCase(
        **dict(devices=tuple(jax.devices()[:8]), seq_len=4096, rows=1, heads=16, kv_heads=16),
        **dict(head_dim=8, value_head_dim=8, dtype="float32", documents=False, layout=None),
        **dict(data=1, tensor=1, options={}, mask="window", width=1024),
    )
    assert case.check_len == 256
    assert case.mask_of(256) == Window(63, 0)
    assert "rows of 256 tokens instead of 4,096, Window(left=63" in case.cuts
    assert dataclasses.replace(case, seq_len=256, width=20).cuts == ""


# What is wrong is WRONG ---------------------------------------------------------------------------


def without_last_step(monkeypatch):
    real = concentric.ring_offsets
    monkeypatch.setattr(concentric, "ring_offsets", lambda *x: real(*x)[:-1] or (0,))


def scaled_merge(monkeypatch):
    real = concentric.merge_precisely

    def merge(partials):
        out, *stats = real(partials)
        return out * 1.0001, *stats

    monkeypatch.setattr(concentric, "merge_precisely", merge)


def seen_otherwise(change):
    """Changes what queries see of keys; `change` gets the visibility, and whether keys are of
    another device."""

    def patch(monkeypatch):
        real = Schedule.visibility

        def visibility(self, *arguments, **options):
            behind = options.get("keys_behind", 0)
            ahead = options.get("queries_ahead", 0)
            has_come = not (isinstance(behind, int) and isinstance(ahead, int)) or behind + ahead
            return change(real(self, *arguments, **options), bool(has_come))

        monkeypatch.setattr(Schedule, "visibility", visibility)

    return patch


def off_by_one(seen, has_come):
    """Keys of the second half of the row count as one place further."""
    (start,) = seen.key_runs.starts
    shifted = Runs((jnp.where(start >= 32, start + 1, start),), seen.key_runs.length)
    return dataclasses.replace(seen, key_runs=shifted)


def window_too_short(seen, has_come):
    mask = Window(seen.mask.left - 1, 0) if has_come else seen.mask
    return dataclasses.replace(seen, mask=mask)


def documents_seen_beyond(seen, has_come):
    ids = {} if not has_come else dict(query_segments=None, key_segments=None)
    return dataclasses.replace(seen, **ids)


def dropped_state(monkeypatch):
    real = Line._send

    def send(self, tree, *arguments, **options):
        return jax.tree.map(jnp.zeros_like, real(self, tree, *arguments, **options))

    monkeypatch.setattr(Line, "_send", send)


def sent_twice(monkeypatch):
    real = collectives.permute

    def permute(x, *arguments):
        again = real(x * 3, *arguments)
        return real(x, *arguments) + jnp.where(again == again, 0, 1).astype(x.dtype)

    monkeypatch.setattr(collectives, "permute", permute)


# Fault -> (flags, what has it, what is wrong in the first scheme, and in the second, if there is
# one).
FAULTS = {
    "ring step": ("--schemes ring ulysses", without_last_step, RESULTS | {"bytes"}, set()),
    "merge": ("--schemes ring", scaled_merge, {"out", "dq", "dk"}, None),
    "position": ("--schemes ring --exchange rings", seen_otherwise(off_by_one), RESULTS, None),
    "window": (
        *("--schemes ring --window 20 --exchange rings", seen_otherwise(window_too_short)),
        *(RESULTS, None),
    ),
    "document": (
        *("--schemes ring --documents", seen_otherwise(documents_seen_beyond), RESULTS, None),
    ),
    "bytes": ("--schemes ring ulysses", sent_twice, {"bytes"}, set()),
    "state": ("--rule gated_delta", dropped_state, OF_STATES, OF_STATES),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_wrong_in_its_column(name, tmp_path, monkeypatch, capsys):
    flags, fault, first, second = FAULTS[name]
    jax.clear_caches()
    fault(monkeypatch)
    if "bytes" not in first:
        monkeypatch.setattr(command, "measure", lambda *x: {})
    found = verify(f"--simulate 4 --seq-len 64 --kv-heads 4 {flags}", tmp_path / "verify.json", 1)
    monkeypatch.undo()
    jax.clear_caches()
    columns = list(wrong(found).values())
    assert columns[0] - {"bytes"} == first - {"bytes"}
    assert ("bytes" in columns[0]) == ("bytes" in first)
    if second is not None:
        assert columns[1] - {"bytes"} == second
    head, *rows = capsys.readouterr().out.split("\nscheme ")[1].splitlines()
    for name in first - {"bytes"}:
        place = len("scheme ") + head.index(f" {name}") + 1
        assert "WRONG" in rows[0][place : place + 18]
    if first == {"bytes"}:
        assert not any("WRONG" in row for row in rows[:2])


def test_wrong_sharding_and_missing_numbers_are_wrong():
    assert Cell(1e-7, 2e-6, True).ok
    assert str(Cell(1e-7, 2e-6, False)) == "1e-07/2e-06 WRONG sharding"
    nothing = Cell(float("inf"), 2e-6, True)
    assert not nothing.ok
    assert nothing.as_json() == dict(error=None, bound=2e-6, sharded=True, ok=False)


def test_scheme_that_xla_cannot_run_fails_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    real = command.check_exactness

    def check(case, scheme):
        if scheme.name == "ring":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nmore")
        return real(case, scheme)

    monkeypatch.setattr(command, "check_exactness", check)
    flags = "--simulate 2 --seq-len 32 --schemes ring ulysses"
    found = verify(flags, tmp_path / "verify.json", 1)
    ring, ulysses = found["exactness"]["schemes"]
    assert ring["failed"] == "RESOURCE_EXHAUSTED: Out of memory"
    assert set(ulysses["results"]) == RESULTS
    assert "FAILED RESOURCE_EXHAUSTED" in capsys.readouterr().out


# Flags, schemes and versions ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--heads 4 --kv-heads 3", "--kv-heads must divide --heads; got 3 and 4"),
        ("--heads 0", "must be an integer of at least 1; got '0'"),
        ("--full --window 3", "not allowed with argument"),
        ("--coordinator a:1", "--coordinator, --processes and --index go together"),
        (
            "--coordinator a:1 --processes 2 --index 2",
            "--index must be from 0 to 1 with --processes 2; got 2",
        ),
        ("--batch 3 --data 2", "--data must divide --batch; got 2 and 3. Use --batch 4"),
        ("--json nowhere/x.json", "--json must name a file in a folder that exists"),
        ("--rule ssd --window 3", "has no --window. Leave one"),
        ("--rule ssd --schemes ring", "has no --schemes"),
        ("--rule ssd --backend cudnn", "must be one of xla, jla for linear attention; got cudnn"),
        ("--backend jla", "for attention; got jla"),
        ("--simulate 4 --seq-len 30", "At least one scheme must fit 4 devices"),
        ("--simulate 4 --seq-len 64 --data 3 --batch 3", "must divide the number of devices"),
        ("--simulate 4 --seq-len 64 --backend cudnn", "At least one scheme must serve the call"),
        ("--distributed", "--distributed needs processes that SLURM"),
    ],
)
def test_flags_that_do_not_fit_are_said(flags, message, capsys, monkeypatch):
    def initialize(*arguments, **options):
        raise ValueError("coordinator_address should be defined")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    try:
        status = command.main(flags.split())
    except SystemExit as error:
        status = error.code
    assert status == 2
    said = capsys.readouterr()
    assert message in said.err
    assert not said.out


def test_schemes_that_do_not_fit_say_why():
    call = dict(batch=1, seq_len=60, heads=4, kv_heads=4, causal=True)
    options = dict(data=1, tensor=1, devices_per_node=3, wanted=NAMES)
    schemes, reasons = schemes_of(6, **options, **call)
    assert {x.name: x.setting for x in schemes} == {
        "rule = usp": "ring 3, head 2",
        "ring": "ring 6",
        "all-gather": "group 6",
        "double-ring": "ring 6, inner 3",
    }
    assert "4 divides; got 6" in reasons["startrail"]
    assert "heads" in reasons["ulysses"]
    with pytest.raises(InputError, match=r"must fit 6 devices with data=1 .*got none: .*heads"):
        schemes_of(6, **options | dict(wanted=("ulysses",)), **call)
    (one,), _ = schemes_of(1, **options | dict(devices_per_node=1), **call)
    assert one.setting == "one device"
    assert one.names[:4] == ("rule", "ring", "all-gather", "ulysses")


def test_version_of_cudnn_is_that_of_the_library(monkeypatch):
    class Library:
        def __init__(self, name):
            assert name == "libcudnn.so.9"

        def cudnnGetVersion(self):
            return 91002

    monkeypatch.setattr(report.ctypes, "CDLL", Library)
    assert report.versions(True)["cudnn"] == "9.10.2"
    assert report.versions(False)["cudnn"] is None


# Several processes --------------------------------------------------------------------------------


@pytest.mark.slow_except_every(2)
@pytest.mark.parametrize("flags", ["--schemes ring ulysses --documents", "--rule ssd"])
def test_two_processes_check_what_one_does(flags, tmp_path):
    words = f"-m startrail_jax.verify {SMALL} {flags} --simulate 2 --seq-len 32 --processes 2"
    words += f" --coordinator 127.0.0.1:{free_port()} --json {tmp_path / 'verify.json'}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    root = Path(__file__).parents[2]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    processes = [
        subprocess.Popen(
            [sys.executable, *words.split(), "--index", index], cwd=root, env=environment, **pipes
        )
        for index in ("0", "1")
    ]
    try:
        outputs = [x.communicate(timeout=300) for x in processes]
    finally:
        for x in processes:
            x.kill()
    assert [x.returncode for x in processes] == [0, 0], outputs
    assert outputs[0][0].endswith("all ok\n")
    assert "startrail_jax" not in outputs[1][0]  # Gloo says something.
    found = json.loads((tmp_path / "verify.json").read_text())
    assert found["devices"]["processes"] == 2
    assert found["devices"]["count"] == 4
    assert not any(wrong(found).values())
