"""What was decoded before is known again by all of its bytes, and by nothing less."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import CorruptCheckpointError
from penstock.handlers import LocalStore, OrbaxLayout
from penstock.handlers.formats.orbax.stored_checkpoint import OrbaxCheckpoint
from penstock.handlers.formats.orbax.tree_documents import RememberedDocuments

SHARDING = '{"sharding_type": "SingleDeviceSharding", "device_str": "cpu:0"}'


class Decoder:
    """Counts its calls, and fails for what begins with a !."""

    def __init__(self) -> None:
        self.calls: list[bytes] = []

    def __call__(self, path: str, data: bytes) -> list[str]:
        self.calls.append(data)
        if data.startswith(b"!"):
            raise CorruptCheckpointError(path, "is damaged")

        return [data.decode()]


def test_equal_documents_are_decoded_once() -> None:
    remembered, decoder = RememberedDocuments(), Decoder()
    first = remembered.decode("a", decoder, "p", b"one")
    assert remembered.decode("a", decoder, "q", bytes(bytearray(b"one"))) is first
    assert remembered.decode("a", decoder, "p", b"two") == ["two"]
    assert remembered.decode("b", decoder, "p", b"one") is not first
    assert decoder.calls == [b"one", b"two", b"one"]


def test_the_cache_keeps_the_last_few_documents() -> None:
    remembered, decoder = RememberedDocuments(), Decoder()
    few = [str(at).encode() for at in range(8)]
    for data in [*few, *few, b"another", *few[1:], b"0"]:
        remembered.decode("a", decoder, "p", data)
    assert decoder.calls == [*few, b"another", b"0"]


def test_an_error_is_not_remembered() -> None:
    remembered, decoder = RememberedDocuments(), Decoder()
    for path in "pq":
        with pytest.raises(CorruptCheckpointError, match=f"{path}: is damaged"):
            remembered.decode("a", decoder, path, b"!")
    assert len(decoder.calls) == 2


def write(directory: Path, make_leaf: Any, write_flat: Any, n: int = 5, **changes: Any) -> Path:
    values = [np.full(changes.get("size", 3), at, np.float32) for at in range(n)]
    leaves = [
        make_leaf(at, (changes.get("name", "a"), at), "jax.Array", like=value, sharding=SHARDING)
        for at, value in enumerate(values)
    ]
    texts = [make_leaf(n, ("text",), "string", text=changes.get("text", "x"))]
    write_flat(directory, [*leaves, *texts], dict(enumerate(values)))
    return directory


def open_(layout: OrbaxLayout, path: Path) -> OrbaxCheckpoint:
    return layout.open(LocalStore(), str(path))


def said_of(checkpoint: OrbaxCheckpoint) -> list[object]:
    return [(leaf.info, leaf.spec, leaf.detail) for leaf in checkpoint.leaves]


def test_checkpoints_of_one_tree_share_what_is_said_of_their_leaves(
    tmp_path: Path, make_leaf: Any, write_flat: Any
) -> None:
    layout = OrbaxLayout()
    first = open_(layout, write(tmp_path / "1", make_leaf, write_flat))
    second = open_(layout, write(tmp_path / "2", make_leaf, write_flat))

    assert first.leaves.table is second.leaves.table
    assert first.leaves[0].info.directory != second.leaves[0].info.directory
    places = [checkpoint.whole_chunks(range(5)) for checkpoint in (first, second)]
    assert places[0].files != places[1].files
    assert places[0].offsets == places[1].offsets


@pytest.mark.parametrize("change", [{"n": 4}, {"n": 6}, {"size": 4}, {"name": "b"}, {"text": "y"}], ids=str)
def test_another_tree_is_described_anew(
    change: dict[str, Any], tmp_path: Path, make_leaf: Any, write_flat: Any
) -> None:
    layout = OrbaxLayout()
    first = open_(layout, write(tmp_path / "1", make_leaf, write_flat))
    other = write(tmp_path / "2", make_leaf, write_flat, **change)
    second = open_(layout, other)

    assert first.leaves.table is not second.leaves.table
    assert said_of(second) == said_of(open_(OrbaxLayout(), other))
    assert said_of(open_(layout, tmp_path / "1")) == said_of(first)


def test_a_document_that_is_damaged_later_is_damaged(tmp_path: Path, make_leaf: Any, write_flat: Any) -> None:
    layout = OrbaxLayout()
    path = write(tmp_path / "1", make_leaf, write_flat)
    open_(layout, path)
    for name in ("_METADATA", "_sharding", "_strings.json", "array_metadatas/process_0", "manifest.ocdbt"):
        whole = (path / name).read_bytes()
        (path / name).write_bytes(whole[:-1])
        with pytest.raises(CorruptCheckpointError, match=name):
            open_(layout, path)
        (path / name).write_bytes(whole)

    document = json.loads((path / "_METADATA").read_bytes())
    document["tree_metadata"]["('a', '0')"]["value_metadata"]["value_type"] = "np.ndarray"
    (path / "_METADATA").write_text(json.dumps(document))
    assert open_(layout, path).leaves[0].spec.typestr == "np.ndarray"


def test_cached_documents_cannot_be_changed_by_callers(
    tmp_path: Path, make_leaf: Any, write_flat: Any
) -> None:
    layout = OrbaxLayout()
    path = write(tmp_path / "1", make_leaf, write_flat)
    first = said_of(open_(layout, path))
    found = open_(layout, path).leaves
    with pytest.raises((TypeError, AttributeError)):
        found[0].spec.shape = (1,)  # type: ignore[misc]  # it is frozen

    assert said_of(open_(layout, path)) == first
