"""How much memory saves and loads may hold."""

from __future__ import annotations

__all__ = ("MemoryOptions", "SerializationStatusCallback", "TransferPriority")

import copy
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from penstock.orbax.v1.context.frozen_options import Guarded


class TransferPriority(enum.Enum):
    """When a leaf is copied to the host: a result of `is_prioritized_key_fn`."""

    SYNCHRONOUS = "synchronous"
    ASYNCHRONOUS_PRIORITIZED = "asynchronous_prioritized"
    ASYNCHRONOUS = "asynchronous"


IsPrioritizedKeyFn: TypeAlias = Callable[[Any], "TransferPriority | bool"]


class SerializationStatusCallback(Protocol):
    """Receives the progress of each leaf of a save. Never called: penstock writes to its event log."""


@dataclass(kw_only=True)
class MemoryOptions(Guarded):
    """Host memory of saves and loads.

    Attributes:
        write_concurrent_bytes: Bytes that a save may hold; None for what the machine can spare.
        read_concurrent_bytes: Bytes that a load may hold, likewise.
        transfer_concurrent_bytes: Bytes copied from devices and not yet written. It shares one
            budget with `write_concurrent_bytes`; the smaller of both applies.
        regulator_options: Has no effect: penstock adapts the limit itself.
        expected_surge_bytes: Has no effect.
        is_prioritized_key_fn: Decides by key path which leaves are copied first, before the save returns.
        serialization_status_callback: Has no effect.
        deepcopy_host_arrays: Has no effect: NumPy arrays are always copied before `save_async` returns.
    """

    @dataclass(frozen=True, kw_only=True)
    class RegulatorOptions:
        """How Orbax adapts its limit from one save to the next. It has no effect."""

        max_memory_limit_gib: float
        profiler: Any
        target_ratio: float = 0.80
        min_memory_limit_gib: float = 10.0
        kp: float = 0.4
        ki: float = 0.05
        kd: float = 0.1

        def __post_init__(self) -> None:
            if self.profiler is None:
                raise ValueError("RegulatorOptions requires a `profiler`.")

        def __deepcopy__(self, memo: dict[int, Any]) -> MemoryOptions.RegulatorOptions:
            result = copy.copy(self)
            memo[id(self)] = result
            return result

    write_concurrent_bytes: int | None = None
    read_concurrent_bytes: int | None = None
    transfer_concurrent_bytes: int | None = None
    regulator_options: RegulatorOptions | None = None
    expected_surge_bytes: int | float | None = None
    is_prioritized_key_fn: IsPrioritizedKeyFn | None = None
    serialization_status_callback: SerializationStatusCallback | None = None
    deepcopy_host_arrays: bool = True

    @property
    def save_limit(self) -> int | None:
        """Bytes that a save may hold; None if no limit was given."""
        given = [n for n in (self.write_concurrent_bytes, self.transfer_concurrent_bytes) if n is not None]
        return min(given, default=None)
