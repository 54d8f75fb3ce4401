"""Extensions of third parties: leaf types with their own files, streaming handlers, stages and options."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest
from anyio import Event

from penstock import Checkpointer, HandlerRegistry, MemoryRegulator
from penstock.checkpointer import pipelines
from penstock.config import Config
from penstock.errors import (
    ConfigError,
    HandlerFailedError,
    IncompletePipelineError,
    NoHandlerError,
    PipelineError,
    SaveCancelledError,
    SpecError,
    StructureMismatchError,
    TreeDifference,
)
from penstock.handlers import LocalStore, NumpyHandler, default_handlers
from penstock.kernel import (
    Actor,
    Leaf,
    LeafSpec,
    ParamInfo,
    PiecePlan,
    ReadLeaves,
    SaveRun,
    StagedBatch,
    StoredRows,
    Target,
    Waitable,
)
from penstock.testing import FaultyStore

pytestmark = pytest.mark.anyio


@dataclass(frozen=True)
class Table:
    """A leaf, since it is not a registered PyTree node."""

    columns: dict[str, list[float]]


class TableHandler:
    """Batch protocol: one npz file for each table, written by the handler's own threads."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(2)
        self.fail_in = ""
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()
        self.finalized: list[str] = []
        self.futures: list[Future[None]] = []
        self.lazy = False  #: start to write only when the result is waited for

    def typestr(self) -> str:
        return "tests.Table"

    def memory_size(self, values: Sequence[Any]) -> Sequence[tuple[int, int]]:
        sizes = [8 * sum(map(len, value.columns.values())) for value in values]
        return [(size, size) for size in sizes]

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], args: Sequence[Any] | None = None
    ) -> Sequence[Waitable]:
        self._fail("serialize")
        copies = [{name: np.array(column) for name, column in value.columns.items()} for value in values]
        self.futures = [
            self.pool.submit(self._write, info, copy) for info, copy in zip(infos, copies, strict=True)
        ]
        return [_Opening(self.gate, future) for future in self.futures] if self.lazy else self.futures

    async def deserialize(
        self, infos: Sequence[ParamInfo], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        self._fail("deserialize")
        return [Table({k: v.tolist() for k, v in np.load(self._file(info)).items()}) for info in infos]

    async def metadata(self, infos: Sequence[ParamInfo]) -> Sequence[Any]:
        return [list(np.load(self._file(info))) for info in infos]

    def finalize(self, directory: str) -> None:
        self._fail("finalize")
        assert all(future.done() for future in self.futures)
        self.finalized.append(directory)

    def _write(self, info: ParamInfo, columns: dict[str, Any]) -> None:
        self.begun.set()
        assert self.gate.wait(30)
        self._fail("future")
        np.savez(self._file(info), **columns)

    def _file(self, info: ParamInfo) -> str:
        return os.path.join(info.directory, f"{info.name}.npz")

    def _fail(self, where: str) -> None:
        if self.fail_in == where:
            raise RuntimeError(f"failing in {where}")


class _Opening:
    """A future that opens a gate when it is waited for."""

    def __init__(self, gate: threading.Event, future: Future[None]) -> None:
        self.gate = gate
        self.future = future

    def result(self, timeout: float | None = None) -> None:
        self.gate.set()
        self.future.result(timeout)


@pytest.fixture
def handler() -> Iterator[TableHandler]:
    handler = TableHandler()
    yield handler
    handler.gate.set()
    handler.pool.shutdown()


@pytest.fixture
def registry(handler: TableHandler) -> HandlerRegistry:
    registry = default_handlers(entry_points=False)
    registry.register(Table, handler)
    return registry


async def test_what_a_restored_leaf_holds_is_leased(
    tmp_path: Path, registry: HandlerRegistry, handler: TableHandler
) -> None:
    tables = {f"t{at}": Table({"a": [1.0] * 50}) for at in range(4)}  # 400 bytes each
    async with Checkpointer(registry=registry, memory_limit=1000) as checkpointer:
        await (await checkpointer.save(tmp_path / "a", tables))

    leased: list[int] = []
    async with Checkpointer(registry=registry, memory_limit=1000) as checkpointer:
        load = handler.deserialize

        async def watched(*arguments: Any) -> Any:
            leased.append(checkpointer.statistics().leased)
            return await load(*arguments)

        cast("Any", handler).deserialize = watched  # to observe the calls
        assert await checkpointer.restore(tmp_path / "a", like=tables) == tables
        assert leased == [1600]  # one call, although it exceeds the budget
        # Without a value to measure, each leaf counts as one piece, and all together as at most the budget.
        leased.clear()
        assert await checkpointer.restore(tmp_path / "a") == tables
        assert leased == [1000]
        assert checkpointer.statistics().leased == 0


def tree() -> dict[str, Any]:
    return {"t": [Table({"a": [1.0, 2.0]}), Table({})], "w": np.arange(3), "x": Table({"b": [3.5]})}


class TestBatchHandler:
    async def test_leaves_of_a_batch_handler_are_saved_and_restored_with_all_others(
        self, tmp_path: Path, registry: HandlerRegistry, handler: TableHandler, assert_same: Any
    ) -> None:
        async with Checkpointer(registry=registry) as checkpointer:
            report = await (await checkpointer.save(tmp_path / "a", tree()))
            assert report.n_leaves == 4
            assert report.peak_leased_bytes >= 24
            assert_same(await checkpointer.restore(tmp_path / "a"), tree())
            assert_same(await checkpointer.restore(tmp_path / "a", like=tree()), tree())
            like = {"t": [Table, Table], "w": np.ndarray, "x": Table}
            assert_same(await checkpointer.restore(tmp_path / "a", like=like), tree())
            assert checkpointer.statistics().leased == 0
            kinds = {leaf.name: leaf.kind for leaf in (await checkpointer.metadata(tmp_path / "a")).leaves}

        assert kinds == {"t.0": "tests.Table", "t.1": "tests.Table", "w": "np.ndarray", "x": "tests.Table"}
        assert handler.finalized == [str(tmp_path / "a.orbax-checkpoint-tmp")]
        assert {"t.0.npz", "t.1.npz", "x.npz"} <= set(os.listdir(tmp_path / "a"))

    async def test_a_save_is_staged_when_serialize_returned(
        self, tmp_path: Path, registry: HandlerRegistry, handler: TableHandler
    ) -> None:
        handler.gate.clear()
        state = {"x": Table({"a": [1.0]})}
        async with Checkpointer(registry=registry) as checkpointer:
            save = await checkpointer.save(tmp_path / "a", state)
            assert not save.done
            assert checkpointer.statistics().leased == 8
            state["x"].columns["a"][0] = 7.0
            handler.gate.set()
            await save
            assert await checkpointer.restore(tmp_path / "a") == {"x": Table({"a": [1.0]})}

    @pytest.mark.parametrize("where", ["serialize", "future", "finalize"])
    async def test_an_exception_of_a_batch_handler_is_the_cause_of_the_failed_save(
        self, tmp_path: Path, registry: HandlerRegistry, handler: TableHandler, where: str
    ) -> None:
        handler.fail_in = where
        async with Checkpointer(registry=registry) as checkpointer:
            with pytest.raises(
                HandlerFailedError, match=f"TableHandler failed: .*failing in {where}"
            ) as caught:
                await (await checkpointer.save(tmp_path / "a", {"k": [Table({"a": [1.0]})], "w": np.ones(3)}))
            assert checkpointer.statistics().leased == 0

        error = caught.value
        assert isinstance(error.__cause__, RuntimeError)
        assert error.handler.endswith("test_custom_handlers.TableHandler")
        assert error.key_path == ("finalize of 'tests.Table'" if where == "finalize" else "['k'][0]")
        assert os.listdir(tmp_path) == []

    async def test_an_exception_of_a_batch_handler_is_the_cause_of_the_failed_restore(
        self, tmp_path: Path, registry: HandlerRegistry, handler: TableHandler
    ) -> None:
        async with Checkpointer(registry=registry) as checkpointer:
            await (await checkpointer.save(tmp_path / "a", tree()))
            handler.fail_in = "deserialize"
            with pytest.raises(HandlerFailedError, match="failing in deserialize") as caught:
                await checkpointer.restore(tmp_path / "a")
            assert caught.value.key_path == "['t'][0] and 2 more"
            assert isinstance(caught.value.__cause__, RuntimeError)
            assert checkpointer.statistics().leased == 0

    async def test_background_writes_of_a_batch_handler_end_with_a_cancelled_save(
        self, tmp_path: Path, registry: HandlerRegistry, handler: TableHandler
    ) -> None:
        handler.gate.clear()
        handler.lazy = True
        reached, never = Event(), Event()

        async def hold(message: Any, /) -> Any:
            reached.set()
            await never.wait()
            return message

        pipeline = pipelines.save_pipeline().insert_after("device_to_host", hold)
        async with Checkpointer(registry=registry) as checkpointer:
            save = await checkpointer.save(tmp_path / "a", {"x": Table({"a": [1.0]})}, pipeline=pipeline)
            await reached.wait()
            assert handler.begun.wait(10)
            save.cancel()
            with pytest.raises(SaveCancelledError):
                await save

            assert handler.futures[0].done()
        assert os.listdir(tmp_path) == []

    async def test_without_the_handler_the_error_names_leaf_and_type(
        self, tmp_path: Path, registry: HandlerRegistry
    ) -> None:
        async with Checkpointer(registry=registry) as checkpointer:
            await (await checkpointer.save(tmp_path / "a", tree()))
        async with Checkpointer() as checkpointer:
            with pytest.raises(
                NoHandlerError, match=r"\['t'\]\[0\]: no handler for the stored type 'tests.Table'"
            ):
                await checkpointer.restore(tmp_path / "a")
            with pytest.raises(NoHandlerError, match=r"test_custom_handlers\.Table"):
                await checkpointer.restore(tmp_path / "a", like=tree())
            assert (await checkpointer.metadata(tmp_path / "a")).leaves[0].kind == "tests.Table"

    async def test_a_target_of_its_type_where_something_else_is_stored(
        self, tmp_path: Path, registry: HandlerRegistry
    ) -> None:
        async with Checkpointer(registry=registry) as checkpointer:
            await (await checkpointer.save(tmp_path / "a", {"a": np.ones(2), "b": Table({})}))
            with pytest.raises(StructureMismatchError) as caught:
                await checkpointer.restore(tmp_path / "a", like={"a": Table({}), "b": np.ones(2)})

        assert [(found.kind, found.key_path) for found in caught.value.differences] == [
            ("type", "['a']"),
            ("type", "['b']"),
        ]


class Quantised:
    def __init__(self, codes: Any, scale: float) -> None:
        self.codes = codes
        self.scale = scale


@dataclass(frozen=True)
class QuantisedHandler:
    """Streaming protocol: the scale, followed by a row of codes, as one int8 array."""

    typestr: str = "tests.Quantised"
    inner: NumpyHandler = field(default_factory=NumpyHandler)

    def describe(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], known: dict[Any, LeafSpec]
    ) -> Sequence[LeafSpec]:
        sizes = [value.codes.size + 8 for value in values]
        return [LeafSpec(self.typestr, (n,), "int8", 1, (n,)) for n in sizes]

    def pieces(self, leaf: Leaf, piece_bytes: int) -> Iterator[PiecePlan]:
        value: Any = leaf.value
        scale = np.float64(value.scale).tobytes()
        yield PiecePlan((0,), 0, 8, 8, lambda: memoryview(scale))
        yield PiecePlan(
            (0,), 8, value.codes.size, value.codes.size, lambda: memoryview(value.codes.tobytes())
        )

    def targets(self, stored: StoredRows, likes: Sequence[Any] | None) -> Sequence[Target | TreeDifference]:
        return self.inner.targets(stored, None)

    def build(self, leaves: ReadLeaves) -> Sequence[Any]:
        rows = self.inner.build(leaves)
        return [Quantised(row[8:], float(row[:8].view(np.float64)[0])) for row in rows]


class OwnArrays(TableHandler):
    """Keeps arrays in files of its own, and describes each."""

    def typestr(self) -> str:
        return "np.ndarray"


@pytest.mark.parametrize(
    "options", [{"dtype": np.float32}, {"dtype": {"a": np.float32}}, {"strict": False}], ids=str
)
async def test_a_leaf_that_its_own_handler_reads_is_not_cast(options: Any, tmp_path: Path) -> None:
    async with Checkpointer() as checkpointer:
        await (await checkpointer.save(tmp_path / "c", {"a": np.arange(4.0)}))

    registry = default_handlers(entry_points=False)
    registry.register(np.ndarray, OwnArrays(), override=True)
    async with Checkpointer(registry=registry) as checkpointer:
        with pytest.raises(SpecError, match=r"\['a'\] is read by .*OwnArrays as a whole") as caught:
            await checkpointer.restore(tmp_path / "c", like={"a": np.zeros(5)}, **options)

    assert caught.value.key_path == "['a']"


async def test_a_streaming_handler(tmp_path: Path) -> None:
    registry = default_handlers(entry_points=False)
    registry.register(Quantised, QuantisedHandler())
    codes = np.arange(100, dtype=np.int8)
    async with Checkpointer(registry=registry, memory=MemoryRegulator(64)) as checkpointer:
        await (await checkpointer.save(tmp_path / "a", {"q": Quantised(codes, 0.5), "w": jnp.ones(2)}))
        targets: list[dict[str, Any]] = [{}, {"like": {"q": Quantised, "w": jnp.ones(2)}}]
        for options in targets:
            found: Any = await checkpointer.restore(tmp_path / "a", **options)
            assert (type(found["q"]), found["q"].scale) == (Quantised, 0.5)
            assert found["q"].codes.tobytes() == codes.tobytes()
        leaf = (await checkpointer.metadata(tmp_path / "a")).leaves[0]
        assert (leaf.kind, leaf.shape, leaf.dtype) == ("tests.Quantised", (108,), "int8")
    async with Checkpointer() as checkpointer:
        with pytest.raises(NoHandlerError, match=r"\['q'\].*'tests\.Quantised'"):
            await checkpointer.restore(tmp_path / "a")


@dataclass(frozen=True)
class CountBytes:
    """A stage with an option, which records the bytes that pass."""

    seen: list[int]
    most: int = 10**9

    @property
    def concurrency(self) -> int:
        return 1

    @asynccontextmanager
    async def open(self, run: SaveRun, /) -> AsyncGenerator[Actor]:
        async def count(batch: StagedBatch, /) -> StagedBatch:
            self.seen.append(batch.nbytes)
            if sum(self.seen) > self.most:
                raise OverflowError(f"more than {self.most} bytes to {run.path}")
            return batch

        yield count


class TestPipelines:
    async def test_a_stage_of_the_users_own(self, tmp_path: Path) -> None:
        seen: list[int] = []
        pipeline = pipelines.save_pipeline().insert_after("device_to_host", CountBytes(seen))
        assert pipeline.names[2:4] == ("device_to_host", "count_bytes")
        async with Checkpointer(save_pipeline=pipeline) as checkpointer:
            report = await (await checkpointer.save(tmp_path / "a", {"w": np.ones(1000), "n": 1}))

        assert sum(seen) == report.nbytes == 8008
        assert [stage.name for stage in report.stages] == list(pipeline.names)

    async def test_a_stage_that_fails_undoes_the_save(self, tmp_path: Path) -> None:
        pipeline = pipelines.save_pipeline().insert_after("limit_bytes", CountBytes([], 10))
        async with Checkpointer() as checkpointer:
            with pytest.raises(OverflowError, match=r"more than 10 bytes to .*/a") as caught:
                await (await checkpointer.save(tmp_path / "a", {"w": np.ones(10)}, pipeline=pipeline))
            assert caught.value.__notes__ == ["in stage 'count_bytes'"]
            assert checkpointer.statistics().leased == 0
            await (await checkpointer.save(tmp_path / "b", {"w": np.ones(10)}))  # without the pipeline

        assert os.listdir(tmp_path) == ["b"]

    async def test_a_stage_that_drops_a_leaf_cannot_truncate_a_checkpoint(self, tmp_path: Path) -> None:
        async def drop(batch: StagedBatch, /) -> StagedBatch:
            kept = tuple(leaf for leaf in batch.leaves if leaf.info.name != "b")
            return replace(batch, leaves=kept)

        pipeline = pipelines.save_pipeline().insert_after("limit_bytes", drop)
        async with Checkpointer() as checkpointer:
            with pytest.raises(IncompletePipelineError, match=r"3 leaves .* 2 arrived .* \['b'\]"):
                await (await checkpointer.save(tmp_path / "a", {"a": 1, "b": 2, "c": 3}, pipeline=pipeline))

        assert os.listdir(tmp_path) == []

    async def test_replace_and_without(self, tmp_path: Path) -> None:
        order: list[str] = []

        async def note(batch: Any, /) -> Any:
            order.extend(leaf.info.name for leaf in batch.leaves)
            return batch

        pipeline = pipelines.save_pipeline().replace("prioritise", note).without("limit_bytes")
        async with Checkpointer(save_pipeline=pipeline) as checkpointer:
            await (await checkpointer.save(tmp_path / "a", {"a": 1, "b": np.ones(3)}))
            assert (await checkpointer.restore(tmp_path / "a"))["a"] == 1
            with pytest.raises(ConfigError, match=r"prioritise\.first: no such option"):
                await checkpointer.save(tmp_path / "b", {}, prioritise=lambda keys: True)

        assert order == ["a", "b"]


class TestConfiguration:
    async def test_a_file_and_the_environment_reach_every_stage(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tmp_path / "penstock.toml"
        file.write_text(
            """
[memory]
limit_bytes = "1MiB"
[save]
piece_bytes = "4KiB"
[save.write]
concurrency = 3
file_bytes = "16KiB"
[save.prioritise]
first = ["z*"]
[restore.read]
verify = false
"""
        )
        monkeypatch.setenv("PENSTOCK_SAVE__WRITE__CONCURRENCY", "1")
        store = FaultyStore(LocalStore())
        async with Checkpointer(config=file, memory_limit="512KiB", store=store) as checkpointer:
            assert checkpointer.statistics().limit == 2**19
            state = {"a": np.arange(10_000), "z": 1}
            report = await (await checkpointer.save(tmp_path / "a", state))
            by_name = {stage.name: stage for stage in report.stages}
            assert by_name["write"].workers == 1
            assert by_name["device_to_host"].n_out >= 20
            created = [done for done in store.operations if done.name == "create_data_file"]
            assert len(created) == 1  # a chunk is never split over files
            await (await checkpointer.save(tmp_path / "b", {str(n): np.arange(1000) for n in range(10)}))
            assert sum(done.name == "create_data_file" for done in store.operations) == 1 + 4  # 3 + 3 + 3 + 1

    async def test_a_config_made_by_hand(self, tmp_path: Path) -> None:
        config = Config.load(
            environ={}, arguments={"save": {"stages": None}, "memory": {"limit_bytes": "1MiB"}}
        )
        async with Checkpointer(config=config) as checkpointer:
            await (await checkpointer.save(tmp_path / "a", {"x": 1}))
            assert checkpointer.statistics().limit == 2**20

    async def test_stages_can_be_left_out_by_name(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PENSTOCK_SAVE__STAGES", "flatten,device_to_host,write,commit,finalize")
        async with Checkpointer() as checkpointer:
            report = await (await checkpointer.save(tmp_path / "a", {"x": np.ones(10)}))
            assert [stage.name for stage in report.stages] == [
                "flatten",
                "device_to_host",
                "write",
                "commit",
                "finalize",
            ]
            assert (await checkpointer.restore(tmp_path / "a"))["x"].tolist() == [1] * 10

    async def test_an_option_for_a_stage_that_was_left_out(self) -> None:
        arguments = {"save": {"stages": ["flatten", "write"], "limit_bytes": {"in_flight_bytes": "1MiB"}}}
        config = Config.load(environ={}, arguments=arguments)
        with pytest.raises(PipelineError, match="no stage is called 'limit_bytes'"):
            await Checkpointer(config=config).__aenter__()

    async def test_options_of_one_stage_are_unknown_to_others(self) -> None:
        config = Config.load(environ={}, arguments={"save": {"write": {"verify": True}}})
        with pytest.raises(ConfigError, match=r"write\.verify: no such option"):
            await Checkpointer(config=config).__aenter__()
