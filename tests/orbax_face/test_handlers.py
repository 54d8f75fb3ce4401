"""The same script on both libraries: what handlers and checkpointers return, raise and write."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest
from tests.unsealed import unseal

import penstock.orbax
from penstock.orbax.base_pytree_handler import BasePyTreeSaveArgs

LIBRARIES: tuple[Any, Any] = (penstock.orbax, orbax.checkpoint)
NAMES = ("penstock", "orbax")
# Orbax warns of what penstock simply does.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring"),
    # It closes event loops that TensorStore still has something to tell.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def tree() -> dict[str, Any]:
    return {
        "params": {"w": jnp.arange(12, dtype=jnp.float32).reshape(3, 4), "b": np.arange(4, dtype=np.int32)},
        "step": 7,
        "rate": 0.5,
        "name": "adam",
        "layers": [np.ones(2), (np.zeros(3), None)],
        "nothing": {},
    }


def arrays() -> dict[str, Any]:
    return {"a": jnp.arange(8, dtype=jnp.float32), "b": {"c": np.arange(3), "d": 4}}


def same(found: Any, expected: Any) -> None:
    structures: Any = [jax.tree.structure(found), jax.tree.structure(expected)]
    assert structures[0] == structures[1]
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert type(one) is type(other)
        np.testing.assert_array_equal(one, other)
        assert getattr(one, "dtype", None) == getattr(other, "dtype", None)


def as_restored() -> dict[str, Any]:
    """The tree, as it comes back without an item."""
    expected = tree()
    expected["layers"][1] = list(expected["layers"][1])
    return expected


def error_of(script: Callable[[], object]) -> Exception:
    """What a script raises."""
    try:
        script()
    except Exception as error:
        return error

    pytest.fail("nothing was raised")


@pytest.mark.parametrize("ocp", LIBRARIES, ids=NAMES)
def test_pytree_checkpointer_saves_and_restores(ocp: Any, tmp_path: Path) -> None:
    checkpointer = ocp.PyTreeCheckpointer()
    checkpointer.save(tmp_path / "one", tree())
    same(checkpointer.restore(tmp_path / "one"), as_restored())
    same(checkpointer.restore(tmp_path / "one", item=tree()), tree())
    checkpointer.close()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("use_ocdbt", [True, False])
@pytest.mark.parametrize("use_zarr3", [True, False])
@pytest.mark.parametrize(("writer", "reader"), [LIBRARIES, LIBRARIES[::-1]], ids=["to orbax", "from orbax"])
def test_each_library_reads_what_the_other_writes(
    writer: Any, reader: Any, use_zarr3: bool, use_ocdbt: bool, tmp_path: Path
) -> None:
    with writer.Checkpointer(
        writer.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt, use_zarr3=use_zarr3)
    ) as saving:
        saving.save(tmp_path / "one", args=writer.args.PyTreeSave(tree()))
    with reader.Checkpointer(reader.PyTreeCheckpointHandler()) as restoring:
        same(restoring.restore(tmp_path / "one", args=reader.args.PyTreeRestore(tree())), tree())


def test_both_libraries_record_the_same_of_the_tree_and_of_the_checkpoint(tmp_path: Path) -> None:
    documents: list[Any] = []
    for number, ocp in enumerate(LIBRARIES):
        path = tmp_path / str(number)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(
                path,
                args=ocp.args.PyTreeSave(tree(), custom_metadata={"lr": 1}),
                custom_metadata={"run": "a"},
            )
        about = json.loads((path / "_CHECKPOINT_METADATA").read_text())
        assert about.pop("init_timestamp_nsecs") < about.pop("commit_timestamp_nsecs")
        names = {name for name in os.listdir(path) if not name.startswith(("d", "ocdbt.", "_PENSTOCK"))}
        documents.append((json.loads((path / "_METADATA").read_text()), about, names))

    assert documents[0] == documents[1]


@pytest.mark.parametrize("ocp", LIBRARIES, ids=NAMES)
def test_restore_args_choose_types_and_dtypes(ocp: Any, tmp_path: Path) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "one", arrays())
        restored = checkpointer.restore(
            tmp_path / "one",
            restore_args={
                "a": ocp.RestoreArgs(restore_type=np.ndarray, dtype=np.float16),
                "b": {"c": ocp.ArrayRestoreArgs(sharding=_here()), "d": ocp.RestoreArgs(restore_type=float)},
            },
        )

    same(
        restored, {"a": np.arange(8, dtype=np.float16), "b": {"c": jnp.asarray(restored["b"]["c"]), "d": 4.0}}
    )
    assert isinstance(restored["b"]["c"], jax.Array)


def _here() -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


@pytest.mark.parametrize("ocp", LIBRARIES, ids=NAMES)
def test_save_args_cast(ocp: Any, tmp_path: Path) -> None:
    asked = {"a": ocp.SaveArgs(dtype=np.dtype("float16")), "b": {"c": ocp.SaveArgs(), "d": ocp.SaveArgs()}}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "one", args=ocp.args.PyTreeSave(arrays(), asked))
        assert checkpointer.restore(tmp_path / "one")["a"].dtype == np.float16


@pytest.mark.parametrize("ocp", LIBRARIES, ids=NAMES)
@pytest.mark.parametrize("strict", [True, False])
def test_another_shape_is_an_error_unless_it_is_asked_for(ocp: Any, strict: bool, tmp_path: Path) -> None:
    wanted = ocp.ArrayRestoreArgs(sharding=_here(), global_shape=(5,), strict=strict)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "one", {"a": jnp.arange(8)})
        if strict:
            with pytest.raises(ValueError, match="not compatible with"):
                checkpointer.restore(tmp_path / "one", restore_args={"a": wanted})
        else:
            same(checkpointer.restore(tmp_path / "one", restore_args={"a": wanted}), {"a": jnp.arange(5)})


@pytest.mark.parametrize("ocp", LIBRARIES, ids=NAMES)
def test_a_part_is_restored_by_omission_and_by_placeholder(ocp: Any, tmp_path: Path) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "one", arrays())
        part = ocp.args.PyTreeRestore({"b": {"d": 0}}, partial_restore=True)
        same(checkpointer.restore(tmp_path / "one", args=part), {"b": {"d": 4}})
        marked = {"a": ocp.PLACEHOLDER, "b": {"c": 0, "d": 0}}
        found = checkpointer.restore(tmp_path / "one", args=ocp.args.PyTreeRestore(marked))
        assert found["a"] is ocp.PLACEHOLDER
        same(found["b"], arrays()["b"])


@pytest.mark.parametrize("ocp", LIBRARIES, ids=NAMES)
def test_none_in_an_item_leaves_out_a_leaf(ocp: Any, tmp_path: Path) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "one", arrays())
        found = checkpointer.restore(tmp_path / "one", item={"a": None, "b": {"c": 0, "d": 0}})
        same(found, {"a": None, "b": arrays()["b"]})


@pytest.mark.parametrize("ocp", LIBRARIES, ids=NAMES)
def test_transforms_rename_make_and_keep(ocp: Any, tmp_path: Path) -> None:
    item = {"x": 0, "sum": 0, "new": 9}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "one", {"a": np.arange(3), "b": np.ones(3), "c": np.zeros(1)})
        found = checkpointer.restore(
            tmp_path / "one",
            args=ocp.args.PyTreeRestore(
                item,
                restore_args=jax.tree.map(lambda _: ocp.RestoreArgs(), item),
                transforms={
                    "x": ocp.Transform(original_key="a", value_fn=lambda value: value + 1),
                    "sum": ocp.RestoreTransform(
                        multi_value_fn=lambda key, stored, args: stored["a"] + stored["b"],
                        multi_value_fn_input_args={"a|b": ocp.RestoreArgs()},
                    ),
                    "new": ocp.Transform(use_fallback=True),
                },
            ),
        )

    same(found, {"x": np.arange(1, 4), "sum": np.arange(1.0, 4.0), "new": 9})


@pytest.mark.parametrize("ocp", LIBRARIES, ids=NAMES)
def test_standard_checkpointer(ocp: Any, tmp_path: Path) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "one", arrays())
        checkpointer.wait_until_finished()
        same(checkpointer.restore(tmp_path / "one"), arrays())
        target = {
            "a": jax.ShapeDtypeStruct((8,), jnp.float16, sharding=_here()),  # type: ignore[no-untyped-call]  # jax's
            "b": {"c": np.zeros(3), "d": 0},
        }
        found = checkpointer.restore(tmp_path / "one", target)
        assert found["a"].dtype == jnp.float16
        assert found["b"]["c"].dtype == np.float64


@pytest.mark.parametrize("ocp", LIBRARIES, ids=NAMES)
def test_items_of_a_composite(ocp: Any, tmp_path: Path) -> None:
    key = jax.random.key(3)
    with ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(
            tmp_path / "one",
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(arrays()),
                config=ocp.args.JsonSave({"lr": 0.1}),
                array=ocp.args.ArraySave(np.arange(5)),
                key=ocp.args.JaxRandomKeySave(key),
                random=ocp.args.NumpyRandomKeySave(np.random.get_state()),  # what the API saves
            ),
        )
        checkpointer.wait_until_finished()
        found = checkpointer.restore(tmp_path / "one")
        same(found.state, arrays())
        assert found["config"] == {"lr": 0.1}
        np.testing.assert_array_equal(found.array, np.arange(5))
        assert jnp.array_equal(jax.random.key_data(found.key), jax.random.key_data(key))
        assert found.random[0] == "MT19937"
        some = checkpointer.restore(tmp_path / "one", args=ocp.args.Composite(config=ocp.args.JsonRestore()))
        assert dict(some.items()) == {"config": {"lr": 0.1}}
        about = checkpointer.metadata(tmp_path / "one")
        assert set(about.item_handlers) == {"state", "config", "array", "key", "random"}
        assert about.item_metadata["config"] is None
        assert about.item_metadata["state"]["a"].shape == (8,)


ERRORS: dict[str, Callable[[Any, Any, Path], object]] = {
    "nothing there": lambda ocp, c, path: c.restore(path / "none"),
    "something there": lambda ocp, c, path: c.save(path / "one", arrays()),
    "an empty tree": lambda ocp, c, path: c.save(path / "two", {}),
    "an unknown type": lambda ocp, c, path: c.save(path / "two", {"a": object()}),
    "another structure": lambda ocp, c, path: c.restore(path / "one", item={"a": 0, "z": 0}),
    "too few leaves": lambda ocp, c, path: c.restore(path / "one", item={"a": 0}),
    "args as the item": lambda ocp, c, path: c.handler.restore(path / "one", ocp.args.PyTreeRestore()),
    "transforms without item": lambda ocp, c, path: c.restore(path / "one", transforms={}),
    "transforms without args": lambda ocp, c, path: c.restore(path / "one", item={"a": 0}, transforms={}),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_of_the_same_kind(name: str, tmp_path: Path) -> None:
    errors: list[Exception] = []
    for number, ocp in enumerate(LIBRARIES):
        path = tmp_path / str(number)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(path / "one", arrays())
            script = ERRORS[name]
            errors.append(error_of(partial(script, ocp, checkpointer, path)))

    ours, theirs = errors
    assert isinstance(ours, type(theirs)), (ours, theirs)


class Adapted(NamedTuple):
    w: Any
    lora: Any


def struct(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, np.float32)  # type: ignore[no-untyped-call]


NOT_STORED = {
    "a value": ({"a": np.zeros(6), "lora": np.ones(2)}, "lora"),
    "a struct": ({"a": struct(6), "rngs": struct(3)}, "rngs"),
    "all": ({"x": {"y": struct(3)}}, "x"),
    "a tree": ({"a": struct(6), "lora": {"list": [1, np.ones(2)], "nothing": None, "empty": {}}}, "lora"),
    "a type": ({"a": struct(6), "step": int}, "step"),
}
"""Items with what is not stored, and the name that it has."""


@pytest.mark.parametrize("ocp", LIBRARIES, ids=NAMES)
@pytest.mark.parametrize("name", NOT_STORED)
def test_a_partial_restore_keeps_the_leaves_that_are_not_stored(ocp: Any, name: str, tmp_path: Path) -> None:
    item, extra = NOT_STORED[name]
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "one", {"a": np.arange(6, dtype=np.float32), "b": 5})
        found = checkpointer.restore(
            tmp_path / "one", args=ocp.args.PyTreeRestore(item, partial_restore=True)
        )

    assert found.keys() == item.keys()
    if "a" in found:
        np.testing.assert_array_equal(found["a"], np.arange(6))
    kept = jax.tree.map(lambda one, given: one is given, found[extra], item[extra])
    assert all(jax.tree.leaves(kept))


@pytest.mark.parametrize("ocp", LIBRARIES, ids=NAMES)
def test_fields_that_are_not_stored_are_kept_in_a_named_tuple(ocp: Any, tmp_path: Path) -> None:
    args = ocp.args.PyTreeRestore({"layer": Adapted(struct(2), struct(3))}, partial_restore=True)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "one", {"layer": {"w": np.ones(2, np.float32)}})
        found = checkpointer.restore(tmp_path / "one", args=args)["layer"]

    assert type(found) is Adapted
    np.testing.assert_array_equal(found.w, np.ones(2))
    assert found.lora is args.item["layer"].lora


CLASHING: dict[str, Any] = {
    "a leaf for a dict": {"s": 7},
    "a dict for a leaf": {"a": {"b": 1}},
    "a list for a leaf": {"a": [1]},
    "a dict for a list": {"l": {"0": 1.0, "x": 2}},
    "a longer list": {"l": [0.0, 0.0, 9]},
    "a filled dict for an empty one": {"e": {"k": 1}},
}


@pytest.mark.parametrize("ocp", LIBRARIES, ids=NAMES)
@pytest.mark.parametrize("name", CLASHING)
def test_a_partial_restore_refuses_what_is_stored_as_something_else(
    ocp: Any, name: str, tmp_path: Path
) -> None:
    args = ocp.args.PyTreeRestore(CLASHING[name], partial_restore=True)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "one", {"a": np.ones(2), "s": {"x": 1}, "l": [1.5, 2.0], "e": {}})
        error = error_of(partial(checkpointer.restore, tmp_path / "one", args=args))

    assert isinstance(error, ValueError | TypeError)
    if ocp is penstock.orbax:
        assert isinstance(error, ValueError)
        assert "pass partial_restore" not in str(error)


def test_what_is_not_stored_can_be_an_error_of_a_partial_restore(tmp_path: Path) -> None:
    ocp = penstock.orbax
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "one", {"a": 1, "b": 2})

        def restore(item: Any, on_missing: Any) -> Any:
            args = ocp.args.PyTreeRestore(item, partial_restore=True, on_missing=on_missing)
            return checkpointer.restore(tmp_path / "one", args=args)

        with pytest.raises(ValueError, match=r"missing .*'zz'[\s\S]*on_missing"):
            restore({"a": 0, "zz": 0}, "raise")
        with pytest.raises(ValueError, match="on_missing"):
            restore({"a": 0}, "skip")
        assert restore({"a": 0}, "raise") == {"a": 1}


@pytest.mark.parametrize("ocp", LIBRARIES, ids=NAMES)
def test_force_replaces(ocp: Any, tmp_path: Path) -> None:
    with ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "one", {"a": 1})
        checkpointer.save(tmp_path / "one", {"a": 2}, force=True)
        checkpointer.wait_until_finished()
        assert checkpointer.restore(tmp_path / "one") == {"a": 2}

    assert os.listdir(tmp_path) == ["one"]


@pytest.mark.parametrize("writer", LIBRARIES, ids=NAMES)
@pytest.mark.parametrize("rich", [True, False])
def test_tuples_are_recorded_and_restored_if_asked(writer: Any, rich: bool, tmp_path: Path) -> None:
    saved = {"a": (np.arange(3), [np.ones(2)]), "b": ()}

    def checkpointer(ocp: Any, *, rich: bool) -> Any:
        options = tree_options(ocp)(support_rich_types=rich)
        return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(pytree_metadata_options=options))

    with checkpointer(writer, rich=rich) as one:
        one.save(tmp_path / "one", saved)
    for reading in (True, False):
        for ocp in LIBRARIES:
            with checkpointer(ocp, rich=reading) as one:
                found = one.restore(tmp_path / "one")["a"]
                described = one.metadata(tmp_path / "one").item_metadata["a"]
                assert type(found) is type(described) is (tuple if rich and reading else list)


def tree_options(ocp: Any) -> Any:
    module = "penstock.orbax.options" if ocp is penstock.orbax else "orbax.checkpoint._src.metadata.tree"
    return import_module(module).PyTreeMetadataOptions


def _directory_of_array(path: Path) -> None:
    shutil.rmtree(path / "b.c")


@pytest.mark.parametrize("ocp", LIBRARIES, ids=NAMES)
@pytest.mark.parametrize(
    "harm",
    [
        lambda path: (path / "a" / ".zarray").unlink(),
        lambda path: (path / "b.c" / ".zarray").unlink(),
        _directory_of_array,
        lambda path: (path / "_METADATA").unlink(),
    ],
    ids=["no .zarray", "no .zarray of a NumPy array", "no directory", "no _METADATA"],
)
def test_what_is_gone_is_not_found(ocp: Any, harm: Callable[[Path], None], tmp_path: Path) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(tmp_path / "one", arrays())
        harm(tmp_path / "one")
        with pytest.raises(FileNotFoundError) as caught:
            checkpointer.restore(tmp_path / "one")

    if ocp is penstock.orbax:
        assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("ocp", LIBRARIES, ids=NAMES)
@pytest.mark.parametrize("use_zarr3", [True, False])
def test_metadata_tells_the_version_of_zarr(ocp: Any, use_zarr3: bool, tmp_path: Path) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_zarr3=use_zarr3)) as checkpointer:
        checkpointer.save(tmp_path / "one", arrays())

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        about = checkpointer.metadata(tmp_path / "one").item_metadata
        assert about.use_zarr3 is use_zarr3


@pytest.mark.parametrize("ocp", LIBRARIES, ids=NAMES)
@pytest.mark.parametrize(
    "options",
    [
        {"primary_host": None},
        {"active_processes": {0}, "barrier_sync_key_prefix": "x"},
        {"active_processes": {1}},
    ],
    ids=str,
)
def test_one_process_has_nobody_to_wait_for(ocp: Any, options: dict[str, Any], tmp_path: Path) -> None:
    processes = ocp.options.MultiprocessingOptions(**options)
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=processes)
    with ocp.Checkpointer(handler, multiprocessing_options=processes) as checkpointer:
        checkpointer.save(tmp_path / "one", arrays())
        same(checkpointer.restore(tmp_path / "one"), arrays())


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_primary_host_that_is_not_there_is_refused(asynchronous: bool, tmp_path: Path) -> None:
    """Orbax waits for it, ten minutes long."""
    ocp = penstock.orbax
    absent = ocp.options.MultiprocessingOptions(primary_host=1)
    kind: Any = ocp.AsyncCheckpointer if asynchronous else ocp.Checkpointer
    for options in ({"multiprocessing_options": absent}, {}):
        handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=absent)
        with kind(handler, **options) as checkpointer, pytest.raises(ValueError, match="primary_host"):
            checkpointer.save(tmp_path / "one", args=ocp.args.PyTreeSave(arrays()))

    assert not list(tmp_path.iterdir())


def test_a_handler_is_found_by_the_name_that_earlier_versions_recorded(tmp_path: Path) -> None:
    ocp: Any = penstock.orbax
    handler = ocp.handlers.BasePyTreeCheckpointHandler()
    path = tmp_path / "one"
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(state=handler)) as checkpointer:
        checkpointer.save(path, ocp.args.Composite(state=BasePyTreeSaveArgs({"a": 1})))

    file = path / "_CHECKPOINT_METADATA"
    recorded = json.loads(file.read_text())
    assert recorded["item_handlers"]["state"].startswith("orbax.checkpoint._src.handlers.base_pytree")
    earlier = "penstock.orbax.handlers.base_pytree.BasePyTreeCheckpointHandler"
    file.write_text(json.dumps(recorded | {"item_handlers": {"state": earlier}}))
    unseal(path)  # which they did not write, either
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        assert checkpointer.restore(path)["state"] == {"a": 1}


@pytest.mark.parametrize("kind", ["CheckpointHandler", "AsyncCheckpointHandler"])
def test_handlers_without_args_objects_are_recorded_as_ever(kind: str, tmp_path: Path) -> None:
    class Plain(getattr(penstock.orbax, kind)):  # type: ignore[misc]  # either of two
        async def async_save(self, directory: Any, item: Any) -> Any:
            self.save(directory, item)

        def save(self, directory: Any, item: Any) -> None:
            (directory / "x").write_text(item)

        def restore(self, directory: Any) -> str:
            return str((directory / "x").read_text())

    penstock.orbax.Checkpointer(Plain()).save(tmp_path / "one", "text")
    recorded = json.loads((tmp_path / "one" / "_CHECKPOINT_METADATA").read_text())["item_handlers"]
    names = {"CheckpointHandler": "_Wrapper", "AsyncCheckpointHandler": "_AsyncWrapper"}
    assert recorded == f"penstock.orbax.handlers.legacy.{names[kind]}"
