"""What TensorStore is told is what Orbax tells it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

from penstock.orbax import RestoreArgs, SaveArgs, type_handlers
from penstock.orbax.leaf_args import ParamInfo

theirs = ocp.type_handlers
CONTEXT = type_handlers.get_ts_context()


def infos(directory: str, **fields: Any) -> tuple[ParamInfo, Any]:
    fields = {"name": "a.b", "ts_context": CONTEXT, **fields}
    path = epath.Path(directory)
    return ParamInfo(parent_dir=path, **fields), theirs.ParamInfo(parent_dir=path, **fields)


def as_json(spec: object) -> str:
    return json.dumps(spec, sort_keys=True)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("directory", ["/tree", "gs://bucket/tree"])
@pytest.mark.parametrize("zarr3", [False, True])
@pytest.mark.parametrize("database", [False, True])
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("metadata_key", [None, "other"])
def test_specs_are_orbax_s(
    directory: str, zarr3: bool, database: bool, compressed: bool, metadata_key: str | None
) -> None:
    asked: tuple[dict[str, Any] | None, ...] = (
        None,
        {},
        {"dtype": np.dtype(jnp.bfloat16)},
        {"chunk_byte_size": 64, "shard_axes": (1,)},
    )
    for process, args, file_size in itertools.product((None, 0, "a1"), asked, (None, 0, 100)):
        ours, other = infos(
            directory,
            use_zarr3=zarr3,
            use_compression=compressed,
            ocdbt_target_data_file_size=file_size,
        )
        mine = None if args is None else SaveArgs(**args)
        his = None if args is None else theirs.SaveArgs(**args)
        given = (database, (8, 16), (4, 16), np.dtype(np.float32), process, metadata_key)
        written = type_handlers.get_json_tspec_write(ours, *given, mine)
        assert as_json(written) == as_json(theirs.get_json_tspec_write(other, *given, his))

        read = type_handlers.get_json_tspec_read(ours, database, metadata_key, False)
        assert read == theirs.get_json_tspec_read(other, database, metadata_key, False)


def test_casts_are_orbax_s() -> None:
    value = np.zeros(2, np.float32)
    for dtype in (None, np.dtype(np.int8), np.dtype(jnp.bfloat16)):
        mine, his = {"driver": "zarr"}, {"driver": "zarr"}
        ours = type_handlers.get_cast_tspec_serialize(mine, value, SaveArgs(dtype=dtype))
        assert ours == theirs.get_cast_tspec_serialize(his, value, theirs.SaveArgs(dtype=dtype))
        assert mine == his
        read = type_handlers.get_cast_tspec_deserialize(mine, RestoreArgs(dtype=dtype))
        assert read == theirs.get_cast_tspec_deserialize(his, theirs.RestoreArgs(dtype=dtype))

    keys = RestoreArgs(dtype=jax.random.key(0).dtype)
    assert type_handlers.get_cast_tspec_deserialize({"driver": "zarr"}, keys) == {"driver": "zarr"}


@pytest.mark.parametrize("options", [{}, {"use_ocdbt": False}, {"file_io_concurrency_limit": 3}])
def test_contexts_are_orbax_s(options: dict[str, Any]) -> None:
    ours, other = type_handlers.get_ts_context(**options), theirs.get_ts_context(**options)
    assert ours.spec.to_json() == other.spec.to_json()


def test_a_relative_directory_is_refused() -> None:
    ours, other = infos("tree")
    for library, info in ((type_handlers, ours), (theirs, other)):
        with pytest.raises(ValueError, match="absolute"):
            library.get_json_tspec_read(info, True)


@pytest.mark.parametrize("process", ["", "a b", "../x"])
def test_a_process_id_that_is_no_name_is_refused(process: str) -> None:
    ours, other = infos("/tree")
    for library, info in ((type_handlers, ours), (theirs, other)):
        with pytest.raises(ValueError, match="process"):
            library.get_json_tspec_write(info, True, (1,), (1,), np.dtype(int), process)


@pytest.mark.parametrize("args", [{"chunk_byte_size": 3}, {"shard_axes": (2,)}, {"shard_axes": (-1,)}])
def test_what_cannot_be_cut_as_asked_is_refused(args: dict[str, Any]) -> None:
    info, _ = infos("/tree")
    with pytest.raises(ValueError, match=r"chunk_byte_size|shard_axes"):
        type_handlers.get_json_tspec_write(
            info, True, (8, 16), (8, 16), np.dtype(np.float32), arg=SaveArgs(**args)
        )


def test_a_database_is_known_by_its_manifest(tmp_path: Path) -> None:
    assert not type_handlers.is_ocdbt_checkpoint(tmp_path)
    (tmp_path / "manifest.ocdbt").touch()
    assert type_handlers.is_ocdbt_checkpoint(str(tmp_path))
