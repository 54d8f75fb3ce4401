"""`_METADATA` and the msgpack file together, where they agree and where they do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from penstock.errors import CorruptCheckpointError, IncompleteCheckpointError, UnsupportedFormatError
from penstock.handlers import LocalStore, OrbaxLayout
from penstock.handlers.formats.leaf_table import StoredArray
from penstock.handlers.formats.orbax.embedded_arrays import PackedArray

ZARRAY: dict[str, Any] = {
    "chunks": [2],
    "compressor": None,
    "dtype": "<f4",
    "fill_value": None,
    "filters": None,
    "order": "C",
    "shape": [2],
    "zarr_format": 2,
}


def entry(name: str, typestr: str, *, skip: bool) -> dict[str, Any]:
    value = {"value_type": typestr, "skip_deserialize": skip}
    return {"key_metadata": [{"key": name, "key_type": 2}], "value_metadata": value}


def write(folder: Path, packed: Any, *entries: dict[str, Any], **document: Any) -> None:
    tree = {str(at): found for at, found in enumerate(entries)}
    (folder / "_METADATA").write_text(json.dumps({"tree_metadata": tree, **document}))
    (folder / "checkpoint").write_bytes(msgpack.packb(packed))


def write_array(folder: Path, name: str) -> None:
    (folder / name).mkdir()
    (folder / name / ".zarray").write_text(json.dumps(ZARRAY))
    (folder / name / "0").write_bytes(np.arange(2, dtype=np.float32).tobytes())


def leaves(folder: Path) -> Any:
    return OrbaxLayout().open(LocalStore(), str(folder)).leaves


def test_each_value_is_taken_from_where_it_lies(tmp_path: Path) -> None:
    entries = [
        entry("a", "jax.Array", skip=False),
        entry("b", "scalar", skip=True),
        entry("s", "string", skip=True),
    ]
    write(tmp_path, {"a": "PLACEHOLDER://a", "b": 3, "s": "text"}, *entries)
    write_array(tmp_path, "a")

    a, b, s = leaves(tmp_path)

    assert (type(a.detail), a.spec.shape, a.spec.typestr) == (StoredArray, (2,), "jax.Array")
    assert (type(b.detail), b.spec.dtype, b.spec.typestr) == (PackedArray, "int64", "scalar")
    assert s.spec.text == "text"


def test_a_placeholder_leads_to_an_array_even_if_it_was_recorded_as_a_value(tmp_path: Path) -> None:
    write(tmp_path, {"a": "PLACEHOLDER://a"}, entry("a", "np.ndarray", skip=True))
    write_array(tmp_path, "a")

    (leaf,) = leaves(tmp_path)

    assert type(leaf.detail) is StoredArray


@pytest.mark.parametrize(
    ("typestr", "value", "problem"),
    [
        ("string", 3, "holds a scalar where a string was recorded"),
        ("np.ndarray", "text", "holds a string where a np.ndarray was recorded"),
        ("scalar", None, "holds a None where a scalar was recorded"),
        ("jax.Array", {}, "holds a Dict where a jax.Array was recorded"),
        ("jax.Array", {"b": 1}, "does not hold this value"),
    ],
)
def test_a_value_of_another_kind_names_file_and_leaf(
    typestr: str, value: Any, problem: str, tmp_path: Path
) -> None:
    write(tmp_path, {"a": value}, entry("a", typestr, skip=True))

    with pytest.raises(CorruptCheckpointError, match=rf"/checkpoint: {problem} \(leaf \['a'\]\)"):
        leaves(tmp_path)


@pytest.mark.parametrize("use_ocdbt", [None, True])
def test_parts_that_were_not_merged_are_named(use_ocdbt: bool | None, tmp_path: Path) -> None:
    write(tmp_path, {"a": "PLACEHOLDER://a"}, entry("a", "np.ndarray", skip=False), use_ocdbt=use_ocdbt)
    for part in ("ocdbt.process_1", "ocdbt.process_0"):
        (tmp_path / part).mkdir()

    with pytest.raises(IncompleteCheckpointError, match=r"never merged \(ocdbt.process_0, ocdbt.process_1\)"):
        leaves(tmp_path)


def test_parts_beside_arrays_in_directories_do_not_matter(tmp_path: Path) -> None:
    write(tmp_path, {}, entry("a", "np.ndarray", skip=False), use_ocdbt=False)
    (tmp_path / "ocdbt.process_0").mkdir()
    write_array(tmp_path, "a")

    assert leaves(tmp_path)[0].spec.shape == (2,)


def test_an_early_directory_of_no_steps_has_no_item(tmp_path: Path) -> None:
    """Only its own metadata, which looks like a JSON item."""
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata" / "metadata").write_text('{"root": 1}')

    with pytest.raises(CorruptCheckpointError, match="is no checkpoint"):
        leaves(tmp_path)

    (tmp_path / "_CHECKPOINT_METADATA").write_text("{}")
    assert [leaf.info.name for leaf in leaves(tmp_path)] == ["root"]


def test_metadata_and_file_may_both_be_unable_to_say(tmp_path: Path) -> None:
    write(tmp_path, {"a": b"bytes"}, entry("a", "np.ndarray", skip=True))

    with pytest.raises(UnsupportedFormatError, match="holds bytes as a leaf"):
        leaves(tmp_path)
