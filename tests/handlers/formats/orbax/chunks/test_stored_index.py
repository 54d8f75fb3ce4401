"""Arrays in a directory each: looked for by name where they have few chunks, and listed where not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from penstock.errors import CorruptCheckpointError
from penstock.handlers import LocalStore
from penstock.handlers.formats.orbax.tree_documents import MOST_LOOKED_FOR, directory_index
from penstock.handlers.formats.zarr import encode_v2, encode_v3
from penstock.handlers.ocdbt.wire_format import Indirect, Inline, Value
from penstock.kernel import StoreWrapper

V2 = encode_v2((4, 2), "int8", (2, 2))
V3 = encode_v3((4, 2), "int8", (2, 2))
MANY = encode_v2((MOST_LOOKED_FOR + 1,), "int8", (1,))


def put(folder: Path, files: dict[str, bytes | None]) -> None:
    """Write files by name; None makes a directory."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if data is None:
            path.mkdir()
        else:
            path.write_bytes(data)


class ListingStore(StoreWrapper):
    """A store that finds no document by its name, so that every array is listed."""

    def read_files(self, paths: Iterable[str]) -> Sequence[bytes | None]:
        return [None for _ in paths]


def listing_store() -> ListingStore:
    return ListingStore(LocalStore())


def both(folder: Path, names: list[str]) -> dict[bytes, Value]:
    """The index, which has to be the same where the store can only list."""
    quick = directory_index(LocalStore(), str(folder), names)
    assert quick == directory_index(listing_store(), str(folder), names)
    return quick


def test_arrays_of_zarr_2_and_3_are_indexed(tmp_path: Path) -> None:
    put(tmp_path, {"a/.zarray": V2, "a/0.0": b"1234", "a/1.0": b"12"})
    put(tmp_path, {"b/zarr.json": V3, "b/c/0/0": b"1234", "b/c/1/0": b"1234"})

    index = both(tmp_path, ["a"])
    assert index == {
        b"a/.zarray": Inline(V2),
        b"a/0.0": Indirect("a/0.0", 0, 4),
        b"a/1.0": Indirect("a/1.0", 0, 2),
    }
    index = directory_index(LocalStore(), str(tmp_path), ["b"])
    listed = directory_index(listing_store(), str(tmp_path), ["b"])
    folders = {key for key, value in listed.items() if value == Indirect(key.decode(), 0, -1)}
    assert folders == {b"b/c", b"b/c/0", b"b/c/1"}  # which are no chunks of this array
    assert index == {key: value for key, value in listed.items() if key not in folders}
    assert index[b"b/c/1/0"] == Indirect("b/c/1/0", 0, 4)


def test_many_chunks_are_listed(tmp_path: Path) -> None:
    put(tmp_path, {"a/.zarray": MANY, **{f"a/{at}": b"x" for at in range(MOST_LOOKED_FOR + 1)}})

    assert len(both(tmp_path, ["a"])) == MOST_LOOKED_FOR + 2


def test_what_is_missing_or_something_else(tmp_path: Path) -> None:
    put(tmp_path, {"chunk/.zarray": V2, "chunk/1.0": b"12"})
    put(tmp_path, {"folder/.zarray": V2, "folder/0.0": None})
    put(tmp_path, {"document/.zarray": None, "document/0.0": b"1"})
    put(tmp_path, {"damaged/.zarray": b"{", "damaged/0.0": b"1"})
    put(tmp_path, {"scalar/.zarray": encode_v2((), "int8", ()), "scalar/0": b"7"})
    put(tmp_path, {"none/.zarray": encode_v2((0,), "int8", (1,))})
    put(tmp_path, {"nothing": None, "file": b""})

    names = ["chunk", "folder", "damaged", "scalar", "none", "nothing", "file", "absent"]
    index = both(tmp_path, [*names, "document"])
    assert index[b"folder/0.0"] == Indirect("folder/0.0", 0, -1)
    assert b"chunk/0.0" not in index
    assert index[b"damaged/.zarray"] == Inline(b"{")
    assert b"document/.zarray" not in index
    assert both(tmp_path, []) == {}


def test_the_first_document_counts(tmp_path: Path) -> None:
    put(tmp_path, {"a/.zarray": V2, "a/zarr.json": V3, "a/0.0": b"1234"})

    index = directory_index(LocalStore(), str(tmp_path), ["a"])
    assert index == {b"a/.zarray": Inline(V2), b"a/0.0": Indirect("a/0.0", 0, 4)}


@pytest.mark.parametrize("name", ["../a", "/a", "a/../../b"])
def test_no_name_leads_out(tmp_path: Path, name: str) -> None:
    with pytest.raises(CorruptCheckpointError, match="leads out"):
        directory_index(LocalStore(), str(tmp_path), ["b", name])
