"""From one format to another: nothing lost, nothing half-written, little held."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file
from tests.byte_counting import CountingStore
from tests.every_item import every_item
from tests.own_files import REPORTS

import penstock
from penstock.cli import main
from penstock.errors import (
    ChecksumError,
    CorruptCheckpointError,
    DestinationExistsError,
    InvalidLeafError,
    NotACheckpointError,
    PathError,
    SpecError,
    StorageError,
    TruncatedDataError,
    UnsupportedFormatError,
)
from penstock.handlers import AutoLayout, LocalStore
from penstock.handlers.formats.orbax.open_checkpoint import open_checkpoint
from penstock.handlers.leaves import SourceFiles, StoredValue, StoredValueHandler
from penstock.kernel import Leaf, LeafSpec, ParamInfo, StoredLeaf
from penstock.testing import FaultyStore

AssertSame = Callable[[Any, Any], None]


def place(array: Any, *axes: Any) -> Any:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))  # type: ignore[no-untyped-call]  # jax's


def noise(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


TREE: Any = {
    "params": [noise(40, 30), {"w": noise(7), "b": np.zeros((0, 2), np.int8)}],
    "empties": [None, {}, [], ()],
    "count": 3,
    "flag": True,
    "name": "run ünï",
}


@pytest.fixture(scope="module")
def tree() -> Any:
    """With what needs devices."""
    return {
        **TREE,
        "key": jax.random.key(7),
        "half": jnp.ones((4, 4), jnp.bfloat16),
        "sharded": [place(noise(16, 24), "x", "y"), place(noise(16, 24), None, "y")],
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> Path:
    path = tmp_path_factory.mktemp("convert") / "ckpt"
    penstock.sync.save(path, tree, custom_metadata={"lr": 0.5, "who": "me"})
    return path


def files_under(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


class TestThereAndBack:
    @pytest.mark.parametrize("options", [{}, {"max_shard_bytes": 1500}])
    def test_orbax_to_safetensors_and_back(
        self, saved: Path, tree: Any, tmp_path: Path, assert_same: AssertSame, options: dict[str, Any]
    ) -> None:
        middle, back = tmp_path / "folder", tmp_path / "back"

        there = penstock.sync.convert(saved, middle, format="safetensors", **options)
        penstock.sync.convert(middle, back)

        assert there.n_leaves == 14
        assert len(list(middle.iterdir())) == (1 if not options else 6)
        assert_same(penstock.sync.restore(back, like=tree), tree)
        found = penstock.sync.restore(back)
        assert found["empties"] == [None, {}, [], ()]
        assert found["name"] == "run ünï"
        assert penstock.sync.metadata(back).custom_metadata == {"lr": 0.5, "who": "me"}
        assert penstock.sync.verify(back).intact

    def test_a_conversion_writes_the_same_bytes_as_an_export(
        self, saved: Path, tree: Any, tmp_path: Path
    ) -> None:
        penstock.sync.convert(saved, tmp_path / "a.safetensors")
        penstock.sync.export_safetensors(
            tree, tmp_path / "b.safetensors", custom_metadata={"lr": 0.5, "who": "me"}
        )

        exported, converted = (load_raw(tmp_path / f"{name}.safetensors") for name in "ba")
        assert exported == converted

    def test_orbax_to_orbax_keeps_all_that_was_recorded(
        self, saved: Path, tree: Any, tmp_path: Path, assert_same: AssertSame
    ) -> None:
        before = files_under(saved)

        penstock.sync.convert(saved, tmp_path / "copy")

        store = LocalStore()
        specs = [
            {leaf.info.name: leaf.spec for leaf in open_checkpoint(store, str(path)).leaves}
            for path in (saved, tmp_path / "copy")
        ]
        assert specs[0] == specs[1]
        assert specs[1]["sharded.0"].chunk_shape == (8, 6)
        assert_same(penstock.sync.restore(tmp_path / "copy", like=tree), tree)
        assert files_under(saved) == before

    def test_a_foreign_file_becomes_a_nested_tree_or_a_flat_one(
        self, tmp_path: Path, assert_same: AssertSame
    ) -> None:
        path = tmp_path / "model.safetensors"
        save_file({"a.0.w": np.ones(3), "b": np.zeros((), np.int8)}, path, {"format": "pt"})

        penstock.sync.convert(path, tmp_path / "nested")
        penstock.sync.convert(tmp_path / "model.safetensors", tmp_path / "flat", split=None)
        penstock.sync.convert(path, tmp_path / "slash", split="/")

        assert_same(
            penstock.sync.restore(tmp_path / "nested"),
            {"a": {"0": {"w": np.ones(3)}}, "b": np.zeros((), np.int8)},
        )
        flat = {"a.0.w": np.ones(3), "b": np.zeros((), np.int8)}
        assert_same(penstock.sync.restore(tmp_path / "flat"), flat)
        assert_same(penstock.sync.restore(tmp_path / "slash"), flat)
        assert penstock.sync.metadata(tmp_path / "nested").custom_metadata == {"format": "pt"}

    def test_metadata_can_be_added(self, saved: Path, tmp_path: Path) -> None:
        penstock.sync.convert(saved, tmp_path / "x.safetensors", custom_metadata={"who": "you", "new": [1]})

        assert penstock.sync.metadata(tmp_path / "x.safetensors").custom_metadata == {
            "lr": 0.5,
            "who": "you",
            "new": [1],
        }


def load_raw(path: Path) -> dict[str, tuple[Any, ...]]:
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header.pop("__metadata__")
    return {
        name: (
            about["dtype"],
            about["shape"],
            content[end + about["data_offsets"][0] : end + about["data_offsets"][1]],
        )
        for name, about in header.items()
    }


def zarr_directory(path: Path, array: Any, driver: str, chunks: list[int], codec: dict[str, Any]) -> None:
    """A checkpoint of one directory per array, as old Orbax wrote it, with one array."""
    metadata: dict[str, Any] = (
        {"chunks": chunks, "compressor": codec or None}
        if driver == "zarr"
        else {
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}},
            "codecs": codec or [],
        }
    )
    spec = {"driver": driver, "kvstore": {"driver": "file", "path": str(path / "w")}, "metadata": metadata}
    ts.open(spec, create=True, dtype=array.dtype.name, shape=array.shape).result().write(array).result()
    entry = {
        "key_metadata": [{"key": "w", "key_type": 2}],
        "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
    }
    document = {"tree_metadata": {"('w',)": entry}, "use_ocdbt": False, "use_zarr3": driver == "zarr3"}
    (path / "_METADATA").write_text(json.dumps(document))


ZSTD = {"id": "zstd", "level": 1}
SHARDED = [
    {
        "name": "sharding_indexed",
        "configuration": {"chunk_shape": [2, 3], "codecs": [{"name": "bytes"}, {"name": "gzip"}]},
    }
]


@pytest.mark.parametrize(
    ("driver", "chunks", "codec"),
    [
        ("zarr", [4, 6], {}),
        ("zarr", [4, 6], ZSTD),
        ("zarr", [5, 7], {}),  # does not divide the array
        ("zarr", [5, 7], ZSTD),
        ("zarr", [20, 24], ZSTD),
        ("zarr", [64, 64], ZSTD),  # larger than the array
        ("zarr3", [10, 6], [{"name": "bytes"}, {"name": "zstd"}]),
        ("zarr3", [10, 6], SHARDED),
    ],
)
@pytest.mark.parametrize("memory", ["1MiB", "600"])
def test_any_chunking_and_codec(
    tmp_path: Path, driver: str, chunks: list[int], codec: Any, memory: str
) -> None:
    array = noise(20, 24)
    source = tmp_path / "source"
    source.mkdir()
    zarr_directory(source, array, driver, chunks, codec)

    penstock.sync.convert(source, tmp_path / "x.safetensors", memory_limit=memory)
    penstock.sync.convert(source, tmp_path / "orbax", memory_limit=memory)

    assert load_file(tmp_path / "x.safetensors")["w"].tobytes() == array.tobytes()
    assert penstock.sync.restore(tmp_path / "orbax")["w"].tobytes() == array.tobytes()
    stored = open_checkpoint(LocalStore(), str(tmp_path / "orbax")).leaves[0]
    even = not any(size % chunk for size, chunk in zip(array.shape, chunks, strict=True))
    assert stored.spec.chunk_shape == (tuple(chunks) if even else array.shape)


def test_a_zero_dimensional_array_with_a_codec(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    zarr_directory(source, np.array(2.5), "zarr", [], ZSTD)

    penstock.sync.convert(source, tmp_path / "x.safetensors")

    assert load_file(tmp_path / "x.safetensors")["w"] == 2.5


def test_memory_is_bounded_by_the_budget(tmp_path: Path) -> None:
    tree = {"a": noise(1 << 20), "b": noise(1 << 18, seed=1)}
    penstock.sync.save(tmp_path / "c", tree)

    there = penstock.sync.convert(tmp_path / "c", tmp_path / "x.safetensors", memory_limit="300KiB")
    back = penstock.sync.convert(tmp_path / "x.safetensors", tmp_path / "d", memory_limit="300KiB")

    # What has one checksum is not cut: it was written with another budget.
    assert there.peak_leased_bytes <= 4 << 20
    assert back.peak_leased_bytes <= 4 << 20
    assert penstock.sync.restore(tmp_path / "d")["a"].tobytes() == tree["a"].tobytes()


class TestRefusals:
    def test_a_destination_that_exists(self, saved: Path, tmp_path: Path) -> None:
        target = tmp_path / "x.safetensors"
        penstock.sync.convert(saved, target)
        with pytest.raises(DestinationExistsError):
            penstock.sync.convert(saved, target)

        penstock.sync.convert(saved, target, overwrite=True)
        assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]

    def test_a_checkpoint_is_converted_in_place(
        self, saved: Path, tmp_path: Path, tree: Any, assert_same: AssertSame
    ) -> None:
        path = Path(shutil.copytree(saved, tmp_path / "c"))

        penstock.sync.convert(path, path, overwrite=True)

        assert_same(penstock.sync.restore(path, like=tree), tree)
        assert [entry.name for entry in tmp_path.iterdir()] == ["c"]

    @pytest.mark.parametrize("inside", ["c/x.safetensors", "c/d/e"])
    def test_into_the_source_or_over_what_holds_it(self, saved: Path, tmp_path: Path, inside: str) -> None:
        shutil.copytree(saved, tmp_path / "c")
        before = files_under(tmp_path)
        with pytest.raises(PathError, match="lies in"):
            penstock.sync.convert(tmp_path / "c", tmp_path / inside)
        with pytest.raises(PathError, match="lies in"):
            penstock.sync.convert(tmp_path / "c", tmp_path, overwrite=True)

        assert files_under(tmp_path) == before

    @pytest.mark.parametrize(
        ("name", "options", "said"),
        [
            ("d", {"format": "msgpack"}, "no format 'msgpack'"),
            ("d", {"max_shard_bytes": 10}, "max_shard_bytes is for safetensors"),
            ("x.safetensors", {"max_shard_bytes": 10}, "name a folder"),
            ("x.safetensors", {"format": "orbax"}, "name of a safetensors file"),
        ],
    )
    def test_options_that_do_not_fit(
        self, saved: Path, tmp_path: Path, name: str, options: dict[str, Any], said: str
    ) -> None:
        with pytest.raises(SpecError, match=said):
            penstock.sync.convert(saved, tmp_path / name, **options)

        assert list(tmp_path.iterdir()) == []

    def test_split_is_for_names_alone(self, saved: Path, tmp_path: Path) -> None:
        with pytest.raises(SpecError, match="structure of its own"):
            penstock.sync.restore(saved, split=".")
        save_file({"a": np.ones(1), "a.b": np.ones(1)}, tmp_path / "x.safetensors")
        with pytest.raises(SpecError, match="split is empty"):
            penstock.sync.restore(tmp_path / "x.safetensors", split="")
        with pytest.raises(SpecError, match=r"'a' and 'a\.b'"):
            penstock.sync.convert(tmp_path / "x.safetensors", tmp_path / "d")

    def test_a_missing_source_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(NotACheckpointError):
            penstock.sync.convert(tmp_path / "missing", tmp_path / "x.safetensors")

    def test_a_damaged_source_is_not_converted(self, saved: Path, tmp_path: Path) -> None:
        source = Path(shutil.copytree(saved, tmp_path / "c"))
        file = max((source / "d").iterdir(), key=lambda path: path.stat().st_size)
        data = bytearray(file.read_bytes())
        data[100] ^= 1
        file.write_bytes(data)

        for name in ("x.safetensors", "d"):
            with pytest.raises(ChecksumError) as raised:
                penstock.sync.convert(source, tmp_path / name)

            assert raised.value.key_path

        assert [path.name for path in tmp_path.iterdir()] == ["c"]

    def test_a_source_cut_short_after_it_was_opened(self, tmp_path: Path) -> None:
        path = tmp_path / "x.safetensors"
        save_file({"a": np.ones(100)}, path)
        store = LocalStore()
        opened = AutoLayout().open(store, str(path))
        path.write_bytes(path.read_bytes()[:-8])
        files = SourceFiles(store)
        leaf = leaf_of(StoredValue(files, opened, opened.leaves[0]))

        with pytest.raises(TruncatedDataError) as raised:
            [piece.take() for piece in StoredValueHandler().pieces(leaf, 1 << 20)]

        assert raised.value.key_path == "['a']"
        files.close()

    def test_a_third_partys_leaf(self, tmp_path: Path) -> None:
        stored = StoredLeaf(ParamInfo(("a",), (), "['a']"), LeafSpec("theirs"))
        value = StoredValue(SourceFiles(LocalStore()), None, stored)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

        with pytest.raises(InvalidLeafError, match="a theirs is stored in files of its own handler"):
            StoredValueHandler().describe([value], [stored.info], {})


def leaf_of(value: StoredValue) -> Leaf:
    handler = StoredValueHandler()
    (spec,) = handler.describe([value], [value.stored.info], {})
    return Leaf(0, value.stored.info, value, spec, handler)


def test_few_files_are_open_at_a_time(tmp_path: Path) -> None:
    for at in range(5):
        (tmp_path / str(at)).write_bytes(bytes([at] * 4))

    store = FaultyStore(LocalStore())
    files = SourceFiles(store, most=2)
    found = bytearray(1)
    for at in (0, 0, 1, 0, 2, 0, 1, 3, 4):
        files.read_at(str(tmp_path / str(at)), 1, memoryview(found))
        assert found[0] == at
        assert store.open_files <= 2

    assert [done.name for done in store.operations].count("open_data_file") == 6
    files.close()
    files.close()
    assert store.open_files == 0


@pytest.mark.anyio
async def test_a_source_that_is_replaced_meanwhile_is_converted_anew(tmp_path: Path) -> None:
    for name, seed in (("c", 0), ("other", 1)):
        await penstock.export_safetensors({"a": noise(1000, seed=seed)}, tmp_path / name)

    store = FaultyStore(LocalStore())
    hang = store.hang_on("data.sync")

    async def replace() -> None:
        await hang.wait_reached()
        shutil.rmtree(tmp_path / "c")
        shutil.move(tmp_path / "other", tmp_path / "c")
        hang.release()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(replace)
        await penstock.convert(tmp_path / "c", tmp_path / "d", store=store)

    np.testing.assert_array_equal((await penstock.restore(tmp_path / "d"))["a"], noise(1000, seed=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "d"]
    assert store.open_files == 0


@pytest.mark.anyio
@pytest.mark.parametrize("operation", ["open_data_file", "data.write_at", "data.sync", "publish"])
async def test_cancelled_midway_leaves_nothing(tmp_path: Path, operation: str) -> None:
    await penstock.save(tmp_path / "c", {str(at): noise(1 << 16, seed=at) for at in range(4)})
    store = FaultyStore(LocalStore())
    hang = store.hang_on(operation)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(penstock.convert, tmp_path / "c", tmp_path / "x.safetensors", store=store))
        await hang.wait_reached()
        tasks.cancel_scope.cancel()
        hang.release()

    assert store.open_files == 0
    assert {path.name for path in tmp_path.iterdir()} <= (
        {"c", "x.safetensors"} if operation == "publish" else {"c"}
    )


@pytest.mark.anyio
@pytest.mark.parametrize(
    "operation", ["open_data_file", "file.read_at", "data.write_at", "data.sync", "publish"]
)
async def test_failing_midway_leaves_nothing(tmp_path: Path, operation: str) -> None:
    await penstock.save(tmp_path / "c", {str(at): noise(1 << 16, seed=at) for at in range(4)})
    store = FaultyStore(LocalStore())
    store.fail_on(operation)

    with pytest.raises(StorageError):
        await penstock.convert(tmp_path / "c", tmp_path / "x.safetensors", store=store)

    assert store.open_files == 0
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.anyio
async def test_a_checkpointer_that_writes_safetensors(tmp_path: Path, assert_same: AssertSame) -> None:
    from penstock.handlers import SafetensorsLayout

    async with penstock.Checkpointer(layout=SafetensorsLayout()) as checkpointer:
        for step in range(2):
            await (
                await checkpointer.save(tmp_path / "x.safetensors", {"a": [np.full(3, step)]}, overwrite=True)
            )

        assert_same(await checkpointer.restore(tmp_path / "x.safetensors", split="."), {"a": [np.full(3, 1)]})
        assert checkpointer.statistics().leased == 0


ITEMS: Any = every_item(
    {"a": [noise(1000), None], "name": "x"}, tagged=penstock.items.PyTree({"w": noise(3)}, {"of": "the tree"})
)


@pytest.fixture(scope="module")
def saved_items(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("items") / "ckpt"
    penstock.sync.save(path, ITEMS, custom_metadata={"who": "me"})
    return path


@pytest.fixture(scope="module")
def saved_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("steps") / "run"
    with penstock.sync.CheckpointManager(root, metadata={"run": 7}) as manager:
        for step in (1, 2, 10):
            manager.save(
                step, {"a": np.full(5, step)}, metrics={"loss": 1 / step}, custom_metadata={"at": step}
            )

    return root


class TestNothingIsDropped:
    def test_every_item_is_carried_over(
        self, saved_items: Path, tmp_path: Path, assert_same: AssertSame
    ) -> None:
        report = penstock.sync.convert(saved_items, tmp_path / "copy")

        expected, found = (penstock.sync.restore_items(path) for path in (saved_items, tmp_path / "copy"))
        assert_same(found, expected)
        assert list(found) == ["config", "key", "scale", "shuffle", "state", "tagged"]
        assert penstock.sync.metadata(tmp_path / "copy", item="tagged").tree_custom_metadata == {
            "of": "the tree"
        }
        assert penstock.sync.metadata(tmp_path / "copy", item="state").custom_metadata == {"who": "me"}
        assert penstock.sync.verify(tmp_path / "copy").intact
        assert report.n_leaves == 11

    def test_safetensors_refuse_items_by_name(self, saved_items: Path, tmp_path: Path) -> None:
        with pytest.raises(SpecError, match="cannot carry all of the items 'config', 'key', 'scale'"):
            penstock.sync.convert(saved_items, tmp_path / "x.safetensors")

        assert list(tmp_path.iterdir()) == []
        penstock.sync.convert(saved_items, tmp_path / "x.safetensors", item="state")
        assert list(load_file(tmp_path / "x.safetensors")) == ["a.0"]

    def test_safetensors_refuse_the_metadata_of_a_tree(self, saved_items: Path, tmp_path: Path) -> None:
        with pytest.raises(SpecError, match="cannot carry the metadata that is stored with the tree"):
            penstock.sync.convert(saved_items, tmp_path / "x.safetensors", item="tagged")

        penstock.sync.convert(saved_items, tmp_path / "flat", item="tagged")
        assert penstock.sync.metadata(tmp_path / "flat").tree_custom_metadata == {"of": "the tree"}

    def test_every_step_is_carried_over_with_its_metrics(self, saved_steps: Path, tmp_path: Path) -> None:
        report = penstock.sync.convert(saved_steps, tmp_path / "copy")

        with penstock.sync.CheckpointManager(tmp_path / "copy", read_only=True) as manager:
            assert list(manager.all_steps()) == [1, 2, 10]
            assert manager.best_step("loss") == 10
            assert manager.root_metadata() == {"run": 7}
            for step in (1, 2, 10):
                about = manager.metadata(step)
                assert (about.metrics, about.custom_metadata) == ({"loss": 1 / step}, {"at": step})
                assert manager.restore(step)["a"].tolist() == [step] * 5

        assert (report.path, report.n_leaves, report.nbytes) == (str(tmp_path / "copy"), 3, 120)
        assert (tmp_path / "copy" / REPORTS).read_bytes() == (saved_steps / REPORTS).read_bytes()

    def test_the_reports_of_other_saves_stay(self, saved_steps: Path, tmp_path: Path) -> None:
        with penstock.sync.CheckpointManager(tmp_path) as manager:
            manager.save(7, {"a": 1})
        before = (tmp_path / REPORTS).read_bytes()

        penstock.sync.convert(saved_steps, tmp_path, overwrite=True)

        assert (tmp_path / REPORTS).read_bytes() == before

    def test_safetensors_refuse_several_steps_by_name(self, saved_steps: Path, tmp_path: Path) -> None:
        with pytest.raises(SpecError, match="cannot carry all of the steps 1, 2, 10"):
            penstock.sync.convert(saved_steps, tmp_path / "x.safetensors")

        assert list(tmp_path.iterdir()) == []

    def test_safetensors_carry_the_metrics_of_a_step_as_metadata(
        self, saved_steps: Path, tmp_path: Path
    ) -> None:
        penstock.sync.convert(saved_steps / "2", tmp_path / "x.safetensors")

        metadata = penstock.sync.metadata(tmp_path / "x.safetensors").custom_metadata
        assert metadata == {"at": 2, "metrics": {"loss": 0.5}}

    def test_steps_go_into_a_directory_of_steps_alone(
        self, saved: Path, saved_steps: Path, tmp_path: Path
    ) -> None:
        penstock.sync.convert(saved_steps, tmp_path / "copy")
        with pytest.raises(DestinationExistsError):
            penstock.sync.convert(saved_steps, tmp_path / "copy")

        penstock.sync.convert(saved_steps, tmp_path / "copy", overwrite=True)
        shutil.copytree(saved, tmp_path / "flat")
        with pytest.raises(PathError, match="is no directory of steps"):
            penstock.sync.convert(saved_steps, tmp_path / "flat", overwrite=True)

    def test_an_item_or_a_step_that_is_not_known_is_refused(
        self, saved_items: Path, saved_steps: Path, tmp_path: Path
    ) -> None:
        for source, inside in ((saved_items, "theirs"), (saved_steps, "3")):
            copy = Path(shutil.copytree(source, tmp_path / inside))
            (copy / inside / "state").mkdir(parents=True)
            (copy / inside / "state" / "mine.npz").write_bytes(b"x")
            with pytest.raises(UnsupportedFormatError, match=f"{copy / inside}: "):
                penstock.sync.convert(copy, tmp_path / "copy")

    def test_a_lost_item_is_not_passed_over(self, saved_items: Path, tmp_path: Path) -> None:
        copy = Path(shutil.copytree(saved_items, tmp_path / "c"))
        shutil.rmtree(copy / "scale")

        with pytest.raises(CorruptCheckpointError, match="is missing"):
            penstock.sync.convert(copy, tmp_path / "copy")


FORMATS = {
    "ocdbt": penstock.SaveFormat(),
    "zstd": penstock.SaveFormat(codec="zstd"),
    "directories": penstock.SaveFormat(ocdbt=False),
    "zarr3": penstock.SaveFormat(zarr=3, codec="zstd"),
}


@pytest.mark.parametrize("form", FORMATS)
def test_a_flipped_bit_is_never_carried_over(tmp_path: Path, form: str) -> None:
    with penstock.sync.Checkpointer(save_format=FORMATS[form]) as checkpointer:
        checkpointer.save(tmp_path / "c", {"w": np.arange(9000), "text": "t"}).result()

    files = sorted(file for file in (tmp_path / "c").rglob("*") if file.is_file())
    for file in files:
        data = file.read_bytes()
        if file.name == "commit_success.txt":
            continue

        at = len(data) // 2
        file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(CorruptCheckpointError):
            penstock.sync.convert(tmp_path / "c", tmp_path / "copy")

        file.write_bytes(data)

    penstock.sync.convert(tmp_path / "c", tmp_path / "copy")


SMALLER = {
    "plain": penstock.SaveFormat(chunk_byte_size=1 << 16),
    "zstd": penstock.SaveFormat(chunk_byte_size=1 << 16, codec="zstd"),
}


@pytest.mark.parametrize("form", SMALLER)
def test_a_piece_that_becomes_many_chunks_is_read_once(tmp_path: Path, form: str) -> None:
    array = noise(1 << 20)
    penstock.sync.save(tmp_path / "c", {"w": array})
    store = CountingStore()

    penstock.sync.convert(tmp_path / "c", tmp_path / "copy", store=store, save_format=SMALLER[form])

    assert store.nbytes < 1.2 * array.nbytes
    assert penstock.sync.restore(tmp_path / "copy")["w"].tobytes() == array.tobytes()


@pytest.mark.parametrize("at", [0, 17, 63])
@pytest.mark.parametrize("form", SMALLER)
def test_a_flipped_bit_in_any_of_these_chunks_is_not_carried_over(tmp_path: Path, form: str, at: int) -> None:
    penstock.sync.save(tmp_path / "c", {"w": noise(1024, 1024)})
    (file,) = [each for each in (tmp_path / "c").rglob("d/*") if each.stat().st_size > 1 << 20]
    data = bytearray(file.read_bytes())
    data[at * 2**16 + 2**15] ^= 1
    file.write_bytes(data)

    with pytest.raises(ChecksumError) as raised:
        penstock.sync.convert(tmp_path / "c", tmp_path / "copy", save_format=SMALLER[form])

    assert raised.value.key_path == "['w']"
    assert not (tmp_path / "copy").exists()


def test_the_format_of_what_is_written_can_be_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    form = penstock.SaveFormat(ocdbt=False, zarr=3, codec="zstd")
    with penstock.sync.Checkpointer(save_format=form) as checkpointer:
        checkpointer.save(tmp_path / "c", {"a": np.zeros(9000)}).result()

    penstock.sync.convert(tmp_path / "c", tmp_path / "plain")
    penstock.sync.convert(tmp_path / "c", tmp_path / "same", save_format=form)
    options = ["--directories", "--zarr", "3", "--codec", "zstd"]
    for command in ("convert", "repair"):
        assert main([command, str(tmp_path / "c"), str(tmp_path / command), *options]) == 0
        assert "directories, zarr 3, zstd)" in capsys.readouterr().out

    (plain,) = penstock.sync.metadata(tmp_path / "plain").leaves
    assert (plain.codec, plain.stored_nbytes) == (None, 72_000)
    for name in ("same", "convert", "repair"):
        (leaf,) = penstock.sync.metadata(tmp_path / name).leaves
        assert leaf.codec == "zstd:1"
        assert (tmp_path / name / "a" / "zarr.json").exists()


def test_a_save_format_is_refused_for_safetensors(tmp_path: Path) -> None:
    penstock.sync.save(tmp_path / "c", {"a": np.zeros(3)})
    with pytest.raises(SpecError, match="save_format is for Orbax's layout"):
        penstock.sync.convert(
            tmp_path / "c", tmp_path / "x.safetensors", save_format=penstock.SaveFormat(zarr=3)
        )


@pytest.mark.anyio
@pytest.mark.parametrize("inside", [[], ["readme.txt"]], ids=["empty", "other files"])
@pytest.mark.parametrize("target", ["d", "d.safetensors", "d.npz"])
async def test_a_directory_that_holds_no_checkpoint_is_not_converted(
    tmp_path: Path, inside: list[str], target: str
) -> None:
    source = tmp_path / "s"
    source.mkdir()
    for name in inside:
        (source / name).write_text("no checkpoint")

    with pytest.raises(NotACheckpointError, match="holds neither _METADATA nor"):
        await penstock.convert(source, tmp_path / target)

    assert [each.name for each in tmp_path.iterdir()] == ["s"]
