"""Leaves that a stage made opaque: which restores may read them, and which are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from docs.examples.stages_of_your_own import CODEC, CountAndHash, Decrypt, Encrypt, Quantise
from jax.sharding import Mesh, NamedSharding

import penstock
from penstock import SaveFormat
from penstock.errors import (
    ChecksumError,
    CorruptCheckpointError,
    InvalidLeafError,
    PipelineError,
    UnsupportedFormatError,
)
from penstock.handlers import OrbaxLayout, SafetensorsLayout
from penstock.pipelines import restore_pipeline, save_pipeline

pytestmark = pytest.mark.anyio

# jax declares no types for these.
Spec, Struct = cast("Any", jax.sharding.PartitionSpec), cast("Any", jax.ShapeDtypeStruct)

KEY, OTHER = bytes(range(32)), bytes(32)
SEALING = save_pipeline().insert_after("device_to_host", Encrypt(KEY))
OPENING = restore_pipeline().insert_after("plan", Decrypt(KEY))


def tree() -> dict[str, Any]:
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    rows = NamedSharding(mesh, Spec("x"))
    return {
        "large": np.arange(700_000, dtype=np.float64),
        "sharded": jax.device_put(jnp.arange(4096.0).reshape(64, 64), rows),
        "small": [np.full(3, number) for number in range(20)],
        "empty": np.zeros((0, 3)),
        "step": 7,
        "text": "stays readable",
        "none": None,
    }


def same(found: Any, expected: Any) -> bool:
    return bool(
        jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(np.asarray(a), np.asarray(b)), found, expected))
    )


async def sealed(path: Path, state: Any, **options: Any) -> None:
    async with penstock.Checkpointer(**options) as checkpointer:
        await (await checkpointer.save(path, state, pipeline=SEALING))
        assert checkpointer.statistics().leased == 0


FORMATS = pytest.mark.parametrize(
    "form", [SaveFormat(), SaveFormat(zarr=3), SaveFormat(ocdbt=False)], ids=["zarr2", "zarr3", "directories"]
)


@FORMATS
@pytest.mark.parametrize("budget", ["8MiB", "1GiB"])
async def test_what_was_sealed_is_opened_with_the_key(tmp_path: Path, form: SaveFormat, budget: str) -> None:
    state = tree()
    options: dict[str, Any] = {"layout": OrbaxLayout(form), "memory_limit": budget}
    await sealed(tmp_path / "c", state, **options)

    stored = b"".join(path.read_bytes() for path in (tmp_path / "c").rglob("*") if path.is_file())
    assert state["large"][1000:1010].tobytes() not in stored
    assert b"stays readable" in stored
    async with penstock.Checkpointer(**options) as checkpointer:
        found = await checkpointer.restore(tmp_path / "c", pipeline=OPENING)
        partly = await checkpointer.restore(tmp_path / "c", pipeline=OPENING, only="small.*")
        report = await checkpointer.verify(tmp_path / "c")
        assert checkpointer.statistics().leased == 0

    assert same(found, state)
    assert same(partly["small"], state["small"])
    assert report.intact
    assert not report.unchecked


async def test_a_part_of_what_was_sealed_takes_whole_chunks(tmp_path: Path) -> None:
    state = tree()
    await sealed(tmp_path / "c", state)

    columns = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("y",)), Spec(None, "y"))
    like = {"sharded": Struct((64, 64), jnp.float32, sharding=columns)}
    async with penstock.Checkpointer() as checkpointer:
        found = await checkpointer.restore(tmp_path / "c", like=like, pipeline=OPENING, on_unexpected="skip")

    assert found["sharded"].sharding == columns
    assert same(found["sharded"], state["sharded"])


@FORMATS
async def test_an_opaque_leaf_without_its_inverse_is_refused_by_name(
    tmp_path: Path, form: SaveFormat
) -> None:
    await sealed(tmp_path / "c", {"a": np.arange(10)}, layout=OrbaxLayout(form))

    async with penstock.Checkpointer() as checkpointer:
        with pytest.raises(UnsupportedFormatError, match=CODEC) as raised:
            await checkpointer.restore(tmp_path / "c")

        assert raised.value.key_path == "['a']"
        with pytest.raises(UnsupportedFormatError, match=CODEC):
            await checkpointer.restore(tmp_path / "c", mmap=True, pipeline=OPENING)

        assert checkpointer.statistics().leased == 0


async def test_a_wrong_key_is_an_error_that_names_the_leaf(tmp_path: Path) -> None:
    await sealed(tmp_path / "c", {"a": np.arange(10)})

    pipeline = restore_pipeline().insert_after("plan", Decrypt(OTHER))
    async with penstock.Checkpointer() as checkpointer:
        with pytest.raises(CorruptCheckpointError, match="key") as raised:
            await checkpointer.restore(tmp_path / "c", pipeline=pipeline)

        assert raised.value.key_path == "['a']"
        assert CODEC in str(raised.value)
        assert checkpointer.statistics().leased == 0


async def test_a_flipped_bit_is_seen_before_anything_is_opened(tmp_path: Path) -> None:
    await sealed(tmp_path / "c", {"a": np.arange(1000)})
    data = max((tmp_path / "c").glob("d/*"), key=lambda path: path.stat().st_size)
    with data.open("r+b") as file:
        file.seek(500)
        byte = file.read(1)[0]
        file.seek(500)
        file.write(bytes([byte ^ 1]))

    async with penstock.Checkpointer() as checkpointer:
        with pytest.raises(ChecksumError):
            await checkpointer.restore(tmp_path / "c", pipeline=OPENING)

        assert not (await checkpointer.verify(tmp_path / "c")).intact


@FORMATS
async def test_orbax_and_tensorstore_refuse_an_opaque_leaf(tmp_path: Path, form: SaveFormat) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    await sealed(tmp_path / "c", {"a": np.arange(10.0)}, layout=OrbaxLayout(form))

    with ocp.PyTreeCheckpointer() as checkpointer, pytest.raises(Exception, match=CODEC):
        checkpointer.restore(tmp_path / "c")


async def test_safetensors_refuses_an_opaque_leaf_before_a_byte_is_written(tmp_path: Path) -> None:
    layout = SafetensorsLayout()
    pipeline = save_pipeline().insert_after("device_to_host", Encrypt(KEY))
    async with penstock.Checkpointer(layout=layout) as checkpointer:
        with pytest.raises(InvalidLeafError, match=CODEC):
            await (await checkpointer.save(tmp_path / "c", {"a": np.arange(10)}, pipeline=pipeline))

    assert list(tmp_path.iterdir()) == []


async def test_what_has_a_codec_already_is_refused(tmp_path: Path) -> None:
    async with penstock.Checkpointer(layout=OrbaxLayout(SaveFormat(codec="zstd:1"))) as checkpointer:
        with pytest.raises(PipelineError, match="zstd:1"):
            await (await checkpointer.save(tmp_path / "c", {"a": np.arange(10_000)}, pipeline=SEALING))

    assert list(tmp_path.iterdir()) == []


async def test_the_base_gives_nothing_to_what_is_sealed_and_nothing_of_what_was(tmp_path: Path) -> None:
    state = {"a": jnp.arange(10_000)}
    async with penstock.Checkpointer() as checkpointer:
        await (await checkpointer.save(tmp_path / "plain", state))
        await (await checkpointer.save(tmp_path / "sealed", state, pipeline=SEALING))
        for base, pipeline in (("plain", SEALING), ("sealed", save_pipeline()), ("sealed", SEALING)):
            report = await (
                await checkpointer.save(
                    tmp_path / "next", state, base=tmp_path / base, pipeline=pipeline, overwrite=True
                )
            )
            assert report.nbytes_kept == 0

        assert same(await checkpointer.restore(tmp_path / "next", pipeline=OPENING), state)


async def test_two_saves_of_one_state_have_no_chunk_in_common(tmp_path: Path) -> None:
    for name in "12":
        await sealed(tmp_path / name, {"a": np.zeros(1000)})

    first, second = ({path.read_bytes() for path in (tmp_path / name).glob("d/*")} for name in "12")
    assert not first & second


async def test_what_stages_did_is_recorded_and_the_key_is_not(tmp_path: Path) -> None:
    state = {"a": np.zeros(10, np.float32), "n": np.arange(3)}
    pipeline = SEALING.insert_after("device_to_host", Quantise()).insert_after("encrypt", CountAndHash())
    async with penstock.Checkpointer() as checkpointer:
        await (await checkpointer.save(tmp_path / "c", state, pipeline=pipeline))
        await (await checkpointer.save(tmp_path / "plain", state))
        await (await checkpointer.save(tmp_path / "c2", state, pipeline=pipeline))
        await (await checkpointer.save(tmp_path / "c2", state, overwrite=True))

    text = (tmp_path / "c" / "_PENSTOCK_STAGES").read_text()
    assert json.loads(text) == {
        "version": 1,
        "leaves": {
            "a": {
                "stages": ["quantise", "encrypt"],
                "before": {"dtype": "float32", "shape": [10]},
                "after": {"dtype": "bfloat16", "shape": [10], "codec": CODEC},
            },
            "n": {
                "stages": ["encrypt"],
                "before": {"dtype": "int64", "shape": [3]},
                "after": {"dtype": "int64", "shape": [3], "codec": CODEC},
            },
        },
    }
    assert not (tmp_path / "plain" / "_PENSTOCK_STAGES").exists()
    assert not (tmp_path / "c2" / "_PENSTOCK_STAGES").exists()


async def test_a_quantised_checkpoint_is_a_plain_one(tmp_path: Path) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    values = np.linspace(0, 1, 1000, dtype=np.float32)
    state: Any = {"a": values, "n": 3}
    async with penstock.Checkpointer() as checkpointer:
        pipeline = save_pipeline().insert_after("device_to_host", Quantise())
        await (await checkpointer.save(tmp_path / "c", state, pipeline=pipeline))
        back = await checkpointer.restore(tmp_path / "c", like=state, dtype="like")

    with ocp.PyTreeCheckpointer() as other:
        found = other.restore(tmp_path / "c")

    assert found["a"].dtype == jnp.bfloat16
    assert np.array_equal(np.asarray(found["a"]), values.astype(jnp.bfloat16))
    assert back["a"].dtype == np.float32
