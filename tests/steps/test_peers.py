"""To whom a process sends its parts."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest
from anyio import EndOfStream, create_task_group, fail_after, to_thread

from penstock.config import TierOptions
from penstock.errors import ConfigError, SpecError
from penstock.steps import Memory
from penstock.steps.peers import Peer, _connected, _Connection, _own_address, chosen_peers, next_to_send


def on(*hosts: str) -> dict[int, Peer]:
    return {index: Peer(host, "10.0.0.1", 1) for index, host in enumerate(hosts)}


@pytest.mark.parametrize(
    ("hosts", "count", "chosen"),
    [
        ("ab", 1, [[1], [0]]),
        ("aabb", 1, [[2], [2], [0], [0]]),
        ("abc", 1, [[1], [2], [0]]),
        ("abc", 2, [[1, 2], [2, 0], [0, 1]]),
        ("aab", 2, [[2], [2], [0]]),
        ("aaa", 1, [[], [], []]),
        ("a", 3, [[]]),
    ],
)
def test_peers_are_the_next_processes_on_other_hosts(hosts: str, count: int, chosen: list[list[int]]) -> None:
    peers = on(*hosts)
    assert [list(chosen_peers(index, peers, count)) for index in peers] == chosen


def test_a_number_of_peers_that_is_none_is_refused() -> None:
    for peers in (-1, "one"):
        with pytest.raises(SpecError, match="peers"):
            Memory(peers=peers)  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="peers"):
        TierOptions(path="/nvme", peers=1)


@pytest.mark.parametrize(
    ("said", "step", "whole"),
    [
        ([(1, None), (1, None)], 1, None),
        ([(3, 2), (4, 2)], 3, 2),  # who has a newer one sends that afterwards
        ([(3, 2), (3, None)], 3, None),  # one could not send it
        ([(3, 2), (3, 1)], 3, None),
        ([(7, 6)], 7, 6),
    ],
)
def test_all_send_the_newest_step_that_waits_in_all(
    said: list[tuple[int, int | None]], step: int, whole: int | None
) -> None:
    assert next_to_send(said) == (step, whole)


async def both_ends() -> tuple[_Connection, _Connection]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = await _connected(Peer("a", *listener.getsockname()))
        return one, _Connection(listener.accept()[0])


async def test_what_follows_a_frame_is_left_to_who_reads_it_next() -> None:
    one, other = await both_ends()
    with one, other:
        await one.send_frame(b"header")
        one.socket.sendall(b"content")
        await one.send_frame(b"")
        assert await other.frame(6) == b"header"
        with other.waiting_in_calls():
            assert await to_thread.run_sync(other.received, 7) == b"content"

        assert await other.frame(0) == b""
        await one.send_frame(b"too long")
        with pytest.raises(ValueError, match="8 bytes, where 7"):
            await other.frame(7)


async def test_a_long_frame_waits_for_who_reads_it() -> None:
    one, other = await both_ends()
    with one, other:
        data = bytes(2**24)
        async with create_task_group() as tasks:
            tasks.start_soon(one.send_frame, data)
            assert await other.frame(len(data)) == data


async def test_an_end_in_the_middle_is_known() -> None:
    one, other = await both_ends()
    with other:
        with one:
            one.socket.sendall(b"12345")

        with pytest.raises(EndOfStream):
            await to_thread.run_sync(other.received, 6)
        with pytest.raises(EndOfStream):
            await other.frame(6)


async def test_a_thread_that_waits_for_a_peer_ends_with_a_cancellation() -> None:
    one, other = await both_ends()
    with one, other, fail_after(20):
        asked = threading.Event()

        def nothing() -> int:
            asked.set()
            raise BlockingIOError

        async with create_task_group() as tasks:
            tasks.start_soon(to_thread.run_sync, other.moved, nothing)
            await to_thread.run_sync(asked.wait)
            tasks.cancel_scope.cancel()


async def test_nobody_listens_is_an_error_of_the_system() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()

    with pytest.raises(OSError, match="refused"), await _connected(Peer("a", *address)) as connection:
        await connection.frame(1)


async def test_the_address_is_the_one_that_the_name_service_knows_for_this_host() -> None:
    asked: list[str] = []

    def look_up(name: str) -> str:
        asked.append(name)
        return "10.1.2.3"

    assert await _own_address(look_up) == "10.1.2.3"
    assert asked == [socket.gethostname()]


def local_address(_: str) -> str:
    return "127.0.1.1"


def unknown_name(_: str) -> str:
    raise socket.gaierror("this name is not known")


@pytest.mark.parametrize("look_up", [local_address, unknown_name])
async def test_a_name_service_that_knows_no_address_for_others_is_not_believed(
    look_up: Callable[[str], str],
) -> None:
    assert await _own_address(look_up) == routed_address()


async def test_a_name_service_that_does_not_answer_is_not_waited_for() -> None:
    answered = threading.Event()

    def look_up(_: str) -> str:
        answered.wait()
        return "10.1.2.3"

    try:
        with fail_after(20):
            assert await _own_address(look_up, within_s=0.01) == routed_address()
    finally:
        answered.set()


def routed_address() -> str:
    """Return the address of this host's default route, or that of itself alone if it has none."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
