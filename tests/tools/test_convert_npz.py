"""NumPy's archives, as source and as target of a conversion."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import jax
import ml_dtypes
import numpy as np
import pytest

import penstock
from penstock.errors import (
    ChecksumError,
    CorruptCheckpointError,
    DestinationExistsError,
    DuplicateNameError,
    ExpansionError,
    InvalidLeafError,
    NotACheckpointError,
    PathError,
    PenstockError,
    SpecError,
    StorageError,
    UnsupportedFormatError,
)
from penstock.handlers import LocalStore
from penstock.testing import FaultyStore

AssertSame = Callable[[Any, Any], None]

ARRAYS: dict[str, Any] = {
    "params.w": np.arange(35.0, dtype=np.float32).reshape(5, 7),
    "params.b": np.arange(4, dtype=np.float16),
    "turned": np.asfortranarray(np.arange(24).reshape(2, 3, 4)),
    "swapped": np.arange(5, dtype=">i4"),
    "none": np.zeros((0, 3), np.int8),
    "step": np.array(7),
    "flags": np.array([True, False]),
    "waves": np.array([1 + 2j], np.complex64),
    "text": np.array("run ünï"),
    "blank": np.array(""),
}
TREE: dict[str, Any] = {
    "params": {"w": ARRAYS["params.w"], "b": ARRAYS["params.b"]},
    "turned": ARRAYS["turned"],
    "swapped": np.arange(5, dtype=np.int32),
    "none": ARRAYS["none"],
    "step": ARRAYS["step"],
    "flags": ARRAYS["flags"],
    "waves": ARRAYS["waves"],
    "text": "run ünï",
    "blank": "",
}


def loaded(path: Path) -> dict[str, Any]:
    with np.load(path) as archive:
        return {name: archive[name] for name in archive.files}


def saved(path: Path, tree: Any, **options: Any) -> Path:
    penstock.sync.save(path, tree, **options)
    return path


class TestReading:
    @pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
    def test_what_numpy_writes_is_read(self, tmp_path: Path, assert_same: AssertSame, write: Any) -> None:
        write(tmp_path / "a.npz", **ARRAYS)

        report = penstock.sync.convert(tmp_path / "a.npz", tmp_path / "new")

        assert report.n_leaves == len(ARRAYS)
        assert_same(penstock.sync.restore(tmp_path / "new"), TREE)
        assert penstock.sync.verify(tmp_path / "new").intact

    @pytest.mark.parametrize(
        ("split", "expected"),
        [
            ("/", {"a": {"b": 1, "c.d": 2}}),
            (None, {"a/b": 1, "a/c.d": 2}),
            (".", {"a/b": 1, "a/c": {"d": 2}}),
        ],
    )
    def test_names_are_split_as_asked(self, tmp_path: Path, split: str | None, expected: Any) -> None:
        np.savez(tmp_path / "a.npz", **cast("Any", {"a/b": 1, "a/c.d": 2}))
        penstock.sync.convert(tmp_path / "a.npz", tmp_path / "new", split=split)

        assert jax.tree.map(int, penstock.sync.restore(tmp_path / "new")) == expected

    def test_names_that_form_no_tree_are_refused(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "a.npz", **cast("Any", {"a": 1, "a.b": 2}))
        with pytest.raises(SpecError, match="cannot both stand in one tree"):
            penstock.sync.convert(tmp_path / "a.npz", tmp_path / "new")

    @pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
    def test_an_array_larger_than_the_budget(self, tmp_path: Path, write: Any) -> None:
        large = np.arange(2**18, dtype=np.int32).reshape(2**9, -1)
        write(tmp_path / "a.npz", large=large, turned=large.T)

        penstock.sync.convert(tmp_path / "a.npz", tmp_path / "new", memory_limit=2**17)

        found = penstock.sync.restore(tmp_path / "new")
        assert np.array_equal(found["large"], large)
        assert np.array_equal(found["turned"], large.T)

    @pytest.mark.parametrize(
        ("value", "problem"),
        [
            (np.array([{}, []], object), "no pickle is loaded"),
            (np.ones(2, ml_dtypes.bfloat16), "as numpy writes bfloat16"),
            (np.zeros(2, [("a", "f4")]), "only numbers are read"),
            (np.array(["a", "b"]), "only numbers are read"),
            (np.array(b"a"), "only numbers are read"),
            (np.array("2020-01-01", "M8[D]"), "only numbers are read"),
        ],
    )
    def test_what_is_no_array_of_numbers_is_refused(self, tmp_path: Path, value: Any, problem: str) -> None:
        np.savez(tmp_path / "a.npz", good=np.ones(2), bad=value)
        with pytest.raises(UnsupportedFormatError, match=problem) as caught:
            penstock.sync.convert(tmp_path / "a.npz", tmp_path / "new")

        assert caught.value.key_path == "['bad']"
        assert not (tmp_path / "new").exists()

    @pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
    @pytest.mark.parametrize("name", ["plain", "turned", "text"])
    def test_a_flipped_bit_is_found(self, tmp_path: Path, write: Any, name: str) -> None:
        path = tmp_path / "a.npz"
        arrays = {
            "plain": np.arange(500),
            "turned": np.arange(600).reshape(20, 30).T,
            "text": np.array("abc" * 99),
        }
        write(path, **{name: arrays[name]})
        with zipfile.ZipFile(path) as archive:
            size = archive.getinfo(f"{name}.npy").compress_size

        data = bytearray(path.read_bytes())
        data[len(f"{name}.npy") + size // 2 + 80] ^= 4
        path.write_bytes(data)

        with pytest.raises(CorruptCheckpointError, match=r"differs|inflated|intact") as caught:
            penstock.sync.convert(path, tmp_path / "new")

        assert write is not np.savez or name == "text" or isinstance(caught.value, ChecksumError)
        assert not (tmp_path / "new").exists()

    @pytest.mark.filterwarnings("ignore:Reading `.npy`")
    @pytest.mark.parametrize(
        "first", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
    )
    def test_whatever_is_damaged_is_an_error_of_ours(self, tmp_path: Path, first: int) -> None:
        # A file of 400 bytes, each of them changed; zip keeps nothing about some, such as times.
        np.savez(tmp_path / "a.npz", w=np.arange(3), t=np.array("ab"))
        data = (tmp_path / "a.npz").read_bytes()
        places = range(first, len(data), 3)

        async def convert_all() -> int:
            refused = 0
            for at in places:
                (tmp_path / "b.npz").write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
                try:
                    await penstock.convert(tmp_path / "b.npz", tmp_path / "c.npz", overwrite=True)
                except PenstockError:
                    refused += 1

            return refused

        assert anyio.run(convert_all) > len(places) // 2

    def test_what_claims_far_more_than_it_stores(self, tmp_path: Path) -> None:
        member = io.BytesIO()
        np.save(member, np.zeros(2**20, np.int8))
        with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
            for at in range(65):
                archive.writestr(f"{at}.npy", member.getvalue())

        with pytest.raises(ExpansionError):
            penstock.sync.convert(tmp_path / "a.npz", tmp_path / "new", max_expansion=100)

    def test_archives_of_other_kinds_are_refused(self, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
            archive.writestr("notes.txt", "hello")
        (tmp_path / "b.npz").write_bytes(b"no archive")

        with pytest.raises(UnsupportedFormatError, match=r"'notes.txt', which is no array"):
            penstock.sync.convert(tmp_path / "a.npz", tmp_path / "new")
        with pytest.raises(CorruptCheckpointError, match="is no intact npz file"):
            penstock.sync.convert(tmp_path / "b.npz", tmp_path / "new")

    def test_an_npz_archive_has_no_items(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "a.npz", w=1)
        with pytest.raises(NotACheckpointError, match="no item 'default'"):
            penstock.sync.convert(tmp_path / "a.npz", tmp_path / "new", item="default")

    def test_a_restore_says_what_reads_it(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "a.npz", w=1)
        with pytest.raises(UnsupportedFormatError, match="penstock convert"):
            penstock.sync.restore(tmp_path / "a.npz")


class TestWriting:
    def test_numpy_reads_what_is_written(self, tmp_path: Path, assert_same: AssertSame) -> None:
        tree: Any = {
            "layers": [{"w": np.ones((2, 3))}, {"w": np.zeros(4, np.uint8)}],
            "step": 3,
            "a/b": "text",
        }
        saved(tmp_path / "old", tree, custom_metadata={"lr": 0.5})

        report = penstock.sync.convert(tmp_path / "old", tmp_path / "new.npz")

        found = loaded(tmp_path / "new.npz")
        assert_same(found["layers.0.w"], tree["layers"][0]["w"])
        assert_same(found["layers.1.w"], tree["layers"][1]["w"])
        assert (found["step"], found["a/b"]) == (3, "text")
        assert (report.n_leaves, report.nbytes) == (4, 2 * 3 * 8 + 4 + 8)
        with zipfile.ZipFile(tmp_path / "new.npz") as archive:
            assert archive.testzip() is None
            assert json.loads(archive.comment) == {"lr": 0.5}
            assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}

        penstock.sync.convert(tmp_path / "new.npz", tmp_path / "back")
        assert penstock.sync.metadata(tmp_path / "back").custom_metadata == {"lr": 0.5}

    def test_a_tree_comes_back_from_an_npz_archive(self, tmp_path: Path, assert_same: AssertSame) -> None:
        saved(tmp_path / "old", TREE)
        penstock.sync.convert(tmp_path / "old", tmp_path / "a.npz")
        penstock.sync.convert(tmp_path / "a.npz", tmp_path / "b.npz")
        penstock.sync.convert(tmp_path / "b.npz", tmp_path / "new")

        assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
        assert_same(penstock.sync.restore(tmp_path / "new"), TREE)

    @pytest.mark.parametrize("options", [{}, {"codec": "zstd"}])
    def test_chunks_of_any_shape_come_in_order(self, tmp_path: Path, options: Any) -> None:
        mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
        spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", "y"))  # type: ignore[no-untyped-call]  # jax's
        whole = np.arange(2**16, dtype=np.float32).reshape(2**8, -1)
        tree = {"sharded": jax.device_put(whole, spec), "turned": whole.T, "small": np.arange(3)}
        with penstock.sync.Checkpointer(save_format=penstock.SaveFormat(**options)) as checkpointer:
            checkpointer.save(tmp_path / "old", tree).result()

        penstock.sync.convert(tmp_path / "old", tmp_path / "new.npz", memory_limit=2**16)

        found = loaded(tmp_path / "new.npz")
        assert np.array_equal(found["sharded"], whole)
        assert np.array_equal(found["turned"], whole.T)
        assert np.array_equal(found["small"], np.arange(3))

    @pytest.mark.parametrize(
        ("tree", "error", "problem"),
        [
            ({"w": np.ones(2, ml_dtypes.bfloat16)}, InvalidLeafError, "as in dtype='float32'"),
            ({"w": np.ones(2, ml_dtypes.int4)}, InvalidLeafError, "as in dtype='int8'"),
            ({"key": jax.random.key(1)}, InvalidLeafError, r"PRNG keys .* rename=\{'key': None\}"),
            (
                {"w": 1, "x": [None, {}, [], ()]},
                SpecError,
                r"\['x'\]\[2\] and 1 more; .*\{'x.0': None\}",
            ),
            ({"a": 1, "a.npy": 2}, DuplicateNameError, r"a\.npy"),
            ({"a\0b": 1}, InvalidLeafError, "zero byte"),
            ({"text": "a\0"}, InvalidLeafError, "zero characters"),
        ],
    )
    def test_leaves_that_npz_cannot_hold_are_named(
        self, tmp_path: Path, tree: Any, error: type[Exception], problem: str
    ) -> None:
        saved(tmp_path / "old", tree)
        with pytest.raises(error, match=problem):
            penstock.sync.convert(tmp_path / "old", tmp_path / "new.npz")

        assert [path.name for path in tmp_path.iterdir()] == ["old"]

    def test_a_name_too_long_for_npz_is_refused(self, tmp_path: Path) -> None:
        penstock.sync.export_safetensors({"a" * 2**16: np.ones(1)}, tmp_path / "old.safetensors")
        with pytest.raises(InvalidLeafError, match="too long"):
            penstock.sync.convert(tmp_path / "old.safetensors", tmp_path / "new.npz")

    def test_leaves_are_cast_and_left_out_on_the_way_into_npz(self, tmp_path: Path) -> None:
        saved(tmp_path / "old", {"w": np.ones(2, ml_dtypes.bfloat16), "opt": [None, {}]})
        penstock.sync.convert(tmp_path / "old", tmp_path / "new.npz", rename={"opt": None}, dtype="float32")

        found = loaded(tmp_path / "new.npz")
        assert {name: array.dtype for name, array in found.items()} == {"w": np.float32}

    def test_an_npz_archive_holds_one_step_and_one_item(self, tmp_path: Path) -> None:
        with penstock.sync.CheckpointManager(tmp_path / "run") as manager:
            for step in (1, 2):
                manager.save(step, {"w": np.ones(step)}, metrics={"loss": 1.0})

        target = tmp_path / "new.npz"
        with pytest.raises(SpecError, match="an npz file holds one step"):
            penstock.sync.convert(tmp_path / "run", target)

        # Of a step it holds the tree. The metrics are in the manager's own item.
        penstock.sync.convert(tmp_path / "run" / "2", target)
        assert {name: array.shape for name, array in loaded(target).items()} == {"w": (2,)}

    def test_which_of_two_trees_is_asked(self, tmp_path: Path) -> None:
        saved(tmp_path / "two", penstock.Composite(a={"w": np.ones(1)}, b={"w": np.ones(2)}))

        with pytest.raises(SpecError, match="an npz file holds one tree") as caught:
            penstock.sync.convert(tmp_path / "two", tmp_path / "new.npz")
        assert "item=" in str(caught.value)
        penstock.sync.convert(tmp_path / "two", tmp_path / "new.npz", item="b")
        assert loaded(tmp_path / "new.npz")["w"].shape == (2,)

    @pytest.mark.parametrize(
        ("name", "options", "error"),
        [
            ("new", {"format": "npz"}, PathError),
            ("new.npz", {"format": "orbax"}, PathError),
            ("new.npz", {"format": "safetensors"}, PathError),
            ("new.npz", {"max_shard_bytes": 10}, SpecError),
            ("new.npz", {"coordinator": SimpleNamespace(processes=(0, 1))}, SpecError),
            ("new.npz", {"save_format": penstock.SaveFormat(codec="zstd")}, SpecError),
            ("new.npz", {"custom_metadata": {"text": "a" * 2**16}}, SpecError),
            ("new.npz", {"custom_metadata": {"text": object()}}, SpecError),
        ],
    )
    def test_options_that_do_not_fit(
        self, tmp_path: Path, name: str, options: Any, error: type[Exception]
    ) -> None:
        saved(tmp_path / "old", {"w": 1})
        with pytest.raises(error):
            penstock.sync.convert(tmp_path / "old", tmp_path / name, **options)

        assert [path.name for path in tmp_path.iterdir()] == ["old"]

    def test_only_an_archive_is_overwritten(self, tmp_path: Path) -> None:
        saved(tmp_path / "old", {"w": 1})
        target = tmp_path / "new.npz"
        np.savez(target, other=1)

        with pytest.raises(DestinationExistsError):
            penstock.sync.convert(tmp_path / "old", target)
        penstock.sync.convert(tmp_path / "old", target, overwrite=True)
        assert list(loaded(target)) == ["w"]

        (tmp_path / "dir.npz").mkdir()
        with pytest.raises(PathError):
            penstock.sync.convert(tmp_path / "old", tmp_path / "dir.npz", overwrite=True)


STEPS = ("open_data_file", "create_data_file", "data.write_at", "data.sync", "publish")


@pytest.mark.anyio
class TestInterrupted:
    @pytest.mark.parametrize("operation", STEPS)
    async def test_cancelled_midway_leaves_nothing(self, tmp_path: Path, operation: str) -> None:
        await penstock.save(tmp_path / "old", {"a": np.ones(3), "b": np.arange(2**16)})
        store = FaultyStore(LocalStore())
        hang = store.hang_on(operation)

        async with anyio.create_task_group() as tasks:
            convert = partial(penstock.convert, store=store, memory_limit=2**18)
            tasks.start_soon(convert, tmp_path / "old", tmp_path / "x.npz")
            await hang.wait_reached()
            tasks.cancel_scope.cancel()
            hang.release()

        assert store.open_files == 0
        left = {"old", "x.npz"} if operation == "publish" else {"old"}
        assert {path.name for path in tmp_path.iterdir()} <= left

    @pytest.mark.parametrize("operation", [*STEPS, "file.read_at"])
    async def test_failing_midway_leaves_nothing(self, tmp_path: Path, operation: str) -> None:
        await penstock.save(tmp_path / "old", {"a": np.ones(3), "b": np.arange(2**16)})
        store = FaultyStore(LocalStore())
        store.fail_on(operation)

        with pytest.raises(StorageError):
            await penstock.convert(tmp_path / "old", tmp_path / "x.npz", store=store, memory_limit=2**18)

        assert store.open_files == 0
        assert [path.name for path in tmp_path.iterdir()] == ["old"]

    async def test_a_source_that_is_replaced_meanwhile_is_converted_anew(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "a.npz", w=np.ones(3))
        np.savez(tmp_path / "b.npz", w=np.zeros(3))
        store = FaultyStore(LocalStore())
        hang = store.hang_on("data.sync")

        async def replace() -> None:
            await hang.wait_reached()
            (tmp_path / "b.npz").rename(tmp_path / "a.npz")
            hang.release()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(replace)
            await penstock.convert(tmp_path / "a.npz", tmp_path / "c.npz", store=store)

        np.testing.assert_array_equal(np.load(tmp_path / "c.npz")["w"], np.zeros(3))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npz", "c.npz"]

    async def test_the_budget_is_kept_and_given_back(self, tmp_path: Path) -> None:
        arrays: Any = {str(at): np.full(2**14, at, np.int32) for at in range(8)}
        np.savez_compressed(tmp_path / "c.npz", **arrays)
        np.savez(tmp_path / "a.npz", large=np.arange(2**17), **arrays)
        memory = penstock.MemoryRegulator(2**19)

        for name in ("a", "c"):
            await penstock.convert(
                tmp_path / f"{name}.npz", tmp_path / "x.npz", memory=memory, overwrite=True
            )

        assert 0 < memory.statistics().peak <= 2**19
        assert memory.statistics().leased == 0
