"""The code blocks of the documentation, and how a page's blocks are run as its reader would."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, cast

import anyio
import anyio.to_thread

__all__ = ("ROOT", "Block", "blocks", "pages", "run_block", "run_page")

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One code block of a page."""

    page: str
    language: str
    text: str
    line: int


def compiled(page: str, text: str, replaced: Mapping[str, str], line: int = 0) -> CodeType:
    """A block as Python, with `await` allowed everywhere. Errors show the page and its line."""
    for old, new in replaced.items():
        text = text.replace(old, new)

    tree = compile(text, page, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    ast.increment_lineno(tree, line)
    code = compile(tree, page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    return cast("CodeType", code)


def pages() -> list[str]:
    """Every page of today's documentation, from the root of the repository."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    names = [path.relative_to(ROOT).as_posix() for path in found]
    return [name for name in names if not name.startswith("docs/design/")]  # those have figures of a day


def blocks(page: str, language: str) -> list[Block]:
    """The blocks of a page in one language, in order."""
    text = (ROOT / page).read_text()
    found = [
        Block(page, match[1], match[2], text.count("\n", 0, match.start()) + 1)
        for match in BLOCK.finditer(text)
    ]
    return [block for block in found if block.language == language]


async def run_block(
    page: str, text: str, names: dict[str, Any], replaced: Mapping[str, str], line: int = 0
) -> None:
    """Run one block with these names, and add those that it defines.

    A block that awaits runs in this event loop. Others run in a thread, where no loop runs: they may start
    one, and call what blocks.
    """
    code = compiled(page, text, replaced, line)
    if code.co_flags & inspect.CO_COROUTINE:
        await cast("Awaitable[object]", eval(code, names))
    else:
        await anyio.to_thread.run_sync(exec, code, names)


async def run_page(page: str, names: Mapping[str, Any], replaced: Mapping[str, str]) -> dict[str, Any]:
    """Run a page's Python in order, and return what it defined.

    Args:
        page: From the root of the repository.
        names: What its reader has.
        replaced: Texts of blocks that are otherwise in a test.
    """
    found = dict(names)
    for block in blocks(page, "python"):
        await run_block(page, block.text, found, replaced, block.line)

    return found
