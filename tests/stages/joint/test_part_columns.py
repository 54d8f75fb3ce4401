"""What a process tells of what it wrote, and that it means the same as the objects it was made of."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import pairwise
from operator import attrgetter

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CoordinationError
from penstock.handlers.formats import integrity
from penstock.handlers.formats.orbax.chunk_index import ChunkIndex
from penstock.handlers.formats.orbax.tree_columns import TreeColumns
from penstock.handlers.layouts.items_layout import written_in
from penstock.kernel import KeyKind, LeafSpec, ParamInfo, SavePlan, Written, WrittenBatch
from penstock.kernel.messages import Leaves
from penstock.kernel.protocols import RunningSums, WrittenTable
from penstock.stages.joint.part_columns import decoded_part, encoded_part, written_by
from penstock.stages.messages.batching import check_all_there

FOLDER = "item/"
Tree = tuple[list[LeafSpec], list[Written]]


@st.composite
def blocks(draw: st.DrawFn, nbytes: int) -> RunningSums | None:
    """Return the checksums of the blocks of a piece, if it has several."""
    block_bytes = draw(st.integers(1, 20))
    n = (nbytes - 1) // block_bytes
    return RunningSums(block_bytes, draw(st.binary(min_size=4 * n, max_size=4 * n))) if n else None


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Return leaves of any chunks, some with a codec, and where each chunk lies, in one piece or several."""
    specs: list[LeafSpec] = []
    written: list[Written] = []
    ends = dict.fromkeys(draw(st.lists(st.sampled_from("abc"), min_size=1, unique=True)), 0)
    for leaf in range(draw(st.integers(1, 5))):
        grid = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
        chunk = tuple(draw(st.integers(1, 4)) for _ in grid)
        codec = draw(st.sampled_from([None, "zstd:1"]))
        shape = tuple(n * size for n, size in zip(grid, chunk, strict=True))
        specs.append(LeafSpec("jax.Array", shape, "float32", 4, chunk, chunk, codec=codec))
        for index in specs[leaf].chunk_indices():
            whole = specs[leaf].chunk_nbytes if codec is None else draw(st.integers(1, 99))
            coded = None if codec is None else whole
            file = draw(st.sampled_from(sorted(ends)))
            cuts = sorted({0, whole, *draw(st.lists(st.integers(0, whole), max_size=2))})
            for start, end in pairwise(cuts):
                name, at = f"{FOLDER}d/{file}", ends[file] + start
                crc = draw(st.integers(0, 2**32 - 1))
                running = None if coded is not None else draw(blocks(end - start))
                written.append(Written(leaf, index, start, name, at, end - start, crc, coded, running))

            ends[file] += whole

    return specs, draw(st.permutations(written))


def plan_of(specs: Sequence[LeafSpec]) -> tuple[SavePlan, TreeColumns]:
    infos = [ParamInfo((f"x{at}",), (KeyKind.MAPPING,), f"['x{at}']") for at in range(len(specs))]
    leaves = Leaves(range(len(specs)), specs, None, infos, [])
    return SavePlan(infos=infos, specs=specs, handlers=[]), TreeColumns.of(leaves)


def decoded(specs: Sequence[LeafSpec], data: bytes) -> WrittenBatch:
    return written_by(specs, {1: decoded_part(data)})


def as_row(part: Written) -> tuple[object, ...]:
    return part.leaf, part.chunk, part.start, part.file, part.offset, part.nbytes, part.crc32c, part.coded


@given(trees())
def test_what_is_decoded_is_what_was_written(tree: Tree) -> None:
    specs, written = tree
    found = decoded(specs, encoded_part([WrittenBatch((), WrittenTable.of(written, specs))]))

    order = attrgetter("leaf", "chunk", "start")
    assert list(map(as_row, found.parts())) == list(map(as_row, sorted(written, key=order)))


@given(trees())
def test_documents_made_of_columns_are_those_made_of_objects(tree: Tree) -> None:
    specs, written = tree
    plan, columns = plan_of(specs)
    # As of two processes, each of which has whole chunks.
    halves = [[part for part in written if hash((part.leaf, part.chunk)) % 2 == half] for half in (0, 1)]
    objects = [WrittenBatch((), WrittenTable.of(written, specs))]
    told = [decoded_part(encoded_part([WrittenBatch((), WrittenTable.of(half, specs))])) for half in halves]
    parts = [written_by(specs, dict(enumerate(told, 1)))]

    check_all_there(plan, specs, parts)
    fixed = {"node_file": "d/nodes", "uuid": bytes(16), "commit_time_ns": 1}
    index = ChunkIndex(columns)
    assert index.encode(parts, **fixed) == index.encode(objects, **fixed)  # type: ignore[arg-type]
    # Data files are named in another order, which means nothing.
    record = [msgpack.unpackb(integrity.encode(batches, {})) for batches in (parts, objects)]
    assert record[0] == record[1]


def test_what_two_processes_say_of_files_is_told_apart() -> None:
    specs = [LeafSpec("jax.Array", (4,), "float32", 4, (2,), (2,))]
    parts = {
        process: decoded_part(
            encoded_part(
                [
                    WrittenBatch(
                        (), WrittenTable.of([Written(0, (chunk,), 0, f"d/{process}", 0, 8, chunk)], specs)
                    )
                ]
            )
        )
        for process, chunk in ((2, 0), (7, 1))
    }
    together = written_by(specs, parts)
    assert [(part.chunk, part.file) for part in together.parts()] == [((0,), "d/2"), ((1,), "d/7")]
    assert set(msgpack.unpackb(integrity.encode([together], {}))["files"]) == {"d/2", "d/7"}


def test_what_hundreds_of_processes_say_stays_in_their_order() -> None:
    count = 600
    specs = [LeafSpec("jax.Array", (count,), "float32", 4, (1,), (1,))]
    written = [Written(0, (process,), 0, f"d/{process}", 8 * process, 4, process) for process in range(count)]
    parts = {
        process: decoded_part(encoded_part([WrittenBatch((), WrittenTable.of([written[process]], specs))]))
        for process in reversed(range(count))
    }
    assert list(map(as_row, written_by(specs, parts).parts())) == list(map(as_row, written))


@given(trees())
def test_an_item_has_what_was_written_into_its_folder(tree: Tree) -> None:
    specs, written = tree
    part = decoded(specs, encoded_part([WrittenBatch((), WrittenTable.of(written, specs))]))

    assert [list(each.written) for each in written_in("other", [part])] in ([], [[]])
    (inside,) = written_in(FOLDER[:-1], [part])
    assert [as_row(one)[4:] for one in inside.written] == [as_row(one)[4:] for one in part.written]
    assert all(not one.file.startswith(FOLDER) for one in inside.written)


@pytest.mark.parametrize("change", ["leaf", "chunk", "file", "start"])
def test_what_names_something_that_is_not_there_is_refused(change: str) -> None:
    specs = [LeafSpec("jax.Array", (4,), "float32", 4, (2,), (2,))]
    data = encoded_part([WrittenBatch((), WrittenTable.of([Written(0, (1,), 0, "d/a", 0, 8, 1)], specs))])
    found = msgpack.unpackb(zlib.decompress(data))
    at = ("leaf", "chunk", "start", "file").index(change)
    wrong = (-1 if change == "start" else 7).to_bytes(8, "little", signed=True)
    found["columns"][at] = wrong

    with pytest.raises(CoordinationError, match="cannot be read"):
        decoded(specs, zlib.compress(msgpack.packb(found)))


@pytest.mark.parametrize("data", [b"", b"x", zlib.compress(b"\x81"), zlib.compress(msgpack.packb([1]))])
def test_what_is_no_part_is_refused(data: bytes) -> None:
    with pytest.raises(CoordinationError, match="do all processes run one penstock"):
        decoded([], data)


@pytest.mark.parametrize("running", [b"", b"1234", bytes(12)])
def test_another_number_of_checksums_than_of_blocks_is_refused(running: bytes) -> None:
    specs = [LeafSpec("jax.Array", (4,), "float32", 4, (4,), (4,))]
    part = Written(0, (0,), 0, "d/a", 0, 16, 1, running=RunningSums(6, bytes(8)))
    found = msgpack.unpackb(zlib.decompress(encoded_part([WrittenBatch((), WrittenTable.of([part], specs))])))

    with pytest.raises(CoordinationError, match="another number of checksums"):
        decoded(specs, zlib.compress(msgpack.packb({**found, "running": running})))
