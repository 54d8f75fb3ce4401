from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Container, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import CodeType, FrameType

import pytest

import penstock
from penstock.errors import InUseError, PenstockError, StorageError, TruncatedDataError
from penstock.handlers import LocalStore
from penstock.handlers.stores import regular_files as vectored
from penstock.handlers.stores.data_file import LocalDataFile
from penstock.handlers.stores.file_system import exchange_in_steps
from penstock.kernel import BuildToken, Hold, Store

NOBODY = 65534


@pytest.fixture
def store() -> LocalStore:
    return LocalStore()


@contextmanager
def unprivileged() -> Generator[None]:
    """Root may do anything, so be somebody else for a while."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that other users can reach; those of pytest they cannot."""
    with tempfile.TemporaryDirectory(prefix="penstock-test-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def views(*parts: bytes) -> list[memoryview]:
    return [memoryview(part) for part in parts]


def test_the_local_store_is_a_store(store: LocalStore) -> None:
    checked: Store = store
    assert checked is store


def test_kind_tells_files_from_directories_from_nothing(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "to_directory").symlink_to(tmp_path)

    assert store.kind(str(tmp_path)) == "directory"
    assert store.kind(str(tmp_path / "file")) == "file"
    assert store.kind(str(tmp_path / "to_directory")) == "directory"
    assert store.kind(str(tmp_path / "absent")) is None
    assert store.kind(str(tmp_path / "file" / "below")) is None
    assert store.kind(str(tmp_path / "link")) is None


def test_a_file_is_written_replaced_and_read_back(store: LocalStore, tmp_path: Path) -> None:
    path = str(tmp_path / "document")
    store.write_file(path, b"a longer text")
    store.write_file(path, b"text")

    assert store.read_file(path) == b"text"
    assert store.size(path) == 4
    store.write_file(path, b"")
    assert store.read_file(path) == b""


def test_a_directory_is_listed_in_order(store: LocalStore, tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / name).touch()

    assert store.list_directory(str(tmp_path)) == ["a", "b", "c"]


def test_buffers_go_to_their_offsets_and_come_back(store: LocalStore, tmp_path: Path) -> None:
    path = str(tmp_path / "data")
    data = store.create_data_file(path)
    data.write_at(4, views(b"", b"efg", b"", b"hi"))
    data.write_at(0, [memoryview(b"abcd").cast("H")])
    data.sync()
    data.close()
    data.close()
    assert store.read_file(path) == b"abcdefghi"

    file = store.open_data_file(path)
    first, second = bytearray(2), bytearray(4)
    file.read_at(1, [memoryview(first), memoryview(bytearray()), memoryview(second).cast("I")])
    file.close()
    file.close()
    assert first + second == b"bcdefg"


def test_more_buffers_than_one_call_takes(store: LocalStore, tmp_path: Path) -> None:
    n = 2 * vectored.MAX_BUFFERS + 100
    path = str(tmp_path / "data")
    data = store.create_data_file(path)
    data.write_at(0, views(*[b""] * n, *(i.to_bytes(2, "little") for i in range(n))))
    data.close()

    parts = [bytearray(2) for _ in range(n)]
    file = store.open_data_file(path)
    file.read_at(0, [memoryview(part) for part in parts])
    file.close()
    assert [int.from_bytes(part, "little") for part in parts] == list(range(n))


def test_what_moves_little_at_a_time_arrives_whole() -> None:
    moved = bytearray()

    def stingy(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        assert (descriptor, offset) == (7, 100 + len(moved))
        part = b"".join(buffers)[: 1 + len(moved) % 5]
        moved.extend(part)
        return len(part)

    parts = views(b"ab", b"", b"cdefghi", b"j", b"klmnopqrstu")
    assert vectored.transfer(stingy, 7, 100, parts) == 100 + 21
    assert moved == b"abcdefghijklmnopqrstu"


def test_a_write_cut_short_by_the_system_is_an_error(store: LocalStore, tmp_path: Path) -> None:
    data = store.create_data_file(str(tmp_path / "data"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60, hard))
    try:
        with pytest.raises(StorageError) as caught:
            data.write_at(0, views(bytes(50), bytes(50)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        data.close()

    assert caught.value.errno == errno.EFBIG
    assert store.size(str(tmp_path / "data")) == 60


def test_threads_write_and_read_one_file_at_once(store: LocalStore, tmp_path: Path) -> None:
    n, size = 8, 100_000
    path = str(tmp_path / "data")
    data = store.create_data_file(path)
    found = [bytearray(size) for _ in range(n)]
    in_threads(n, lambda i: data.write_at(i * size, views(bytes([i]) * size)))
    data.sync()
    data.close()
    file = store.open_data_file(path)
    in_threads(n, lambda i: file.read_at(i * size, [memoryview(found[i])]))
    file.close()

    assert found == [bytes([i]) * size for i in range(n)]


def in_threads(n: int, function: Callable[[int], object]) -> None:
    errors = list[BaseException]()

    def run(i: int) -> None:
        try:
            function(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert errors == []


@pytest.mark.parametrize("offset", [0, 3, 5, 100])
def test_a_short_file_says_what_is_needed_and_found(store: LocalStore, tmp_path: Path, offset: int) -> None:
    path = str(tmp_path / "data")
    store.write_file(path, b"12345")
    file = store.open_data_file(path)
    with pytest.raises(TruncatedDataError) as caught:
        file.read_at(offset, [memoryview(bytearray(4)), memoryview(bytearray(4))])
    file.close()

    assert (caught.value.needed, caught.value.found) == (offset + 8, 5)
    assert caught.value.path == path


def test_a_data_file_is_never_written_over(store: LocalStore, tmp_path: Path) -> None:
    path = str(tmp_path / "data")
    store.write_file(path, b"precious")

    with pytest.raises(StorageError) as caught:
        store.create_data_file(path)
    assert caught.value.errno == errno.EEXIST
    assert store.read_file(path) == b"precious"


def test_a_full_disk_is_a_storage_error(store: LocalStore) -> None:
    with pytest.raises(StorageError, match=r"^write '/dev/full': No space left on device") as caught:
        store.write_file("/dev/full", b"data")

    assert caught.value.errno == errno.ENOSPC


def test_a_failed_fsync_is_never_tried_again(store: LocalStore, tmp_path: Path) -> None:
    data = store.create_data_file(str(tmp_path / "data"))
    data.write_at(0, views(b"data"))
    with swapped_for_a_pipe(data), pytest.raises(StorageError) as first:
        data.sync()
    assert (first.value.operation, first.value.errno) == ("fsync", errno.EINVAL)

    # The descriptor is sound again, and would say that all is well.
    for attempt in (data.sync, lambda: data.write_at(4, views(b"more"))):
        with pytest.raises(StorageError, match="an earlier fsync failed") as caught:
            attempt()
        assert caught.value.errno == errno.EINVAL
        assert caught.value.__cause__ is first.value
    data.close()
    assert store.read_file(str(tmp_path / "data")) == b"data"


@contextmanager
def swapped_for_a_pipe(data: LocalDataFile) -> Generator[None]:
    """A pipe cannot be synced, so for a while every fsync of the file fails."""
    number = data._descriptor.number
    kept, (reader, writer) = os.dup(number), os.pipe()
    os.dup2(writer, number, inheritable=False)
    try:
        yield
    finally:
        os.dup2(kept, number, inheritable=False)
        for descriptor in (kept, reader, writer):
            os.close(descriptor)


def test_a_document_that_cannot_be_synced_is_an_error(store: LocalStore) -> None:
    with pytest.raises(StorageError) as caught:
        store.write_file("/dev/null", b"data")

    assert (caught.value.operation, caught.value.errno) == ("fsync", errno.EINVAL)


def test_children_inherit_no_descriptor(store: LocalStore, tmp_path: Path) -> None:
    data = store.create_data_file(str(tmp_path / "data"))
    number = data._descriptor.number
    program = f"import os\ntry: os.fstat({number})\nexcept OSError as e: print(e.errno)"
    run = subprocess.run(
        [sys.executable, "-c", program], close_fds=False, capture_output=True, text=True, check=True
    )
    data.close()

    assert run.stdout.split() == [str(errno.EBADF)]


def test_a_file_dropped_without_being_closed_warns_and_closes(store: LocalStore, tmp_path: Path) -> None:
    held = [store.create_data_file(str(tmp_path / "data"))]
    number = held[0]._descriptor.number
    with pytest.warns(ResourceWarning, match="was not closed"):
        held.clear()

    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_a_closed_file_refuses(store: LocalStore, tmp_path: Path) -> None:
    data = store.create_data_file(str(tmp_path / "data"))
    data.close()

    with pytest.raises(StorageError) as caught:
        data.write_at(0, views(b"late"))
    assert caught.value.errno == errno.EBADF


def called_with_path(codes: Container[CodeType], action: Callable[[], object]) -> list[str]:
    """The argument `path` of each call of one of these functions during `action`, in order."""
    paths = list[str]()

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in codes:
            paths.append(frame.f_locals["path"])

    sys.setprofile(watch)
    try:
        action()
    finally:
        sys.setprofile(None)
    return paths


def synced_directories(action: Callable[[], object]) -> list[str]:
    """What `sync_directory` is called with during `action`, in order."""
    return called_with_path({LocalStore.sync_directory.__code__}, action)


def test_each_directory_that_is_made_is_made_durable(store: LocalStore, tmp_path: Path) -> None:
    a, b, c = tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "c"

    assert synced_directories(lambda: store.make_directory(f"{c}/")) == [str(tmp_path), str(a), str(b)]
    assert store.kind(str(c)) == "directory"
    assert synced_directories(lambda: store.make_directory(str(c))) == []


def test_a_tree_is_made_durable_from_the_leaves_up(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "t" / "sub").mkdir(parents=True)
    (tmp_path / "t" / "sub" / "inner").write_bytes(b"x")
    (tmp_path / "t" / "outer").write_bytes(b"y")
    (tmp_path / "t" / "link").symlink_to("/nowhere")
    os.mkfifo(tmp_path / "t" / "pipe")
    codes = {LocalStore.sync_directory.__code__, LocalStore._sync_file.__code__}

    synced = called_with_path(codes, lambda: store.sync_tree(str(tmp_path / "t")))

    names = [Path(path).name for path in synced]
    assert names[:2] == ["inner", "sub"]
    assert set(names[2:-1]) == {"outer", "link", "pipe"}
    assert names[-1] == "t"


def test_a_tree_that_is_not_there_cannot_be_made_durable(store: LocalStore, tmp_path: Path) -> None:
    with pytest.raises(StorageError) as caught:
        store.sync_tree(str(tmp_path / "absent"))

    assert caught.value.errno == errno.ENOENT


def test_threads_may_make_one_directory_at_once(store: LocalStore, tmp_path: Path) -> None:
    barrier = threading.Barrier(8)

    def make(_: int) -> None:
        barrier.wait(10)
        store.make_directory(str(tmp_path / "a" / "b" / "c" / "d"))

    in_threads(8, make)
    assert store.kind(str(tmp_path / "a" / "b" / "c" / "d")) == "directory"


@pytest.mark.parametrize(
    ("path", "number"),
    [
        ("file", errno.EEXIST),
        ("file/below", errno.ENOTDIR),
        ("link", errno.EEXIST),
        ("x" * 300, errno.ENAMETOOLONG),
    ],
)
def test_a_directory_that_cannot_be_made(store: LocalStore, tmp_path: Path, path: str, number: int) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")

    with pytest.raises(StorageError) as caught:
        store.make_directory(str(tmp_path / path))
    assert caught.value.errno == number


def test_a_directory_is_synced_or_the_failure_told(store: LocalStore, tmp_path: Path) -> None:
    store.sync_directory(str(tmp_path))
    (tmp_path / "file").touch()

    for path, number in (("absent", errno.ENOENT), ("file", errno.ENOTDIR)):
        with pytest.raises(StorageError) as caught:
            store.sync_directory(str(tmp_path / path))
        assert caught.value.errno == number


def test_a_directory_that_cannot_be_synced_at_all_is_accepted(store: LocalStore) -> None:
    store.sync_directory("/proc")  # fsync of it is EINVAL


def test_rename_moves(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").touch()
    store.rename(str(tmp_path / "a"), str(tmp_path / "b"))

    assert store.list_directory(str(tmp_path)) == ["b"]
    assert store.list_directory(str(tmp_path / "b")) == ["x"]


def test_rename_replaces_nothing_not_even_an_empty_directory(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()

    with pytest.raises(StorageError) as caught:
        store.rename(str(tmp_path / "a"), str(tmp_path / "b"))
    assert caught.value.errno == errno.EEXIST
    assert store.list_directory(str(tmp_path)) == ["a", "b"]


def exchange_by_store(first: str, second: str) -> None:
    LocalStore().exchange(BuildToken(second, first))


def test_exchange_swaps(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"of_{name}").touch()
    exchange_by_store(str(tmp_path / "a"), str(tmp_path / "b"))

    found = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*"))
    assert found == ["a", "a/of_b", "b", "b/of_a"]


def test_an_exchange_in_steps_gives_the_first_name_up_at_once(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"of_{name}").touch()
    old = exchange_in_steps(str(tmp_path / "a"), str(tmp_path / "b"))

    assert os.listdir(tmp_path / "b") == ["of_a"]
    assert os.listdir(old) == ["of_b"]
    assert sorted(os.listdir(tmp_path)) == sorted(["b", os.path.basename(old)])
    assert os.path.basename(old).startswith("a-"), "temporary as `a` is"


@pytest.mark.parametrize("exchange", [exchange_by_store, exchange_in_steps])
@pytest.mark.parametrize(
    ("first", "second"), [("absent", "a"), ("a", "absent"), ("a", "a/in"), ("a/in", "a")]
)
def test_an_exchange_that_fails_leaves_both_names_as_they_were(
    exchange: Callable[[str, str], object], tmp_path: Path, first: str, second: str
) -> None:
    (tmp_path / "a" / "in").mkdir(parents=True)
    (tmp_path / "a" / "x").touch()
    with pytest.raises(OSError, match=r"No such file|Invalid argument|not empty") as caught:
        exchange(str(tmp_path / first), str(tmp_path / second))

    assert caught.value.errno in {errno.ENOENT, errno.EINVAL, errno.ENOTEMPTY}
    found = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*"))
    assert found == ["a", "a/in", "a/x"]


def test_no_name_is_ever_absent_during_an_exchange(store: LocalStore, tmp_path: Path) -> None:
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    os.mkdir(first)
    os.mkdir(second)
    done = threading.Event()
    absent = list[str]()

    def watch() -> None:
        while not done.is_set():
            absent.extend(path for path in (first, second) if not os.path.lexists(path))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for _ in range(2000):
            store.exchange(BuildToken(second, first))
    finally:
        done.set()
        watcher.join(20)
    assert absent == []


def test_a_tree_is_removed_and_may_be_absent(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "x").touch()
    store.remove_tree(str(tmp_path / "a"))
    store.remove_tree(str(tmp_path / "a"))

    assert store.list_directory(str(tmp_path)) == []


def test_several_may_remove_one_tree_at_once(store: LocalStore, tmp_path: Path) -> None:
    for i in range(200):
        (tmp_path / "a" / str(i)).mkdir(parents=True)
        (tmp_path / "a" / str(i) / "x").touch()
    barrier = threading.Barrier(4)

    def remove(_: int) -> None:
        barrier.wait(10)
        store.remove_tree(str(tmp_path / "a"))

    in_threads(4, remove)
    assert store.list_directory(str(tmp_path)) == []


def test_of_a_link_to_a_tree_the_link_is_removed(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("a", "absent"):
        (tmp_path / "link").symlink_to(name)
        store.remove_tree(str(tmp_path / "link"))
        assert store.list_directory(str(tmp_path)) == ["a"]

    assert store.list_directory(str(tmp_path / "a")) == ["b"]


def test_a_held_tree_is_removed_when_there_is_no_descriptor_left(store: LocalStore, tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    held = store.make_held(path)
    for name in ("b/c", "d"):
        (tmp_path / "a" / name).mkdir(parents=True)
        (tmp_path / "a" / name / "file").touch()

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    numbers = [os.open("/", os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (numbers[0] + 8, hard))
    try:
        with suppress(OSError):  # until there is none left
            while True:
                numbers.append(os.open("/", os.O_RDONLY))

        with pytest.raises(StorageError):
            store.make_held(str(tmp_path / "new"))
        store.remove_tree(path)
    finally:
        for number in numbers:
            os.close(number)

        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    held.release()
    assert store.list_directory(str(tmp_path)) == []


def test_what_is_made_held_is_held_by_one(store: LocalStore, tmp_path: Path) -> None:
    path = str(tmp_path / "runs" / "a")
    held = store.make_held(path)
    for take in (store.hold, store.make_held):
        with pytest.raises(InUseError):
            take(path)

    held.release()
    store.hold(path).release()
    assert store.list_directory(str(tmp_path / "runs")) == ["a"]


def test_of_many_who_make_a_held_directory_at_once_one_succeeds(store: LocalStore, tmp_path: Path) -> None:
    path, held = str(tmp_path / "a"), list[Hold]()
    barrier = threading.Barrier(4)

    def make(_: int) -> None:
        barrier.wait(10)
        with suppress(InUseError):
            held.append(store.make_held(path))

    in_threads(4, make)
    assert len(held) == 1
    assert store.list_directory(str(tmp_path)) == ["a"]
    held[0].release()


def test_a_file_is_no_tree(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(StorageError) as caught:
        store.remove_tree(str(tmp_path / "file"))
    assert caught.value.errno == errno.ENOTDIR


def test_what_could_be_created_is_writable(store: LocalStore, tmp_path: Path) -> None:
    store.check_writable(str(tmp_path / "a" / "b" / "c"))
    store.check_writable(f"{tmp_path}/a/")

    assert store.list_directory(str(tmp_path)) == []


@pytest.mark.parametrize(
    ("path", "number", "words"),
    [
        ("file/below", errno.ENOTDIR, "file' is not a directory"),
        ("file/below/further", errno.ENOTDIR, "file' is not a directory"),
        ("link/below", errno.ENOENT, "link' is a link that leads nowhere"),
        ("loop/below", errno.ELOOP, "Too many levels of symbolic links"),
        ("x" * 300 + "/y", errno.ENAMETOOLONG, "File name too long"),
    ],
)
def test_what_could_not_be_created_is_told_in_words(
    store: LocalStore, tmp_path: Path, path: str, number: int, words: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")

    with pytest.raises(StorageError, match=words) as caught:
        store.check_writable(str(tmp_path / path))
    assert caught.value.errno == number


def test_a_directory_without_permission_is_not_writable(store: LocalStore, public: Path) -> None:
    (public / "locked").mkdir(mode=0o555)
    (public / "hidden").mkdir(mode=0o000)

    with unprivileged():
        for path, words in (("locked/a", "no permission to write to"), ("hidden/a/b", "Permission denied")):
            with pytest.raises(StorageError, match=words) as caught:
                store.check_writable(str(public / path))
            assert caught.value.errno == errno.EACCES


def read_only_mounts() -> list[str]:
    lines = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [line[1] for line in lines if "ro" in line[3].split(",") and os.path.isdir(line[1])]


@pytest.mark.skipif(not read_only_mounts(), reason="no read-only file system is mounted here")
def test_a_read_only_file_system_is_not_writable(store: LocalStore) -> None:
    path = os.path.join(read_only_mounts()[0], "absent", "a")

    with pytest.raises(StorageError, match="is on a read-only file system") as caught:
        store.check_writable(path)
    assert caught.value.errno == errno.EROFS


@pytest.mark.parametrize(
    "operation",
    [
        LocalStore.read_file,
        LocalStore.size,
        LocalStore.list_directory,
        LocalStore.open_data_file,
        LocalStore.sync_directory,
        lambda store, path: store.write_file(path + "/x", b""),
        lambda store, path: store.create_data_file(path + "/x"),
        lambda store, path: store.rename(path, path + "2"),
        lambda store, path: store.exchange(BuildToken(path + "2", path)),
    ],
)
def test_what_is_absent_is_a_storage_error_with_its_number(
    store: LocalStore, tmp_path: Path, operation: Callable[[LocalStore, str], object]
) -> None:
    path = str(tmp_path / "absent")
    with pytest.raises(PenstockError) as caught:
        operation(store, path)

    assert isinstance(caught.value, StorageError)
    assert caught.value.errno == errno.ENOENT
    assert caught.value.path.startswith(path)
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_a_directory_is_held_by_one_at_a_time(store: LocalStore, tmp_path: Path) -> None:
    first = store.hold(str(tmp_path))
    with pytest.raises(StorageError, match=r"^hold .[^:]*: somebody builds") as caught:
        store.hold(str(tmp_path))
    assert caught.value.errno == errno.EBUSY

    first.release()
    first.release()
    store.hold(str(tmp_path)).release()


def test_a_lock_that_cannot_be_closed_is_a_storage_error(store: LocalStore, tmp_path: Path) -> None:
    held = store.hold(str(tmp_path))
    os.close(held.number)

    with pytest.raises(StorageError, match=r"^release ") as caught:
        held.release()

    assert caught.value.errno == errno.EBADF
    held.release()
    store.hold(str(tmp_path)).release()


def test_what_is_held_may_be_renamed_and_a_new_directory_of_its_name_is_free(
    store: LocalStore, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    held = store.hold(str(tmp_path / "a"))
    (tmp_path / "a").rename(tmp_path / "b")
    (tmp_path / "a").mkdir()

    store.hold(str(tmp_path / "a")).release()
    with pytest.raises(StorageError):
        store.hold(str(tmp_path / "b"))
    held.release()


def test_a_process_that_is_killed_holds_nothing_any_more(store: LocalStore, tmp_path: Path) -> None:
    program = (
        "import sys; from penstock.handlers.stores.local import LocalStore\n"
        f"held = LocalStore().hold({str(tmp_path)!r}); print('held', flush=True); sys.stdin.read()"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(penstock.__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with pytest.raises(StorageError):
            store.hold(str(tmp_path))
        child.kill()

    store.hold(str(tmp_path)).release()


def test_only_directories_are_held(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, number in (("file", errno.ENOTDIR), ("absent", errno.ENOENT)):
        with pytest.raises(StorageError) as caught:
            store.hold(str(tmp_path / name))
        assert caught.value.errno == number


def test_many_files_are_read_at_once(store: LocalStore, tmp_path: Path) -> None:
    sizes = (0, 1, 65_535, 65_536, 65_537, 200_000)
    for size in sizes:
        (tmp_path / str(size)).write_bytes(bytes([size % 251]) * size)

    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("1")
    (tmp_path / "nowhere").symlink_to("absent")
    names = [*map(str, sizes), "link", "absent", "1/below", "folder", "nowhere"]
    paths = [str(tmp_path / name) for name in names]

    expected = [bytes([size % 251]) * size for size in (*sizes, 1)]
    assert store.read_files(paths) == [*expected, None, None, None, None]
    assert store.file_sizes(paths) == [*sizes, 1, None, None, -1, None]


def test_of_many_files_one_cannot_be_read(store: LocalStore, tmp_path: Path) -> None:
    paths = [str(tmp_path), str(tmp_path / ("x" * 300))]

    for ask in (store.read_files, store.file_sizes):
        with pytest.raises(StorageError) as raised:
            ask(paths)

        assert (raised.value.path, raised.value.errno) == (paths[1], errno.ENAMETOOLONG)
