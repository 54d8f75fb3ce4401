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

from penstock.orbax import preservation_policy, save_decision_policy
from penstock.orbax.checkpoint_manager import CheckpointManager
from penstock.orbax.manager_options import CheckpointManagerOptions
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
)
from penstock.orbax.save_decision_policy import (
    AnySavePolicy,
    ContinuousCheckpointingPolicy,
    DecisionContext,
    FixedIntervalPolicy,
    InitialSavePolicy,
    PolicyCheckpointInfo,
    PreemptionCheckpointingPolicy,
    SaveDecisionPolicy,
    SpecificStepsPolicy,
)
