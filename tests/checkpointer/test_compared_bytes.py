"""A flipped bit in stored array bytes is found on every path that reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import penstock
from penstock import SaveFormat
from penstock.errors import ChecksumError

ROWS = np.arange(64 * 1000, dtype=np.int32).reshape(64, 1000)
FORMS = {
    "plain": SaveFormat(),
    "directories": SaveFormat(ocdbt=False),
    "zstd": SaveFormat(codec="zstd"),
    "zstd, small chunks, zarr v3": SaveFormat(codec="zstd", zarr=3, chunk_byte_size=70_000),
    "zstd, directories": SaveFormat(codec="zstd", ocdbt=False, chunk_byte_size=70_000),
    "safetensors": None,
}


def columns() -> Any:
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec(None, "x"))  # type: ignore[no-untyped-call]  # jax's
    return jax.ShapeDtypeStruct(ROWS.shape, ROWS.dtype, sharding=sharding)  # type: ignore[no-untyped-call]  # jax's


async def save(path: Path, form: SaveFormat | None) -> Path:
    if form is None:
        await penstock.export_safetensors({"a": ROWS, "b": [ROWS + 1]}, path)
        return path

    async with penstock.Checkpointer(save_format=form) as checkpointer:
        await (await checkpointer.save(path, {"a": ROWS, "b": [ROWS + 1]}))

    return path


def flip_bits(path: Path) -> None:
    """Flip a bit of each file with array bytes, in its first leaf."""
    for file in [file for file in path.rglob("*") if file.is_file() and file.stat().st_size > 10_000]:
        data = bytearray(file.read_bytes())
        data[len(data) // 4] ^= 1
        file.write_bytes(data)


async def streamed(path: Path) -> None:
    async with penstock.Checkpointer() as checkpointer:
        async for _ in checkpointer.stream(path):
            pass


async def converted(path: Path) -> None:
    await penstock.convert(path, path.with_name("other"), overwrite=True)


async def as_safetensors(path: Path) -> None:
    await penstock.convert(path, path.with_name("other.safetensors"), overwrite=True)


async def whole(path: Path) -> None:
    await penstock.restore(path)


async def sharded(path: Path) -> None:
    await penstock.restore(path, like={"a": columns(), "b": [columns()]})


async def cut_off(path: Path) -> None:
    like = {"a": ROWS[:40, :700], "b": [ROWS[:40, :700]]}
    await penstock.restore(path, like=like, strict=False)


async def mapped(path: Path) -> None:
    await penstock.restore(path, mmap=True, verify=True)


@pytest.mark.thinned(2)
@pytest.mark.anyio
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("read", [whole, sharded, cut_off, mapped, streamed, converted, as_safetensors])
async def test_a_flipped_bit_is_found_by_every_way_to_read(
    read: Callable[[Path], Any], form: str, tmp_path: Path
) -> None:
    path = await save(tmp_path / "c", FORMS[form])
    await read(path)

    flip_bits(path)

    with pytest.raises(ChecksumError) as caught:
        await read(path.rename(tmp_path / "damaged"))
    assert caught.value.key_path in {"['a']", "['b'][0]"}


@pytest.mark.anyio
async def test_who_wants_no_comparison_gets_none(tmp_path: Path) -> None:
    path = await save(tmp_path / "c", SaveFormat())
    flip_bits(path)

    asked: list[dict[str, Any]] = [{"verify": False}, {"mmap": True}, {"mmap": True, "verify": False}]
    for options in asked:
        found = await penstock.restore(path, **options)
        assert found["a"].tobytes() != ROWS.tobytes() or found["b"][0].tobytes() != (ROWS + 1).tobytes()


@pytest.mark.anyio
async def test_the_option_of_the_stage_counts_unless_the_call_says_otherwise(tmp_path: Path) -> None:
    path = await save(tmp_path / "c", SaveFormat())
    flip_bits(path)
    config = tmp_path / "config.toml"
    config.write_text("[restore.read]\nverify = false\n")

    async with penstock.Checkpointer(config=config) as checkpointer:
        await checkpointer.restore(path)
        with pytest.raises(ChecksumError):
            await checkpointer.restore(path, verify=True)


@pytest.mark.anyio
@pytest.mark.parametrize("form", ["zstd", "zstd, small chunks, zarr v3"])
async def test_stored_and_decoded_bytes_are_leased(form: str, tmp_path: Path) -> None:
    path = await save(tmp_path / "c", FORMS[form])

    async with penstock.Checkpointer(memory_limit=1 << 20) as checkpointer:
        await checkpointer.restore(path)
        statistics = checkpointer.statistics()

    assert statistics.leased == 0
    assert statistics.peak > 70_000


@pytest.mark.parametrize("damaged", ["a", "d", "bd"])
async def test_of_many_mapped_bytes_the_first_that_are_damaged_are_named(
    tmp_path: Path, damaged: str
) -> None:
    """They are compared in parts, by several threads."""
    nbytes, names = 20 * 2**20, "abcd"
    path = tmp_path / "1"
    await penstock.save(path, {name: np.full(nbytes, ord(name), np.uint8) for name in names})
    (file,) = [each for each in path.rglob("*") if each.is_file() and each.stat().st_size >= 4 * nbytes]
    with file.open("r+b") as stored:
        whole = stored.read()
        for name in damaged:
            stored.seek(whole.index(name.encode() * 4096) + nbytes // 2)
            stored.write(b"x")

    with pytest.raises(ChecksumError) as caught:
        await penstock.restore(path, mmap=True, verify=True)

    assert caught.value.key_path == f"['{damaged[0]}']"
    await penstock.restore(path, mmap=True)
