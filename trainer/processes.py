"""Several processes that share a run: how they start, what they compare and how they end.

jax finds the processes and watches over them: if one of them is gone, its coordination service ends
all others within `Distributed.timeout`, and `trainer.run.lost` says which one it was. A process
that raises an error also writes it to the file `failures/<index>.txt` of the run folder; all others
look there every second.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from startrail_jax.errors import InputError
from trainer.config import Distributed
from trainer.data.dataset import Dataset
from trainer.errors import RunError
from trainer.printable import say
from trainer.run.commands import command
from trainer.run.exit import describe, end_now
from trainer.run.lost import named_losses

SIMULATED_DEVICES = 8
"""Enough for StarTrail with C = 2 and sub-rings of two."""
FAILURES_FOLDER = "failures"
"""The folder of a run folder with the errors of its processes."""
LOOK_SECONDS = 1.0
"""Between two looks at the folder of failures."""
MARGIN_SECONDS = 5.0
SHOWN_FLAGS = 8
OF_COLLECTIVE = re.compile("(UNKNOWN|INTERNAL|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED): ")
"""The beginning of a ValueError that jax raises when a collective fails as it is dispatched."""


@contextlib.contextmanager
def together(
    options: Distributed, folder: Path | None = None, *, saves_at_sigterm: bool = False
) -> Iterator[None]:
    """Joins the other processes of a program, if there are any, and leaves them at the end.

    To be entered before jax is used. If one process fails, all of them end with a status other than
    0; they find each other's errors in the run folder. An error does not leave the context: the
    process ends in it, since Python's own exit would wait for processes that may hang. SIGTERM ends
    it too, or is left to `trainer.run.interruption` (`saves_at_sigterm`).
    """
    if not options.several:
        yield
        return
    jax.config.update("jax_enable_preemption_service", saves_at_sigterm)
    folder = folder and folder / FAILURES_FOLDER
    known = _failures(folder)
    over = threading.Event()
    threading.Thread(target=_watch, args=[options, folder, known, over], daemon=True).start()
    has_joined = False
    with named_losses(options.index):
        try:
            _join(options)
            has_joined = True
            yield
            # Waits for all others.
            jax.distributed.shutdown()
        except BaseException as error:
            with contextlib.suppress(KeyboardInterrupt):
                if has_joined and _may_be_of_another(error):
                    # jax, or `_watch`, ends this process meanwhile if another one failed before.
                    time.sleep(options.timeout + MARGIN_SECONDS)
            over.set()
            _fail(error, folder, options)
    over.set()


def _join(options: Distributed) -> None:
    """Raises RunError if the other processes do not come in time, or jax is already in use."""
    where = f" at {options.coordinator}" if options.coordinator else ""
    said = threading.Timer(10, say, [f"waiting for the other processes{where}"])
    # At its own timeout, jax would print a stack trace of C++.
    patience = threading.Timer(
        options.start_timeout, lambda: end_now(describe(_not_all_there(options)))
    )
    for timer in (said, patience):
        timer.daemon = True
        timer.start()
    bind = options.coordinator if options.has_literal_address else None
    try:
        if options.index == 0 and bind is not None:
            # jaxlib crashes now and then if it cannot listen there.
            family = socket.AF_INET6 if ":" in options.address[0] else socket.AF_INET
            socket.create_server(options.address, family=family).close()
        jax.distributed.initialize(
            options.coordinator,
            options.processes,
            options.index,
            # Even with an address jax would look for SLURM, and give each process one GPU.
            cluster_detection_method=None if options.coordinator is None else "deactivate",
            coordinator_bind_address=bind,
            initialization_timeout=round(options.start_timeout + 4 * MARGIN_SECONDS),
            heartbeat_timeout_seconds=round(options.timeout),
            # Some processes leave while others write their last files.
            shutdown_timeout_seconds=24 * 3600,
        )
    except Exception as error:
        got = f"{type(error).__name__}: {str(error).rstrip('.')}"
        if options.coordinator is None:
            raise RunError(
                "--distributed needs processes that SLURM, Open MPI or Kubernetes started and that "
                f"jax recognises; got {got}. Start them so, or give --distributed.coordinator, "
                "--distributed.processes and --distributed.index."
            ) from error
        raise RunError(
            f"Process {options.index} must be able to start; got {got}. The coordinator, "
            f"{options.coordinator}, must be an address of process 0 and a port that is free there."
        ) from error
    finally:
        said.cancel()
        patience.cancel()


def _not_all_there(options: Distributed) -> RunError:
    """Says that processes are missing, and whether process 0 is one of them."""
    count = "All" if options.processes is None else f"All {options.processes}"
    got = "fewer"
    if options.coordinator is not None and options.index != 0:
        try:
            socket.create_connection(options.address, timeout=MARGIN_SECONDS).close()
            got = "fewer, but process 0 is there"
        except OSError as error:
            return RunError(
                f"{count} processes must start within {options.start_timeout:g} s; got no process "
                f"0 at {options.coordinator} ({error}). Start it, or correct "
                "--distributed.coordinator."
            )
    return RunError(
        f"{count} processes must start within {options.start_timeout:g} s; got {got}. Start the "
        "others, or raise --distributed.start-timeout."
    )


# How processes fail ------------------------------------------------------------------------------


def _failures(folder: Path | None) -> dict[Path, int]:
    """The files of processes that failed, and when each was written in the file system's time."""
    found: dict[Path, int] = {}
    for path in folder.glob("*.txt") if folder else ():
        with contextlib.suppress(OSError):
            found[path] = path.stat().st_mtime_ns
    return found


def _watch(
    options: Distributed, folder: Path | None, known: dict[Path, int], over: threading.Event
) -> None:
    """Ends this process as soon as another one has written its failure."""
    while not over.wait(LOOK_SECONDS):
        for path, when in _failures(folder).items():
            if known.get(path) == when or over.is_set():
                continue
            with contextlib.suppress(OSError, UnicodeError):
                why = path.read_text(encoding="utf-8").partition("\n")[0].rstrip(".")
                _let_others_look(_index(options))
                end_now(
                    f"This process ends because another process failed: {why} (see {path}). "
                    "Correct that; the same command then goes on from the newest checkpoint."
                )


def _fail(error: BaseException, folder: Path | None, options: Distributed) -> NoReturn:
    """Ends this process, and with it all others, which read its error in the folder."""
    index = _index(options)
    name = f"process{'' if index is None else f' {index}'} on {socket.gethostname()}"
    try:
        if folder is not None and index is not None:
            short = str(error).partition("\n")[0]
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                part = folder / f"{index}.part"
                part.write_text(
                    f"{name}: {type(error).__name__}: {short}\n\n{describe(error)}\n",
                    encoding="utf-8",
                    errors="backslashreplace",
                )
                part.replace(part.with_suffix(".txt"))
                _let_others_look(index)
    finally:  # Even if a second Ctrl-C comes.
        end_now(f"{name}: {describe(error)}")


def _index(options: Distributed) -> int | None:
    """Number of this process; None if a launcher knows it, and jax has not learned it yet."""
    if options.index is None and jax.distributed.is_initialized():
        return jax.process_index()
    return options.index


def _let_others_look(index: int | None) -> None:
    """Has process 0 wait until the others know of a failure; jax aborts them when it has ended."""
    if index == 0:
        time.sleep(2 * LOOK_SECONDS)


def _may_be_of_another(error: BaseException) -> bool:
    """Whether a collective may have raised this error, or an error that led to it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, jax.errors.JaxRuntimeError):
            return "RESOURCE_EXHAUSTED" not in str(cause)
        if isinstance(cause, ValueError) and OF_COLLECTIVE.match(str(cause)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


# What processes tell each other ------------------------------------------------------------------


def gather(value: Any) -> list[Any]:
    """What every process gives, a value of JSON, in their order. All must call it."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    counts = multihost_utils.process_allgather(np.array([len(text)], np.int32)).ravel()
    padded = np.zeros(counts.max(), np.uint8)
    padded[: len(text)] = text
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(bytes(row[:count])) for row, count in zip(rows, counts, strict=True)]


def first_does(work: Callable[[], None]) -> None:
    """Has the first process do something while the others wait. All must call it."""
    if jax.process_index() == 0:
        work()
    multihost_utils.sync_global_devices("work of the first process")


def require_same_flags(flags: dict[str, str]) -> None:
    """Raises RunError in all processes unless all have the same flags."""
    all_flags = gather(flags)
    for index, own in enumerate(all_flags):
        names = [x for x in all_flags[0] | own if all_flags[0].get(x) != own.get(x)]
        if names:
            here, there = (
                " ".join(x[name] for name in names[:SHOWN_FLAGS] if name in x) or "none"
                for x in (own, all_flags[0])
            )
            raise RunError(
                f"All processes must have the same flags; got {here} in process {index} and "
                f"{there} in process 0. Start all with the same."
            )


def require_same_data(data: Dataset) -> None:
    """Raises InputError in all processes unless all have opened the same data."""
    lengths = [len(data.train), len(data.held_out)]
    mine = [data.digest, data.tokens, *lengths]
    others = [i for i, found in enumerate(gather(mine)) if found != mine]
    if others:
        raise InputError(
            "All processes must read the same data; got others in "
            f"{', '.join(f'process {i}' for i in others)} than in process {jax.process_index()} "
            f"({data.description}). Give all of them the same --data.path, with the same content."
        )


# Devices -----------------------------------------------------------------------------------------


def select_devices(count: int | None, *, processes: int | None = 1) -> list[Any]:
    """The first `count` devices, or all of them; to be called before jax is used.

    On a machine that has only a CPU, the CPU is made to look like `count` devices, 8 by default; a
    number that is set in jax's configuration or in XLA_FLAGS is kept. Every process contributes the
    same number of devices, the first of its own. If `processes` is None, as their number is not
    known before jax is used, each has the number already set, or one.
    """
    if count is not None and processes is not None:
        _share(count, processes)
    flags = os.environ.get("XLA_FLAGS", "")
    given = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    if given < 0 and "host_platform_device_count" not in flags and processes is not None:
        simulated = _share(count or SIMULATED_DEVICES, processes)
        jax.config.update("jax_num_cpu_devices", simulated)
    devices = jax.devices()
    by_process: dict[int, list[Any]] = {}
    for device in devices:
        by_process.setdefault(device.process_index, []).append(device)
    counts = [len(by_process[process]) for process in sorted(by_process)]
    if len(set(counts)) > 1:
        raise InputError(
            "Every process must see the same number of devices; got "
            f"{' and '.join(map(str, counts))} in processes 0 to {len(counts) - 1}. Hide the "
            "superfluous ones with CUDA_VISIBLE_DEVICES; if they are simulated, give all processes "
            "the same --devices."
        )
    if count is not None and count > len(devices):
        raise InputError(
            f"devices must be at most the number of devices; got devices={count}, and there are "
            f"{len(devices)} ({devices[0].platform}). Use --devices {len(devices)}."
        )
    share = _share(len(devices) if count is None else count, len(by_process))
    return [device for process in sorted(by_process) for device in by_process[process][:share]]


def _share(count: int, processes: int) -> int:
    if count % processes:
        raise InputError(
            "devices must be divisible by the number of processes; got "
            f"devices={count}, processes={processes}. Use --devices "
            f"{-(-count // processes) * processes}."
        )
    return count // processes


def unused_gpus(platform: str, wanted: str | None, folder: Path = Path("/dev")) -> str | None:
    """A line for the log if the machine has NVIDIA GPUs, but jax computes on the CPU. `wanted` is
    jax's option `jax_platforms`."""
    gpus = len(list(folder.glob("nvidia[0-9]*")))
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if platform != "cpu" or wanted or hidden or not gpus:
        return None
    return (
        f"NOTE: this machine has {gpus} NVIDIA GPU{'s' if gpus > 1 else ''}, but jax computes on "
        f"the CPU. Install jax for them: {command('pip', 'install', '-e', '.[train,cuda13]')} "
        "(cuda12 for drivers before 580). If it is installed: "
        "python -c 'import jax; jax.devices(\"cuda\")' says what is wrong."
    )
