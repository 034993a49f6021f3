"""README and the pages of docs/: examples run, commands are understood, links lead to files."""

import re
import shlex
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers

import oracle
import startrail_jax
from benchmarks import figure
from train import read_command_line
from trainer.command_line import parse
from trainer.tasks import TASKS

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted(ROOT.glob("C*.md")), ROOT / "SECURITY.md"]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
# Files that are written by a run, not stored.
MADE = ("runs/", "build/")
PRETRAINED = ROOT / "tests" / "parity" / "references" / "qwen3"
# Modules that the reference leaves out: what they hold is of no use to others.
UNLISTED = ("__init__", "linear", "replica_groups", "sizes")


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def run_python(page, monkeypatch):
    """Runs the Python of a page, one block after another, on 8 of the simulated devices."""
    devices = jax.devices()[:8]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    code = "".join(blocks(page, "python"))
    names = {}
    exec(compile(code, str(page), "exec"), names)
    return names


@pytest.mark.parametrize("ending", ["python train.py", "pytest -n 2"])
def test_readme_has_one_line_to_train_and_one_to_test(ending):
    lines = README.read_text().splitlines()
    (command,) = [x for x in lines if re.search(r"^python3 -m venv .*" + ending.split()[-1], x)]
    assert command.endswith(f".venv/bin/{ending}")


@pytest.mark.slow
def test_python_of_readme_runs_and_is_right(monkeypatch):
    names = run_python(README, monkeypatch)
    unpermute = names["attention"].layout.unpermute
    query, key, value, out = (
        unpermute(jax.device_get(names[name])) for name in ("query", "key", "value", "out")
    )
    expected, _ = oracle.attention(query, key, value, causal=True)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    np.testing.assert_array_equal(names["result"], out)
    assert 0 < float(names["loss"]) < 10
    names["test_my_attention_is_exact"]()


@pytest.mark.slow
def test_python_of_attention_page_runs_and_is_right(monkeypatch):
    names = run_python(ROOT / "docs" / "attention.md", monkeypatch)
    unpermute = names["attention"].layout.unpermute
    query, key, value, out = (
        unpermute(jax.device_get(names[name])) for name in ("query", "key", "value", "out")
    )
    expected, _ = oracle.attention(query, key, value, causal=True)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    names["test_my_model_is_exact"]()


@pytest.mark.slow
def test_python_of_parts_page_is_that_of_single_rows(monkeypatch):
    names = run_python(ROOT / "docs" / "parts.md", monkeypatch)
    documents, count, nnx = names["documents"], names["count"], names["nnx"]
    model = names["Model"](nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, names["optax"].adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def gradients(model):
        def loss_of(model):
            losses = [_loss_of_document(model, np.asarray(document)) for document in documents]
            return sum(losses) / count

        return nnx.value_and_grad(loss_of)(model)

    losses = []
    for _ in range(5):
        loss, grads = gradients(model)
        optimizer.update(model, grads)
        losses.append(float(loss))
    np.testing.assert_allclose(names["losses"], losses, rtol=1e-5)
    for found, wanted in zip(
        *map(jax.tree.leaves, map(nnx.state, (names["model"], model))), strict=True
    ):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def _loss_of_document(model, tokens):
    """The sum of the losses of a document alone, with dense attention."""

    def attention(query, key, value):
        return jax.nn.dot_product_attention(query, key, value, is_causal=True)

    logits = model(tokens[None, :-1], np.arange(len(tokens) - 1)[None], attention)
    likely = jax.nn.log_softmax(logits)[0, np.arange(len(tokens) - 1), tokens[1:]]
    return -likely.sum()


def test_example_of_the_first_page_is_that_of_readme():
    assert blocks(ROOT / "docs" / "index.md", "python") == blocks(README, "python")[:1]


@pytest.mark.slow
def test_python_of_all_other_pages_runs(monkeypatch, capsys):
    others = [page for page in PAGES if blocks(page, "python")]
    for page in (README, *(ROOT / "docs" / f"{x}.md" for x in ("index", "attention", "parts"))):
        others.remove(page)
    assert others
    for page in others:
        run_python(page, monkeypatch)
    assert "python train.py gpt_7b" in capsys.readouterr().out


def commands(program):
    """Arguments of every call of a program on the pages, with the pages' names."""
    found = []
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        lines = [x for block in blocks(page, "sh") for x in block.splitlines()]
        lines += re.findall(r"`([^`\n]*)`", text)
        for line in lines:
            if match := re.search(rf"python {program}\.py\b +([^#&]+)", line):
                name = f"{page.stem}:{match[1].strip()}"
                found.append(pytest.param(shlex.split(match[1]), id=name))
    return found


@pytest.mark.parametrize("arguments", commands("train"))
def test_commands_that_train_are_understood(arguments, tmp_path):
    if arguments and arguments[0].startswith(MADE):
        arguments = ["gpt_tiny", *arguments[1:]]
    if "--init-from" in arguments:
        shutil.copyfile(PRETRAINED / "config.json", tmp_path / "config.json")
        tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "tokenizer.json"))
        arguments = [str(ROOT / "docs") if word == "FOLDER" else word for word in arguments]
        arguments[arguments.index("--init-from") + 1] = str(tmp_path)
        assert read_command_line(arguments).settings.init_from == tmp_path
    else:
        assert read_command_line(arguments).settings.steps


@pytest.mark.parametrize("arguments", commands("sample"))
def test_commands_that_sample_are_understood(arguments):
    run_dir, *flags = arguments
    kind = "dit" if "dit" in run_dir else "gpt"
    options = TASKS[kind].options_class()
    assert parse(flags, default=options, prog="sample.py", description=None).settings


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    for target in targets:
        if not target.startswith(("https://", "#")):
            assert (page.parent / target.split("#")[0]).exists(), f"{page.name}: {target}"


def test_files_that_pages_name_exist():
    for page in PAGES:
        named = re.findall(r"`((?:[a-z_]+/)+(?:[A-Za-z_]+\.(?:py|md|png|svg))?)`", page.read_text())
        for name in named:
            if not name.startswith(MADE):
                assert (ROOT / name).exists(), f"{page.name}: {name}"


def test_reference_has_every_public_name():
    reference = "".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    for name in startrail_jax.__all__:
        assert re.search(rf"^\.\. (autoclass|autofunction|py:data):: {name}$", reference, re.M), (
            name
        )
    for folder in ("startrail_jax/analysis", "startrail_jax/planner", "models", "configs"):
        for path in (ROOT / folder).glob("*.py"):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            if path.stem not in UNLISTED:
                assert f".. automodule:: {module}\n" in reference, module


def test_figure_is_drawn_from_the_results():
    assert figure.SVG.read_text() == figure.draw((ROOT / "benchmarks" / "RESULTS.md").read_text())
