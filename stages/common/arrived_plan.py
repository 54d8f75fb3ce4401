"""The plan of a restore, taken from the messages of the last stages."""

from __future__ import annotations

__all__ = ("require_plan",)

from penstock.kernel.errors import PipelineError
from penstock.kernel.messages.restore import RestorePlan


def require_plan(plan: RestorePlan | None) -> RestorePlan:
    """Return the plan that the batches brought.

    Raises:
        PipelineError: If none of them did.
    """
    if plan is None:
        raise PipelineError(
            "no batch brought the plan of the restore; a stage that makes new batches must pass on"
            " the `plan` of those it takes"
        )

    return plan
