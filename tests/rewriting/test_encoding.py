"""Checkpoints that are written again with another codec: the same checkpoint, all of it or nothing."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import jax
import numpy as np
import pytest

import penstock
from penstock.config import Config
from penstock.errors import ChecksumError, CorruptCheckpointError, DestinationExistsError, StorageError
from penstock.handlers import LocalStore
from penstock.items import Json, RandomKey
from penstock.rewriting.encoding import Encoding, encode_checkpoint
from penstock.testing import FaultyStore, MemoryStore
from penstock.verification.copying import is_same_checkpoint

pytestmark = pytest.mark.anyio

AssertSame = Callable[[Any, Any], None]
MIB = 2**20


class Pair(NamedTuple):
    a: Any
    b: Any


def tree(fill: float = 1.0) -> dict[str, Any]:
    return {
        "w": jax.device_put(np.arange(MIB, dtype=np.float32).reshape(4, -1) * np.float32(fill)),
        "pair": Pair(np.zeros(5), (1, 2.5, "text", None)),
        "key": jax.random.key(3),
        "empty": {},
        "none": np.zeros(0),
    }


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def encoding(source: Path | str, target: Path | str, codec: str = "zstd:1", **options: Any) -> Encoding:
    form = penstock.SaveFormat(codec=codec, **options.pop("form", {}))
    made = Encoding(
        str(source), str(target), form, options.pop("limit", 64 * MIB), **options, options={"store": {}}
    )
    return Encoding.heard(made.told())  # as another process gets it


@pytest.fixture
def target() -> Iterator[FaultyStore]:
    store = FaultyStore(LocalStore())
    yield store
    assert store.open_files == 0


def test_another_process_gets_the_options_of_the_manager() -> None:
    given = {
        "store": {"io": "buffered", "s3": {"endpoint": "http://localhost:9"}, "keeper": {"socket": "/tmp/k"}},
        "save": {"encode": {"auto_saves": 0.2, "auto_codecs": ["zstd:3"]}, "piece_bytes": "1MiB"},
        "telemetry": {"keep_reports": 7},
        "format": {"codec": "auto"},
    }
    config = Config.load(arguments=given)
    form = penstock.SaveFormat(codec="auto", zarr=3)
    told = Encoding("/a", "/b", form, MIB, overwrite=True, options=Encoding.options_of(config)).told()

    heard = Encoding.heard(told)
    assert told.endswith(b"\n")
    assert told.count(b"\n") == 1
    assert (heard.path, heard.destination, heard.form, heard.limit_bytes) == ("/a", "/b", form, MIB)
    assert heard.config.store == config.store
    assert heard.config.save.stage_options.keys() == {"encode"}
    assert heard.config.telemetry.keep_reports == 0, "the manager keeps the reports"


FORMS: dict[str, dict[str, Any]] = {
    "ocdbt": {},
    "chunk files, zarr 3, rich types": {"ocdbt": False, "zarr": 3, "rich_types": True},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("codec", ["zstd:1", "floats", "auto"])
async def test_values_and_documents_are_those_of_the_source(
    form: dict[str, Any], codec: str, tmp_path: Path, target: FaultyStore, assert_same: AssertSame
) -> None:
    source, made = tmp_path / "a", tmp_path / "b" / "c"
    async with penstock.Checkpointer(save_format=penstock.SaveFormat(**form)) as checkpointer:
        await (await checkpointer.save(source, tree(), custom_metadata={"by": "me"}))

    nbytes = await encode_checkpoint(encoding(source, made, codec, form=form), LocalStore(), target)

    before, after = files(source), files(made)
    assert nbytes == sum(map(len, after.values())) < 0.9 * sum(map(len, before.values()))
    for name in ("_CHECKPOINT_METADATA", "_METADATA", "_sharding"):
        assert after[name] == before[name]

    assert_same(await penstock.restore(made, like=tree()), tree())
    assert (await penstock.verify(made)).intact
    assert is_same_checkpoint(LocalStore(), str(source), LocalStore(), str(made))


async def test_every_item_is_carried_over(tmp_path: Path, assert_same: AssertSame) -> None:
    source, made = tmp_path / "a", tmp_path / "b"
    items = {"params": tree(), "opt": {"m": np.arange(50_000.0)}, "more": Json({"a": [1]})}
    await penstock.save(source, penstock.Composite(**items, rng=RandomKey(jax.random.key(1))))
    await encode_checkpoint(encoding(source, made), LocalStore(), LocalStore())

    before, after = files(source), files(made)
    kept = [name for name in before if name.endswith(("METADATA", "_sharding", "metadata", "_strings.json"))]
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert len(kept) > 6
    found = await penstock.restore_items(made)
    assert_same(found["opt"], items["opt"])
    assert found["more"] == {"a": [1]}
    assert (await penstock.verify(made)).intact
    assert is_same_checkpoint(LocalStore(), str(source), LocalStore(), str(made))


async def test_what_is_encoded_twice_is_still_the_same_and_another_is_not(tmp_path: Path) -> None:
    places = [str(tmp_path / name) for name in ("a", "b", "c", "d", "other")]
    await penstock.save(places[0], tree())
    await penstock.save(places[4], tree(2.0))
    for start, end, codec in zip(places, places[1:4], ("zstd:1", "floats", "none"), strict=False):
        await encode_checkpoint(encoding(start, end, codec), LocalStore(), LocalStore())

    store = LocalStore()
    assert all(is_same_checkpoint(store, one, store, two) for one in places[:4] for two in places[:4])
    assert not is_same_checkpoint(store, places[1], store, places[4])


async def test_a_codec_can_be_taken_away(tmp_path: Path, assert_same: AssertSame) -> None:
    async with penstock.Checkpointer(save_format=penstock.SaveFormat(codec="zstd")) as checkpointer:
        await (await checkpointer.save(tmp_path / "a", tree()))

    await encode_checkpoint(encoding(tmp_path / "a", tmp_path / "b", "none"), LocalStore(), LocalStore())
    assert_same(await penstock.restore(tmp_path / "b", like=tree(), mmap=True), tree())


async def test_it_works_within_a_small_budget(tmp_path: Path, assert_same: AssertSame) -> None:
    await penstock.save(tmp_path / "a", tree())
    small = encoding(tmp_path / "a", tmp_path / "b", limit=MIB)
    await encode_checkpoint(small, LocalStore(), LocalStore())
    assert_same(await penstock.restore(tmp_path / "b", like=tree()), tree())


async def test_a_store_without_directories_gets_it_too(tmp_path: Path, assert_same: AssertSame) -> None:
    bucket = MemoryStore()
    await penstock.save(tmp_path / "a", tree())
    await encode_checkpoint(encoding(tmp_path / "a", "/run/1"), LocalStore(), bucket)
    await encode_checkpoint(encoding(tmp_path / "a", "/run/1", overwrite=True), LocalStore(), bucket)
    async with penstock.Checkpointer(store=bucket) as checkpointer:
        assert_same(await checkpointer.restore("/run/1", like=tree()), tree())


@pytest.mark.parametrize("offset", [0, MIB, -1])
async def test_damage_is_not_carried_on(offset: int, tmp_path: Path, target: FaultyStore) -> None:
    source = tmp_path / "a"
    await penstock.save(source, {"w": np.arange(MIB, dtype=np.float32)})
    file = max((path for path in source.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)
    with pytest.raises(ChecksumError):
        await encode_checkpoint(encoding(source, tmp_path / "b"), LocalStore(), target)

    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("name", ["_METADATA", "_sharding", "_CHECKPOINT_METADATA"])
async def test_a_damaged_document_is_not_carried_on(name: str, tmp_path: Path, target: FaultyStore) -> None:
    source = tmp_path / "a"
    await penstock.save(source, tree())
    data = bytearray((source / name).read_bytes())
    data[len(data) // 2] ^= 1
    (source / name).write_bytes(data)
    with pytest.raises(CorruptCheckpointError):
        await encode_checkpoint(encoding(source, tmp_path / "b"), LocalStore(), target)

    assert [path.name for path in tmp_path.iterdir()] == ["a"]


async def test_what_is_there_is_replaced_only_if_that_is_asked_for(
    tmp_path: Path, assert_same: AssertSame
) -> None:
    for name, fill in {"a": 1.0, "b": 2.0}.items():
        await penstock.save(tmp_path / name, tree(fill))

    source, made = tmp_path / "a", tmp_path / "b"
    with pytest.raises(DestinationExistsError):
        await encode_checkpoint(encoding(source, made), LocalStore(), LocalStore())

    await encode_checkpoint(encoding(source, made, overwrite=True), LocalStore(), LocalStore())
    assert_same(await penstock.restore(made, like=tree()), tree())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


async def test_whatever_fails_nothing_is_at_the_destination_and_the_next_try_succeeds(
    tmp_path: Path, assert_same: AssertSame
) -> None:
    source, made = tmp_path / "a", tmp_path / "b"
    state = {"w": np.arange(MIB // 16, dtype=np.float32), "n": 1}
    await penstock.save(source, state)
    counted = FaultyStore(LocalStore())
    await encode_checkpoint(encoding(source, tmp_path / "c"), LocalStore(), counted)
    n_operations = len(counted.operations)
    assert n_operations > 20
    for number in range(1, n_operations + 1):
        target = FaultyStore(LocalStore())
        target.fail_at(number, StorageError("write", str(made), "injected", errno.EIO))
        try:
            await encode_checkpoint(encoding(source, made), LocalStore(), target)
        except StorageError:
            if not made.exists():  # else it was published, and what came after failed
                await encode_checkpoint(encoding(source, made), LocalStore(), LocalStore())

        assert_same(await penstock.restore(made, like=state), state)
        assert target.open_files == 0
        await penstock.delete(made)


async def test_a_cancelled_encoding_leaves_nothing(tmp_path: Path, target: FaultyStore) -> None:
    source = tmp_path / "a"
    await penstock.save(source, tree())
    hang = target.hang_on("data.write_at", 1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(encode_checkpoint, encoding(source, tmp_path / "b"), LocalStore(), target)
        await hang.wait_reached()
        tasks.cancel_scope.cancel()
        hang.release()

    assert [path.name for path in tmp_path.iterdir()] == ["a"]
