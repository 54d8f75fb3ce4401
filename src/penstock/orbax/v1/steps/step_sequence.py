"""The steps of one directory: which there are, the save and the deletion under way, what stays."""

from __future__ import annotations

__all__ = ("NewStep", "Step", "StepSequence", "often", "options_of")


import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, cast, final

from penstock.kernel.concurrency.threads import Threads
from penstock.orbax.common.job_processes import reached_preemption
from penstock.orbax.v0.common.step_statistics import SaveTimes, log_restore, log_save
from penstock.orbax.v0.common.v0_options import FileOptions, MultiprocessingOptions
from penstock.orbax.v0.manager.job_decisions import JobDecisions
from penstock.orbax.v0.manager.manager_options import CheckpointManagerOptions, policies_of
from penstock.orbax.v0.manager.manager_root import CheckpointInfo, Root, new_info
from penstock.orbax.v0.manager.own_policies import check_metrics
from penstock.orbax.v0.manager.preservation_policy import PreservationPolicy
from penstock.orbax.v0.manager.save_decision_policy import (
    AnySavePolicy,
    ContinuousCheckpointingPolicy,
    DecisionContext,
    InitialSavePolicy,
    PreemptionCheckpointingPolicy,
    SaveDecisionPolicy,
)
from penstock.orbax.v1.common.operation import Operation, begin
from penstock.orbax.v1.common.path_types import Path
from penstock.orbax.v1.common.tree_types import JsonType
from penstock.orbax.v1.context.context import Context
from penstock.orbax.v1.operations.checkpoint_info import CheckpointMetadata as OneCheckpoint
from penstock.orbax.v1.operations.deleting import delete
from penstock.orbax.v1.operations.loading import load_checkpointables_async
from penstock.orbax.v1.operations.saving import begin_save, staged
from penstock.orbax.v1.steps.step_save import StepSave
from penstock.orbax.v1.steps.training_errors import StepAlreadyExistsError, StepNotFoundError
from penstock.orbax.v1.steps.training_metadata import CheckpointMetadata, RootMetadata
from penstock.steps.step_names import step_number

Step: TypeAlias = int | CheckpointMetadata[Any]


@final
@dataclass(frozen=True, slots=True)
class NewStep:
    """What is to be saved as a step, and how. See `Checkpointer.save`."""

    step: int
    items: Mapping[str, Any]
    metrics: JsonType | None
    custom_metadata: JsonType | None
    force: bool
    overwrite: bool


@final
class StepSequence:
    """What a `Checkpointer` does, in the context that is in force. For one thread.

    Args:
        directory: The directory of the steps.
        options: See `options_of`.
        logger: Has `log_entry`.
        custom_metadata: Kept with the directory, unless there are some already.
    """

    def __init__(
        self, directory: Any, options: CheckpointManagerOptions, logger: Any, custom_metadata: JsonType | None
    ) -> None:
        self._deciding, self._preserving = policies_of(options)
        self._processes = options.multiprocessing_options
        self._job = JobDecisions(directory, options)
        self._root = Root(directory, options, is_primary=self._job.is_primary)
        self._logger = logger
        self._steps = self._job.opened(self._root, cast("Mapping[str, Any] | None", custom_metadata))
        self._saving: StepSave | None = None
        self._deleting: Operation[bool] | None = None

    @property
    def directory(self) -> Path:
        """The directory of the steps."""
        return cast("Path", self._root.directory)

    def described(self) -> Sequence[CheckpointMetadata[None]]:
        """Return all steps, ascending, with what is known of them."""
        return [
            CheckpointMetadata(
                info.step,
                info.path,
                metadata=None,
                commit_timestamp_nsecs=int(info.time.timestamp() * 1e9),
                metrics=info.metrics,
            )
            for info in self._steps
        ]

    def about(self, info: CheckpointInfo, found: OneCheckpoint[Any]) -> CheckpointMetadata[Any]:
        """Return what a checkpoint says of itself together with what is known of its step."""
        return CheckpointMetadata(
            info.step,
            found.path,
            metadata=found.metadata,
            init_timestamp_nsecs=found.init_timestamp_nsecs,
            commit_timestamp_nsecs=found.commit_timestamp_nsecs,
            custom_metadata=found.custom_metadata,
            metrics=info.metrics,
        )

    def root_metadata(self) -> RootMetadata:
        """Return what is kept with the directory."""
        known = self._root.metadata().custom_metadata
        return RootMetadata(directory=self.directory, custom_metadata=known)

    def path(self, step: int) -> Any:
        """Return the path of a step that exists."""
        return self._root.path(step)

    def existing(self, step: Step | None) -> CheckpointInfo:
        """Return a step, or with None the latest.

        Raises:
            StepNotFoundError: If there is none.
        """
        number = None if step is None else _number(step)
        for info in reversed(self._steps):
            if number in (None, info.step):
                return info

        raise StepNotFoundError(str(self.directory), number)

    def should_save(self, step: Step) -> bool:
        """Whether a step is newer than the latest one, and the policy asks for it."""
        return self._should_save(_number(step), self._steps)

    def begin_save(self, new: NewStep, *, synchronous: bool = False) -> StepSave | None:
        """Start to save a step, if the policy asks for it; return when its objects may be changed.

        Raises:
            StepAlreadyExistsError: If it exists and is not to be overwritten.
            Exception: The failure of an earlier save or deletion, or of this one so far.
        """
        number, times = _number(new.step), SaveTimes()
        self.wait_for_deletion()
        others = [info for info in self._steps if info.step != number]
        if len(others) < len(self._steps) and not new.overwrite:
            raise StepAlreadyExistsError(number)
        says = partial(self._should_save, steps=others)
        if not new.force and not self._job.wanted(number, self._deciding, says):
            return None

        times.timed("wait_for_prev", self._wait_for_save)
        check_metrics(self._preserving, new.metrics, self._steps)
        steps, doomed = times.timed("get_old_steps", self._with, number, new.metrics)
        self._root.forget(number)
        self._root.begin_writing()
        with times.part("checkpointer_blocking"):
            operation = begin_save(
                self._root.new_path(number),
                new.items,
                overwrite=new.overwrite,
                custom_metadata=new.custom_metadata,
                metrics=new.metrics,
            )
            saving = staged(operation)
        self._steps = [info for info in steps if info.step not in doomed]
        delete = partial(self._job.delete_after, number, self._root)
        self._saving = StepSave(number, saving, doomed, delete, self._ended)
        log_save(self._logger, number, self.directory, times, synchronous=synchronous)
        return self._saving

    def begin_load(self, step: Step | None, abstract: dict[str, Any] | None) -> Operation[dict[str, Any]]:
        """Start to load objects of a step, which penstock does not delete on this machine meanwhile.

        Raises:
            StepNotFoundError: If there is no such step.
        """
        begun = time.time()
        info = self.existing(step)
        if self._saving is not None and self._saving.step == info.step:
            self._wait_for_save()

        async def load(operation: Operation[dict[str, Any]]) -> dict[str, Any]:
            path, reading = self._root.path(info.step), time.time()
            with self._root.reading(path):
                found = await load_checkpointables_async(path, abstract)
            log_restore(self._logger, info.step, self.directory, begun, reading)
            return found

        return begin(f"load of step {info.step}", load)

    def begin_delete(self, step: Step, name: str | None, *, missing_ok: bool) -> Operation[bool]:
        """Start to delete a step, or one of its items; a whole step is forgotten at once.

        Raises:
            StepNotFoundError: If there is no such step, and `missing_ok` is off.
            Exception: The failure of an earlier save or deletion.
        """
        number = _number(step)
        self.wait()
        known = number in {info.step for info in self._root.infos()}
        if not known and not missing_ok:
            raise StepNotFoundError(str(self.directory), number)
        if name is None:
            self._steps = [info for info in self._steps if info.step != number]

        def remove() -> bool:
            if known and name is None:
                self._root.delete(number)
            elif known:
                return delete(self._root.path(number), checkpointable_name=name, missing_ok=missing_ok)
            return known

        once = partial(self._job.decided, f"delete {name or 'all'} of {number}", remove)

        async def run(operation: Operation[bool]) -> bool:
            return await Threads(1).run(once)

        self._deleting = begin(f"deletion of step {number}", run)
        return self._deleting

    def cancel(self) -> None:
        """Stop the save that is under way, and wait until what it wrote is removed."""
        self.wait_for_deletion()
        if self._saving is not None:
            self._saving.cancel()
            with suppress(Exception):  # nobody wants to know how it failed
                self._saving.result()

    def is_saving(self) -> bool:
        """Whether a save is running."""
        return self._saving is not None and not self._saving.done()

    def wait(self) -> None:
        """Wait until nothing is running. Raises the failure of a save or deletion, once."""
        self.wait_for_deletion()
        self._wait_for_save()

    def wait_for_deletion(self) -> bool:
        """Wait for a deletion, and return whether it found anything. Raises its failure, once."""
        deleting, self._deleting = self._deleting, None
        return deleting is not None and deleting.result()

    def reload(self) -> None:
        """List the directory again."""
        self.wait_for_deletion()
        self._steps = self._root.infos()

    def close(self) -> None:
        """Wait until nothing is running, and let others write to the directory."""
        try:
            self.wait()
        finally:
            self._root.close()
            self._job.close()

    def _should_save(self, number: int, steps: Sequence[CheckpointInfo]) -> bool:
        if steps and steps[-1].step >= number:
            return False

        context = DecisionContext(
            is_saving_in_progress=self.is_saving(),
            reached_preemption=reached_preemption(number),
            multiprocessing_options=self._processes,
        )
        return self._deciding.should_save(new_info(number), list(steps), context=context)

    def _with(self, number: int, metrics: Any) -> tuple[list[CheckpointInfo], list[int]]:
        """Return all steps with one that is about to be saved, and those that are deleted once it is durable.

        Raises:
            Exception: What a policy raises.
        """
        others = [info for info in self._steps if info.step != number]
        added = replace(new_info(number, metrics), path=self._root.new_path(number))
        steps = sorted([*others, added], key=lambda info: info.step)
        doomed, failure = self._job.doomed(self._preserving, number, steps)
        if failure is not None:
            raise failure

        return steps, doomed

    def _wait_for_save(self) -> None:
        if self._saving is not None:
            self._saving.result()

    def _ended(self, saving: StepSave, failed: bool) -> None:
        """Forget a save that is over; if it failed, the directory says which steps there are."""
        if self._saving is saving:
            self._saving = None
            if failed:
                self._steps = self._root.infos()


def options_of(
    context: Context, deciding: SaveDecisionPolicy, preserving: PreservationPolicy, names: Any
) -> CheckpointManagerOptions:
    """Return the options of a directory of steps.

    Args:
        context: Whose options of files and deletions count.
        deciding: When steps are saved.
        preserving: Which stay.
        names: How they are named.
    """
    return CheckpointManagerOptions(
        save_decision_policy=deciding,
        preservation_policy=preserving,
        step_name_format=names,
        single_host_load_and_broadcast=bool(getattr(names, "single_host_load_and_broadcast", False)),
        todelete_full_path=context.deletion.gcs_deletion_options.todelete_full_path,
        file_options=FileOptions(path_permission_mode=context.file.path_permission_mode),
        multiprocessing_options=MultiprocessingOptions(
            context.multiprocessing.primary_host, context.multiprocessing.active_processes
        ),
    )


def often() -> SaveDecisionPolicy:
    """Return the default: the first step, each that comes when no save is running, and one before the end."""
    return AnySavePolicy(
        [InitialSavePolicy(), ContinuousCheckpointingPolicy(), PreemptionCheckpointingPolicy()]
    )


def _number(step: Step) -> int:
    return step_number(step.step if isinstance(step, CheckpointMetadata) else step)
