"""What of the parts of several processes is copied, and where it comes to be."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from penstock.errors import CorruptCheckpointError
from penstock.handlers.formats import integrity
from penstock.handlers.formats.integrity import Checksums, digest_of
from penstock.handlers.formats.orbax.joined_parts import FileShare, Move, PartRecord, join_parts
from penstock.handlers.ocdbt.wire_format import Indirect, Inline, Value

ALIGNED = 4096


def record(
    process: int,
    chunks: Mapping[bytes, tuple[int, int]],
    nbytes: int,
    sums: Sequence[tuple[int, int, int]] | None = None,
    documents: Mapping[str, bytes] | None = None,
) -> PartRecord:
    """Return the part of a process with one data file: offset and length of each chunk."""
    file = f"ocdbt.process_{process}/d/{process:032x}"
    places: list[tuple[bytes, Value]] = [(b"w/.zarray", Inline(b"{}"))]
    places += [(key, Indirect(file, offset, length)) for key, (offset, length) in chunks.items()]
    rows = Checksums.of([(*chunk, 7) for chunk in chunks.values()] if sums is None else sums)
    found = documents or {"_METADATA": b"{}"}
    raw = integrity.encode_files(
        {file: integrity.columns(list(rows), rows)} if len(rows) else {},
        {},
        {name: digest_of(data) for name, data in found.items()},
    )
    return PartRecord({file: nbytes}, found, {"": raw}, {"": places})


def file_of(process: int) -> str:
    return f"ocdbt.process_{process}/d/{process:032x}"


def test_what_several_have_is_brought_by_the_first_and_the_rest_of_a_file_stays() -> None:
    parts = {
        0: record(0, {b"w/0": (0, 10_000), b"b": (10_000, 100)}, 10_100),
        1: record(1, {b"w/1": (0, 10_000), b"b": (10_000, 100)}, 10_100),
        2: record(2, {b"w/0": (0, 10_000), b"c": (10_000, 100)}, 10_100),
    }
    joined = join_parts(parts, time.time_ns())
    whole = FileShare(10_100, (Move(0, 10_100, 0),))
    assert joined.shares == {
        0: {file_of(0): whole},
        1: {file_of(1): whole},  # of which almost all is needed
        2: {file_of(2): FileShare(10_000 % ALIGNED + 100, (Move(10_000, 10_100, 10_000 % ALIGNED),))},
    }
    names = [document.path for document in joined.documents]
    assert names[1:] == ["manifest.ocdbt", "_METADATA", "_PENSTOCK_INTEGRITY"]
    (raw,) = [document.data for document in joined.documents if document.path == "_PENSTOCK_INTEGRITY"]
    found = integrity.decode("", raw)
    assert [tuple(row) for row in found.files[file_of(2)]] == [(10_000 % ALIGNED, 100, 7)]
    assert set(found.documents) == set(names) - {"_PENSTOCK_INTEGRITY"}


def test_who_has_nothing_of_its_own_brings_nothing() -> None:
    chunks = {b"w/0": (0, 1000), b"w/1": (1000, 1000)}
    parts = {index: record(index, chunks, 2000) for index in (3, 5)}
    assert join_parts(parts, 1).shares == {3: {file_of(3): FileShare(2000, (Move(0, 2000, 0),))}, 5: {}}


def test_a_checksum_of_several_chunks_keeps_them_together() -> None:
    parts = {
        0: record(0, {b"a": (0, 10), b"z": (50, 10)}, 60),
        1: record(1, {b"a": (0, 10), b"b": (10, 10), b"x": (9000, 10)}, 20_000, [(0, 20, 1), (9000, 10, 2)]),
    }
    joined = join_parts(parts, 1)
    share = joined.shares[1][file_of(1)]
    assert [(move.start, move.end) for move in share.moves] == [(0, 20), (9000, 9010)]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_moved_keeps_its_place_in_a_page_and_overlaps_nothing(seed: int) -> None:
    rng = random.Random(seed)
    edges = sorted(rng.sample(range(200_000), 80))
    spans = {
        f"k{at}".encode(): (start, end - start)
        for at, (start, end) in enumerate(zip(edges[::2], edges[1::2], strict=True))
    }
    taken = {key: span for key, span in spans.items() if rng.random() < 0.6}
    parts = {0: record(0, taken, 200_000), 1: record(1, spans, 200_000)}
    joined = join_parts(parts, 1)
    share = joined.shares[1].get(file_of(1))
    left = [span for key, span in spans.items() if key not in taken]
    assert share is not None
    written = np.zeros(share.nbytes, np.int64)
    for move in share.moves:
        assert move.to % ALIGNED == move.start % ALIGNED
        written[move.to : move.to + move.end - move.start] += 1

    assert written.max() == 1
    for offset, length in left:
        moved = share.moved(offset)
        assert (written[moved : moved + length] == 1).all()


def test_leaves_that_one_process_alone_has_come_in_the_order_of_the_tree() -> None:
    def tree(process: int) -> dict[str, bytes]:
        names = ["('a',)", f"('own', 'process_{process}-of-2', 'p')", "('x',)"]
        metadata = {"tree_metadata": {name: {"n": 1} for name in names}, "use_ocdbt": True}
        strings = {"own": {f"process_{process}-of-2": {"s": f"h{process}"}}, "t": "same"}
        arrays = {"array_metadatas": [{"name": "a"}, {"name": f"own{process}"}]}
        return {
            "_METADATA": json.dumps(metadata).encode(),
            "_strings.json": json.dumps(strings).encode(),
            "array_metadatas/process_0": json.dumps(arrays).encode(),
        }

    parts = {index: record(index, {b"a": (0, 10)}, 10, documents=tree(index)) for index in range(2)}
    found = {document.path: document.data for document in join_parts(parts, 1).documents}
    assert list(json.loads(found["_METADATA"])["tree_metadata"]) == [
        "('a',)",
        "('own', 'process_0-of-2', 'p')",
        "('own', 'process_1-of-2', 'p')",
        "('x',)",
    ]
    own = {f"process_{index}-of-2": {"s": f"h{index}"} for index in range(2)}
    assert json.loads(found["_strings.json"]) == {"own": own, "t": "same"}
    names = [each["name"] for each in json.loads(found["array_metadatas/process_0"])["array_metadatas"]]
    assert names == ["a", "own0", "own1"]


def test_a_part_is_told_as_it_is_and_what_is_none_is_refused() -> None:
    part = record(1, {b"w/1": (0, 10_000), b"b": (10_000, 100)}, 10_100)
    assert PartRecord.decoded("told", part.encoded()) == part
    outside = PartRecord({"../x": 1}, {}, {"": b""})
    for told in (b"", part.encoded()[:-5], outside.encoded()):
        with pytest.raises(CorruptCheckpointError):
            PartRecord.decoded("told", told)
