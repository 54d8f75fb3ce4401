"""What one process was answered when it opened a checkpoint is enough for another one to open it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.errors import CoordinationError, NotACheckpointError, StorageError
from penstock.handlers import AutoLayout, LocalStore
from penstock.handlers.coordinators.recorded_answers import AnsweredStore, RecordingStore
from penstock.testing import FaultyStore, MemoryStore

TREE = {"a": np.arange(12.0).reshape(3, 4), "b": {"c": 3, "text": "hello"}}


@pytest.mark.parametrize("form", [{}, {"ocdbt": False}, {"zarr": 3}], ids=str)
async def test_the_others_ask_the_store_for_nothing(form: Any, tmp_path: Path) -> None:
    async with penstock.Checkpointer(save_format=penstock.SaveFormat(**form)) as opened:
        await (await opened.save(tmp_path / "a", TREE))

    recorder: Any = RecordingStore(LocalStore())
    first = AutoLayout().open(recorder, str(tmp_path / "a"))
    told = recorder.encoded()
    shutil.rmtree(tmp_path / "a")

    inner = FaultyStore(LocalStore())
    answered: Any = AnsweredStore(inner, told)
    second = AutoLayout().open(answered, str(tmp_path / "a"))
    assert [leaf.info.name for leaf in second.leaves] == [leaf.info.name for leaf in first.leaves]
    assert [leaf.spec for leaf in second.leaves] == [leaf.spec for leaf in first.leaves]
    assert not inner.operations


def test_answers_that_were_not_recorded_are_asked_of_the_store(tmp_path: Path) -> None:
    (tmp_path / "told").write_bytes(b"1")
    recorder: Any = RecordingStore(LocalStore())
    assert recorder.read_file(str(tmp_path / "told")) == b"1"
    with pytest.raises(StorageError):
        recorder.read_file(str(tmp_path / "absent"))

    answered: Any = AnsweredStore(LocalStore(), recorder.encoded())
    assert recorder.read_file(str(tmp_path / "told")) == b"1"  # and keeps no more
    (tmp_path / "told").write_bytes(b"22")
    (tmp_path / "absent").write_bytes(b"3")
    assert answered.read_file(str(tmp_path / "told")) == b"1"
    assert answered.size(str(tmp_path / "told")) == 2
    with pytest.raises(StorageError) as told:
        answered.read_file(str(tmp_path / "absent"))

    assert told.value.errno == 2
    answered.forget()
    assert answered.read_file(str(tmp_path / "told")) == b"22"
    assert answered.read_file(str(tmp_path / "absent")) == b"3"


def test_parts_of_files_are_told_and_others_are_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    recorder: Any = RecordingStore(LocalStore())
    file = recorder.open_data_file(str(tmp_path / "a"))
    file.read_at(2, [memoryview(bytearray(3)), memoryview(bytearray(1))])
    file.close()

    answered: Any = AnsweredStore(LocalStore(), recorder.encoded())
    (tmp_path / "a").write_bytes(b"abcdefghij")
    file, parts = answered.open_data_file(str(tmp_path / "a")), [bytearray(1), bytearray(3)]
    file.read_at(2, [memoryview(part) for part in parts])
    assert parts == [b"2", b"345"]
    file.read_at(3, [memoryview(part) for part in parts])
    assert parts == [b"d", b"efg"]
    file.close()


def test_a_recording_store_offers_what_its_store_offers_and_no_more() -> None:
    for make in (RecordingStore, lambda store: AnsweredStore(store, RecordingStore(store).encoded())):
        for store in (LocalStore(), MemoryStore()):
            made = make(store)
            assert (made.directories is None) is (store.directories is None)
            assert (made.system_files is None) is (store.system_files is None)
            assert made.kvstore_spec("/run") == store.kvstore_spec("/run")


def test_an_error_of_the_first_is_the_error_of_all(tmp_path: Path) -> None:
    recorder: Any = RecordingStore(LocalStore())
    with pytest.raises(NotACheckpointError):
        AutoLayout().open(recorder, str(tmp_path / "nothing"))

    answered: Any = AnsweredStore(LocalStore(), recorder.encoded())
    with pytest.raises(NotACheckpointError):
        AutoLayout().open(answered, str(tmp_path / "nothing"))


@pytest.mark.parametrize("told", [b"", b"x", b"x\x9c\x03\x00\x00\x00\x00\x01"])
def test_what_cannot_be_read_is_refused(told: bytes) -> None:
    with pytest.raises(CoordinationError, match="one penstock"):
        AnsweredStore(LocalStore(), told)
