"""How a process joins the others of its run, and how jax leaves them."""

from __future__ import annotations

import inspect
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

from trainer.errors import RunError
from trainer.network.options import Distributed
from trainer.network.rendezvous import find_process_0, not_all_there, receive_others
from trainer.network.secret import Secret, find_secret
from trainer.network.tunnel import Tunnel, private_folder
from trainer.network.waiting import waiting
from trainer.processes.worker import gone
from trainer.run.exit import end_now

# jax too notices that a process is gone, but cannot say which: it is to be later than our own
# heartbeat, and stands in for that until all processes have joined it.
LATER_THAN_HEARTBEAT_SECONDS = 20.0


class Started(NamedTuple):
    """A process that has joined the others."""

    options: Distributed
    """The options, with what a launcher knows."""
    leave: Callable[[], None]
    """Ends what jax shares with the other processes. Returns when all have called it."""


def start(options: Distributed, folder: Path | None = None) -> Started:
    """Joins the other processes of a run, if there are any; to be called before jax is used.

    Args:
        options: which process this is, and where the others are.
        folder: the run folder, in which the processes may find their secret.

    Raises:
        ValueError: if the processes have no secret.
        RuntimeError: if the others are not found, or have not all started in time.
    """
    if not options.several:
        return Started(options, lambda: None)
    # Otherwise jax would handle SIGTERM, and the training loop would not see it.
    jax.config.update("jax_enable_preemption_service", False)
    deadline = time.monotonic() + options.start_timeout
    local_devices = None
    if options.coordinator is None:
        options, local_devices = _ask_launcher(options)
    with _waiting(options, "to make up the secret of the run"):
        secret = find_secret(options, folder, deadline)
    later = round(options.timeout + LATER_THAN_HEARTBEAT_SECONDS)
    with private_folder() as sockets:
        path = Path(sockets, "jax")
        tunnel = _connect(options, path, secret, deadline)
        # At its own timeout jax would abort with a stack trace of C++.
        patience = threading.Timer(deadline - time.monotonic(), end_now, [not_all_there(options)])
        patience.start()
        try:
            jax.distributed.initialize(
                coordinator_address=f"unix:{path}",
                coordinator_bind_address=f"unix:{path}",
                num_processes=options.processes,
                process_id=options.index,
                local_device_ids=local_devices,
                # Even with an address jax would ask SLURM, and give each process one GPU.
                cluster_detection_method="deactivate",
                initialization_timeout=round(options.start_timeout + LATER_THAN_HEARTBEAT_SECONDS),
                heartbeat_timeout_seconds=later,
                shutdown_timeout_seconds=later,
            )
        except Exception as error:  # ValueError, RuntimeError or what jax's library raises.
            tunnel.close()
            raise RunError(
                f"Process {options.index} must be able to join the others; got "
                f"{type(error).__name__}: {str(error).rstrip('.')}. Fix that."
            ) from error
        finally:
            patience.cancel()

    def leave() -> None:
        tunnel.leave()
        jax.distributed.shutdown()
        tunnel.close()

    return Started(options, leave)


def _waiting(options: Distributed, why: str) -> AbstractContextManager[None]:
    """Says every 10 s that this process waits for process 0, unless it is that."""
    if options.index == 0:
        return nullcontext()
    return waiting(f"process {options.index} of {options.processes} waits for process 0 {why}")


def _connect(options: Distributed, path: Path, secret: Secret, deadline: float) -> Tunnel:
    """Meets the other processes; returns what carries the messages of jax between them."""
    assert options.processes is not None

    def lost(name: str) -> None:
        end_now(
            f"process {options.index} of {options.processes} ends because another process failed: "
            f"{gone(name)}."
        )

    if options.index == 0:
        who = f"the other {options.processes - 1} at {options.coordinator}"
        with waiting(f"process 0 of {options.processes} waits for {who}"):
            others = receive_others(options, secret, deadline)
        tunnel = Tunnel(path, lost)
        tunnel.serve(others)
    else:
        with _waiting(options, f"and the others at {options.coordinator}"):
            connection = find_process_0(options, secret, deadline)
        tunnel = Tunnel(path, lost)
        tunnel.enter(connection, options.processes)
    return tunnel


def _ask_launcher(options: Distributed) -> tuple[Distributed, list[int] | None]:
    """What SLURM, Open MPI or Kubernetes know: options, and the devices of this process."""
    known = _known(options)
    try:
        # This is private, and the only way to ask: jax's one public function with this knowledge,
        # jax.distributed.initialize, keeps what it finds to itself and opens the coordinator's port
        # to anybody, before the processes have proved to each other who they are.
        from jax._src.clusters import ClusterEnv

        ask = ClusterEnv.auto_detect_unset_distributed_params
        inspect.signature(ask).bind(**known)
    except (ImportError, AttributeError, TypeError) as error:
        raise RunError(
            "--distributed asks jax what SLURM, Open MPI or Kubernetes know, by a function that is "
            f"not public; got jax {jax.__version__} without it ({error}). Give "
            "--distributed.coordinator, --distributed.processes and --distributed.index, or "
            "install the version of jax with which this program was tested."
        ) from error
    try:
        address, processes, index, devices = ask(**known)
    except Exception as error:  # Also what a cluster's own library raises.
        raise _no_launcher(f"{type(error).__name__}: {str(error).rstrip('.')}") from error
    if address is None or processes is None or index is None:
        raise _no_launcher("none of them")
    options = replace(options, coordinator=address, processes=processes, index=index)
    # jax reads this variable itself, and only if it is given no devices.
    chosen = None if "JAX_LOCAL_DEVICE_IDS" in os.environ else devices
    return options, None if chosen is None else list(chosen)


def _known(options: Distributed) -> dict[str, Any]:
    """What jax need not ask a launcher for."""
    return {
        "coordinator_address": os.environ.get("JAX_COORDINATOR_ADDRESS"),
        "num_processes": None,
        "process_id": None,
        "local_device_ids": None,
        "cluster_detection_method": None,
        "initialization_timeout": round(options.start_timeout),
    }


def _no_launcher(got: str) -> RunError:
    return RunError(
        "--distributed needs processes that SLURM, Open MPI or Kubernetes started and that jax "
        f"recognises; got {got}. Start them so, or give --distributed.coordinator, "
        "--distributed.processes and --distributed.index."
    )
