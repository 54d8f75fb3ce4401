"""A bucket as a store of checkpoints."""

from __future__ import annotations

__all__ = ("BUCKET", "BucketStore")

import errno
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from threading import Lock
from typing import Any, Final, Literal, final

from penstock.handlers.stores.buckets import connections
from penstock.handlers.stores.buckets.bucket_builds import MARK, Build, Builds, Left, marked_folders
from penstock.handlers.stores.buckets.bucket_claims import CLAIM, LEASE_S, Claims
from penstock.handlers.stores.buckets.bucket_files import BucketDataFile, BucketReadableFile
from penstock.handlers.stores.buckets.bucket_options import BucketOptions
from penstock.handlers.stores.buckets.long_files import BucketScratch, LongFile
from penstock.handlers.stores.buckets.object_client import ObjectClient
from penstock.handlers.stores.buckets.object_errors import NO_BUCKET
from penstock.handlers.stores.buckets.objects import Listing, Objects
from penstock.handlers.stores.buckets.snapshots import BucketSnapshot, begin_snapshot, decoded_snapshot
from penstock.kernel.errors import StorageError
from penstock.kernel.pipeline.together import at_once
from penstock.kernel.protocols.stores import BuildToken, Hold, ObjectStore, Placement, RequestFigures
from penstock.kernel.registry import Scheme

# Eight requests under way hold 128 MiB, as much as a save may have in flight.
FILE_BYTES: Final = 16 * 2**20

_PARTS: Final = 9000
"""Of one upload. Amazon takes 10,000."""

_FEW: Final = 3
"""So many files of a folder are asked for one by one; of more, the folder is listed."""


@final
class BucketStore(ObjectStore):
    """The objects of one bucket, as `Store` wants them. Paths are URLs: `s3://bucket/run/step_100`.

    A prefix is a directory once something is below it, and a published checkpoint once its mark is. One
    that is claimed and has no mark is not there. What is built has its final keys from the first.

    It can list folders, copy objects on the server's side and say how bytes are placed. Its builds and holds
    are leases. It cannot replace, rename, lock or map anything, and other libraries cannot write into it.

    Args:
        url: Of the bucket, without a slash at the end.
        connect: Returns obstore's client, given the module `obstore.store`. Called once, by the first
            method that asks the server anything.
        file_bytes: The length of a data file, which is held in memory until it is put.
        single_writer: Whether a server that ignores conditions is used all the same.
        lease_s: What is claimed and not renewed for so many seconds may be taken over.
        tensorstore: What TensorStore opens the bucket by, but for the path; None if it cannot.
        objects: What makes the requests; None for obstore.
    """

    __slots__ = ("_builds", "_client", "_placement", "_tensorstore", "_uploading", "url")

    def __init__(
        self,
        url: str,
        connect: Callable[[Any], Any],
        *,
        file_bytes: int = FILE_BYTES,
        single_writer: bool = False,
        lease_s: float = LEASE_S,
        tensorstore: Mapping[str, Any] | None = None,
        objects: Objects | None = None,
    ) -> None:
        self.url = url
        self._tensorstore = tensorstore
        #: Chunks are one after another without gaps: what is read from here is copied anyway.
        #: A chunk of more than half a file is one by itself: it is put from where it is.
        self._placement = Placement(
            file_bytes=max(file_bytes // 2, 1),
            page_bytes=1,
            page_from_bytes=2**62,
            line_bytes=1,
            document_bytes=file_bytes,
            full_files=1,
        )
        self._client: Objects = ObjectClient(url, connect) if objects is None else objects
        claims = Claims(self._client, self, single_writer=single_writer, lease_s=lease_s)
        self._builds = Builds(self._client, claims)
        self._uploading = Lock()

    @property
    def placement(self) -> Placement:
        return self._placement

    @property
    def over_network(self) -> bool:
        return True

    def kvstore_spec(self, directory: str) -> dict[str, Any] | None:
        if self._tensorstore is None:
            return None

        return {**self._tensorstore, "path": f"{self._key(directory)}/"}

    def request_figures(self) -> RequestFigures:
        """Return how many requests were sent so far, and what became of them."""
        return self._client.figures()

    def relies_on_single_writer(self) -> bool:
        """True if the server was found to ignore conditions, so that nothing keeps two savers apart."""
        return not self._client.uses_conditions

    def kind(self, path: str) -> Literal["file", "directory"] | None:
        key, build = self._located(path)
        if build is not None:
            if path == build.place:
                return "directory" if not build.is_shared or self._builds.is_current(build) else None
            if self._client.has_below(key):
                return "directory"

            return "file" if self._held_mark(build, key) or self._client.head(key) else None
        if not key or self._client.head(f"{key}/{MARK}") is not None:
            return "directory"
        if self._client.head(key) is not None:
            return "file"

        # Asked last: where nothing is, as before a save, no caller need know of a claim.
        return (
            "directory" if self._client.has_below(key) and not self._builds.claims.is_claimed(key) else None
        )

    def size(self, path: str) -> int:
        key, build = self._located(path)
        if build is not None and (held := self._held_mark(build, key)) is not None:
            return len(held)

        found = self._client.head(key)
        if found is None:
            raise _absent("head", path)

        return found.size

    def identity(self, path: str) -> object:
        """Return the content of the mark, which names the save; of an object its tag."""
        key, build = self._located(path)
        if build is not None:
            return build.published_mark()

        mark = self._client.read(f"{key}/{MARK}") if key else None
        if mark is not None:
            return mark[0]

        found = self._client.head(key) if key else None
        if found is not None:
            return (found.tag, found.modified)

        kind = self.kind(path)
        return None if kind is None else (kind, key)  # else all folders without a mark would seem to be one

    def snapshot(self, path: str) -> BucketSnapshot | None:
        """List what is published at `path`, so that most of what a restore asks is known; see `Snapshot`."""
        key, build = self._located(path)
        return None if build is not None or not key else begin_snapshot(self, self._client, path, key)

    def shared_snapshot(self, path: str, encoded: bytes) -> BucketSnapshot | None:
        """Return what another process of this job knows of what is published at `path`; see `Snapshot`."""
        key, build = self._located(path)
        return None if build is not None else decoded_snapshot(self, self._client, path, key, encoded)

    def list_directory(self, path: str) -> Sequence[str]:
        key, listed = self._listed(path)
        return sorted({*self._visible(key, listed), *[name for name in listed.files if CLAIM not in name]})

    @property
    def lease_s(self) -> float:
        """For how many seconds a claim lasts that is not renewed."""
        return self._builds.claims.lease_s

    def hold_root(self, path: str) -> Hold:
        """Hold a directory of steps. What another process held and did not renew in time is taken over.

        Raises:
            InUseError: If another one holds it.
        """
        return self._builds.hold(self._key(path))

    def renew_leases(self) -> None:
        """Renew the leases of builds and holds, and retry removals that failed."""
        self._builds.renew()

    def marked_folders(self, path: str, among: Collection[str] | None = None) -> Sequence[str]:
        """Return the names of the published checkpoints right below a prefix.

        Of up to 2,000 objects below it one or two requests tell. Of more, each name takes a request.
        """
        return marked_folders(self._client, self._key(path), among)

    def is_unmarked(self, path: str) -> bool:
        """True if something is there that is no checkpoint, holds none, and is no save's."""
        return self._builds.is_unmarked(self._key(path))

    def list_folders(self, path: str) -> Sequence[str]:
        """Return the names of the prefixes right below a prefix, without those that are being built."""
        key, listed = self._listed(path)
        return sorted(self._visible(key, listed))

    def check_writable(self, path: str) -> None:
        """Do nothing: that is only known by trying."""

    def make_directory(self, path: str) -> None:
        """Do nothing: a prefix is there once something is below it."""

    def sync_directory(self, path: str) -> None:
        """Do nothing: what was put is durable."""

    def remove_tree(self, path: str) -> None:
        """Remove all objects below a prefix, beginning with the mark.

        Raises:
            InUseError: If a checkpoint is being built or removed right there.
        """
        key, build = self._located(path)
        if build is None:
            self._builds.remove(key)
            return

        if build.is_shared and path != build.place:  # others write there, too
            self._client.delete(list(self._client.walk(key)))
            return

        gone = [own for own in sorted(build.created) if own.startswith(f"{key}/")]
        self._client.delete(gone)
        build.created.difference_update(gone)
        if path == build.place:
            build.mark = None

    def read_file(self, path: str) -> bytes:
        key, build = self._located(path)
        if build is not None and (held := self._held_mark(build, key)) is not None:
            return held

        found = self._client.read(key)
        if found is None:
            raise _absent("get", path)

        return found[0]

    def read_files(self, paths: Iterable[str]) -> Sequence[bytes | None]:
        """Return the content of each file, by one request for each; None where there is none."""
        return at_once(self._read_if_there, list(paths))

    def _read_if_there(self, path: str) -> bytes | None:
        try:
            return self.read_file(path)
        except StorageError as error:
            if error.errno != errno.ENOENT or error.problem == NO_BUCKET:
                raise

            return None

    def file_sizes(self, paths: Iterable[str]) -> Sequence[int | None]:
        """Return the length of each file; -1 for a folder, None for nothing. Many in a folder are listed."""
        asked = list(paths)
        in_folder = Counter([path.rpartition("/")[0] for path in asked])
        listed: dict[str, int] = {}
        for folder, n_files in in_folder.items():
            key, build = self._located(folder)
            if n_files > _FEW and build is None:
                found = self._client.list(key)
                if found.sizes:
                    listed |= {f"{folder}/{name}": -1 for name in found.folders}
                    listed |= {
                        f"{folder}/{name}": size for name, size in zip(found.files, found.sizes, strict=True)
                    }

        def size(path: str) -> int | None:
            return listed[path] if path in listed else self._size_if_there(path)

        return at_once(size, asked)

    def _size_if_there(self, path: str) -> int | None:
        key, build = self._located(path)
        if build is not None and (held := self._held_mark(build, key)) is not None:
            return len(held)

        found = self._client.head(key)
        if found is not None:
            return found.size

        return -1 if self._client.has_below(key) else None

    def write_file(self, path: str, data: bytes, *, create: bool = False) -> bool:
        key, build = self._located(path)
        if build is not None and build.file is None and key == f"{build.final}/{MARK}":
            build.mark = data  # it is put when all else is there
            return True
        if build is None and not create:
            self._client.put(key, data)
            return True

        created = self._client.create(key, data) if build is None else self._builds.create(build, key, data)
        if created == "other":
            raise StorageError("create", path, "is there with another content", errno.EEXIST)

        return created == "created"

    def create_data_file(self, path: str) -> BucketDataFile:
        """Begin an object, which is put when it is synced. Until then its bytes are held in memory."""
        key, build = self._located(path)
        if build is None and self._client.head(key) is not None:  # else its creation says so
            raise StorageError("create", path, "is there already", errno.EEXIST)

        def put(data: memoryview) -> None:
            created = (
                self._client.create(key, data) if build is None else self._builds.create(build, key, data)
            )
            if created == "other":
                raise StorageError("create", path, "is there with another content", errno.EEXIST)

        return BucketDataFile(put, path)

    def create_long_file(self, path: str, nbytes: int) -> BucketDataFile | LongFile:
        """Begin a file that may be longer than memory. Of that, each thread that writes takes a part.

        Raises:
            StorageError: With `errno.EFBIG` if the server could not copy it to where it belongs.
        """
        if nbytes <= self.placement.document_bytes:
            return self.create_data_file(path)

        most = self._client.most_copied
        if most is not None and nbytes > most:
            said = f"would have {nbytes} bytes, of at most {most} for one file in {self.url}"
            raise StorageError("create", path, f"{said}; save a folder, of shorter files", errno.EFBIG)

        key, build = self._located(path)
        if build is None and self._client.head(key) is not None:  # else its creation says so
            raise StorageError("create", path, "is there already", errno.EEXIST)

        scratch = BucketScratch(self._client, self._builds, build, key, self._uploading)
        return LongFile(scratch, path, nbytes, max(self.placement.document_bytes, -(-nbytes // _PARTS)))

    def open_data_file(self, path: str) -> BucketReadableFile:
        return BucketReadableFile(self._client, self._located(path)[0], self.size(path))

    def share(self, source: str, destination: str) -> Literal["copy"]:
        """Have the server copy an object."""
        key, build = self._located(destination)
        if self._client.head(key) is not None:
            raise StorageError("share", destination, "is there already", errno.EEXIST)
        if build is not None:
            build.created.add(key)

        self._client.copy(self._located(source)[0], key)
        return "copy"

    def begin_build(self, final: str, beside: str, file: str | None = None) -> BuildToken:
        """Claim `final`, and let a save build at `beside`, whose objects get their final keys at once.

        Raises:
            InUseError: If another save claims it.
            StorageError: With `errno.EEXIST` if something is published there.
            UnsupportedByStoreError: If the server does not keep to conditions.
        """
        return BuildToken(final, beside, file, self._builds.begin(self._key(final), beside, file))

    def begin_shared_build(self, final: str, beside: str) -> BuildToken:
        """Claim `final` as `begin_build` does. The last name of the place is the token of the claim."""
        build = self._builds.begin(self._key(final), beside, None)
        return BuildToken(final, self._builds.share(build), None, build)

    def join_build(self, final: str, place: str) -> BuildToken:
        return BuildToken(final, place, None, self._builds.join(self._key(final), place))

    def take_back(self, token: BuildToken) -> bool:
        return self._builds.take_back(_build(token))

    def publish(self, token: BuildToken) -> None:
        """Put the mark. See `Builds.publish` for what it raises."""
        self._builds.publish(_build(token))

    def discard(self, token: BuildToken) -> None:
        self._builds.discard(_build(token))

    def collect(self, path: str, older_than_s: float | None = None) -> Mapping[str, Left]:
        """Remove what ended savers left at a path and right below it, or publish what was whole.

        `older_than_s` is for those whose process cannot be asked, as on another machine, if their lease is
        longer, or they have none. If the process was only paused, it finds out, and publishes nothing.
        """
        key = self._key(path)
        names = [name for name in self._client.list(key).files if name.endswith(CLAIM)]
        at = f"{key}/" if key else ""
        found: dict[str, Left] = {}
        for claimed in (*([key] if key else []), *[at + name.removesuffix(CLAIM) for name in names]):
            left = self._builds.collect(claimed, older_than_s)
            if left is not None:
                found[self._client.path(claimed)] = left

        return found

    def _listed(self, path: str) -> tuple[str, Listing]:
        key, build = self._located(path)
        listed = self._client.list(key)
        if build is not None and path == build.place and build.mark is not None:
            listed = Listing(listed.folders, [*listed.files, MARK])
        if key and build is None and not (listed.folders or listed.files):
            if self._client.head(f"{key}/{MARK}") is not None:
                said = "is there, and this server's list does not show it yet: try again in a minute"
                raise StorageError("list", path, said, errno.EAGAIN)

            raise _absent("list", path)

        return key, listed

    def _visible(self, key: str, listed: Listing) -> set[str]:
        """Return the prefixes that are neither being built nor remains of a dead save."""
        claimed = {name.removesuffix(CLAIM) for name in listed.files if name.endswith(CLAIM)}
        folders = {name for name in listed.folders if CLAIM not in name}
        at = f"{key}/" if key else ""
        return {
            name
            for name in folders
            if name not in claimed or self._client.head(f"{at}{name}/{MARK}") is not None
        }

    def _located(self, path: str) -> tuple[str, Build | None]:
        """Return the key of a path, and the save that builds there, if one does."""
        build = self._builds.of(path)
        return (self._key(path), None) if build is None else (build.prefix + path[len(build.place) :], build)

    def _held_mark(self, build: Build, key: str) -> bytes | None:
        return build.mark if build.file is None and key == f"{build.final}/{MARK}" else None

    def _key(self, path: str) -> str:
        if path != self.url and not path.startswith(f"{self.url}/"):
            raise StorageError("find", path, f"is not in {self.url}", errno.EINVAL)

        return path[len(self.url) + 1 :].rstrip("/")


def _build(token: BuildToken) -> Build:
    assert isinstance(token.claim, Build), "a token of this store"
    return token.claim


def _absent(operation: str, path: str) -> StorageError:
    return StorageError(operation, path, "nothing is there", errno.ENOENT)


def _open_bucket(url: str, options: BucketOptions) -> BucketStore:
    name = url.partition("://")[2]
    return BucketStore(
        url,
        connections.connect(name, options),
        file_bytes=options.file_bytes,
        single_writer=options.single_writer,
        lease_s=options.lease_s,
        tensorstore=connections.tensorstore_spec(name, options),
    )


BUCKET: Final = Scheme(_open_bucket)
"""Of `s3://`, `gs://` and `az://`: the class of the options says which. Sizes are the options', too."""
