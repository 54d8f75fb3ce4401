"""What type handlers with options save, the same handlers restore, in both libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest
from etils import epath

import penstock.orbax

LIBRARIES: tuple[Any, Any] = (penstock.orbax, orbax.checkpoint)
NAMES = ("penstock", "orbax")
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
Options = dict[str, dict[str, Any]]

NAMED: Options = {
    "StringHandler": {"filename": "mine.json"},
    "NumpyHandler": {"metadata_key": "mine"},
    "ScalarHandler": {"metadata_key": "mine"},
    "ArrayHandler": {"metadata_key": "mine"},
}
OTHERS: Options = {
    "NumpyHandler": {"ocdbt_process_id": "3", "deepcopy_host_arrays": False},
    "ScalarHandler": {"ocdbt_process_id": "3"},
}


def registry(ocp: Any, options: Options) -> Any:
    types = ocp.type_handlers

    def made(name: str) -> Any:
        return getattr(types, name)(**options.get(name, {}))

    scalar = made("ScalarHandler")
    return types.create_type_handler_registry(
        (int, scalar),
        (float, scalar),
        (np.ndarray, made("NumpyHandler")),
        (str, made("StringHandler")),
        (jax.Array, made("ArrayHandler")),
    )


def tree() -> dict[str, Any]:
    return {
        "text": "words",
        "number": 3,
        "host": np.arange(4),
        "nested": {"more": "words", "real": 1.5},
        "array": jnp.arange(6.0).reshape(2, 3),
    }


def shown(found: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.tolist() if hasattr(leaf, "tolist") else leaf, found)


def handler_of(ocp: Any, options: Options, **form: Any) -> Any:
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry(ocp, options), **form)


def saved(ocp: Any, path: Path, options: Options, **form: Any) -> None:
    with ocp.Checkpointer(handler_of(ocp, options, **form)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree()))


def args_of(ocp: Any) -> Any:
    return jax.tree.map(
        lambda leaf: (
            ocp.ArrayRestoreArgs(sharding=leaf.sharding)
            if isinstance(leaf, jax.Array)
            else ocp.RestoreArgs(restore_type=type(leaf))
        ),
        tree(),
    )


@pytest.mark.parametrize("use_ocdbt", [True, False], ids=["database", "directories"])
@pytest.mark.parametrize("options", [NAMED, OTHERS], ids=["named", "others"])
def test_handlers_restore_and_describe_what_they_saved(
    options: Options, use_ocdbt: bool, tmp_path: Path
) -> None:
    ocp = penstock.orbax
    saved(ocp, tmp_path / "one", options, use_ocdbt=use_ocdbt)
    handler = handler_of(ocp, options, use_ocdbt=use_ocdbt)
    for item in (None, tree()):
        args = ocp.args.PyTreeRestore(item, restore_args=args_of(ocp))
        assert shown(handler.restore(epath.Path(tmp_path / "one"), args=args)) == shown(tree())

    about = handler.metadata(epath.Path(tmp_path / "one")).tree
    handler.close()
    assert (about["host"].shape, about["array"].shape) == ((4,), (2, 3))
    assert about["number"].dtype == np.asarray(3).dtype


@pytest.mark.parametrize("option", list(NAMED))
def test_either_option_alone_works(option: str, tmp_path: Path) -> None:
    ocp = penstock.orbax
    options = {option: NAMED[option]}
    saved(ocp, tmp_path / "one", options)
    with ocp.Checkpointer(handler_of(ocp, options)) as checkpointer:
        args = ocp.args.PyTreeRestore(restore_args=args_of(ocp))
        assert shown(checkpointer.restore(tmp_path / "one", args=args)) == shown(tree())


def test_zarr3_has_one_name_for_metadata_and_the_save_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="metadata_key"):
        saved(penstock.orbax, tmp_path / "one", NAMED, use_zarr3=True)

    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize("writer", LIBRARIES, ids=NAMES)
@pytest.mark.parametrize("reader", LIBRARIES, ids=NAMES)
def test_each_library_restores_what_the_other_saved(writer: Any, reader: Any, tmp_path: Path) -> None:
    options = NAMED | {"ArrayHandler": {}}
    saved(writer, tmp_path / "one", options, use_ocdbt=False)
    with reader.Checkpointer(handler_of(reader, options, use_ocdbt=False)) as checkpointer:
        args = reader.args.PyTreeRestore(restore_args=args_of(reader))
        assert shown(checkpointer.restore(tmp_path / "one", args=args)) == shown(tree())


def test_without_its_handler_the_array_is_missing(tmp_path: Path) -> None:
    ocp = penstock.orbax
    saved(ocp, tmp_path / "one", NAMED)
    handler = handler_of(ocp, {})
    with pytest.raises(ValueError, match="is listed in _METADATA and is not there"):
        handler.restore(epath.Path(tmp_path / "one"))
    handler.close()


@pytest.mark.parametrize("use_zarr3", [False, True], ids=["zarr2", "zarr3"])
def test_a_name_that_ends_like_the_key_of_a_chunk_is_told_from_one(use_zarr3: bool, tmp_path: Path) -> None:
    ocp = penstock.orbax

    class Calling(ocp.type_handlers.NumpyHandler):
        """Called as a handler of another library is, so that its own database is merged."""

        async def serialize(self, *args: Any, **kwargs: Any) -> Any:
            return await super().serialize(*args, **kwargs)

    types = ocp.type_handlers.create_type_handler_registry((np.ndarray, Calling()))
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=types, use_zarr3=use_zarr3)
    given = {"b/c": np.arange(3), "b": {"c": {"d": np.arange(4)}}, "c": np.ones(2)}
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "one", args=ocp.args.PyTreeSave(given))
        found = checkpointer.restore(tmp_path / "one")

    assert shown(found) == shown(given)
