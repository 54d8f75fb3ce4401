"""The event loops on which stalls are measured, by name."""

from __future__ import annotations

import importlib.util
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import anyio

T = TypeVar("T")
ASYNCIO: Final = "asyncio"
LOOPS: Final = (ASYNCIO, "uvloop", "trio")


def is_here(loop: str) -> bool:
    """Whether it can be imported."""
    return importlib.util.find_spec(loop) is not None


def run_on(loop: str, function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """Run an async function in a new event loop of that name, to its end."""
    if loop == "uvloop":
        return anyio.run(function, *arguments, backend=ASYNCIO, backend_options={"use_uvloop": True})

    return anyio.run(function, *arguments, backend=loop)
