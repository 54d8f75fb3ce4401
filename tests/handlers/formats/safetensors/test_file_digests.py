"""Checksums in the header of a safetensors file: what is damage, what another program wrote anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import penstock
from penstock.errors import ChecksumError, CorruptCheckpointError
from penstock.handlers.formats.safetensors.file_digests import (
    BLOCK_BYTES,
    MEMBER,
    blank,
    blocks_of,
    ended,
    filled,
    find,
)
from penstock.handlers.formats.safetensors.safetensors_layout import WrittenDigests
from penstock.kernel import Document, LeafSpec
from penstock.kernel.protocols import Arrangement, FilePosition, WrittenRange

TREE = {"a": np.arange(50, dtype=np.float32), "b": {"c": np.arange(6, dtype=np.int8)}, "s": "text"}


def unfilled(count: int, **more: str) -> bytes:
    members = {"__metadata__": {**more, MEMBER: blank(count)}, "x": 1}
    return ended(json.dumps(members, separators=(",", ":")).encode())


def document(**more: str) -> bytes:
    """Return a document with three checksums, as penstock ends one."""
    return filled(unfilled(3, **more), np.array([1, 2, 3], np.uint32))


def found_in(data: bytes) -> Any:
    texts = json.loads(data)["__metadata__"]
    return find("file", data, texts)


def export(folder: Path, tree: Any = TREE, **metadata: Any) -> Path:
    path = folder / "x.safetensors"
    penstock.sync.export_safetensors(tree, path, custom_metadata=metadata)
    return path


def metadata_of(path: Path) -> Any:
    with safe_open(path, "np") as file:
        return file.metadata()


@pytest.mark.parametrize("count", [0, 1, 2, 3, 1000])
def test_the_text_keeps_its_length(count: int) -> None:
    sums = np.random.default_rng(0).integers(0, 1 << 32, count, np.uint32)
    empty = unfilled(count)

    full = filled(empty, sums)

    assert len(full) == len(empty)
    assert (found_in(full).crc32cs == sums).all()
    assert found_in(full).block_bytes == BLOCK_BYTES


def test_the_record_of_digests_stays_small() -> None:
    assert len(blank(10_000)) < 60_000


@pytest.mark.parametrize(
    "more", [{}, {"a": "crc32c, said otherwise"}, {"b": f'"{MEMBER}":"crc32c 00000000 1 A"'}]
)
def test_every_flipped_bit_is_found(more: dict[str, str]) -> None:
    data = document(**more)
    assert found_in(data) is not None

    for at in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            try:
                members = json.loads(flipped)
                texts = members.get("__metadata__", members)
            except ValueError:
                continue  # no reader takes it

            with pytest.raises(CorruptCheckpointError):
                find("file", bytes(flipped), texts)


def test_what_another_program_ended_is_not_called_damaged() -> None:
    anew = document().replace(b'"x":1', b'"x":2').rstrip()

    assert found_in(anew) is None
    assert found_in(anew + b" " * 7) is None
    assert found_in(anew + b" " * 4096) is None
    with pytest.raises(ChecksumError):
        found_in(anew + b" " * 8)


def test_without_the_text_nothing_is_claimed() -> None:
    assert find("file", ended(b'{"__metadata__":{"sum":"abc"}}'), {"sum": "abc"}) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [(b"999 AAAAA==", "are none"), (b"999 AAAA", "are none"), (b"0 AAAAAA==", "1 checksums")],
)
def test_what_penstock_cannot_have_written(text: bytes, said: str) -> None:
    data = b'{"__metadata__":{"penstock.digests":"crc32c 00000000 %b"}}' % text
    data = data.replace(b"00000000", b"%08x" % crc32c(data))

    with pytest.raises(CorruptCheckpointError, match=said):
        found_in(data).at("file", np.array([0]), np.array([1 << 40]))


@given(st.data())
def test_the_checksum_of_a_block_is_that_of_its_parts_in_any_order(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=5))
    content = np.random.default_rng(len(sizes)).bytes(sum(sizes))
    head = unfilled(sum(map(bool, sizes)))
    offsets = [sum(sizes[:at]) for at in range(len(sizes))]
    arrangement = Arrangement(
        (Document("f", bytes(8) + head),), tuple([FilePosition("f", offset) for offset in offsets])
    )
    specs = [LeafSpec("np.ndarray", (n,), "uint8", 1, (n or 1,)) for n in sizes]
    parts: list[WrittenRange] = []
    for offset, size in zip(offsets, sizes, strict=True):
        cuts = sorted(data.draw(st.sets(st.integers(1, max(1, size - 1)), max_size=4))) if size > 1 else []
        for start, stop in zip([0, *cuts], [*cuts, size], strict=True):
            if start < stop:
                part = content[offset + start : offset + stop]
                parts.append(WrittenRange(offset + start, len(part), crc32c(part)))

    digests, theirs = WrittenDigests(arrangement, specs), WrittenDigests(arrangement, specs)
    for each in data.draw(st.permutations(parts)):  # by this process, or another one
        data.draw(st.sampled_from([digests, theirs])).add({"f": [each]})

    digests.join(theirs.encoded())
    with pytest.raises(ValueError, match="other blocks"):
        digests.join(theirs.encoded() + bytes(4))

    expected = [crc32c(content[at : at + n]) for at, n in zip(offsets, sizes, strict=True) if n]
    assert found_in(digests.head("f")[8:]).crc32cs.tolist() == expected


def test_blocks_of_large_tensors() -> None:
    starts, lengths = blocks_of(np.array([10, 11, 25]), np.array([1, 14, 0]), 4)

    assert starts.tolist() == [10, 11, 15, 19, 23]
    assert lengths.tolist() == [1, 4, 4, 4, 2]


class TestFilesOfOthers:
    """Each is made of a file that penstock wrote, with other values, and its metadata carried over."""

    def rewritten(self, folder: Path) -> tuple[Path, dict[str, Any]]:
        path = export(folder, lr=0.5, kind="x")
        tensors = {name: value + 1 for name, value in load_file(path).items()}
        save_file(tensors, path, metadata_of(path))
        return path, tensors

    def test_files_of_others_are_restored_as_they_are(self, tmp_path: Path) -> None:
        path, tensors = self.rewritten(tmp_path)

        found = penstock.sync.restore(path)

        assert {name: value.tobytes() for name, value in found.items() if name != "s"} == {
            name: value.tobytes() for name, value in tensors.items()
        }
        assert penstock.sync.metadata(path).custom_metadata == {"lr": 0.5, "kind": "x"}

    def test_verify_reports_files_without_digests(self, tmp_path: Path) -> None:
        path, _ = self.rewritten(tmp_path)

        report = penstock.sync.verify(path)

        assert report.status == "unchecked"
        assert "written anew by another program" in report.findings[0].problem

    def test_a_conversion_gives_them_digests_of_their_own(self, tmp_path: Path) -> None:
        path, tensors = self.rewritten(tmp_path)

        penstock.sync.convert(path, tmp_path / "new.safetensors")

        assert penstock.sync.verify(tmp_path / "new.safetensors").intact
        assert load_file(tmp_path / "new.safetensors")["a"].tobytes() == tensors["a"].tobytes()
        assert penstock.sync.metadata(tmp_path / "new.safetensors").custom_metadata == {
            "lr": 0.5,
            "kind": "x",
        }

    def test_files_of_others_without_metadata_are_restored(self, tmp_path: Path) -> None:
        path = export(tmp_path)
        save_file(load_file(path), path)

        assert penstock.sync.restore(path)["a"].tobytes() == TREE["a"].tobytes()  # type: ignore[attr-defined]
        assert "records no checksums" in penstock.sync.verify(path).findings[0].problem


def test_a_copy_under_another_name_is_compared_all_the_same(tmp_path: Path) -> None:
    path = export(tmp_path).rename(tmp_path / "other name.safetensors")
    assert penstock.sync.verify(path).intact

    data = bytearray(path.read_bytes())
    data[-1] ^= 4
    path.write_bytes(data)

    with pytest.raises(ChecksumError) as caught:
        penstock.sync.restore(path)
    assert caught.value.key_path == "['b.c']"
    assert penstock.sync.restore(path, verify=False)["a"].tobytes() == TREE["a"].tobytes()  # type: ignore[attr-defined]
    (damage,) = penstock.sync.verify(path).damages
    assert damage.key_paths == ("['b.c']",)


def test_an_index_that_was_changed(tmp_path: Path) -> None:
    tensors = {f"l{at}": np.arange(9) for at in range(3)}
    penstock.sync.export_safetensors(tensors, tmp_path / "m", max_shard_bytes=80)
    index = tmp_path / "m" / "model.safetensors.index.json"
    assert penstock.sync.verify(tmp_path / "m").intact
    said = json.loads(index.read_text())

    index.write_text(json.dumps(said, indent=2, sort_keys=True) + "\n")  # as transformers writes one
    assert set(penstock.sync.restore(tmp_path / "m")) == set(tensors)
    (finding,) = penstock.sync.verify(tmp_path / "m").findings
    assert (finding.kind, finding.file) == ("unchecked", str(index))


def test_only_blocks_that_are_needed_are_compared(tmp_path: Path) -> None:
    rows = np.arange(3 * BLOCK_BYTES // 8, dtype=np.int64).reshape(-1, 1024)
    path = export(tmp_path, {"a": rows})
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # in the last of three blocks
    path.write_bytes(data)

    half = penstock.sync.restore(path, like={"a": rows[: len(rows) // 2]}, strict=False)["a"]
    assert half.tobytes() == rows[: len(rows) // 2].tobytes()
    with pytest.raises(ChecksumError):
        penstock.sync.restore(path, like={"a": rows[:, :5]}, strict=False)
