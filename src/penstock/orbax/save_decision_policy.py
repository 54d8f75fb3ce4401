"""Policies for the steps that a manager saves, under Orbax's names."""

from __future__ import annotations

__all__ = (
    "AnySavePolicy",
    "ContinuousCheckpointingPolicy",
    "DecisionContext",
    "FixedIntervalPolicy",
    "InitialSavePolicy",
    "PolicyCheckpointInfo",
    "PreemptionCheckpointingPolicy",
    "SaveDecisionPolicy",
    "SpecificStepsPolicy",
    "default_policy",
)

import datetime
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from penstock.orbax.options import MultiprocessingOptions


class PolicyCheckpointInfo(Protocol):
    """A step as policies see it."""

    step: int
    metrics: dict[str, Any] | None
    time: datetime.datetime


@dataclass(kw_only=True)
class DecisionContext:
    """The circumstances in which a policy is asked.

    Attributes:
        is_saving_in_progress: Whether a save is running in the background.
        reached_preemption: Whether the job is to end after this step.
        multiprocessing_options: Those of the manager.
    """

    is_saving_in_progress: bool
    reached_preemption: bool
    multiprocessing_options: MultiprocessingOptions


@runtime_checkable
class SaveDecisionPolicy(Protocol):
    """Decides whether a step is saved."""

    def should_save(
        self,
        step: PolicyCheckpointInfo,
        previous_steps: Sequence[PolicyCheckpointInfo],
        *,
        context: DecisionContext,
    ) -> bool:
        """Return whether to save `step`, given the steps that exist, in ascending order."""
        ...


@dataclass
class FixedIntervalPolicy(SaveDecisionPolicy):
    """Saves steps that are a multiple of `interval`."""

    interval: int

    def should_save(
        self,
        step: PolicyCheckpointInfo,
        previous_steps: Sequence[PolicyCheckpointInfo],
        *,
        context: DecisionContext,
    ) -> bool:
        return step.step % self.interval == 0


@dataclass
class SpecificStepsPolicy(SaveDecisionPolicy):
    """Saves the given steps."""

    steps: Container[int]

    def should_save(
        self,
        step: PolicyCheckpointInfo,
        previous_steps: Sequence[PolicyCheckpointInfo],
        *,
        context: DecisionContext,
    ) -> bool:
        return step.step in self.steps


@dataclass(kw_only=True)
class ContinuousCheckpointingPolicy(SaveDecisionPolicy):
    """Saves as soon as the previous save has finished.

    Attributes:
        minimum_interval_secs: The least time from one save to the next.
    """

    minimum_interval_secs: int | None = None

    def should_save(
        self,
        step: PolicyCheckpointInfo,
        previous_steps: Sequence[PolicyCheckpointInfo],
        *,
        context: DecisionContext,
    ) -> bool:
        if context.is_saving_in_progress:
            return False
        if not previous_steps or self.minimum_interval_secs is None:
            return True

        return (step.time - previous_steps[-1].time).total_seconds() >= self.minimum_interval_secs


class PreemptionCheckpointingPolicy(SaveDecisionPolicy):
    """Saves when the job is about to end."""

    def should_save(
        self,
        step: PolicyCheckpointInfo,
        previous_steps: Sequence[PolicyCheckpointInfo],
        *,
        context: DecisionContext,
    ) -> bool:
        return context.reached_preemption


class InitialSavePolicy(SaveDecisionPolicy):
    """Saves the first step if none exists."""

    def should_save(
        self,
        step: PolicyCheckpointInfo,
        previous_steps: Sequence[PolicyCheckpointInfo],
        *,
        context: DecisionContext,
    ) -> bool:
        return not previous_steps


@dataclass
class AnySavePolicy(SaveDecisionPolicy):
    """Saves if any of its policies does."""

    policies: Sequence[SaveDecisionPolicy]

    def should_save(
        self,
        step: PolicyCheckpointInfo,
        previous_steps: Sequence[PolicyCheckpointInfo],
        *,
        context: DecisionContext,
    ) -> bool:
        return any(policy.should_save(step, previous_steps, context=context) for policy in self.policies)


@dataclass
class _FunctionPolicy(SaveDecisionPolicy):
    """Asks a function of the step and the latest one."""

    function: Callable[[int, int | None], bool]

    def should_save(
        self,
        step: PolicyCheckpointInfo,
        previous_steps: Sequence[PolicyCheckpointInfo],
        *,
        context: DecisionContext,
    ) -> bool:
        return self.function(step.step, previous_steps[-1].step if previous_steps else None)


def default_policy(
    interval: int | None, steps: Container[int] | None, function: Callable[[int, int | None], bool] | None
) -> SaveDecisionPolicy:
    """Return the policy that the other options describe. A function takes the place of all of them."""
    if function is not None:
        return AnySavePolicy([_FunctionPolicy(function), PreemptionCheckpointingPolicy()])

    policies: list[SaveDecisionPolicy] = [] if interval is None else [FixedIntervalPolicy(interval)]
    if steps is not None:
        policies.append(SpecificStepsPolicy(steps))

    return AnySavePolicy([*policies, PreemptionCheckpointingPolicy(), InitialSavePolicy()])
