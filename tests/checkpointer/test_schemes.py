"""URLs of a scheme that another distribution declares by an entry point, as the example plug-in does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from anyio import to_thread

import penstock
from penstock import Checkpointer
from penstock.cli import main
from penstock.errors import ConfigError, PathError

AssertSame = Callable[[Any, Any], None]

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "plugin" / "src"

STATE = {"w": np.arange(5000.0), "n": 3}


def install(folder: Path, points: dict[str, str], distribution: str = "example") -> None:
    info = folder / f"{distribution}-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
    lines = [f"{name} = {place}" for name, place in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[penstock.stores]", *lines, ""]))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on `sys.path` in which the example declares the scheme `scratch`."""
    folder = tmp_path / "site"
    install(folder, {"scratch": "penstock_example.scratch:SCRATCH"})
    monkeypatch.setenv("SCRATCH", str(tmp_path / "fast"))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.syspath_prepend(EXAMPLE)
    yield folder
    for module in ("penstock_example", "penstock_example.scratch"):
        sys.modules.pop(module, None)


@pytest.mark.anyio
async def test_a_tree_is_saved_replaced_and_restored_by_its_url(
    site: Path, tmp_path: Path, assert_same: AssertSame
) -> None:
    async with Checkpointer() as checkpointer:
        await (await checkpointer.save("scratch://mine/run/1", {"n": 0}))
        await (await checkpointer.save("scratch://mine/run/1", STATE, overwrite=True))
        assert_same(await checkpointer.restore("scratch://mine/run/1"), STATE)
        await (await checkpointer.save(str(tmp_path / "here"), STATE))  # other paths go where they went

    assert_same(await penstock.restore(str(tmp_path / "fast" / "mine" / "run" / "1")), STATE)
    assert [file.name for file in (tmp_path / "fast" / "mine" / "run").iterdir()] == ["1"]
    assert (tmp_path / "here").is_dir()


@pytest.mark.anyio
async def test_steps_are_managed_below_its_url(site: Path, tmp_path: Path) -> None:
    async with penstock.CheckpointManager("scratch://mine/run", keep=penstock.steps.KeepLast(1)) as manager:
        for step in (1, 2):
            save = await manager.save(step, STATE)
            assert save is not None
            await save

        await manager.wait()
        assert list(manager.all_steps()) == [2]

    assert (tmp_path / "fast" / "mine" / "run" / "2").is_dir()


@pytest.mark.anyio
async def test_the_command_line_takes_its_url(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await penstock.save("scratch://mine/7", STATE)
    assert await to_thread.run_sync(main, ["verify", "scratch://mine/7"]) == 0
    assert "scratch://mine/7" in capsys.readouterr().out


@pytest.mark.anyio
async def test_an_unknown_scheme_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PathError, match="scratch:// store"):
        await penstock.save("scratch://mine/7", STATE)


@pytest.mark.anyio
async def test_a_broken_one_names_its_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", {"odd": "json:dumps"}, "strange")
    monkeypatch.syspath_prepend(tmp_path / "site")
    with pytest.raises(ConfigError, match=r"entry point 'odd' of strange 1\.2 is broken.*no penstock"):
        await penstock.save("odd://mine/7", STATE)


def test_the_schemes_of_penstock_cannot_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", {"s3": "json:dumps"}, "strange")
    monkeypatch.syspath_prepend(tmp_path / "site")
    from penstock.kernel.registry import SCHEMES

    assert SCHEMES.names() == ("s3", "gs", "az", "keeper")
    assert type(SCHEMES.find("s3")).__name__ == "Scheme"
