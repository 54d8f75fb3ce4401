"""Tests of what every store must do. Public as `penstock.testing.StoreConformance`."""

from __future__ import annotations

__all__ = ("DirectoryConformance", "StoreCase", "StoreConformance")

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import ClassVar

import numpy as np

from penstock.kernel.errors import StorageError, TruncatedDataError
from penstock.kernel.protocols.stores import BuildToken, Store
from penstock.testing.operation_faults import Trial, demand, refuses


class StoreCase(ABC):
    """The facts about a store that all conformance classes need.

    Attributes:
        own_names: What the store itself adds to a directory when it publishes it.
    """

    own_names: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def make_store(self) -> Store:
        """Return the store. Called more than once in a test: each store sees what the others wrote."""

    def root(self, tmp_path: Path) -> str:
        """Return a directory of the store that exists, is empty and belongs to this test alone.

        By default it is pytest's `tmp_path`; a store that is not a local file system overrides this.
        """
        return str(tmp_path)

    def build(self, store: Store, final: str, content: bytes) -> BuildToken:
        """Build a directory that is to be published at `final`, with one file called `file`."""
        token = store.begin_build(final, f"{final}.tmp")
        store.remove_tree(token.place)
        store.make_directory(token.place)
        store.write_file(f"{token.place}/file", content)
        store.sync_directory(token.place)
        return token


class StoreConformance(StoreCase):
    """Tests of the required part of a `Store`.

    Subclass it as `TestMyStore` in a file that pytest collects, together with the class of
    `penstock.testing` for each capability that the store has.
    """

    def test_a_document_is_read_as_it_was_written_and_can_be_replaced(self, tmp_path: Path) -> None:
        store, path = self.make_store(), f"{self.root(tmp_path)}/document"
        for data in (b"first", b"", b"second, and longer"):
            demand(store.write_file(path, data) is True, "write_file without `create` always writes")
            demand(store.read_file(path) == data, "read_file must return what was written last")
            store.replace_file(path, data + b"more")
            demand(store.read_file(path) == data + b"more", "replace_file must replace what is there")
            store.replace_file(path, data)
            demand(
                store.list_directory(self.root(tmp_path)) == ["document"],
                "replace_file must leave no other file",
            )
            demand(self.make_store().read_file(path) == data, "read_file must return what was written last")
            demand(store.size(path) == len(data), "size must be the length of what was written")

    def test_a_document_is_created_once(self, tmp_path: Path) -> None:
        store, path = self.make_store(), f"{self.root(tmp_path)}/document"
        demand(
            store.write_file(path, b"first", create=True) is True,
            "write_file must return True to the creator",
        )
        demand(
            store.write_file(path, b"first", create=True) is False,
            "write_file must return False if the file exists",
        )
        error = refuses(
            lambda: store.write_file(path, b"other", create=True), StorageError, "creating what is there"
        )
        demand(_errno(error) == errno.EEXIST, "and its errno is EEXIST")
        demand(store.read_file(path) == b"first", "an existing file must not be replaced")
        demand(list(store.list_directory(self.root(tmp_path))) == ["document"], "nothing is left beside it")

    def test_of_many_who_create_a_document_one_succeeds(self, tmp_path: Path) -> None:
        store, root = self.make_store(), self.root(tmp_path)

        def create(content: bytes) -> bool:
            try:
                return store.write_file(f"{root}/document", content, create=True)
            except StorageError as error:
                demand(_errno(error) == errno.EEXIST, f"the other writers must see EEXIST, not {error!r}")
                return False

        contents = [bytes([n]) * 10_000 for n in range(8)]
        with ThreadPoolExecutor(8) as pool:
            created = list(pool.map(create, contents))

        demand(sum(created) == 1, f"exactly one writer must create the file, not {sum(created)}")
        demand(store.read_file(f"{root}/document") == contents[created.index(True)], "it has their content")

    def test_a_data_file_is_written_at_offsets_and_ends_with_its_last_byte(self, tmp_path: Path) -> None:
        store, path = self.make_store(), f"{self.root(tmp_path)}/data"
        with closing(store.create_data_file(path)) as file:
            file.allocate(1000)
            file.write_at(4, [memoryview(b"45"), memoryview(b"6789")])
            file.write_at(0, [memoryview(b"0123")])
            file.sync()
            file.close()  # and again at the end: close is idempotent

        refuses(lambda: store.create_data_file(path), StorageError, "creating a data file that is there")
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

            demand(all(pool.map(read, range(8))), "all writes at offsets by several threads must be there")

    def test_kinds_sizes_and_names(self, tmp_path: Path) -> None:
        store, root = self.make_store(), self.root(tmp_path)
        store.make_directory(f"{root}/a/b")
        store.make_directory(f"{root}/a/b")  # it may exist
        store.write_file(f"{root}/a/b/inner", b"")
        store.write_file(f"{root}/a/file", b"123")
        store.sync_directory(f"{root}/a")
        found = [store.kind(f"{root}/a"), store.kind(f"{root}/a/file"), store.kind(f"{root}/a/none")]
        demand(found == ["directory", "file", None], f"kinds must be told apart; found {found}")
        demand(
            sorted(store.list_directory(f"{root}/a")) == ["b", "file"],
            "names must be exactly those in it",
        )

    def test_identity_changes_with_what_lies_there(self, tmp_path: Path) -> None:
        store, root = self.make_store(), self.root(tmp_path)
        demand(store.identity(f"{root}/a") is None, "nothing has the identity None")
        found: list[object] = []
        for content in (b"first", b"second"):
            store.publish(self.build(store, f"{root}/a", content))
            found.append(store.identity(f"{root}/a"))
            demand(found[-1] is not None, "an existing path must have an identity")
            demand(store.identity(f"{root}/a") == found[-1], "what stays has one identity")
            store.remove_tree(f"{root}/a")

        demand(found[0] != found[1], "a removed and recreated path must have a new identity")

    def test_what_is_built_is_seen_once_it_is_published(self, tmp_path: Path) -> None:
        store, final = self.make_store(), f"{self.root(tmp_path)}/final"
        token = self.build(store, final, b"content")
        demand(store.kind(final) is None, "nothing is visible before publish")
        store.publish(token)
        store.sync_directory(self.root(tmp_path))
        other = self.make_store()
        demand(other.kind(final) == "directory", "what was published is there")
        demand(other.read_file(f"{final}/file") == b"content", "and so is all that is in it")
        demand({*other.list_directory(final)} - self.own_names == {"file"}, "and nothing else")
        store.discard(token)
        demand(other.read_file(f"{final}/file") == b"content", "discard must not touch what was published")
        demand(list(store.list_directory(self.root(tmp_path))) == ["final"], "nothing is left beside it")

    def test_one_file_of_what_is_built_is_published_alone(self, tmp_path: Path) -> None:
        store, root = self.make_store(), self.root(tmp_path)
        token = store.begin_build(f"{root}/final", f"{root}/final.tmp", "inner")
        store.make_directory(token.place)
        store.write_file(f"{token.place}/inner", b"content")
        store.publish(token)
        store.discard(token)
        demand(store.kind(f"{root}/final") == "file", "the file must be at the published path")
        demand(store.read_file(f"{root}/final") == b"content", "and its content")
        demand(list(store.list_directory(root)) == ["final"], "discard must remove the rest of the place")
        if store.directories is None:
            store.remove_tree(f"{root}/final")
            demand(
                store.kind(f"{root}/final") is None, "without renames, remove_tree must remove a file, too"
            )

    def test_publishing_over_something_is_refused(self, tmp_path: Path) -> None:
        store, final = self.make_store(), f"{self.root(tmp_path)}/final"
        store.publish(self.build(store, final, b"first"))
        tokens: list[BuildToken] = []

        def publish_again() -> None:  # a store that builds in the same place refuses it earlier
            tokens.append(self.build(store, final, b"second"))
            store.publish(tokens[0])

        error = refuses(publish_again, StorageError, "publishing over something")
        demand(_errno(error) == errno.EEXIST, "and its errno is EEXIST")
        for token in tokens:
            store.discard(token)

        demand(store.read_file(f"{final}/file") == b"first", "what is there stays")

    def test_what_is_discarded_is_gone(self, tmp_path: Path) -> None:
        store, root = self.make_store(), self.root(tmp_path)
        token = self.build(store, f"{root}/final", b"content")
        store.discard(token)
        store.discard(token)  # idempotent
        demand(list(store.list_directory(root)) == [], "discard must remove all that was built")
        store.publish(self.build(store, f"{root}/final", b"again"))
        demand(
            store.read_file(f"{root}/final/file") == b"again",
            "then another save can build there",
        )

    def test_remove_tree_removes_what_is_below_and_no_more(self, tmp_path: Path) -> None:
        store, root = self.make_store(), self.root(tmp_path)
        for name in ("a", "ab"):
            store.make_directory(f"{root}/{name}/inner")
            store.write_file(f"{root}/{name}/inner/file", b"content")

        store.remove_tree(f"{root}/a")
        store.remove_tree(f"{root}/a")  # it may be absent
        demand(
            list(store.list_directory(root)) == ["ab"],
            "remove_tree must remove all of it, and no more",
        )

    def test_what_cannot_be_is_a_storage_error_that_names_the_path(self, tmp_path: Path) -> None:
        store, root = self.make_store(), self.root(tmp_path)
        store.check_writable(f"{root}/new/newer")
        absent = f"{root}/absent"
        calls: dict[str, Callable[[], object]] = {
            "reading an absent file": lambda: store.read_file(absent),
            "opening an absent file": lambda: store.open_data_file(absent),
            "listing an absent directory": lambda: store.list_directory(absent),
            "the size of nothing": lambda: store.size(absent),
        }
        for what, call in calls.items():
            error = refuses(call, StorageError, what)
            demand(root in str(error), f"the error of {what} must name the path")
            demand(_errno(error) == errno.ENOENT, f"{what} has errno ENOENT")

    def test_checkpoints_are_saved_and_restored_and_undone_wherever_it_fails(self, tmp_path: Path) -> None:
        tree = {"a": np.arange(5000), "b": [np.ones(3), None], "step": 7}
        trial = Trial(self.root(tmp_path), tree, tree, _same, dict, self.make_store)
        trial.run(trial.there_and_back)
        trial.make_store().remove_tree(trial.path)
        trial.sweep_save()


class DirectoryConformance(StoreCase):
    """Tests of a store with directories, which may be empty, and in which a file has nothing below it.

    An object store has none: a prefix is a directory as long as something is below it.
    """

    def test_a_directory_is_there_before_anything_is_in_it(self, tmp_path: Path) -> None:
        store, root = self.make_store(), self.root(tmp_path)
        store.make_directory(f"{root}/a/b")
        demand(list(store.list_directory(f"{root}/a")) == ["b"], "a new directory must be listed")
        demand(store.kind(f"{root}/a/b") == "directory", "and be one")
        demand(list(store.list_directory(f"{root}/a/b")) == [], "an empty one has no names")

    def test_nothing_lies_below_a_file(self, tmp_path: Path) -> None:
        store, root = self.make_store(), self.root(tmp_path)
        store.write_file(f"{root}/file", b"")
        below = f"{root}/file/below"
        calls: dict[str, Callable[[], object]] = {
            "writing in a file": lambda: store.write_file(below, b""),
            "creating in a file": lambda: store.create_data_file(below),
            "what could not be created": lambda: store.check_writable(below),
        }
        for what, call in calls.items():
            error = refuses(call, StorageError, what)
            demand(root in str(error), f"the error of {what} must name the path")


def _errno(error: BaseException) -> int | None:
    return error.errno if isinstance(error, StorageError) else None


def _same(found: object, expected: object) -> bool:
    return repr(found) == repr(expected)
