"""The event loops that async tests run on, as anyio takes them."""

from __future__ import annotations

__all__ = ("ASYNCIO", "TRIO", "Backend")

import os
from typing import TypeAlias

Backend: TypeAlias = tuple[str, dict[str, object]]

# asyncio's debug mode finds calls from the wrong thread, and doubles the time of a test.
ASYNCIO: Backend = "asyncio", {"debug": bool(os.environ.get("PENSTOCK_TESTS_DEBUG"))}
TRIO: Backend = "trio", {}
