"""Files and folders of safetensors, opened: their leaves, and the trees they can be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tests.handlers.formats.safetensors.test_header import entry, file_of

from penstock.errors import (
    ConfigError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    NotACheckpointError,
    PathError,
    SpecError,
    UnsupportedFormatError,
)
from penstock.handlers import AutoLayout, LocalStore, OrbaxLayout, SafetensorsLayout
from penstock.handlers.formats.safetensors.penstock_metadata import Note, decode, encode
from penstock.handlers.formats.safetensors.safetensors_checkpoint import (
    SafetensorsCheckpoint,
    open_checkpoint,
)
from penstock.handlers.formats.safetensors.tensor_paths import is_safetensors
from penstock.kernel import KeyKind, Layout, ParamInfo
from penstock.kernel.protocols import ArrangedLayout, NamedTensors

STORE = LocalStore()


def opened(path: Path) -> SafetensorsCheckpoint:
    return open_checkpoint(STORE, str(path))


def names(checkpoint: Any) -> list[str]:
    return [leaf.info.name for leaf in checkpoint.leaves]


def keys(checkpoint: Any) -> list[tuple[str, ...]]:
    return [leaf.info.keys for leaf in checkpoint.leaves]


def write_index(folder: Path, weights: dict[str, str], name: str = "model.safetensors.index.json") -> None:
    (folder / name).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weights}))


def shard(folder: Path, file: str, *tensors: str, **metadata: str) -> None:
    save_file({name: np.arange(3) for name in tensors}, folder / file, metadata or None)


def with_note(path: Path, note: object, *tensors: str, dtype: str = "U8") -> Path:
    text = note if isinstance(note, str) else json.dumps(note)
    size = {"U8": 1, "U32": 4}[dtype]
    header = {name: entry(dtype, (1,), at * size, at * size + size) for at, name in enumerate(tensors)}
    path.write_bytes(file_of({"__metadata__": {"penstock": text}, **header}, bytes(size * len(tensors))))
    return path


def test_the_protocols_are_kept() -> None:
    layout: Layout = SafetensorsLayout()
    every: object = AutoLayout()

    assert isinstance(layout, ArrangedLayout)
    assert not isinstance(every, ArrangedLayout)
    assert not isinstance(OrbaxLayout(), ArrangedLayout)


class TestFinding:
    def test_a_file_and_a_folder(self, tmp_path: Path) -> None:
        shard(tmp_path, "any name.safetensors", "a", "b.c", by="somebody")

        for path in (tmp_path, tmp_path / "any name.safetensors"):
            found = opened(path)
            assert names(found) == ["a", "b.c"]
            assert found.custom_metadata == {"by": "somebody"}
            assert found.directory == str(tmp_path)
            assert isinstance(found, NamedTensors)
            assert is_safetensors(STORE, str(path))

    def test_files_beside_are_passed_over(self, tmp_path: Path) -> None:
        shard(tmp_path, "model.safetensors", "a")
        (tmp_path / "config.json").write_text("{}")

        assert names(opened(tmp_path)) == ["a"]

    def test_shards_without_an_index(self, tmp_path: Path) -> None:
        shard(tmp_path, "model-00001-of-00002.safetensors", "a")
        shard(tmp_path, "model-00002-of-00002.safetensors", "b")

        assert names(opened(tmp_path)) == ["a", "b"]

    def test_a_missing_shard_is_named(self, tmp_path: Path) -> None:
        shard(tmp_path, "model-00002-of-00003.safetensors", "a")
        shard(tmp_path, "model-00003-of-00003.safetensors", "b")

        with pytest.raises(CorruptCheckpointError, match=r"model-00001-of-00003\.safetensors: is missing"):
            opened(tmp_path)

    def test_a_tensor_in_two_shards_is_an_error_that_names_both(self, tmp_path: Path) -> None:
        shard(tmp_path, "x.safetensors", "a")
        shard(tmp_path, "y.safetensors", "a")

        with pytest.raises(CorruptCheckpointError, match=r"y.safetensors: holds 'a', which 'x.safetensors'"):
            opened(tmp_path)

    def test_an_index_says_which_files(self, tmp_path: Path) -> None:
        shard(tmp_path, "1.safetensors", "a", "b")
        shard(tmp_path, "2.safetensors", "c", "not listed")
        shard(tmp_path, "other.safetensors", "a")
        write_index(tmp_path, {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"})

        assert names(opened(tmp_path)) == ["a", "b", "c", "not listed"]

    def test_the_usual_index_of_several(self, tmp_path: Path) -> None:
        shard(tmp_path, "1.safetensors", "a")
        shard(tmp_path, "2.safetensors", "b")
        write_index(tmp_path, {"a": "1.safetensors"}, "fp16.safetensors.index.json")
        write_index(tmp_path, {"b": "2.safetensors"})
        assert names(opened(tmp_path)) == ["b"]

        (tmp_path / "model.safetensors.index.json").rename(tmp_path / "x.safetensors.index.json")
        with pytest.raises(UnsupportedFormatError, match="2 indices"):
            opened(tmp_path)

    @pytest.mark.parametrize(
        ("weights", "said"),
        [
            ({"a": "1.safetensors", "z": "1.safetensors"}, "lists 'z', which '1.safetensors' does not hold"),
            ({"a": "2.safetensors"}, "2.safetensors: is missing, and 'model.safetensors.index.json'"),
            ({"a": "../1.safetensors"}, "no file here"),
            ({"a": "/etc/passwd"}, "no file here"),
            ({"a": "config.json"}, "no file here"),
            ({"a": 3}, "not a string"),
            ([], "not an object"),
        ],
    )
    def test_a_wrong_index(self, tmp_path: Path, weights: Any, said: str) -> None:
        shard(tmp_path, "1.safetensors", "a")
        write_index(tmp_path, weights)

        with pytest.raises(CorruptCheckpointError, match=said):
            opened(tmp_path)

    def test_an_index_that_names_the_wrong_file(self, tmp_path: Path) -> None:
        shard(tmp_path, "1.safetensors", "a")
        shard(tmp_path, "2.safetensors", "b")
        write_index(tmp_path, {"a": "2.safetensors", "b": "1.safetensors"})

        with pytest.raises(CorruptCheckpointError, match=r"lies in .2\.safetensors., but it lies in .1\."):
            opened(tmp_path)

    def test_what_is_not_safetensors_is_not_recognised(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "notes.txt").touch()
        orbax = tmp_path / "orbax"
        orbax.mkdir()
        shard(orbax, "a.safetensors", "a")
        (orbax / "_METADATA").touch()
        half = tmp_path / "x.safetensors.orbax-checkpoint-tmp"
        half.mkdir()
        shard(half, "model.safetensors", "a")

        for path in ("", "empty", "notes.txt", "orbax", "missing.safetensors", half.name):
            assert not is_safetensors(STORE, str(tmp_path / path)), path

    @pytest.mark.parametrize(
        ("name", "error"),
        [
            ("missing", NotACheckpointError),
            ("missing.safetensors", NotACheckpointError),
            ("empty", NotACheckpointError),
            ("x.safetensors.orbax-checkpoint-tmp", IncompleteCheckpointError),
        ],
    )
    def test_the_layout_by_itself_says_what_is_wrong(
        self, tmp_path: Path, name: str, error: type[Exception]
    ) -> None:
        (tmp_path / "empty").mkdir()

        with pytest.raises(error):
            SafetensorsLayout().open(STORE, str(tmp_path / name))

    def test_files_that_disagree_about_metadata_are_all_heard(self, tmp_path: Path) -> None:
        shard(tmp_path, "1.safetensors", "a", same="x", other="1")
        shard(tmp_path, "2.safetensors", "b", same="x", other="2", only="3")

        assert opened(tmp_path).custom_metadata == {
            "same": "x",
            "other": {"1.safetensors": "1", "2.safetensors": "2"},
            "only": "3",
        }


class TestLayout:
    def test_what_may_be_overwritten(self, tmp_path: Path) -> None:
        layout = SafetensorsLayout()
        shard(tmp_path, "model.safetensors", "a")
        write_index(tmp_path, {"a": "model.safetensors"})
        assert layout.recognises(STORE, str(tmp_path))
        assert layout.recognises(STORE, str(tmp_path / "model.safetensors"))

        (tmp_path / "config.json").touch()
        assert not layout.recognises(STORE, str(tmp_path)), "the config would be lost"
        assert not layout.recognises(STORE, str(tmp_path / "config.json"))

    def test_temporary_names_are_made_and_refused(self) -> None:
        assert (
            SafetensorsLayout().temporary_name("/a/b.safetensors") == "/a/b.safetensors.orbax-checkpoint-tmp"
        )
        with pytest.raises(PathError, match="interrupted"):
            SafetensorsLayout().temporary_name("/a/b.orbax-checkpoint-tmp")
        with pytest.raises(PathError, match="cannot split"):
            SafetensorsLayout(10).temporary_name("/a/b.safetensors")
        with pytest.raises(ConfigError, match="positive"):
            SafetensorsLayout(0)


class TestSplitting:
    def test_flat_is_the_default(self, tmp_path: Path) -> None:
        shard(tmp_path, "a.safetensors", "a.b", "c.0")

        found = opened(tmp_path)

        assert keys(found) == [("a.b",), ("c.0",)]
        assert [leaf.info.key_path for leaf in found.leaves] == ["['a.b']", "['c.0']"]

    def test_numbers_stay_keys_of_dicts(self, tmp_path: Path) -> None:
        shard(tmp_path, "a.safetensors", "layers.0.w", "layers.10.w", ".", "x")

        found = opened(tmp_path).split(".")

        by_name = {leaf.info.name: leaf.info for leaf in found.leaves}
        assert by_name["layers.10.w"].keys == ("layers", "10", "w")
        assert by_name["layers.10.w"].key_path == "['layers']['10']['w']"
        assert set(by_name["layers.10.w"].kinds) == {KeyKind.MAPPING}
        assert by_name["."].keys == ("", "")

    def test_any_separator(self, tmp_path: Path) -> None:
        shard(tmp_path, "a.safetensors", "a/b.c")

        assert keys(opened(tmp_path).split("/")) == [("a", "b.c")]
        assert keys(opened(tmp_path).split("::")) == [("a/b.c",)]

    @pytest.mark.parametrize("pair", [("a", "a.b"), ("a.b", "a"), ("a.b.c.d", "a.b"), ("", ".x")])
    def test_collisions_name_both(self, tmp_path: Path, pair: tuple[str, str]) -> None:
        shard(tmp_path, "a.safetensors", *pair, "z")

        with pytest.raises(SpecError) as raised:
            opened(tmp_path).split(".")

        assert all(repr(name) in str(raised.value) for name in pair)
        assert len(opened(tmp_path).split("/").leaves) == 3

    @given(st.sets(st.text("ab.", max_size=6), min_size=1, max_size=8))
    def test_split_or_refused(self, tmp_path_factory: pytest.TempPathFactory, chosen: set[str]) -> None:
        path = tmp_path_factory.mktemp("split") / "a.safetensors"
        save_file({name: np.zeros(1) for name in chosen}, path)
        parts = {name: name.split(".") for name in chosen}
        collide = any(a != b and parts[b][: len(parts[a])] == parts[a] for a in chosen for b in chosen)

        if collide:
            with pytest.raises(SpecError):
                opened(path).split(".")
        else:
            assert {".".join(key) for key in keys(opened(path).split("."))} == chosen


def place(*path: str | int) -> ParamInfo:
    kinds = tuple(KeyKind.SEQUENCE if isinstance(key, int) else KeyKind.MAPPING for key in path)
    return ParamInfo(tuple(map(str, path)), kinds, "".join(f"[{key!r}]" for key in path))


class TestFollowing:
    def test_leaves_go_where_their_names_are(self, tmp_path: Path) -> None:
        shard(tmp_path, "a.safetensors", "a.0", "a.1", "b", "other")
        wanted = [(place("a", 0), 1), (place("a", 1), 1), (place("b"), 1), (place("missing"), 1)]

        found = opened(tmp_path).following(wanted)

        assert keys(found) == [("a", "0"), ("a", "1"), ("b",), ("other",)]
        assert found.leaves[0].info.kinds == (KeyKind.MAPPING, KeyKind.SEQUENCE)
        assert found.leaves[0].info.key_path == "['a'][0]"
        assert found.leaves[0].info.directory == str(tmp_path)

    def test_what_a_foreign_file_cannot_say_is_taken_from_the_target(self, tmp_path: Path) -> None:
        shard(tmp_path, "a.safetensors", "a")
        empties: list[tuple[ParamInfo, Any]] = [
            (place("n"), None),
            (place("d"), {}),
            (place("l"), []),
            (place("t"), ()),
            (place("x"), 3),
        ]

        found = opened(tmp_path).following([(place("a"), 1), *empties])

        markers = {leaf.info.name: leaf.spec.typestr for leaf in found.leaves[1:]}
        assert markers == {"n": "None", "d": "Dict", "l": "List", "t": "Tuple"}

    def test_what_penstock_recorded_is_not_guessed(self, tmp_path: Path) -> None:
        path = with_note(tmp_path / "a.safetensors", {"version": 1, "empty": {"n": "None"}}, "a")

        found = opened(path).following([(place("a"), 1), (place("n"), None), (place("m"), None)])

        assert names(found) == ["a", "n"]


class TestNote:
    def test_the_note_records_the_whole_tree(self, tmp_path: Path) -> None:
        note = Note(
            paths={"a.0": ("a", 0), "k": ("k",)},
            strings={"s": "text"},
            empty={"e": "Tuple"},
            random_keys={"k": "threefry2x32"},
            kinds={"k": "scalar"},
            kind="jax.Array",
            metadata={"lr": 0.5, "steps": [1]},
            added=("format",),
        )
        fields: Any = {**vars_of(note), "added": ["format"]}
        assert decode("p", encode(note)) == Note(**fields)

        path = with_note(tmp_path / "a.safetensors", encode(note), "a.0", "k", dtype="U32")
        found = opened(path)
        specs = {leaf.info.name: leaf.spec for leaf in found.leaves}
        assert found.custom_metadata == {"lr": 0.5, "steps": [1]}
        assert specs["a.0"].typestr == "jax.Array"
        assert (specs["k"].typestr, specs["k"].extended_dtype) == ("scalar", "threefry2x32")
        assert (specs["s"].typestr, specs["s"].text) == ("string", "text")
        assert specs["e"].typestr == "Tuple"
        split = {leaf.info.name: leaf.info for leaf in found.split(".").leaves}
        assert split["a.0"].kinds == (KeyKind.MAPPING, KeyKind.SEQUENCE)
        assert keys(found.split("/"))[0] == ("a.0",)

    @pytest.mark.parametrize(
        ("note", "said"),
        [
            ("", "is empty"),
            ("{", "not JSON"),
            ("[]", "not an object"),
            ({}, "version None"),
            ({"version": 0}, "version 0"),
            ({"version": "1"}, "version '1'"),
            ({"version": 1, "kind": 3}, "kind"),
            ({"version": 1, "paths": {"a": "x"}}, "path of 'a'"),
            ({"version": 1, "paths": {"a": [-1]}}, "path of 'a'"),
            ({"version": 1, "paths": {"a": [True]}}, "path of 'a'"),
            ({"version": 1, "strings": {"s": 1}}, "strings"),
            ({"version": 1, "strings": {"a": "x"}}, "'a', which is there already"),
            ({"version": 1, "strings": {"s": "x"}, "empty": {"s": "None"}}, "'s', which is there"),
            ({"version": 1, "empty": {"e": "Set"}}, "'Set'"),
            ({"version": 1, "kinds": {"a": "custom"}}, "'custom'"),
            ({"version": 1, "random_keys": {"a": "rbg"}}, "holds PRNG keys, but it is uint8"),
            ({"version": 1, "metadata": []}, "metadata"),
            ({"version": 1, "added": [1]}, "added"),
        ],
    )
    def test_a_damaged_note_is_an_error(self, tmp_path: Path, note: object, said: str) -> None:
        with pytest.raises(CorruptCheckpointError, match=said):
            opened(with_note(tmp_path / "a.safetensors", note, "a"))

    def test_a_note_from_the_future(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedFormatError, match="version 2"):
            opened(with_note(tmp_path / "a.safetensors", {"version": 2}, "a"))

    def test_tensors_alike_may_be_of_several_kinds(self, tmp_path: Path) -> None:
        kinds = {"b": "scalar", "d": "jax.Array"}
        path = with_note(tmp_path / "a.safetensors", {"version": 1, "kinds": kinds}, "a", "b", "c", "d")

        typestrs = [leaf.spec.typestr for leaf in opened(path).leaves]
        assert typestrs == ["np.ndarray", "scalar", "np.ndarray", "jax.Array"]

    @pytest.mark.parametrize("second", [["x", "y"], ["x"]])
    def test_recorded_paths_may_collide_too(self, tmp_path: Path, second: list[str]) -> None:
        note = {"version": 1, "paths": {"a": ["x"], "b": second}}

        with pytest.raises(SpecError, match="'a' and 'b'"):
            opened(with_note(tmp_path / "a.safetensors", note, "a", "b")).split(".")


def vars_of(note: Note) -> dict[str, Any]:
    return {name: getattr(note, name) for name in Note.__slots__}
