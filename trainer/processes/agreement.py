"""What the processes of a run must have in common, besides their settings."""

from __future__ import annotations

from startrail_jax.errors import InputError
from trainer.data.dataset import Dataset
from trainer.processes.exchange import Peers


def require_same_data(data: Dataset, among: Peers) -> None:
    """Compares the data of all processes, each of which has opened them by itself.

    All processes must call it, and all of them raise.

    Raises:
        ValueError: if they are not the same.
    """
    if among.count == 1:
        return
    lengths = [len(data.train), len(data.held_out)]
    mine = [data.digest, data.tokens, list(data.fingerprints), *lengths]
    others = [i for i, found in enumerate(among.gather(mine)) if found != mine]
    if others:
        raise InputError(
            "All processes must read the same data; got others in "
            f"{', '.join(f'process {i}' for i in others)} than in process {among.index} "
            f"({data.description}). Give all of them the same --data.path, with the same content."
        )
