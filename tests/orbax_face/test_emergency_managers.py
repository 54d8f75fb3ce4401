"""Orbax's managers of emergency checkpoints over penstock's tiers, as a program like MaxText uses them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.emergency.checkpoint_manager as theirs
import orbax.checkpoint.experimental.emergency.replicator_checkpoint_manager as their_replicator
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import penstock.orbax
from penstock.errors import NotACheckpointError, SpecError, StorageError
from penstock.orbax import args, emergency
from penstock.steps import EverySteps, KeepEvery, KeepLast

MESH = Mesh(np.array(jax.devices()[:1]), ("x",))
SPEC: Any = PartitionSpec
STRUCT: Any = jax.ShapeDtypeStruct
PLACED = NamedSharding(MESH, SPEC())


def state(step: int) -> dict[str, Any]:
    return {
        "w": jax.device_put(np.full(1000, step, np.float32), PLACED),
        "n": jax.device_put(np.int32(step), PLACED),
    }


ABSTRACT = jax.tree.map(lambda leaf: STRUCT(leaf.shape, leaf.dtype, sharding=PLACED), state(0))


def composite(step: int, **more: Any) -> Any:
    given = state(step)
    chunks = jax.tree.map(lambda _: penstock.orbax.SaveArgs(chunk_byte_size=2**20), given)
    return args.Composite(state=args.PyTreeSave(given, save_args=chunks), **more)


def opened(folder: Path, **options: Any) -> emergency.CheckpointManager:
    local = emergency.LocalCheckpointOptions(save_interval_steps=2, max_to_keep=2)
    persistent = emergency.PersistentCheckpointOptions(save_interval_steps=5)
    given: dict[str, Any] = {"local": local, "persistent": persistent, **options}
    return emergency.CheckpointManager(
        folder / "local",
        folder / "persistent",
        global_mesh=MESH,
        abstract_state=ABSTRACT,
        options=emergency.CheckpointManagerOptions(**given),
        persistent_non_replicated_directory=folder / "besides",
    )


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def test_steps_are_saved_locally_and_copied_to_the_persistent_directory(tmp_path: Path) -> None:
    with opened(tmp_path) as manager:
        saved = [step for step in range(13) if manager.save(step, composite(step))]
        manager.wait_until_finished()
        assert saved == [0, 2, 4, 5, 6, 8, 10, 12]
        assert manager.all_steps(read=True) == [0, 5, 10, 12]
        assert manager.latest_step() == 12
        found = manager.restore(None).state
        assert found["w"].sharding == PLACED
        assert (int(found["n"]), float(found["w"][7])) == (12, 12.0)

    assert steps(tmp_path / "local") == [10, 12]
    assert steps(tmp_path / "persistent") == [0, 5, 10]


def test_a_program_resumes_from_the_local_directory_and_what_it_resumed_from_is_persistent_then(
    tmp_path: Path,
) -> None:
    with opened(tmp_path) as manager:
        for step in range(13):
            manager.save(step, composite(step))

    assert steps(tmp_path / "persistent") == [0, 5, 10]
    with opened(tmp_path) as manager:
        assert int(manager.restore(manager.latest_step()).state["n"]) == 12

    (tmp_path / "local").rename(tmp_path / "lost")
    with opened(tmp_path) as manager:
        assert manager.all_steps() == [0, 5, 10, 12]
        assert int(manager.restore(None).state["n"]) == 12
        with pytest.raises(NotACheckpointError):
            manager.restore(8)


@pytest.mark.filterwarnings("ignore:Sharding info not provided")  # of Orbax, which reads it from a file
def test_what_is_persistent_is_read_by_orbax(tmp_path: Path) -> None:
    with opened(tmp_path) as manager:
        manager.save(5, composite(5))

    with ocp.CheckpointManager(tmp_path / "persistent") as other:
        restored = other.restore(5, args=ocp.args.Composite(state=ocp.args.PyTreeRestore()))

    assert int(restored.state["n"]) == 5


def test_a_manager_that_cannot_be_opened_gives_its_directories_back(tmp_path: Path) -> None:
    (tmp_path / "besides").write_bytes(b"no directory")
    with pytest.raises(StorageError):
        opened(tmp_path)
    with pytest.raises(StorageError):
        emergency.ReplicatorCheckpointManager(
            tmp_path / "replicated", global_mesh=MESH, persistent_directory=tmp_path / "besides"
        )

    (tmp_path / "besides").unlink()
    with (
        opened(tmp_path) as manager,
        emergency.ReplicatorCheckpointManager(tmp_path / "replicated", global_mesh=MESH) as other,
    ):
        assert (manager.all_steps(), other.all_steps()) == ([], [])


def test_a_dataset_is_kept_besides(tmp_path: Path) -> None:
    with opened(tmp_path) as manager:
        manager.save(0, composite(0, dataset=args.JsonSave({"at": 17})))
        manager.wait_until_finished()
        found = manager.restore(0, args.Composite(dataset=args.JsonRestore()))
        assert (int(found.state["n"]), found.dataset) == (0, {"at": 17})

    manager = emergency.CheckpointManager(tmp_path / "l", tmp_path / "p", MESH, ABSTRACT)
    with manager, pytest.raises(SpecError, match="persistent_non_replicated_directory"):
        manager.save(0, composite(0, dataset=args.JsonSave({"at": 17})))


def test_policies_of_orbax_and_of_penstock_say_what_is_saved_and_what_stays(tmp_path: Path) -> None:
    local = emergency.LocalCheckpointOptions(
        should_save_fn=lambda step, _: step in {1, 3},
        preservation_policy=penstock.orbax.checkpoint_managers.LatestN(1),
    )
    persistent = emergency.PersistentCheckpointOptions(
        save_decision_policy=EverySteps(3), preservation_policy=KeepLast(1) | KeepEvery(3)
    )
    with opened(tmp_path, local=local, persistent=persistent, enable_async_checkpointing=False) as manager:
        assert [step for step in range(1, 8) if manager.save(step, composite(step))] == [1, 3, 6]

    assert steps(tmp_path / "local") == [3]
    assert steps(tmp_path / "persistent") == [3, 6]


def test_what_contradicts_itself_is_refused(tmp_path: Path) -> None:
    policy = penstock.orbax.checkpoint_managers.LatestN(1)
    for make in (
        lambda: emergency.LocalCheckpointOptions(max_to_keep=1, preservation_policy=policy),
        lambda: emergency.PersistentCheckpointOptions(keep_period=1, preservation_policy=policy),
    ):
        with pytest.raises(ValueError, match="preservation_policy excludes"):
            make()

    with opened(tmp_path) as manager:
        for given in (args.PyTreeSave(state(0)), args.Composite(tree=args.PyTreeSave(state(0)))):
            with pytest.raises(ValueError, match="'state'"):
                manager.save(0, given)


def test_a_replicator_manager_saves_into_the_local_directory_alone(tmp_path: Path) -> None:
    options = emergency.ReplicatorCheckpointManagerOptions(save_interval_steps=2)
    with emergency.ReplicatorCheckpointManager(
        tmp_path / "local", options, global_mesh=MESH, persistent_directory=tmp_path / "besides"
    ) as manager:
        data = args.JsonSave({"at": 3})
        assert [step for step in range(4) if manager.save(step, composite(step, dataset=data))] == [0, 2]
        manager.wait_until_finished()
        asked = args.Composite(state=args.PyTreeRestore(ABSTRACT), dataset=args.JsonRestore())
        found = manager.restore(None, asked)
        assert (int(found.state["n"]), found.dataset) == (2, {"at": 3})

    assert steps(tmp_path / "local") == steps(tmp_path / "besides") == [0, 2]


PAIRS: list[tuple[Any, Any]] = [
    (emergency.CheckpointManager, theirs.CheckpointManager),
    (emergency.CheckpointManagerOptions, theirs.CheckpointManagerOptions),
    (emergency.LocalCheckpointOptions, theirs.LocalCheckpointOptions),
    (emergency.MultiprocessingOptions, theirs.MultiprocessingOptions),
    (emergency.PersistentCheckpointOptions, theirs.PersistentCheckpointOptions),
    (emergency.ReplicatorCheckpointManager, their_replicator.ReplicatorCheckpointManager),
    (emergency.ReplicatorCheckpointManagerOptions, their_replicator.ReplicatorCheckpointManagerOptions),
]


def parameters(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if not name.startswith("_")]


@pytest.mark.parametrize(("ours", "other"), PAIRS, ids=lambda one: one.__name__)
def test_they_have_the_arguments_and_the_methods_of_orbax(ours: Any, other: Any) -> None:
    if dataclasses.is_dataclass(other):
        described = [
            [(one.name, one.default) for one in dataclasses.fields(each) if one.name != "step_name_format"]
            for each in (ours, other)
        ]
        assert described[0] == described[1]
        return

    assert parameters(ours.__init__) == parameters(other.__init__)
    methods = {name for name in vars(other) if not name.startswith("_")}
    assert methods <= {name for name in dir(ours) if not name.startswith("_")}
    for name in methods & {"save", "restore", "all_steps", "delete", "should_save", "metadata"}:
        assert parameters(getattr(ours, name)) == parameters(getattr(other, name)), name


def test_what_orbax_does_not_implement_is_not_implemented(tmp_path: Path) -> None:
    with opened(tmp_path) as manager:
        for call in (
            manager.best_step,
            lambda: manager.delete(0),
            lambda: manager.item_metadata(0),
            manager.metadata,
            lambda: manager.metrics(0),
        ):
            with pytest.raises(NotImplementedError):
                call()
