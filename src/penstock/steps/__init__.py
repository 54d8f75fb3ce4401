"""Directories of steps: saving and keeping by policy, and following a run from outside."""

from __future__ import annotations

__all__ = (
    "Always",
    "AnyNames",
    "CheckpointManager",
    "EverySeconds",
    "EverySteps",
    "FirstSave",
    "KeepAll",
    "KeepAllOf",
    "KeepAnyOf",
    "KeepBest",
    "KeepEvery",
    "KeepEverySeconds",
    "KeepLast",
    "KeepPolicy",
    "KeepRecent",
    "KeepSteps",
    "NameFormat",
    "Never",
    "OnPreemption",
    "OnSteps",
    "SaveAllOf",
    "SaveAnyOf",
    "SaveMoment",
    "SavePolicy",
    "StepInfo",
    "StepMetadata",
    "StepNames",
    "Watch",
    "WhenIdle",
    "watch",
)

from penstock.steps.keep_policies import (
    KeepAll,
    KeepAllOf,
    KeepAnyOf,
    KeepBest,
    KeepEvery,
    KeepEverySeconds,
    KeepLast,
    KeepPolicy,
    KeepRecent,
    KeepSteps,
    StepInfo,
)
from penstock.steps.manager import CheckpointManager
from penstock.steps.save_policies import (
    Always,
    EverySeconds,
    EverySteps,
    FirstSave,
    Never,
    OnPreemption,
    OnSteps,
    SaveAllOf,
    SaveAnyOf,
    SaveMoment,
    SavePolicy,
    WhenIdle,
)
from penstock.steps.step_contents import StepMetadata
from penstock.steps.step_names import AnyNames, NameFormat, StepNames
from penstock.steps.step_watch import Watch, watch
