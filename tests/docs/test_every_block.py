"""Every code block of the documentation runs as its reader would run it.

A page's blocks run in order. What a page takes for granted, such as `state`, is in `page_settings.py`.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import tomllib
from pathlib import Path

import anyio
import jax
import pytest
from tests.bench.options import parse
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

from penstock.cli import load_command, main
from penstock.config import Config
from penstock.rules import load_rules

WITH_PYTHON = [page for page in pages() if blocks(page, "python")]
ELSEWHERE = with_own_tests()
COMMAND_LINE = "docs/reference/command-line.md"
HERE = [page for page in WITH_PYTHON if page not in ELSEWHERE]


def test_no_block_is_left_out() -> None:
    """A block of another language is a text, or its page is listed with the reason."""
    known = {"python", "toml", "console", "text"}
    languages = {
        (page, match)
        for page in pages()
        for match in re.findall(
            r"^```(\w*)[^\n]*\n.*?^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL
        )
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
def test_the_configuration_of_a_page_is_read(page: str, tmp_path: Path) -> None:
    for at, block in enumerate(blocks(page, "toml")):
        assert tomllib.loads(block.text)
        path = tmp_path / f"{at}.toml"
        path.write_text(block.text)
        if "[[rule]]" in block.text:
            load_rules(path)
        else:
            Config.load(path, environ={})


def test_every_page_with_commands_is_tried() -> None:
    typed = {
        page
        for page in pages()
        for block in blocks(page, "console")
        if any(
            line.startswith("$ penstock ") and line != "$ penstock demo"  # which tests/demo runs
            for line in block.text.splitlines()
        )
    }

    assert set(COMMANDS) <= typed
    assert typed - set(COMMANDS) - with_own_tests() == set()


@pytest.mark.parametrize("page", COMMANDS)
def test_the_commands_of_a_page_run_and_print_what_it_shows(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")  # a page is wider than most terminals
    made_for_commands()
    expected = iter(COMMANDS[page])
    status = 0
    for line, shown in _typed(page):
        if line == "echo $?":
            assert shown == [str(status)]
        elif line.startswith("penstock ") and line != "penstock demo":  # which tests/demo runs
            status = _run(line.removeprefix("penstock "))
            printed = capsys.readouterr()
            assert status == next(expected, None), (line, printed)
            text = (printed.out + printed.err).replace(f"{tmp_path}/", "")
            if shown:
                assert _without_numbers(text) == _without_numbers("\n".join(shown))

    assert next(expected, None) is None


def _typed(page: str) -> list[tuple[str, list[str]]]:
    """Each line that a page shows behind a prompt, and what it shows below."""
    found: list[tuple[str, list[str]]] = []
    for line in (line for block in blocks(page, "console") for line in block.text.splitlines()):
        if line.startswith("$ "):
            found.append((line.removeprefix("$ "), []))
        else:
            found[-1][1].append(line)

    return found


def _run(line: str) -> int:
    words = shlex.split(line)
    if words[0] == "convert":  # each as if it were the only one
        _remove(words[2])
    try:
        return main(words)
    except SystemExit as ended:  # as `--help` ends
        return int(ended.code or 0)


def _without_numbers(text: str) -> list[str]:
    """The lines, with `#` for a number and its unit, and of what is counted the singular."""
    return [re.sub(r"\d[\d.,]*(?: [kMG]?B\b| (\w+?)s?\b)?", r"# \1", line) for line in text.splitlines()]


def _remove(name: str) -> None:
    shutil.rmtree(name, ignore_errors=True) if Path(name).is_dir() else Path(name).unlink(missing_ok=True)


def test_commands_in_sentences_have_the_options_that_they_name() -> None:
    named = [
        (page, command, option)
        for page in pages()
        for command, rest in re.findall(r"`penstock ([a-z]+)([^`\n]*)`", (ROOT / page).read_text())
        for option in re.findall(r"--[a-z][\w-]*", rest)
    ]
    listed = re.findall(r"^\| `([a-z]+)([^|]*)\|([^|]*)", (ROOT / COMMAND_LINE).read_text(), re.MULTILINE)
    named += [
        (COMMAND_LINE, command, option)
        for command, given, about in listed
        for option in re.findall(r"`(--[a-z][\w-]*)", given + about)
    ]

    assert len({option for _, _, option in named}) > 5
    assert [each for each in named if each[2] not in _options(each[1])] == []


def _options(command: str) -> set[str]:
    """The options of a command, and of what is a command below it."""
    parser = argparse.ArgumentParser()
    load_command(command).configure(parser)
    found: set[str] = set()
    parsers = [parser]
    for each in parsers:
        for action in each._actions:
            found.update(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()

    return found


def test_extras_that_pages_name_are_there() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {
        extra
        for page in pages()
        for given in re.findall(r"penstock\[([\w,]+)\]", (ROOT / page).read_text())
        for extra in given.split(",")
    }

    assert len(named) > 5
    assert named <= set(extras)


def test_options_of_the_benchmark_that_pages_name_are_there() -> None:
    given = {
        options
        for page in pages()
        for options in re.findall(r"make bench BENCH='([^']*)'", (ROOT / page).read_text())
    }

    assert len(given) > 2
    for options in given:
        parse(shlex.split(options))


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
