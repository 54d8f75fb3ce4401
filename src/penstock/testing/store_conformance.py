"""What every store must do, as tests. Public as `penstock.testing.StoreConformance`."""

from __future__ import annotations

__all__ = ("StoreConformance",)

import errno
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import anyio
import numpy as np

from penstock.checkpointer.checkpointer import Checkpointer
from penstock.kernel.errors import StorageError, TruncatedDataError
from penstock.kernel.protocols.stores import Hold, ReadHolds, Store
from penstock.kernel.storage.read_lock import NoHold
from penstock.testing.operation_faults import Trial, backends, demand, refuses

NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP}


class StoreConformance(ABC):
    """Tests of a `Store`. Subclass it as `TestMyStore` in a file that pytest collects.

    `tmp_path` is pytest's. A store that is no local file system overrides `root`. What is asked of
    holds for reading is asked of a store that is a `ReadHolds`.
    """

    @abstractmethod
    def make_store(self) -> Store:
        """Return the store; called more than once in a test, so a new one sees what an older one wrote."""

    def root(self, tmp_path: Path) -> str:
        """Return a directory of the store that exists, is empty, and belongs to this test alone."""
        return str(tmp_path)

    def test_a_document_is_read_as_it_was_written_and_can_be_replaced(self, tmp_path: Path) -> None:
        store, path = self.make_store(), f"{self.root(tmp_path)}/document"
        for data in (b"first", b"", b"second, and longer"):
            store.write_file(path, data)
            demand(self.make_store().read_file(path) == data, "read_file must return what was written last")
            demand(store.size(path) == len(data), "size must be the length of what was written")

    def test_a_data_file_is_written_at_offsets_and_ends_with_its_last_byte(self, tmp_path: Path) -> None:
        store, path = self.make_store(), f"{self.root(tmp_path)}/data"
        with closing(store.create_data_file(path)) as file:
            file.allocate(1000)
            file.write_at(4, [memoryview(b"45"), memoryview(b"6789")])
            file.write_at(0, [memoryview(b"0123")])
            file.sync()
            file.close()  # and again at the end: close is idempotent

        demand(store.size(path) == 10, "sync must give back what was allocated and not written")
        first, second = bytearray(3), bytearray(5)
        with closing(self.make_store().open_data_file(path)) as readable:
            readable.read_at(2, [memoryview(first), memoryview(second)])
            demand(
                (bytes(first), bytes(second)) == (b"234", b"56789"), "read_at must fill the buffers in turn"
            )
            short = memoryview(bytearray(3))
            refuses(lambda: readable.read_at(8, [short]), TruncatedDataError, "reading past the end")

    def test_many_threads_write_and_read_one_file(self, tmp_path: Path) -> None:
        store, path, each = self.make_store(), f"{self.root(tmp_path)}/data", 100_000
        with closing(store.create_data_file(path)) as file, ThreadPoolExecutor(4) as pool:

            def write(at: int) -> None:
                file.write_at(at * each, [memoryview(bytes([at])) for _ in range(1)])
                file.write_at(at * each + 1, [memoryview(bytes([at]) * (each - 1))])

            list(pool.map(write, range(8)))
            file.sync()

        with closing(store.open_data_file(path)) as readable, ThreadPoolExecutor(4) as pool:

            def read(at: int) -> bool:
                found = bytearray(each)
                readable.read_at(at * each, [memoryview(found)])
                return bytes(found) == bytes([at]) * each

            demand(all(pool.map(read, range(8))), "what threads write at offsets must all be there")

    def test_kinds_sizes_and_names(self, tmp_path: Path) -> None:
        store, root = self.make_store(), self.root(tmp_path)
        store.make_directory(f"{root}/a/b")
        store.make_directory(f"{root}/a/b")  # it may exist
        store.write_file(f"{root}/a/file", b"123")
        found = [store.kind(f"{root}/a"), store.kind(f"{root}/a/file"), store.kind(f"{root}/a/none")]
        demand(found == ["directory", "file", None], f"kinds must be told apart, and are {found}")
        demand(sorted(store.list_directory(f"{root}/a")) == ["b", "file"], "names must be those in it alone")

    def test_identity_changes_with_what_lies_there(self, tmp_path: Path) -> None:
        store, root = self.make_store(), self.root(tmp_path)
        demand(store.identity(f"{root}/a") is None, "nothing has the identity None")
        store.make_directory(f"{root}/a")
        store.make_directory(f"{root}/b")
        first, second = store.identity(f"{root}/a"), store.identity(f"{root}/b")
        demand(first is not None and first != second, "two things have two identities")
        demand(store.identity(f"{root}/a") == first, "what stays has one identity")
        store.exchange(f"{root}/a", f"{root}/b")
        demand(store.identity(f"{root}/a") != first, "what was exchanged has another identity")

    def test_exchange_rename_and_remove(self, tmp_path: Path) -> None:
        store, root = self.make_store(), self.root(tmp_path)
        for name in ("a", "b"):
            store.make_directory(f"{root}/{name}")
            store.write_file(f"{root}/{name}/file", name.encode())

        store.exchange(f"{root}/a", f"{root}/b")
        found = store.read_file(f"{root}/a/file"), store.read_file(f"{root}/b/file")
        demand(found == (b"b", b"a"), "exchange must swap all that is in two directories")
        store.rename(f"{root}/a", f"{root}/c")
        demand(store.kind(f"{root}/a") is None, "what was renamed is not under its old name")
        demand(store.read_file(f"{root}/c/file") == b"b", "what was renamed is under its new one")
        store.remove_tree(f"{root}/c")
        store.remove_tree(f"{root}/c")  # it may be absent
        demand(list(store.list_directory(root)) == ["b"], "remove_tree must remove all of it, and no more")
        store.sync_directory(root)
        store.sync_tree(root)

    def test_one_holder_at_a_time(self, tmp_path: Path) -> None:
        path = self.root(tmp_path)
        hold = self.make_store().hold(path)
        error = refuses(lambda: self.make_store().hold(path), StorageError, "holding what is held")
        demand(isinstance(error, StorageError) and error.errno == errno.EBUSY, "and its errno is EBUSY")
        hold.release()
        again = self.make_store().hold(path)
        hold.release()  # idempotent: this gives up nothing of the second one
        refuses(lambda: self.make_store().hold(path), StorageError, "holding what is held")
        again.release()

    def test_readers_hold_together_and_keep_others_out(self, tmp_path: Path) -> None:
        path = self.root(tmp_path)
        first = _held_for_reading(self.make_store(), path)
        if first is None:
            return

        second = _held_for_reading(self.make_store(), path)
        demand(second is not None, "readers hold together")
        assert second is not None
        busy = refuses(lambda: self.make_store().hold(path), StorageError, "holding what is read")
        demand(isinstance(busy, StorageError) and busy.errno == errno.EBUSY, "and its errno is EBUSY")
        first.release()
        first.release()  # idempotent: this gives up nothing of the second one
        refuses(lambda: self.make_store().hold(path), StorageError, "holding what one of two still reads")
        second.release()
        self.make_store().hold(path).release()

    def test_nobody_reads_what_is_held_or_absent(self, tmp_path: Path) -> None:
        store, path = self.make_store(), self.root(tmp_path)
        if not isinstance(store, ReadHolds) or _held_for_reading(store, path) is None:
            return

        alone = self.make_store().hold(path)
        for number, where in ((errno.EBUSY, path), (errno.ENOENT, f"{path}/absent")):
            error = refuses(partial(store.hold_reading, where), StorageError, f"to read {where}")
            demand(isinstance(error, StorageError) and error.errno == number, f"and its errno is {number}")
            demand(path in str(error), "the error must name the path")

        alone.release()
        store.hold_reading(path).release()

    def test_nobody_deletes_what_is_being_restored(self, tmp_path: Path) -> None:
        path = f"{self.root(tmp_path)}/checkpoint"

        async def look() -> None:
            async with Checkpointer(store=self.make_store()) as checkpointer:
                await (await checkpointer.save(path, {"a": np.ones(3)}))
                probe = _held_for_reading(self.make_store(), path)
                if probe is None:
                    return

                probe.release()
                async with checkpointer.stream(path) as leaves:
                    await anext(leaves)
                    refuses(lambda: self.make_store().hold(path), StorageError, "holding what is restored")

            self.make_store().hold(path).release()

        for backend in backends():
            anyio.run(look, backend=backend)
            self.make_store().remove_tree(path)

    def test_a_link_keeps_a_file_or_is_refused_with_a_number(self, tmp_path: Path) -> None:
        store, root = self.make_store(), self.root(tmp_path)
        store.make_directory(f"{root}/a")
        store.write_file(f"{root}/a/file", b"bytes")
        try:
            store.link(f"{root}/a/file", f"{root}/b")
        except StorageError as error:
            demand(error.errno in NO_LINKS, f"a store without links says so by errno, and not {error.errno}")
            return

        store.remove_tree(f"{root}/a")
        demand(store.read_file(f"{root}/b") == b"bytes", "a link stays when the first name is gone")

    def test_a_mapping_is_read_only_and_outlives_the_name(self, tmp_path: Path) -> None:
        store, root = self.make_store(), self.root(tmp_path)
        store.make_directory(f"{root}/a")
        store.write_file(f"{root}/a/file", b"bytes")
        view = store.map_file(f"{root}/a/file")
        store.remove_tree(f"{root}/a")
        demand(view.readonly, "nobody writes to a file through its mapping")
        demand(view.tobytes() == b"bytes", "a mapping keeps its bytes when the file is removed")

    def test_what_cannot_be_is_a_storage_error_that_names_the_path(self, tmp_path: Path) -> None:
        store, root = self.make_store(), self.root(tmp_path)
        store.write_file(f"{root}/file", b"")
        store.check_writable(f"{root}/new/newer")
        absent, below = f"{root}/absent", f"{root}/file/below"
        for what, call in {
            "reading an absent file": lambda: store.read_file(absent),
            "opening an absent file": lambda: store.open_data_file(absent),
            "mapping an absent file": lambda: store.map_file(absent),
            "listing an absent directory": lambda: store.list_directory(absent),
            "the size of nothing": lambda: store.size(absent),
            "holding nothing": lambda: store.hold(absent),
            "renaming nothing": lambda: store.rename(absent, f"{root}/new"),
            "writing in a file": lambda: store.write_file(below, b""),
            "creating in a file": lambda: store.create_data_file(below),
            "what could not be created": lambda: store.check_writable(below),
        }.items():
            error = refuses(call, StorageError, what)
            demand(root in str(error), f"the error of {what} must name the path")

    def test_checkpoints_are_saved_and_restored_and_undone_wherever_it_fails(self, tmp_path: Path) -> None:
        tree = {"a": np.arange(5000), "b": [np.ones(3), None], "step": 7}
        trial = Trial(Path(self.root(tmp_path)), tree, tree, _same, dict, self.make_store)
        trial.run(trial.there_and_back)
        trial.make_store().remove_tree(str(trial.path))
        trial.sweep_save()


def _held_for_reading(store: Store, path: str) -> Hold | None:
    """Hold it as readers do; None if the store has no such holds."""
    hold = store.hold_reading(path) if isinstance(store, ReadHolds) else NoHold()
    return None if isinstance(hold, NoHold) else hold


def _same(found: object, expected: object) -> bool:
    return repr(found) == repr(expected)
