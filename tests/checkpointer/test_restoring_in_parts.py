"""Leaves larger than the budget, restored to devices that do not share the memory of the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from tests.byte_counting import CountingStore
from tests.handlers.leaves.round_trips import struct
from tests.stages.stage_rig import Rig, Scripted, cancel_in

import penstock
from penstock import HandlerRegistry, SaveFormat
from penstock.errors import ChecksumError, StorageError
from penstock.handlers import ArrayHandler, default_handlers
from penstock.kernel import ReadLeaf, RestoreRequest, Target, run_pipeline
from penstock.kernel.messages import RestoreOptions
from penstock.pipelines import restore_pipeline
from penstock.stages import HostToDevice
from penstock.testing import Hang, Operation

pytestmark = pytest.mark.anyio

AssertSame = Callable[[Any, Any], None]
P = cast("Callable[..., PartitionSpec]", PartitionSpec)
MIB = 2**20
SHAPE = (1024, 1024)  # 4 MiB of float32


@pytest.fixture
async def rig(tmp_path: Path, anyio_backend: object) -> Any:
    made = Rig(tmp_path)
    yield made
    made.check_idle()


def copying(handler: Any = None) -> HandlerRegistry:
    """Make a registry in which device arrays never alias host buffers."""
    registry = default_handlers(entry_points=False)
    types: tuple[type, ...] = (jax.Array, jax.ShapeDtypeStruct, Tracer)
    for type_ in types:
        registry.register(type_, handler or ArrayHandler(alias_host=False), override=True)

    return registry


def numbers(dtype: Any = np.float32, shape: tuple[int, ...] = SHAPE) -> Any:
    return (
        (np.arange(math.prod(shape)) % 7 % (2 if dtype == "bool" else 7))
        .reshape(shape)
        .astype(jnp.dtype(dtype))
    )


def over(n: tuple[int, ...], *axes: Any) -> Sharding:
    devices = np.array(jax.devices()[: math.prod(n)]).reshape(n)
    return NamedSharding(Mesh(devices, ("x", "y")[: len(n)]), P(*axes))


async def saved(path: Path, tree: Any, **options: Any) -> None:
    async with penstock.Checkpointer(**options) as checkpointer:
        await (await checkpointer.save(path, tree))


async def restored(rig: Rig, like: Any, *, budget: int = MIB, n_workers: int = 1, **request: Any) -> Any:
    """Restore under a budget; assert that it is never exceeded, and that every byte is counted as done."""
    rig.limit(budget, piece=max(budget // 16, 1))
    tree = await restored_within(rig, like, n_workers=n_workers, **request)
    assert rig.memory.statistics().leased == 0
    return tree


async def restored_within(rig: Rig, like: Any, *, n_workers: int = 1, **request: Any) -> Any:
    """As `restored`, under the budget of the rig, which others may use, too."""
    run = rig.restore_run()
    message = RestoreRequest(str(rig.final), like, has_like=True, **request)
    pipeline = restore_pipeline().replace("host_to_device", HostToDevice(n_workers))
    result: Any = (await run_pipeline(pipeline, run, message)).value
    assert run.memory.statistics().peak <= run.memory.limit
    assert "memory.oversize" not in rig.events
    done = run.progress.snapshot()
    assert done.leaves_done == done.leaves_total == len(jax.tree_util.tree_leaves(like))
    assert done.bytes_done == done.bytes_total
    return result.tree


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["float32", "bool", "bfloat16", "complex64", "int4", "float8_e4m3fn"])
@pytest.mark.parametrize("n_workers", [1, 3])
async def test_a_leaf_of_several_budgets(
    rig: Rig, assert_same: AssertSame, dtype: str, n_workers: int
) -> None:
    rig.registry = copying()
    tree = {"large": jnp.asarray(numbers(dtype, (2048, 1024))), "small": jnp.ones(3), "host": np.arange(5)}
    await saved(rig.final, tree)

    found = await restored(rig, tree, n_workers=n_workers)

    assert_same(found, tree)
    assert not found["large"].committed


@pytest.mark.sweep
@pytest.mark.parametrize(
    "sharding",
    [
        over((8,), "x"),
        over((8,), None, "x"),
        over((2, 4), "x", "y"),
        over((2, 4), "y"),
        over((2, 4)),
        SingleDeviceSharding(jax.devices()[5]),
    ],
    ids=str,
)
@pytest.mark.parametrize("before", [None, over((4, 2), "x", "y")], ids=["whole", "sharded"])
async def test_each_shard_is_filled_on_its_device(
    rig: Rig, assert_same: AssertSame, sharding: Sharding, before: Sharding | None
) -> None:
    store = CountingStore()
    rig.registry, rig.store = copying(), cast("Any", store)
    rig.store.open_files = 0  # type: ignore[misc]  # this one does not count them
    tree = [jax.device_put(numbers(), before)]
    await saved(rig.final, tree)
    like = [struct(SHAPE, np.float32, sharding=sharding)]

    found = await restored(rig, like)

    assert_same(found, [jax.device_put(numbers(), sharding)])
    assert store.nbytes < 1.2 * numbers().nbytes  # bytes that several devices need are read once


async def test_several_at_once_share_the_budget(rig: Rig, assert_same: AssertSame) -> None:
    rig.registry = copying()
    tree = {f"{at}": jnp.asarray(numbers()) + at for at in range(2)}
    await saved(rig.final, tree)
    results: list[Any] = []

    async def one() -> None:
        results.append(await restored_within(rig, tree))

    rig.limit(MIB, piece=MIB // 8)
    memory = rig.memory
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(one)

    assert memory.statistics().leased == 0
    for found in results:
        assert_same(found, tree)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.int32])
async def test_a_cast_leaf_is_restored_in_parts(rig: Rig, assert_same: AssertSame, dtype: Any) -> None:
    rig.registry = copying()
    await saved(rig.final, {"a": jnp.asarray(numbers())})
    like = {"a": struct(SHAPE, dtype, sharding=over((8,), "x"))}

    found = await restored(rig, like, options=RestoreOptions(dtype="like"))

    assert_same(found, {"a": jax.device_put(numbers(dtype), over((8,), "x"))})


async def test_a_padded_and_a_truncated_leaf_are_restored_in_parts(rig: Rig, assert_same: AssertSame) -> None:
    rig.registry = copying()
    await saved(rig.final, {"a": jnp.asarray(numbers())})
    like = {"a": struct((1536, 512), np.float32)}

    found = await restored(rig, like, options=RestoreOptions(strict=False))

    assert_same(found, {"a": jnp.asarray(np.pad(numbers()[:, :512], ((0, 512), (0, 0))))})


async def test_chunks_with_a_codec_are_each_decoded_once(rig: Rig, assert_same: AssertSame) -> None:
    rig.registry = copying()
    form = SaveFormat(codec="zstd", chunk_byte_size=MIB // 128)
    tree = {"a": jnp.asarray(numbers())}
    await saved(rig.final, tree, save_format=form)

    assert_same(await restored(rig, tree), tree)


async def test_a_piece_that_its_handler_cannot_cut_is_admitted_alone(
    rig: Rig, assert_same: AssertSame
) -> None:
    rig.registry = copying()
    tree = {"a": jnp.asarray(numbers())}
    await saved(rig.final, tree, save_format=SaveFormat(codec="zstd"))  # one chunk
    rig.limit(MIB)
    message = RestoreRequest(str(rig.final), tree, has_like=True)

    found: Any = (await run_pipeline(restore_pipeline(), rig.restore_run(), message)).value

    assert_same(found.tree, tree)
    assert rig.events.count("memory.oversize") == 1


async def test_bytes_are_compared_with_their_checksums_though_pieces_were_larger(rig: Rig) -> None:
    rig.registry = copying()
    tree = {"a": jnp.asarray(numbers())}
    await saved(rig.final, tree, memory_limit=4 * MIB)  # so in pieces of 1 MiB
    (file,) = [each for each in rig.final.rglob("d/*") if each.stat().st_size > MIB]
    data = bytearray(file.read_bytes())
    data[3 * MIB] ^= 1
    file.write_bytes(data)

    with pytest.raises(ChecksumError) as raised:
        await restored(rig, tree, budget=2 * MIB)

    assert raised.value.key_path == "['a']"


def flip(path: Path, at: int) -> None:
    """Flip a bit of the data file, in the middle of the n-th 64 KiB of the only large leaf."""
    (file,) = [each for each in path.rglob("d/*") if each.stat().st_size > MIB]
    data = bytearray(file.read_bytes())
    data[at * 2**16 + 2**15] ^= 1
    file.write_bytes(data)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("written", "budget"),
    [(1024 * MIB, MIB), (4 * MIB, MIB // 4)],  # as one piece of 4 MiB, and as pieces of 256 KiB
)
@pytest.mark.parametrize("strict", [True, False])
async def test_a_piece_that_several_parts_need_is_read_once(
    rig: Rig, written: int, budget: int, strict: bool
) -> None:
    store = CountingStore()
    rig.registry, rig.store = copying(), cast("Any", store)
    rig.store.open_files = 0  # type: ignore[misc]  # this one does not count them
    await saved(rig.final, {"a": jnp.asarray(numbers())}, memory_limit=written)
    like = {"a": struct(SHAPE if strict else (1000, 1000), np.float32, sharding=over((8,), "x"))}

    await restored(rig, like, budget=budget, options=RestoreOptions(strict=strict))

    assert store.nbytes < 1.2 * numbers().nbytes


@pytest.mark.parametrize("at", [0, 17, 63])
async def test_a_flipped_bit_in_any_part_of_a_shared_piece_is_found(rig: Rig, at: int) -> None:
    handler = JoinsMemory()
    rig.registry = copying(handler)
    tree = {"a": jnp.asarray(numbers())}
    await saved(rig.final, tree)
    flip(rig.final, at)

    with pytest.raises(ChecksumError) as raised:
        await restored(rig, tree, n_workers=3)

    assert raised.value.key_path == "['a']"
    assert f"bytes 0 to {numbers().nbytes}" in str(raised.value)
    assert not handler.joined


class Careful(Scripted):
    """A handler that fails or hangs when the n-th part is placed."""

    def __init__(self, at: int, hang: Hang | None = None) -> None:
        self.array = ArrayHandler(alias_host=False)
        self.at = at
        self.hang_at = hang
        self.placed: list[int] = []
        super().__init__(self.array)

    def parts(self, *args: Any, **options: Any) -> Sequence[Target]:
        return self.array.parts(*args, **options)

    def place(self, part: ReadLeaf) -> None:
        self.placed.append(part.index)
        if len(self.placed) == self.at:
            if self.hang_at is None:
                raise ArithmeticError("no room")

            self.hang_at.hold(Operation("place", ""))

        self.array.place(part)

    def join(self, part: ReadLeaf) -> Any:
        return self.array.join(part)


class JoinsMemory(Careful):
    """A handler that says whether it was asked for the value of a leaf that came in parts."""

    def __init__(self) -> None:
        super().__init__(-1)
        self.joined = False

    def join(self, part: ReadLeaf) -> Any:
        self.joined = True
        return super().join(part)


async def test_a_restore_in_parts_that_fails_midway_holds_no_bytes(rig: Rig) -> None:
    handler = Careful(5)
    rig.registry = copying(handler)
    tree = {"a": jnp.asarray(numbers())}
    await saved(rig.final, tree)

    with pytest.raises(ArithmeticError):
        await restored(rig, tree)

    assert len(handler.placed) == 5
    rig.check_idle()


async def test_a_read_that_fails_midway_leaves_nothing_leased(rig: Rig) -> None:
    rig.registry = copying()
    tree = {"a": jnp.asarray(numbers())}
    await saved(rig.final, tree)
    rig.store.fail_on("file.read_at", 7)

    with pytest.raises(StorageError):
        await restored(rig, tree)

    rig.check_idle()


@pytest.mark.parametrize("native", [False, True])
async def test_cancelled_while_a_part_is_being_placed(rig: Rig, native: bool) -> None:
    hang = Hang()
    handler = Careful(5, hang)
    rig.registry = copying(handler)
    tree = {"a": jnp.asarray(numbers())}
    await saved(rig.final, tree)

    await cancel_in(hang, lambda: restored(rig, tree), native=native)

    assert len(handler.placed) == 5
    rig.check_idle()


@pytest.mark.parametrize("native", [False, True])
async def test_cancelled_while_a_part_is_being_read(rig: Rig, native: bool) -> None:
    rig.registry = copying()
    tree = {"a": jnp.asarray(numbers())}
    await saved(rig.final, tree)
    hang = rig.store.hang_on("file.read_at", 9)

    await cancel_in(hang, lambda: restored(rig, tree), native=native)

    rig.check_idle()


async def test_what_passes_whole_is_not_cut(rig: Rig, assert_same: AssertSame) -> None:
    handler = Careful(1)  # fails at the first part
    rig.registry = copying(handler)
    tree = {"a": jnp.asarray(numbers())}
    await saved(rig.final, tree)

    assert_same(await restored(rig, tree, budget=8 * MIB), tree)
    with pytest.raises(ArithmeticError):
        await restored(rig, tree, budget=8 * MIB - 2)


async def test_what_reads_go_through_counts_with_what_is_put_on_devices(rig: Rig) -> None:
    rig.registry = copying(Careful(1))
    await saved(rig.final, {"a": jnp.asarray(numbers())})
    like = {"a": struct(SHAPE, np.float32, sharding=over((8,), None, "x"))}  # columns: scattered

    await restored(rig, like, budget=12 * MIB)
    with pytest.raises(ArithmeticError):
        await restored(rig, like, budget=7 * MIB)
