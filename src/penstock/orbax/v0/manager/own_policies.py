"""Adapters that let penstock's own step policies be used by a manager with Orbax's names."""

from __future__ import annotations

__all__ = ("as_decision_policy", "as_preservation_policy", "check_metrics", "needs_metrics", "own_policy_of")

import datetime
import inspect
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast, final

from penstock.orbax.v0.manager.preservation_policy import PreservationContext, PreservationPolicy
from penstock.orbax.v0.manager.save_decision_policy import (
    DecisionContext,
    PolicyCheckpointInfo,
    SaveDecisionPolicy,
)
from penstock.steps.keep_policies import KeepPolicy, StepInfo, steps_to_delete
from penstock.steps.save_policies import SaveMoment, SavePolicy
from penstock.steps.step_metrics import missing_metrics


def as_decision_policy(policy: SaveDecisionPolicy | SavePolicy) -> SaveDecisionPolicy:
    """Return a save policy as one of Orbax's kind; one of that kind is returned as it is.

    Both kinds have `should_save`: penstock's takes one moment, Orbax's takes steps and a context.
    """
    function: Any = policy.should_save
    if "context" in inspect.signature(function).parameters:
        return cast("SaveDecisionPolicy", policy)

    return _Deciding(cast("SavePolicy", policy))


def own_policy_of(policy: SaveDecisionPolicy) -> SavePolicy | None:
    """Return the policy of penstock's kind that one of Orbax's kind stands for; None if it is no such."""
    return policy.policy if isinstance(policy, _Deciding) else None


def as_preservation_policy(policy: PreservationPolicy | KeepPolicy) -> PreservationPolicy:
    """Return a keep policy as one of Orbax's kind; one of that kind is returned as it is."""
    return _Preserving(policy) if isinstance(policy, KeepPolicy) else policy


def needs_metrics(policy: PreservationPolicy) -> bool:
    """Whether a policy is one of penstock's that looks at metrics, which must then be kept with the steps."""
    return isinstance(policy, _Preserving) and "metrics" in policy.policy.needs


def check_metrics(
    policy: PreservationPolicy, metrics: Any, steps: Sequence[PolicyCheckpointInfo]
) -> Sequence[str]:
    """Name the metrics that a policy of penstock's ranks by, and that neither these nor any step has.

    Raises:
        ValueError: If one is misspelt; the nearest name is in it.
    """
    if not isinstance(policy, _Preserving) or not isinstance(metrics, Mapping) or not metrics:
        return ()

    return missing_metrics(policy.policy, cast("Mapping[str, Any]", metrics), _infos(steps))


@final
@dataclass(frozen=True, slots=True)
class _Deciding:
    policy: SavePolicy
    opened_s: float = field(default_factory=time.time)

    def should_save(
        self,
        step: PolicyCheckpointInfo,
        previous_steps: Sequence[PolicyCheckpointInfo],
        *,
        context: DecisionContext,
    ) -> bool:
        began_s = [info.time.timestamp() for info in previous_steps[-1:] if info.time.year > 1]
        moment = SaveMoment(
            step=step.step,
            now_s=step.time.timestamp(),
            steps=[info.step for info in previous_steps],
            saved_s=max([self.opened_s, *began_s]),
            saving=context.is_saving_in_progress,
            preempted=context.reached_preemption,
        )
        return self.policy.should_save(moment)


@final
@dataclass(frozen=True, slots=True)
class _Preserving:
    policy: KeepPolicy

    def should_preserve(
        self, checkpoints: Sequence[PolicyCheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        needs_time = "time" in self.policy.needs
        infos = [
            replace(info, is_readable=not needs_time or not math.isnan(info.time_s))
            for info in _infos(checkpoints)
        ]
        gone = set(steps_to_delete(self.policy, infos, time.time()))
        return [info.step not in gone for info in checkpoints]


def _infos(steps: Sequence[PolicyCheckpointInfo]) -> list[StepInfo]:
    return [StepInfo(info.step, _seconds(info.time), _metrics(info.metrics)) for info in steps]


def _seconds(moment: datetime.datetime) -> float:
    """When a step was complete; NaN if that was not looked at."""
    return moment.timestamp() if moment.year > 1 else math.nan


def _metrics(metrics: Any) -> Mapping[str, Any] | None:
    return cast("Mapping[str, Any]", metrics) if isinstance(metrics, Mapping) else None
