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

__all__ = ("ROOT", "Block", "blocks", "pages", "run_page")

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One code block of a page."""

    page: str
    language: str
    text: str
    line: int

    def compiled(self, replaced: Mapping[str, str]) -> CodeType:
        """The block as Python, with `await` allowed everywhere. Errors show the page and its line."""
        text = self.text
        for old, new in replaced.items():
            text = text.replace(old, new)

        tree = compile(text, self.page, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        ast.increment_lineno(tree, self.line)
        code = compile(tree, self.page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        return cast("CodeType", code)


def pages() -> list[str]:
    """Every page of today's documentation, from the root of the repository."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    names = [path.relative_to(ROOT).as_posix() for path in found]
    return [name for name in names if not name.startswith("docs/design/2")]  # those say what was so on a day


def blocks(page: str, language: str) -> list[Block]:
    """The blocks of a page in one language, in order."""
    text = (ROOT / page).read_text()
    found = [
        Block(page, match[1], match[2], text.count("\n", 0, match.start()) + 1)
        for match in BLOCK.finditer(text)
    ]
    return [block for block in found if block.language == language]


async def run_page(page: str, names: Mapping[str, Any], replaced: Mapping[str, str]) -> dict[str, Any]:
    """Run a page's Python in order, and return what it defined.

    A block that awaits runs in this event loop. Others run in a thread, where no loop runs: they may start
    one, and call what blocks.

    Args:
        page: From the root of the repository.
        names: What its reader has.
        replaced: Texts of blocks that are otherwise in a test.
    """
    found = dict(names)
    for block in blocks(page, "python"):
        code = block.compiled(replaced)
        if code.co_flags & inspect.CO_COROUTINE:
            await cast("Awaitable[object]", eval(code, found))
        else:
            await anyio.to_thread.run_sync(exec, code, found)

    return found
