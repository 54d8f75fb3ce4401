"""A coordination service in files."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest
from tests.key_values_conformance import KeyValuesConformance

from penstock.errors import CoordinationError, StorageError
from penstock.handlers import LocalStore
from penstock.handlers.coordinators.store_key_values import StoreKeyValues
from penstock.kernel.protocols import KeyValues
from penstock.testing import FaultyStore


class TestConformance(KeyValuesConformance):
    """What every service must do."""

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self._place = str(tmp_path / "values")

    def make_views(self, count: int) -> list[KeyValues]:
        return [StoreKeyValues(LocalStore(), self._place) for _ in range(count)]


def test_a_value_and_what_is_below_it_do_not_meet(tmp_path: Path) -> None:
    values = StoreKeyValues(LocalStore(), str(tmp_path / "values"))
    for key in ("a", "a/b", "a/b/c", "x y/%2F.value"):
        assert values.put(key, key.encode(), False)

    assert dict(values.under("a/")) == {"b": b"a/b", "b/c": b"a/b/c"}
    assert dict(values.under("x y/")) == {"%2F.value": b"x y/%2F.value"}
    values.delete("a/b")
    assert values.wait("a/b", 0.0) is None
    assert values.wait("a/b/c", 0.0) == b"a/b/c"


@pytest.mark.parametrize("operation", ["write_file", "make_directory"])
def test_a_store_that_refuses_is_a_service_that_cannot_be_reached(tmp_path: Path, operation: str) -> None:
    store = FaultyStore(LocalStore())
    values = StoreKeyValues(store, str(tmp_path / "values"))
    store.fail_on(operation, 1, StorageError(operation, str(tmp_path), "gone", errno.EIO))
    with pytest.raises(CoordinationError, match="gone"):
        values.put("a", b"1", False)


def test_a_value_that_is_seen_in_part_is_read_again(tmp_path: Path) -> None:
    """Stores replace files as they like: a reader may see one that has no bytes yet."""
    values = StoreKeyValues(LocalStore(), str(tmp_path / "values"))
    assert values.put("a", b"whole", False)
    (file,) = [path for path in (tmp_path / "values").rglob("*") if path.is_file()]
    whole = file.read_bytes()
    file.write_bytes(b"")
    found: list[bytes | None] = []
    waiting = threading.Thread(target=lambda: found.append(values.wait("a", 30.0)))
    waiting.start()
    file.write_bytes(whole[:3])
    file.write_bytes(whole)
    waiting.join(30.0)
    assert found == [b"whole"]
    file.write_bytes(whole[:-1])
    assert values.wait("a", 0.0) is None
