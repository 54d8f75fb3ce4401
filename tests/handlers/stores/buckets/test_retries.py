"""Requests that are sent again: the policy by itself, and with a clock that only waits move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Condition, Event
from typing import Any, cast

import pytest
from anyio import CancelScope, create_task_group, to_thread
from tests.object_server import CREDENTIALS, Asked, InMemory, ObjectServer, object_server

from penstock.errors import AccessDeniedError, StorageError, ThrottledError, UnreachableError
from penstock.handlers.stores.buckets.bucket_options import S3Options
from penstock.handlers.stores.buckets.connections import connect
from penstock.handlers.stores.buckets.object_client import ObjectClient
from penstock.handlers.stores.buckets.retries import (
    Pace,
    RetriedRequests,
    RetryPolicy,
    pause_in_thread,
    seconds_asked_for,
)
from penstock.kernel.protocols import RequestFigures

BUSY = ThrottledError("get", "s3://b/k", "503")
GONE = UnreachableError("get", "s3://b/k", "error sending request")


@dataclass
class Clock:
    """Time that passes while somebody waits."""

    now_s: float = 0.0
    waits: list[float] = field(default_factory=list[float])

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now_s += seconds

    def requests(self, policy: RetryPolicy | None = None, chance: float = 1.0) -> RetriedRequests:
        return RetriedRequests(policy or RetryPolicy(), lambda: self.now_s, self.wait, lambda: chance)


@dataclass
class Outage:
    """A server that fails until a time."""

    clock: Clock
    until_s: float
    error: StorageError = BUSY
    takes_s: float = 0.0  #: each try

    def __call__(self) -> str:
        self.clock.now_s += self.takes_s
        if self.clock.now_s < self.until_s:
            raise self.error

        return "answer"


@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("error", [BUSY, GONE])
@pytest.mark.parametrize("seconds", [0.01, 2.0, 25.0, 115.0])
def test_an_outage_is_survived(seconds: float, error: StorageError, chance: float) -> None:
    clock = Clock()
    assert clock.requests(chance=chance).send("get", "p", Outage(clock, seconds, error)) == "answer"
    assert clock.now_s <= seconds + RetryPolicy().longest_s


@pytest.mark.parametrize("takes_s", [0.0, 20.0])
def test_what_fails_for_longer_is_given_up_in_time(takes_s: float) -> None:
    clock = Clock()
    with pytest.raises(ThrottledError):
        clock.requests(RetryPolicy(30.0)).send("get", "p", Outage(clock, 1e9, takes_s=takes_s))

    assert 30.0 <= clock.now_s <= 30.0 + takes_s


def test_a_caller_may_have_less_time() -> None:
    clock = Clock()
    with pytest.raises(ThrottledError):
        clock.requests().send("swap", "p", Outage(clock, 1e9), within_s=7.0)

    assert clock.now_s == pytest.approx(7.0)


def test_retries_are_bounded_by_a_number_of_repetitions() -> None:
    clock = Clock()
    with pytest.raises(ThrottledError):
        clock.requests(RetryPolicy(most=3)).send("get", "p", Outage(clock, 1e9))

    assert len(clock.waits) == 3


@pytest.mark.parametrize(
    "error",
    [
        AccessDeniedError("get", "p", "403"),
        StorageError("get", "p", "there is no such bucket", 2),
        UnreachableError("get", "p", "its certificate is not accepted: UnknownIssuer"),
    ],
)
def test_what_cannot_succeed_is_not_sent_again(error: StorageError) -> None:
    clock = Clock()
    with pytest.raises(type(error)):
        clock.requests().send("get", "p", Outage(clock, 1e9, error))

    assert not clock.waits


def test_waits_grow_to_a_bound_and_are_spread() -> None:
    policy = RetryPolicy()
    longest = [policy.wait_s(n, 0.0, 1.0) for n in range(1, 12)]
    shortest = [policy.wait_s(n, 0.0, 0.0) for n in range(1, 12)]
    assert longest[:4] == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert longest[-1] == 5.0
    assert [2 * cast("float", each) for each in shortest] == pytest.approx(longest)


def test_a_request_is_repeated_no_earlier_than_the_server_asks() -> None:
    policy = RetryPolicy(60.0)
    waits = [policy.wait_s(1, 0.0, chance, asked_s=20.0) for chance in (0.0, 1.0)]
    assert all(wait is not None and wait >= 20.0 for wait in waits)
    assert waits[0] != waits[1], "nor all at once"
    assert policy.wait_s(1, 50.0, 0.0, asked_s=20.0) is None, "there is no time left for it"


@pytest.mark.parametrize(
    ("said", "asked"),
    [
        ("503 Service Unavailable: Retry-After: 7", 7.0),
        ('{"retry_after": 12}', 12.0),
        ("<RetryAfter>3</RetryAfter>", 3.0),
        ("503 Service Unavailable", None),
    ],
)
def test_retry_after_is_found_where_the_client_shows_it(said: str, asked: float | None) -> None:
    assert seconds_asked_for(said) == asked


def test_figures_say_what_became_of_requests() -> None:
    clock = Clock()
    requests = clock.requests()
    requests.send("get", "p", Outage(clock, 0.25))
    requests.send("get", "p", lambda: None)
    figures = requests.figures()
    assert figures == RequestFigures(4, 2, 2, figures.waited_s)
    assert figures.waited_s == pytest.approx(0.3)


def test_each_repetition_is_an_event(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with caplog.at_level("WARNING", "penstock"):
        clock.requests().send("get", "s3://b/k", Outage(clock, 0.25))

    said: list[Any] = [getattr(record, "penstock", None) for record in caplog.records]
    repeated = [each for each in said if each["event"] == "store.repeated"]
    assert [each["n_failed"] for each in repeated] == [1, 2]
    assert {each["path"] for each in repeated} == {"s3://b/k"}
    assert [each for each in said if each["event"] == "store.slowed"] == [], "one at a time is not many"


def refuse_to_wait(_: Condition) -> None:
    raise AssertionError("it would have to wait")


def test_a_refusal_halves_what_is_under_way_once_for_those_sent_together() -> None:
    pace = Pace()
    eras = [pace.enter(refuse_to_wait) for _ in range(8)]
    assert pace.leave(eras[0], refused=True) == 4
    assert [pace.leave(era, refused=True) for era in eras[1:]] == [None] * 7
    assert pace.limit == 4


def test_answers_raise_the_pace_again_until_nothing_bounds_it() -> None:
    pace = Pace()
    eras = [pace.enter(refuse_to_wait) for _ in range(4)]
    for era in eras:
        pace.leave(era, refused=True)

    assert pace.limit == 2
    seen: list[int | None] = []
    for _ in range(3000):
        pace.leave(pace.enter(refuse_to_wait), refused=False)
        seen.append(pace.limit)

    bounded = [each for each in seen if each is not None]
    assert bounded == sorted(bounded)
    assert seen[-1] is None


def test_no_more_requests_are_under_way_than_the_pace_allows() -> None:
    pace = Pace()
    pace.leave(pace.enter(refuse_to_wait), refused=True)
    assert pace.limit == 1
    first = pace.enter(refuse_to_wait)
    with pytest.raises(AssertionError, match="have to wait"):
        pace.enter(refuse_to_wait)

    pace.leave(first, refused=None)
    pace.enter(refuse_to_wait)


def test_a_swap_does_not_wait_its_turn() -> None:
    requests = Clock().requests()
    pace = requests.pace
    pace.leave(pace.enter(refuse_to_wait), refused=True)
    pace.enter(refuse_to_wait)  # the only one that is allowed
    assert requests.send("swap", "p", lambda: "swapped", paced=False) == "swapped"


@pytest.mark.anyio
async def test_a_cancelled_restore_does_not_wait_for_the_next_try() -> None:
    begun = Event()

    def waiting() -> None:
        begun.set()
        pause_in_thread(1000.0)

    async with create_task_group() as group:
        scope = CancelScope()

        async def wait() -> None:
            with scope:
                await to_thread.run_sync(waiting)

        group.start_soon(wait)
        await to_thread.run_sync(begun.wait)
        scope.cancel()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("obstore")
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with object_server(InMemory()) as found:
        for at in range(3):
            found.backend.put(f"run/{at}", b"content")

        yield found


REQUESTS: Sequence[tuple[str, Callable[[ObjectClient], Any]]] = [
    ("head", lambda client: client.head("run/1") is not None),
    ("get", lambda client: client.read("run/1") is not None),
    ("range", lambda client: bytes(client.read_range("run/1", 0, 3)) == b"con"),
    ("put", lambda client: client.put("run/new", b"1")),
    ("create", lambda client: client.create("run/new", b"1") in ("created", "same")),
    ("list", lambda client: len(client.list("run").files) == 3),
    ("walk", lambda client: len(list(client.walk("run"))) == 3),
    ("has", lambda client: client.has_below("run")),
    ("delete", lambda client: client.delete(["run/1", "run/2"])),
    ("copy", lambda client: client.copy("run/1", "run/new")),
]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("request_", [ask for _, ask in REQUESTS], ids=[name for name, _ in REQUESTS])
@pytest.mark.parametrize("status", [503, 429, 500])
def test_every_request_outlasts_refusals(server: ObjectServer, status: int, request_: Any) -> None:
    left = [status] * 12  # more than obstore's own default of repetitions
    server.before = lambda _: left.pop() if left else None
    clock = Clock()
    made = connect("bucket", S3Options(endpoint=server.endpoint), environ=CREDENTIALS)
    client = ObjectClient("s3://bucket", made, clock.requests())
    assert request_(client) in (None, True)
    assert not left
    assert client.figures().n_refused == 12


def test_a_list_that_is_cut_off_is_asked_for_again(server: ObjectServer) -> None:
    cut = [0, 0]

    def after(asked: Asked, content: bytes) -> bytes:
        if asked.query.get("list-type") and cut:
            cut.pop()
            return content[: len(content) // 2]

        return content

    server.after = after
    clock = Clock()
    made = connect("bucket", S3Options(endpoint=server.endpoint), environ=CREDENTIALS)
    client = ObjectClient("s3://bucket", made, clock.requests())
    assert sorted(client.walk("run")) == ["run/0", "run/1", "run/2"]
    assert client.list("run").files == ["0", "1", "2"]


@pytest.mark.parametrize("status", [403, 401])
def test_a_denied_request_fails_at_once(server: ObjectServer, status: int) -> None:
    server.before = lambda _: status
    clock = Clock()
    made = connect("bucket", S3Options(endpoint=server.endpoint), environ=CREDENTIALS)
    with pytest.raises(AccessDeniedError):
        ObjectClient("s3://bucket", made, clock.requests()).read("run/1")

    assert len(server.log) == 1
