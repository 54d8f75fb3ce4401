"""Tests of optional capabilities of stores. Public in `penstock.testing`."""

from __future__ import annotations

__all__ = (
    "ExchangeConformance",
    "ForeignFilesConformance",
    "FreeSpaceConformance",
    "HoldConformance",
    "KvStoreConformance",
    "ListingConformance",
    "LongFileConformance",
    "MappingConformance",
    "RenameConformance",
    "SharingConformance",
    "UntrustedFilesConformance",
    "WritingTogetherConformance",
)

import errno
import os
from contextlib import closing
from functools import partial
from pathlib import Path

import anyio
import numpy as np

from penstock.checkpointer.checkpointer import Checkpointer
from penstock.kernel.concurrency.threads import await_future
from penstock.kernel.errors import LinkOutsideError, StorageError
from penstock.kernel.protocols.stores import Hold
from penstock.testing.operation_faults import backends, demand, refuses
from penstock.testing.store_conformance import StoreCase

NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP}


class ExchangeConformance(StoreCase):
    """Tests of `Directories`: replacing a checkpoint in one step."""

    def test_exchange_publishes_and_leaves_what_was_there_at_the_place(self, tmp_path: Path) -> None:
        store, final = self.make_store().directories, f"{self.root(tmp_path)}/final"
        assert store is not None, "the store must have `directories`"
        store.publish(self.build(store, final, b"first"))
        before, token = store.identity(final), self.build(store, final, b"second")
        store.exchange(token)
        found = store.read_file(f"{final}/file"), store.read_file(f"{token.place}/file")
        demand(found == (b"second", b"first"), "exchange must swap all that is in two directories")
        demand(store.identity(final) != before, "exchanged directories must have new identities")
        store.discard(token)
        demand(
            list(store.list_directory(self.root(tmp_path))) == ["final"],
            "discard must remove what was replaced",
        )


class FreeSpaceConformance(StoreCase):
    """Tests of `free_bytes`: how much room is left."""

    def test_the_room_is_told_also_where_nothing_lies_yet(self, tmp_path: Path) -> None:
        store, root = self.make_store(), self.root(tmp_path)
        for path in (root, f"{root}/absent/and/deeper"):
            free = store.free_bytes(path)
            demand(free is None or free >= 0, "free_bytes must return a number of bytes, or None")


class RenameConformance(StoreCase):
    """Tests of `Directories`: moving a checkpoint in one step."""

    def test_what_is_renamed_is_at_its_new_path_alone(self, tmp_path: Path) -> None:
        store, root = self.make_store().directories, self.root(tmp_path)
        assert store is not None, "the store must have `directories`"
        for name in ("a", "b"):
            store.publish(self.build(store, f"{root}/{name}", name.encode()))

        error = refuses(partial(store.rename, f"{root}/a", f"{root}/b"), StorageError, "renaming over b")
        demand(isinstance(error, StorageError) and error.errno == errno.EEXIST, "and its errno is EEXIST")
        store.rename(f"{root}/a", f"{root}/c")
        demand(store.kind(f"{root}/a") is None, "a renamed directory must not be under its old name")
        demand(store.read_file(f"{root}/c/file") == b"a", "the content must be under the new name")
        refuses(partial(store.rename, f"{root}/absent", f"{root}/d"), StorageError, "renaming nothing")


class SharingConformance(StoreCase):
    """Tests of `share`: one content in two checkpoints."""

    def test_what_is_shared_stays_or_is_refused_with_a_number(self, tmp_path: Path) -> None:
        store, root = self.make_store(), self.root(tmp_path)
        store.make_directory(f"{root}/a")
        store.write_file(f"{root}/a/file", b"bytes")
        try:
            way = store.share(f"{root}/a/file", f"{root}/b")
        except StorageError as error:
            demand(error.errno in NO_LINKS, f"a store that cannot must say so by errno, not {error.errno}")
            return

        store.sync_file(f"{root}/b")

        demand(way in {"link", "copy"}, f"share must return 'link' or 'copy', not {way!r}")
        refuses(partial(store.share, f"{root}/a/file", f"{root}/b"), StorageError, "sharing over a file")
        store.remove_tree(f"{root}/a")
        demand(
            store.read_file(f"{root}/b") == b"bytes",
            "shared content must outlive the first file",
        )


class LongFileConformance(StoreCase):
    """Tests of `create_long_file`: files of a known length, which may be longer than memory."""

    def test_what_was_written_in_any_order_is_there_at_once(self, tmp_path: Path) -> None:
        store, root = self.make_store(), self.root(tmp_path)
        store.make_directory(root)
        content = np.random.default_rng(0).integers(0, 255, 3 * 2**20 + 5, np.uint8)
        with closing(store.create_long_file(f"{root}/file", len(content))) as file:
            for offset in reversed(range(0, len(content), 700_001)):
                file.write_at(offset, [content[offset : offset + 9].data])
                file.write_at(offset + 9, [content[offset + 9 : offset + 700_001].data, memoryview(b"")])

            file.sync()

        demand(store.read_file(f"{root}/file") == content.tobytes(), "a long file must hold what was written")
        demand(list(store.list_directory(root)) == ["file"], "what a long file is made of must not be left")
        refuses(lambda: store.create_long_file(f"{root}/file", 1), StorageError, "creating what is there")

    def test_what_was_not_synced_is_not_there(self, tmp_path: Path) -> None:
        store, root = self.make_store(), self.root(tmp_path)
        token = self.build(store, f"{root}/final", b"content")
        with closing(store.create_long_file(f"{token.place}/long", 3 * 2**20)) as file:
            file.write_at(0, [memoryview(bytes(2 * 2**20))])

        demand(store.read_file(f"{token.place}/file") == b"content", "other files must stay")
        store.discard(token)
        demand(store.kind(f"{root}/final") is None, "what was discarded must not be there")


class WritingTogetherConformance(StoreCase):
    """Tests of `SharedFiles`: files that several processes write."""

    def test_what_each_writes_is_there(self, tmp_path: Path) -> None:
        store, root = self.make_store().shared_files, self.root(tmp_path)
        assert store is not None, "the store must have `shared_files`"
        store.make_directory(root)
        with closing(store.create_data_file(f"{root}/file")) as file:
            file.write_at(7, [memoryview(b"\0")])
        for offset, data in ((4, b"5678"), (0, b"1234")):
            with closing(store.open_for_writing(f"{root}/file")) as file:
                file.write_at(offset, [memoryview(data)])
                file.sync()

        demand(store.read_file(f"{root}/file") == b"12345678", "each must leave what the others wrote")
        refuses(partial(store.open_for_writing, f"{root}/absent"), StorageError, "opening an absent file")


class MappingConformance(StoreCase):
    """Tests of `SharedFiles`: files as memory."""

    def test_a_mapping_is_read_only_and_outlives_the_name(self, tmp_path: Path) -> None:
        store, root = self.make_store().shared_files, self.root(tmp_path)
        assert store is not None, "the store must have `shared_files`"
        store.make_directory(f"{root}/a")
        store.write_file(f"{root}/a/file", b"bytes")
        view = store.map_file(f"{root}/a/file")
        store.remove_tree(f"{root}/a")
        demand(view.readonly, "a mapping must be read-only")
        demand(view.tobytes() == b"bytes", "a mapping must keep its bytes when the file is removed")
        refuses(partial(store.map_file, f"{root}/a/file"), StorageError, "mapping an absent file")


class ForeignFilesConformance(StoreCase):
    """Tests of `SystemFiles`: files that others wrote by operating system paths."""

    def test_what_others_wrote_is_there(self, tmp_path: Path) -> None:
        store, root = self.make_store().system_files, self.root(tmp_path)
        assert store is not None, "the store must have `system_files`"
        store.make_directory(f"{root}/a")
        Path(root, "a", "file").write_bytes(b"bytes")
        store.sync_tree(root)
        demand(
            store.read_file(f"{root}/a/file") == b"bytes",
            "the store must see files of others",
        )


class KvStoreConformance(StoreCase):
    """Tests of `kvstore_spec`: the same keys through TensorStore."""

    def test_tensorstore_reads_what_was_written(self, tmp_path: Path) -> None:
        import tensorstore as ts

        store, root = self.make_store(), self.root(tmp_path)
        store.write_file(f"{root}/file", b"bytes")
        spec = store.kvstore_spec(root)

        async def read() -> bytes:
            kvstore = await await_future(ts.KvStore.open(spec))
            found = await await_future(kvstore.read("file"))
            return bytes(found.value)

        demand(anyio.run(read) == b"bytes", "a key below the spec must be a file below the directory")


class ListingConformance(StoreCase):
    """Tests of `list_folders`, `read_files` and `file_sizes`: many files in one call."""

    def test_many_files_at_once_are_as_one_by_one(self, tmp_path: Path) -> None:
        store, root = self.make_store(), self.root(tmp_path)
        store.make_directory(f"{root}/folder")
        store.write_file(f"{root}/file", b"bytes")
        paths = [f"{root}/{name}" for name in ("file", "folder", "absent")]
        demand(list(store.list_folders(root)) == ["folder"], "list_folders must return only directories")
        demand(list(store.read_files(paths)) == [b"bytes", None, None], "read_files reads files alone")
        demand(
            list(store.file_sizes(paths)) == [5, -1, None],
            "file_sizes must tell all three apart",
        )


class UntrustedFilesConformance(StoreCase):
    """Tests of `data_sizes` and `check_links`: files with holes, and links that lead out of a checkpoint.

    Of the store as it is made for checkpoints that are not trusted: links that lead out are refused.
    """

    def make_link(self, path: str, target: str) -> None:
        """Make `path` a link to `target`. By default of the operating system's file system."""
        os.symlink(target, path)

    def test_only_what_takes_room_counts(self, tmp_path: Path) -> None:
        store, root = self.make_store(), self.root(tmp_path)
        store.write_file(f"{root}/file", b"content")
        store.write_file(f"{root}/empty", b"")
        with closing(store.create_data_file(f"{root}/holes")) as data:
            data.write_at(2**24, [memoryview(b"end")])
            data.sync()

        names = ("file", "empty", "absent", "holes", "")
        whole, empty, absent, holes, folder = store.data_sizes([f"{root}/{name}" for name in names])
        demand((whole, empty) == (7, 0), "the bytes of a file without holes all take room")
        demand((absent, folder) == (0, 0), "data_sizes must say 0 for what is no file")
        demand(3 <= holes <= 2**24 + 3, "of a file with a hole, at most its length counts")

    def test_links_that_lead_out_are_refused_and_others_are_not(self, tmp_path: Path) -> None:
        store, root = self.make_store(), f"{self.root(tmp_path)}/checkpoint"
        for folder in (f"{root}/a", f"{root}/b/deep", f"{self.root(tmp_path)}/checkpoint-2"):
            store.make_directory(folder)

        store.write_file(f"{root}/a/file", b"")
        self.make_link(f"{root}/b/to_file", "../a/file")
        self.make_link(f"{root}/b/to_folder", f"{root}/a")
        self.make_link(f"{root}/b/deep/nowhere", "absent")
        self.make_link(f"{self.root(tmp_path)}/link", root)
        for checkpoint in (root, f"{self.root(tmp_path)}/link"):
            store.check_links(checkpoint, checkpoint)

        for target in ("../../..", f"{self.root(tmp_path)}/checkpoint-2", "/", f"{root}/../absent"):
            self.make_link(f"{root}/b/deep/out", target)
            for directory in (root, f"{root}/b", f"{root}/b/deep"):
                error = refuses(
                    partial(store.check_links, root, directory), LinkOutsideError, f"a link to {target}"
                )
                demand("b/deep/out" in str(error), "the error must name the link")

            store.check_links(root, f"{root}/a")  # where there is none
            store.remove_tree(f"{root}/b/deep/out")

        store.check_links(root, root)


class HoldConformance(StoreCase):
    """Tests of the holds of `Directories`: one builder, or any number of readers."""

    def hold(self, path: str) -> Hold:
        """Hold a directory alone."""
        return self.make_store().hold(path)

    def hold_reading(self, path: str) -> Hold:
        """Hold a directory as a reader."""
        return self.make_store().hold_reading(path)

    def test_one_holder_at_a_time(self, tmp_path: Path) -> None:
        path = self.root(tmp_path)
        hold = self.hold(path)
        error = refuses(lambda: self.hold(path), StorageError, "holding what is held")
        demand(isinstance(error, StorageError) and error.errno == errno.EBUSY, "and its errno is EBUSY")
        hold.release()
        again = self.hold(path)
        hold.release()  # idempotent: this gives up nothing of the second one
        refuses(lambda: self.hold(path), StorageError, "holding what is held")
        again.release()
        refuses(lambda: self.hold(f"{path}/absent"), StorageError, "holding nothing")

    def test_readers_hold_together_and_keep_others_out(self, tmp_path: Path) -> None:
        path = self.root(tmp_path)
        first, second = self.hold_reading(path), self.hold_reading(path)
        busy = refuses(lambda: self.hold(path), StorageError, "holding what is read")
        demand(isinstance(busy, StorageError) and busy.errno == errno.EBUSY, "and its errno is EBUSY")
        first.release()
        first.release()  # idempotent: this gives up nothing of the second one
        refuses(lambda: self.hold(path), StorageError, "holding what one of two still reads")
        second.release()
        self.hold(path).release()

    def test_nobody_reads_what_is_held_or_absent(self, tmp_path: Path) -> None:
        path = self.root(tmp_path)
        alone = self.hold(path)
        for number, where in ((errno.EBUSY, path), (errno.ENOENT, f"{path}/absent")):
            error = refuses(partial(self.hold_reading, where), StorageError, f"to read {where}")
            demand(isinstance(error, StorageError) and error.errno == number, f"and its errno is {number}")
            demand(path in str(error), "the error must name the path")

        alone.release()
        self.hold_reading(path).release()

    def test_nobody_deletes_what_is_being_restored(self, tmp_path: Path) -> None:
        path = f"{self.root(tmp_path)}/checkpoint"

        async def look() -> None:
            async with Checkpointer(store=self.make_store()) as checkpointer:
                await (await checkpointer.save(path, {"a": np.ones(3)}))
                async with checkpointer.stream(path) as leaves:
                    await anext(leaves)
                    refuses(lambda: self.hold(path), StorageError, "holding what is restored")

            self.hold(path).release()

        for backend in backends():
            anyio.run(look, backend=backend)
            self.make_store().remove_tree(path)
