"""The memory of this host's keeper, as a store: `keeper:///run`.

Its files outlive the process that wrote them, and not the keeper. Data files are the keeper's memfds: written
by `pwrite` into pages that it has reserved, read and mapped by a descriptor of their own. Everything else is
a question of some bytes over a Unix socket.
"""

from __future__ import annotations

__all__ = ("KEEPER", "KeeperHold", "KeeperStore")

import errno
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal, TypeVar, final
from weakref import WeakValueDictionary

from penstock.handlers.stores.keeper.connection import Connection, Connections
from penstock.handlers.stores.keeper.drafts import Draft, DraftFile, Drafts
from penstock.handlers.stores.keeper.keeper_files import KeeperDataFile, KeeperReadableFile, PageMappings
from penstock.handlers.stores.keeper.keeper_options import FILE_BYTES, KeeperOptions
from penstock.handlers.stores.keeper.messages import (
    MOST_BYTES,
    MOST_DOCUMENT_BYTES,
    MOST_PATHS,
    Create,
    Found,
    Get,
    List,
    Look,
    MakeDirectory,
    MakeHeld,
    Move,
    Names,
    NoteElsewhere,
    Opened,
    Prepare,
    Put,
    Remove,
    Request,
    Room,
    Share,
    Status,
    StatusAnswer,
    Stop,
    TakeOver,
)
from penstock.handlers.stores.keeper.messages import Hold as HoldRequest
from penstock.handlers.stores.publishing.paths import KEEPER_HOST
from penstock.kernel.errors import (
    BuildChangedError,
    ClaimLostError,
    InUseError,
    KeeperLostError,
    PathError,
    StorageError,
)
from penstock.kernel.memory.buffers import file_memory
from penstock.kernel.protocols.stores import (
    BuildToken,
    Directories,
    Hold,
    NoHold,
    Placement,
    SharedFiles,
)
from penstock.kernel.registry import Scheme

A = TypeVar("A")

_URL: Final = "keeper:"
_LONGEST_VARIABLE: Final = 2**17
"""Bytes; Linux starts no process with one that has as many."""


@final
class KeeperHold(Hold):
    """A hold on a directory, for as long as its connection lasts. It ends with the process.

    Args:
        store: Whose directory it is.
        path: Of the directory, for errors.
        connection: That has taken it, and is used for nothing else.
        number: Of the directory.
    """

    __slots__ = ("__weakref__", "_connection", "_path", "_store", "number")

    def __init__(self, store: KeeperStore, path: str, connection: Connection, number: int) -> None:
        self._store, self._path = store, path
        self._connection = connection
        self.number = number  #: no other directory has it

    def release(self) -> None:
        """Give it up. Idempotent; never fails, and does not block."""
        self._connection.release()

    def break_off(self) -> None:
        """End it so that the keeper, should it only have been silent, removes what was built."""
        self._connection.close()

    def is_at(self, path: str) -> bool:
        """True if the held directory is still at `path`."""
        found = self._store.look([path])[0]
        return found is not None and found.number == self.number

    def confirm(self) -> None:
        """Return if it is still held.

        Raises:
            ClaimLostError: If the keeper has ended, and with it all that it held.
        """
        if not self._connection.is_open:
            raise ClaimLostError(self._path)

    __del__ = release


@final
@dataclass(frozen=True, slots=True)
class _SharedFile(DraftFile):
    """A file of an earlier checkpoint that a draft has, too."""

    memory: memoryview

    @property
    def nbytes(self) -> int:
        """Its length."""
        return len(self.memory)

    def content(self) -> memoryview:
        """Return its bytes."""
        return self.memory


@final
@dataclass(slots=True)
class _Build:
    """The state of one save's build: the claim in its `BuildToken`. As long as it is there, its draft is."""

    draft: Draft = field(default_factory=Draft)
    published: int | None = None  #: the number of what was published; None if nothing was yet
    replaced: int | None = None  #: of what it replaced, which is where it was built, until it is removed


@final
class KeeperStore(Directories, SharedFiles):
    """Files and directories in the memory of a keeper. Every method blocks, for a limited time.

    Paths are URLs, `keeper:///run/7`, or absolute; both lead to the same. There are no links.

    As long as the token of a build is there, all bytes of it are in reach of this process. If the keeper is
    lost, it can be written to its end in memory of this process, and only `publish` fails. What was built, or
    published, can be read.

    Args:
        socket: Where the keeper listens; None for where that of this user does.
        answer_s: How long an answer may take, in seconds. Then it counts as lost.
        file_bytes: A data file that has grown so large is followed by another one.

    Raises:
        ConfigError: If this system has no keepers, or the socket's path is too long.
    """

    __slots__ = ("_connections", "_drafts", "_held", "_mappings", "_placement")

    def __init__(
        self, socket: str | None = None, *, answer_s: float = 10.0, file_bytes: int = FILE_BYTES
    ) -> None:
        self._mappings = PageMappings()
        self._drafts = drafts = Drafts()
        mappings = self._mappings  # the connections do not refer to the store: it ends with its last user

        def give_up(lost: KeeperLostError) -> None:
            mappings.clear()
            drafts.take_over(lost)

        self._connections = Connections(socket, answer_s, on_lost=give_up)
        self._placement = Placement(file_bytes=file_bytes)
        self._held: WeakValueDictionary[str, KeeperHold] = WeakValueDictionary()  # alone, by inner path

    def __deepcopy__(self, memo: object) -> KeeperStore:
        """Return this store: it stands for the keeper."""
        return self

    @property
    def socket(self) -> str:
        """The path at which the keeper listens."""
        return self._connections.path

    # The keeper itself.

    def status(self) -> StatusAnswer:
        """Return what the keeper says of itself.

        Raises:
            KeeperLostError: If there is none.
        """
        return self._connections.call("status", self.socket, Status(), StatusAnswer)

    def stop(self, *, force: bool = False) -> None:
        """End the keeper, and with it all that it holds.

        Args:
            force: Also if it holds what no other tier has.

        Raises:
            InUseError: If it does, and `force` is not set.
            KeeperLostError: If there is none.
        """
        self._connections.call("stop", self.socket, Stop(force), type(None))
        self._connections.close()

    def make_ready(self, nbytes: int) -> None:
        """Have the keeper make pages for a save that is near, as far as it has room. Does not wait for them.

        Args:
            nbytes: Of all data files of that save together.

        Raises:
            KeeperLostError: If there is none.
        """
        whole, rest = divmod(nbytes, self._placement.file_bytes)
        sizes = [self._placement.file_bytes] * whole + [rest]
        self._connections.call("prepare", self.socket, Prepare(sizes), type(None))

    def note_elsewhere(self, path: str) -> None:
        """Say that the checkpoint at `path` is whole in another tier: the keeper may end without it.

        Raises:
            StorageError: If nothing is there.
        """
        self._ask("note", path, NoteElsewhere(_inner(path)), type(None))

    def take_over(self, path: str, options: Mapping[str, str] | None = None) -> None:
        """Say that this process comes to the directory of steps at `path`, to save into it.

        What the keeper has begun for a manager that died is ended: another one goes on with it. Should this
        process die, its own steps are finished with its environment and in its working directory, since these
        say how the root is reached. The keeper holds them in memory alone.

        Args:
            path: Of the directory.
            options: Variables over those of the environment.

        Raises:
            KeeperLostError: If there is no keeper.
        """
        told = TakeOver(_inner(path), _environment(options or {}), os.getcwd())
        self._ask("take over", path, told, type(None))

    def close(self) -> None:
        """Close the connections and give up the mappings that are not in use. The store can be used again."""
        self._connections.close()
        self._mappings.clear()

    # Looking.

    def look(self, paths: Sequence[str]) -> list[Found | None]:
        """Return what is at some paths; None where nothing is."""
        found: list[Found | None] = []
        for start in range(0, len(paths), MOST_PATHS):
            some = paths[start : start + MOST_PATHS]
            asked = [_inner(path) for path in some]
            found += self._drafts.answered(
                asked, partial(self._look, some[0], asked), partial(_looked_at, asked)
            )

        return found

    def _look(self, path: str, asked: Sequence[str]) -> Sequence[Found | None]:
        return self._ask("stat", path, Look(list(asked)), list[Found | None])

    def kind(self, path: str) -> Literal["file", "directory"] | None:
        """Return the kind of entry at `path`; None if there is nothing."""
        found = self.look([path])[0]
        if found is None:
            return None

        return "directory" if found.is_directory else "file"

    def size(self, path: str) -> int:
        """Return the length in bytes of the file at `path`."""
        return self._there("stat", path).nbytes

    def identity(self, path: str) -> object:
        """Return the number of what is at `path`; None if there is nothing."""
        found = self.look([path])[0]
        return None if found is None else found.number

    def list_directory(self, path: str) -> Sequence[str]:
        """Return the names in the directory, sorted."""
        inner = _inner(path)
        return self._drafts.answered([inner], lambda: self._names(path), lambda draft: draft.names(inner))

    def _names(self, path: str) -> Sequence[str]:
        names, after = list[str](), ""
        while True:
            found = self._ask("list", path, List(_inner(path), after), Names)
            names += found.names
            if not found.has_more:
                return names

            after = found.names[-1]

    def list_folders(self, path: str) -> Sequence[str]:
        """Return the names of its subdirectories, sorted."""
        names = self.list_directory(path)
        found = self.look([os.path.join(path, name) for name in names])
        return [name for name, there in zip(names, found, strict=True) if there and there.is_directory]

    def file_sizes(self, paths: Iterable[str]) -> Sequence[int | None]:
        """Return the size of each file in bytes; -1 for a directory, None where there is nothing."""
        found = self.look(list(paths))
        return [None if there is None else -1 if there.is_directory else there.nbytes for there in found]

    def free_bytes(self, path: str) -> int:
        """Return how many bytes the keeper still takes, those of files that are ready included."""
        return self._ask("free", path, Room(), int)

    @property
    def placement(self) -> Placement:
        """Large chunks begin on a page, so that they can be mapped."""
        return self._placement

    def check_writable(self, path: str) -> None:
        """Raise `StorageError` if a file is in the way, or there is no keeper."""
        parents = [path]
        while _inner(parents[-1]):
            parents.append(os.path.dirname(parents[-1]))

        for parent, found in zip(parents[1:], self.look(parents)[1:], strict=True):
            if found is not None and not found.is_directory:
                raise StorageError("create", path, f"{parent!r} is not a directory", errno.ENOTDIR)

    # Directories.

    def make_directory(self, path: str) -> None:
        """Create a directory and its missing parents; it may exist already."""
        inner = _inner(path)
        self._drafts.answered(
            [inner], lambda: self._ask("mkdir", path, MakeDirectory(inner), type(None)), _nothing
        )
        self._drafts.note(inner, None)

    def sync_directory(self, path: str) -> None:
        """Do nothing: the keeper has every name when it answers."""

    def remove_tree(self, path: str) -> None:
        """Remove a directory and everything in it. It may be absent."""
        inner = _inner(path)
        self._drafts.answered([inner], lambda: self._ask("remove", path, Remove(inner), type(None)), _nothing)
        draft = self._drafts.of([inner])
        if draft is not None and not self._drafts.forget(inner):
            draft.remove(inner)

    def rename(self, source: str, destination: str) -> None:
        """Rename in one step. It is an error if the destination exists.

        Raises:
            BuildChangedError: If `source` is held, and another program has put something else there.
        """
        held, draft = self._held.get(_inner(source)), self._drafts.at(_inner(source))
        number = None if held is None else held.number
        self._drafts.answered(
            [_inner(source)],
            lambda: self._move("rename", source, destination, "absent", expected=number),
            lambda _: None,
        )
        if draft is not None:
            self._drafts.forget(_inner(source), draft)
            self._settle(draft, destination)

    # Files.

    def read_file(self, path: str) -> bytes:
        """Return the content of the file."""
        with closing(self.open_data_file(path)) as file:
            return file.whole()

    def write_file(self, path: str, data: bytes, *, create: bool = False) -> bool:
        """Write a whole file in one step; see `Store.write_file`."""
        inner, data = _inner(path), bytes(data)
        is_new = self._drafts.answered(
            [inner], lambda: self._put(path, data, create), lambda draft: _is_new(draft, inner, data, create)
        )
        self._drafts.note(inner, data)
        return is_new

    def _put(self, path: str, data: bytes, create: bool) -> bool:
        if len(data) <= MOST_DOCUMENT_BYTES:
            return self._ask("write", path, Put(_inner(path), data, create), bool)

        new = f"{path}.penstock-new-{uuid.uuid4().hex}"
        try:
            made = self._ask("create", new, Create(_inner(new)), Found)
            with closing(self._data_file(new, made.number)) as file:
                file.allocate(len(data))
                file.write_at(0, [memoryview(data)])
                file.sync()

            self._move("write", new, path, "absent" if create else "replace")
        except StorageError as error:
            with suppress(StorageError):
                self.remove_tree(new)
            if error.errno != errno.EEXIST or not create or self.read_file(path) != data:
                raise

            return False

        return True

    def create_data_file(self, path: str) -> KeeperDataFile:
        """Create a file, which must not exist yet, for writing at chosen offsets."""
        inner = _inner(path)
        made = self._drafts.answered(
            [inner],
            lambda: self._ask("create", path, Create(inner), Found),
            lambda draft: _made_in(draft, inner),
        )
        file = self._data_file(path, made.number, self._drafts.of([inner]))
        self._drafts.note(inner, file)
        return file

    def _data_file(self, path: str, number: int, draft: Draft | None = None) -> KeeperDataFile:
        return KeeperDataFile(self._connections, self._mappings, path, number, is_alone=True, draft=draft)

    def open_for_writing(self, path: str) -> KeeperDataFile:
        """Open a data file that another process has created; see `SharedFiles`."""
        found = self._there("open", path)
        if found.is_directory:
            raise StorageError("open", path, "is a directory", errno.EISDIR)

        return KeeperDataFile(self._connections, self._mappings, path, found.number, is_alone=False)

    def open_data_file(self, path: str) -> KeeperReadableFile:
        """Open a file for reading at chosen offsets."""
        found = self._content(path)
        if not isinstance(found, tuple):
            return KeeperReadableFile(path, len(found), found)

        opened, descriptors = found
        return KeeperReadableFile(path, opened.nbytes, descriptors[0] if descriptors else opened.document)

    def map_file(self, path: str) -> memoryview:
        """Map a whole file, read-only. Its memory stays until the last view is gone."""
        found = self._content(path)
        if not isinstance(found, tuple):
            return memoryview(found)

        opened, descriptors = found
        if not descriptors:
            return memoryview(opened.document or b"")
        try:
            return file_memory(descriptors[0], opened.nbytes)
        except OSError as error:
            raise StorageError.of("map", path, error) from error
        finally:
            os.close(descriptors[0])

    def share(self, source: str, destination: str) -> Literal["link"]:
        """Give the file at `source` a second name."""
        inner = _inner(destination)
        self._ask("share", destination, Share(_inner(source), inner), type(None))
        if self._drafts.of([inner]) is not None:
            self._drafts.note(inner, _SharedFile(self.map_file(destination)))

        return "link"

    # Builds.

    def begin_build(self, final: str, beside: str, file: str | None = None) -> BuildToken:
        """Return `beside` as the place to build. The caller holds it while it builds there."""
        build = _Build()
        self._drafts.put(_inner(beside), build.draft)
        return BuildToken(final, beside, file, build)

    def publish(self, token: BuildToken) -> None:
        """Give what was built its final path, which must be free, in one step. From then on it outlives us.

        Raises:
            BuildChangedError: If another program was at work there; then it is not published.
            KeeperLostError: If the keeper is lost. What was built can still be read at the place.
        """
        self._publish(token, "absent")

    def exchange(self, token: BuildToken) -> str:
        """Swap what was built with what it replaces, in one step.

        Raises:
            BuildChangedError: If another program was at work there; then nothing has changed.
            KeeperLostError: As `publish`.
        """
        replaced = self._there("exchange", token.final).number
        self._publish(token, "exchange")
        _build_of(token).replaced = replaced
        return token.built

    def discard(self, token: BuildToken) -> None:
        """Remove what was built; or, after its publication, what it replaced.

        Raises:
            BuildChangedError: If another program took away what was published; then what it replaced stays.
        """
        build = _build_of(token)
        if build.draft.lost is not None:  # the keeper removes what a connection has built that breaks
            self._drafts.forget(_inner(token.place), build.draft)
            return
        if build.replaced is not None:
            if self.identity(token.final) != build.published:
                problem = "another program has renamed, removed or replaced what this save built"
                raise BuildChangedError("publish", token.final, problem, token.built)

            self._ask("remove", token.built, Remove(_inner(token.built), build.replaced), type(None))
            build.replaced = None

        if build.published is None or token.file is not None:
            held = self._held.get(_inner(token.place))
            number = None if held is None else held.number
            self._ask("remove", token.place, Remove(_inner(token.place), number), type(None))
            self._drafts.forget(_inner(token.place), build.draft)

    def _settle(self, draft: Draft, path: str) -> None:
        draft.move(_inner(path))
        self._drafts.put(_inner(path), draft)

    def _publish(self, token: BuildToken, how: Literal["absent", "exchange"]) -> None:
        draft = _build_of(token).draft
        if draft.lost is not None:
            raise KeeperLostError(self.socket, draft.lost)

        held, expected = self._held.get(_inner(token.place)), None
        if held is not None:
            if not held.is_at(token.place):
                problem = "another program has moved or removed it while this save was building"
                raise BuildChangedError("publish", token.built, problem)

            expected = held.number if token.file is None else None

        built = self._there("publish", token.built).number if expected is None else expected
        self._move("publish", token.built, token.final, how, publishes=True, expected=built)
        _build_of(token).published = built
        self._drafts.forget(_inner(token.place), draft)
        if token.file is None:
            self._settle(draft, token.final)

    # Holds.

    def hold(self, path: str) -> KeeperHold:
        """Hold the directory alone."""
        hold = self._hold(path, HoldRequest(_inner(path), False))
        self._held[_inner(path)] = hold
        return hold

    def hold_reading(self, path: str) -> KeeperHold:
        """Hold the directory together with other readers."""
        return self._hold(path, HoldRequest(_inner(path), True))

    def make_held(self, path: str) -> Hold:
        """Create the directory at `path`, held, and its missing parents.

        If this process ends before what is built there is published, the keeper removes it.

        Raises:
            InUseError: If something is there.
        """
        inner = _inner(path)
        draft = self._drafts.at(inner)
        try:
            hold = self._hold(path, MakeHeld(inner))
        except KeeperLostError as lost:
            if draft is None:
                raise

            draft.begin(inner, 0)
            draft.take_over(lost)
            return NoHold()
        except StorageError as error:
            if error.errno == errno.EEXIST:
                raise InUseError(path) from error

            raise

        self._held[inner] = hold
        if draft is not None:
            draft.begin(inner, hold.number, hold.break_off)

        return hold

    def _hold(self, path: str, request: Request) -> KeeperHold:
        connection = self._connections.open()
        try:
            found, _ = connection.call("hold", path, request, Found)
        except BaseException:
            connection.close()
            raise

        return KeeperHold(self, path, connection, found.number)

    # Asking.

    def _ask(self, operation: str, path: str, request: Request, answer: type[A]) -> A:
        return self._connections.call(operation, path, request, answer)

    def _there(self, operation: str, path: str) -> Found:
        found = self.look([path])[0]
        if found is None:
            raise StorageError(operation, path, "nothing is there", errno.ENOENT)

        return found

    def _content(self, path: str) -> tuple[Opened, list[int]] | bytes | memoryview:
        """Return a file as the keeper opens it, or its bytes in a draft."""
        inner = _inner(path)
        found: tuple[Opened, list[int]] | bytes | memoryview = self._drafts.answered(
            [inner],
            lambda: self._connections.call_for_file("open", path, Get(inner), Opened),
            lambda draft: draft.content(inner),
        )
        return found

    def _move(
        self,
        operation: str,
        source: str,
        destination: str,
        how: Literal["absent", "replace", "exchange"],
        *,
        publishes: bool = False,
        expected: int | None = None,
    ) -> None:
        move = Move(_inner(source), _inner(destination), how, publishes, expected)
        # What is in the way is at the destination; what is absent or another one is at the source.
        try:
            self._ask(operation, destination, move, type(None))
        except StorageError as error:
            if error.errno == errno.ESTALE:
                raise BuildChangedError(operation, destination, error.problem) from error
            if error.errno == errno.ENOENT:
                raise StorageError(operation, source, error.problem, errno.ENOENT) from error

            raise


def _inner(path: str) -> str:
    """Return the path in the keeper's tree: without the scheme and the host, relative to its root."""
    if path.startswith(_URL):
        path = path[len(_URL) :]
        if path.startswith("//"):
            path = path[2:].partition("/")[2]

    return path.strip("/")


def _environment(options: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of this process under `options`; if all are too much, without the longest."""
    found: dict[str, str] = {}
    room = MOST_BYTES // 2
    for name, text in sorted({**os.environ, **options}.items(), key=lambda each: len(each[1])):
        pair = f"{name}={text}".encode(errors="surrogateescape")
        room -= len(pair)
        if room > 0 and len(pair) < _LONGEST_VARIABLE:
            # A message has texts alone. A path that is none is of no use in one of ours.
            found[name] = text.encode(errors="replace").decode()

    return found


def _looked_at(paths: Sequence[str], draft: Draft) -> Sequence[Found | None]:
    return [draft.look(path) for path in paths]


def _nothing(_: Draft) -> None:
    """Do nothing: the draft notes it afterwards."""


def _is_new(draft: Draft, path: str, data: bytes, create: bool) -> bool:
    """Return what `Put` answers, of a draft."""
    if not create or draft.look(path) is None:
        return True
    if bytes(draft.content(path)) != data:
        raise StorageError("write", path, "exists with another content", errno.EEXIST)

    return False


def _made_in(draft: Draft, path: str) -> Found:
    """Return what `Create` answers, of a draft."""
    if draft.look(path) is not None:
        raise StorageError("create", path, "exists", errno.EEXIST)

    return Found(is_directory=False, nbytes=0, number=0)


def _build_of(token: BuildToken) -> _Build:
    return token.claim if isinstance(token.claim, _Build) else _Build()


def _open_keeper(url: str, options: KeeperOptions) -> KeeperStore:
    host = url.partition("://")[2]
    if host not in {"", KEEPER_HOST}:
        raise PathError(url, f"names a host; only the keeper of this one is reached: {_URL}///{host}")

    return KeeperStore(options.socket, answer_s=options.answer_s, file_bytes=options.file_bytes)


KEEPER: Final = Scheme(_open_keeper)
"""Of `keeper:///`."""
