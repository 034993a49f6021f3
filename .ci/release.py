"""Checks what a release publishes: its version and the files of the wheel and of the sdist.

    python .ci/release.py FOLDER [TAG]

FOLDER holds one wheel and one sdist of the commit that is checked out; TAG is the release's, if
there is one.
"""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LARGEST_WHEEL = 400_000
"""Bytes."""
MADE_BY_BUILD = {"PKG-INFO", "LICENSE", "README.md", "pyproject.toml", ".gitignore"}


def check_version(tag: str | None) -> str:
    """Returns the version, which pyproject.toml, CITATION.cff, CHANGELOG.md and the tag share."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "version"
    ]
    cited = re.search(
        r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE
    )
    changed = re.search(
        r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    for name, found in (("CITATION.cff", cited), ("CHANGELOG.md", changed)):
        number = found[1] if found else None
        assert number == version, f"{name} must have version {version} first; got {number}"
    assert tag in (None, f"v{version}"), f"the tag must be v{version}; got {tag}"
    return version


def check_wheel(path: Path, version: str) -> None:
    """The wheel has the op, its types and its licence, and nothing else."""
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        metadata = wheel.read(f"startrail_jax-{version}.dist-info/METADATA").decode()
    modules = [name for name in names if name.startswith("startrail_jax/")]
    about = [name for name in names if name.startswith(f"startrail_jax-{version}.dist-info/")]
    odd = [x for x in names if x not in about and not re.fullmatch(r"startrail_jax/.*\.py", x)]
    assert odd == ["startrail_jax/py.typed"], odd
    assert any(name.endswith("LICENSE") for name in about), "the wheel has no licence"
    assert f"Version: {version}\n" in metadata
    size = path.stat().st_size
    assert size < LARGEST_WHEEL, f"the wheel must have less than {LARGEST_WHEEL} bytes; got {size}"
    print(f"{path.name}: {size:,} bytes, {len(modules)} files of the package")


def check_sdist(path: Path) -> None:
    """The sdist has only files that are committed."""
    tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    with tarfile.open(path) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert names - {*tracked} <= MADE_BY_BUILD, names - {*tracked}
    print(f"{path.name}: {path.stat().st_size:,} bytes, {len(names)} files")


if __name__ == "__main__":
    folder, *given = sys.argv[1:]
    number = check_version(given[0] if given else None)
    (wheel,), (sdist,) = Path(folder).glob("*.whl"), Path(folder).glob("*.tar.gz")
    check_wheel(wheel, number)
    check_sdist(sdist)
