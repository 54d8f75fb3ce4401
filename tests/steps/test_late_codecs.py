"""Late codecs: steps are kept plain in tiers, and encoded on their way to the level that has a codec."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from docs.examples.stages_of_your_own import Decrypt, Encrypt

import penstock
from penstock.config import Config
from penstock.errors import CorruptCheckpointError, SpecError, StorageError
from penstock.handlers import LocalStore
from penstock.items import Json
from penstock.pipelines import restore_pipeline, save_pipeline
from penstock.steps import CheckpointManager, Disk, Never
from penstock.steps.finishing import finish
from penstock.steps.tier_record import read_record
from penstock.telemetry import Promotion
from penstock.testing import FaultyStore

pytestmark = pytest.mark.anyio

AssertSame = Callable[[Any, Any], None]
ZSTD = penstock.SaveFormat(codec="zstd:1")


def state(fill: int = 1) -> dict[str, Any]:
    return {"w": np.arange(1 << 18, dtype=np.float32) * np.float32(fill), "b": np.full(3, fill), "n": fill}


@pytest.fixture
def store() -> Iterator[FaultyStore]:
    """It is of this process alone, so that this one encodes."""
    store = FaultyStore(LocalStore())
    yield store
    assert store.open_files == 0


class Heard:
    """An observer that notes promotions."""

    def __init__(self) -> None:
        self.promotions: list[Promotion] = []

    def observing(self, kind: str, path: str) -> AbstractContextManager[Any]:
        return nullcontext(lambda report: None)

    def watching(self, statistics: object) -> AbstractContextManager[Any]:
        return nullcontext()

    def promoted(self, promotion: Promotion, /) -> None:
        self.promotions.append(promotion)


class Paths:
    """Tiers, a root, and how a manager over them is opened."""

    def __init__(self, folder: Path) -> None:
        self.tier, self.second, self.root = folder / "nvme", folder / "disk", folder / "bucket"

    def open(self, store: FaultyStore | None, **options: Any) -> CheckpointManager:
        given: dict[str, Any] = {"tiers": Disk(self.tier), "save_format": ZSTD, "store": store}
        return CheckpointManager(self.root, **{**given, **options})


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(tmp_path)


async def begin(manager: CheckpointManager, step: int) -> penstock.SaveFuture:
    save = await manager.save(step, state(step))
    assert save is not None
    return save


def size(step: Path) -> int:
    return sum(path.stat().st_size for path in step.rglob("*") if path.is_file())


async def codec_of(step: Path, name: str = "w") -> str | None:
    leaves = (await penstock.metadata(step)).leaves
    return next(leaf.codec for leaf in leaves if name in leaf.key_path)


async def test_a_step_is_kept_plain_and_encoded_on_its_way_to_the_root(
    paths: Paths, store: FaultyStore, assert_same: AssertSame
) -> None:
    async with paths.open(store) as manager:
        await (await begin(manager, 3))

    assert await codec_of(paths.tier / "3") is None
    assert await codec_of(paths.root / "3") == "zstd:1"
    assert size(paths.root / "3") < 0.9 * size(paths.tier / "3")
    async with CheckpointManager(paths.root, read_only=True, tiers=()) as reader:
        assert_same(await reader.restore(like=state()), state(3))

    assert (await penstock.verify(paths.root)).intact
    assert (await penstock.verify(paths.tier)).intact


async def test_orbax_restores_it(paths: Paths, store: FaultyStore) -> None:
    async with paths.open(store) as manager:
        await (await begin(manager, 3))

    with ocp.CheckpointManager(paths.root) as theirs:
        found = theirs.restore(3, args=ocp.args.StandardRestore())

    np.testing.assert_array_equal(found["w"], state(3)["w"])
    assert found["n"] == 3


@pytest.mark.parametrize("codec", ["floats", "auto"])
async def test_any_codec_can_be_late(
    codec: str, paths: Paths, store: FaultyStore, assert_same: AssertSame
) -> None:
    items = penstock.Composite(params=state(2), more=Json({"a": 1}))
    async with paths.open(store, save_format=penstock.SaveFormat(codec=codec)) as manager:
        save = await manager.save(2, items, metrics={"loss": 0.5})
        assert save is not None
        await save

    assert await codec_of(paths.tier / "2") is None
    assert await codec_of(paths.root / "2") not in (None, "auto")
    async with CheckpointManager(paths.root, read_only=True, tiers=()) as reader:
        assert_same((await reader.restore())["params"], state(2))
        assert (await reader.metadata()).metrics == {"loss": 0.5}


async def test_a_tier_may_have_a_codec_and_hand_it_on(paths: Paths, store: FaultyStore) -> None:
    """From a tier with the codec of the root, files are copied."""
    tiers = [Disk(paths.tier), Disk(paths.second, codec="zstd:1")]
    async with paths.open(store, tiers=tiers) as manager:
        await (await begin(manager, 1))

    folders = [paths.tier, paths.second, paths.root]
    assert [await codec_of(folder / "1") for folder in folders] == [None, "zstd:1", "zstd:1"]
    names = [{file.name: file.stat().st_size for file in (folder / "1").rglob("*")} for folder in folders[1:]]
    assert names[0] == names[1]


async def test_the_nearest_tier_has_the_codec_that_it_is_given(paths: Paths, store: FaultyStore) -> None:
    tier = Disk(paths.tier, codec="zstd:1")
    async with paths.open(store, tiers=tier, save_format=penstock.SaveFormat()) as manager:
        await (await begin(manager, 1))

    assert await codec_of(paths.tier / "1") == "zstd:1"
    assert await codec_of(paths.root / "1") is None


async def test_what_the_root_alone_wants_is_encoded_at_once(paths: Paths, store: FaultyStore) -> None:
    async with paths.open(store, tiers=Disk(paths.tier, save_when=Never())) as manager:
        await (await begin(manager, 1))

    assert await codec_of(paths.root / "1") == "zstd:1"


async def test_saves_of_one_tree_with_and_without_a_codec_do_not_mix(
    paths: Paths, store: FaultyStore
) -> None:
    """What is remembered of a tree's leaves says how they are cut and encoded."""
    tree = state(1)
    async with paths.open(store, tiers=Disk(paths.tier, save_when=2)) as manager:
        for step in range(1, 5):
            save = await manager.save(step, tree)
            assert save is not None
            await save

    assert [await codec_of(paths.root / str(step)) for step in range(1, 5)] == ["zstd:1"] * 4
    assert await codec_of(paths.tier / "4") is None


async def test_a_manager_knows_the_steps_that_it_encoded(paths: Paths, store: FaultyStore) -> None:
    async with paths.open(store) as manager:
        await (await begin(manager, 1))

    before = {path: path.stat().st_mtime_ns for path in (paths.root / "1").rglob("*")}
    heard = Heard()
    async with paths.open(store, observers=[heard]) as manager:
        await manager.wait()

    assert {path: path.stat().st_mtime_ns for path in (paths.root / "1").rglob("*")} == before
    assert heard.promotions == []


async def test_a_plain_copy_in_the_root_is_the_same_step(paths: Paths, store: FaultyStore) -> None:
    """As `penstock keeper pull` makes one, or a run with another configuration."""
    async with paths.open(store, save_format=penstock.SaveFormat()) as manager:
        await (await begin(manager, 1))
    async with paths.open(store) as manager:
        await manager.wait()

    assert await codec_of(paths.root / "1") is None


async def test_another_step_of_its_number_is_not_taken_for_it(
    paths: Paths, store: FaultyStore, assert_same: AssertSame
) -> None:
    async with paths.open(store) as manager:
        await (await begin(manager, 1))
        save = await manager.save(1, state(9), overwrite=True)
        assert save is not None
        await save

    async with CheckpointManager(paths.root, read_only=True, tiers=()) as reader:
        assert_same(await reader.restore(1, like=state()), state(9))


async def test_it_goes_on_after_any_operation_has_failed(tmp_path: Path, assert_same: AssertSame) -> None:
    counted = FaultyStore(LocalStore())
    async with Paths(tmp_path / "counted").open(counted) as manager:
        save = await begin(manager, 1)
        await save.kept()
        first = len(counted.operations) + 1
        await save
        last = len(counted.operations)

    assert last > first + 20
    for number in range(first, last + 1, 17):
        paths, store = Paths(tmp_path / str(number)), FaultyStore(LocalStore())
        store.fail_at(number, StorageError("write", str(paths.root), "injected", errno.EIO))
        async with paths.open(store) as manager:
            save = await begin(manager, 1)
            await save.kept()
            with suppress(StorageError):
                await manager.wait()

            await manager.wait()  # the next try
            await save

        assert store.open_files == 0
        assert await codec_of(paths.root / "1") == "zstd:1"
        assert_same(await penstock.restore(paths.root / "1", like=state()), state(1))
        assert not [path.name for path in paths.root.iterdir() if path.name.endswith("tmp")]


async def test_what_a_stage_has_sealed_is_copied_as_it_is(
    paths: Paths, store: FaultyStore, caplog: pytest.LogCaptureFixture, assert_same: AssertSame
) -> None:
    """What encodes has no key, and no stage of the caller's."""
    key, heard = bytes(range(32)), Heard()
    sealing = save_pipeline().insert_after("device_to_host", Encrypt(key))
    opening = restore_pipeline().insert_after("plan", Decrypt(key))
    async with paths.open(store, save_pipeline=sealing, observers=[heard]) as manager:
        await (await begin(manager, 1))

    assert "step.not_encoded" in caplog.text
    assert [each.nbytes for each in heard.promotions] == [size(paths.tier / "1")]
    assert size(paths.root / "1") == size(paths.tier / "1")
    async with CheckpointManager(paths.root, read_only=True, tiers=(), restore_pipeline=opening) as reader:
        assert_same(await reader.restore(like=state()), state(1))


async def test_a_root_that_is_slower_than_saves_takes_the_newest(paths: Paths, store: FaultyStore) -> None:
    hang = store.hang_on("open_data_file")
    async with paths.open(store) as manager:
        first = await begin(manager, 1)
        await first.kept()
        await hang.wait_reached()
        later = [await begin(manager, step) for step in (2, 3, 4)]
        for save in later:
            await save.kept()

        hang.release()
        reports = [await save for save in (first, *later)]

    newest = str(paths.root / "4")
    assert [report.superseded_by for report in reports] == [None, newest, newest, None]
    assert sorted(path.name for path in paths.root.iterdir() if path.name.isdigit()) == ["1", "4"]


async def test_damage_in_the_tier_does_not_come_to_the_root(paths: Paths, store: FaultyStore) -> None:
    hang = store.hang_on("open_data_file")
    async with paths.open(store) as manager:
        save = await begin(manager, 1)
        await save.kept()
        await hang.wait_reached()
        file = max((paths.tier / "1").rglob("*"), key=lambda path: path.stat().st_size)
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        hang.release()
        with pytest.raises(CorruptCheckpointError):
            await save

    assert not (paths.root / "1").exists()


@pytest.mark.process
async def test_another_process_encodes_and_says_what_that_took(paths: Paths, assert_same: AssertSame) -> None:
    heard = Heard()
    async with paths.open(None, observers=[heard]) as manager:
        for step in (1, 2):
            await (await begin(manager, step))

    told = heard.promotions
    assert [each.nbytes for each in told] == [size(paths.root / str(step)) for step in (1, 2)]
    assert all(each.processor_s is not None and each.processor_s > 0 for each in told)
    assert await codec_of(paths.root / "2") == "zstd:1"
    async with CheckpointManager(paths.root, read_only=True, tiers=()) as reader:
        assert_same(await reader.restore(like=state()), state(2))


async def test_the_record_of_the_tiers_says_how_steps_are_stored(paths: Paths, store: FaultyStore) -> None:
    """By that the process encodes that finishes a killed manager's saves."""
    form = penstock.SaveFormat(codec="zstd:3", chunk_byte_size=1 << 20, ocdbt=False)
    async with paths.open(store, save_format=form, save_when=Never()) as manager:
        await manager.wait()

    record = read_record(LocalStore(), str(paths.tier))
    assert record is not None
    assert penstock.SaveFormat(**record.formats[str(paths.root)]).codec == "zstd:3"
    assert penstock.SaveFormat(**record.formats[str(paths.root)]).ocdbt is False
    assert record.formats[str(paths.tier)]["codec"] == "none"


@pytest.mark.process
async def test_finishing_encodes_as_the_killed_manager_would_have(
    paths: Paths, store: FaultyStore, assert_same: AssertSame
) -> None:
    died = RuntimeError("the training failed")

    async def train() -> None:
        async with paths.open(store) as manager:
            hang = store.hang_on("open_data_file")
            save = await begin(manager, 7)
            await save.kept()
            await hang.wait_reached()
            hang.release()
            raise died

    with pytest.raises(RuntimeError, match="the training failed"):
        await train()

    assert not (paths.root / "7").exists()
    assert await finish(str(paths.tier))
    assert await codec_of(paths.root / "7") == "zstd:1"
    async with paths.open(store) as manager:  # which knows it
        await manager.wait()
        assert_same(await manager.restore(like=state()), state(7))


async def test_a_codec_of_a_tier_is_one_that_there_is() -> None:
    with pytest.raises(SpecError, match="codec"):
        Disk("/nvme/run", codec="zzz")
    with pytest.raises(SpecError, match="in memory steps are plain"):
        Config.load(arguments={"tier": [{"kind": "memory", "codec": "zstd"}]})


async def test_tiers_of_the_configuration_have_codecs(paths: Paths, store: FaultyStore) -> None:
    given = {"tier": [{"path": str(paths.tier), "codec": "zstd:1"}], "format": {"codec": "floats"}}
    config = Config.load(arguments=given)
    async with CheckpointManager(paths.root, config=config, store=store) as manager:
        await (await begin(manager, 1))

    assert await codec_of(paths.tier / "1") == "zstd:1"
    assert str(await codec_of(paths.root / "1")).startswith("blosc")
