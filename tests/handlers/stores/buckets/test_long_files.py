"""Files that are longer than what is held of them: written in any order, and uploaded in parts."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.handlers.stores.buckets.bucket_rig import Bucket
from tests.object_server import CREDENTIALS, Asked, ObjectServer, object_server

from penstock.errors import AccessDeniedError, ChecksumError, StorageError
from penstock.handlers.stores.buckets.bucket_options import S3Options
from penstock.handlers.stores.buckets.bucket_store import BucketStore
from penstock.handlers.stores.buckets.connections import connect
from penstock.handlers.stores.buckets.long_files import LongFile
from penstock.kernel import DataFile

URL = "s3://bucket"
MIB = 2**20
CONTENT = np.random.default_rng(0).integers(0, 255, 11 * MIB + 5, np.uint8)
"""Three parts of an upload."""


@dataclass
class InMemory:
    """Objects in this process, the first of which come back damaged."""

    damaged: int = 0
    objects: dict[str, bytes] = field(default_factory=dict[str, bytes])
    longest: int = 0
    n_reads: int = 0
    file: bytes | None = None

    def path(self, key: str) -> str:
        return f"memory/{key}"

    def put(self, number: int, data: memoryview) -> str:
        self.longest = max(self.longest, data.nbytes)
        self.objects[str(number)] = bytes(data)
        return str(number)

    def read(self, key: str, start: int, nbytes: int) -> memoryview:
        self.n_reads += 1
        found = bytearray(self.objects[key][start : start + nbytes])
        if self.damaged:
            self.damaged -= 1
            found[0] ^= 1

        return memoryview(found)

    def finish(self, parts: Callable[[], Iterator[memoryview]], nbytes: int) -> None:
        self.file = b"".join([bytes(part) for part in parts()])
        assert len(self.file) == nbytes

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            del self.objects[key]


def written(scratch: InMemory, content: bytes, cuts: Sequence[int], order: Sequence[int]) -> LongFile:
    """Write all pieces between the cuts, in an order of their numbers."""
    file = LongFile(scratch, "memory/file", len(content), 16)
    edges = [0, *sorted(set(cuts) & set(range(len(content)))), len(content)]
    pieces = [(lo, content[lo:hi]) for lo, hi in pairwise(edges)]
    for at in sorted(range(len(pieces)), key=lambda at: (order[at % len(order)], at)):
        file.write_at(pieces[at][0], [memoryview(pieces[at][1])])
    return file


@given(
    st.binary(min_size=1, max_size=200), st.lists(st.integers(0, 200)), st.lists(st.integers(), min_size=1)
)
def test_pieces_of_any_order_make_the_file(content: bytes, cuts: list[int], order: list[int]) -> None:
    scratch = InMemory()
    file = written(scratch, content, cuts, order)
    file.sync()
    assert scratch.file == content
    assert scratch.objects == {}
    assert scratch.longest <= 16
    assert file.transfers.buffered_bytes + file.transfers.direct_bytes == len(content)


def test_scattered_bytes_of_one_object_are_read_together() -> None:
    scratch, content = InMemory(), bytes(range(32))
    file = LongFile(scratch, "memory/file", 32, 16)
    for at in range(16):
        for offset in (at, 16 + at):  # as the columns of an array come
            file.write_at(offset, [memoryview(content)[offset : offset + 1]])

    file.sync()
    assert scratch.file == content
    assert scratch.n_reads == 4, "two objects, each with bytes of both parts"


def test_threads_write_at_once() -> None:
    scratch, content = InMemory(), CONTENT[:100_000]
    file = LongFile(scratch, "memory/file", len(content), 64)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns in the middle of everything
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda at: file.write_at(at, [content[at : at + 10].data]), range(0, 100_000, 10)))
    finally:
        sys.setswitchinterval(before)

    file.sync()
    assert scratch.file == content.tobytes()


@pytest.mark.parametrize("damaged", [1, 2])
def test_what_comes_back_damaged_is_asked_for_once_more(damaged: int) -> None:
    scratch = InMemory(damaged)
    file = written(scratch, bytes(range(100)), range(0, 100, 3), [1])
    if damaged == 1:
        file.sync()
        assert scratch.file == bytes(range(100))
        return

    with pytest.raises(ChecksumError, match=r"memory/0.*read twice"):
        file.sync()
    assert scratch.file is None


def test_a_file_of_which_bytes_are_missing_is_never_there() -> None:
    scratch = InMemory()
    file = LongFile(scratch, "memory/file", 100, 16)
    file.write_at(0, [memoryview(bytes(50))])
    file.write_at(51, [memoryview(bytes(49))])
    with pytest.raises(StorageError, match="was not written wholly"):
        file.sync()
    with pytest.raises(StorageError, match="ends after 100 bytes"):
        file.write_at(99, [memoryview(b"ab")])

    assert scratch.objects
    file.close()
    assert scratch.file is None
    assert scratch.objects == {}
    with pytest.raises(StorageError, match="was closed"):
        file.write_at(50, [memoryview(b"a")])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Generator[ObjectServer]:
    pytest.importorskip("obstore")
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with object_server() as running:
        yield running


def store_at(server: ObjectServer) -> BucketStore:
    options = S3Options(endpoint=server.endpoint, retries=1)
    return BucketStore(URL, connect("bucket", options), file_bytes=MIB)


def write(file: DataFile) -> None:
    for at in reversed(range(0, len(CONTENT), 3 * MIB)):
        file.write_at(at, [CONTENT[at : at + 3 * MIB].data])


def test_a_part_that_is_refused_once_is_sent_again(server: ObjectServer) -> None:
    failed: list[str] = []

    def before(asked: Asked) -> int | None:
        if asked.query.get("partNumber") == "2" and not failed:
            failed.append(asked.key)
            return 503
        return None

    server.before = before
    store = store_at(server)
    file = store.create_long_file(f"{URL}/file", len(CONTENT))
    write(file)
    file.sync()
    file.close()
    assert failed
    assert store.read_file(f"{URL}/file") == CONTENT.tobytes()
    assert [*server.backend.names("")] == ["file"]
    assert server.uploads == {}


@pytest.mark.parametrize("refused", ["1", "2", "3", "completion"])
def test_an_upload_that_fails_is_aborted_and_leaves_nothing(server: ObjectServer, refused: str) -> None:
    def before(asked: Asked) -> int | None:
        is_completion = asked.method == "POST" and "uploadId" in asked.query
        asks = "completion" if is_completion else asked.query.get("partNumber")
        return 403 if asks == refused else None

    server.before = before
    store = store_at(server)
    token = store.begin_build(f"{URL}/run", f"{URL}/run.tmp")
    file = store.create_long_file(f"{token.place}/file", len(CONTENT))
    write(file)
    with pytest.raises(AccessDeniedError, match="run"):
        file.sync()

    file.close()
    assert server.asked("POST", "/whole")
    assert server.uploads == {}
    store.discard(token)
    assert not server.backend.names("")


def test_an_upload_of_what_came_back_damaged_is_aborted(server: ObjectServer) -> None:
    server.after = lambda asked, content: content[:-1] + b"\0" if "range" in asked.headers else content
    store = store_at(server)
    file = store.create_long_file(f"{URL}/file", len(CONTENT))
    write(file)
    with pytest.raises(ChecksumError, match="does not hold what was put there"):
        file.sync()

    file.close()
    assert server.uploads == {}
    assert not server.backend.names("")


def completes(asked: Asked) -> bool:
    """Whether a request completes an upload in parts."""
    return asked.method == "POST" and "uploadId" in asked.query


@pytest.mark.parametrize("of", ["/whole", "run/file"])
@pytest.mark.parametrize("is_done", [False, True])
def test_an_error_within_a_reply_of_success_is_no_failure(
    server: ObjectServer, of: str, is_done: bool
) -> None:
    told: list[str] = []

    def once(asked: Asked) -> bool:
        if completes(asked) and asked.key.endswith(of) and not told:
            told.append(asked.key)
            return True
        return False

    failed = b"<Error><Code>InternalError</Code><Message>try again</Message></Error>"
    if is_done:
        server.after = lambda asked, content: failed if once(asked) else content
    else:
        server.before = lambda asked: 200 if once(asked) else None

    store = store_at(server)
    token = store.begin_build(f"{URL}/run", f"{URL}/run.tmp")
    file = store.create_long_file(f"{token.place}/file", len(CONTENT))
    write(file)
    file.sync()
    file.close()
    store.publish(token)
    assert told
    assert store.read_file(f"{URL}/run/file") == CONTENT.tobytes()
    assert [*server.backend.names("")] == ["run/file", "run/commit_success.txt"]
    assert server.uploads == {}


def test_what_cannot_be_removed_at_once_goes_with_the_save(server: ObjectServer) -> None:
    server.before = lambda asked: 403 if "delete" in asked.query or asked.method == "DELETE" else None
    store = store_at(server)
    token = store.begin_build(f"{URL}/run", f"{URL}/run.tmp")
    file = store.create_long_file(f"{token.place}/file", len(CONTENT))
    write(file)
    file.sync()
    file.close()
    assert [key for key in server.backend.names("") if key.endswith("/whole")]
    server.before = lambda _: None
    store.discard(token)
    assert not server.backend.names("")


def test_a_lost_reply_to_the_copy_is_no_failure(server: ObjectServer) -> None:
    store = store_at(server)
    token = store.begin_build(f"{URL}/run", f"{URL}/run.tmp")
    file = store.create_long_file(f"{token.place}/file", len(CONTENT))
    write(file)
    server.backend.put("run/file", CONTENT.tobytes())  # as if the copy had been made, and its reply lost
    file.sync()
    file.close()
    store.publish(token)
    assert store.read_file(f"{URL}/run/file") == CONTENT.tobytes()
    assert [*server.backend.names("")] == ["run/file", "run/commit_success.txt"]


def test_what_somebody_else_put_there_is_not_written_over(server: ObjectServer) -> None:
    store = store_at(server)
    token = store.begin_build(f"{URL}/run", f"{URL}/run.tmp")
    file = store.create_long_file(f"{token.place}/file", len(CONTENT))
    write(file)
    server.backend.put("run/file", b"of another saver")
    with pytest.raises(StorageError) as caught:
        file.sync()

    assert caught.value.errno == errno.EEXIST
    file.close()
    store.discard(token)
    assert server.backend.names("") == {"run/file": 16}


def test_of_two_savers_of_one_file_one_is_told(server: ObjectServer) -> None:
    store = store_at(server)
    token = store.begin_build(f"{URL}/a.safetensors", f"{URL}/a.tmp", "model.safetensors")
    store.write_file(token.built, b"ours")
    server.backend.put("a.safetensors", b"theirs")  # by one who was paused before its last request
    with pytest.raises(StorageError, match="is there already"):
        store.publish(token)

    store.discard(token)
    assert server.backend.names("") == {"a.safetensors": 6}


def test_a_short_file_is_one_request(server: ObjectServer) -> None:
    store = store_at(server)
    file = store.create_long_file(f"{URL}/file", 4)
    file.write_at(0, [memoryview(b"data")])
    file.sync()
    assert [(asked.method, asked.key) for asked in server.log] == [("HEAD", "file"), ("PUT", "file")]


def test_a_file_that_the_server_could_not_copy_is_refused_at_once(bucket: Bucket) -> None:
    with pytest.raises(StorageError, match=r"of at most 5368709120 .* save a folder") as caught:
        bucket.store().create_long_file(f"{URL}/file", 5 * 2**30 + 1)

    assert caught.value.errno == errno.EFBIG


@pytest.fixture
def bucket() -> Any:
    return Bucket()
