"""What options of managers, and of those that wait for their steps, do: on both libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as _orbax
import pytest
from tests.orbax_face.shown_options import Cases, Shown, refused

import penstock.orbax as _penstock

ours: Any = _penstock
theirs: Any = _orbax  # it has no types
CASES = Cases()
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring")


def steps_of(ocp: Any, root: Path, n_steps: int = 3, **options: Any) -> Any:
    """Save some steps, and return those that are left."""
    with ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions(**options)) as manager:
        for step in range(n_steps):
            manager.save(step, args=ocp.args.StandardSave({"a": np.full(2, step)}), metrics={"loss": step})
        manager.wait_until_finished()
        return sorted(manager.all_steps())


def loss_of(metrics: Any) -> float:
    return float(metrics["loss"])


@CASES.shows(
    "CheckpointManagerOptions.prevent_write_metrics",
    "CheckpointManagerOptions.save_root_metadata",
    "CheckpointManagerOptions.num_deletion_threads",
    "CheckpointManagerOptions.multiprocessing_options",
    "CheckpointManagerOptions.file_options",
)
def what_a_manager_writes(ocp: Any, root: Path) -> Any:
    found: list[Any] = []
    kinds: dict[str, dict[str, Any]] = {
        "metrics": {"best_fn": loss_of},
        "no metrics": {"best_fn": loss_of, "prevent_write_metrics": True},
        "threads": {"max_to_keep": 1, "num_deletion_threads": 2, "enable_background_delete": True},
        "others": {
            "multiprocessing_options": ocp.options.MultiprocessingOptions(primary_host=0),
            "file_options": ocp.options.FileOptions(path_permission_mode=0o750),
        },
    }
    for name, options in kinds.items():
        steps = steps_of(ocp, root / name, **options)
        last = root / name / "2"
        found.append((name, steps, (last / "metrics").exists(), oct(last.stat().st_mode & 0o777)))
    for save in (True, False):
        place = root / f"root-{save}"
        options = ocp.CheckpointManagerOptions(save_root_metadata=save)
        with ocp.CheckpointManager(place, options=options, metadata={"who": "me"}) as manager:
            manager.save(0, args=ocp.args.StandardSave({"a": np.ones(2)}))
        found.append((place / "_CHECKPOINT_METADATA").exists() or (place / "metadata").exists())
    return found


@CASES.shows(
    "CheckpointManagerOptions.temporary_path_class",
    "CheckpointManagerOptions.single_host_load_and_broadcast",
    "CheckpointManagerOptions.enable_per_process_directory_creation",
    "CheckpointManagerOptions.lightweight_initialize",
    "path.step.standard_name_format.single_host_load_and_broadcast",
)
def options_that_contradict_each_other(ocp: Any, root: Path) -> Any:
    options = ocp.CheckpointManagerOptions
    names = ocp.step.standard_name_format(single_host_load_and_broadcast=True)
    found = [
        refused(options, single_host_load_and_broadcast=False, step_name_format=names),
        refused(options, enable_per_process_directory_creation=True),
        refused(options, single_host_load_and_broadcast=True, step_name_format=names),
    ]
    steps = steps_of(ocp, root / "a", single_host_load_and_broadcast=True)
    light = options(lightweight_initialize=True, temporary_path_class=None)
    with ocp.CheckpointManager(root / "a", options=light) as manager:
        return found, steps, sorted(manager.all_steps())


@CASES.shows("CheckpointManagerOptions.enable_should_save_is_saving_in_progress_check")
def whether_a_policy_hears_of_a_save(ocp: Any, root: Path) -> Any:
    heard: list[bool] = []

    class Listening(ocp.checkpoint_managers.SaveDecisionPolicy):  # type: ignore[misc]  # of either library
        def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
            heard.append(context.is_saving_in_progress)
            return True

    steps = steps_of(
        ocp,
        root,
        n_steps=1,
        save_decision_policy=Listening(),
        enable_should_save_is_saving_in_progress_check=False,
    )
    return steps, heard


@CASES.shows(
    "checkpoint_managers.BestN.keep_checkpoints_without_metrics",
    "checkpoint_managers.EveryNStepsClosest.max_to_keep",
)
def policies_of_what_is_kept(ocp: Any, root: Path) -> Any:
    best = ocp.checkpoint_managers.BestN(get_metric_fn=loss_of, n=1, keep_checkpoints_without_metrics=False)
    closest = ocp.checkpoint_managers.EveryNStepsClosest(2, max_to_keep=1)
    return [
        steps_of(ocp, root / str(n), n_steps=6, preservation_policy=policy)
        for n, policy in enumerate((best, closest))
    ]


@CASES.shows(
    "checkpoint_utils.wait_for_new_checkpoint.step_name_format",
    "checkpoint_utils.wait_for_new_checkpoint.snapshot_dir",
    "checkpoint_utils.wait_for_new_checkpoint.ignore_snapshot_errors",
    "checkpoint_utils.checkpoints_iterator.step_name_format",
    "checkpoint_utils.checkpoints_iterator.snapshot_dir",
    "checkpoint_utils.checkpoints_iterator.ignore_snapshot_errors",
    "checkpoint_utils.checkpoints_iterator.min_interval_secs",
)
def waiting_for_steps(ocp: Any, root: Path) -> Any:
    names = ocp.step.standard_name_format(step_prefix="at")
    steps_of(ocp, root / "steps", step_name_format=names)
    waiting = {
        "step_name_format": names,
        "timeout": 0,
        "snapshot_dir": root / "snapshots",
        "ignore_snapshot_errors": False,
    }
    with ocp.checkpoint_utils.wait_for_new_checkpoint(root / "steps", **waiting) as step:
        held = [path.name for path in (root / "snapshots").iterdir()]
    left = list((root / "snapshots").iterdir())
    seen = list(ocp.checkpoint_utils.checkpoints_iterator(root / "steps", min_interval_secs=0, **waiting))
    return step, len(held), left, seen


@pytest.mark.parametrize("shown", CASES, ids=lambda shown: shown.case.__name__)
def test_options_do_what_they_do_in_orbax(tmp_path: Path, shown: Shown) -> None:
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()

    assert shown.case(ours, tmp_path / "ours") == shown.case(theirs, tmp_path / "theirs")
