"""Folders of transformers: written byte for byte, read, and what is next to their tensors carried along.

`tests/corpus/huggingface` is what the real libraries wrote; `make.py` there says how.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import pytest

import penstock
from penstock.cli import main
from penstock.errors import (
    ChecksumError,
    DestinationExistsError,
    InvalidLeafError,
    MissingFileError,
    PathError,
    SpecError,
)
from penstock.handlers import LocalStore
from penstock.handlers.formats.safetensors.pretrained_layout import PretrainedLayout, in_natural_order
from penstock.handlers.formats.safetensors.safetensors_checkpoint import open_checkpoint

CORPUS: Final = Path(__file__).parents[3] / "corpus/huggingface"
WHOLE, SHARDED = CORPUS / "whole", CORPUS / "sharded"


def files_in(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


class TestByteForByte:
    def test_a_folder_of_one_file_comes_back_from_orbax_as_it_was(self, tmp_path: Path) -> None:
        penstock.sync.convert(WHOLE, tmp_path / "orbax")
        report = penstock.sync.convert(tmp_path / "orbax", tmp_path / "back", format="huggingface")

        assert report.n_leaves == 21
        assert files_in(tmp_path / "back") == files_in(WHOLE)

    def test_files_become_one(self, tmp_path: Path) -> None:
        penstock.sync.convert(SHARDED, tmp_path / "one", format="huggingface")

        assert files_in(tmp_path / "one") == files_in(WHOLE)

    @pytest.mark.parametrize("most", [500, "0.5KB"])
    async def test_the_same_tensors_in_order_become_the_same_files_and_index(
        self, tmp_path: Path, most: Any
    ) -> None:
        arrays = await penstock.restore(WHOLE)
        order = json.loads((CORPUS / "order.json").read_text())
        layout = PretrainedLayout(most, order)
        async with penstock.Checkpointer(layout=layout) as checkpointer:
            await (await checkpointer.save(tmp_path / "many", arrays))

        expected = files_in(SHARDED)
        for name in ("config.json", "generation_config.json"):
            del expected[name]
        assert len(expected) == 5
        assert files_in(tmp_path / "many") == expected

    def test_every_element_type_is_written_in_the_order_of_safetensors(self, tmp_path: Path) -> None:
        written = CORPUS / "every_dtype.safetensors"

        penstock.sync.convert(written, tmp_path / "orbax", split=None)
        penstock.sync.convert(tmp_path / "orbax", tmp_path / "back", format="huggingface")

        assert files_in(tmp_path / "back") == {"model.safetensors": written.read_bytes()}

    def test_a_tensor_larger_than_a_file_gets_one_and_the_file_before_goes_on(self, tmp_path: Path) -> None:
        sizes = {"a": 2, "b": 9, "c": 2, "d": 3}
        tree = {name: np.zeros(size, np.uint8) for name, size in sizes.items()}
        penstock.sync.save(tmp_path / "orbax", tree)

        penstock.sync.convert(tmp_path / "orbax", tmp_path / "out", format="huggingface", max_shard_bytes=6)

        index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
        assert index["metadata"] == {"total_parameters": 16, "total_size": 16}
        numbers = {name: int(re.findall("[0-9]+", file)[0]) for name, file in index["weight_map"].items()}
        assert numbers == {"b": 1, "a": 2, "c": 2, "d": 3}  # as huggingface_hub deals them

    def test_numbers_in_names_count_by_value(self) -> None:
        names = [f"layers.{number}.w" for number in range(12)]

        assert in_natural_order(["norm", *reversed(names), "embed"]) == ["embed", *names, "norm"]

    def test_the_order_of_the_files_of_the_source_is_kept(self, tmp_path: Path) -> None:
        penstock.sync.convert(SHARDED, tmp_path / "out", format="huggingface", max_shard_bytes="0.7KB")

        index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())["weight_map"]
        assert index["model.embed_tokens.weight"] == min(index.values())
        assert index["lm_head.weight"] == max(index.values())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder as the hub has them, with more than `save_pretrained` writes."""
    path = tmp_path / "model"
    shutil.copytree(WHOLE, path)
    for name in ("tokenizer.json", "tokenizer.model", "chat_template.jinja", "README.md", "modeling_own.py"):
        (path / name).write_text(f"the {name}")
    for name in ("pytorch_model.bin", "flax_model.msgpack", "model.Q4.gguf", "tf_model.h5", ".gitattributes"):
        (path / name).write_text("weights, or hidden")
    (path / "onnx").mkdir()
    (path / "onnx/model.onnx").write_text("weights")
    return path


class TestFilesBeside:
    CARRIED: Final = {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja",
        "README.md", "modeling_own.py",
    }  # fmt: skip

    def test_they_go_to_orbax_and_back(self, model: Path, tmp_path: Path) -> None:
        orbax, back = tmp_path / "orbax", tmp_path / "back"

        penstock.sync.convert(model, orbax)
        penstock.sync.convert(orbax, back, format="huggingface")

        assert {path.name for path in back.iterdir()} == {*self.CARRIED, "model.safetensors"}
        for name in self.CARRIED:
            assert (orbax / name).read_bytes() == (back / name).read_bytes() == (model / name).read_bytes()

    def test_a_folder_of_links_as_the_hub_keeps_them(self, model: Path, tmp_path: Path) -> None:
        blobs, snapshot = tmp_path / "models--a--b/blobs", tmp_path / "models--a--b/snapshots/1"
        shutil.move(model, blobs)
        snapshot.mkdir(parents=True)
        for file in blobs.iterdir():
            (snapshot / file.name).symlink_to(file)
        (snapshot / "here").symlink_to(snapshot)

        penstock.sync.convert(snapshot, tmp_path / "out", format="huggingface")

        assert {path.name for path in (tmp_path / "out").iterdir()} == {*self.CARRIED, "model.safetensors"}
        assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())

    def test_a_checkpoint_with_them_is_intact_restored_and_listed(self, model: Path, tmp_path: Path) -> None:
        penstock.sync.convert(model, tmp_path / "orbax")

        report = penstock.sync.verify(tmp_path / "orbax")
        assert (report.status, report.findings) == ("intact", ())
        restored = penstock.sync.restore(tmp_path / "orbax")
        assert restored["model"]["norm"]["weight"].shape == (8,)

    def test_their_damage_is_found(self, model: Path, tmp_path: Path) -> None:
        penstock.sync.convert(model, tmp_path / "orbax")
        (tmp_path / "orbax/config.json").write_text("{}")

        report = penstock.sync.verify(tmp_path / "orbax")

        assert report.status == "damaged"
        assert "config.json" in str(report.damages[0])

    def test_a_damaged_or_lost_one_is_not_carried_on(self, model: Path, tmp_path: Path) -> None:
        penstock.sync.convert(model, tmp_path / "orbax")
        (tmp_path / "orbax/config.json").write_text("{}")
        with pytest.raises(ChecksumError, match=r"config\.json"):
            penstock.sync.convert(tmp_path / "orbax", tmp_path / "back", format="huggingface")

        (tmp_path / "orbax/config.json").unlink()
        with pytest.raises(MissingFileError, match=r"config\.json"):
            penstock.sync.convert(tmp_path / "orbax", tmp_path / "back", format="huggingface")

        assert not (tmp_path / "back").exists()

    @pytest.mark.parametrize("written", ["orbax", "safetensors"])
    def test_a_repair_takes_those_that_are_intact(
        self, model: Path, tmp_path: Path, written: Literal["orbax", "safetensors"]
    ) -> None:
        penstock.sync.convert(model, tmp_path / "damaged", format=written)
        if written == "orbax":
            (tmp_path / "damaged/README.md").write_text("changed")

        assert main(["repair", str(tmp_path / "damaged"), str(tmp_path / "repaired")]) == 0

        expected = self.CARRIED - ({"README.md"} if written == "orbax" else set())
        repaired = {path.name for path in (tmp_path / "repaired").iterdir()}
        assert repaired & self.CARRIED == expected
        assert penstock.sync.verify(tmp_path / "repaired").status == "intact"

    def test_orbax_reads_a_checkpoint_that_has_them(self, model: Path, tmp_path: Path) -> None:
        import orbax.checkpoint as ocp

        penstock.sync.convert(model, tmp_path / "orbax")

        with ocp.StandardCheckpointer() as checkpointer:
            found: Any = checkpointer.restore(tmp_path / "orbax")
        assert found["model"]["norm"]["weight"].shape == (8,)

    def test_a_file_has_nothing_beside_it(self, model: Path, tmp_path: Path) -> None:
        penstock.sync.convert(model, tmp_path / "out/one.safetensors")

        assert [path.name for path in (tmp_path / "out").iterdir()] == ["one.safetensors"]

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_a_folder_of_safetensors_gets_them_too(
        self, model: Path, tmp_path: Path, overwrite: bool
    ) -> None:
        for again in range(1 + overwrite):
            penstock.sync.convert(model, tmp_path / "out", format="safetensors", overwrite=bool(again))

        assert {path.name for path in (tmp_path / "out").iterdir()} == {*self.CARRIED, "model.safetensors"}


class TestRefused:
    def test_a_folder_with_other_files_is_not_replaced(self, model: Path, tmp_path: Path) -> None:
        kept = tmp_path / "out"
        penstock.sync.convert(model, kept, format="huggingface")
        with pytest.raises(DestinationExistsError):
            penstock.sync.convert(WHOLE, kept, format="huggingface")
        penstock.sync.convert(model, kept, format="huggingface", overwrite=True)
        (kept / "notes.txt").write_text("mine")

        with pytest.raises(PathError, match="not a checkpoint"):
            penstock.sync.convert(model, kept, format="huggingface", overwrite=True)

        assert (kept / "notes.txt").read_text() == "mine"

    def test_a_name_of_a_file(self, tmp_path: Path) -> None:
        with pytest.raises(PathError, match="name of one file"):
            penstock.sync.convert(WHOLE, tmp_path / "a.safetensors", format="huggingface")

    @pytest.mark.parametrize(
        ("leaf", "problem"),
        [("text", "no array but a string"), (None, "no array but a None"), ({}, "no array but a Dict")],
    )
    def test_what_is_no_array(self, tmp_path: Path, leaf: Any, problem: str) -> None:
        penstock.sync.save(tmp_path / "orbax", {"w": np.zeros(3), "other": leaf})

        with pytest.raises(InvalidLeafError, match=problem):
            penstock.sync.convert(tmp_path / "orbax", tmp_path / "out", format="huggingface")

        assert not (tmp_path / "out").exists()
        penstock.sync.convert(
            tmp_path / "orbax", tmp_path / "out", format="huggingface", rename={"other": None}
        )

    def test_a_random_key(self, tmp_path: Path) -> None:
        import jax

        penstock.sync.save(tmp_path / "orbax", {"key": jax.random.key(0)})

        with pytest.raises(InvalidLeafError, match="random key"):
            penstock.sync.convert(tmp_path / "orbax", tmp_path / "out", format="huggingface")

    def test_a_size_that_is_none(self, tmp_path: Path) -> None:
        with pytest.raises(SpecError, match="max_shard_bytes: '5 apples'"):
            penstock.sync.convert(WHOLE, tmp_path / "out", format="huggingface", max_shard_bytes="5 apples")


def test_metadata_of_the_source_goes_into_the_files(tmp_path: Path) -> None:
    penstock.sync.save(tmp_path / "orbax", {"w": np.zeros(3)}, custom_metadata={"who": "me", "step": 3})

    penstock.sync.convert(tmp_path / "orbax", tmp_path / "out", format="huggingface")

    opened = open_checkpoint(LocalStore(), str(tmp_path / "out"))
    assert opened.custom_metadata == {"who": "me", "step": "3", "format": "pt"}


def test_the_command_writes_such_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"

    status = main(["convert", str(WHOLE), str(out), "--format", "huggingface", "--max-shard-size", "1GB"])

    assert status == 0
    assert re.fullmatch(rf"{out}: 21 leaves, 1\.8 kB, in .* s \(huggingface\)\n", capsys.readouterr().out)
    assert files_in(out) == files_in(WHOLE)
