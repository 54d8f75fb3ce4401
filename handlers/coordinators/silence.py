"""Judges silence, by a clock that may itself have stood still.

A process that is stopped for a while (SIGSTOP, a paused virtual machine, a program that keeps its event loop
busy) knows nothing of that while. What it measures over it is its own silence, and no other process's. So a
limit that runs out while this process stood still begins anew: it looks again, and waits, before it blames
another one. Here are the decisions, without clocks and calls; `Membership` and `KeyValueCalls` act on them.
"""

from __future__ import annotations

__all__ = ("LATER", "MOST_ANEW", "AwakeLimit", "FailureDetector", "Heartbeat")

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, final

LATER: Final = 1.5
"""The others wait this much longer for the primary than it does for them. With one limit for both, someone
who waits for the primary, which waits for a third process, would blame the primary."""

STANDSTILL_BEATS: Final = 2.0
"""Looks come at least once a beat. After so many beats without one, this process stood still."""

MOST_ANEW: Final = 3
"""How often a limit begins anew. A program that keeps its loop busy all the time would wait for ever else."""

# One sign may have been on its way before the standstill; the second was sent after it.
NEWS_FROM_AFTER: Final = 2

FRESH_BEATS: Final = 10.0
"""The interval that begins when a limit ran out in a standstill, if the limit itself is not shorter."""


@final
@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A process' report about itself. It has no time: clocks of different machines are not compared."""

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
@dataclass(frozen=True, slots=True)
class AwakeLimit:
    """A limit on time, on the clock of a process that looks at it once a beat or more often."""

    limit_s: float
    beat_s: float
    looked_s: float  #: when it was looked at last; at first, when it began
    over_s: float  #: when it is over
    n_anew: int = 0  #: how often it ran out in a standstill, and began anew

    @classmethod
    def begin(cls, limit_s: float, beat_s: float, now: float) -> AwakeLimit:
        """Return a limit that begins now."""
        return cls(limit_s, beat_s, now, now + limit_s)

    def look(self, now: float) -> AwakeLimit:
        """Return the limit, begun anew if it ran out while this process stood still."""
        stood_still = now - self.looked_s > STANDSTILL_BEATS * self.beat_s
        if now >= self.over_s and stood_still and self.n_anew < MOST_ANEW:
            fresh_s = min(self.limit_s, FRESH_BEATS * self.beat_s)
            return replace(self, looked_s=now, over_s=now + fresh_s, n_anew=self.n_anew + 1)

        return replace(self, looked_s=now)

    def left_s(self, now: float) -> float:
        """Return how much of it is left; 0 once it is over."""
        return max(self.over_s - now, 0.0)


@final
@dataclass(frozen=True, slots=True)
class FailureDetector:
    """Says which processes have not been heard of for `limit_s`, by the clock of the one that judges.

    Only who came is judged: for those who did not, another limit applies. Heartbeats are compared as
    they are stored, and read only for who is silent: of 10,000 processes there are as many with each beat,
    and the event loop waits meanwhile.

    A value: each method returns another one.
    """

    limit_s: float
    beat_s: float
    looked_s: float  #: when this process looked last, at anything
    asked_s: float = float("-inf")  #: when it asked for the newest heartbeats that it has
    answered_s: float = float("-inf")  #: when they came, or since when they are waited for
    beats: Mapping[int, bytes] = field(default_factory=dict[int, bytes])
    since: Mapping[int, float] = field(default_factory=dict[int, float])  #: when each said something new
    n_anew: Mapping[int, int] = field(default_factory=dict[int, int])  #: standstills since then
    others_s: float = float("inf")  #: after so long without a word the others take this process for silent
    was_away: bool = False  #: whether it stood still for longer than that
    n_news: Mapping[int, int] = field(default_factory=dict[int, int])  #: heard of each process since then

    def look(self, now: float) -> FailureDetector:
        """Look at the clock. If this process stood still, silence begins anew."""
        if now - self.looked_s <= STANDSTILL_BEATS * self.beat_s:
            return replace(self, looked_s=now)

        since = {
            index: now if self.n_anew.get(index, 0) < MOST_ANEW else since
            for index, since in self.since.items()
        }
        n_anew = {index: self.n_anew.get(index, 0) + 1 for index in since}
        found = replace(self, looked_s=now, answered_s=now, since=since, n_anew=n_anew)
        return replace(found, was_away=True, n_news={}) if now - self.looked_s > self.others_s else found

    def hear(self, beats: Mapping[int, bytes], asked_s: float, now: float) -> FailureDetector:
        """Take what the service answered.

        Args:
            beats: The last heartbeat of each process that came, as it is stored.
            asked_s: When it was asked. It may have answered then, and this process have stood still since.
            now: Seconds of the same clock, which does not go back.
        """
        before = self.beats.get
        new = {index: beat for index, beat in beats.items() if before(index) != beat}
        looked = self.look(now)
        asked = replace(looked, asked_s=max(asked_s, self.asked_s), answered_s=now)
        if not new:
            return asked

        n_anew = {index: n for index, n in asked.n_anew.items() if index not in new}
        beats, since = {**self.beats, **new}, {**asked.since, **dict.fromkeys(new, now)}
        found = replace(asked, beats=beats, since=since, n_anew=n_anew)
        if not found.was_away:
            return found

        n_news = {**found.n_news, **{index: found.n_news.get(index, 0) + 1 for index in new}}
        return replace(found, n_news=n_news)

    def silent(self, *, by_answers: bool) -> dict[int, str | None]:
        """Return the silent ones, with the stage of their last heartbeat.

        Args:
            by_answers: Whether silence is what the service answered. Off for those who are silent together
                with it: then no answer is silence, too.
        """
        until = self.asked_s if by_answers else self.looked_s
        if until - min(self.since.values(), default=until) <= self.limit_s:
            return {}

        return {
            index: Heartbeat.decoded(self.beats[index]).stage
            for index, since in self.since.items()
            if until - since > self.limit_s
        }

    def gave_up(self, index: int) -> bool:
        """True if a process that is silent may have given this one up, which was away for too long.

        The service may have been away with it, and could not hear of it. The first news afterwards may be
        from before, and only the second is not.
        """
        return self.was_away and self.n_news.get(index, 0) < NEWS_FROM_AFTER

    @property
    def is_unanswered(self) -> bool:
        """True if the service has not answered for `limit_s`."""
        return self.looked_s - self.answered_s > self.limit_s

    def stage_of(self, index: int) -> str | None:
        """Return where a process was heard of last; None if it never was."""
        return Heartbeat.decoded(self.beats[index]).stage if index in self.beats else None
