"""What penstock writes: equal to what Orbax writes where it must be, and readable by Orbax."""

from __future__ import annotations

import gc
import itertools
import json
from base64 import urlsafe_b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest
from crc32c import crc32c
from orbax.checkpoint.experimental import v1 as ocp_v1

from penstock import SaveFormat
from penstock.errors import DuplicateNameError, InvalidLeafError, PenstockError, SpecError
from penstock.handlers import LocalStore, OrbaxLayout
from penstock.handlers.formats.orbax.orbax_layout import EncodedTree
from penstock.handlers.formats.orbax.tree_columns import TreeColumns
from penstock.handlers.ocdbt.wire_format import Indirect, Inline
from penstock.kernel import Document, Layout, Leaf, ParamInfo, Written, WrittenBatch
from penstock.kernel.protocols import WrittenTable

W = np.arange(24, dtype=np.float32).reshape(4, 6)
N = np.array([-1, 2, 3], np.int16)
KEY_DATA = np.array([0, 7], np.uint32)
SHARDING = '{"sharding_type": "SingleDeviceSharding", "device_str": "cpu:0"}'

# Orbax warns whenever it takes shardings from the file, which is what is tried here.
ORBAX_READS_SHARDINGS = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")


@pytest.fixture(scope="module")
def by_orbax(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("orbax") / "ckpt"
    tree = {
        "empty": [{}, [], (), None],
        "key": jax.random.key(7),
        "n": N,
        "pair": {"a/b": "slash", "t~1": "tilde"},
        "step": 3,
        "w": jnp.asarray(W),
        "z": jnp.asarray(W[0, 0]),
    }
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as checkpointer:
        checkpointer.save(path, ocp.args.PyTreeSave(tree))
    return path


@pytest.fixture(scope="module")
def leaves(make_leaf: Any) -> list[Leaf]:
    on_device = {"typestr": "jax.Array", "sharding": SHARDING}
    return [
        make_leaf(0, ("empty", 0), "Dict"),
        make_leaf(1, ("empty", 1), "List"),
        make_leaf(2, ("empty", 2), "Tuple"),
        make_leaf(3, ("empty", 3), "None"),
        make_leaf(4, ("key",), **on_device, like=KEY_DATA, write_shape=(2,), extended_dtype="threefry2x32"),
        make_leaf(5, ("n",), like=N),
        make_leaf(6, ("pair", "a/b"), "string", text="slash"),
        make_leaf(7, ("pair", "t~1"), "string", text="tilde"),
        make_leaf(8, ("step",), "scalar", like=np.array(3)),
        make_leaf(9, ("w",), **on_device, like=W, write_shape=(4, 6)),
        make_leaf(10, ("z",), **on_device, like=W[0, 0], write_shape=()),
    ]


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory, leaves: list[Leaf], write_flat: Any) -> Path:
    path = tmp_path_factory.mktemp("ours") / "ckpt"
    arrays = {4: KEY_DATA, 5: N, 8: np.array(3), 9: W, 10: W[0, 0]}
    write_flat(path, leaves, arrays, piece_bytes=40, custom_metadata={"lr": 0.1})
    return path


@pytest.mark.parametrize("name", ["_METADATA", "array_metadatas/process_0", "_strings.json"])
def test_documents_are_those_of_orbax_byte_for_byte(name: str, ours: Path, by_orbax: Path) -> None:
    assert (ours / name).read_bytes() == (by_orbax / name).read_bytes()


def test_shardings_are_those_of_orbax(ours: Path, by_orbax: Path) -> None:
    assert json.loads((ours / "_sharding").read_bytes()) == json.loads((by_orbax / "_sharding").read_bytes())


def test_checkpoint_metadata_has_the_members_of_orbax_and_no_other(ours: Path, by_orbax: Path) -> None:
    mine = json.loads((ours / "_CHECKPOINT_METADATA").read_bytes())
    theirs = json.loads((by_orbax / "_CHECKPOINT_METADATA").read_bytes())

    assert mine.keys() == theirs.keys()
    assert mine["item_handlers"] == theirs["item_handlers"]
    assert mine["custom_metadata"] == {"lr": 0.1}
    assert mine["init_timestamp_nsecs"] == 1
    assert mine["commit_timestamp_nsecs"] > mine["init_timestamp_nsecs"]


def test_the_index_has_the_keys_of_orbax_and_the_same_array_metadata(ours: Path, by_orbax: Path) -> None:
    def index(path: Path) -> dict[bytes, object]:
        found = OrbaxLayout().open(LocalStore(), str(path)).index
        return {key: value if key.endswith(b".zarray") else None for key, value in found.items()}

    assert index(ours) == index(by_orbax)


@ORBAX_READS_SHARDINGS
def test_orbax_v0_restores_what_we_wrote(ours: Path) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.restore(ours)

    check_restored(tree)


@ORBAX_READS_SHARDINGS
def test_orbax_v1_restores_what_we_wrote(ours: Path) -> None:
    check_restored(ocp_v1.load(str(ours)))


def check_restored(tree: Any) -> None:
    assert tree["empty"] == [{}, [], (), None]
    assert tree["pair"] == {"a/b": "slash", "t~1": "tilde"}
    assert tree["step"] == 3
    assert isinstance(tree["w"], jax.Array)
    assert jnp.issubdtype(tree["key"].dtype, jax.dtypes.prng_key)
    np.testing.assert_array_equal(tree["w"], W)
    np.testing.assert_array_equal(tree["z"], W[0, 0])
    np.testing.assert_array_equal(tree["n"], N)
    np.testing.assert_array_equal(jax.random.key_data(tree["key"]), KEY_DATA)


def test_the_commit_mark_comes_last_and_the_manifest_after_its_nodes(
    leaves: list[Leaf], write_flat: Any, tmp_path: Path
) -> None:
    arrays = {4: KEY_DATA, 5: N, 8: np.array(3), 9: W, 10: W[0, 0]}
    names = [document.path for document in write_flat(tmp_path, leaves, arrays)]

    assert names[0].startswith("d/")
    assert names[1:] == [
        "manifest.ocdbt",
        "_METADATA",
        "_sharding",
        "array_metadatas/process_0",
        "_strings.json",
        "_CHECKPOINT_METADATA",
        "_PENSTOCK_INTEGRITY",
        "commit_success.txt",
    ]


def test_checksums_of_all_pieces_are_recorded(ours: Path) -> None:
    document = msgpack.unpackb((ours / "_PENSTOCK_INTEGRITY").read_bytes())

    assert document["version"] == 2
    ((file, columns),) = document["files"].items()
    offsets = np.frombuffer(columns["offsets"], "<u8").tolist()
    ends = [0, *itertools.accumulate(np.frombuffer(columns["nbytes"], "<u8").tolist())]
    assert offsets == ends[:-1]
    assert ends[-1] == (ours / file).stat().st_size
    data = (ours / file).read_bytes()
    parts = [data[start:end] for start, end in itertools.pairwise(ends)]
    assert np.frombuffer(columns["crc32c"], "<u4").tolist() == [crc32c(part) for part in parts]


def documents(leaves: list[Leaf], written: tuple[Written, ...] = ()) -> dict[str, bytes]:
    batches = [WrittenBatch((), WrittenTable.of(written, [leaf.spec for leaf in leaves]))]
    made: Any = OrbaxLayout().documents(leaves, batches, started_ns=1, custom_metadata=None)
    return {document.path: document.data for document in made}


def test_of_a_large_tree_one_document_is_in_memory_at_a_time(leaves: list[Leaf]) -> None:
    """They are those of a tree that is encoded once, but for what each checkpoint has of its own."""
    arrays = [leaf for leaf in leaves if leaf.spec.shape is not None]
    written = [
        Written(leaf.index, (0,) * len(leaf.spec.grid_shape), 0, "d/a", 0, leaf.nbytes, 0) for leaf in arrays
    ]
    seen: list[int] = []

    class Watched(list[ParamInfo]):
        """Places of leaves, looked at while a document is made."""

        def __iter__(self) -> Iterator[ParamInfo]:
            seen.append(in_memory())
            return super().__iter__()

    def made(is_kept: bool) -> Iterator[Document]:
        columns = TreeColumns.of(leaves)
        watched = TreeColumns(columns.indices, Watched(columns.infos), columns.specs)
        tree = EncodedTree(watched, SaveFormat(), is_kept=is_kept)
        return tree.documents(
            [WrittenBatch((), WrittenTable.of(written, {leaf.index: leaf.spec for leaf in arrays}))],
            1,
            {},
            about=Document("_CHECKPOINT_METADATA", b'{"custom_metadata": {"a": 1}}'),
        )

    def in_memory() -> int:
        found = [each.path for each in gc.get_objects() if isinstance(each, Document)]
        return len([path for path in found if path != "_CHECKPOINT_METADATA"])  # which is small

    gc.collect()
    before, one_by_one = in_memory(), dict[str, int]()
    for document in made(is_kept=False):
        one_by_one["nodes" if document.path.startswith("d/") else document.path] = len(document.data)
        del document

    assert set(seen) == {before}
    at_once = {"nodes" if each.path.startswith("d/") else each.path: len(each.data) for each in made(True)}
    assert list(one_by_one) == list(at_once)
    of_each = {"_CHECKPOINT_METADATA", "_PENSTOCK_INTEGRITY", "commit_success.txt"}  # times and digests
    differ = {name for name, size in one_by_one.items() if size != at_once[name]}
    assert differ <= of_each


def test_a_tree_without_arrays_has_no_index_no_shardings_and_no_strings(make_leaf: Any) -> None:
    made = documents([make_leaf(0, ("a",), "None"), make_leaf(1, ("b",), "mine.Type")])

    assert made.keys() == {"_METADATA", "_CHECKPOINT_METADATA", "_PENSTOCK_INTEGRITY", "commit_success.txt"}
    entries = json.loads(made["_METADATA"])["tree_metadata"]
    assert entries["('b',)"]["value_metadata"] == {"value_type": "mine.Type", "skip_deserialize": False}


def test_shardings_are_written_for_every_jax_array_or_not_at_all(make_leaf: Any) -> None:
    like = np.zeros((0, 2), np.float32)
    first = make_leaf(0, ("a",), "jax.Array", like=like, sharding=SHARDING)
    second = make_leaf(1, ("b",), "jax.Array", like=like)

    assert "_sharding" not in documents([first, second])
    (key,) = json.loads(documents([first])["_sharding"])
    assert urlsafe_b64decode(key) == b"a"


def test_leaves_are_listed_in_flatten_order_whatever_order_they_arrive_in(make_leaf: Any) -> None:
    leaves = [make_leaf(i, (name,), "None") for i, name in enumerate("cab")]

    entries = json.loads(documents(leaves[::-1])["_METADATA"])["tree_metadata"]

    assert list(entries) == ["('c',)", "('a',)", "('b',)"]


def test_an_array_of_many_axes_outgrows_the_inline_limit_and_is_read_back(
    make_leaf: Any, write_flat: Any, tmp_path: Path
) -> None:
    like = np.zeros((0, *(2,) * 30), np.int8)
    chunk_shapes = [(10**digits,) * 31 for digits in (1, 20, 40)]
    wide = [
        make_leaf(i, (str(i),), like=like, chunk_shape=chunk_shape)
        for i, chunk_shape in enumerate(chunk_shapes)
    ]
    write_flat(tmp_path, wide, {})

    checkpoint = OrbaxLayout().open(LocalStore(), str(tmp_path))

    kinds = {type(checkpoint.index[f"{i}/.zarray".encode()]) for i in range(3)}
    assert kinds == {Inline, Indirect}
    assert [leaf.spec.chunk_shape for leaf in checkpoint.leaves] == chunk_shapes


def test_two_leaves_of_one_stored_name_are_refused(make_leaf: Any) -> None:
    leaves = [make_leaf(0, ("a", "b"), "mine"), make_leaf(1, ("a.b",), "mine")]

    with pytest.raises(
        DuplicateNameError, match=r"\['a'\]\['b'\] and \['a\.b'\] would both be stored as 'a.b'"
    ):
        documents(leaves)


def test_empty_markers_take_no_name(make_leaf: Any) -> None:
    assert documents([make_leaf(0, ("a", "b"), "None"), make_leaf(1, ("a.b",), "mine")])


@pytest.mark.parametrize("names", [("a", "a/b"), ("a/b", "a"), ("a/b/c", "a/b")])
def test_strings_whose_pointers_collide_are_refused(names: tuple[str, str], make_leaf: Any) -> None:
    leaves = [make_leaf(i, (name,), "string", text="x") for i, name in enumerate(names)]

    with pytest.raises(InvalidLeafError, match="collides"):
        documents(leaves)


def test_a_string_under_a_name_that_is_no_json_pointer_is_refused(make_leaf: Any) -> None:
    with pytest.raises(InvalidLeafError, match=r"\['a~'\]: .*'~'"):
        documents([make_leaf(0, ("a~",), "string", text="x")])


def test_custom_metadata_that_is_not_json_is_refused() -> None:
    with pytest.raises(SpecError, match="custom_metadata cannot be written as JSON"):
        OrbaxLayout().documents([], [], started_ns=1, custom_metadata={"x": object()})


def piece(
    start: int, offset: int, nbytes: int, *, file: str = "d/0", chunk: tuple[int, ...] = (0,)
) -> Written:
    return Written(0, chunk, start, file, offset, nbytes, 0)


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ((), "0 of 8 bytes"),
        ((piece(0, 0, 4),), "4 of 8 bytes"),
        ((piece(0, 0, 12),), "12 of 8 bytes"),
        ((piece(4, 4, 4),), "byte 0: next is a piece at 4"),
        ((piece(0, 0, 4), piece(2, 2, 6)), "byte 4: next is a piece at 2"),
        ((piece(0, 0, 4), piece(4, 9, 4)), "byte 4: next is a piece at 4, at 9"),
        ((piece(0, 0, 4), piece(4, 4, 4, file="d/1")), "byte 4: .*'d/1'"),
        ((piece(0, 0, 8), piece(0, 8, 8, chunk=(1,))), r"chunk \(1,\) of leaf 0 was written, but no leaf"),
    ],
)
def test_pieces_that_do_not_tile_their_chunk_fail_the_save(
    written: tuple[Written, ...], problem: str, make_leaf: Any
) -> None:
    leaf = make_leaf(0, ("a",), like=np.zeros(2, np.float32))

    with pytest.raises(PenstockError, match=problem):
        documents([leaf], written)


def test_pieces_of_a_chunk_may_arrive_in_any_order(make_leaf: Any) -> None:
    leaf = make_leaf(0, ("a",), like=np.zeros(3, np.float32))
    pieces = [piece(8, 108, 4), piece(0, 100, 4), piece(4, 104, 4)]
    made = [documents([leaf], order) for order in itertools.permutations(pieces)]

    assert {len(document) for document in made} == {6}


def test_names_of_data_files_and_of_the_temporary_directory() -> None:
    layout: Layout = OrbaxLayout()

    assert layout.temporary_name("/x/ckpt") == "/x/ckpt.orbax-checkpoint-tmp"
    first, second = layout.data_file(), layout.data_file()
    assert first != second
    assert first.startswith("d/")
    assert len(first) == 2 + 32


def test_a_document_is_plain_data(make_leaf: Any) -> None:
    made: Any = OrbaxLayout().documents(
        [make_leaf(0, ("a",), "None")], [], started_ns=1, custom_metadata=None
    )

    assert all(isinstance(document, Document) and isinstance(document.data, bytes) for document in made)
