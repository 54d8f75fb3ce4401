"""What rules make of a file, piece by piece, is what NumPy makes of it in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st
from tests.plain_rules import Leaves, apply_plainly, same_bits, trees_with_rules

from penstock.handlers.formats.integrity import Checksum, Checksums
from penstock.handlers.formats.region_reads import StoredChunk, chunk_reads, with_checksums
from penstock.handlers.leaves.stored_value import SourceFiles, StoredValue, StoredValueHandler
from penstock.handlers.stores.local import LocalStore
from penstock.kernel import KeyKind, Leaf, LeafSpec, ParamInfo
from penstock.kernel.protocols.leaf import StoredLeaf
from penstock.kernel.protocols.reads import Destination, Read
from penstock.kernel.protocols.written import Written
from penstock.rules import Concat, Pad, Repeat, Reshape, Rule, Rules, Select, Split, Transpose
from penstock.stages.rules.application import derive

PIECE = 37
"""Bytes of which a checksum is known, so that pieces end within elements and within rows."""


def info_of(name: str) -> ParamInfo:
    keys = tuple(name.split("."))
    return ParamInfo(keys, (KeyKind.MAPPING,) * len(keys), "".join(f"[{key!r}]" for key in keys))


@dataclass
class PlainFile:
    """A `StoredCheckpoint`: all leaves in one file, one after another."""

    path: str
    arrays: Leaves
    has_checksums: bool
    leaves: Sequence[StoredLeaf] = ()
    directory: str = ""
    custom_metadata: Mapping[str, Any] | None = None
    tree_custom_metadata: object = None
    root_custom_metadata: Mapping[str, Any] | None = None
    committed_at_ns: int | None = None
    digests: Mapping[str, bytes] = field(default_factory=dict[str, bytes])

    def __post_init__(self) -> None:
        data, leaves = b"", list[StoredLeaf]()
        for name, array in self.arrays.items():
            whole = tuple(size or 1 for size in array.shape)
            spec = LeafSpec("np.ndarray", array.shape, array.dtype.name, array.dtype.itemsize, whole)
            leaves.append(StoredLeaf(info_of(name), spec, len(data)))
            data += np.ascontiguousarray(array).tobytes()

        Path(self.path).write_bytes(data)
        self.leaves = leaves
        pieces = [(at, data[at : at + PIECE]) for at in range(0, len(data), PIECE)]
        recorded = [Checksum(at, len(piece), crc32c(piece)) for at, piece in pieces]
        self.recorded = {self.path: Checksums.of(recorded if self.has_checksums else ())}

    def parts(self, numbers: Sequence[int], leaves: Sequence[int]) -> Sequence[Sequence[Written]]:
        return [()] * len(numbers)

    def reads(self, index: int, stored: StoredLeaf, region: Destination, piece_bytes: int) -> Iterator[Read]:
        spec = stored.spec
        assert spec.shape is not None
        assert isinstance(stored.detail, int)
        chunk = StoredChunk(self.path, stored.detail, (0,) * len(spec.shape), spec.shape, spec.itemsize)
        return with_checksums(chunk_reads(index, chunk, region, piece_bytes), self.recorded, piece_bytes)


def read_all(checkpoint: Any, piece_bytes: int, gather_bytes: int = 2**20) -> Leaves:
    """Read each leaf as a conversion does, piece by piece."""
    handler, files = StoredValueHandler(), SourceFiles(LocalStore(), gather_bytes=gather_bytes)
    found: Leaves = {}
    for index, stored in enumerate(checkpoint.leaves):
        spec = stored.spec
        data = bytearray(spec.nbytes)
        value = StoredValue(files, checkpoint, stored)
        for piece in handler.pieces(Leaf(index, stored.info, value, spec, handler), piece_bytes):
            taken = piece.take()
            assert len(taken) == piece.nbytes
            data[piece.start : piece.start + piece.nbytes] = taken

        found[stored.info.name] = np.frombuffer(data, np.uint8).view(np.dtype(spec.dtype)).reshape(spec.shape)

    files.close()
    return found


@given(trees_with_rules(), st.booleans(), st.sampled_from([1, 16, 100, 2**20]))
def test_rules_make_what_numpy_makes(
    tmp_path_factory: Any, drawn: tuple[Leaves, list[Rule]], has_checksums: bool, piece_bytes: int
) -> None:
    leaves, rules = drawn
    source = PlainFile(str(tmp_path_factory.mktemp("plain") / "file"), leaves, has_checksums)
    wanted = apply_plainly(rules, leaves)
    derived = derive(Rules(rules, rest="keep"), source)
    found = read_all(derived, piece_bytes)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert same_bits(found[name], array), name


@pytest.mark.parametrize("gather_bytes", [2**15, 2**19])
def test_a_large_leaf_is_transposed_by_runs_of_any_length(tmp_path: Path, gather_bytes: int) -> None:
    random = np.random.default_rng(0)
    shapes = {"wide": (70, 5000), "high": (3000, 90), "deep": (20, 30, 400)}
    leaves = {name: random.integers(0, 2**31, shape, np.int32) for name, shape in shapes.items()}
    rules = [Transpose("wide"), Transpose("high"), Transpose("deep", axes=(2, 0, 1))]
    source = PlainFile(str(tmp_path / "file"), leaves, has_checksums=False)
    found = read_all(derive(Rules(rules), source), 2**14, gather_bytes)
    wanted = apply_plainly(rules, leaves)
    assert all(same_bits(found[name], array) for name, array in wanted.items())


SIZES = {"a": 3, "b": 4, "c": 2}
THREE = {name: np.arange(2 * size, dtype=np.int16).reshape(size, 2) for name, size in SIZES.items()}
JOINED = Concat(["a", "b", "c"], "d")
CHAINS: list[list[Rule]] = [
    [JOINED, Select("d", start=1, step=3)],  # a step that does not begin where a part does
    [JOINED, Select("d", start=1, step=5)],
    [JOINED, Select("d", indices=(8, 2, 3, 0, 0))],
    [JOINED, Reshape("d", shape=(2, 9))],  # over the edges of parts
    [JOINED, Transpose("d"), Reshape("d", shape=(6, 3)), Select("d", axis=1, step=2)],
    [JOINED, Repeat("d", times=3), Select("d", start=2, stop=20, step=4)],
    [JOINED, Pad("d", to_size=12, value=7), Split("d", ["e", "f"], sizes=(5, 7))],
]


@pytest.mark.parametrize("rules", CHAINS)
@pytest.mark.parametrize("piece_bytes", [1, 6, 100])
def test_rules_over_what_was_joined_make_what_numpy_makes(
    tmp_path: Path, rules: list[Rule], piece_bytes: int
) -> None:
    found = read_all(derive(Rules(rules), PlainFile(str(tmp_path / "file"), THREE, False)), piece_bytes)
    wanted = apply_plainly(rules, THREE)
    assert found.keys() == wanted.keys()
    assert all(same_bits(found[name], array) for name, array in wanted.items())
