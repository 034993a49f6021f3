"""Who may import whom. `python tests/test_structure.py` prints the sizes of the house."""

import ast
import collections
import functools
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]
OP = "startrail_jax"

# Lowest first. A unit may import itself and the units of the layers below, and no unit of its own
# layer: so `trainer.gpt` and `trainer.dit` do not know each other.
LAYERS = (
    {f"{OP}.errors", f"{OP}.values"},
    {f"{OP}.tokens", f"{OP}.devices"},
    {f"{OP}.masks", f"{OP}.xla"},
    {f"{OP}.blocks"},
    {f"{OP}.rings"},
    {f"{OP}.calls", f"{OP}.traffic"},
    {f"{OP}.device_mesh"},
    {f"{OP}.attention", f"{OP}.linear"},
    # Nothing of the op reads compiled programs.
    {f"{OP}.analysis", f"{OP}.testing"},
    {f"{OP}.verify"},
    # Its package, which imports its modules when they are first asked for.
    {OP},
    {"models"},
    {"trainer.durable", "trainer.errors", "trainer.places", "trainer.printable"}
    | {"trainer.frozen"},
    {"trainer.packages", "trainer.sums"},
    {"trainer.config", "trainer.planner"},
    {"trainer.sizes"},
    {"trainer.objective"},
    {"trainer.run", "trainer.data"},
    {"trainer.processes", "trainer.parallel", "trainer.task"},
    {"trainer.checkpoints"},
    {"trainer.weights"},
    {"trainer.planning", "trainer.mirror"},
    {"trainer.mesh"},
    {"trainer.command_line", "trainer.loop", "trainer.session"},
    {"trainer.gpt", "trainer.dit"},
    {"trainer.tasks"},
    {"configs", "trainer.pretrained", "trainer.verify"},
    {"train", "sample", "score"},
    {"plan"},
    {"tests.faults"},
    {"benchmarks", "examples"},
)

# Modules of the op that read no arrays may use only what describes a setting.
OP_MAY_USE = {"jax", "numpy", "jaxtyping", "einops"}
MODELS_MAY_USE_OF_OP = {
    f"{OP}.errors",
    f"{OP}.xla.ordering",
    f"{OP}.xla.varying",
}


def files():
    folders = ("startrail_jax", "models", "trainer", "configs", "benchmarks", "tests/faults")
    return [
        *(path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))),
        *(ROOT / name for name in ("train.py", "sample.py", "score.py", "plan.py")),
    ]


def file_id(path):
    return str(path.relative_to(ROOT))


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def modules():
    return {module_of(path): path for path in files()}


@functools.cache
def nodes(path):
    return tuple(ast.walk(ast.parse(path.read_text())))


@functools.cache
def imports(path):
    """Every name that a file imports, anywhere in it, in full: `from a import b` gives a.b."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports in full"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def without_encoding(path):
    """Lines of a file that read or write text in the encoding of the locale."""
    for node in nodes(path):
        if not isinstance(node, ast.Call) or any(x.arg == "encoding" for x in node.keywords):
            continue
        of = node.func
        name = of.attr if isinstance(of, ast.Attribute) else getattr(of, "id", None)
        modes = [x.value for x in (*node.args, *(x.value for x in node.keywords)) if is_mode(x)]
        # Of an `open` that is no file's, such as that of PyAV, the first argument says more.
        is_file = name == "open" and len(modes) == len(node.args) and "b" not in "".join(modes)
        if (name in ("read_text", "write_text") and isinstance(of, ast.Attribute)) or is_file:
            yield node.lineno


def is_mode(node):
    return isinstance(node, ast.Constant) and re.fullmatch(r"[rwxab+t]{1,3}", str(node.value))


def our_modules(path):
    """The modules of this repository that a file imports; folders where it names no module."""
    ours = set()
    for name in imports(path):
        while name and name not in modules():
            name = name.rpartition(".")[0]
        if name:
            ours.add(name)
    return ours - {module_of(path)}


def third_party(path):
    ours = {module.split(".")[0] for module in modules()}
    return {name.split(".")[0] for name in imports(path)} - sys.stdlib_module_names - ours


def unit_of(module):
    """The unit of `LAYERS` that a module belongs to, and the number of its layer."""
    found = [
        (len(unit), unit, number)
        for number, layer in enumerate(LAYERS)
        for unit in layer
        if module == unit or (module.startswith(f"{unit}.") and unit != OP)
    ]
    return max(found)[1:] if found else (None, None)


def test_text_is_utf8_in_every_locale():
    lines = {file_id(path): list(without_encoding(path)) for path in files()}
    assert {name: found for name, found in lines.items() if found} == {}


@pytest.mark.parametrize("path", files(), ids=file_id)
def test_nothing_imports_upwards(path):
    unit, layer = unit_of(module_of(path))
    if unit is None:
        assert path.name == "__init__.py", "name the layer of this file in LAYERS"
        assert not our_modules(path)
        return
    upwards = {
        module
        for module in our_modules(path)
        if unit_of(module)[0] != unit and not (unit_of(module)[1] or 0) < layer
    }
    assert not upwards


def test_no_module_imports_itself_by_way_of_others():
    graph = {module: our_modules(path) for module, path in modules().items()}
    # The package imports its modules when they are first asked for.
    graph[OP] = set()
    assert list(graphlib.TopologicalSorter(graph).static_order())


def files_of_op():
    return [path for path in files() if OP in path.relative_to(ROOT).parts]


@pytest.mark.parametrize("path", files_of_op(), ids=file_id)
def test_module_of_the_op_needs_only_what_the_wheel_installs(path):
    module = path.relative_to(ROOT / OP).with_suffix("").as_posix()
    extras = {"testing": "chex", "blocks/fa4": "fa4_jax", "linear/jla": "jla"}
    extra = {extras[module]} if module in extras else set()
    allowed = OP_MAY_USE | extra
    assert not third_party(path) - allowed, f"the wheel depends on {allowed} only"


def test_nothing_private_of_jax_is_used():
    assert not [path for path in files() if any(x.startswith("jax._src") for x in imports(path))]


@pytest.mark.parametrize(
    "path", [path for path in files() if "models" in path.relative_to(ROOT).parts], ids=file_id
)
def test_models_know_no_mesh(path):
    assert {x for x in our_modules(path) if x.startswith(OP)} <= MODELS_MAY_USE_OF_OP
    assert not {x for x in imports(path) if x.startswith(("jax.sharding", "jax.shard_map"))}


def test_oracle_imports_only_numpy():
    assert third_party(ROOT / "tests" / "oracle.py") == {"numpy"}


def attributes(path):
    return {node.attr for node in nodes(path) if isinstance(node, ast.Attribute)}


def test_only_collectives_rings_and_attention_name_mesh_axes():
    """A block, a mask and a merge know no mesh axis: they call no collective."""
    collective = {"ppermute", "all_gather", "all_to_all", "psum", "psum_scatter", "axis_index"}
    for path in files_of_op():
        room = path.relative_to(ROOT / OP).with_suffix("").parts[0]
        if room not in {"rings", "attention", "analysis"}:
            assert not attributes(path) & collective, file_id(path)


def test_data_go_round_the_ring_in_one_place():
    """Only `collectives` permutes."""
    for path in files_of_op():
        if path.stem != "collectives":
            assert "ppermute" not in attributes(path), file_id(path)


def test_no_two_classes_have_one_name():
    places = collections.defaultdict(list)
    for path in files():
        # A benchmark is a script by itself.
        for node in nodes(path) if path.relative_to(ROOT).parts[0] != "benchmarks" else ():
            if isinstance(node, ast.ClassDef):
                places[node.name].append(file_id(path))
    assert not {name: paths for name, paths in places.items() if len(paths) > 1}


def test_all_that_is_printed_is_printable():
    """A name of a file, a text or a message of another process may hold commands for a terminal."""
    for path in files():
        if not path.is_relative_to(ROOT / "trainer") and path.parent != ROOT:
            continue
        for node in nodes(path):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) not in {
                "print",
                "sys.exit",
            }:
                continue
            for shown in node.args:
                text = ast.unparse(shown)
                is_constant = isinstance(shown, ast.Constant) or text.isupper()
                assert is_constant or "printable(" in text, f"{file_id(path)}:{node.lineno}"


def test_no_module_is_for_everything():
    assert not [file_id(path) for path in files() if path.stem in ("utils", "helpers", "misc")]


def sizes():
    """How large the house is: an arrow is a unit that imports another, floors a chain of them."""
    arrows = collections.defaultdict(set)
    for module, path in modules().items():
        if module != OP and (unit := unit_of(module)[0]):
            arrows[unit] |= {unit_of(other)[0] for other in our_modules(path)} - {unit, OP, None}

    @functools.cache
    def floor(unit):
        return 1 + max(map(floor, arrows[unit]), default=0)

    everything = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split("\n")[:-1]
    count = lambda names: sum(len((ROOT / x).read_bytes().splitlines()) for x in names)  # noqa: E731
    code = [name for name in everything if name.endswith(".py")]
    tests = [name for name in code if name.startswith("tests/")]
    return [
        ("lines of Python", count(code) - count(tests)),
        ("and of its tests", count(tests)),
        ("files", len(everything)),
        ("units", len(arrows)),
        ("arrows", sum(map(len, arrows.values()))),
        ("floors", max(map(floor, list(arrows)))),
    ]


if __name__ == "__main__":
    for name, number in sizes():
        print(f"{name:<20}{number:>8,}")
