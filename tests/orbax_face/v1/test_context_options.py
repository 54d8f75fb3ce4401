"""What a context and handlers of the newer API are given, on both libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint.experimental.v1 as _orbax_v1
import pytest

import penstock.orbax.v1 as penstock_v1

ours: Any = penstock_v1
theirs: Any = _orbax_v1  # it has no types
both = pytest.mark.parametrize("ocp", [ours, theirs], ids=["penstock", "orbax"])


@both
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_context_has_the_options_that_it_is_given(ocp: Any) -> None:
    kinds = ocp.options
    given = {
        "pytree": kinds.PyTreeOptions(
            saving=kinds.PyTreeOptions.Saving(), loading=kinds.PyTreeOptions.Loading(partial_load=True)
        ),
        "asynchronous": kinds.AsyncOptions(timeout_secs=7),
        "multiprocessing": kinds.MultiprocessingOptions(primary_host=None),
        "file": kinds.FileOptions(path_permission_mode=0o700),
        "checkpointables": kinds.CheckpointablesOptions(),
        "pathways": kinds.PathwaysOptions(),
        "deletion": kinds.DeletionOptions(
            gcs_deletion_options=kinds.DeletionOptions.GcsDeletionOptions(todelete_full_path=None)
        ),
        "memory": kinds.MemoryOptions(transfer_concurrent_bytes=9),
        "atomicity": kinds.AtomicityOptions(),
        "array": kinds.ArrayOptions(loading=kinds.ArrayOptions.Loading(enable_padding_and_truncation=True)),
    }
    context = ocp.Context(
        pytree_options=given["pytree"],
        async_options=given["asynchronous"],
        multiprocessing_options=given["multiprocessing"],
        file_options=given["file"],
        checkpointables_options=given["checkpointables"],
        pathways_options=given["pathways"],
        deletion_options=given["deletion"],
        memory_options=given["memory"],
        atomicity_options=given["atomicity"],
        array_options=given["array"],
    )

    inner = ocp.Context(context)
    assert inner.pytree.loading.partial_load
    assert inner.asynchronous.timeout_secs == 7
    assert inner.multiprocessing.primary_host is None
    assert inner.file.path_permission_mode == 0o700
    assert inner.memory.transfer_concurrent_bytes == 9
    assert inner.array.loading.enable_padding_and_truncation
    for name, options in given.items():
        assert type(getattr(context, name)) is type(options)


def registry_of(ocp: Any, handler: Any, name: str, **options: Any) -> Any:
    """A registry with a handler that is made with options; it makes its handlers itself."""

    class Mine(handler):  # type: ignore[misc]  # of either library
        def __init__(self) -> None:
            super().__init__(**options)

    return ocp.handlers.local_registry().add(Mine, checkpointable_name=name)


@both
def test_handlers_of_json_have_the_file_that_they_are_told(tmp_path: Path, ocp: Any) -> None:
    context = ocp.Context()
    context.checkpointables.registry = registry_of(ocp, ocp.handlers.JsonHandler, "config", filename="mine")
    with context:
        ocp.save_checkpointables(tmp_path / "one", {"config": {"a": 1}})
        assert ocp.load_checkpointables(tmp_path / "one")["config"] == {"a": 1}

    assert (tmp_path / "one" / "config" / "mine").exists()


@both
def test_handlers_of_protos_have_the_file_that_they_are_told(tmp_path: Path, ocp: Any) -> None:
    from google.protobuf.struct_pb2 import Value

    context = ocp.Context()
    registry = registry_of(ocp, ocp.handlers.ProtoHandler, "message", filename="mine.pb")
    context.checkpointables.registry = registry
    with context:
        ocp.save_checkpointables(tmp_path / "one", {"message": Value(string_value="x")})
        found = ocp.load_checkpointables(tmp_path / "one", {"message": Value})["message"]

    assert found.string_value == "x"
    assert (tmp_path / "one" / "message" / "mine.pb").exists()


@both
def test_a_handler_of_trees_has_the_context_that_it_is_given(tmp_path: Path, ocp: Any) -> None:
    own = ocp.Context()
    own.array.saving.use_ocdbt = False
    context = ocp.Context()
    registry = registry_of(ocp, ocp.handlers.PyTreeHandler, "mine", context=own)
    context.checkpointables.registry = registry
    with context:
        ocp.save_checkpointables(tmp_path / "one", {"mine": {"a": np.ones(2)}})

    assert not (tmp_path / "one" / "mine" / "manifest.ocdbt").exists()


@both
def test_a_handler_is_registered_for_a_name_and_for_what_others_wrote(ocp: Any) -> None:
    class Mine:
        def is_handleable(self, checkpointable: Any) -> bool:
            return False

        def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
            return False

        async def save(self, directory: Any, checkpointable: Any) -> Any: ...
        async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Any: ...
        async def metadata(self, directory: Any) -> Any: ...

    registry = ocp.handlers.local_registry()
    registry.add(Mine, checkpointable_name="only here", secondary_typestrs=["an.old.Name"])
    registered = ocp.handlers.register_handler(
        Mine, checkpointable_name="of this test alone", secondary_typestrs=["an.old.Name.of.tests"]
    )

    assert registered is Mine
    assert registry.has("only here")
    assert ocp.handlers.global_registry().has("of this test alone")


def test_handlers_get_paths_of_the_class_that_a_context_names(tmp_path: Path) -> None:
    class Mine(type(Path())):  # type: ignore[misc]
        pass

    context = ours.Context(file_options=ours.options.FileOptions(path_class=Mine))
    with context:
        ours.save(tmp_path / "one", {"a": np.ones(2)})
        assert type(ours.metadata(tmp_path / "one").path) is Mine


@both
def test_what_has_no_commit_mark_is_not_loaded_where_it_is_needed(tmp_path: Path, ocp: Any) -> None:
    ours.save(tmp_path / "one", {"a": np.ones(2)})
    mark = tmp_path / "one" / "commit_success.txt"
    refused: list[bool] = []
    for marked in (True, False):
        if not marked:
            mark.unlink()
        for lenient in (False, True):
            context = ocp.Context()
            context.atomicity.mode = ocp.options.AtomicityMode.COMMIT_FILE
            context.atomicity.allow_legacy_atomic_rename = lenient
            with context:
                try:
                    ocp.load(tmp_path / "one")
                except ValueError:
                    refused.append(True)
                else:
                    refused.append(False)

    assert refused == [False, False, True, False]
