from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pytest

from penstock.handlers import LocalStore
from penstock.testing import CrashStore
from penstock.testing.volatile_disk import (
    Content,
    DirectoryEntry,
    DiskWrite,
    Effect,
    FileLeft,
    Inode,
    Names,
    Resize,
    SyncFile,
    SyncNames,
    VolatileDisk,
)

A, B = Inode(1), Inode(2)
FOLDER = Inode(3, is_directory=True)


def disk(*effects: Effect) -> VolatileDisk:
    made = VolatileDisk()
    for effect in effects:
        made.apply(effect)

    return made


def name(at: str, node: Inode | None, directory: Inode | None = None) -> Names:
    return Names((DirectoryEntry(directory or VolatileDisk().top, at, node),))


TOP = SyncNames(VolatileDisk().top)


def shown(content: Content) -> dict[str, object]:
    """A content as names, with the bytes of files."""
    return {at: found.data if isinstance(found, FileLeft) else shown(found) for at, found in content}


def left(found: VolatileDisk, limit: int = 64) -> list[dict[str, object]]:
    """The different contents that a power loss may leave."""
    return [shown(content) for content in dict.fromkeys(found.contents(limit))]


def test_each_name_that_was_not_synced_may_be_lost() -> None:
    found = left(disk(name("a", A), name("b", B)))

    assert found[:2] == [{}, {"a": b"", "b": b""}]
    assert len(found) == 4
    assert {"a": b""} in found
    assert {"b": b""} in found
    assert left(disk(name("a", A), name("b", B), TOP)) == [{"a": b"", "b": b""}]


def test_changes_of_one_name_keep_their_order() -> None:
    rename = Names(
        (DirectoryEntry(VolatileDisk().top, "b", A), DirectoryEntry(VolatileDisk().top, "a", None))
    )

    assert left(disk(name("a", A), rename)) == [{}, {"b": b""}, {"a": b""}]


def test_a_rename_and_an_exchange_happen_as_a_whole_or_not() -> None:
    top = VolatileDisk().top
    before: list[Effect] = [name("a", A), name("b", B), DiskWrite(A, 0, b"A"), SyncFile(A), TOP]
    exchange = Names((DirectoryEntry(top, "a", B), DirectoryEntry(top, "b", A)))

    assert left(disk(*before, exchange)) == [{"a": b"A", "b": b""}, {"a": b"", "b": b"A"}]


def test_bytes_that_were_not_synced_are_lost_or_there_or_torn() -> None:
    written = disk(name("a", A), TOP, DiskWrite(A, 0, b"01"), DiskWrite(A, 2, b"23"))

    assert [found["a"] for found in left(written)] == [b"", b"0123", b"012", bytes(4), b"01\0\0"]
    written.apply(SyncFile(A))
    assert left(written) == [{"a": b"0123"}]


def test_what_was_synced_before_stays_where_more_is_written() -> None:
    written = disk(
        name("a", A), TOP, DiskWrite(A, 0, b"0123"), SyncFile(A), Resize(A, 6), DiskWrite(A, 4, b"45")
    )

    assert [found["a"] for found in left(written)] == [b"0123", b"012345", b"01234\0", b"0123\0\0"]


def test_a_file_of_two_names_is_synced_under_both() -> None:
    linked = disk(name("a", A), DiskWrite(A, 0, b"A"), name("b", A), SyncFile(A), TOP)

    assert left(linked) == [{"a": b"A", "b": b"A"}]


def test_a_directory_without_its_name_is_lost_with_all_that_is_in_it() -> None:
    inside: list[Effect] = [name("d", FOLDER), name("a", A, FOLDER), SyncNames(FOLDER)]

    assert left(disk(*inside)) == [{}, {"d": {"a": b""}}]
    assert left(disk(*inside, TOP)) == [{"d": {"a": b""}}]


def test_what_no_power_loss_can_bring_back_is_no_longer_tried() -> None:
    made: list[Effect] = [
        name("d", FOLDER),
        TOP,
        name("a", A, FOLDER),
        SyncNames(FOLDER),
        DiskWrite(A, 0, b"A"),
    ]
    removed = disk(*made, name("a", None, FOLDER), name("d", None))
    assert len(left(removed)) > 4

    removed.apply(TOP)

    assert left(removed) == [{}]


def test_a_sample_of_the_states_of_many_changes_is_tried() -> None:
    nodes = [Inode(at) for at in range(1, 101)]
    found = left(disk(*[name(str(node.number), node) for node in nodes]), limit=32)

    assert 20 < len(found) <= 34
    assert found[0] == {}
    assert len(found[1]) == 100


def save(store: CrashStore, root: Path, *, forgotten: str) -> None:
    """A small commit that forgets to sync something."""
    store.make_directory(f"{root}/tmp")
    with closing(store.create_data_file(f"{root}/tmp/data")) as file:
        file.write_at(0, [memoryview(b"0123")])
        if forgotten != "data":
            file.sync()
    if forgotten != "names":
        store.sync_directory(f"{root}/tmp")
    store.publish(store.begin_build(f"{root}/new", f"{root}/tmp"))
    if forgotten != "publication":
        store.sync_directory(str(root))


def published(root: Path, store: CrashStore, folder: Path) -> Iterable[bytes | None]:
    """What lies under its own name after each power loss, and at the end."""
    for at, loss in enumerate(store.power_losses()):
        loss.write(folder / str(at))
        new = folder / str(at) / "new"
        data = new / "data"
        yield (data.read_bytes() if data.exists() else b"absent") if new.exists() else None


@pytest.mark.parametrize(
    ("forgotten", "expected"),
    [
        ("nothing", {None, b"0123"}),
        ("publication", {None, b"0123"}),
        ("data", {None, b"", b"01", bytes(4), b"0123"}),
        ("names", {None, b"absent", b"0123"}),
    ],
)
def test_a_sync_that_was_forgotten_is_found(tmp_path: Path, forgotten: str, expected: set[bytes]) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "losses").mkdir()
    store = CrashStore(LocalStore(), tmp_path / "root")
    save(store, tmp_path / "root", forgotten=forgotten)

    found = list(published(tmp_path / "root", store, tmp_path / "losses"))

    assert set(found) == expected


def test_a_tree_is_removed_name_by_name(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "d").mkdir(parents=True)
    for at in "ab":
        (root / "d" / at).write_bytes(b"")
    store = CrashStore(LocalStore(), root)

    store.remove_tree(str(root / "d"))

    assert (store.n_changes, store.n_effects) == (1, 3)
    assert {"d": {"b": b""}} in [shown(loss.content) for loss in store.power_losses()]
    assert {"d": {"a": b""}} in [shown(loss.content) for loss in store.power_losses()]
    assert {} in [shown(loss.content) for loss in store.power_losses()]


def test_links_are_recognised_and_written_as_links(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "a").write_bytes(b"A")
    (root / "b").hardlink_to(root / "a")
    (loss,) = CrashStore(LocalStore(), root).power_losses()

    loss.write(tmp_path / "found")

    assert (tmp_path / "found" / "a").samefile(tmp_path / "found" / "b")


def test_the_bytes_of_a_copy_that_was_not_synced_may_be_lost(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "a").write_bytes(b"A")
    store = CrashStore(LocalStore(), root, unsynced=[root / "a"])

    found = [shown(loss.content) for loss in store.power_losses()]

    assert {"a": b""} in found
    assert {"a": b"A"} in found


def test_the_bytes_of_what_is_linked_are_durable(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "a").write_bytes(b"A")
    store = CrashStore(LocalStore(), root, unsynced=[root / "a"])

    store.share(str(root / "a"), str(root / "b"))
    store.sync_directory(str(root))
    store.lose_power()

    assert {path.name: path.read_bytes() for path in root.iterdir()} == {"a": b"A", "b": b"A"}
