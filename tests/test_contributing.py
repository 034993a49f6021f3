"""What contributors meet first: scripts, workflows and CITATION.cff name what exists."""

import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STEPS = re.findall(r"^(\w+)\(\)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
SCRIPTS = [path for path in sorted((ROOT / ".ci").iterdir()) if not path.suffix]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def name_of(path):
    return path.name


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_script_can_be_run_and_names_files_that_exist(script):
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)
    named = re.findall(r"(?<![\w$/])(?:\.ci|tests)/[\w./*]*\w", script.read_text())
    assert [name for name in named if not any(ROOT.glob(name))] == []


def test_programs_that_are_named_exist():
    """In pages, scripts, comments and the first lines of files."""
    folders = (
        ".ci",
        "docs",
        "startrail_jax",
        "trainer",
        "models",
        "configs",
        "benchmarks",
        "tests",
    )
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    for path in [*ROOT.glob("*.md"), *paths]:
        if path.suffix in ("", ".md", ".py"):
            named = re.findall(r"(?<!/)\b(?:benchmarks|tests/faults)/[\w/]+\.py", path.read_text())
            assert [x for x in named if not (ROOT / x).exists()] == [], path.relative_to(ROOT)


@pytest.mark.parametrize("words", [["nothing"], ["nothing", "more"]])
def test_step_that_does_not_exist_fails(words):
    done = subprocess.run([ROOT / ".ci" / "run", *words], capture_output=True, text=True)
    assert done.returncode != 0
    assert "no step nothing" in done.stderr


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=name_of)
def test_workflow_runs_steps_that_exist(workflow):
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert commands
    for command in commands:
        script, *steps = shlex.split(command)
        assert script == ".ci/run"
        assert set(steps) <= {*STEPS, "whole"}


def test_top_level_holds_only_what_is_meant():
    """A wheel was once committed there by accident."""
    listed = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    assert {name.partition("/")[0] for name in listed} == {
        *(".ci", ".github", ".gitignore", ".pre-commit-config.yaml"),
        *("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "README.md", "SECURITY.md"),
        *(
            "benchmarks",
            "configs",
            "docs",
            "examples",
            "models",
            "startrail_jax",
            "tests",
            "trainer",
        ),
        *("plan.py", "pyproject.toml", "sample.py", "score.py", "train.py"),
    }


def test_hooks_run_programs_of_the_extra_dev():
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    extra = "\n".join(PROJECT["optional-dependencies"]["dev"])
    for hook in repository["hooks"]:
        assert re.search(rf"^{hook['entry'].split()[0]}\b", extra, re.MULTILINE)


@pytest.mark.parametrize(
    "template", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").iterdir()), ids=name_of
)
def test_issue_template_has_a_name_and_a_purpose(template):
    _, head, body = template.read_text().split("---\n", 2)
    assert {"name", "about"} <= set(yaml.safe_load(head))
    assert body.strip()


def test_citation_is_of_this_version_and_of_the_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]
    (paper,) = citation["references"]
    assert paper["url"] in (ROOT / "README.md").read_text()
