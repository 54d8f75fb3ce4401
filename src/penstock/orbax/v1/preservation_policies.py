"""Policies for the steps that stay, as `penstock.orbax.v1.training` shows them."""

from __future__ import annotations

__all__ = (
    "AnyPreservationPolicy",
    "BestN",
    "CustomSteps",
    "EveryNSeconds",
    "EveryNSteps",
    "EveryNStepsClosest",
    "LatestDuration",
    "LatestN",
    "PreservationContext",
    "PreservationPolicy",
    "PreserveAll",
)

from penstock.orbax.preservation_policy import (
    AnyPreservationPolicy,
    BestN,
    CustomSteps,
    EveryNSeconds,
    EveryNSteps,
    EveryNStepsClosest,
    LatestDuration,
    LatestN,
    PreservationContext,
    PreservationPolicy,
    PreserveAll,
)
