"""The files of examples/launch: the shell runs them, and train.py knows every flag of theirs."""

import subprocess
from pathlib import Path

import pytest
import yaml

from programs import REPOSITORY, check_first_step
from startrail_jax.devices.degrees import Degrees
from train import read_command_line

LAUNCH = REPOSITORY / "examples" / "launch"
PLACE = {
    "JOB_COMPLETION_INDEX": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3\n10.0.0.4",
    "SKYPILOT_NUM_NODES": "4",
    "SKYPILOT_NODE_RANK": "1",
}
"""What schedulers tell the process of the second node."""


def script_of(name):
    text = (LAUNCH / name).read_text(encoding="utf-8")
    if name == "slurm.sbatch":
        return text
    file = yaml.safe_load(text)
    if name == "skypilot.yaml":
        assert file["num_nodes"] == 4
        assert file["resources"]["accelerators"] == "H100:8"
        return file["run"]
    (job,) = file["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert (spec["parallelism"], spec["completions"]) == (4, 4)
    (container,) = spec["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    shell, option, script = container["command"]
    assert (shell, option) == ("bash", "-ec")
    return f"set -e\n{script}"


def commands_of(name, folder, status=0):
    """What a file runs, by stand-ins that write down their words and end with a status."""
    log = folder / "log"
    log.write_text("")
    for stand_in in ("python", ".venv/bin/python", ".venv/bin/activate"):
        path = folder / stand_in
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/bash\necho "$@" >> {log}\nexit {status}\n')
        path.chmod(0o755)
    (folder / ".venv" / "bin" / "activate").write_text("")
    (folder / "srun").write_text('#!/bin/bash\nexec "$@"\n')
    (folder / "srun").chmod(0o755)
    script = script_of(name).replace("/shared/startrail_jax", str(folder))
    script = script.replace("/shared/runs", str(folder / "runs"))
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env={"PATH": f"{folder}:/usr/bin:/bin", **PLACE},
        capture_output=True,
        text=True,
        check=False,
    )
    return done, [line.split() for line in log.read_text().splitlines()]


@pytest.mark.parametrize("name", sorted(x.name for x in LAUNCH.iterdir()))
def test_a_launcher_verifies_once_and_then_trains(name, tmp_path):
    done, (first, second) = commands_of(name, tmp_path)
    assert done.returncode == 0, done.stderr
    assert first == [*second, "--verify"]
    assert second[0] == "train.py"
    verifying, training = (read_command_line(words[1:]) for words in (first, second))
    assert verifying.settings.verify
    assert not training.settings.verify
    distributed = training.distributed
    assert distributed.several
    if name != "slurm.sbatch":
        assert (distributed.processes, distributed.index) == (4, 1)
        assert distributed.address[1] == 7777
    check_first_step(training.settings, Degrees(ring=4, head=8))
    # A run that is verified goes on; one that is wrong does not train.
    verified = tmp_path / "runs" / "mine" / "verify.json"
    verified.parent.mkdir(parents=True)
    verified.write_text('{\n "ok": true,\n}')
    assert commands_of(name, tmp_path)[1] == [second]
    verified.write_text('{\n "ok": false,\n}')
    done, words = commands_of(name, tmp_path, status=1)
    assert done.returncode == 1
    assert words == [first]


def test_the_page_of_clusters_names_the_files():
    page = Path(REPOSITORY / "docs" / "cluster.md").read_text(encoding="utf-8")
    for path in LAUNCH.iterdir():
        assert f"`{path.name}`" in page
