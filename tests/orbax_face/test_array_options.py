"""The same script on both libraries: the options of `ArrayHandler` in a pipeline."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import orbax.checkpoint.experimental.v1 as theirs_v1
import pytest
from etils import epath
from orbax.checkpoint._src.metadata import array_metadata_store as theirs
from tests.open_files import at_most
from tests.orbax_face.leaf_round_trips import on

import penstock.orbax
import penstock.orbax.v1 as ours_v1
from penstock.orbax import type_handlers as ours

LIBRARIES: tuple[Any, Any] = (penstock.orbax, orbax.checkpoint)
NAMES = ("penstock", "orbax")
STORES: dict[Any, Any] = {penstock.orbax: ours, orbax.checkpoint: theirs}
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring"),
    # Orbax closes event loops that TensorStore still has something to tell.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def tree() -> dict[str, Any]:
    square = np.arange(32, dtype=np.float32).reshape(4, 8)
    return {
        "everywhere": on(square, (2, 4)),
        "rows": on(square, (2, 4), "x"),
        "apart": on(np.arange(8, dtype=np.float32), (2, 4), ("x", "y")),
        "odd": on(np.arange(3, dtype=np.float32), (2, 4)),
        "key": jax.random.key(1),
        "host": np.arange(4),
    }


def registry(ocp: Any, **options: Any) -> Any:
    types = ocp.type_handlers
    options = {"array_metadata_store": STORES[ocp].Store(), **options}
    return types.create_type_handler_registry(
        (int, types.ScalarHandler()),
        (np.ndarray, types.NumpyHandler()),
        (jax.Array, types.ArrayHandler(**options)),
    )


def save(ocp: Any, path: Path, saved: Any = None, **options: Any) -> None:
    use_ocdbt = options.pop("use_ocdbt", True)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt, type_handler_registry=registry(ocp, **options))
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, tree() if saved is None else saved)


def story(ocp: Any, path: Path, *, use_ocdbt: bool, **options: Any) -> dict[str, Any]:
    """What the options made of the tree: what is recorded, and what comes back."""
    save(ocp, path, use_ocdbt=use_ocdbt, **options)
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry(ocp, **options))
    about = handler.metadata(epath.Path(path)).tree
    document = path / "array_metadatas" / "process_0"
    entries = json.loads(document.read_text())["array_metadatas"] if document.exists() else None
    args = {
        name: ocp.ArrayRestoreArgs(sharding=value.sharding)
        if isinstance(value, jax.Array)
        else ocp.RestoreArgs()
        for name, value in tree().items()
    }
    restored = handler.restore(epath.Path(path), args=ocp.args.PyTreeRestore(restore_args=args))
    handler.close()
    return {
        "recorded": None if entries is None else {json.dumps(entry, sort_keys=True) for entry in entries},
        "shardings": (path / "_sharding").exists(),
        "metadata": {
            name: (one.shape, one.storage.write_shape, one.storage.chunk_shape, one.sharding is not None)
            for name, one in about.items()
            if name != "host"
        },
        "dtypes": {name: str(value.dtype) for name, value in restored.items()},
        "values": {
            name: np.asarray(value).tolist()
            for name, value in restored.items()
            if not jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        },
    }


@pytest.mark.thinned(2)
@pytest.mark.parametrize("use_ocdbt", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_replica_parallel": False},
        {"min_slice_bytes_for_replica_parallel": 16},
        {"min_slice_bytes_for_replica_parallel": 17},
        {"max_replicas_for_replica_parallel": 2},
        {"max_replicas_for_replica_parallel": 1},
        {"max_replicas_for_replica_parallel": 0},
        {"max_replicas_for_replica_parallel": 3, "min_slice_bytes_for_replica_parallel": 4},
        {"replica_id": None, "use_replica_parallel": False},
        {"replica_id": 0},
        {"enable_write_sharding_file": False},
        {"primary_host": None},
        {"array_metadata_store": None},
        {"array_metadata_store": None, "max_replicas_for_replica_parallel": 2},
    ],
    ids=str,
)
def test_options_of_the_array_handler_count_in_a_pipeline(
    options: dict[str, Any], use_ocdbt: bool, tmp_path: Path
) -> None:
    mine, other = [story(ocp, tmp_path / ocp.__name__, **options, use_ocdbt=use_ocdbt) for ocp in LIBRARIES]
    assert mine == other
    if "array_metadata_store" in options:
        assert mine["recorded"] is None
        assert mine["dtypes"]["key"] == "uint32"


@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_without_a_primary_process_arrays_are_saved_and_no_shardings(use_ocdbt: bool, tmp_path: Path) -> None:
    found = story(penstock.orbax, tmp_path / "one", primary_host=1, use_ocdbt=use_ocdbt)
    assert not found["shardings"]
    assert found["values"] == story(penstock.orbax, tmp_path / "two", use_ocdbt=use_ocdbt)["values"]


@pytest.mark.parametrize("ocp", LIBRARIES, ids=NAMES)
def test_a_process_that_is_not_the_primary_one_records_no_sharding(ocp: Any, tmp_path: Path) -> None:
    types = ocp.type_handlers
    for name, handler in {
        "first": types.ArrayHandler(),
        "each": types.ArrayHandler(primary_host=None),
        "other": types.ArrayHandler(primary_host=1),
    }.items():
        info = ocp.type_handlers.ParamInfo(
            name="a", parent_dir=_made(tmp_path / name), is_ocdbt_checkpoint=False, use_zarr3=False
        )

        async def write(info: Any = info, handler: Any = handler) -> None:
            for future in await handler.serialize([tree()["rows"]], [info], [ocp.SaveArgs()]):
                future.result()

        anyio.run(write)

    recorded = [name for name in ("first", "each", "other") if (tmp_path / name / "_sharding").exists()]
    assert recorded == ["first", "each"]


@pytest.mark.parametrize("ocp", LIBRARIES, ids=NAMES)
def test_replicas_that_are_not_the_first_may_write(ocp: Any, tmp_path: Path) -> None:
    replicated = {name: tree()[name] for name in ("everywhere", "rows")}
    save(ocp, tmp_path / "one", replicated, replica_id=1, use_replica_parallel=False)
    restored = penstock.orbax.PyTreeCheckpointer().restore(tmp_path / "one")
    np.testing.assert_array_equal(restored["rows"], replicated["rows"])


@pytest.mark.parametrize("ocp", LIBRARIES, ids=NAMES)
@pytest.mark.parametrize(
    "options", [{"replica_id": None}, {"replica_id": 1}, {"replica_id": 1, "use_replica_parallel": False}]
)
def test_what_no_replica_would_write_fails_the_save(
    ocp: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"replica|params are missing"):
        save(ocp, tmp_path / "one", **options)

    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize("ocp", LIBRARIES, ids=NAMES)
def test_arrays_may_have_metadata_under_another_name(ocp: Any, tmp_path: Path) -> None:
    saved = {f"array{at}": jnp.arange(at + 1.0) for at in range(20)}
    save(ocp, tmp_path / "one", saved, metadata_key="mine", use_ocdbt=False)
    assert (tmp_path / "one" / "array7" / "mine").exists()
    assert not (tmp_path / "one" / "array7" / ".zarray").exists()
    document = json.loads((tmp_path / "one" / "array_metadatas" / "process_0").read_text())
    assert len(document["array_metadatas"]) == 20


def test_a_copy_of_a_handler_that_was_used_has_options_of_its_own(tmp_path: Path) -> None:
    used = registry(penstock.orbax)
    for name, options in (("a", used), ("b", copy.deepcopy(used))):
        if name == "b":
            options.get(jax.Array)._array_metadata_store = None  # as Orbax's own tests do
        handler = penstock.orbax.PyTreeCheckpointHandler(type_handler_registry=options)
        checkpointer = penstock.orbax.Checkpointer(handler)
        checkpointer.save(tmp_path / name, args=penstock.orbax.args.PyTreeSave({"w": jnp.ones(3)}))
        checkpointer.close()

    assert (tmp_path / "a" / "array_metadatas").exists()
    assert not (tmp_path / "b" / "array_metadatas").exists()


@pytest.mark.parametrize("ocp", LIBRARIES, ids=NAMES)
def test_a_type_that_nobody_handles_is_named(ocp: Any, tmp_path: Path) -> None:
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry(ocp))
    with (
        ocp.Checkpointer(handler) as checkpointer,
        pytest.raises(ValueError, match="TypeHandler lookup failed for: type=<class 'float'>"),
    ):
        checkpointer.save(tmp_path / "a", args=ocp.args.PyTreeSave({"x": 1.5}))


def test_other_leaf_handlers_do_not_decide_about_arrays(tmp_path: Path) -> None:
    before = penstock.orbax.PyTreeCheckpointHandler()
    before.save(_made(tmp_path / "a"), args=penstock.orbax.args.PyTreeSave(tree()))
    options = {"type_handler_registry": registry(penstock.orbax, use_replica_parallel=False)}
    after = penstock.orbax.PyTreeCheckpointHandler(**options)
    after.save(_made(tmp_path / "b"), args=penstock.orbax.args.PyTreeSave(tree()))
    before.save(_made(tmp_path / "c"), args=penstock.orbax.args.PyTreeSave(tree()))
    shapes = [before.metadata(tmp_path / name).tree["rows"].storage.write_shape for name in "abc"]
    assert shapes == [(2, 2), (2, 8), (2, 2)]


def _made(path: Path) -> epath.Path:
    path.mkdir()
    return epath.Path(path)


# Stores of the caller's


def test_a_store_that_would_not_be_called_is_refused(tmp_path: Path) -> None:
    class Own(ours.Store):
        """Writes records of its own."""

    with pytest.raises(NotImplementedError, match="Own"):
        penstock.orbax.type_handlers.ArrayHandler(array_metadata_store=Own())

    saving = ours_v1.options.ArrayOptions(
        saving=ours_v1.options.ArrayOptions.Saving(array_metadata_store=Own())
    )
    with ours_v1.Context(array_options=saving), pytest.raises(NotImplementedError, match="Own"):
        ours_v1.save(tmp_path / "one", tree())

    assert not (tmp_path / "one").exists()


# The newer API


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_replica_parallel": False},
        {"min_slice_bytes_for_replica_parallel": 17},
        {"max_replicas_for_replica_parallel": 2},
        {"enable_write_sharding_file": False},
        {"array_metadata_store": None},
    ],
    ids=str,
)
def test_array_options_of_v1(options: dict[str, Any], tmp_path: Path) -> None:
    stories: list[Any] = []
    for library, ocp in (("penstock", ours_v1), ("orbax", theirs_v1)):
        module: Any = ocp
        path = tmp_path / library
        saving = module.options.ArrayOptions(saving=module.options.ArrayOptions.Saving(**options))
        with module.Context(array_options=saving):
            module.save(path, tree())

        (place,) = {document.parent for document in path.rglob("_METADATA")}
        document = place / "array_metadatas" / "process_0"
        known = json.loads((place / "_METADATA").read_text())["tree_metadata"]
        stories.append(
            {
                "recorded": sorted(document.read_text()) if document.exists() else None,
                "shardings": (place / "_sharding").exists(),
                "shapes": {name: one["value_metadata"].get("write_shape") for name, one in known.items()},
            }
        )

    assert stories[0] == stories[1]


# How large data files are


def file_sizes(path: Path) -> list[int]:
    return sorted(file.stat().st_size for place in ("d/*", "*/d/*") for file in path.glob(place))


def chunk_shapes(path: Path) -> dict[str, Any]:
    about = penstock.orbax.PyTreeCheckpointHandler().metadata(path).tree
    return {name: one.storage.chunk_shape for name, one in about.items()}


@pytest.mark.thinned(4)
@pytest.mark.parametrize("use_zarr3", [True, False])
@pytest.mark.parametrize("use_compression", [True, False])
@pytest.mark.parametrize("chunk_bytes", [None, 5 * 1024, 100 * 1024])
@pytest.mark.parametrize("file_bytes", [None, 0, 10 * 1024, 50 * 1024, 1 << 30])
def test_data_files_end_when_they_have_grown_to_their_size(
    file_bytes: int | None, chunk_bytes: int | None, use_compression: bool, use_zarr3: bool, tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    values = {
        "a": random.random(16 * 1024),
        "b": random.random((64, 1024)).astype(np.float32),
        "small": random.random(4),
        "rows": on(random.random((64, 1024)).astype(np.float32), (2, 4), "x"),
    }
    for ocp in LIBRARIES:
        handler = ocp.PyTreeCheckpointHandler(use_zarr3=use_zarr3, use_compression=use_compression)
        args = dict.fromkeys(values, ocp.SaveArgs(chunk_byte_size=chunk_bytes))
        path = tmp_path / ocp.__name__
        handler.save(
            _made(path), args=ocp.args.PyTreeSave(values, args, ocdbt_target_data_file_size=file_bytes)
        )
        handler.finalize(epath.Path(path))
        handler.close()

    mine, other = [tmp_path / ocp.__name__ for ocp in LIBRARIES]
    assert chunk_shapes(mine) == chunk_shapes(other)
    if file_bytes in (None, 0, 1 << 30):
        assert len(file_sizes(mine)) == 2  # the data, and the index
    else:
        chunk = min(chunk_bytes or file_bytes, file_bytes)
        assert file_sizes(mine)[-1] <= file_bytes + chunk + 4096
        # Orbax begins as many files as writers are at work at that moment: now as many as we, now twice.
        assert len(file_sizes(mine)) <= len(file_sizes(other)) + 10


@pytest.mark.parametrize("file_bytes", [-1, 3])
@pytest.mark.parametrize("ocp", LIBRARIES, ids=NAMES)
def test_sizes_that_no_file_can_have_are_refused(ocp: Any, file_bytes: int, tmp_path: Path) -> None:
    handler = ocp.PyTreeCheckpointHandler()
    args = ocp.args.PyTreeSave({"a": np.ones(8)}, ocdbt_target_data_file_size=file_bytes)
    with pytest.raises(ValueError, match=r"size|positive"):
        handler.save(_made(tmp_path / "one"), args=args)

    handler.close()


def test_there_may_be_more_small_files_than_a_process_may_open(tmp_path: Path) -> None:
    tree = {f"k{at:04}": np.full(16, at) for at in range(400)}
    handler = penstock.orbax.PyTreeCheckpointHandler()
    args = penstock.orbax.args.PyTreeSave(tree, ocdbt_target_data_file_size=200)
    with at_most(100):
        handler.save(_made(tmp_path / "one"), args=args)
        assert len(file_sizes(tmp_path / "one")) == 201
        restored = handler.restore(tmp_path / "one")
    assert all(np.array_equal(restored[name], value) for name, value in tree.items())
    handler.close()
