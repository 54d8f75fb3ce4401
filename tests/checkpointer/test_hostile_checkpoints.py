"""A small checkpoint that claims much: it costs what is stored of it, or a penstock error says so."""

from __future__ import annotations

import json
import os
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.checkpointer.strange_checkpoints import STRANGE, gzip_of_zeros, zstd_of_zeros

import penstock
from penstock import SaveFormat
from penstock.config import Config
from penstock.errors import (
    CorruptCheckpointError,
    ExpansionError,
    InsufficientMemoryError,
    LinkOutsideError,
    NotAFileError,
    PenstockError,
    SpecError,
    UnsupportedFormatError,
)
from penstock.handlers import LocalStore
from penstock.handlers.formats.orbax.open_checkpoint import open_checkpoint
from penstock.handlers.leaves import SourceFiles, StoredValue, StoredValueHandler
from penstock.kernel import Leaf

STRUCT: Any = jax.ShapeDtypeStruct  # jax declares no types for it


def write_array(path: Path, zarray: dict[str, Any], name: str = "a", *, all_written: bool = False) -> Path:
    """Write a checkpoint of one array in a directory of its own, without a chunk."""
    keys = [{"key": key, "key_type": 2} for key in name.split(".")]
    entry = {"key_metadata": keys, "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False}}
    document = {
        "tree_metadata": {str(tuple(name.split("."))): entry},
        "use_ocdbt": False,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": all_written,
        "custom_metadata": None,
    }
    (path / name).mkdir(parents=True)
    (path / "_METADATA").write_text(json.dumps(document))
    (path / name / ".zarray").write_text(json.dumps(ZARRAY | zarray))
    return path


ZARRAY: dict[str, Any] = {
    "chunks": [1],
    "compressor": None,
    "dimension_separator": ".",
    "dtype": "<f4",
    "fill_value": 7.0,
    "filters": None,
    "order": "C",
    "shape": [1],
    "zarr_format": 2,
}


async def restore(
    path: Path, *, store: LocalStore | None = None, config: Config | None = None, **options: Any
) -> Any:
    async with penstock.Checkpointer(memory_limit="64MiB", store=store, config=config) as checkpointer:
        return await checkpointer.restore(path, **options)


@pytest.mark.parametrize("compressor", [None, {"id": "zstd", "level": 1}], ids=["plain", "zstd"])
async def test_chunks_that_were_never_written_are_filled_in_few_reads(
    compressor: Any, tmp_path: Path
) -> None:
    n = 2**20
    path = write_array(tmp_path / "c", {"shape": [n, 3], "chunks": [1, 1], "compressor": compressor})
    if compressor is None:
        (path / "a" / "77.1").write_bytes(np.float32(5).tobytes())

    tracemalloc.start()
    try:
        found = await restore(path, like={"a": np.zeros((n, 3), np.float32)})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 60 * 2**20  # 12 MiB are the result, and as many the target; 1.28 GB were a list of chunks
    expected = np.full((n, 3), 7, np.float32)
    if compressor is None:
        expected[77, 1] = 5
    np.testing.assert_array_equal(found["a"], expected)


async def test_the_first_missing_chunk_is_found_at_once(tmp_path: Path) -> None:
    path = write_array(tmp_path / "c", {"shape": [2**24]}, all_written=True)
    (path / "a" / "0").write_bytes(b"1234")

    with pytest.raises(CorruptCheckpointError, match="chunk 'a/1' is missing"):
        await restore(path, like={"a": STRUCT((2**24,), np.float32)})


async def test_a_result_is_compared_with_the_memory_there_is(tmp_path: Path) -> None:
    path = write_array(tmp_path / "c", {"shape": [2**45], "chunks": [2**45]})

    with pytest.raises(InsufficientMemoryError, match=r"140737488355328 bytes .*leaf is \['a'\]") as caught:
        await restore(path, like={"a": STRUCT((2**45,), np.float32)})

    assert caught.value.asked == 2**47
    assert caught.value.available is not None
    assert 2**20 < caught.value.available < 2**47


async def test_a_decoded_chunk_is_compared_with_the_memory_there_is(tmp_path: Path) -> None:
    path = write_array(tmp_path / "c", {"chunks": [2**45], "compressor": {"id": "zstd", "level": 1}})
    (path / "a" / "0").write_bytes(b"x" * 100)

    with pytest.raises(InsufficientMemoryError, match="140737488355328 bytes"):
        await restore(path, like={"a": np.zeros(1, np.float32)})


def write_hole(path: Path, nbytes: int) -> None:
    with path.open("wb") as file:
        file.write(b"\0")
        file.truncate(nbytes)


async def test_an_array_of_holes_is_restored_only_if_that_is_allowed(tmp_path: Path) -> None:
    n = 2**24 + 1
    path = write_array(tmp_path / "c", {"shape": [n], "chunks": [n]})
    write_hole(path / "a" / "0", 4 * n)

    with pytest.raises(ExpansionError, match=r"of 67108868 bytes, and stores .*leaf \['a'\]") as caught:
        await restore(path)

    assert caught.value.stored_bytes <= 2**16
    assert (caught.value.result_bytes, caught.value.most) == (4 * n, 1000)
    like = {"a": np.zeros(n, np.float32)}
    assert not (await restore(path, like=like))["a"].any()
    assert not (await restore(path, max_expansion=10**6))["a"].any()
    config = Config.load(environ={"PENSTOCK_RESTORE__PLAN__MAX_EXPANSION": "1000000"})
    assert not (await restore(path, config=config))["a"].any()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("ocdbt", [True, False])
@pytest.mark.parametrize("zarr", [2, 3])
async def test_a_sound_array_that_a_codec_made_very_small_is_restored(
    ocdbt: bool, zarr: Any, tmp_path: Path
) -> None:
    tree: dict[str, Any] = {"a": np.ones(2**24 + 1, np.float32), "b": np.arange(5)}
    form = SaveFormat(codec="zstd", ocdbt=ocdbt, zarr=zarr)
    async with penstock.Checkpointer(save_format=form) as checkpointer:
        await (await checkpointer.save(tmp_path / "c", tree))

    assert 1000 * sum(file.stat().st_size for file in (tmp_path / "c").rglob("*")) < tree["a"].nbytes
    np.testing.assert_array_equal((await restore(tmp_path / "c"))["a"], tree["a"])
    with pytest.raises(ExpansionError, match="more than 900 times"):
        await restore(tmp_path / "c", max_expansion=900)

    found = await restore(tmp_path / "c", only="b")
    np.testing.assert_array_equal(found["b"], np.arange(5))
    assert (await restore(tmp_path / "c", like=tree))["a"].all()


async def test_a_codec_accounts_for_no_chunk_that_was_never_written(tmp_path: Path) -> None:
    n = 2**20
    path = write_array(tmp_path / "c", {"shape": [2**10 * n], "chunks": [n], "compressor": {"id": "zstd"}})
    (path / "a" / "0").write_bytes(zstd_of_zeros(4 * n))

    with pytest.raises(ExpansionError, match=r"leaf \['a'\]"):
        await restore(path)


async def test_a_codec_accounts_for_no_hole(tmp_path: Path) -> None:
    n = 2**28
    path = write_array(tmp_path / "c", {"shape": [n], "chunks": [n], "compressor": {"id": "zstd"}})
    write_hole(path / "a" / "0", 2**20)

    with pytest.raises(ExpansionError, match=r"leaf \['a'\]"):
        await restore(path)


async def test_links_that_lead_out_are_refused(tmp_path: Path) -> None:
    path = write_array(tmp_path / "c", {})
    (path / "a" / "0").write_bytes(np.float32(3).tobytes())
    (path / "a").rename(path / "elsewhere")
    (path / "a").symlink_to("elsewhere")
    assert (await restore(path))["a"] == 3  # it leads to another place inside

    (path / "elsewhere").rename(tmp_path / "outside")
    (path / "a").unlink()
    (path / "a").symlink_to("../outside")
    with pytest.raises(
        LinkOutsideError, match=r"/a: is a link out of the checkpoint, to '.*/outside'"
    ) as caught:
        await restore(path)

    assert caught.value.target == str(tmp_path / "outside")
    assert (await restore(path, store=LocalStore(links="any")))["a"] == 3


@pytest.mark.parametrize("name", ["c-more", "c.safetensors", "cc"])
async def test_a_name_that_begins_like_the_checkpoints_lies_outside(tmp_path: Path, name: str) -> None:
    path = write_array(tmp_path / "c", {})
    (path / "a" / "0").write_bytes(np.float32(3).tobytes())
    (path / "a").rename(tmp_path / name)
    (path / "a").symlink_to(f"../{name}")
    with pytest.raises(LinkOutsideError):
        await restore(path)


async def test_a_checkpoint_may_itself_be_a_link(tmp_path: Path) -> None:
    path = write_array(tmp_path / "elsewhere" / "c", {})
    (path / "a" / "0").write_bytes(np.float32(3).tobytes())
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "7").symlink_to(path)

    assert (await restore(tmp_path / "steps" / "7"))["a"] == 3
    assert (await restore(tmp_path / "steps"))["a"] == 3


async def test_tensors_of_the_hub_are_links_to_its_blobs(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "1f", tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file({"a": np.ones(3)}, blobs / "0a")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0a")
    np.testing.assert_array_equal((await restore(snapshot))["a"], np.ones(3))

    (blobs / "0a").rename(tmp_path / "0a")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to("../../../0a")
    with pytest.raises(LinkOutsideError):
        await restore(snapshot)


@pytest.mark.parametrize(
    "shape", [[2**60], [2**63], [2**62, 2**62], [10**300], [1] * 65], ids=lambda shape: f"{len(shape)} axes"
)
@pytest.mark.parametrize("target", [True, False], ids=["like", "no like"])
async def test_a_shape_beyond_any_memory(shape: list[int], target: bool, tmp_path: Path) -> None:
    path = write_array(tmp_path / "c", {"shape": shape, "chunks": [1] * len(shape)})
    options: Any = {"like": {"a": np.zeros(1, np.float32)}} if target else {}

    with pytest.raises(PenstockError):
        await restore(path, **options)


async def test_metadata_of_a_huge_grid_is_read_at_once(tmp_path: Path) -> None:
    path = write_array(tmp_path / "c", {"shape": [2**40]})
    (path / "a" / "123456").write_bytes(b"1234")

    async with penstock.Checkpointer() as checkpointer:
        about = await checkpointer.metadata(path)

    assert [leaf.stored_nbytes for leaf in about.leaves] == [4]


@pytest.mark.parametrize("place", ["_METADATA", "a/.zarray", "a/0", "_sharding", "_CHECKPOINT_METADATA"])
async def test_a_pipe_in_the_place_of_a_file(place: str, tmp_path: Path) -> None:
    path = write_array(tmp_path / "c", {"compressor": {"id": "zstd", "level": 1}})
    (path / place).unlink(missing_ok=True)
    os.mkfifo(path / place)

    with pytest.raises(NotAFileError if place != "a/0" else CorruptCheckpointError, match=r"no.* file"):
        await restore(path)


async def test_a_key_that_is_half_a_character(tmp_path: Path) -> None:
    path = write_array(tmp_path / "c", {}, "x")
    text = (path / "_METADATA").read_text()
    (path / "_METADATA").write_text(text.replace('"key": "x"', '"key": "\\ud800"'))

    with pytest.raises(CorruptCheckpointError, match="no valid Unicode text"):
        await restore(path)


@pytest.mark.parametrize("tree", [{"\ud800": 1}, {"a": [{"b\udfff": np.zeros(3)}]}], ids=["root", "below"])
async def test_a_key_that_is_no_valid_unicode_is_not_saved(tree: Any, tmp_path: Path) -> None:
    async with penstock.Checkpointer() as checkpointer:
        with pytest.raises(SpecError, match="no valid Unicode text"):
            await checkpointer.save(tmp_path / "c", tree)

    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("depth", "refused"), [(300, False), (1500, True)])
async def test_key_paths_are_as_long_as_python_nests_calls(depth: int, refused: bool, tmp_path: Path) -> None:
    path = write_array(tmp_path / "c", {}, "k")
    document = json.loads((path / "_METADATA").read_text())
    (entry,) = document["tree_metadata"].values()
    entry["key_metadata"] = [{"key": "k", "key_type": 2}] * depth
    entry["value_metadata"] = {"value_type": "None", "skip_deserialize": True}
    (path / "_METADATA").write_text(json.dumps(document))
    async with penstock.Checkpointer() as checkpointer:
        if refused:
            with pytest.raises(CorruptCheckpointError, match="key path of 1500 keys"):
                await checkpointer.metadata(path)
        else:
            assert len((await checkpointer.metadata(path)).leaves) == 1


async def test_verify_counts_what_is_missing_of_a_huge_grid(tmp_path: Path) -> None:
    path = write_array(tmp_path / "c", {"shape": [2**40]}, all_written=True)
    (path / "a" / "5").write_bytes(b"1234")

    async with penstock.Checkpointer() as checkpointer:
        report = await checkpointer.verify(path)

    problems = [finding.problem for finding in report.findings if finding.key_paths == ("['a']",)]
    assert "chunk 'a/0' is missing, and 4 behind it" in problems
    assert f"chunk 'a/6' is missing, and {2**40 - 7} behind it" in problems


async def test_a_tree_too_deep_to_be_built_is_said_to_be(tmp_path: Path) -> None:
    path = write_array(tmp_path / "c", {}, "k")
    document = json.loads((path / "_METADATA").read_text())
    (entry,) = document["tree_metadata"].values()
    entry["key_metadata"] = [{"key": "k", "key_type": 2}] * 1000
    entry["value_metadata"] = {"value_type": "None", "skip_deserialize": True}
    (path / "_METADATA").write_text(json.dumps(document))

    with pytest.raises(SpecError, match="1000 levels cannot be built without a target"):
        await restore(path)


async def test_what_was_never_written_is_converted_only_if_that_is_allowed(tmp_path: Path) -> None:
    n = 2**24 + 1
    path = write_array(tmp_path / "c", {"shape": [n], "chunks": [n]})

    for tool in (penstock.convert, penstock.repair):
        with pytest.raises(ExpansionError, match=r"leaf \['a'\]"):
            await tool(path, tmp_path / "new")
    assert not (tmp_path / "new").exists()

    await penstock.convert(path, tmp_path / "new", max_expansion=10**9)
    found = await restore(tmp_path / "new", like={"a": np.zeros(n, np.float32)})
    assert set(np.unique(found["a"])) == {7}


async def test_tiny_chunks_are_converted_to_one(tmp_path: Path) -> None:
    path = write_array(tmp_path / "c", {"shape": [2**19]})

    tracemalloc.start()
    try:
        await penstock.convert(path, tmp_path / "new")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 40 * 2**20  # a piece for each chunk would take 250 MB
    assert set(np.unique((await restore(tmp_path / "new"))["a"])) == {7}


def test_a_chunk_that_no_memory_holds_is_not_converted(tmp_path: Path) -> None:
    path = write_array(tmp_path / "c", {"shape": [2**45], "chunks": [2**45]})
    opened = open_checkpoint(LocalStore(), str(path))
    value = StoredValue(SourceFiles(LocalStore()), opened, opened.leaves[0])
    handler = StoredValueHandler()
    (spec,) = handler.describe([value], [value.stored.info], {})
    leaf = Leaf(0, value.stored.info, value, spec, handler)

    with pytest.raises(InsufficientMemoryError, match="140737488355328 bytes"):
        next(handler.pieces(leaf, 2**20))


@pytest.mark.parametrize("strange", ["a range again and again", "chunks in one piece"])
async def test_bytes_are_read_once_however_often_they_are_listed(strange: str, tmp_path: Path) -> None:
    STRANGE[strange](tmp_path / "c")

    with pytest.raises(CorruptCheckpointError, match=r"lie in one another|together with other bytes"):
        await restore(tmp_path / "c")

    async with penstock.Checkpointer() as checkpointer:
        report = await checkpointer.verify(tmp_path / "c")

    assert report.nbytes <= 32 * 2**20
    assert report.status == "damaged"


async def test_a_hole_is_not_read_to_compare_it(tmp_path: Path) -> None:
    STRANGE["a hole to compare"](tmp_path / "c")

    async with penstock.Checkpointer() as checkpointer:
        report = await checkpointer.verify(tmp_path / "c")
    with pytest.raises(UnsupportedFormatError, match="it is not read"):
        await penstock.seal(tmp_path / "c")

    assert report.n_ranges == 0
    assert any("it is not read" in finding.problem for finding in report.unchecked)


async def test_a_record_names_nothing_outside(tmp_path: Path) -> None:
    STRANGE["a record of a document elsewhere"](tmp_path / "c")

    async with penstock.Checkpointer() as checkpointer:
        report = await checkpointer.verify(tmp_path / "c")

    assert [finding.problem for finding in report.damages][:1] == [
        "'/etc/passwd' leads out of the checkpoint"
    ]
    assert report.n_documents == 0


def test_the_zeros_that_are_zipped_are_a_whole_stream() -> None:
    assert zlib.decompress(gzip_of_zeros(2**22)) == bytes(2**22)
