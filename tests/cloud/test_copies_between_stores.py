"""`penstock.convert` and `penstock cp` from a disk to a bucket and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from anyio import to_thread
from tests.cloud.servers import Server

import penstock
from penstock import SaveFormat
from penstock.cli import main
from penstock.config import Config
from penstock.errors import NotACheckpointError

AssertSame = Callable[[Any, Any], None]

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]


def contents(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def state(step: int) -> dict[str, Any]:
    return {"w": np.arange(600_000.0).reshape(-1, 100) * step, "b": np.ones(3), "step": step}


@pytest.mark.parametrize("form", [SaveFormat(), SaveFormat(ocdbt=False), SaveFormat(codec="zstd")])
async def test_a_checkpoint_goes_to_a_bucket_and_back(
    environ: Server, tmp_path: Path, form: SaveFormat, assert_same: AssertSame
) -> None:
    url = environ.url()
    await penstock.save(tmp_path / "1", state(1), custom_metadata={"by": "me"})
    options = {"file_bytes": "1MiB"}
    config = Config.load(arguments={"store": {environ.scheme: options}})
    await penstock.convert(tmp_path / "1", f"{url}/run/1", config=config, save_format=form)
    async with penstock.Checkpointer() as checkpointer:
        assert_same(await checkpointer.restore(f"{url}/run/1"), state(1))
        assert (await checkpointer.verify(f"{url}/run/1")).intact

    await penstock.convert(f"{url}/run/1", tmp_path / "back")
    assert_same(await penstock.restore(tmp_path / "back"), state(1))
    assert (await penstock.metadata(tmp_path / "back")).custom_metadata == {"by": "me"}


async def test_convert_copies_all_steps_between_stores(environ: Server, tmp_path: Path) -> None:
    url = environ.url()
    for step in (1, 2):
        await penstock.save(tmp_path / "run" / str(step), state(step))

    await penstock.convert(tmp_path / "run", f"{url}/run")
    await penstock.convert(f"{url}/run", tmp_path / "back")
    assert (await penstock.restore(tmp_path / "back"))["step"] == 2


async def test_safetensors_go_to_a_bucket_and_back(environ: Server, tmp_path: Path) -> None:
    url = environ.url()
    weights = {"a": np.arange(5_000_000.0), "b": np.ones(3)}  # 40 MB: an upload in parts
    await penstock.export_safetensors(weights, tmp_path / "model.safetensors")
    await penstock.convert(tmp_path / "model.safetensors", f"{url}/1")
    await penstock.convert(f"{url}/1", f"{url}/model.safetensors")
    await penstock.convert(f"{url}/model.safetensors", f"{url}/folder", format="safetensors")
    for path in (f"{url}/model.safetensors", f"{url}/folder"):
        assert (await penstock.verify(path)).intact
        await penstock.convert(path, tmp_path / "back.safetensors")
        found = await penstock.restore(tmp_path / "back.safetensors")
        assert np.array_equal(found["a"], weights["a"])
        (tmp_path / "back.safetensors").unlink()
        await penstock.delete(path)

    assert {key.split("/")[1] for key in environ.bucket_store()._client.walk(url.rsplit("/", 1)[1])} == {"1"}


async def test_cp_copies_files_as_they_are_to_a_bucket_and_back(environ: Server, tmp_path: Path) -> None:
    url = environ.url()
    await penstock.save(tmp_path / "0", state(1))
    await penstock.convert(tmp_path / "0", tmp_path / "1", save_format=SaveFormat(codec="zstd"))
    (tmp_path / "1" / "notes.txt").write_text("of another program")
    await penstock.export_safetensors({"a": np.arange(9.0)}, tmp_path / "model.safetensors")
    for name in ("1", "model.safetensors"):
        back = tmp_path / f"back-{name}"
        for source, target in ((tmp_path / name, f"{url}/{name}"), (f"{url}/{name}", back)):
            assert await to_thread.run_sync(main, ["cp", str(source), str(target)]) == 0

        found, expected = contents(back), contents(tmp_path / name)
        if (mark := found.pop("commit_success.txt", None)) is not None:  # a bucket has a token in it
            assert mark.startswith(expected.pop("commit_success.txt"))

        assert found == expected


async def test_cp_of_what_has_no_mark_writes_a_checkpoint_that_counts_in_a_bucket(
    environ: Server, tmp_path: Path, assert_same: AssertSame
) -> None:
    url = environ.url()
    await penstock.save(tmp_path / "1", state(1))
    for mark in (tmp_path / "1").rglob("commit_success.txt"):  # Orbax writes none on a disk
        mark.unlink()

    assert await to_thread.run_sync(main, ["cp", str(tmp_path / "1"), f"{url}/1"]) == 0
    assert_same(await penstock.restore(f"{url}/1"), state(1))


async def test_a_checkpoint_is_deleted(environ: Server) -> None:
    url = environ.url()
    await penstock.save(f"{url}/1", state(1))
    await penstock.save(f"{url}/2", state(2))
    await penstock.delete(f"{url}/1")
    with pytest.raises(NotACheckpointError):
        await penstock.restore(f"{url}/1")

    assert (await penstock.restore(url))["step"] == 2
