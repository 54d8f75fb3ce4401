"""Where each process is, told again and again, and who has been silent for too long."""

from __future__ import annotations

__all__ = ("Heartbeat", "SilenceJudge")

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a process says of itself. Clocks of different machines are not compared: it has none."""

    count: int  #: grows with each one
    stage: str

    def encoded(self) -> bytes:
        """Return the value to store."""
        return json.dumps([self.count, self.stage]).encode()

    @classmethod
    def decoded(cls, data: bytes) -> Heartbeat:
        """Read what `encoded` made; what cannot be read counts as a sign of life without a place."""
        try:
            count, stage = json.loads(data)
            return cls(int(count), str(stage))
        except (ValueError, TypeError):
            return cls(-1, "unknown")


@final
class SilenceJudge:
    """Says which processes have not been heard of for `limit_s`, by the clock of the one that judges.

    Only who came is judged: for those who did not, there is a limit of its own. Heartbeats are compared as
    they are stored, and read only for who is silent: of 10,000 processes there are as many with each beat,
    and the event loop waits meanwhile.
    """

    __slots__ = ("_beats", "_limit_s", "_since")

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._beats: dict[int, bytes] = {}
        self._since: dict[int, float] = {}

    def look(self, beats: Mapping[int, bytes], now: float) -> dict[int, str | None]:
        """Take what is there now; return the silent ones, with the stage of their last heartbeat.

        Args:
            beats: The last heartbeat of each process that came, as it is stored.
            now: Seconds of any clock that does not go back.
        """
        before = self._beats.get
        new = {index: beat for index, beat in beats.items() if before(index) != beat}
        self._beats.update(new)
        self._since.update(dict.fromkeys(new, now))
        if now - min(self._since.values(), default=now) <= self._limit_s:
            return {}

        return {
            index: Heartbeat.decoded(self._beats[index]).stage
            for index, since in self._since.items()
            if now - since > self._limit_s
        }

    def stage_of(self, index: int) -> str | None:
        """Return where a process was heard of last; None if it never was."""
        return Heartbeat.decoded(self._beats[index]).stage if index in self._beats else None
