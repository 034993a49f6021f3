"""How a process joins the others of its run. Imports no jax before it does."""

from __future__ import annotations

import threading
import time

from trainer.errors import RunError
from trainer.processes.options import Distributed
from trainer.processes.rendezvous import meet, not_all_there
from trainer.run.exit import end_now

# jax too notices that a process is gone, but cannot say which: it is to be later than our own
# heartbeat, and stands in for that until all processes have joined it.
LATER_THAN_HEARTBEAT_SECONDS = 20.0


def start(options: Distributed) -> None:
    """Joins the other processes of a run, if there are any; to be called before jax is used.

    Raises:
        RuntimeError: if the others are not found, or have not all started in time.
    """
    if not options.several:
        return
    import jax

    # Otherwise jax would handle SIGTERM, and the training loop would not see it.
    jax.config.update("jax_enable_preemption_service", False)
    deadline = time.monotonic() + options.start_timeout
    found = {}
    if options.coordinator is not None:
        # Even with an address jax would ask SLURM, and give each process one GPU.
        found = {
            "coordinator_address": meet(options, deadline),
            "num_processes": options.processes,
            "process_id": options.index,
            "cluster_detection_method": "deactivate",
        }
    later = round(options.timeout + LATER_THAN_HEARTBEAT_SECONDS)
    # At its own timeout jax would abort with a stack trace of C++.
    patience = threading.Timer(deadline - time.monotonic(), end_now, [not_all_there(options)])
    patience.start()
    try:
        jax.distributed.initialize(
            **found,
            initialization_timeout=round(options.start_timeout + LATER_THAN_HEARTBEAT_SECONDS),
            heartbeat_timeout_seconds=later,
            shutdown_timeout_seconds=later,
        )
    except Exception as error:  # ValueError, RuntimeError or what a cluster's own library raises.
        raise RunError(_not_started(options, error)) from error
    finally:
        patience.cancel()


def _not_started(options: Distributed, error: Exception) -> str:
    got = f"got {type(error).__name__}: {str(error).rstrip('.')}."
    if options.coordinator is None:
        return (
            "--distributed needs processes that SLURM, Open MPI or Kubernetes started and that jax "
            f"recognises; {got} Start them so, or give --distributed.coordinator, "
            "--distributed.processes and --distributed.index."
        )
    return f"Process {options.index} must be able to join the others; {got} Fix that."
