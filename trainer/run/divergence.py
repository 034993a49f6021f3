"""Tells steps that may be built upon from steps whose loss is lost. Imports no jax."""

from __future__ import annotations

import statistics
from collections import deque
from enum import Enum

from trainer.config import TrainConfig
from trainer.errors import LossSpikeError, NonFiniteError

# A loss is compared with the median of so many before it, once there are at least so many.
RECENT_LOSSES = 50
LEAST_LOSSES = 10


class Judgement(Enum):
    """What a step shows."""

    GOOD = "the state before it is good"
    SKIPPED = "it was not finite, and has left the state as it was"
    SPIKE = "its loss is far above those before it"


class Watch:
    """Judges the losses of a run, in all processes alike, since all have the same losses."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self.recent: deque[float] = deque(maxlen=RECENT_LOSSES)
        """The losses that the next one is compared with."""
        self._skipped_in_row = 0
        self._went_back_to: int | None = None

    def judge(
        self, step: int, loss: float, norm: float, *, finite: bool, saved: int | None
    ) -> Judgement:
        """Judges a step that follows those judged before.

        Args:
            step: its number.
            loss: its loss, before its update.
            norm: norm of its gradient.
            finite: whether both are finite.
            saved: step of the newest whole checkpoint, for the message.

        Raises:
            FloatingPointError: if it is not finite and `non_finite` is "stop", or it is one too
                many in a row.
        """
        if not finite:
            self._skipped_in_row += 1
            stops = self._config.non_finite == "stop"
            limit = 1 if stops else self._config.non_finite_limit
            if self._skipped_in_row < limit:
                return Judgement.SKIPPED
            where = f"step {step}" if stops else f"all steps from {step - limit + 1} to {step}"
            flag = "--non-finite skip" if stops else "a larger --non-finite-limit"
            raise NonFiniteError(
                f"Loss and gradient must be finite; got loss {loss}, gradient norm {norm} in "
                f"{where}. {_way_back(saved)}. Go on from there with the same command and {flag}, "
                "which leaves such steps out, or with a lower --optimizer.learning-rate and "
                "--allow-changes; or correct the data."
            )
        if self._is_spike(loss):
            return Judgement.SPIKE
        self._skipped_in_row = 0
        self.recent.append(loss)
        return Judgement.GOOD

    def go_back(self, step: int, loss: float, last: int) -> str:
        """Notes that a loss spike leads back to a checkpoint.

        Args:
            step: the step of the spike.
            loss: its loss.
            last: the step of the checkpoint; 0 for the beginning of the run.

        Returns:
            A line for the log.

        Raises:
            ArithmeticError: if the spike before led back to the same checkpoint.
        """
        median = statistics.median(self.recent)
        what = f"loss {loss:.4f} in step {step}, where the median of those before is {median:.4f}"
        if last == self._went_back_to:
            raise LossSpikeError(
                f"The loss must stay below spike_factor={self._config.spike_factor} times the "
                f"median of those before it; got {what}. The run has already gone back to step "
                f"{last} once and left out the batches of another spike. {_way_back(last)}. Go on "
                "with a lower --optimizer.learning-rate and --allow-changes, or accept such losses "
                "with a larger --spike-factor."
            )
        self._went_back_to = last
        return (
            f"loss spike: {what}. The run goes back to step {last}, and leaves out the batches of "
            f"steps {last + 1} to {step}."
        )

    def _is_spike(self, loss: float) -> bool:
        factor = self._config.spike_factor
        if factor is None or len(self.recent) < LEAST_LOSSES:
            return False
        return loss > factor * statistics.median(self.recent)


def _way_back(saved: int | None) -> str:
    return f"Step {saved} is saved" if saved else "There is no checkpoint yet"
