"""The public modules of Orbax are there, with all names but those in the table of differences."""

from __future__ import annotations

import datetime
import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as _orbax
import pytest
from tests.orbax_face.absent_names import ABSENT

import penstock.orbax as _penstock

ours: Any = _penstock
theirs: Any = _orbax  # it has no types
_jax: Any = jax
BOTH = [pytest.param(ours, id="penstock"), pytest.param(theirs, id="orbax")]
MODULES = (
    *("abstract_checkpoint_manager", "aggregate_handlers", "args", "arrays", "checkpoint_args"),
    *("checkpoint_manager", "checkpoint_managers", "checkpoint_utils", "checkpointers", "future", "handlers"),
    *("logging", "logging.step_statistics", "metadata", "metadata.tree", "metadata.value", "msgpack_utils"),
    *("multihost", "options", "path", "path.step", "pathways", "serialization", "step", "test_utils"),
    *("transform_utils", "tree", "type_handlers", "utils", "version"),
)


def module_of(library: Any, name: str) -> Any:
    """A module by its path from the package, whether Orbax has it as an attribute or as a file."""
    try:
        return importlib.import_module(f"{library.__name__}.{name}")
    except ModuleNotFoundError:
        return functools.reduce(getattr, name.split("."), library)


def names_of(module: ModuleType, name: str) -> Iterator[str]:
    """What a module shows of Orbax's own: no private names, and no modules that it only uses."""
    for key, value in vars(module).items():
        home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "orbax")
        public = not isinstance(value, ModuleType) or name in ("", "path")
        if public and not key.startswith("_") and str(home).startswith("orbax"):
            yield key


@pytest.mark.parametrize("name", MODULES)
def test_no_name_of_a_public_module_is_missing_but_those_in_the_table(name: str) -> None:
    here = module_of(ours, name)
    missing = {key for key in names_of(module_of(theirs, name), name) if not hasattr(here, key)}

    assert missing == set(ABSENT.get("path.step" if name == "step" else name, ((), ""))[0])


def test_no_public_module_is_missing_but_those_in_the_table() -> None:
    shown = {key for key in names_of(theirs, "") if isinstance(getattr(theirs, key), ModuleType)}

    assert {key for key in shown if not hasattr(ours, key)} == set(ABSENT["(the package)"][0])


def test_the_version_is_that_of_orbaxs_api() -> None:
    version = importlib.import_module("orbax.checkpoint.version")

    assert ours.version.__version__ == version.__version__
    assert ours.version.get_details() == version.get_details()


TREE = {
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
    "narrow": np.ones(3, ml_dtypes.bfloat16),
    "jax": jnp.arange(3.0),
    "number": np.float32(2.5),
    "complex": 1 + 2j,
    "nested": {"list": [1, (2, "three"), None], "raw": b"4"},
}


def assert_same(found: Any, wanted: Any) -> None:
    structures: list[Any] = [jax.tree.structure(tree) for tree in (found, wanted)]
    assert structures[0] == structures[1]
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("reader", BOTH)
@pytest.mark.parametrize("writer", BOTH)
def test_msgpack_is_that_of_orbax(writer: Any, reader: Any) -> None:
    encoded = writer.msgpack_utils.msgpack_serialize(TREE)

    found = reader.msgpack_utils.msgpack_restore(encoded)
    assert_same(found, TREE)
    assert found["narrow"].dtype == ml_dtypes.bfloat16
    assert type(found["number"]) is np.float32


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("reader", BOTH)
def test_large_arrays_are_cut_in_msgpack(
    monkeypatch: pytest.MonkeyPatch, reader: Any, in_place: bool
) -> None:
    for library in (ours, theirs):
        monkeypatch.setattr(library.msgpack_utils, "MAX_CHUNK_SIZE", 100)
    tree = {"w": np.arange(60.0).reshape(6, 10), "b": {"x": np.arange(3)}}
    given = dict(tree)

    encoded = ours.msgpack_utils.msgpack_serialize(given, in_place=in_place)

    assert encoded.count(b"__msgpack_chunked_array__") == 1
    assert_same(reader.msgpack_utils.msgpack_restore(encoded), tree)
    assert (given["w"] is tree["w"]) is not in_place


@pytest.mark.parametrize(
    "leaf", [{1, 2}, np.array([object()]), jax.random.key(0)], ids=["set", "object", "key"]
)
def test_what_msgpack_does_not_have_is_refused(leaf: Any) -> None:
    with pytest.raises(ValueError, match="msgpack"):
        ours.msgpack_utils.msgpack_serialize({"a": leaf})


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x81\xa1a", b"\xc7\x01\x09a", b"\x00\x00"])
def test_what_is_no_msgpack_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="no tree in msgpack"):
        ours.msgpack_utils.msgpack_restore(data)


@pytest.mark.parametrize("reader", BOTH)
@pytest.mark.parametrize("writer", BOTH)
def test_a_tree_in_one_file_is_read_by_both(tmp_path: Path, writer: Any, reader: Any) -> None:
    tree = {"w": np.arange(3.0), "rest": [1, {"empty": {}}]}
    handler = writer.aggregate_handlers.MsgpackHandler(0)

    async def write() -> Any:
        return await handler.serialize(theirs.path.step.epath.Path(tmp_path / "checkpoint"), tree)

    anyio.run(write).result()
    handler.close()

    read = reader.aggregate_handlers.MsgpackHandler()
    assert_same(read.deserialize(theirs.path.step.epath.Path(tmp_path / "checkpoint")), tree)
    with pytest.raises(FileNotFoundError):
        read.deserialize(theirs.path.step.epath.Path(tmp_path / "nothing"))


def test_the_other_processes_write_no_file(tmp_path: Path) -> None:
    async def write() -> Any:
        return await ours.aggregate_handlers.MsgpackHandler(primary_host=1).serialize(
            tmp_path / "x", {"a": 1}
        )

    anyio.run(write).result()
    assert not list(tmp_path.iterdir())


def test_rich_types_have_no_place_in_one_file(tmp_path: Path) -> None:
    options = ours.options.PyTreeMetadataOptions(support_rich_types=True)

    async def write() -> None:
        await ours.aggregate_handlers.MsgpackHandler(pytree_metadata_options=options).serialize(
            tmp_path / "x", 1
        )

    with pytest.raises(NotImplementedError, match="rich"):
        anyio.run(write)


@pytest.mark.parametrize("ocp", BOTH)
def test_steps_are_found_by_the_functions_of_the_step_module(tmp_path: Path, ocp: Any) -> None:
    names = ocp.step.standard_name_format(step_prefix="run", step_format_fixed_length=3)
    with ours.Checkpointer(ours.StandardCheckpointHandler()) as checkpointer:
        for step in (2, 10):
            checkpointer.save(tmp_path / names.build_name(step), args=ours.args.StandardSave({"a": step}))
    unfinished = tmp_path / f"run_011{ocp.step.TMP_DIR_SUFFIX}1"
    unfinished.mkdir()

    assert str(ocp.step.build_step_path(tmp_path, names, 7)) == str(tmp_path / "run_007")
    assert str(ocp.step.find_step_path(tmp_path, names, step=2)) == str(tmp_path / "run_002")
    assert str(ocp.step.find_step_path(tmp_path, names, step=2, include_uncommitted=True)).endswith("run_002")
    assert ocp.step.latest_step_metadata(tmp_path, names).step == 10
    assert ocp.step.latest_step_metadata(tmp_path / "none", names) is None
    assert ocp.step.maybe_find_step_metadata(tmp_path, names, step=10).path.name == "run_010"
    assert ocp.step.maybe_find_step_metadata(tmp_path, names, step=11) is None
    assert ocp.step.step_metadata_of_checkpoint_path(tmp_path / "run_002", names).step == 2
    assert ocp.step.step_prefix_with_underscore("run") == "run_"
    assert ocp.step.step_prefix_with_underscore(None) == ""
    assert ocp.step.is_standard_name_format(names)
    assert not ocp.step.is_standard_name_format(ocp.step.composite_name_format(names, [names]))
    assert ocp.step.is_path_finalized(tmp_path / "run_002")
    assert ocp.step.is_path_temporary(unfinished)
    assert ocp.step.tmp_checkpoints(tmp_path) == [unfinished.name]
    assert sorted(ocp.step.checkpoint_steps(tmp_path)) == [2, 10]
    found = ocp.step.build_step_metadatas([1, 2, 3], above_one)
    assert sorted(found) == [2, 3]
    with pytest.raises(ValueError, match=r"[Nn]o step"):
        ocp.step.find_step_path(tmp_path, names, step=3)
    with pytest.raises(ValueError, match="step"):
        of_no_step(ocp, tmp_path)


def above_one(number: int) -> int | None:
    return number if number > 1 else None


def of_no_step(ocp: Any, root: Path) -> Any:
    return ocp.step.step_metadata_of_checkpoint_path(root / "x", ocp.step.standard_name_format())


def test_a_step_that_is_being_written_is_found_if_it_is_asked_for(tmp_path: Path) -> None:
    names = ours.step.standard_name_format()
    (tmp_path / f"5{ours.step.TMP_DIR_SUFFIX}").mkdir()

    found = ours.step.find_step_path(tmp_path, names, step=5, include_uncommitted=True)

    assert found.name == f"5{ours.step.TMP_DIR_SUFFIX}"


@pytest.mark.parametrize("ocp", [ours, theirs])
def test_an_empty_directory_is_found_by_its_name(ocp: Any, tmp_path: Path) -> None:
    for name in ("3", "12", f"7{ocp.step.TMP_DIR_SUFFIX}", "x"):
        (tmp_path / name).mkdir()
    (tmp_path / "5").write_text("no directory")
    one, other = ocp.path.step.standard_name_format(), ocp.path.step.standard_name_format(step_prefix="at")
    both = ocp.path.step.composite_name_format(one, [one, other, one])

    assert sorted(found.step for found in one.find_all(tmp_path) if found.step != 5) == [3, 12]
    assert sorted(found.step for found in both.find_all(tmp_path) if found.step != 5) == [3, 12]
    assert one.find_step(tmp_path, 3).path.name == "3"
    with pytest.raises(ValueError, match=r"[Nn]o step|7"):
        one.find_step(tmp_path, 7)


@pytest.mark.parametrize("ocp", [ours, theirs])
@pytest.mark.parametrize("composite", [False, True])
def test_a_manager_lists_an_empty_directory(ocp: Any, composite: bool, tmp_path: Path) -> None:
    (tmp_path / "3").mkdir()
    names = ocp.path.step.standard_name_format()
    if composite:
        names = ocp.path.step.composite_name_format(names, [names])

    options = ocp.CheckpointManagerOptions(step_name_format=names)
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        assert manager.all_steps() == [3]
        assert not manager.save(3, args=ocp.args.StandardSave({"a": 1}))


@pytest.mark.parametrize("n_devices", [1, 4, 8])
def test_maximal_shardings_are_orbaxs(n_devices: int) -> None:
    shapes: list[tuple[int, ...]] = [
        (2, 3),
        (),
        (3,),
        (8,),
        (16, 4),
        (6, 12),
        (2, 2, 64),
        (7, 9),
        (9, 4),
        (12,),
    ]
    tree = {str(shape): _jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes}
    devices = jax.devices()[:n_devices]

    mine, other = (library.arrays.construct_maximal_shardings(tree, devices) for library in (ours, theirs))

    for shape in shapes:
        one, two = mine[str(shape)], other[str(shape)]
        if n_devices == len(jax.devices()) or max(shape, default=0) >= len(jax.devices()):
            assert one.is_equivalent_to(two, len(shape)), shape
            assert one.spec == two.spec
            assert one.mesh.devices.shape == two.mesh.devices.shape
        assert len(one.device_set) == n_devices


def test_a_backend_that_is_not_there_is_refused() -> None:
    kinds = ours.pathways.CheckpointingImpl
    assert [kind.name for kind in kinds] == [kind.name for kind in theirs.pathways.CheckpointingImpl]
    assert kinds.from_options() is kinds.NO_DISPATCHER
    assert kinds.from_options(use_persistence_array_handler=True) is kinds.PERSISTENCE
    assert kinds.from_options(use_colocated_python=True, use_persistence_array_handler=True).name.startswith(
        "CO"
    )
    with pytest.raises(NotImplementedError, match="Pathways"):
        ours.pathways.register_type_handlers(checkpointing_impl=kinds.PERSISTENCE)

    context = ours.v1.Context()
    context.pathways.checkpointing_impl = kinds.NO_DISPATCHER
    for kind in (kinds.PERSISTENCE, theirs.pathways.CheckpointingImpl.COLOCATED_PYTHON):
        with pytest.raises(ValueError, match="checkpointing_impl"):
            context.pathways.checkpointing_impl = kind


def test_a_store_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="todelete_full_path"):
        ours.v1.options.DeletionOptions.GcsDeletionOptions(todelete_full_path="gs://x")


@pytest.mark.parametrize("home", ["penstock.orbax.multihost", "orbax.checkpoint._src.multihost.multihost"])
def test_a_process_alone_waits_at_no_barrier(home: str) -> None:
    multihost = importlib.import_module(home)
    devices = np.array(_jax.devices())

    assert not multihost.is_jax_distributed_client_initialized()
    with pytest.raises(ValueError, match="initialize"):
        multihost.get_jax_distributed_client()
    multihost.get_barrier_sync_fn()(key="a", timeout_ms=1)
    multihost.get_barrier_sync_fn(processes={0})(key="a", timeout_ms=1)
    assert multihost.should_skip_process_sync()
    assert multihost.should_skip_process_sync(processes={0})
    assert multihost.coordination_timeout() == 300
    assert multihost.unique_barrier_key("a") == "a"
    assert multihost.unique_barrier_key("a", prefix="b", suffix="c") == "b_a.c"
    assert multihost.global_max([3, -1]) == [3, -1]
    assert multihost.process_index_from_device(devices[0]) == 0
    assert multihost.unique_processes_from_devices(devices) == {0}
    assert not multihost.is_native_pathways_backend()
    assert not multihost.is_proxy_pathways_backend()
    assert not multihost.use_experimental_distributed_process_id()


def test_ids_of_processes_are_those_of_jax() -> None:
    multihost = _penstock.multihost
    assert multihost.is_distributed_to_device_ids_initialized()
    assert multihost.distributed_to_device_ids() == [[device.id for device in _jax.devices()]]
    assert multihost.runtime_to_distributed_ids() == [0]
    assert multihost.runtime_to_distributed_process_id(0) == 0


@pytest.mark.parametrize("ocp", BOTH)
def test_steps_are_equal_whose_number_and_time_are(ocp: Any) -> None:
    time = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    info = ocp.checkpoint_manager.CheckpointInfo(jnp.int32(3), time, {"loss": 1.0})

    assert info == ocp.checkpoint_manager.CheckpointInfo(3, time, None)
    assert info != ocp.checkpoint_manager.CheckpointInfo(4, time, None)
    assert len({info, ocp.checkpoint_manager.CheckpointInfo(3, time, None)}) == 1
    assert str(info) == "Checkpoint[step=3 | time=2026-01-02 00:00:00+00:00]"


@pytest.mark.parametrize("ocp", BOTH)
def test_a_function_of_the_step_and_the_latest_one_is_a_policy(ocp: Any) -> None:
    policy = ocp.checkpoint_manager._ShouldSaveFnPolicy(lambda step, latest: (step, latest) == (4, 2))
    step, latest = [ocp.checkpoint_manager.CheckpointInfo(n, None, None) for n in (4, 2)]

    assert policy.should_save(step, [latest], context=None)
    assert not policy.should_save(step, [], context=None)
