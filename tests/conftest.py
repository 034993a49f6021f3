"""Every test runs on simulated CPU devices. Slow imports are made where they are needed."""

import contextlib
import gc
import os
import signal
import tempfile
from pathlib import Path

import pytest

import compile_cache

PACKAGES = ("startrail_jax", "models", "trainer")
SIMULATED_DEVICES = 64
# The only reasons to skip: large packages, which steps of `.ci/run` install, and rights.
ALLOWED_SKIPS = (
    *("needs jax-cuda13-pjrt", "needs fa4-jax"),
    "needs wandb",
    "needs network namespaces",
    "this Flax has no is_causal",
)


def pytest_addoption(parser):
    parser.addoption(
        "--check-all-types",
        action="store_true",
        help="check the arguments of every function, not only shapes and dtypes of arrays",
    )


def pytest_configure(config):
    heed_ctrl_c()
    if not runs_tests(config):
        return
    set_up_hypothesis()
    check_types(everywhere=config.getoption("--check-all-types"))
    # Imported here, since the checks of types must come first.
    import jax

    from startrail_jax.testing import simulate_devices

    compile_quickly(config)
    simulate_devices(SIMULATED_DEVICES)
    jax.config.update("jax_numpy_rank_promotion", "raise")


def runs_tests(config):
    """Whether this process runs tests, and does not only hand them out to others."""
    hands_out = config.getoption("numprocesses", None) and not config.getoption("collectonly")
    return hasattr(config, "workerinput") or not hands_out


def set_up_hypothesis():
    """Draws the same few examples in every run, unless HYPOTHESIS_PROFILE is "explore"."""
    from hypothesis import settings

    settings.register_profile(
        "fixed", derandomize=True, deadline=None, max_examples=10, database=None
    )
    settings.register_profile("explore", deadline=None, max_examples=100, print_blob=True)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


def check_types(*, everywhere):
    """Lets jaxtyping check annotations of the modules that state shapes, which come later."""
    import jaxtyping

    root = Path(__file__).parent.parent
    files = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    names = [
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        for path in files
        if "jaxtyping" in path.read_text()
    ]
    jaxtyping.install_import_hook(list(PACKAGES) if everywhere else names, "beartype.beartype")


def heed_ctrl_c():
    """Gives SIGINT its usual effect, in programs of tests too, though `pytest &` ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def compile_quickly(config):
    """Sets up XLA here and in the programs that tests start; each process has its own cache, which
    begins with what earlier runs have compiled."""
    import jax

    # Tests run a compiled program once or twice, and most of their time goes into LLVM. These flags
    # halve that time.
    quick = ["--xla_cpu_parallel_codegen_split_count=1"]
    if jax.__version_info__ < (0, 11):
        # Later releases have only the new emitters, which compile more slowly.
        quick.append("--xla_cpu_use_fusion_emitters=false")
    flags = os.environ.get("XLA_FLAGS", "").split()
    os.environ["XLA_FLAGS"] = " ".join([x for x in quick if x not in flags] + flags)
    compiled = tempfile.TemporaryDirectory(prefix="compiled")
    config.add_cleanup(compiled.cleanup)
    cache = compile_cache.Cache(Path(compiled.name))
    cache.watch()
    config.add_cleanup(cache.keep)
    settings = {
        "jax_disable_most_optimizations": True,
        "jax_compilation_cache_dir": compiled.name,
        # Their path, which differs from run to run, would be a part of each program's key.
        "jax_persistent_cache_enable_xla_caches": "none",
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    for name, value in settings.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)


def pytest_collection_modifyitems(items):
    """Marks as slow what `slow_except_every` says, before `-m` chooses."""
    rows = {}
    for item in items:
        if mark := item.get_closest_marker("slow_except_every"):
            (every,) = mark.args
            test = item.nodeid.partition("[")[0]
            rows[test] = rows.get(test, -1) + 1
            if rows[test] % every:
                item.add_marker("slow")


def pytest_collection_finish():
    """Spares Python the search for garbage among modules, tests and traced objects, which stay."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture(autouse=True, scope="session")
def empty_folder(tmp_path_factory):
    """Runs tests in a folder of their own: the checkout may hold runs and files of its user."""
    with contextlib.chdir(tmp_path_factory.mktemp("folder")):
        yield


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Frees compiled programs, each of which takes some of the 65,530 maps of a process."""
    import jax

    yield
    jax.clear_caches()
    gc.collect()
    gc.freeze()  # What is left stays: later searches need not look at it again.


@pytest.fixture
def compile_well():
    """Full optimisation: quicker to compute, and products of 16-bit arrays on a CPU are float32."""
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def shared():
    """All runs of a module of tests share what they trace and compile."""
    from programs import shared_programs

    with shared_programs():
        yield


@pytest.fixture
def unchecked():
    """Without the type checker, as users run: shows the error that they get for a wrong type."""
    import jaxtyping

    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    return refuse_other_skips((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    return refuse_other_skips((yield))


def refuse_other_skips(report):
    """Turns a skip into a failure: a test that is skipped unseen guards nothing."""
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = str(report.longrepr[2])
        if not any(allowed in reason for allowed in ALLOWED_SKIPS):
            report.outcome = "failed"
            report.longrepr = f"{reason}. Allowed are only {ALLOWED_SKIPS}."
    return report
