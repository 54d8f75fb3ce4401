"""Policies for the steps that are saved, as `penstock.orbax.v1.training` shows them."""

from __future__ import annotations

__all__ = (
    "AnySavePolicy",
    "ContinuousCheckpointingPolicy",
    "DecisionContext",
    "FixedIntervalPolicy",
    "InitialSavePolicy",
    "PreemptionCheckpointingPolicy",
    "SaveDecisionPolicy",
    "SpecificStepsPolicy",
)

from penstock.orbax.save_decision_policy import (
    AnySavePolicy,
    ContinuousCheckpointingPolicy,
    DecisionContext,
    FixedIntervalPolicy,
    InitialSavePolicy,
    PreemptionCheckpointingPolicy,
    SaveDecisionPolicy,
    SpecificStepsPolicy,
)
