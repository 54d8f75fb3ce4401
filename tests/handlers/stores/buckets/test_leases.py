"""Claims as leases: who stood still for too long is taken over, finds out, and changes nothing any more."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from tests.handlers.stores.buckets.bucket_rig import Bucket, Machine, ServerClock

from penstock.errors import ClaimLostError, InUseError, StorageError, ThrottledError
from penstock.handlers.stores.buckets.bucket_builds import MARK

KEY = "run/7"
CLAIM = f"{KEY}.penstock-saving"
ROOT = "run/.penstock-writer"
LEASE_S = 90.0


class Killed(BaseException):
    """The process is no more."""


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


@pytest.fixture
def server() -> ServerClock:
    return ServerClock()


@pytest.fixture
def first(bucket: Bucket, server: ServerClock) -> Machine:
    return Machine("first", bucket, server)


@pytest.fixture
def second(bucket: Bucket, server: ServerClock) -> Machine:
    return Machine("second", bucket, server)


def whose(bucket: Bucket, key: str = KEY) -> str | None:
    """Return whose checkpoint lies at a key, which is whole and no mixture; None if there is none."""
    client = bucket.client()
    if client.head(f"{key}/{MARK}") is None:
        return None

    found = [client.read(f"{key}/{name}") for name in ("a", "b")]
    assert None not in found, "published, and an object is missing"
    (content,) = {each[0].decode() for each in found if each is not None}
    return content


def stop_at(machine: Machine, k: int, then: Callable[[], object]) -> list[str]:
    """Have something happen before the k-th request by which a machine changes the bucket.

    Returns the requests so far, which grows.
    """
    asked = list[str]()

    def before(name: str, key: str) -> None:
        asked.append(f"{name} {key}")
        if len(asked) == k:
            then()

    machine.before = before
    return asked


def test_a_claim_that_is_not_renewed_is_taken_over_when_its_lease_is_over(
    server: ServerClock, first: Machine, second: Machine, bucket: Bucket
) -> None:
    first.builds.begin(KEY, "place", None)
    server.seconds = LEASE_S - 5
    with pytest.raises(InUseError, match=r"process \d+ of first, renewed 8[45] s ago; .* ends in [56] s"):
        second.builds.begin(KEY, "place", None)

    server.seconds = LEASE_S + 1
    assert second.save() == "saved"
    assert whose(bucket) == "second"


def test_a_claim_that_is_renewed_lasts(server: ServerClock, first: Machine, second: Machine) -> None:
    build = first.builds.begin(KEY, "place", None)
    for _ in range(5):
        server.seconds += LEASE_S / 3
        first.builds.renew()

    with pytest.raises(InUseError):
        second.builds.begin(KEY, "place", None)

    first.builds.publish(build)


def test_work_without_a_loop_renews_as_it_goes_on(
    server: ServerClock, first: Machine, second: Machine
) -> None:
    build = first.builds.begin(KEY, "place", None)
    for number in range(6):
        server.seconds += LEASE_S / 2
        first.seconds += LEASE_S / 2
        first.builds.create(build, f"{KEY}/{number}", b"")
        with pytest.raises(InUseError):
            second.builds.begin(KEY, "place", None)


def test_a_lease_that_a_server_of_another_version_wrote_ends_only_when_asked(
    bucket: Bucket, first: Machine, second: Machine, server: ServerClock
) -> None:
    first.builds.begin(KEY, "place", None)
    found = bucket.client().read(CLAIM)
    assert found is not None
    old = {name: value for name, value in json.loads(found[0]).items() if name not in {"lease_s", "process"}}
    bucket.client().put(CLAIM, json.dumps(old).encode())
    server.seconds = 1e6
    with pytest.raises(InUseError, match=r"penstock gc --older-than SECONDS s3://bucket/run/7"):
        second.builds.begin(KEY, "place", None)

    assert second.builds.collect(KEY, None) == "kept"
    assert second.builds.collect(KEY, 60.0) == "removed"


@pytest.mark.parametrize("clock", ["goes on", "stops too"])
def test_who_was_paused_at_any_request_mixes_nothing_and_is_told(clock: str) -> None:
    k, outcomes = 1, set[tuple[str, str]]()
    while True:
        bucket, server = Bucket(), ServerClock()
        first, second = Machine("first", bucket, server), Machine("second", bucket, server)
        taken = list[str]()

        def pause() -> None:
            server.seconds += LEASE_S + 10  # noqa: B023  # called in this round
            first.seconds += LEASE_S + 10 if clock == "goes on" else 0  # noqa: B023
            taken.append(second.save())  # noqa: B023

        asked = stop_at(first, k, pause)
        ended = first.save()
        if len(asked) < k:
            break

        at = asked[k - 1]
        assert whose(bucket) is not None, at
        assert (ended == "saved") == (whose(bucket) == "first"), at
        assert (taken == ["saved"]) == (whose(bucket) == "second"), at
        assert Machine("third", bucket, server).builds.collect(KEY, None) in (None, "removed"), at
        assert not [key for key in bucket.objects_there() if "penstock-saving" in key], at
        outcomes.add((ended, taken[0]))
        k += 1

    assert ("ClaimLostError", "saved") in outcomes
    assert ("saved", "StorageError") in outcomes
    assert k > 6


def test_who_wakes_before_its_mark_publishes_nothing_over_what_came_since(
    bucket: Bucket, server: ServerClock, first: Machine, second: Machine
) -> None:
    """What it was about to publish was published for it, deleted, and another checkpoint is being built."""

    def sleep() -> None:
        server.seconds += LEASE_S + 10
        first.seconds += LEASE_S + 10
        assert second.save() == "StorageError"
        assert whose(bucket) == "first", "rolled forward, never back"
        second.builds.remove(KEY)

    first.before = lambda name, key: sleep() if (name, key) == ("create", f"{KEY}/{MARK}") else None
    assert first.save() == "ClaimLostError"
    assert whose(bucket) is None
    assert second.save() == "saved"
    assert whose(bucket) == "second"


def test_what_a_dead_saver_was_about_to_publish_is_rolled_forward(
    bucket: Bucket, server: ServerClock, first: Machine, second: Machine
) -> None:
    def die(name: str, key: str) -> None:
        if key.endswith(MARK):
            raise Killed

    first.before = die
    with pytest.raises(Killed):
        first.save()

    assert second.builds.collect(KEY, None) == "kept"
    server.seconds += LEASE_S + 1
    assert second.builds.collect(KEY, None) == "published"
    assert whose(bucket) == "first"
    assert bucket.objects_there() == [f"{KEY}/a", f"{KEY}/b", f"{KEY}/{MARK}"]


def test_a_renewal_without_a_reply_is_no_loss(server: ServerClock, first: Machine, bucket: Bucket) -> None:
    build = first.builds.begin(KEY, "place", None)
    first.builds.renew()
    client: Any = first.builds._client
    plain = client.instead["swap"]

    def lose(method: Callable[..., Any], *arguments: Any) -> Any:
        plain(method, *arguments)
        raise ThrottledError("swap", CLAIM, "503")

    client.instead["swap"] = lose
    first.builds.renew()
    client.instead["swap"] = plain
    first.builds.publish(build)
    assert bucket.client().head(f"{KEY}/{MARK}") is not None


def test_after_a_clean_up_that_failed_anywhere_the_process_saves_again_at_once() -> None:
    """Another store object of the same process, and the collection of what was left, hear no InUseError."""
    k = 1
    while True:
        for again in ("save", "collect", "beat"):
            bucket, server = Bucket(), ServerClock()
            first = Machine("first", bucket, server)
            asked = list[str]()

            def refuse(name: str, key: str) -> None:
                asked.append(key)  # noqa: B023  # called in this round
                if len(asked) >= k:  # noqa: B023
                    raise ThrottledError(name, key, "503")

            first.before = refuse
            ended = first.save()
            if len(asked) < k:
                assert k > 6
                return

            first.before = lambda _name, _key: None
            if again == "beat":
                first.builds.renew()
                assert not [key for key in bucket.objects_there() if "penstock-saving" in key], k
            else:
                first.make_store()
            if again == "collect":
                assert first.builds.collect(KEY, None) != "kept", k

            assert first.save() in ("saved", "StorageError"), k
            assert whose(bucket) == "first", (k, ended)

        k += 1


def test_a_removal_that_was_paused_leaves_alone_what_was_saved_since() -> None:
    k = 1
    while True:
        bucket, server = Bucket(), ServerClock()
        first, second = Machine("first", bucket, server), Machine("second", bucket, server)
        assert second.save() == "saved"
        taken = list[str]()

        def pause() -> None:
            server.seconds += LEASE_S + 10  # noqa: B023  # called in this round
            first.seconds += LEASE_S + 10  # noqa: B023
            taken.append(second.save())  # noqa: B023

        asked = stop_at(first, k, pause)
        with suppress(ClaimLostError, InUseError):
            first.builds.remove(KEY)

        if len(asked) < k:
            break

        at = asked[k - 1]
        # A deletion that is on its way cannot be held back: no server deletes on a condition of another key.
        if taken == ["saved"] and at != f"delete {KEY}/a,{KEY}/b":
            assert whose(bucket) == "second", at

        k += 1

    assert k > 3


def test_a_removal_that_slept_between_its_requests_deletes_nothing_more(
    bucket: Bucket, server: ServerClock, first: Machine, second: Machine
) -> None:
    assert second.save() == "saved"
    client: Any = first.builds._client

    def sleep(method: Callable[[str], Any], prefix: str) -> Any:
        found = list(method(prefix))
        if bucket.client().head(f"{KEY}/{MARK}") is None:
            server.seconds += LEASE_S + 10
            first.seconds += LEASE_S + 10
            assert second.save() == "saved"

        return found

    client.instead["walk"] = sleep
    with pytest.raises(ClaimLostError):
        first.builds.remove(KEY)

    assert whose(bucket) == "second"


def test_a_removal_is_renewed_while_it_goes_on(
    bucket: Bucket, server: ServerClock, first: Machine, second: Machine
) -> None:
    assert first.save() == "saved"
    refused = list[str]()

    def beat(name: str, key: str) -> None:
        if name == "delete" and not key.endswith(".clock"):
            for _ in range(4):
                server.seconds += LEASE_S / 3
                first.before = lambda _name, _key: None
                first.builds.renew()
                first.before = beat

            refused.append(second.save())

    first.before = beat
    first.builds.remove(KEY)
    assert {*refused[:2]} == {"InUseError"}


class TestRoots:
    def test_one_manager_at_a_time_holds_a_root_and_another_takes_it_when_the_lease_is_over(
        self, server: ServerClock, first: Machine, second: Machine, bucket: Bucket
    ) -> None:
        held = first.builds.hold(ROOT)
        server.seconds += LEASE_S / 2
        first.builds.renew()
        server.seconds += LEASE_S / 2 + 1
        with pytest.raises(InUseError, match=r"process \d+ of first"):
            second.builds.hold(ROOT)

        server.seconds += LEASE_S / 2
        taken = second.builds.hold(ROOT)
        held.release()
        held.release()
        taken.confirm()
        taken.release()
        assert bucket.objects_there() == []

    def test_who_lost_a_root_deletes_and_publishes_nothing_in_it(
        self, server: ServerClock, first: Machine, second: Machine, bucket: Bucket
    ) -> None:
        assert first.save("run/1") == "saved"
        assert first.save("other/1") == "saved"
        held = first.builds.hold(ROOT)
        build = first.builds.begin("run/2", "place", None)
        server.seconds += LEASE_S + 1
        taken = second.builds.hold(ROOT)
        with pytest.raises(ClaimLostError, match="of second took its claim over"):
            first.builds.remove("run/1")  # though its own clock stood still
        with pytest.raises(ClaimLostError):
            first.builds.publish(build)
        with pytest.raises(ClaimLostError):
            first.builds.begin("run/3", "place", None)
        with pytest.raises(ClaimLostError):
            held.confirm()

        assert whose(bucket, "run/1") == "first"
        first.builds.remove("other/1")
        assert whose(bucket, "other/1") is None, "what lies elsewhere is no matter of the hold"
        held.release()
        taken.confirm()

    def test_a_hold_that_could_not_be_given_up_is_in_nobodys_way_in_this_process(
        self, first: Machine, second: Machine
    ) -> None:
        held = first.builds.hold(ROOT)

        def refuse(name: str, key: str) -> None:
            raise ThrottledError(name, key, "503")

        first.before = refuse
        held.release()
        first.before = lambda _name, _key: None
        with pytest.raises(InUseError):
            second.builds.hold(ROOT)

        first.make_store()
        first.builds.hold(ROOT).release()
        second.builds.hold(ROOT)

    def test_of_two_managers_of_one_process_the_second_is_refused(self, first: Machine) -> None:
        held = first.builds.hold(ROOT)
        first.make_store()
        with pytest.raises(InUseError):
            first.builds.hold(ROOT)

        held.release()

    def test_a_dead_hold_is_lifted_by_a_collection(
        self, server: ServerClock, first: Machine, second: Machine, bucket: Bucket
    ) -> None:
        first.builds.hold(ROOT)
        assert second.builds.collect(ROOT, None) == "kept"
        assert second.builds.collect(ROOT, 0.0) == "removed"
        assert bucket.objects_there() == []


def test_a_fork_neither_renews_nor_gives_up_what_its_parent_claims(first: Machine, bucket: Bucket) -> None:
    build = first.builds.begin(KEY, "place", None)
    parent, first.process = first.process, Machine("fork", bucket, first.server).process
    first.builds.claims._process = first.process
    with pytest.raises(ClaimLostError):
        first.builds.publish(build)

    first.builds.claims._process = parent
    found = bucket.client().read(CLAIM)
    assert found is not None
    assert json.loads(found[0])["process"] == parent.key


def test_an_error_about_a_claim_never_advises_to_remove_it(
    first: Machine, second: Machine, server: ServerClock
) -> None:
    first.builds.begin(KEY, "place", None)
    with pytest.raises(StorageError) as caught:
        second.builds.begin(KEY, "place", None)

    assert "remove" not in str(caught.value)
