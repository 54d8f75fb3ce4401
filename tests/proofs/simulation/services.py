"""Services of a simulated job: one that counts, one without threads, and one that plays the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from anyio import Event, move_on_after

from penstock.handlers.coordinators.silence import Heartbeat
from penstock.kernel.protocols.coordinator import KeyValues


@dataclass
class Traffic:
    """What one process asked of the service, heartbeats and what is heard of them apart."""

    calls: int = 0
    beats: int = 0
    sent: int = 0  #: bytes, of keys and of values
    received: int = 0
    heard: int = 0  #: bytes of heartbeats
    asked: set[str] = field(default_factory=set[str])  #: keys, each once: an early look is repeated

    def reset(self) -> None:
        """Count from 0."""
        self.asked.clear()
        self.calls = self.beats = self.sent = self.received = self.heard = 0

    def note(self, key: str, sent: int = 0, received: int = 0, *, is_beat: bool = False) -> None:
        """Count one call."""
        if is_beat:
            self.beats += 1
            self.heard += received
            return

        self.calls += 1
        self.asked.add(key)
        self.sent += len(key) + sent
        self.received += received


class CountedKeyValues:
    """What a process sees of a service, counted."""

    def __init__(self, service: KeyValues) -> None:
        self._service = service
        self.traffic = Traffic()

    def put(self, key: str, value: bytes, replace: bool, /) -> bool:
        self.traffic.note(key, len(value), is_beat=_is_beat(key))
        return self._service.put(key, value, replace)

    def wait(self, key: str, timeout_s: float, /) -> bytes | None:
        found = self._service.wait(key, timeout_s)
        self.traffic.note(key, 0, len(found or b""), is_beat=_is_beat(key))
        return found

    def under(self, prefix: str, /) -> Mapping[str, bytes]:
        found = self._service.under(prefix)
        self.traffic.note(prefix, 0, _nbytes(prefix, found), is_beat=_is_beat(prefix))
        return found

    def count(self, key: str, /) -> int:
        self.traffic.note(key)
        return self._service.count(key)

    def delete(self, prefix: str, /) -> None:
        self.traffic.note(prefix)
        self._service.delete(prefix)


class SimulatedService:
    """Values that thousands of tasks of one event loop see."""

    def __init__(self) -> None:
        self.folders: dict[str, dict[str, bytes]] = defaultdict(dict)
        self.counters: dict[str, int] = defaultdict(int)
        self.waiting: dict[str, Event] = {}


class SimulatedCalls:
    """The `KeyValueCalls` of one process of thousands: it counts, and takes no thread for a wait."""

    def __init__(self, service: SimulatedService) -> None:
        self._service = service
        self.traffic = Traffic()

    async def put(self, key: str, value: bytes, *, replace: bool = False) -> bool:
        self.traffic.note(key, len(value), is_beat=_is_beat(key))
        folder, _, name = key.rpartition("/")
        values = self._service.folders[folder]
        if name in values and not replace:
            return False

        values[name] = value
        waiting = self._service.waiting.pop(key, None)
        if waiting is not None:
            waiting.set()

        return True

    async def put_once(self, key: str, own: bytes) -> bool:
        return await self.put(key, own) or await self.wait(key, 0.0) == own

    async def wait(self, key: str, timeout_s: float) -> bytes | None:
        folder, _, name = key.rpartition("/")
        with move_on_after(timeout_s):
            while name not in self._service.folders[folder]:
                await self._service.waiting.setdefault(key, Event()).wait()

        found = self._service.folders[folder].get(name)
        self.traffic.note(key, 0, len(found or b""), is_beat=_is_beat(key))
        return found

    async def under(self, prefix: str) -> Mapping[str, bytes]:
        found = dict(self._service.folders[prefix.removesuffix("/")])
        self.traffic.note(prefix, 0, _nbytes(prefix, found), is_beat=_is_beat(prefix))
        return found

    async def by_process(self, prefix: str) -> dict[int, bytes]:
        return {int(index): value for index, value in (await self.under(prefix)).items()}

    async def count(self, key: str) -> int:
        self.traffic.note(key)
        self._service.counters[key] += 1
        return self._service.counters[key]

    async def delete(self, prefix: str) -> None:
        self.traffic.note(prefix)
        folder, _, name = prefix.rpartition("/")
        self._service.folders[folder].pop(name, None)
        if prefix.endswith("/"):
            for found in [each for each in self._service.folders if f"{each}/".startswith(prefix)]:
                del self._service.folders[found]


class EveryoneElse:
    """A service as the primary sees it if all others have come, and have brought their parts.

    Args:
        n_processes: Of the job.
        plan: The digest that each of them says.
        parts: What each of the others brings, in order.
    """

    def __init__(self, n_processes: int, plan: bytes, parts: Sequence[bytes]) -> None:
        self._others = range(1, n_processes)
        self._plan, self._parts = plan, parts
        self._beat = count(1)
        self._values: dict[str, bytes] = {}

    def put(self, key: str, value: bytes, replace: bool, /) -> bool:
        if key in self._values and not replace:
            return False

        self._values[key] = value
        return True

    def wait(self, key: str, timeout_s: float, /) -> bytes | None:
        return b"1" if key.endswith("_here") else self._values.get(key)

    def under(self, prefix: str, /) -> Mapping[str, bytes]:
        what = prefix.split("/")[-2]
        if "/join/" in prefix:
            return {}
        if what == "at":
            beat = Heartbeat(next(self._beat), "write").encoded()
            return {str(index): beat for index in self._others}
        if what == "part":
            return {str(index): part for index, part in zip(self._others, self._parts, strict=True)}

        return {str(index): self._plan for index in self._others}

    def count(self, key: str, /) -> int:
        return len(self._others) + 1

    def delete(self, prefix: str, /) -> None:
        self._values.pop(prefix, None)


def _is_beat(key: str) -> bool:
    return "/at/" in key


def _nbytes(prefix: str, found: Mapping[str, bytes]) -> int:
    return sum([len(prefix) + len(key) + len(value) for key, value in found.items()])
