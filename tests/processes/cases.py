"""What the processes of a job do together in tests, by name. Each returns JSON values, or fails."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from tests.processes import (
    base_cases,
    bucket_cases,
    failure_cases,
    format_cases,
    handler_cases,
    local_cases,
    orbax_bucket_cases,
    orbax_cases,
    orbax_items_cases,
    orbax_parts_cases,
    orbax_steps_cases,
    own_cases,
    reading_cases,
    replica_cases,
    saving_cases,
    some_cases,
)
from tests.processes.job_case import Here

FILES = (
    saving_cases,
    format_cases,
    handler_cases,
    reading_cases,
    replica_cases,
    orbax_cases,
    orbax_items_cases,
    orbax_parts_cases,
    orbax_steps_cases,
    orbax_bucket_cases,
    own_cases,
    base_cases,
    some_cases,
    local_cases,
    bucket_cases,
    failure_cases,
)


def case(name: str) -> Callable[[Here], Awaitable[Any]]:
    """Return a case by name.

    Raises:
        LookupError: If there is none.
    """
    for file in FILES:
        found: Callable[[Here], Awaitable[Any]] | None = getattr(file, name, None)
        if found is not None:
            return found

    raise LookupError(f"there is no case {name!r}")
