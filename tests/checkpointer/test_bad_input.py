"""Errors in the input are reported clearly, and before anything is written."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import penstock
from penstock import Checkpointer
from penstock.config import Config
from penstock.errors import (
    ChecksumError,
    ClosedError,
    ConfigError,
    CorruptCheckpointError,
    DeletedLeafError,
    DestinationExistsError,
    DuplicateNameError,
    IncompleteCheckpointError,
    InvalidLeafError,
    NoHandlerError,
    NotACheckpointError,
    PathError,
    PenstockError,
    RunningLoopError,
    SpecError,
    StorageError,
    StructureMismatchError,
)

pytestmark = pytest.mark.anyio


def deleted() -> jax.Array:
    array = jnp.ones(3)
    array.delete()
    return array


def donated() -> jax.Array:
    array = jnp.ones(3)
    jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    return array


class Text(str):
    __slots__ = ()


class TestTrees:
    @pytest.mark.parametrize(
        ("leaf", "error", "words"),
        [
            (object(), NoHandlerError, r"no handler for object. Register one with registry\.register\("),
            (b"bytes", NoHandlerError, "no handler for bytes"),
            (SimpleNamespace(), NoHandlerError, "no handler for types.SimpleNamespace"),
            (np.array([None]), InvalidLeafError, "dtype object cannot be stored; make it a list"),
            (np.array(["a"]), InvalidLeafError, "dtype <U1 cannot be stored; save a list of str"),
            (np.array([b"a"]), InvalidLeafError, r"dtype \|S1 cannot be stored; .* bytes as uint8"),
            (np.zeros(2, "datetime64[s]"), InvalidLeafError, r"save value\.view\(np\.int64\)"),
            (np.zeros(2, [("a", int)]), InvalidLeafError, "save its fields as separate leaves"),
            (np.ma.masked_array([1], [True]), InvalidLeafError, "lose its mask"),
            (2**63, InvalidLeafError, "the int 9223372036854775808 does not fit int64"),
            (-(2**63) - 1, InvalidLeafError, "does not fit int64"),
            (Text("a"), InvalidLeafError, "come back as str"),
            ("\ud800", InvalidLeafError, "no valid Unicode text"),
            (signal.SIGTERM, InvalidLeafError, "Signals would come back as a plain number"),
            (jnp.zeros(2, jnp.uint4), InvalidLeafError, "dtype uint4 cannot be stored; convert it to uint8"),
            (jax.eval_shape(lambda: jnp.ones(2)), InvalidLeafError, "is abstract"),
            (deleted(), DeletedLeafError, "deleted or donated before it was staged"),
            (donated(), DeletedLeafError, "deleted or donated before it was staged"),
        ],
        ids=lambda value: type(value).__name__ if not isinstance(value, type | str) else "",
    )
    async def test_a_leaf_that_cannot_be_saved(
        self, tmp_path: Path, leaf: Any, error: type[PenstockError], words: str
    ) -> None:
        async with Checkpointer() as checkpointer:
            with pytest.raises(error, match=words) as caught:
                await checkpointer.save(tmp_path / "new" / "a", {"good": np.ones(9), "x": [1, leaf]})

            assert caught.value.key_path == "['x'][1]"
            assert "['x'][1]" in str(caught.value)
            assert caught.value.stage == "flatten"
            assert checkpointer.statistics().leased == 0
            await (await checkpointer.save(tmp_path / "b", {"good": np.ones(9)}))

        assert os.listdir(tmp_path) == ["b"]

    @pytest.mark.parametrize(
        ("tree", "words"),
        [(object(), "the whole tree: no handler for object"), (2**63, "the whole tree: the int 92233720368")],
    )
    async def test_a_tree_that_is_one_such_leaf(self, tmp_path: Path, tree: Any, words: str) -> None:
        async with Checkpointer() as checkpointer:
            with pytest.raises(PenstockError, match=words):
                await checkpointer.save(tmp_path / "a", tree)

    async def test_a_tracer(self, tmp_path: Path) -> None:
        seen: list[Any] = []
        jax.jit(lambda x: seen.append(x))(jnp.ones(2))
        async with Checkpointer() as checkpointer:
            with pytest.raises(InvalidLeafError, match="tracer: save outside of jit"):
                await checkpointer.save(tmp_path / "a", {"x": seen[0]})

        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize(
        ("tree", "error", "words"),
        [
            ({"a.b": 1, "a": {"b": 2}}, DuplicateNameError, r"\['a'\]\['b'\] and \['a.b'\] would both"),
            ({"a": [1], "a.0": np.ones(1)}, DuplicateNameError, r"stored as 'a\.0'; rename one"),
            ({1: 1, "b": 2}, SpecError, "jax cannot take the tree apart"),
            ({"a\ud800": 1}, InvalidLeafError, r"\['a\\ud800'\]: a key in its path is no valid Unicode"),
        ],
    )
    async def test_a_tree_that_cannot_be_saved(
        self, tmp_path: Path, tree: Any, error: type[PenstockError], words: str
    ) -> None:
        async with Checkpointer() as checkpointer:
            with pytest.raises(error, match=words):
                await checkpointer.save(tmp_path / "a", tree)

        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize(
        ("tree", "words"),
        [({"~x": "text"}, r"\['~x'\]"), ({"a": "text", "a/b": "text"}, r"\['a/b'\].*collides")],
    )
    async def test_strings_whose_names_orbax_could_not_find(
        self, tmp_path: Path, tree: dict[str, str], words: str
    ) -> None:
        async with Checkpointer() as checkpointer:
            with pytest.raises(InvalidLeafError, match=words):
                await checkpointer.save(tmp_path / "missing" / "a", tree)

        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize(
        "metadata",
        [
            {"a": object()},
            {"a": {1, 2}},
            {("a",): 1},
            {"a": b"x"},
            ["a"],
            {"a": np.float32(1)},
            {"a": jnp.ones(1)},
        ],
    )
    async def test_custom_metadata_that_is_not_json(self, tmp_path: Path, metadata: Any) -> None:
        async with Checkpointer() as checkpointer:
            with pytest.raises(SpecError, match="custom_metadata"):
                await checkpointer.save(tmp_path / "a", {"x": 1}, custom_metadata=metadata)

        assert os.listdir(tmp_path) == []


class TestPaths:
    @pytest.mark.parametrize("path", ["s3://bucket", "s3://bucket/", Path("s3://bucket")])
    async def test_a_bucket_is_no_place_for_a_checkpoint(self, path: Any) -> None:
        async with Checkpointer() as checkpointer:
            with pytest.raises(PathError, match=r"'s3://bucket' is a whole bucket; .* s3://bucket/run"):
                await checkpointer.save(path, {"a": 1})

    @pytest.mark.parametrize(
        ("path", "words"),
        [
            ("", "is empty"),
            ("  ", "is empty"),
            ("a\0b", "NUL"),
            (b"bytes", "is not text"),
            ("hdfs://bucket/a", "names a hdfs:// store; local paths, s3://, gs://, az:// and keeper://"),
            (Path("hdfs://bucket/a"), "names a hdfs:// store"),
            ("file://elsewhere/a", "names a file:// store"),
            ("/tmp/a.orbax-checkpoint-tmp", "which marks an interrupted save"),
            ("/tmp/a.orbax-checkpoint-tmp-7", "which marks an interrupted save"),
        ],
    )
    async def test_a_path_that_names_no_local_directory(self, path: Any, words: str) -> None:
        async with Checkpointer() as checkpointer:
            with pytest.raises(PathError, match=words):
                await checkpointer.save(path, {"a": 1})
            if "marks" not in words:
                with pytest.raises(PathError, match=words):
                    await checkpointer.restore(path)
                with pytest.raises(PathError, match=words):
                    await checkpointer.metadata(path)

    @pytest.mark.parametrize("path", [None, 7])
    async def test_no_path_at_all(self, path: Any) -> None:
        async with Checkpointer() as checkpointer:
            with pytest.raises(TypeError, match="expected str, bytes or"):
                await checkpointer.save(path, {"a": 1})

    @pytest.mark.parametrize(
        "name", ["a b", "ü", "a%20b", "a://b", "step=7", ".hidden", "a#b?c", "-", "new\nline"]
    )
    async def test_strange_names_are_fine(self, tmp_path: Path, name: str) -> None:
        async with Checkpointer() as checkpointer:
            await (await checkpointer.save(tmp_path / name, {"x": 1}))
            assert await checkpointer.restore(str(tmp_path / name)) == {"x": 1}
            if "%" not in name:
                assert await checkpointer.restore(f"file://{tmp_path / name}") == {"x": 1}

    async def test_relative_and_home_paths(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        async with Checkpointer() as checkpointer:
            await (await checkpointer.save("a/../b/c", {"x": 1}))
            await (await checkpointer.save("~/c", {"x": 2}))
            assert await checkpointer.restore(tmp_path / "b" / "c") == {"x": 1}
            assert await checkpointer.restore(tmp_path / "home" / "c") == {"x": 2}

    @pytest.mark.parametrize("kind", ["file", "empty directory", "checkpoint"])
    async def test_a_path_that_exists(self, tmp_path: Path, kind: str) -> None:
        path = tmp_path / "a"
        async with Checkpointer() as checkpointer:
            if kind == "file":
                path.write_bytes(b"precious")
            elif kind == "empty directory":
                path.mkdir()
            else:
                await (await checkpointer.save(path, {"x": 1}))

            before = sorted(tmp_path.rglob("*"))
            with pytest.raises(DestinationExistsError, match="exists; pass overwrite=True") as caught:
                await checkpointer.save(path, {"x": object()})
            assert isinstance(caught.value, FileExistsError)

        assert sorted(tmp_path.rglob("*")) == before

    async def test_a_file_is_never_overwritten(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_bytes(b"precious")
        async with Checkpointer() as checkpointer:
            with pytest.raises(SpecError, match="is a file"):
                await checkpointer.save(tmp_path / "a", {"x": 1}, overwrite=True)

        assert (tmp_path / "a").read_bytes() == b"precious"
        assert os.listdir(tmp_path) == ["a"]

    async def test_a_directory_of_something_else_is_never_overwritten(self, tmp_path: Path) -> None:
        (tmp_path / "home").mkdir()
        (tmp_path / "home" / "thesis.tex").write_bytes(b"precious")
        async with Checkpointer() as checkpointer:
            with pytest.raises(SpecError, match="is a directory but not a checkpoint"):
                await checkpointer.save(tmp_path / "home", {"x": 1}, overwrite=True)

        assert (tmp_path / "home" / "thesis.tex").read_bytes() == b"precious"
        assert os.listdir(tmp_path) == ["home"]

    async def test_an_empty_directory_and_a_half_written_checkpoint_are_overwritten(
        self, tmp_path: Path
    ) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "broken").mkdir()
        (tmp_path / "broken" / "_METADATA").write_bytes(b"")
        async with Checkpointer() as checkpointer:
            for name in ("empty", "broken"):
                await (await checkpointer.save(tmp_path / name, {"x": 1}, overwrite=True))
                assert await checkpointer.restore(tmp_path / name) == {"x": 1}

    async def test_a_path_below_a_file_or_where_nothing_can_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        async with Checkpointer() as checkpointer:
            with pytest.raises(StorageError, match=r"'.*/file' is not a directory"):
                await checkpointer.save(tmp_path / "file" / "a" / "b", {"x": 1})
            with pytest.raises(StorageError, match=r"create '/proc/penstock/a'|mkdir '/proc/penstock'"):
                await (await checkpointer.save("/proc/penstock/a", {"x": 1}))
            with pytest.raises(StorageError, match="File name too long"):
                await (await checkpointer.save(tmp_path / ("a" * 300), {"x": 1}))
            assert checkpointer.statistics().leased == 0

        assert os.listdir(tmp_path) == ["file"]


def caught(function: Callable[[Path], Any], path: Path) -> tuple[Any, PenstockError | None]:
    try:
        return function(path), None
    except PenstockError as error:
        return None, error


class TestDamage:
    TREE: dict[str, Any] = {  # noqa: RUF012  # never changed
        "large": np.arange(5000),
        "name": "text",
        "w": np.arange(7, dtype=np.float32),
    }

    @pytest.fixture
    def saved(self, tmp_path: Path) -> Path:
        penstock.sync.save(tmp_path / "a", {**self.TREE, "j": jnp.arange(3)})
        return tmp_path / "a"

    @pytest.fixture
    def restoring(self) -> Iterator[Callable[[Path], Any]]:
        """A blocking Checkpointer, so that the test needs no event loop."""
        with penstock.sync.Checkpointer() as checkpointer:
            yield checkpointer.restore

    def test_nothing_there(self, tmp_path: Path, restoring: Callable[[Path], Any]) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "file").write_bytes(b"x")
        for name, words in (
            ("absent", "does not exist"),
            ("empty", "is no checkpoint"),
            ("file", "is a file"),
        ):
            with pytest.raises(NotACheckpointError, match=words) as caught:
                restoring(tmp_path / name)
            assert caught.value.path == str(tmp_path / name)
            assert isinstance(caught.value, FileNotFoundError)

    @pytest.mark.process
    def test_a_save_that_was_killed_half_way(self, tmp_path: Path, restoring: Callable[[Path], Any]) -> None:
        program = """
import sys, numpy as np, penstock.sync
from penstock.handlers.stores.local import LocalStore
from penstock.testing import FaultyStore
store = FaultyStore(LocalStore())
hang = store.hang_on("write_file", 2)
with penstock.sync.Checkpointer(store=store) as checkpointer:
    checkpointer.save(sys.argv[1], {"w": np.arange(1000)})
    hang.wait_reached_blocking()
    print("half-way", flush=True)
"""
        environment = {**os.environ, "PYTHONPATH": str(Path(penstock.__file__).parents[1])}
        command = [sys.executable, "-c", program, str(tmp_path / "a")]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "half-way\n"
            process.kill()

        assert os.listdir(tmp_path) == ["a.orbax-checkpoint-tmp"]
        for name in ("a", "a.orbax-checkpoint-tmp"):
            with pytest.raises(IncompleteCheckpointError, match="a save was interrupted"):
                restoring(tmp_path / name)

        penstock.sync.save(tmp_path / "a", {"w": 1})
        assert restoring(tmp_path / "a") == {"w": 1}
        assert os.listdir(tmp_path) == ["a"]

    def test_a_truncated_data_file(self, saved: Path, restoring: Callable[[Path], Any]) -> None:
        for file in sorted((saved / "d").iterdir(), key=lambda file: file.stat().st_size):
            os.truncate(file, file.stat().st_size - 1)

        with pytest.raises(CorruptCheckpointError, match=re.escape(str(saved))):
            restoring(saved)

    def test_a_flipped_bit_in_the_data_names_the_leaf(
        self, saved: Path, restoring: Callable[[Path], Any]
    ) -> None:
        file = max((saved / "d").iterdir(), key=lambda file: file.stat().st_size)
        data = bytearray(file.read_bytes())
        at = data.index(np.arange(5000)[3000:3010].tobytes())
        data[at] ^= 1
        file.write_bytes(data)

        with pytest.raises(ChecksumError, match=r"differ from those written \(leaf \['large'\]\)") as caught:
            restoring(saved)
        assert caught.value.key_path == "['large']"

    def test_a_flipped_bit_in_a_document_is_found_or_changes_nothing(
        self, saved: Path, restoring: Callable[[Path], Any], assert_same: Callable[[Any, Any], None]
    ) -> None:
        whole = restoring(saved)
        nodes = min((saved / "d").iterdir(), key=lambda file: file.stat().st_size)
        for file in (saved / "manifest.ocdbt", nodes, saved / "_METADATA", saved / "_strings.json"):
            data = file.read_bytes()
            silent = 0
            for at in range(0, len(data), max(1, len(data) // 16)):
                damaged = bytearray(data)
                damaged[at] ^= 4
                file.write_bytes(damaged)
                found, error = caught(restoring, saved)
                if error is not None:
                    assert isinstance(error, CorruptCheckpointError)
                    assert str(saved) in str(error)
                    continue

                silent += 1
                assert_same(found, whole)
            file.write_bytes(data)
            assert silent < 16

        assert_same(restoring(saved), whole)

    def test_a_missing_document(self, saved: Path, restoring: Callable[[Path], Any]) -> None:
        for name in ("manifest.ocdbt", "_strings.json"):
            kept = (saved / name).rename(saved / "kept")
            with pytest.raises(CorruptCheckpointError, match=re.escape(name)):
                restoring(saved)
            kept.rename(saved / name)

    def test_a_target_with_a_wrong_structure(self, saved: Path) -> None:
        with pytest.raises(
            StructureMismatchError, match=r"missing +\['v'\].*did you mean \['w'\]|unexpected"
        ):
            penstock.sync.restore(saved, like={"v": np.float32})


class TestConfig:
    @pytest.mark.parametrize("limit", [0, -1, "0", "-1GiB", "many", 1.5, float("nan"), True, "1 Mb"])
    async def test_a_budget_that_is_none(self, limit: Any) -> None:
        with pytest.raises(ConfigError, match=r"memory\.limit_bytes") as caught:
            Checkpointer(memory_limit=limit)
        assert caught.value.key == "memory.limit_bytes"
        assert caught.value.source == "argument"

    @pytest.mark.parametrize(
        ("toml", "words"),
        [
            ("memory = {limit_bytes = nan}", r"memory\.limit_bytes: must be"),
            ("memory = {limit_bytes = inf}", r"memory\.limit_bytes: must be"),
            ("memory = {limit_bytes = 0}", r"memory\.limit_bytes: must be positive, not 0"),
            ("memory = {limit_bytes = -5}", r"memory\.limit_bytes: must be positive, not -5"),
            ("memory = {limit = 5}", r"memory\.limit: no such option; did you mean memory\.limit_bytes"),
            ("memory = 5", "memory: must be a table"),
            ("store = {root = 1}", r"store\.root: no such option; known here: store\.io"),
            ("shop = {root = 1}", r"shop\.root: no such option; known here: memory"),
            ("save.write.concurrency = 0", r"write\.concurrency: must be positive"),
            ("save.write.concurency = 2", r"write\.concurency: no such option; did you mean"),
            ("save.wright.concurrency = 2", "no stage is called 'wright'; did you mean 'write'"),
            ("save.stages = ['flatten', 'flatten']", "two stages are called 'flatten'"),
            ("save.stages = ['flaten']", "no stage is called 'flaten'; did you mean 'flatten'"),
            ("save.piece_bytes = '16 Mb'", "is not a number of bytes"),
            ("not toml", "is not TOML"),
        ],
    )
    async def test_a_file_with_a_mistake(self, tmp_path: Path, toml: str, words: str) -> None:
        file = tmp_path / "penstock.toml"
        file.write_text(toml)
        with pytest.raises(SpecError, match=words) as caught:
            await Checkpointer(config=file).__aenter__()
        if isinstance(caught.value, ConfigError) and "TOML" not in words:
            assert caught.value.source == str(file)

    async def test_a_variable_with_a_mistake(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PENSTOCK_MEMORY__LIMIT", "1GiB")
        with pytest.raises(ConfigError, match="did you mean PENSTOCK_MEMORY__LIMIT_BYTES"):
            Checkpointer()
        monkeypatch.delenv("PENSTOCK_MEMORY__LIMIT")
        monkeypatch.setenv("PENSTOCK_CONFIG", "/nowhere.toml")
        with pytest.raises(ConfigError, match=r"cannot read '/nowhere.toml'.*PENSTOCK_CONFIG"):
            Checkpointer()
        assert Checkpointer(config=Config()).statistics().limit > 0


class TestUse:
    async def test_a_checkpointer_refuses_calls_before_it_is_entered_and_after_it_is_left(
        self, tmp_path: Path
    ) -> None:
        checkpointer = Checkpointer()
        for _ in ("before", "after"):
            with pytest.raises(ClosedError, match="use it inside its `async with`"):
                await checkpointer.save(tmp_path / "a", {"x": 1})
            with pytest.raises(ClosedError):
                await checkpointer.restore(tmp_path / "a")
            with pytest.raises(ClosedError):
                await checkpointer.metadata(tmp_path / "a")
            if _ == "before":
                async with checkpointer:
                    with pytest.raises(ClosedError, match="entered once"):
                        await checkpointer.__aenter__()

        with pytest.raises(ClosedError, match="entered once; make another one"):
            async with checkpointer:
                pytest.fail("entered twice")
        assert os.listdir(tmp_path) == []

    async def test_the_blocking_face_refuses_a_running_loop(self, tmp_path: Path) -> None:
        calls: list[Callable[[], object]] = [
            lambda: penstock.sync.save(tmp_path / "a", {}),
            lambda: penstock.sync.restore(tmp_path / "a"),
            lambda: penstock.sync.metadata(tmp_path / "a"),
            lambda: penstock.sync.Checkpointer(),
        ]
        for call in calls:
            with pytest.raises(RunningLoopError, match=r"await penstock\.save"):
                call()
        assert os.listdir(tmp_path) == []

    async def test_result_refuses_the_thread_of_the_loop(self, tmp_path: Path) -> None:
        async with Checkpointer() as checkpointer:
            save = await checkpointer.save(tmp_path / "a", {"x": np.ones(10)})
            if not save.done:
                with pytest.raises(RunningLoopError, match="await the future"):
                    save.result(1)
            report = await save
            assert save.result(0) is report
