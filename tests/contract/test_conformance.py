"""Our own stores, handlers and stages pass the conformance classes; and what is wrong does not."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import jax.numpy as jnp
import numpy as np
import pytest
from tests.stages.stage_rig import Parcel, ParcelHandler

from penstock.errors import StorageError
from penstock.handlers import ArrayHandler, LocalStore, NumpyHandler, ScalarHandler, StringHandler
from penstock.kernel import (
    BuildToken,
    Directories,
    Hold,
    LeafHandler,
    ObjectStore,
    SharedFiles,
    Store,
    StoreWrapper,
    SystemFiles,
    TypeHandler,
)
from penstock.kernel.protocols import NoHold
from penstock.stages import Encode, LimitBytes
from penstock.testing import (
    CrashStore,
    DirectoryConformance,
    ExchangeConformance,
    FaultyStore,
    ForeignFilesConformance,
    FreeSpaceConformance,
    HandlerConformance,
    HoldConformance,
    KvStoreConformance,
    ListingConformance,
    MappingConformance,
    MemoryStore,
    RenameConformance,
    SharingConformance,
    StageConformance,
    StoreConformance,
    UntrustedFilesConformance,
    WritingTogetherConformance,
)

T = TypeVar("T")

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def tmp_path(folder: Path) -> Path:
    """In memory, where syncing costs nothing."""
    folder.mkdir()
    return folder


def stopped_elsewhere(tests: type[T]) -> type[T]:
    """Have `make test-slow` stop a save and a restore at each step: another class here has it done already.

    Leaves of other handlers travel as NumPy's do. `TestEncode` has our other stages around its own. Each of
    these tests puts a `FaultyStore` around the store that it is given.
    """
    for name in (
        "test_a_save_that_fails_or_is_cancelled_anywhere_leaves_nothing",
        "test_a_restore_that_is_cancelled_anywhere_holds_nothing",
        "test_checkpoints_are_saved_and_restored_and_undone_wherever_it_fails",
    ):
        if hasattr(tests, name):
            setattr(tests, name, pytest.mark.slow(_again(getattr(tests, name))))

    return tests


def _again(test: Callable[[Any, Path], None]) -> Callable[[Any, Path], None]:
    # A function of its own: a mark on the one that is inherited would mark it for every class.
    def again(self: Any, tmp_path: Path) -> None:
        test(self, tmp_path)

    return again


class _EveryCapability(
    ExchangeConformance,
    RenameConformance,
    SharingConformance,
    WritingTogetherConformance,
    MappingConformance,
    ForeignFilesConformance,
    KvStoreConformance,
    ListingConformance,
    UntrustedFilesConformance,
    HoldConformance,
    DirectoryConformance,
):
    """What the local store, and a store around it, must do beyond the required part."""


class TestLocalStore(StoreConformance, _EveryCapability):
    def make_store(self) -> Store:
        return LocalStore()


@stopped_elsewhere
class TestFaultyStore(StoreConformance, _EveryCapability):
    def make_store(self) -> Store:
        return FaultyStore(LocalStore())


class TestCrashStoreCapabilities(_EveryCapability):
    @pytest.fixture(autouse=True)
    def _store(self, tmp_path: Path) -> None:
        self.store = CrashStore(LocalStore(), tmp_path)

    def make_store(self) -> Store:
        return self.store


class TestMemoryStore(StoreConformance, DirectoryConformance, SharingConformance, FreeSpaceConformance):
    @pytest.fixture(autouse=True)
    def _store(self, tmp_path: Path) -> None:
        self.store = self.new_store(str(tmp_path))

    def new_store(self, root: str) -> Store:
        store = MemoryStore()
        store.make_directory(root)
        return store

    def make_store(self) -> Store:
        return self.store


@stopped_elsewhere
class TestFaultyMemoryStore(TestMemoryStore):
    def make_store(self) -> Store:
        return FaultyStore(self.store)


class TestNumpy(HandlerConformance):
    memory_limit = 20_000

    def make_handler(self) -> LeafHandler:
        return NumpyHandler()

    def values(self) -> list[Any]:
        return [np.arange(5000), np.zeros((0, 3), np.int8), np.asfortranarray(np.ones((3, 4)))]

    def same(self, found: Any, expected: Any) -> bool:
        return found.dtype == expected.dtype and np.array_equal(found, expected)

    def change(self, value: Any) -> None:
        value[...] = 0


@stopped_elsewhere
class TestArray(HandlerConformance):
    memory_limit = 20_000

    def make_handler(self) -> LeafHandler:
        return ArrayHandler()

    def values(self) -> list[Any]:
        return [jnp.arange(5000), jnp.zeros((0, 3)), jnp.ones((), jnp.bfloat16)]

    def leaf_type(self) -> type:
        import jax

        return jax.Array

    def same(self, found: Any, expected: Any) -> bool:
        return found.dtype == expected.dtype and np.array_equal(found, expected)

    def change(self, value: Any) -> None:
        value.delete()


@stopped_elsewhere
class TestScalar(HandlerConformance):
    def make_handler(self) -> LeafHandler:
        return ScalarHandler()

    def values(self) -> list[Any]:
        return [1, -(2**40), 0]


@stopped_elsewhere
class TestString(HandlerConformance):
    def make_handler(self) -> LeafHandler:
        return StringHandler()

    def values(self) -> list[Any]:
        return ["", "text", "ü" * 100]


class TestThirdParty(HandlerConformance):
    def make_handler(self) -> TypeHandler:
        return ParcelHandler()

    def values(self) -> list[Any]:
        return [Parcel("1"), Parcel("")]

    def same(self, found: Any, expected: Any) -> bool:
        return bool(found.text == expected.text)

    def change(self, value: Any) -> None:
        value.text = "another"


@stopped_elsewhere
class TestOurStages(StageConformance):
    def pipelines(self, saving: Any, restoring: Any) -> Any:
        return saving, restoring


class TestEncode(StageConformance):
    def pipelines(self, saving: Any, restoring: Any) -> Any:
        return saving.insert_after("device_to_host", Encode(), called="encode"), restoring


@stopped_elsewhere
class TestLimitBytes(StageConformance):
    def pipelines(self, saving: Any, restoring: Any) -> Any:
        return saving.replace("limit_bytes", LimitBytes(in_flight_bytes=1000)), restoring


# What is wrong fails. Each of these breaks one promise, and the test of that promise must say so.


class _Late(ParcelHandler):
    """Copies too late: the value is read when it is written, after it has changed."""

    changed = threading.Event()

    async def serialize(self, values: Sequence[Any], infos: Any, args: Any = None) -> Any:
        from tests.stages.stage_rig import _WhenAsked

        def write(path: Path, value: Any) -> None:
            assert self.changed.wait(10)
            path.write_text(value.text)

        pairs = zip(values, infos, strict=True)
        return [_WhenAsked(write, Path(info.directory, info.name), value) for value, info in pairs]


class _Swapped(ParcelHandler):
    async def deserialize(self, infos: Any, args: Any = None) -> Any:
        return [Parcel("wrong") for _ in infos]


class _Unfilled(StoreConformance, _EveryCapability):
    def make_store(self) -> Store:
        return _Forgetful()


class _Forgetful(StoreWrapper):
    """The local store; but it copies what it should move or discard, and its holds hold nothing."""

    def __init__(self) -> None:
        super().__init__(LocalStore())

    def hold(self, path: str) -> Hold:
        return NoHold()

    def check_links(self, root: str, directory: str) -> None:
        """It looks at none."""

    def data_sizes(self, paths: Iterable[str]) -> Sequence[int]:
        return [os.stat(path).st_size if os.path.exists(path) else 0 for path in paths]  # folders, too

    def rename(self, source: str, destination: str) -> None:
        if Path(destination).exists():
            raise StorageError("rename", source, "exists", errno.EEXIST)

        shutil.copytree(source, destination)

    def discard(self, token: BuildToken) -> None:
        """Keep it."""


def _third_party(handler: Callable[[], TypeHandler]) -> TestThirdParty:
    made = TestThirdParty()
    made.make_handler = handler  # type: ignore[method-assign]

    def change(value: Any) -> None:
        value.text = "another"
        _Late.changed.set()

    made.change = change  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize(
    ("handler", "test", "said"),
    [
        (_Late, "test_values_may_change_once_they_are_staged", "stored after its change"),
        (_Swapped, "test_values_are_restored_as_they_were_saved", "and expected"),
        (_Swapped, "test_values_are_restored_onto_a_target", "restored is"),
    ],
)
def test_a_wrong_handler_is_found(
    tmp_path: Path, handler: Callable[[], TypeHandler], test: str, said: str
) -> None:
    with pytest.raises(AssertionError, match=said):
        getattr(_third_party(handler), test)(tmp_path)


class _ReadAlone(_Forgetful):
    """A reader keeps other readers out."""

    def hold(self, path: str) -> Hold:
        return self.inner.hold(path)

    def hold_reading(self, path: str) -> Hold:
        return self.inner.hold(path)


class _ReadWhileHeld(_ReadAlone):
    """Readers hold something, which keeps nobody out."""

    def hold_reading(self, path: str) -> Hold:
        return NoHold()


class _ReadByOne(_ReadAlone):
    """Whoever of the readers is first to release lets go for all."""

    holds: ClassVar[dict[str, Hold]] = {}

    def hold_reading(self, path: str) -> Hold:
        if path not in self.holds:
            self.holds[path] = self.inner.hold_reading(path)

        return self._Shared(path)

    class _Shared(Hold):
        def __init__(self, path: str) -> None:
            self.path = path

        def release(self) -> None:
            hold = _ReadByOne.holds.pop(self.path, None)
            if hold is not None:
                hold.release()


class _WithoutReadHolds(_ReadWhileHeld):
    def discard(self, token: BuildToken) -> None:
        self.inner.discard(token)


@pytest.mark.parametrize(
    ("store", "test", "said"),
    [
        (_ReadAlone, "test_readers_hold_together_and_keep_others_out", "somebody builds"),
        (_ReadWhileHeld, "test_readers_hold_together_and_keep_others_out", "holding what is read"),
        (_ReadByOne, "test_readers_hold_together_and_keep_others_out", "one of two still reads"),
        (_ReadWhileHeld, "test_nobody_reads_what_is_held_or_absent", "to read .* must raise StorageError"),
        (_ReadWhileHeld, "test_nobody_deletes_what_is_being_restored", "holding what is restored"),
    ],
)
def test_a_store_whose_readers_hold_wrongly_is_found(
    tmp_path: Path, store: type[Store], test: str, said: str
) -> None:
    class Test(HoldConformance):
        def make_store(self) -> Store:
            return store()

    with pytest.raises((AssertionError, StorageError), match=said):
        getattr(Test(), test)(tmp_path)


@pytest.mark.parametrize(
    "make",
    [
        _WithoutReadHolds,
        pytest.param(lambda: FaultyStore(_WithoutReadHolds()), marks=pytest.mark.slow),
    ],
    ids=["bare", "around it"],
)
def test_a_store_without_holds_for_reading_is_a_store(tmp_path: Path, make: Callable[[], Store]) -> None:
    class Test(StoreConformance):
        def make_store(self) -> Store:
            return make()

    Test().test_checkpoints_are_saved_and_restored_and_undone_wherever_it_fails(tmp_path)


@pytest.mark.parametrize("kind", ["faulty", "crash"])
def test_a_store_around_another_has_its_capabilities_and_no_others(tmp_path: Path, kind: str) -> None:
    kinds = ("directories", "shared_files", "system_files", "objects")
    for inner in (LocalStore(), MemoryStore()):
        around = FaultyStore(inner) if kind == "faulty" else CrashStore(inner, tmp_path)
        for name in kinds:
            assert getattr(around, name) is (None if getattr(inner, name) is None else around), name


@pytest.mark.parametrize("kind", [Store, Directories, SharedFiles, SystemFiles, ObjectStore])
def test_a_wrapper_passes_on_every_operation(kind: type[Store]) -> None:
    operations = {name for name, found in vars(kind).items() if callable(found) and not name.startswith("_")}
    own = vars(StoreWrapper)
    assert operations
    assert operations <= own.keys(), "each of them is passed on, also one that has a default"


@pytest.mark.parametrize(
    ("test", "said"),
    [
        ("test_one_holder_at_a_time", "holding what is held must raise StorageError"),
        ("test_what_is_renamed_is_at_its_new_path_alone", "not be under its old name"),
        ("test_what_is_discarded_is_gone", "discard must remove"),
        ("test_only_what_takes_room_counts", "must say 0 for what is no file"),
        (
            "test_links_that_lead_out_are_refused_and_others_are_not",
            r"a link to ../../.. must raise LinkOutsideError",
        ),
    ],
)
def test_a_wrong_store_is_found(tmp_path: Path, test: str, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        getattr(_Unfilled(), test)(tmp_path)


def test_a_crash_store_is_a_store(tmp_path: Path) -> None:
    class Test(StoreConformance):
        def make_store(self) -> Store:
            return CrashStore(LocalStore(), tmp_path)

    Test().test_a_document_is_read_as_it_was_written_and_can_be_replaced(tmp_path)
