"""Several processes convert a checkpoint together: over a service in memory, each with a coordinator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import anyio
import numpy as np
import pytest
from tests.byte_counting import CountingStore

import penstock
from penstock.errors import PlansDifferError, SpecError
from penstock.handlers.coordinators.job_coordinator import JobCoordinator
from penstock.rules import Cast, Rename, Rules, Stack, Transpose
from penstock.testing import MemoryKeyValues

pytestmark = pytest.mark.anyio

MIB: Final = 2**20
FORMS: Final[Mapping[str, Mapping[str, Any]]] = {
    "orbax": {},
    "chunk files": {"save_format": penstock.SaveFormat(ocdbt=False, zarr=3)},
    "coded": {"save_format": penstock.SaveFormat(codec="zstd:1", chunk_byte_size=MIB)},
    "safetensors": {"format": "safetensors"},
    "one file": {},
    "huggingface": {"format": "huggingface"},
}


def tree() -> dict[str, Any]:
    """One large leaf, one that two do not divide, others of which each process has some, and small ones."""
    numbers = np.random.default_rng(0)
    odd = np.frombuffer(numbers.bytes(81 * 27 * 999), np.uint8).reshape(81, 27, 999)
    large = {"large": numbers.standard_normal((512, 1024), np.float32), "odd": odd}
    layers = {f"l{at}": numbers.standard_normal((100, 256), np.float32) for at in range(8)}
    return {**large, **layers, "step": np.int32(3), "none": np.zeros((0, 3), np.int8)}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "ckpt"
    penstock.sync.save(path, tree())
    (path / "config.json").write_text("{}")
    return path


async def convert_together(
    source: Path, target: Path, options: Callable[[int], Mapping[str, Any]], count: int = 2
) -> list[Any]:
    """Convert in so many processes; return the report of each, or what it raised."""
    service = MemoryKeyValues()
    found: list[Any] = [None] * count

    async def one(index: int) -> None:
        coordinator = JobCoordinator(service, index, count)
        try:
            found[index] = await penstock.convert(source, target, coordinator=coordinator, **options(index))
        except penstock.PenstockError as error:
            found[index] = error

    async with anyio.create_task_group() as processes:
        for index in range(count):
            processes.start_soon(one, index)

    return found


async def values_at(path: Path) -> dict[str, Any]:
    found = await penstock.restore(path, split="." if path.suffix else None)
    return {name: np.asarray(value) for name, value in found.items()}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [2, 3])
async def test_they_make_what_one_makes_and_each_a_part_of_it(
    source: Path, tmp_path: Path, form: str, count: int
) -> None:
    target = tmp_path / ("made.safetensors" if form == "one file" else "made")

    reports = await convert_together(source, target, lambda _: FORMS[form], count)

    found, wanted = await values_at(target), tree()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value)
    total = sum(np.asarray(value).nbytes for value in wanted.values())
    written = [report.nbytes for report in reports]  # encoded bytes of what has a codec
    assert sum(written) == total or (form == "coded" and 0.9 * total < sum(written) < total)
    assert max(written) < 1.2 * total / count
    if form == "huggingface":  # which has one form alone
        await penstock.convert(source, tmp_path / "alone", format="huggingface")
        names = {path.name for path in target.iterdir()}
        assert names == {path.name for path in (tmp_path / "alone").iterdir()}
        assert all((tmp_path / "alone" / name).read_bytes() == (target / name).read_bytes() for name in names)
    else:
        assert (await penstock.verify(target)).intact


async def test_each_reads_only_what_it_writes(tmp_path: Path) -> None:
    stores = [CountingStore() for _ in range(2)]
    await penstock.save(tmp_path / "source", {"w": np.ones((2048, 2049)), **tree()})

    reports = await convert_together(
        tmp_path / "source", tmp_path / "made", lambda index: {"store": stores[index]}
    )

    for store, report in zip(stores, reports, strict=True):
        assert report.nbytes <= store.nbytes < 1.5 * report.nbytes  # ends of ranges with one checksum


async def test_rules_that_need_a_temporary_file_are_carried_out_in_parts(tmp_path: Path) -> None:
    layers = {f"l{at}": np.random.default_rng(at).bytes(300 * 500) for at in range(4)}
    arrays = {name: np.frombuffer(data, np.uint8).reshape(300, 500) for name, data in layers.items()}
    await penstock.save(tmp_path / "source", {**arrays, "w": np.arange(1000.0).reshape(40, 25)})
    rules = Rules(
        [
            Stack("l{i:int}", "stacked"),
            Cast("stacked", dtype="float32"),
            Transpose("stacked", axes=(2, 0, 1)),
            Transpose("w"),
        ]
    )
    options = {"rules": rules, "memory_limit": 128 * 1024}

    reports = await convert_together(tmp_path / "source", tmp_path / "made", lambda _: options)

    found = await values_at(tmp_path / "made")
    stacked = np.stack([*arrays.values()]).astype(np.float32).transpose(2, 0, 1)
    np.testing.assert_array_equal(found["stacked"], stacked)
    np.testing.assert_array_equal(found["w"], np.arange(1000.0).reshape(40, 25).T)
    assert max(report.nbytes for report in reports) < 0.6 * stacked.nbytes


class TestRefused:
    @pytest.mark.parametrize("what", ["rules", "source"])
    async def test_if_they_are_asked_for_different_things(
        self, source: Path, tmp_path: Path, what: str
    ) -> None:
        def asked(index: int) -> Mapping[str, Any]:
            return {"rules": Rules([Rename(f"l{index}", "x"), Rename(f"l{1 - index}", "y")], rest="keep")}

        other = tmp_path / "other"
        await penstock.save(other, {**tree(), "large": tree()["large"] + 1})
        if what == "rules":
            found = await convert_together(source, tmp_path / "made", asked)
        else:
            service = MemoryKeyValues()
            found = []

            async def one(index: int) -> None:
                job = JobCoordinator(service, index, 2)
                with pytest.raises(PlansDifferError) as caught:
                    await penstock.convert((source, other)[index], tmp_path / "made", coordinator=job)

                found.append(caught.value)

            async with anyio.create_task_group() as processes:
                processes.start_soon(one, 0)
                processes.start_soon(one, 1)

        assert len(found) == 2
        assert all(isinstance(error, PlansDifferError) for error in found)
        assert "made of" in str(found[0])
        assert not (tmp_path / "made").exists()

    async def test_a_directory_of_steps(self, tmp_path: Path) -> None:
        for step in (1, 2):
            await penstock.save(tmp_path / "run" / str(step), {"w": np.zeros(3)})

        found = await convert_together(tmp_path / "run", tmp_path / "made", lambda _: {})

        assert all("convert each by itself" in str(error) for error in found)
        assert not (tmp_path / "made").exists()

    @pytest.mark.parametrize(
        ("name", "options", "problem"),
        [
            ("made.npz", {}, "an npz file is written by one process"),
            ("made", {"resume": True}, "several processes save it together"),
        ],
    )
    async def test_before_anything_is_read(
        self, tmp_path: Path, name: str, options: Mapping[str, Any], problem: str
    ) -> None:
        found = await convert_together(tmp_path / "never read", tmp_path / name, lambda _: options)

        assert all(isinstance(error, SpecError) and problem in str(error) for error in found)
