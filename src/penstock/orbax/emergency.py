"""Orbax's managers of emergency checkpoints, `experimental.emergency`, as a thin reading of penstock's tiers.

Orbax's have a manager for a local directory and one for a persistent one, and each saves by itself. Here the
local directory is a tier of the persistent one: a step is saved once, and copied on.
"""

from __future__ import annotations

__all__ = (
    "CheckpointManager",
    "CheckpointManagerOptions",
    "LocalCheckpointOptions",
    "MultiprocessingOptions",
    "PersistentCheckpointOptions",
    "ReplicatorCheckpointManager",
    "ReplicatorCheckpointManagerOptions",
)

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final, Self, cast, final

import jax

from penstock import Composite, Config, SaveFormat, SaveFuture, sync
from penstock.embedding import paths
from penstock.errors import SpecError
from penstock.orbax import checkpoint_manager as managers
from penstock.orbax import options as general
from penstock.orbax.base_pytree_handler import leaf_formats
from penstock.orbax.composite_handler import CompositeArgs
from penstock.orbax.item_files import place_of
from penstock.orbax.manager_steps import CheckpointManagerOptions as StepOptions
from penstock.orbax.manager_steps import new_info, save_policy_of
from penstock.orbax.multihost import process_count, reached_preemption
from penstock.orbax.policies import (
    DecisionContext,
    PreservationPolicy,
    SaveDecisionPolicy,
    kept_by,
)
from penstock.orbax.restore_tree import target_of
from penstock.orbax.step import NameFormat, names_of, standard_name_format
from penstock.steps import Disk, KeepAll, KeepEvery, KeepLast, KeepPolicy, SaveMoment, SavePolicy

STATE: Final = "state"
DATASET: Final = "dataset"


@dataclass
class LocalCheckpointOptions:
    """The options of the local directory.

    Attributes:
        save_interval_steps: Only steps whose number is a multiple of this are saved there.
        max_to_keep: So many stay there; by default 1.
        read_only: Whether nothing is saved there.
        should_save_fn: Takes a step and the latest one, and says if it is saved, in place of the interval.
        save_decision_policy: Says so in place of both.
        preservation_policy: Says what stays there, in place of `max_to_keep`.
        debug_use_full_global_mesh: Has no effect.
    """

    save_interval_steps: int = 10
    max_to_keep: int | None = None
    read_only: bool = False
    should_save_fn: Callable[[int, int | None], bool] | None = None
    save_decision_policy: SaveDecisionPolicy | SavePolicy | None = None
    preservation_policy: PreservationPolicy | KeepPolicy | None = None
    debug_use_full_global_mesh: bool = False

    def __post_init__(self) -> None:
        if self.preservation_policy is None:
            self.max_to_keep = 1 if self.max_to_keep is None else self.max_to_keep
        elif self.max_to_keep is not None:
            raise SpecError("preservation_policy excludes max_to_keep")


@dataclass
class PersistentCheckpointOptions:
    """The options of the persistent directory.

    Attributes:
        save_interval_steps: Only steps whose number is a multiple of this come there.
        max_to_keep: So many stay there; None for all of them.
        keep_period: Steps whose number is a multiple of this stay besides.
        should_save_fn: As of `LocalCheckpointOptions`, and so are the others.
    """

    save_interval_steps: int = 1000
    max_to_keep: int | None = None
    keep_period: int | None = None
    should_save_fn: Callable[[int, int | None], bool] | None = None
    save_decision_policy: SaveDecisionPolicy | SavePolicy | None = None
    preservation_policy: PreservationPolicy | KeepPolicy | None = None

    def __post_init__(self) -> None:
        excluded = [name for name in ("max_to_keep", "keep_period") if getattr(self, name) is not None]
        if self.preservation_policy is not None and excluded:
            raise SpecError(f"preservation_policy excludes {excluded[0]}")


@dataclass
class MultiprocessingOptions:
    """The processes of the job.

    Attributes:
        coordination_timeout_secs: Has no effect; `[processes] silence_s` says how long one may be silent.
    """

    coordination_timeout_secs: int = 120


@dataclass
class CheckpointManagerOptions:
    """The options of both directories.

    Attributes:
        local: Of the local one.
        persistent: Of the persistent one.
        replica_axis_index: Has no effect: of arrays that have replicas, one of each shard is saved.
        step_name_format: Names the directories of steps.
        cleanup_tmp_directories: Whether what interrupted saves left is removed.
        enable_async_checkpointing: Whether `save` returns before the step is where it goes.
        async_options: Has no effect.
        multiprocessing_options: Has no effect.
        single_host_load_and_broadcast: Has no effect: each process reads its shards where they are nearest.
    """

    local: LocalCheckpointOptions = field(default_factory=LocalCheckpointOptions)
    persistent: PersistentCheckpointOptions = field(default_factory=PersistentCheckpointOptions)
    replica_axis_index: int = 0
    step_name_format: NameFormat[Any] = field(default_factory=standard_name_format)
    cleanup_tmp_directories: bool = False
    enable_async_checkpointing: bool = True
    async_options: general.AsyncOptions | None = None
    multiprocessing_options: MultiprocessingOptions | None = None
    single_host_load_and_broadcast: bool = True


class CheckpointManager:
    """Saves a state often into a local directory, at times into a persistent one, and restores the newest.

    A context manager for code without an event loop. The local directory is a tier of the persistent one, so
    a step that both want is saved once and copied on; see `penstock.CheckpointManager`.

    Args:
        local_directory: Fast, as a local disk or `/dev/shm`. It serves one persistent directory.
        persistent_directory: Where steps are safe.
        global_mesh: The mesh of the state.
        abstract_state: The structure of the state with shapes, dtypes and shardings: what is restored.
        options: When to save, what to keep, and how.
        metadata: The caller's own JSON values, kept with the persistent directory.
        logger: Has no effect.
        item_handlers: As of `penstock.orbax.CheckpointManager`, for `persistent_non_replicated_directory`.
        handler_registry: The same.
        persistent_non_replicated_directory: For an item `dataset`, which is no state of arrays.

    Raises:
        ValueError: If options contradict each other.
    """

    def __init__(
        self,
        local_directory: str | os.PathLike[str],
        persistent_directory: str | os.PathLike[str],
        global_mesh: jax.sharding.Mesh,
        abstract_state: Any,
        *,
        options: CheckpointManagerOptions | None = None,
        metadata: Mapping[str, Any] | None = None,
        logger: Any = None,
        item_handlers: Any = None,
        handler_registry: Any = None,
        persistent_non_replicated_directory: str | os.PathLike[str] | None = None,
    ) -> None:
        options = CheckpointManagerOptions() if options is None else options
        local, persistent = options.local, options.persistent
        self._mesh, self._abstract_state = global_mesh, abstract_state
        self._waits = not options.enable_async_checkpointing
        near = Disk(local_directory, keep=_kept(local, None), save_when=_Wanted(_saved(local)))
        self._directory = place_of(persistent_directory)
        manager = sync.CheckpointManager(
            persistent_directory,
            save_when=_Wanted(_saved(persistent)),
            keep=_kept(persistent, persistent.keep_period),
            names=names_of(options.step_name_format),
            metadata=metadata,
            tiers=() if local.read_only else near,
            clean=options.cleanup_tmp_directories,
            config=_config_of_job(local_directory),
        )
        self._besides: managers.CheckpointManager | None = None
        with ExitStack() as opened:
            self._manager = opened.enter_context(manager)
            if persistent_non_replicated_directory is not None:
                interval = persistent.save_interval_steps
                self._besides = managers.CheckpointManager(
                    persistent_non_replicated_directory,
                    options=StepOptions(save_interval_steps=interval, max_to_keep=persistent.max_to_keep),
                    item_handlers=item_handlers,
                    handler_registry=handler_registry,
                )
                opened.callback(self._besides.close)

            self._opened = opened.pop_all()

    @property
    def directory(self) -> Any:
        """The persistent directory."""
        return self._directory

    @property
    def global_mesh(self) -> jax.sharding.Mesh:
        """The mesh of the state."""
        return self._mesh

    @property
    def in_primary_slice(self) -> bool:
        """True: no process has another part than any other."""
        return True

    def all_steps(self, read: bool | None = None) -> Sequence[int]:
        """Return every step that is in one of the directories; with `read`, after listing them again."""
        if read:
            self.reload()

        return list(self._manager.all_steps())

    def latest_step(self) -> int | None:
        """Return the last step; None if there is none."""
        return self._manager.latest_step()

    def best_step(self) -> int | None:
        """Refuse: steps have no metrics here, as in Orbax."""
        raise _without("best_step")

    def reload(self) -> None:
        """List the directories again."""
        self._manager.reload()

    def reached_preemption(self, step: int) -> bool:
        """Return whether the job is to end after this step."""
        return reached_preemption(step)

    def should_save(self, step: int) -> bool:
        """Return whether `save` would save a step."""
        return self._manager.should_save(step)

    def delete(self, step: int) -> None:
        """Refuse, as Orbax does."""
        raise _without("delete")

    def save(
        self,
        step: int,
        args: Any,
        *,
        force: bool = False,
        custom_metadata: dict[str, Any] | None = None,
    ) -> bool:
        """Save a step where it is wanted; return whether it is.

        Args:
            step: Its number.
            args: A `Composite` of `state`, and perhaps of a `dataset`.
            force: Save it, whatever the options say.
            custom_metadata: JSON values kept with the step.

        Raises:
            ValueError: If there is no `state`, or a `dataset` and no directory for it.
        """
        given = _items_of(args)
        dataset, state = given.get(DATASET), given[STATE]
        if dataset is not None:
            self._beside(f"step {step} has a dataset").save(
                step, args=dataset, force=force, custom_metadata=custom_metadata
            )

        save = self._manager.save(
            step,
            Composite({STATE: state.item}),
            force=force,
            custom_metadata=custom_metadata,
            save_args=_formats_of(state),
        )
        if save is not None and self._waits:
            save.result()

        return save is not None

    def restore(self, step: int | None, args: Any = None) -> Any:
        """Return a `Composite` with the `state` of a step, as the manager's abstract state describes it.

        Args:
            step: Its number; None for the latest.
            args: A `Composite`, of which only a `dataset` counts, as in Orbax.

        Raises:
            FileNotFoundError: If there is no such step.
            ValueError: If it does not fit the abstract state.
        """
        given = {} if args is None else dict(args.items())
        state = self._manager.restore(step, item=STATE, like=self._abstract_state)
        found: dict[str, Any] = {STATE: state}
        if DATASET in given:
            there = self._beside("a dataset is to be restored")
            found[DATASET] = there.restore(step, args=given[DATASET])

        return CompositeArgs(**found)

    def item_metadata(self, step: int) -> Any:
        """Refuse, as Orbax does."""
        raise _without("item_metadata")

    def metadata(self, step: int | None = None) -> Any:
        """Refuse, as Orbax does."""
        raise _without("metadata")

    def metrics(self, step: int) -> Any:
        """Refuse: steps have no metrics here, as in Orbax."""
        raise _without("metrics")

    def wait_until_finished(self) -> None:
        """Return when every step is where it goes."""
        if self._besides is not None:
            self._besides.wait_until_finished()

        self._manager.wait()

    def check_for_errors(self) -> None:
        """Raise what failed in the background since the last call; a copy that failed is tried again."""
        if self._besides is not None:
            self._besides.check_for_errors()

    def close(self) -> None:
        """Wait for all saves, and give the directories back."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _beside(self, why: str) -> managers.CheckpointManager:
        if self._besides is None:
            raise SpecError(f"{why}, and persistent_non_replicated_directory is not given")

        return self._besides


@dataclass
class ReplicatorCheckpointManagerOptions:
    """The options of a `ReplicatorCheckpointManager`.

    Attributes:
        save_interval_steps: Only steps whose number is a multiple of this are saved.
        step_name_format: Names the directories of steps.
        should_save_fn: Takes a step and the latest one, and says if it is saved, in place of the interval.
        preservation_policy: Says what stays.
        use_colocated_python: For Pathways; refused.
        enable_async_checkpointing: Whether `save` returns before the step is durable.
        save_concurrent_gb: Has no effect; `[memory]` bounds all.
        restore_concurrent_gb: Has no effect.
    """

    save_interval_steps: int = 1
    step_name_format: NameFormat[Any] | None = None
    should_save_fn: Callable[[int, int | None], bool] | None = None
    preservation_policy: PreservationPolicy | KeepPolicy | None = None
    use_colocated_python: bool = False
    enable_async_checkpointing: bool = True
    save_concurrent_gb: int | None = None
    restore_concurrent_gb: int | None = None


class ReplicatorCheckpointManager:
    """Saves into a local directory alone, from where another service brings steps to other machines.

    That service is not part of penstock: the tiers of a `penstock.CheckpointManager` need none.

    Args:
        local_directory: The directory of the steps.
        options: When to save, what to keep, and how.
        global_mesh: The mesh of the state.
        persistent_directory: For an item `dataset`, which is no state of arrays.
        handler_registry: Which handler serves which item.

    Raises:
        ValueError: If options contradict each other, or ask for Pathways.
    """

    def __init__(
        self,
        local_directory: str | os.PathLike[str],
        options: ReplicatorCheckpointManagerOptions | None = None,
        *,
        global_mesh: jax.sharding.Mesh,
        persistent_directory: str | os.PathLike[str] | None = None,
        handler_registry: Any = None,
    ) -> None:
        options = ReplicatorCheckpointManagerOptions() if options is None else options
        if options.use_colocated_python:
            raise SpecError("use_colocated_python needs Pathways, for which penstock has no managers")

        self._mesh = global_mesh
        given = StepOptions(
            save_interval_steps=options.save_interval_steps,
            step_name_format=options.step_name_format,
            should_save_fn=options.should_save_fn,
            preservation_policy=options.preservation_policy,
            enable_async_checkpointing=options.enable_async_checkpointing,
        )
        self._local: managers.CheckpointManager | _JobSteps
        if process_count() > 1:
            self._local = _JobSteps(local_directory, options)
        else:
            self._local = managers.CheckpointManager(local_directory, options=given)
        self._besides: managers.CheckpointManager | None = None
        with ExitStack() as opened:
            opened.callback(self._local.close)
            if persistent_directory is not None:
                self._besides = managers.CheckpointManager(
                    persistent_directory, options=given, handler_registry=handler_registry
                )
                opened.callback(self._besides.close)

            self._opened = opened.pop_all()

    @property
    def directory(self) -> Any:
        """The local directory."""
        return self._local.directory

    @property
    def global_mesh(self) -> jax.sharding.Mesh:
        """The mesh of the state."""
        return self._mesh

    def all_steps(self, read: bool = False) -> Sequence[int]:
        """Return every step; with `read`, after listing the directory again."""
        return self._local.all_steps(read=read)

    def latest_step(self) -> int | None:
        """Return the last step; None if there is none."""
        return self._local.latest_step()

    def best_step(self) -> int | None:
        """Refuse: steps have no metrics here, as in Orbax."""
        raise _without("best_step")

    def reload(self) -> None:
        """List the directory again."""
        self._local.reload()

    def reached_preemption(self, step: int) -> bool:
        """Return whether the job is to end after this step."""
        return self._local.reached_preemption(step)

    def should_save(self, step: int) -> bool:
        """Return whether `save` would save a step."""
        return self._local.should_save(step)

    def is_saving_in_progress(self) -> bool:
        """Return whether a save is under way."""
        return self._local.is_saving_in_progress()

    def delete(self, step: int) -> None:
        """Delete a step."""
        self._local.delete(step)

    def save(
        self,
        step: int,
        args: Any,
        *,
        force: bool = False,
        custom_metadata: dict[str, Any] | None = None,
    ) -> bool:
        """Save a step, a `Composite` of `state` and what else there is; return whether it is saved.

        Raises:
            ValueError: If there is no `state`, or a `dataset` and no directory for it.
        """
        items = _items_of(args)
        dataset = items.pop(DATASET, None)
        if dataset is not None:
            self._beside().save(
                step, args=CompositeArgs(dataset=dataset), force=force, custom_metadata=custom_metadata
            )

        return self._local.save(
            step, args=CompositeArgs(**items), force=force, custom_metadata=custom_metadata
        )

    def restore(self, step: int | None, args: Any) -> Any:
        """Return what was saved as a step, as the arguments say; None for the latest."""
        items = _items_of(args)
        dataset = items.pop(DATASET, None)
        found = dict(self._local.restore(step, args=CompositeArgs(**items)).items())
        if dataset is not None:
            found |= dict(self._beside().restore(step, args=CompositeArgs(dataset=dataset)).items())

        return CompositeArgs(**found)

    def item_metadata(self, step: int) -> Any:
        """Return what is known of the objects of a step."""
        return self._local.item_metadata(step)

    def metadata(self, step: int | None = None) -> Any:
        """Return what is kept with a step, or with the directory."""
        return self._local.metadata(step)

    def metrics(self, step: int) -> Any:
        """Refuse: steps have no metrics here, as in Orbax."""
        raise _without("metrics")

    def wait_until_finished(self) -> None:
        """Return when no save is under way."""
        for manager in self._managers():
            manager.wait_until_finished()

    def check_for_errors(self) -> None:
        """Raise what failed in the background since the last call."""
        for manager in self._managers():
            manager.check_for_errors()

    def close(self) -> None:
        """Wait for all saves, and give the directories back."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _managers(self) -> Sequence[managers.CheckpointManager | _JobSteps]:
        return [self._local] if self._besides is None else [self._besides, self._local]

    def _beside(self) -> managers.CheckpointManager:
        if self._besides is None:
            raise SpecError("there is a dataset, and persistent_directory is not given")

        return self._besides


@final
class _JobSteps:
    """The steps of a job of which each process has a local directory, and in it a part of each.

    What a `ReplicatorCheckpointManager` asks of Orbax's other manager, whose directory all processes share.

    Args:
        local_directory: Of this process; no other one sees it.
        options: When to save, what to keep, and how.
    """

    def __init__(
        self, local_directory: str | os.PathLike[str], options: ReplicatorCheckpointManagerOptions
    ) -> None:
        self._waits = not options.enable_async_checkpointing
        self._last: SaveFuture | None = None
        self.directory = place_of(local_directory)
        when = StepOptions(
            save_interval_steps=options.save_interval_steps, should_save_fn=options.should_save_fn
        )
        kept = options.preservation_policy
        self._manager = sync.CheckpointManager(
            local_directory,
            save_when=_Wanted(save_policy_of(when)),
            keep=KeepAll() if kept is None else kept_by(kept),
            names=names_of(options.step_name_format or standard_name_format()),
            config=_config_of_job(local_directory),
        )
        self._manager.__enter__()

    def all_steps(self, read: bool = False) -> Sequence[int]:
        """Return every step of which all processes have their parts."""
        if read:
            self.reload()

        return list(self._manager.all_steps())

    def latest_step(self) -> int | None:
        """Return the last step; None if there is none."""
        return self._manager.latest_step()

    def reload(self) -> None:
        """List the directories of all again."""
        self._manager.reload()

    def reached_preemption(self, step: int) -> bool:
        """Return whether the job is to end after this step."""
        return reached_preemption(step)

    def should_save(self, step: int) -> bool:
        """Return whether `save` would save a step."""
        return self._manager.should_save(step)

    def is_saving_in_progress(self) -> bool:
        """Return whether a save is under way."""
        return self._last is not None and not self._last.done

    def delete(self, step: int) -> None:
        """Delete a step in all processes."""
        self._manager.delete(step)

    def save(
        self, step: int, args: CompositeArgs, *, force: bool, custom_metadata: dict[str, Any] | None
    ) -> bool:
        """Save a step; return whether it is wanted.

        Raises:
            ValueError: If there is more than a state.
        """
        save = self._manager.save(
            step,
            Composite({STATE: (state := _state_alone(args)).item}),
            force=force,
            custom_metadata=custom_metadata,
            save_args=_formats_of(state),
        )
        self._last = save or self._last
        if save is not None and self._waits:
            save.result()

        return save is not None

    def restore(self, step: int | None, args: CompositeArgs) -> CompositeArgs:
        """Return the state of a step, as its arguments say."""
        state = _state_alone(args)
        item, restore_args = getattr(state, "item", None), getattr(state, "restore_args", None)
        target = None if restore_args is None else target_of(item, restore_args)
        like = item if target is None else target[0]
        return CompositeArgs(
            **{STATE: self._manager.restore(step, item=STATE, like=... if like is None else like)}
        )

    def item_metadata(self, step: int) -> Any:
        """Refuse: each process has a part."""
        raise _without("item_metadata in a job of several processes")

    def metadata(self, step: int | None = None) -> Any:
        """Refuse: each process has a part."""
        raise _without("metadata in a job of several processes")

    def wait_until_finished(self) -> None:
        """Return when no save is under way."""
        self._manager.wait()

    def check_for_errors(self) -> None:
        """Do nothing: the next call raises what failed."""

    def close(self) -> None:
        """Wait for all saves, and give the directory back."""
        self._manager.__exit__(None, None, None)


def _config_of_job(local_directory: str | os.PathLike[str]) -> Config | None:
    """Return the configuration of a job whose processes each have this directory; None for one alone."""
    if process_count() == 1:
        return None

    return Config.load(arguments={"job": {"local_root": paths.path_or_url(local_directory)}})


def _state_alone(args: CompositeArgs) -> Any:
    """Return the arguments of the state.

    Raises:
        ValueError: If there are others.
    """
    items = dict(cast("Mapping[str, Any]", args).items())
    others = [name for name in items if name != STATE]
    if others:
        raise SpecError(f"in a job of several processes there is a {STATE!r} alone, and no {others[0]!r}")

    return items[STATE]


def _formats_of(state: Any) -> Any:
    """Return the formats that are asked for the leaves of a state."""
    asked = leaf_formats(state.item, getattr(state, "save_args", None), SaveFormat(), None)
    return None if asked is None else {STATE: asked}


def _saved(options: LocalCheckpointOptions | PersistentCheckpointOptions) -> SaveDecisionPolicy:
    return save_policy_of(
        StepOptions(
            save_interval_steps=options.save_interval_steps,
            should_save_fn=options.should_save_fn,
            save_decision_policy=options.save_decision_policy,
        )
    )


def _kept(options: LocalCheckpointOptions | PersistentCheckpointOptions, period: int | None) -> KeepPolicy:
    if options.preservation_policy is not None:
        return kept_by(options.preservation_policy)
    if options.max_to_keep is None:
        return KeepAll()

    last = KeepLast(max(1, options.max_to_keep))  # the last one always stays
    return last if period is None else last | KeepEvery(period)


@final
@dataclass(frozen=True, slots=True)
class _Wanted:
    """A policy of Orbax's as one of penstock's: when to save."""

    policy: SaveDecisionPolicy

    def should_save(self, moment: SaveMoment, /) -> bool:
        context = DecisionContext(
            is_saving_in_progress=moment.saving,
            reached_preemption=moment.preempted or reached_preemption(moment.step),
            multiprocessing_options=general.MultiprocessingOptions(),
        )
        known = [new_info(step) for step in moment.steps]
        return bool(self.policy.should_save(new_info(moment.step), known, context=context))


def _items_of(args: Any) -> dict[str, Any]:
    """Return the arguments of each item.

    Raises:
        ValueError: If they are none, or without a state.
    """
    if not isinstance(args, CompositeArgs):
        raise SpecError(f"args is a Composite with a {STATE!r}, not {type(args).__name__}")

    items = dict(cast("Mapping[str, Any]", args).items())
    if STATE not in items:
        raise SpecError(f"args has no {STATE!r}; it has {', '.join(map(repr, items)) or 'nothing'}")

    return items


def _without(name: str) -> NotImplementedError:
    return NotImplementedError(f"{name} is not implemented by managers of emergency checkpoints")
