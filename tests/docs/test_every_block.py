"""Every code block of the documentation runs as its reader would run it.

A page's blocks run in order. What a page takes for granted, such as `state`, is in `page_settings.py`.
"""

from __future__ import annotations

import re
import shlex
import shutil
import tomllib
from pathlib import Path

import anyio
import jax
import pytest
from tests.docs.blocks import ROOT, blocks, pages, run_page
from tests.docs.page_settings import (
    COMMANDS,
    REPLACED,
    SLOW,
    TEXT_ONLY,
    made_for_commands,
    setting,
    with_own_tests,
)

from penstock.cli import main
from penstock.kernel.config.config import Config

WITH_PYTHON = [page for page in pages() if blocks(page, "python")]
ELSEWHERE = with_own_tests()
HERE = [page for page in WITH_PYTHON if page not in ELSEWHERE]


def test_no_block_is_left_out() -> None:
    """A block of another language is a text, or its page is listed with the reason."""
    known = {"python", "toml", "console", "text"}
    languages = {
        (page, match)
        for page in pages()
        for match in re.findall(r"^```(\w+)", (ROOT / page).read_text(), re.MULTILINE)
    }

    assert {each for each in languages if each[1] not in known} == TEXT_ONLY


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] if page in SLOW else []) for page in HERE]
)
def test_the_python_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    async def run() -> None:
        async with setting(page) as names:
            await run_page(page, names, REPLACED.get(page, {}))

    with jax.numpy_dtype_promotion("standard"):  # as their readers have it
        anyio.run(run)


@pytest.mark.parametrize("page", [page for page in pages() if blocks(page, "toml")])
def test_the_configuration_of_a_page_is_one(page: str, tmp_path: Path) -> None:
    for at, block in enumerate(blocks(page, "toml")):
        assert tomllib.loads(block.text)
        path = tmp_path / f"{at}.toml"
        path.write_text(block.text)
        Config.load(path, environ={})


def test_every_page_with_commands_is_tried() -> None:
    typed = {
        page
        for page in pages()
        for block in blocks(page, "console")
        if any(line.startswith("$ penstock ") for line in block.text.splitlines())
    }

    assert set(COMMANDS) <= typed
    assert typed - set(COMMANDS) - with_own_tests() == set()


@pytest.mark.parametrize("page", COMMANDS)
def test_the_commands_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    made_for_commands()
    expected = COMMANDS[page]
    lines = [line for block in blocks(page, "console") for line in block.text.splitlines()]
    typed = [line.removeprefix("$ penstock ") for line in lines if line.startswith("$ penstock ")]
    assert len(typed) == len(expected)

    for line, status in zip(typed, expected, strict=True):
        if line.startswith("convert "):  # each as if it were the only one
            _remove(shlex.split(line)[2])
        try:
            found = main(shlex.split(line))
        except SystemExit as ended:  # as `--help` ends
            found = int(ended.code or 0)
        assert found == status, (line, capsys.readouterr())


def _remove(name: str) -> None:
    shutil.rmtree(name, ignore_errors=True) if Path(name).is_dir() else Path(name).unlink(missing_ok=True)


def test_make_targets_that_pages_name_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = {name for line in re.findall(r"^([\w. -]+):", makefile, re.MULTILINE) for name in line.split()}
    named = {
        (page, target)
        for page in pages()
        for target in re.findall(r"(?:`|^\$ )make ([a-z][\w-]*)", (ROOT / page).read_text(), re.MULTILINE)
    }

    assert len(named) > 20
    assert {each for each in named if each[1] not in targets} == set()
