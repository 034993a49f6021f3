"""Tells steps that may be built upon from steps whose loss is lost. Imports no jax."""

from __future__ import annotations

from trainer.config import TrainConfig
from trainer.errors import NonFiniteError


class Watch:
    """Judges the losses of a run, in all processes alike, since all have the same losses."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._skipped_in_row = 0

    def judge(
        self, step: int, loss: float, norm: float, *, finite: bool, saved: int | None
    ) -> bool:
        """Whether a step that follows those judged before counts; False if it was skipped."""
        if not finite:
            self._skipped_in_row += 1
            stops = self._config.non_finite == "stop"
            limit = 1 if stops else self._config.non_finite_limit
            if self._skipped_in_row < limit:
                return False
            where = f"step {step}" if stops else f"all steps from {step - limit + 1} to {step}"
            flag = "--non-finite skip" if stops else "a larger --non-finite-limit"
            way_back = f"Step {saved} is saved" if saved else "There is no checkpoint yet"
            raise NonFiniteError(
                f"Loss and gradient must be finite; got loss {loss}, gradient norm {norm} in "
                f"{where}. {way_back}. Go on from there with the same command and {flag}, "
                "which leaves such steps out, or with a lower --optimizer.learning-rate and "
                "--allow-changes; or correct the data."
            )
        self._skipped_in_row = 0
        return True
