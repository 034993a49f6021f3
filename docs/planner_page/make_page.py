"""Makes the planner's page: python docs/planner_page/make_page.py build/docs/planner_page

npm downloads Python and NumPy for browsers. The page then loads nothing but its own files, and runs
the planner of this checkout.
"""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGES = ROOT / "build" / "npm"
PAGE = ("index.html", "style.css", "page.js", "rings.js", "worker.js")
PYODIDE = (
    "pyodide.js",
    "pyodide.asm.js",
    "pyodide.asm.wasm",
    "pyodide-lock.json",
    "python_stdlib.zip",
)
UNUSED = ("tests", "distutils", "f2py", "random", "fft", "polynomial", "testing", "include")
"""Folders of NumPy that the planner does not import for what the page asks."""


def install_packages() -> None:
    """Installs the packages of package-lock.json into build/npm."""
    if shutil.which("npm") is None:
        sys.exit(
            "The planner's page needs npm, which is not on the PATH. Install Node.js 20 or later."
        )
    PACKAGES.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json", ".npmrc"):
        shutil.copy(HERE / name, PACKAGES)
    subprocess.run(["npm", "ci", "--no-audit", "--no-fund"], cwd=PACKAGES, check=True)


def planner_files() -> list[Path]:
    """The modules of the checkout that the page imports."""
    code = (
        "import sys, answers\n"
        "for name, module in sorted(sys.modules.items()):\n"
        "    if name.split('.')[0] == 'startrail_jax': print(module.__file__)\n"
        "assert 'jax' not in sys.modules"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{ROOT}:{HERE}", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return [Path(line) for line in found.stdout.splitlines()]


def write_planner(target: Path) -> None:
    """Packs the planner and what the page asks of it."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.write(HERE / "answers.py", "answers.py")
        for path in planner_files():
            packed.write(path, path.relative_to(ROOT))


def write_numpy(target: Path) -> None:
    """Packs NumPy without the folders that are not imported."""
    (archive,) = (PACKAGES / "node_modules/@emscripten-forge/numpy/pkg").glob("*.tar.gz")
    with (
        tarfile.open(archive) as files,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for member in files:
            _, _, name = member.name.partition("site-packages/")
            used = not set(Path(name).parts) & {*UNUSED} and not name.endswith((".pyi", ".a"))
            if name and member.isfile() and used:
                content = files.extractfile(member)
                assert content is not None
                packed.writestr(name, content.read())


def main(target: Path) -> None:
    """Writes the page into a folder."""
    install_packages()
    shutil.rmtree(target, ignore_errors=True)
    (target / "pyodide").mkdir(parents=True)
    for name in PAGE:
        shutil.copy(HERE / name, target)
    for name in PYODIDE:
        shutil.copy(PACKAGES / "node_modules/pyodide" / name, target / "pyodide")
    write_planner(target / "planner.zip")
    write_numpy(target / "numpy.zip")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
