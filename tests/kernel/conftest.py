"""The kernel's own tests wait for events only, so none of them needs long."""

from __future__ import annotations

__all__ = ("thawed",)

import functools
import inspect
from collections.abc import Generator

import anyio
import pytest
from tests.collecting import thawed

LIMIT_S = 20.0


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Cancel an async test of the kernel that hangs, long before the suite's own limit."""
    function = pyfuncitem.obj
    if not inspect.iscoroutinefunction(function) or pyfuncitem.get_closest_marker("timeout"):
        return (yield)

    @functools.wraps(function)
    async def limited(**arguments: object) -> None:
        with anyio.fail_after(LIMIT_S):
            await function(**arguments)

    pyfuncitem.obj = limited
    try:
        return (yield)
    finally:
        pyfuncitem.obj = function
