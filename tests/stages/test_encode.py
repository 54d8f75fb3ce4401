"""The stage `encode`: chunks are encoded by a codec, and leases shrink to the encoded size."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import anyio
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from tests.stages.stage_rig import Rig, Scripted, cancel_in, run_one, run_stages, save_stages

from penstock import SaveFormat
from penstock.errors import ConfigError, PenstockError
from penstock.handlers import ArrayHandler, OrbaxLayout
from penstock.kernel import Extents, Leaf, Piece, Pipeline, Slot, StagedBatch, TreeToSave
from penstock.kernel.pipeline import FunctionStage
from penstock.stages import DeviceToHost, Encode, Flatten, LimitBytes
from penstock.stages.encode import SAMPLE_BYTES, SAMPLES
from penstock.stages.messages.batching import encoding_room
from penstock.testing import Hang, Operation

pytestmark = pytest.mark.anyio

Array = np.ndarray[Any, np.dtype[Any]]


class ScriptedLayout:
    """An Orbax layout whose `encode` records its calls, and fails or hangs at a chosen one."""

    def __init__(self, form: SaveFormat, coded_chunk: int = 1 << 20) -> None:
        self._inner = OrbaxLayout(form, coded_chunk)
        self.calls: list[tuple[str, int]] = []
        self.fault: Exception | Hang | None = None
        self.fault_at = 1
        self.grow = 0  #: bytes that encoding adds to each chunk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def arrays(self) -> ScriptedLayout:
        return self

    @property
    def save_format(self) -> SaveFormat:
        return self._inner.save_format

    def fit(self, *args: Any) -> Any:
        return self._inner.fit(*args)

    def chunk_file(self, *args: Any) -> Any:
        return self._inner.chunk_file(*args)

    def encode(self, codec: str, chunks: Sequence[memoryview], itemsize: int) -> Sequence[bytes]:
        self.calls.append((codec, sum(map(len, chunks))))
        if len(self.calls) == self.fault_at:
            if isinstance(self.fault, Hang):
                self.fault.hold(Operation("encode", codec))
            elif self.fault is not None:
                raise self.fault

        return [data + bytes(self.grow) for data in self._inner.encode(codec, chunks, itemsize)]


def use(rig: Rig, form: SaveFormat, coded_chunk: int = 1 << 20) -> ScriptedLayout:
    layout = ScriptedLayout(form, coded_chunk)
    rig.layout = cast("Any", layout)
    return layout


def zeros(nbytes: int) -> Array:
    return np.zeros(nbytes, np.uint8)


def noise(nbytes: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


async def encoded(rig: Rig, tree: object, encode: Encode | None = None, *after: Any) -> list[StagedBatch]:
    stages = (Flatten(), DeviceToHost(), Encode() if encode is None else encode, *after)
    return await save_stages(rig.save_run(), tree, *stages)


def pieces_of(batches: list[StagedBatch]) -> dict[tuple[int, tuple[int, ...]], Piece]:
    """Return the chunks that travel alone."""
    alone = [extents for batch in batches for extents in batch.extents if extents.chunk is not None]
    return {(piece.leaf.index, piece.chunk): piece for extents in alone for piece in extents}


def leaves_of(batches: list[StagedBatch]) -> dict[int, Leaf]:
    return {leaf.index: leaf for batch in batches for leaf in batch.leaves}


def decoded(directory: Path, data: memoryview, nbytes: int) -> bytes:
    """Decode a chunk with TensorStore's own zarr driver."""
    metadata = {"zarr_format": 2, "shape": [nbytes], "chunks": [nbytes], "dtype": "|u1", "order": "C"}
    about = metadata | {"compressor": {"id": "zstd", "level": 3}, "fill_value": None, "filters": None}
    directory.mkdir(exist_ok=True)
    (directory / ".zarray").write_text(json.dumps(about))
    (directory / "0").write_bytes(data)
    spec: Any = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{directory}/"}}
    return bytes(cast("Any", ts).open(spec).result().read().result())


async def test_each_chunk_becomes_one_piece_that_a_zarr_driver_decodes(rig: Rig) -> None:
    use(rig, SaveFormat(codec="zstd:3", chunk_byte_size=20_000))
    tree = [noise(60_000), np.arange(20_000, dtype=np.uint8), noise(100)]

    batches = await encoded(rig, tree)

    pieces = pieces_of(batches)
    assert sorted(pieces) == [(0, (0,)), (0, (1,)), (0, (2,)), (1, (0,))]
    for (leaf, (chunk,)), piece in pieces.items():
        assert (piece.start, piece.coded, piece.cost) == (0, piece.nbytes, piece.nbytes)
        assert piece.chunk_nbytes == piece.nbytes
        assert (
            decoded(rig.root / f"{leaf}.{chunk}", piece.data, 20_000)
            == tree[leaf][chunk * 20_000 :][:20_000].tobytes()
        )
    together = [extents for batch in batches for extents in batch.extents if extents.chunk is None]
    assert [extents.leaves[0].index for extents in together] == [2]
    assert leaves_of(batches).keys() == {0, 1, 2}


class FollowingSpecs(Scripted):
    """A scripted handler that cuts leaves as the layout asks."""

    @property
    def follows_spec(self) -> bool:
        return True


async def test_chunks_in_host_memory_are_taken_together_and_passed_on_four_at_once(rig: Rig) -> None:
    use(rig, SaveFormat(codec="zstd", chunk_byte_size=20_000))
    rig.limits = replace(rig.limits, piece_bytes=encoding_room(20_000))
    handler = FollowingSpecs(ArrayHandler())
    rig.registry = rig.registry.copy()
    rig.registry.register(jax.Array, handler, override=True)
    seen: list[tuple[int, int]] = []

    async def note(batch: StagedBatch) -> StagedBatch:
        leased = batch.staged.nbytes if batch.staged is not None else 0
        seen.append((len(handler.names("take")), leased))
        return batch

    tree = [jnp.arange(100_000, dtype=jnp.uint8)]
    stages = (Flatten(), DeviceToHost(), FunctionStage(note), Encode())
    batches = await save_stages(rig.save_run(), tree, *stages)

    assert seen == [(5, 0), (5, 0)], "the room for what is made of them is leased to encode them"
    assert sorted(pieces_of(batches)) == [(0, (at,)) for at in range(5)]


async def test_without_a_codec_batches_pass_as_they_are(rig: Rig) -> None:
    layout = use(rig, SaveFormat())
    batches = await save_stages(rig.save_run(), [noise(100_000), noise(5)], Flatten(), DeviceToHost())
    batches = [replace(batch, staged=None) for batch in batches]

    assert all(
        one is other
        for one, other in zip(await run_one(rig.save_run(), Encode(), *batches), batches, strict=True)
    )
    assert layout.calls == []


async def test_a_layout_without_formats_is_left_alone(rig: Rig) -> None:
    class Plain:
        """Offers no choice of how arrays are stored."""

        arrays = None

    batch = StagedBatch()
    run = rig.save_run()
    run.layout = Plain()  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]

    assert await run_one(run, Encode(), batch) == [batch]


async def test_the_lease_shrinks_to_what_the_chunks_became(rig: Rig) -> None:
    use(rig, SaveFormat(codec="zstd", chunk_byte_size=50_000))
    leased: list[int] = []

    async def look(batch: StagedBatch) -> StagedBatch:
        leased.append(rig.memory.statistics().leased)
        assert batch.staged is not None
        assert batch.staged.nbytes == sum(extents.cost for extents in batch.extents)
        return batch

    await encoded(rig, {"a": zeros(200_000), "b": noise(200_000)}, Encode(concurrency=1), FunctionStage(look))

    most = 200_000 + 4 * encoding_room(50_000)
    assert rig.memory.statistics().peak <= 2 * most
    assert min(leased) < 250_000, "zeros and noise, each once"


async def test_a_codec_that_makes_more_than_its_room_is_told_by_no_lost_lease(rig: Rig) -> None:
    layout = use(rig, SaveFormat(codec="zstd"))
    layout.grow = 300_000

    (batch,) = await encoded(rig, noise(100_000))

    assert batch.extents[0].nbytes > 400_000


# By sampling


async def test_auto_encodes_what_compresses_and_leaves_the_rest(rig: Rig) -> None:
    layout = use(rig, SaveFormat(codec="auto"))

    batches = await encoded(rig, {"noise": noise(100_000), "small": zeros(1000), "zeros": zeros(100_000)})

    assert {index: leaf.spec.codec for index, leaf in leaves_of(batches).items()} == {
        0: None,
        1: None,
        2: "zstd:1",
    }
    pieces = pieces_of(batches)
    left, made = pieces[0, (0,)], pieces[2, (0,)]
    assert (left.coded, left.nbytes, left.cost, left.leaf.spec.codec) == (None, 100_000, 100_000, None)
    assert (made.coded, made.leaf.spec.codec) == (made.nbytes, "zstd:1")
    assert made.nbytes < 1000
    assert layout.calls.count(("zstd:1", 100_000)) == 3, "a sample of each, and then the zeros"


async def test_auto_decides_once_for_all_chunks_of_a_leaf(rig: Rig) -> None:
    layout = use(rig, SaveFormat(codec="auto", chunk_byte_size=20_000))
    rig.limits = replace(rig.limits, piece_bytes=20_000)  # so that each chunk comes in a batch of its own
    mixed = np.concatenate([zeros(20_000), noise(20_000), zeros(20_000)])

    batches = await encoded(
        rig,
        [mixed, np.concatenate([noise(20_000), zeros(40_000)])],
        Encode(concurrency=3, auto_codecs=("zstd:1",)),
    )

    codecs = {(leaf, piece.leaf.spec.codec) for (leaf, _), piece in pieces_of(batches).items()}
    assert codecs == {(0, "zstd:1"), (1, None)}
    assert [nbytes for _, nbytes in layout.calls].count(20_000) == 2 + 3, (
        "a sample of each, and the chunks of one"
    )


async def test_auto_looks_at_parts_of_all_of_a_large_chunk(rig: Rig) -> None:
    layout = use(rig, SaveFormat(codec="auto"), coded_chunk=4 << 20)
    behind = np.concatenate([noise(1 << 20), zeros(3 << 20)])
    begin = np.concatenate([zeros(1 << 14), noise((4 << 20) - (1 << 14))])
    rig.limits = replace(rig.limits, piece_bytes=4 << 20)

    batches = await encoded(rig, [behind, begin], Encode(auto_codecs=("zstd:1",), auto_saves=0.1))

    assert {index: leaf.spec.codec for index, leaf in leaves_of(batches).items()} == {0: "zstd:1", 1: None}
    assert ("zstd:1", SAMPLES * SAMPLE_BYTES) in layout.calls


async def test_auto_takes_the_codec_that_leaves_least(rig: Rig) -> None:
    use(rig, SaveFormat(codec="auto"))
    normal = np.random.default_rng(0).standard_normal(100_000)
    weights = (normal * 0.02).astype(ml_dtypes.bfloat16)
    text = np.frombuffer(b"".join(b"%d %d\n" % (n, n * n) for n in range(10_000)), np.uint8)

    batches = await encoded(rig, [weights, normal.astype(np.float32), text, noise(100_000)])

    floats = "blosc:lz4:9:bitshuffle:131072"
    codecs = {index: leaf.spec.codec for index, leaf in leaves_of(batches).items()}
    assert codecs == {0: floats, 1: floats, 2: "zstd:1", 3: None}


@pytest.mark.parametrize(("saves", "codec"), [(0.4, "zstd:7"), (0.6, None)])
async def test_how_much_must_be_saved_and_with_what_are_options(rig: Rig, saves: float, codec: str) -> None:
    use(rig, SaveFormat(codec="auto"))
    half = np.concatenate([zeros(50_000), noise(50_000)])

    batches = await encoded(rig, half, Encode(auto_codecs=("zstd:7",), auto_saves=saves))

    assert leaves_of(batches)[0].spec.codec == codec


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"auto_codecs": ["gzip"]}, "auto_codecs"),
        ({"auto_codecs": ["floats", "auto"]}, "auto_codecs"),
        ({"auto_codecs": []}, "auto_codecs"),
        ({"auto_saves": 1.0}, "auto_saves"),
        ({"auto_saves": -0.1}, "auto_saves"),
        ({"concurrency": 0}, "concurrency"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Pipeline((Slot("encode", Encode()),)).configured({"encode": options}, source="penstock.toml")

    assert (caught.value.key, caught.value.source) == (f"encode.{key}", "penstock.toml")


# Failing and cancelled


async def test_a_chunk_that_is_not_whole_is_refused_with_its_key_path(rig: Rig) -> None:
    use(rig, SaveFormat(codec="zstd"))
    (batch,) = await save_stages(rig.save_run(), {"a": noise(100_000)}, Flatten(), DeviceToHost())
    (piece,) = batch.parts()
    half = replace(piece, data=piece.data[:50_000])

    with pytest.raises(PenstockError, match="not a whole chunk") as caught:
        await run_one(rig.save_run(), Encode(), StagedBatch(extents=(Extents.of(half),)))

    assert caught.value.key_path == "['a']"


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("codec", ["zstd", "auto"])
async def test_a_codec_that_fails_midway_fails_the_stage(rig: Rig, codec: str, at: int) -> None:
    layout = use(rig, SaveFormat(codec=codec))
    layout.fault, layout.fault_at = ArithmeticError("refused"), at
    rig.limits = replace(rig.limits, batch_leaves=1)

    with pytest.raises(ArithmeticError, match="refused"):
        await encoded(rig, [zeros(50_000), noise(50_000), zeros(50_000)])


@pytest.mark.parametrize("native", [False, True], ids=["scope", "task"])
@pytest.mark.parametrize("codec", ["zstd", "auto"])
@pytest.mark.parametrize("at", [1, 3])
async def test_cancelled_midway(rig: Rig, codec: str, at: int, native: bool) -> None:
    layout = use(rig, SaveFormat(codec=codec))
    hang = layout.fault = Hang()
    layout.fault_at = at
    rig.limits = replace(rig.limits, batch_leaves=1)
    tree = [zeros(50_000 + size) for size in range(5)]

    await cancel_in(hang, lambda: encoded(rig, tree), native=native)


async def test_several_batches_at_once_stay_within_a_budget_of_two_chunks(rig: Rig) -> None:
    use(rig, SaveFormat(codec="zstd"), coded_chunk=50_000)
    rig.limit(2 * (50_000 + encoding_room(50_000)))

    batches = await run_stages(
        rig.save_run(),
        Flatten(),
        DeviceToHost(),
        Encode(concurrency=4),
        LimitBytes(),
        message=TreeToSave([noise(500_000, seed) for seed in range(3)]),
    )

    assert len(pieces_of(batches)) == 30
    statistics = rig.memory.statistics()
    assert 100_000 < statistics.peak <= statistics.limit


# Bytes of the caller, which need no copy


def on_host(rig: Rig, budget: int) -> ScriptedLayout:
    """Let arrays of jax be encoded from where they are, each chunk of 50,000 bytes alone."""
    layout = use(rig, SaveFormat(codec="zstd", chunk_byte_size=50_000))
    rig.limit(budget, piece=encoding_room(50_000) // 4)
    rig.registry = rig.registry.copy()
    rig.registry.register(jax.Array, FollowingSpecs(ArrayHandler()), override=True)
    return layout


async def test_a_tight_budget_holds_up_no_save_of_what_is_on_the_host(rig: Rig) -> None:
    layout = on_host(rig, 2 * encoding_room(50_000))
    staged_before: list[int] = []

    async def note(batch: StagedBatch) -> StagedBatch:
        staged_before.append(len(layout.calls))
        return batch

    tree = [jnp.asarray(noise(500_000))]
    stages = (Flatten(), DeviceToHost(), FunctionStage(note), Encode(concurrency=2), LimitBytes())
    batches = await run_stages(rig.save_run(), *stages, message=TreeToSave(tree))

    assert len(pieces_of(batches)) == 10
    assert staged_before[-1] <= 2 + 2, "no more are encoded until all are staged than there is room for"
    statistics = rig.memory.statistics()
    assert 0 < statistics.peak <= statistics.limit


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_what_is_copied_and_what_is_not_wait_for_no_room_of_each_other(
    rig: Rig, concurrency: int
) -> None:
    on_host(rig, 2 * (50_000 + encoding_room(50_000)))
    rig.limits = replace(rig.limits, batch_leaves=1)  # they come by turns
    tree = [jnp.asarray(noise(300_000)), noise(300_000, 1), jnp.asarray(noise(300_000, 2)), noise(300_000, 3)]

    stages = (Flatten(), DeviceToHost(), Encode(concurrency=concurrency), LimitBytes())
    batches = await run_stages(rig.save_run(), *stages, message=TreeToSave(tree))

    assert len(pieces_of(batches)) == 24
    statistics = rig.memory.statistics()
    assert statistics.peak <= statistics.limit


async def test_what_waits_for_room_lets_pass_what_has_all_of_it(rig: Rig) -> None:
    budget = 50_000 + encoding_room(50_000)
    on_host(rig, budget)
    (view,) = await save_stages(rig.save_run(), [jnp.asarray(noise(50_000))], Flatten(), DeviceToHost())
    (copied,) = await save_stages(rig.save_run(), [noise(50_000, 1)], Flatten(), DeviceToHost())
    lease = rig.memory.acquire_nowait(budget)

    with anyio.fail_after(20):
        found = await run_one(
            rig.save_run(), Encode(concurrency=1), view, replace(copied, staged=lease), StagedBatch()
        )

    assert [[piece.coded is not None for piece in batch.parts()] for batch in found] == [[True], [], [True]]


@pytest.mark.parametrize("at", [1, 3, 7])
async def test_a_codec_that_fails_on_what_had_to_wait_fails_the_stage(rig: Rig, at: int) -> None:
    layout = on_host(rig, 2 * encoding_room(50_000))
    layout.fault, layout.fault_at = ArithmeticError("refused"), at
    stages = (Flatten(), DeviceToHost(), Encode(concurrency=2), LimitBytes())

    with pytest.raises(ArithmeticError, match="refused"):
        await run_stages(rig.save_run(), *stages, message=TreeToSave([jnp.asarray(noise(500_000))]))

    assert rig.memory.statistics().leased == 0
