"""The manager of a directory of steps, and its policies."""

from __future__ import annotations

__all__ = (
    "AnyPreservationPolicy",
    "AnySavePolicy",
    "BestN",
    "CheckpointManager",
    "CheckpointManagerOptions",
    "ContinuousCheckpointingPolicy",
    "CustomSteps",
    "DecisionContext",
    "EveryNSeconds",
    "EveryNSteps",
    "EveryNStepsClosest",
    "FixedIntervalPolicy",
    "InitialSavePolicy",
    "LatestDuration",
    "LatestN",
    "PolicyCheckpointInfo",
    "PreemptionCheckpointingPolicy",
    "PreservationContext",
    "PreservationPolicy",
    "SaveDecisionPolicy",
    "SpecificStepsPolicy",
    "preservation_policy",
    "save_decision_policy",
)

from penstock.orbax import policies as preservation_policy
from penstock.orbax import policies as save_decision_policy
from penstock.orbax.checkpoint_manager import CheckpointManager
from penstock.orbax.manager_steps import CheckpointManagerOptions
from penstock.orbax.policies import (
    AnyPreservationPolicy,
    AnySavePolicy,
    BestN,
    ContinuousCheckpointingPolicy,
    CustomSteps,
    DecisionContext,
    EveryNSeconds,
    EveryNSteps,
    EveryNStepsClosest,
    FixedIntervalPolicy,
    InitialSavePolicy,
    LatestDuration,
    LatestN,
    PolicyCheckpointInfo,
    PreemptionCheckpointingPolicy,
    PreservationContext,
    PreservationPolicy,
    SaveDecisionPolicy,
    SpecificStepsPolicy,
)
