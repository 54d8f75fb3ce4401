"""Every public name of handlers, arguments and checkpointers has Orbax's signature, or is in the table."""

from __future__ import annotations

import dataclasses
import inspect
from importlib import import_module
from typing import Any

import orbax.checkpoint as ocp
import pytest
from tests.orbax_face.differences import differences
from tests.orbax_face.signatures import differences_with_methods

import penstock.orbax

THEIRS: Any = ocp

HANDLERS = (
    *("ArrayCheckpointHandler", "AsyncCheckpointHandler", "CheckpointHandler", "CompositeCheckpointHandler"),
    *("DefaultCheckpointHandlerRegistry", "JaxRandomKeyCheckpointHandler", "JsonCheckpointHandler"),
    *("NumpyRandomKeyCheckpointHandler", "ProtoCheckpointHandler", "PyTreeCheckpointHandler"),
    *("StandardCheckpointHandler", "create_default_handler_registry"),
)
ARGS = (
    *("ArrayRestore", "ArraySave", "CheckpointArgs", "Composite", "JaxRandomKeyRestore", "JaxRandomKeySave"),
    *("JsonRestore", "JsonSave", "NumpyRandomKeyRestore", "NumpyRandomKeySave", "ProtoRestore", "ProtoSave"),
    *("PyTreeRestore", "PyTreeSave", "StandardRestore", "StandardSave", "get_registered_args_cls"),
    *("get_registered_handler_cls", "has_registered_args", "register_with_handler"),
)
CHECKPOINTERS = (
    *("AbstractCheckpointer", "AsyncCheckpointer", "Checkpointer", "PyTreeCheckpointer"),
    "StandardCheckpointer",
)
OPTIONS = (
    *("AsyncOptions", "AtomicityMode", "AtomicityOptions", "FileOptions", "MemoryLimitOptions"),
    "MultiprocessingOptions",
)
METADATA = ("RootMetadata", "StepMetadata", "get_step_metadata", "metadata_store")
FUTURES = ("ChainedFuture", "CommitFutureAwaitingContractedSignals", "NoopFuture")
ALL = [
    (module, name)
    for module, names in (
        ("handlers", HANDLERS),
        ("args", ARGS),
        ("checkpointers", CHECKPOINTERS),
        ("options", OPTIONS),
        ("metadata", METADATA),
        ("future", FUTURES),
    )
    for name in names
]
# What the methods that a user calls are called.
METHODS = (
    *("save", "async_save", "restore", "metadata", "finalize", "close", "typestr", "wait_until_finished"),
    *("check_for_errors", "add", "get", "has", "get_all_entries", "result", "cancel"),
)
# Fields that only ours have; see the table.
FURTHER_FIELDS = {"PyTreeRestore": ["on_missing"], "PyTreeRestoreArgs": ["on_missing"]}
# Of checkpointers; see the table.
NOT_HERE = {
    *("structure", "get_temporary_path", "create_temporary_path"),
    "synchronize_next_awaitable_signal_operation_id",
}


def both(module: str, name: str) -> tuple[Any, Any]:
    return getattr(import_module(f"penstock.orbax.{module}"), name), getattr(getattr(THEIRS, module), name)


@pytest.mark.parametrize(("module", "name"), ALL)
def test_the_signature_is_orbax_s_or_the_table_says_how_it_differs(module: str, name: str) -> None:
    ours, theirs = both(module, name)
    found = differences_with_methods(ours, theirs, METHODS)
    assert not found or f"{module}.{name}" in differences(), found


@pytest.mark.parametrize(("module", "name"), ALL)
def test_no_public_method_is_missing(module: str, name: str) -> None:
    ours, theirs = both(module, name)
    if inspect.isclass(theirs):
        public = {found for found in dir(theirs) if not found.startswith("_")}
        assert {found for found in public if not hasattr(ours, found)} <= NOT_HERE


@pytest.mark.parametrize(("module", "name"), ALL)
def test_arguments_and_options_have_orbax_s_fields(module: str, name: str) -> None:
    ours, theirs = both(module, name)
    if dataclasses.is_dataclass(theirs):
        assert [field.name for field in dataclasses.fields(ours)] == [
            *(field.name for field in dataclasses.fields(theirs)),
            *FURTHER_FIELDS.get(name, ()),
        ]


@pytest.mark.parametrize("name", [name for module, name in ALL if module in {"handlers", "checkpointers"}])
def test_names_are_found_in_the_module_itself_where_orbax_has_them(name: str) -> None:
    if hasattr(THEIRS, name):
        assert getattr(penstock.orbax, name) is not None


@pytest.mark.parametrize("name", [name for name in HANDLERS if name.endswith("Handler") and name[0] != "A"])
def test_handlers_are_recorded_under_orbax_s_names(name: str) -> None:
    ours, theirs = both("handlers", name)
    if name != "CheckpointHandler":
        assert ours.typestr() == theirs.typestr()


def test_a_subclass_is_recorded_under_its_own_name() -> None:
    class Mine(penstock.orbax.PyTreeCheckpointHandler):
        pass

    assert Mine.typestr() == f"{__name__}.{Mine.__qualname__}"
