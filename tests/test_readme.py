"""README and the pages of docs/: examples run, commands are understood, links lead to files."""

import argparse
import json
import math
import re
import runpy
import shlex
import shutil
import sys
import tomllib
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
import tyro
import yaml

import linear_oracle
import oracle
import plan
import startrail_jax
from configs import RECIPES
from programs import check_first_step
from train import read_command_line
from trainer.command_line import flag_of
from trainer.gpt.corpus import check_bytes
from trainer.mesh import new_degrees
from trainer.run.settings import save_config
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


def right_output(names):
    """The output of a page's attention, which is exact."""
    unpermute = names["attention"].layout.unpermute
    query, key, value, out = (
        unpermute(jax.device_get(names[name])) for name in ("query", "key", "value", "out")
    )
    expected, _ = oracle.attention(query, key, value, causal=True)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    return out


@pytest.mark.slow
def test_python_of_readme_runs_and_is_right(monkeypatch):
    names = run_python(README, monkeypatch)
    out = right_output(names)
    np.testing.assert_array_equal(names["result"], out)
    assert 0 < float(names["loss"]) < 10
    names["test_my_attention_is_exact"]()


@pytest.mark.slow
def test_python_of_attention_page_runs_and_is_right(monkeypatch):
    names = run_python(ROOT / "docs" / "attention.md", monkeypatch)
    right_output(names)
    names["test_my_model_is_exact"]()
    k, *others = (names[name] for name in ("k", "v", "decay", "beta"))
    expected, states = linear_oracle.linear_attention(k, k, *others, delta=True, scale=32**-0.5)
    np.testing.assert_allclose(names["linear"].unshard(names["read"]), expected, atol=2e-6)
    np.testing.assert_allclose(names["state"], states[-1], atol=2e-6)
    tokens = (names[name] for name in ("q", "latent", "rotated", "from_latents"))
    query, latent, rotated, found = map(names["attention"].unshard, tokens)
    key, value = (
        np.einsum("bsr,rnh->bsnh", latent, names[f"{x}_kernel"]) for x in ("key", "value")
    )
    shape = (*key.shape[:3], rotated.shape[-1])
    key = np.concatenate([key, np.broadcast_to(rotated[:, :, None], shape)], -1)
    expected, _ = oracle.attention(query, key, value, causal=True)
    np.testing.assert_allclose(found, expected, atol=2e-6)


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


class Understood(BaseException):
    """A program has read its flags, and would begin."""


def calls(page):
    """The programs that blocks and inline code of a page call, (words, number of devices or 8)."""
    text = page.read_text()
    found = []
    for block in blocks(page, "sh"):
        for document in re.findall(r"<<'END'\n(.*?)\nEND\n", block, re.DOTALL):
            compile(document, str(page), "exec")
        block = re.sub(r"python - <<'END'\n.*?\nEND\n", "", block, flags=re.DOTALL)
        slurm = re.search(r"#SBATCH --nodes=(\d+).* --gpus-per-node=(\d+)", block)
        devices = math.prod(map(int, slurm.groups())) if slurm else 8
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            found += [(part, devices) for part in split(words, "&&")]
    found += [
        (shlex.split(line), 8)
        for line in re.findall(r"`(python (?:-m )?[a-z][^`]*)`", text)
        if len(line.split()) > 2 + ("-m" in line)
    ]
    for block in blocks(page, "yaml"):
        job = yaml.safe_load(block)["spec"]["replicatedJobs"][0]["template"]["spec"]
        (container,) = job["template"]["spec"]["containers"]
        devices = job["parallelism"] * container["resources"]["limits"]["nvidia.com/gpu"]
        # Kubernetes puts a number there.
        found.append(
            ([x.replace("$(JOB_COMPLETION_INDEX)", "1") for x in container["command"]], devices)
        )
    return [(program_of(words), devices) for words, devices in found if words]


def split(words, separator):
    """The parts of a list between separators."""
    parts = [[]]
    for word in words:
        if word == separator:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def program_of(words):
    """The words of a call, without variables, launchers and the folder of the environment."""
    while words and (re.match("[A-Z_]+=", words[0]) or words[0] in ("srun", "do", "env")):
        words = words[1:]
    return [words[0].removeprefix(".venv/bin/"), *words[1:]] if words else words


SHELL = ("for", "done", "break", "source", "cd", "export")
"""Words of the shell itself, which call no program of this project."""
CALLS = [
    pytest.param(words, devices, id=f"{page.stem}:{shlex.join(words)}"[:120])
    for page in (*PAGES, ROOT / "benchmarks" / "RESULTS.md")
    for words, devices in calls(page)
    if words and words[0] not in SHELL
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the files and runs that pages name, in which programs run."""
    place = tmp_path_factory.mktemp("place")
    for name in ("FOLDER", "exported", "Qwen3-8B", "/shared/tokens"):
        folder = place / name.lstrip("/")
        folder.mkdir(parents=True)
        shutil.copyfile(PRETRAINED / "config.json", folder / "config.json")
        tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))
    for size, heads in (("1.3B", 12), ("14B", 40)):
        folder = place / f"Wan2.1-T2V-{size}-Diffusers" / "transformer"
        folder.mkdir(parents=True)
        values = {"_class_name": "WanTransformer3DModel", "num_attention_heads": heads}
        (folder / "config.json").write_text(json.dumps(values))
    (place / "encoded").mkdir()
    (place / "encoded" / "encoded.json").write_text("{}")
    line = {"file": "kite.safetensors", "size": [21, 60, 104], "tokens": 3, "caption": "a kite"}
    (place / "encoded" / "clips-0-of-1.jsonl").write_text(json.dumps(line))
    (place / "latents").mkdir()
    about = {"kind": "images", "channels": 4, "pixels": False, "model": "", "captions": False}
    about["classes"] = ["n01440764", "n01443537"]
    (place / "latents" / "encoded.json").write_text(json.dumps(about))
    line = dict(image="a/b.png", version=0, sha256="", file="c", row=0, label=0, caption=None)
    line = json.dumps(line | {"size": [1, 32, 32]})
    (place / "latents" / "images-0-of-1.jsonl").write_text(line)
    (place / "captioned").mkdir()
    about |= {"classes": None, "captions": True, "text_dim": 768, "text_model": ""}
    (place / "captioned" / "encoded.json").write_text(json.dumps(about))
    line = json.loads(line) | {"label": None, "caption": "a kite", "text": [0, 4]}
    (place / "captioned" / "images-0-of-1.jsonl").write_text(json.dumps(line))
    made = "gpt_tiny mine qwen3 adapted copy reward Qwen3-8B dit_digits dit_1b dit_video wan plain"
    for name in [*made.split(), "captioned"]:
        recipe = name if name in RECIPES else "gpt_tiny"
        recipe = "dit_1b" if name == "captioned" else recipe
        recipe = "wan_1_3b" if name in ("wan", "plain") else recipe
        (place / "runs" / name).mkdir(parents=True)
        save_config(RECIPES[recipe](), place / "runs" / name / "config.json")
        (place / "runs" / name / "metrics.jsonl").write_text('{"step": 1, "train_loss": 5.0}\n')
    for name in ("startrail_jax", "trainer", "benchmarks", "tests"):
        (place / name).symlink_to(ROOT / name)
    return place


@pytest.mark.parametrize(("words", "devices"), CALLS)
def test_commands_of_pages_are_understood(words, devices, place, monkeypatch, capsys):
    """Programs of this project read their flags; `train.py` finds a mesh for its devices too."""
    monkeypatch.chdir(place)
    program, *arguments = words
    if program == "pip":
        extras = {x for word in arguments for x in re.findall(r"\[(.*)\]", word)}
        known = set(
            tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        )
        assert {x for group in extras for x in group.split(",")} <= known
        return
    if program in ("hf", "pre-commit", "pytest", "python3", "sphinx-build", "apt", "nvidia-smi"):
        return
    if program == ".ci/run":
        assert set(arguments) <= set(
            re.findall(r"^([a-z_]+)\(\)", (ROOT / ".ci/run").read_text(), re.M)
        )
        return
    assert program == "python", "a program that no test knows"
    if arguments[0] == "train.py":
        settings = read_command_line(arguments[1:]).settings
        processes = flag_of(arguments, "--distributed.processes")
        check_run(settings, 8 * int(processes) if processes and devices == 8 else devices)
        return
    if arguments[0] == "plan.py":
        if "--help" in arguments:
            assert plan.parser().parse_args([x for x in arguments[1:] if x != "--help"])
        else:
            assert plan.main(arguments[1:]) == 0
        return

    def reads(parse):
        def parsed(*given, **options):
            parse(*given, **options)
            raise Understood

        return parsed

    monkeypatch.setattr(tyro, "cli", reads(tyro.cli))
    # `parse_args` calls it too.
    known = argparse.ArgumentParser.parse_known_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", reads(known))
    as_module = arguments[0] == "-m"
    monkeypatch.setattr(sys, "argv", arguments[as_module:])
    for loaded in (arguments[as_module], f"{arguments[as_module]}.__main__"):
        monkeypatch.delitem(sys.modules, loaded, raising=False)
    run = partial(runpy.run_module, alter_sys=True) if as_module else runpy.run_path
    try:
        run(arguments[1] if as_module else str(ROOT / arguments[0]), run_name="__main__")
    except Understood:
        pass
    except ModuleNotFoundError as error:
        if error.name != "torch":  # Of the extra `parity`.
            raise


def check_run(settings, devices):
    """Raises what the first step of a run would raise on so many devices, and for its data."""
    if settings.kind == "gpt" and settings.init_from is None:
        data = settings.data
        has_text = settings.row_loss is None or settings.row_loss.form == "pairs"
        is_plan = settings.plan == "show"  # It reads no data.
        if (
            has_text
            and not is_plan
            and not any(path.name.startswith("tokens") for path in data.path)
        ):
            check_bytes(data, settings.model.vocab_size)
    objective = TASKS[settings.kind].make_objective(settings)
    check_first_step(settings, new_degrees(settings, objective, devices))


def test_logs_on_pages_are_what_programs_print():
    folders = (ROOT / "trainer", ROOT / "startrail_jax" / "verify")
    sources = "".join(path.read_text() for x in folders for path in x.rglob("*.py"))
    logs = [
        line
        for page in PAGES
        for block in blocks(page, "text")
        for line in block.splitlines()
        # Lines of `--verify`, which have a verdict first, are compared in its tests.
        if re.match("[a-z ]+: ", line) and not line.startswith(("ok ", "- "))
    ]
    assert len(logs) >= 3
    for line in logs:
        assert f'"{line.partition(": ")[0]}: ' in sources, line


def test_every_block_of_every_page_is_of_a_language_that_a_test_reads():
    """Sphinx runs `code-cell` and the directives in braces, and fails on an unknown one."""
    for page in (*PAGES, ROOT / "benchmarks" / "RESULTS.md"):
        for language in re.findall(r"^```+(\S+)", page.read_text(), re.M):
            assert language in ("sh", "python", "yaml", "text") or language.startswith("{"), page


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
    for folder in ("startrail_jax/analysis", "startrail_jax/traffic", "models", "configs"):
        for path in (ROOT / folder).glob("*.py"):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            if path.stem not in UNLISTED:
                assert f".. automodule:: {module}\n" in reference, module
