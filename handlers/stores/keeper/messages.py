"""Messages between a keeper and its clients, over a Unix socket of one host and one user.

A message is a length, the number of descriptors that come with it, and msgpack. Each request has one answer,
in order. Both sides know every type of message; what is none of them is refused, and so is what is too long.
Data files are not sent: the answer has descriptors of their memory.

The keeper imports this module, and is to start quickly: it needs msgspec and the standard library.
"""

from __future__ import annotations

__all__ = (
    "ABSENT",
    "MOST_BYTES",
    "MOST_DESCRIPTORS",
    "MOST_DOCUMENT_BYTES",
    "MOST_NAMES",
    "MOST_PATHS",
    "Create",
    "Finish",
    "Found",
    "Get",
    "Head",
    "Hold",
    "KeptStep",
    "List",
    "Look",
    "MakeDirectory",
    "MakeHeld",
    "Move",
    "Names",
    "NoteElsewhere",
    "Opened",
    "Prepare",
    "Put",
    "Refused",
    "Release",
    "Remove",
    "Request",
    "Reserve",
    "Reserved",
    "Room",
    "Share",
    "Status",
    "StatusAnswer",
    "Stop",
    "TakeOver",
    "check_folder",
    "decode_answer",
    "decode_request",
    "default_socket",
    "encode_answer",
    "encode_refusal",
    "encode_request",
    "is_own_peer",
    "peer_process",
)

import errno
import os
import socket
import stat
import struct
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

from msgspec import DecodeError, Meta, Raw, Struct
from msgspec.msgpack import Decoder, decode, encode

MOST_BYTES: Final = 2 * 2**20
"""Of one message."""

MOST_DOCUMENT_BYTES: Final = 2**18
"""A longer file is written and read through a descriptor, as a data file is."""

MOST_DESCRIPTORS: Final = 2
"""With one message. The system takes 253."""

MOST_NAMES: Final = 2000
"""In one answer; the rest of a longer directory is asked for."""

MOST_PATHS: Final = 200
"""In one question."""

_HEAD: Final = struct.Struct("<IB")
_PEER: Final = struct.Struct("3i")  # process, user, group

A = TypeVar("A")
Length: TypeAlias = Annotated[int, Meta(ge=0)]


class Head:
    """The fixed beginning of a message."""

    nbytes: Final = _HEAD.size

    @staticmethod
    def encode(body: bytes, n_descriptors: int = 0) -> bytes:
        """Return it for a body."""
        return _HEAD.pack(len(body), n_descriptors)

    @staticmethod
    def decode(data: bytes | bytearray) -> tuple[int, int]:
        """Return the bytes of the body and the number of descriptors.

        Raises:
            ValueError: If the message is too long, or has too many descriptors.
        """
        nbytes, n_descriptors = _HEAD.unpack(data)
        if nbytes > MOST_BYTES or n_descriptors > MOST_DESCRIPTORS:
            raise ValueError(f"a message of {nbytes} bytes with {n_descriptors} descriptors")

        return nbytes, n_descriptors


class _Message(Struct, frozen=True, array_like=True, tag=True):
    """Paths in messages are relative to the root of the keeper's tree, which is empty."""


class Look(_Message, frozen=True):
    """Asks what is at some paths; the answer is a list of `Found`, None where nothing is."""

    paths: list[str]


class Found(Struct, frozen=True, array_like=True):
    """An entry."""

    is_directory: bool
    nbytes: int
    number: int  #: no other entry of any keeper has it


class List(_Message, frozen=True):
    """Asks for the names in a directory, sorted; the answer is `Names`."""

    path: str
    after: str = ""


class Names(Struct, frozen=True, array_like=True):
    """Some names, and whether there are more after them."""

    names: list[str]
    has_more: bool


class MakeDirectory(_Message, frozen=True):
    """Makes a directory and its parents; it may be there. No answer."""

    path: str


class MakeHeld(_Message, frozen=True):
    """Makes a directory that this connection holds alone; the answer is a `Found`.

    If the connection breaks before the directory was published, it is removed.
    """

    path: str


class Hold(_Message, frozen=True):
    """Holds a directory until this connection ends; the answer is a `Found`."""

    path: str
    is_shared: bool


class Release(_Message, frozen=True):
    """Ends the hold of this connection, which is closed next. There is no answer."""


class Put(_Message, frozen=True):
    """Writes a document; the answer says whether it did: False if it was there with the same content."""

    path: str
    data: bytes
    create: bool


class Get(_Message, frozen=True):
    """Asks for a file; the answer is `Opened`."""

    path: str


class Opened(Struct, frozen=True, array_like=True):
    """A file: a document with its content, or a data file with a descriptor to read it."""

    nbytes: int
    document: bytes | None


class Create(_Message, frozen=True):
    """Creates an empty data file; the answer is a `Found`."""

    path: str


class Reserve(_Message, frozen=True):
    """Gives a data file pages for its first bytes; the answer is `Reserved`."""

    number: int  #: of the file
    nbytes: Length
    expected: Length  #: how many bytes will be asked for in the end, at least
    wants_descriptors: bool  #: two: one to write with, which says that the file is in use; one to map


class Reserved(Struct, frozen=True, array_like=True):
    """The pages that a data file has."""

    nbytes: int
    is_zero: bool  #: whether nothing was written there before
    pages: int  #: the number of this memory; no other one ever has it


class Finish(_Message, frozen=True):
    """Says how long a data file is. Pages that are not needed are given back."""

    number: int
    nbytes: Length
    is_whole: bool  #: False for one of several writers: then it is as long as the longest says


class Move(_Message, frozen=True):
    """Gives an entry another path in one step.

    `absent`: where nothing may be; `replace`: over a file; `exchange`: what is there comes to the old path.
    """

    source: str
    destination: str
    how: Literal["absent", "replace", "exchange"]
    publishes: bool = False  #: whether a build ends with it: then it stays when its connection breaks
    expected: int | None = None  #: the number that the source must have


class Share(_Message, frozen=True):
    """Gives a file a second name."""

    source: str
    destination: str


class Remove(_Message, frozen=True):
    """Removes an entry with all that is in it; it may be absent."""

    path: str
    expected: int | None = None  #: removed only if it has this number


class Room(_Message, frozen=True):
    """Asks how many bytes can still be written; the answer is a number."""


class Prepare(_Message, frozen=True):
    """Asks for data files of these lengths to be made ready, since a save is near. It is not waited for."""

    sizes: list[Length]


class NoteElsewhere(_Message, frozen=True):
    """Says that a directory is whole in another tier, too: it does not keep the keeper from ending."""

    path: str


class TakeOver(_Message, frozen=True):
    """Says that a manager comes to a directory of steps: what finishes the work of one before it is ended."""

    path: str
    environ: dict[str, str]  #: of its process, by which its steps are finished should it die
    folder: str  #: that it works in


class Status(_Message, frozen=True):
    """Asks for a `StatusAnswer`."""


class KeptStep(Struct, frozen=True):
    """A directory that was published, or is being built."""

    path: str
    state: Literal["building", "whole"]
    nbytes: int
    n_files: int
    age_s: float
    is_elsewhere: bool
    n_readers: int


class StatusAnswer(Struct, frozen=True):
    """The state of a keeper. All sizes in bytes."""

    pid: int
    version: str
    socket: str
    uptime_s: float
    limit_bytes: int
    used_bytes: int  #: all of the following together
    kept_bytes: int  #: in files that have a name
    lingering_bytes: int  #: in removed files that a reader still has
    pool_bytes: int  #: in files that are ready to be used again
    pool_files: int
    reused_bytes: int  #: that files got so far with their pages from the pool
    fresh_bytes: int  #: that the system has made so far, for files and to have some ready
    n_connections: int
    steps: list[KeptStep]


class Stop(_Message, frozen=True):
    """Ends the keeper. Unless it is forced, what is in no other tier is an error (EBUSY). No answer else."""

    is_forced: bool


Request: TypeAlias = (
    Look
    | List
    | MakeDirectory
    | MakeHeld
    | Hold
    | Release
    | Put
    | Get
    | Create
    | Reserve
    | Finish
    | Move
    | Share
    | Remove
    | Room
    | Prepare
    | NoteElsewhere
    | TakeOver
    | Status
    | Stop
)


class Refused(Struct, frozen=True, array_like=True):
    """The answer to what cannot be done."""

    errno: int
    problem: str


_REQUESTS: Final[Decoder[Request]] = Decoder(Request)
ABSENT: Final = Refused(errno.ENOENT, "nothing of that kind is there")


def encode_request(request: Request) -> bytes:
    """Return the body of a request."""
    return encode(request)


def decode_request(body: bytes | bytearray) -> Request:
    """Read a request.

    Raises:
        ValueError: If it is none.
    """
    try:
        return _REQUESTS.decode(body)
    except DecodeError as error:  # a ValidationError, too
        raise ValueError(str(error)) from error


def encode_answer(value: object) -> bytes:
    """Return the body of an answer."""
    return encode((True, value))


def encode_refusal(refusal: Refused) -> bytes:
    """Return the body of an answer to what cannot be done."""
    return encode((False, refusal))


def decode_answer(body: bytes | bytearray, type_: type[A]) -> A | Refused:
    """Read an answer, whose type the request says.

    Raises:
        ValueError: If it is none.
    """
    try:
        is_done, value = decode(body, type=tuple[bool, Raw])
        return decode(value, type=type_) if is_done else decode(value, type=Refused)
    except DecodeError as error:
        raise ValueError(str(error)) from error


def default_socket(environ: Any = os.environ) -> str:
    """Return where the keeper of this user listens, if nothing else is said."""
    folder = environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(folder) and os.path.isdir(folder):
        return os.path.join(folder, "penstock", "keeper")

    return f"/tmp/penstock-{os.geteuid()}/keeper"


def check_folder(folder: str) -> None:
    """Return if a folder is this user's own, and no other one can look into it.

    Raises:
        FileNotFoundError: If nothing is there.
        PermissionError: If it is another user's, or a link, or open to others.
    """
    status = os.lstat(folder)
    problem = ""
    if not stat.S_ISDIR(status.st_mode):
        problem = "is no directory"
    elif status.st_uid != os.geteuid():
        problem = f"belongs to user {status.st_uid}, not to {os.geteuid()}"
    elif stat.S_IMODE(status.st_mode) & 0o077:
        problem = f"is open to other users (mode {stat.S_IMODE(status.st_mode):o}, not 700)"
    if problem:
        raise PermissionError(errno.EACCES, problem, folder)


def peer_process(connection: socket.socket) -> int:
    """Return the process at the other end, as the system saw it when it connected."""
    return _peer(connection)[0]


def is_own_peer(connection: socket.socket) -> bool:
    """True if the process at the other end is of the same user, as the system saw when it connected."""
    return _peer(connection)[1] == os.geteuid()


def _peer(connection: socket.socket) -> tuple[int, int, int]:
    """Return the process at the other end, its user and its group."""
    process, user, group = _PEER.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    )
    return process, user, group
