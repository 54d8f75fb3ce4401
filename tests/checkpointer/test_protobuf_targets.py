"""A message comes back as its text, or as the message that the target asks for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.struct_pb2 import Struct, Value
from tests.unsealed import unseal

import penstock
from penstock.errors import CorruptCheckpointError
from penstock.handlers import Composite
from penstock.items import Proto


@pytest.fixture
def path(tmp_path: Path) -> Path:
    penstock.sync.save(tmp_path / "a", Composite(message=Proto(Value(string_value="x")), tree={"a": 1}))
    return tmp_path / "a"


def test_a_proto_is_restored_as_text_and_as_a_message(path: Path) -> None:
    for target in (Value, Value(), Value(number_value=3)):
        found = penstock.sync.restore(path, item="message", like=target)
        assert (type(found), found) == (Value, Value(string_value="x"))

    text = penstock.sync.restore(path, item="message")
    assert text == penstock.sync.restore(path / "message", like=str) == 'string_value: "x"\n'


def test_a_proto_is_refused_as_a_message_of_another_class(path: Path) -> None:
    with pytest.raises(CorruptCheckpointError, match=f"{path}.*: holds no text of a Struct: "):
        penstock.sync.restore(path, item="message", like=Struct)


def test_a_damaged_text_is_an_error(path: Path) -> None:
    unseal(path)
    (path / "message" / "proto.pbtxt").write_text("string_value: ")
    with pytest.raises(CorruptCheckpointError, match="holds no text of a Value"):
        penstock.sync.restore(path, item="message", like=Value)


@pytest.mark.process
def test_protobuf_is_not_imported_for_other_targets(path: Path) -> None:
    program = f"import sys, penstock.sync as s; s.restore({str(path)!r}, item='tree', like={{'a': 1}})"
    program += "; assert 'google.protobuf' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
