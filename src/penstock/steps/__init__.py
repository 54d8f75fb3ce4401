"""Directories of steps: saving and keeping by policy, and following a run from outside.

Each name is fetched from its own module when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = (
    "Always",
    "AnyNames",
    "CheckpointManager",
    "Disk",
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
    "Memory",
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

if TYPE_CHECKING:
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
    from penstock.steps.tiers import Disk, Memory
else:
    from penstock.kernel.lazy_names import lazy_names as _lazy_names

    __getattr__, __dir__ = _lazy_names(
        __name__,
        {
            "penstock.steps.keep_policies": (
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
                "StepInfo",
            ),
            "penstock.steps.manager": ("CheckpointManager",),
            "penstock.steps.save_policies": (
                "Always",
                "EverySeconds",
                "EverySteps",
                "FirstSave",
                "Never",
                "OnPreemption",
                "OnSteps",
                "SaveAllOf",
                "SaveAnyOf",
                "SaveMoment",
                "SavePolicy",
                "WhenIdle",
            ),
            "penstock.steps.step_contents": ("StepMetadata",),
            "penstock.steps.step_names": (
                "AnyNames",
                "NameFormat",
                "StepNames",
            ),
            "penstock.steps.step_watch": (
                "Watch",
                "watch",
            ),
            "penstock.steps.tiers": ("Disk", "Memory"),
        },
    )
