"""Formats end to end: what lies on disk, how much memory a save takes, and how a failed save ends."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import penstock
from penstock import SaveArgs, SaveFormat
from penstock.config import Config
from penstock.errors import ConfigError, PipelineError, StorageError
from penstock.handlers import LocalStore
from penstock.pipelines import save_pipeline
from penstock.stages import Encode
from penstock.testing import FaultyStore

AssertSame = Callable[[Any, Any], None]
MIB = 1 << 20


class Pair(NamedTuple):
    left: Any
    right: Any


def noise(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def place(value: Any, mesh: tuple[int, ...], *axes: Any) -> Any:
    devices: Any = np.array(jax.devices()).reshape(mesh)
    sharding = NamedSharding(Mesh(devices, ("x", "y")[: len(mesh)]), PartitionSpec(*axes))  # type: ignore[no-untyped-call]  # jax's
    return jax.device_put(value, sharding)


def tree() -> dict[str, Any]:
    zeros = np.zeros((300, 100), np.float32)
    return {
        "noise": noise(100, 300),
        "zeros": jnp.asarray(zeros),
        "mixed": np.concatenate([zeros, noise(300, 100)]),
        "sharded": [place(noise(64, 96), (2, 4), *axes) for axes in (("x", "y"), ("y",), (None, "x"), ())],
        "small": [1, 2.5, jnp.ones(3), np.zeros((0, 2)), "text", None],
        "keys": jax.random.split(jax.random.key(1), 8),
    }


def save(path: Path, value: Any, form: SaveFormat, **options: Any) -> None:
    with penstock.sync.Checkpointer(save_format=form) as checkpointer:
        checkpointer.save(path, value, **options).result()


@pytest.mark.thinned(3)
@pytest.mark.parametrize("replicas", [False, True], ids=["first", "replicas"])
@pytest.mark.parametrize("codec", ["none", "zstd:5", "auto"])
@pytest.mark.parametrize("ocdbt", [True, False], ids=["ocdbt", "directories"])
@pytest.mark.parametrize("zarr", [2, 3])
def test_each_format_comes_back_bit_for_bit_and_is_whole_at_rest(
    tmp_path: Path, assert_same: AssertSame, ocdbt: bool, zarr: Any, codec: str, replicas: bool
) -> None:
    form = SaveFormat(ocdbt, zarr, codec, 5000, None, replicas, 0)
    value = tree()

    with penstock.sync.Checkpointer(save_format=form) as checkpointer:
        for _ in range(2):  # the second time, the tree is in the cache
            checkpointer.save(tmp_path / "a", value, overwrite=True).result()
            assert_same(checkpointer.restore(tmp_path / "a", like=value), value)
        report = checkpointer.verify(tmp_path / "a")
        assert (report.damages, report.unchecked) == ((), ())
        assert report.n_ranges


def sizes(path: Path) -> list[int]:
    return sorted(file.stat().st_size for file in (path / "d").iterdir())


def test_a_data_file_that_has_grown_is_followed_by_another_one(
    tmp_path: Path, assert_same: AssertSame
) -> None:
    value = {str(at): noise(250, seed=at) for at in range(20)} | {"large": noise(10_000)}
    total = 60_000

    save(tmp_path / "default", value, SaveFormat())
    save(tmp_path / "one", value, SaveFormat(ocdbt_target_data_file_size=0))
    save(tmp_path / "many", value, SaveFormat(ocdbt_target_data_file_size=8000, codec="zstd"))

    assert len(sizes(tmp_path / "default")) == len(sizes(tmp_path / "one")) == 2, "arrays, and the index"
    many = sizes(tmp_path / "many")
    assert total // 16_000 <= len(many) - 1 <= total // 8000 + 1
    assert max(many) <= 20_000 + 8000, "small leaves go together, whatever they make of a file"
    assert_same(penstock.sync.restore(tmp_path / "many"), value)
    with penstock.sync.Checkpointer() as checkpointer:
        found = {leaf.name: leaf.chunk_shape for leaf in checkpointer.metadata(tmp_path / "many").leaves}
    assert found["large"] == (2000,), "a chunk lies in one file"


def test_chunks_and_axes_of_shards_on_eight_devices(tmp_path: Path, assert_same: AssertSame) -> None:
    value = {
        "both": place(noise(16, 24), (2, 4), "x", "y"),
        "rows": place(noise(16, 24), (8,), "x"),
        "host": noise(16, 24),
    }
    args = {
        "both": SaveArgs(shard_axes=(1,)),
        "rows": SaveArgs(chunk_byte_size=96),
        "host": SaveArgs(chunk_byte_size=96),
    }

    for form in (SaveFormat(), SaveFormat(ocdbt=False, zarr=3, codec="zstd")):
        path = tmp_path / form.codec
        save(path, value, form, save_args=args)
        found = {leaf.name: leaf.chunk_shape for leaf in penstock.sync.metadata(path).leaves}
        assert found == {"both": (8, 1), "rows": (1, 24), "host": (4, 6)}
        assert_same(penstock.sync.restore(path, like=value), value)


def test_a_codec_makes_it_smaller_where_it_can(tmp_path: Path) -> None:
    value = {
        "noise": np.random.default_rng(0).integers(0, 256, MIB, np.uint8),
        "zeros": np.zeros(MIB, np.uint8),
    }
    nbytes = {}
    for codec in ("none", "zstd", "auto"):
        save(tmp_path / codec, value, SaveFormat(codec=codec))
        nbytes[codec] = sum(sizes(tmp_path / codec))
    assert nbytes["none"] > 2 * MIB
    assert MIB <= nbytes["auto"] <= nbytes["zstd"] < MIB + 10_000


# Memory


@pytest.mark.thinned(2)
@pytest.mark.anyio
@pytest.mark.parametrize("staging", ["copy", "overlap"])
@pytest.mark.parametrize("codec", ["zstd", "auto"])
@pytest.mark.parametrize("ocdbt", [True, False], ids=["ocdbt", "directories"])
async def test_a_save_with_a_codec_stays_within_the_budget(
    tmp_path: Path, assert_same: AssertSame, ocdbt: bool, codec: str, staging: Any
) -> None:
    """32 MiB of leaves pass through a budget of 4 MiB, which is never exceeded."""
    value = {
        "host": noise(1024, 2048),
        "device": jnp.asarray(noise(1024, 2048, seed=1)),
        "sharded": place(noise(1024, 2048, seed=2), (2, 4), "x", "y"),
        "zeros": np.zeros((1024, 2048), np.float32),
    }
    form = SaveFormat(ocdbt=ocdbt, codec=codec)
    async with penstock.Checkpointer(memory_limit=4 * MIB, save_format=form) as checkpointer:
        await (await checkpointer.save(tmp_path / "a", value, staging=staging))
        statistics = checkpointer.statistics()
        assert statistics.leased == statistics.tasks_waiting == 0
        assert 0 < statistics.peak <= statistics.limit == 4 * MIB

    async with penstock.Checkpointer() as checkpointer:
        assert_same(await checkpointer.restore(tmp_path / "a"), value)


# Pipelines and options


def test_encode_is_put_behind_device_to_host_if_there_is_a_codec(tmp_path: Path) -> None:
    with penstock.sync.Checkpointer(save_format=SaveFormat(codec="zstd")) as checkpointer:
        report = checkpointer.save(tmp_path / "a", tree()).result()
        names = [stage.name for stage in report.stages]
        assert names[names.index("device_to_host") + 1] == "encode"
        report = checkpointer.save(tmp_path / "b", tree(), pipeline=save_pipeline()).result()
        assert "encode" in [stage.name for stage in report.stages]

    report = penstock.sync.save(tmp_path / "c", tree())
    assert "encode" not in [stage.name for stage in report.stages]


def test_encode_is_configured_as_any_stage(tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text('[format]\ncodec = "auto"\n[save.encode]\nauto_saves = 0.99\n')
    value = np.tile(noise(1000), 100)  # compresses, but not that much
    with penstock.sync.Checkpointer(config=Config.load(file, environ={})) as checkpointer:
        checkpointer.save(tmp_path / "a", value).result()
    assert sum(sizes(tmp_path / "a")) > value.nbytes

    file.write_text('[format]\ncodec = "auto"\n[save.encode]\nauto_codecs = ["lzma"]\n')
    with pytest.raises(
        ConfigError, match=r"save\.encode\.auto_codecs: must be .*'zstd:<1 to 22>', not 'lzma'"
    ):
        penstock.sync.Checkpointer(config=Config.load(file, environ={}))


@pytest.mark.parametrize("ocdbt", [True, False], ids=["ocdbt", "directories"])
def test_a_pipeline_that_leaves_out_encode_writes_no_chunk_under_a_false_name(
    tmp_path: Path, ocdbt: bool
) -> None:
    slots = [
        replace(slot, name="copy") if slot.name == "device_to_host" else slot for slot in save_pipeline()
    ]
    pipeline: Any = penstock.Pipeline(tuple(slots))
    with penstock.sync.Checkpointer(save_format=SaveFormat(ocdbt=ocdbt, codec="zstd")) as checkpointer:
        with pytest.raises(PipelineError, match="no stage `encode`"):
            checkpointer.save(tmp_path / "a", {"x": noise(100, 100)}, pipeline=pipeline).result()
        checkpointer.save(
            tmp_path / "a", {"x": noise(100, 100)}, pipeline=pipeline.insert_after("copy", Encode())
        ).result()
    np.testing.assert_array_equal(penstock.sync.restore(tmp_path / "a")["x"], noise(100, 100))


@pytest.mark.parametrize("operation", ["write_file", "data.write_at", "data.sync", "create_data_file"])
@pytest.mark.parametrize("ocdbt", [True, False], ids=["ocdbt", "directories"])
def test_a_save_that_fails_midway_leaves_nothing(tmp_path: Path, ocdbt: bool, operation: str) -> None:
    store = FaultyStore(LocalStore())
    store.fail_on(operation, 1, StorageError(operation, "path", "refused", errno.ENOSPC))
    value = {"large": noise(1024, 1024), "small": noise(10)}
    form = SaveFormat(ocdbt=ocdbt, codec="zstd")
    with penstock.sync.Checkpointer(save_format=form, store=store) as checkpointer:
        with pytest.raises(StorageError, match="refused"):
            checkpointer.save(tmp_path / "a", value).result()
        assert list(tmp_path.iterdir()) == []
        checkpointer.save(tmp_path / "b", value).result()
        np.testing.assert_array_equal(checkpointer.restore(tmp_path / "b")["large"], value["large"])
    assert store.open_files == 0


# Rich types


def test_tuples_are_recorded_on_request(tmp_path: Path) -> None:
    value: dict[str, Any] = {"t": (1, [2, (3,)], ()), "p": Pair((4,), [5]), "e": [], "n": None}
    save(tmp_path / "plain", value, SaveFormat())
    save(tmp_path / "rich", value, SaveFormat(rich_types=True))

    assert penstock.sync.restore(tmp_path / "plain") == {
        "t": [1, [2, [3]], ()],
        "p": {"left": [4], "right": [5]},
        "e": [],
        "n": None,
    }
    assert penstock.sync.restore(tmp_path / "rich") == {
        "t": (1, [2, (3,)], ()),
        "p": {"left": (4,), "right": [5]},
        "e": [],
        "n": None,
    }
    assert penstock.sync.restore(tmp_path / "rich", like=value) == value


@pytest.mark.parametrize("value", [(1, 2), 1.5, [(1,)], Pair(1, (2,)), ((),)])
def test_the_root_may_be_a_tuple(tmp_path: Path, value: Any) -> None:
    save(tmp_path / "a", value, SaveFormat(rich_types=True))
    found = penstock.sync.restore(tmp_path / "a")
    assert found == (value._asdict() if isinstance(value, Pair) else value)


def test_structures_that_differ_in_nothing_but_tuples_are_not_taken_for_each_other(tmp_path: Path) -> None:
    values: list[Any] = [{"a": [1, (2,)]}, {"a": (1, [2])}, {"a": [1, [2]]}, {"a": [1, (2,)]}]
    with penstock.sync.Checkpointer(save_format=SaveFormat(rich_types=True)) as checkpointer:
        for at, value in enumerate(values * 2):
            checkpointer.save(tmp_path / str(at), value).result()
            assert checkpointer.restore(tmp_path / str(at)) == value


def test_a_node_without_leaves_leaves_a_gap_and_no_wrong_index(tmp_path: Path) -> None:
    @jax.tree_util.register_pytree_node_class
    class Nothing:
        def tree_flatten(self) -> tuple[tuple[()], None]:
            return (), None

        @classmethod
        def tree_unflatten(cls, aux: None, children: tuple[()]) -> Nothing:
            return cls()

    save(tmp_path / "a", {"l": [Nothing(), (1,)], "t": (2, Nothing(), 3)}, SaveFormat(rich_types=True))
    assert penstock.sync.restore(tmp_path / "a") == {"l": {"1": (1,)}, "t": {"0": 2, "2": 3}}
