"""The budget of host bytes: its accounts and its limit, fresh buffers, and the one bounded cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = (
    "BoundedCache",
    "MemoryWaits",
    "auto_memory_limit",
    "free_memory",
    "waiting_for_memory",
)

if TYPE_CHECKING:
    from penstock.kernel.memory.bounded_cache import BoundedCache
    from penstock.kernel.memory.byte_account import MemoryWaits, waiting_for_memory
    from penstock.kernel.memory.memory_limit import auto_memory_limit, free_memory
else:
    from penstock.kernel.lazy_names import lazy_names as _lazy_names

    __getattr__, __dir__ = _lazy_names(
        __name__,
        {
            "penstock.kernel.memory.bounded_cache": ("BoundedCache",),
            "penstock.kernel.memory.byte_account": (
                "MemoryWaits",
                "waiting_for_memory",
            ),
            "penstock.kernel.memory.memory_limit": (
                "auto_memory_limit",
                "free_memory",
            ),
        },
    )
