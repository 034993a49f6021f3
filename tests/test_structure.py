"""Who may import whom (design, section 7), read from the source."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "startrail_jax"

# Module or subpackage of the core -> what it may import of the core. Those that read no arrays
# (cost, hlo) may use only what describes a setting.
BASE = {"errors", "shapes"}
TOKENS = BASE | {"mesh", "layout", "pieces", "mask", "softmax"}
MAY_IMPORT = {
    "errors": set(),
    "shapes": set(),
    "mesh": BASE,
    "layout": BASE,
    "pieces": set(),
    "mask": BASE | {"layout", "pieces"},
    "tiles": BASE | {"layout", "mask"},
    "softmax": BASE,
    "varying": set(),
    "collectives": BASE | {"mesh", "layout", "softmax"},
    "blocks": BASE | {"layout", "pieces", "mask", "tiles", "softmax", "varying"},
    "compiler": BASE | {"mesh"},
    "cost": BASE | {"mesh", "layout"},
    "schedule": TOKENS | {"collectives", "blocks", "cost"},
    "rings": TOKENS | {"collectives", "blocks", "schedule", "varying"},
    "decode": BASE | {"mesh", "layout", "softmax", "collectives", "varying"},
    "explain": TOKENS | {"blocks", "schedule"},
    "validation": BASE | {"mesh", "layout"},
    "attention": TOKENS
    | {"collectives", "blocks", "cost", "decode", "explain", "rings", "schedule", "validation"},
    "hlo": BASE,
    "overlap": BASE | {"hlo"},
}
CORE_MAY_USE = {"jax", "numpy", "jaxtyping", "einops"}


def imports(path):
    """Every module that a file imports, anywhere in it, in full: `from a import b` gives a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports in full"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def of_package(names):
    """The modules of startrail_jax among `names`: 'startrail_jax.mask.Mask' gives 'mask'."""
    inside = [name.split(".") for name in names if name.split(".")[0] == "startrail_jax"]
    return {parts[1] if len(parts) > 1 else "startrail_jax" for parts in inside}


def third_party(names):
    ours = {"startrail_jax", "models", "configs", "train", "sample"}
    return {name.split(".")[0] for name in names} - sys.stdlib_module_names - ours


def modules_of_core():
    files = [
        path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "training"
    ]
    return sorted(files)


def module_id(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", modules_of_core(), ids=module_id)
def test_core_module_imports_only_lower_layers(path):
    found = imports(path)
    unexpected = third_party(found) - CORE_MAY_USE
    assert not unexpected, f"the core may use only {CORE_MAY_USE}"
    assert not any(name.startswith("jax._src") for name in found)
    module = path.relative_to(PACKAGE).with_suffix("").parts[0]
    if module == "__init__":
        assert "training" not in of_package(found)
    else:
        own = {module} if module == "blocks" else set()
        assert of_package(found) <= MAY_IMPORT[module] | own


@pytest.mark.parametrize("path", sorted((ROOT / "models").rglob("*.py")), ids=module_id)
def test_models_import_only_shapes(path):
    found = imports(path)
    assert of_package(found) <= {"errors", "shapes"}
    assert not {name for name in found if name.startswith(("jax.sharding", "jax.shard_map"))}


def test_oracle_imports_only_numpy():
    assert third_party(imports(ROOT / "tests" / "oracle.py")) == {"numpy"}


def test_only_rings_and_attention_and_collectives_name_mesh_axes():
    """A block, a mask and a merge know no mesh axis: they call no collective."""
    collectives = {"ppermute", "all_gather", "all_to_all", "psum", "psum_scatter", "axis_index"}
    for path in modules_of_core():
        module = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if module in {"collectives", "rings", "attention", "hlo", "cost"}:
            continue
        used = {
            n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)
        }
        assert not used & collectives, module_id(path)


def test_ring_loop_is_in_one_place():
    """Only `collectives` moves data between devices."""
    for path in modules_of_core():
        if path.stem == "collectives":
            continue
        used = {
            n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)
        }
        assert "ppermute" not in used, module_id(path)
