"""What a path may point at: items of all forms, steps, directories of steps; whole, damaged, unfinished."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    NotACheckpointError,
    StorageError,
    UnsupportedFormatError,
)
from penstock.handlers import LocalStore, OrbaxLayout
from penstock.handlers.formats.orbax.stored_checkpoint import OrbaxCheckpoint
from penstock.kernel import KeyKind

TREE = json.dumps(
    {
        "tree_metadata": {
            "s": {
                "key_metadata": [{"key": "s", "key_type": 2}],
                "value_metadata": {"value_type": "string", "skip_deserialize": False},
            }
        }
    }
)
BEGUN = '{"init_timestamp_nsecs": 5, "commit_timestamp_nsecs": null}'
ENDED = '{"init_timestamp_nsecs": 5, "commit_timestamp_nsecs": 6}'


def make(folder: Path, **files: str | bytes) -> Path:
    """Write files; `__` in a name is a slash, and a name that ends in one is a directory."""
    for name, content in files.items():
        path = folder / name.replace("__", "/")
        if name.endswith("__"):
            path.mkdir(parents=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def tree(at: str, text: str) -> dict[str, str]:
    return {f"{at}___METADATA": TREE, f"{at}___strings.json": json.dumps({"s": text})}


def open_(path: Path, item: str | None = None) -> OrbaxCheckpoint:
    return OrbaxLayout().open(LocalStore(), str(path), item)


def text(path: Path, item: str | None = None) -> str | None:
    (leaf,) = open_(path, item).leaves
    return leaf.spec.text


def corrupt(path: Path) -> str:
    with pytest.raises(CorruptCheckpointError) as caught:
        open_(path)
    return str(caught.value)


class TestSteps:
    @pytest.mark.parametrize(
        "names", [("1", "9", "10"), ("s_1", "s_09", "s_10"), ("a_b_1", "a_b_2"), ("0", "00012")]
    )
    def test_the_highest_number_is_taken(self, names: tuple[str, ...], tmp_path: Path) -> None:
        for name in names:
            make(tmp_path, **tree(name, name))

        assert text(tmp_path) == names[-1]
        assert open_(tmp_path).path == str(tmp_path / names[-1])

    def test_files_next_to_steps_are_ignored(self, tmp_path: Path) -> None:
        make(tmp_path, **tree("3__default", "three"), **tree("_SNAPSHOTS__9", "old"), **tree("x9", "other"))
        make(
            tmp_path,
            metadata___ROOT_METADATA='{"custom_metadata": {"a": 1}}',
            notes_7="a file",
            run_8__logs__=b"",
        )

        assert text(tmp_path) == "three"
        assert open_(tmp_path).root_custom_metadata == {"a": 1}

    @pytest.mark.parametrize(
        "unfinished",
        [
            tree("9.orbax-checkpoint-tmp", "x"),
            tree("9.orbax-checkpoint-tmp-17", "x"),
            {"9__": ""},
            {"9___CHECKPOINT_METADATA": BEGUN, **tree("9__default", "x")},
            {"9___CHECKPOINT_METADATA": BEGUN},
            tree("9__default.orbax-checkpoint-tmp", "x"),
        ],
        ids=["tmp", "old tmp", "empty", "begun", "just begun", "item"],
    )
    def test_an_unfinished_step_is_never_taken(self, unfinished: dict[str, str], tmp_path: Path) -> None:
        make(tmp_path, **unfinished)
        with pytest.raises(IncompleteCheckpointError):
            open_(tmp_path)

        make(tmp_path, **tree("8__default", "eight"))
        assert text(tmp_path) == "eight"

    def test_a_step_with_a_commit_mark_is_finished(self, tmp_path: Path) -> None:
        make(tmp_path, **tree("7", "x"), **tree("9", "nine"))
        make(tmp_path, **{"9___CHECKPOINT_METADATA": BEGUN, "9__commit_success.txt": ""})

        assert text(tmp_path) == "nine"

    def test_a_damaged_step_is_an_error_and_not_passed_over(self, tmp_path: Path) -> None:
        make(tmp_path, **tree("7", "x"), **{"9___CHECKPOINT_METADATA": "{"})
        assert "9/_CHECKPOINT_METADATA: is not JSON" in corrupt(tmp_path)

        make(tmp_path, **{"9___CHECKPOINT_METADATA": '{"item_handlers": {"state": "x"}}'})
        assert "9/state: is missing, and _CHECKPOINT_METADATA lists it" in corrupt(tmp_path)

    def test_an_older_step_is_not_taken_for_one_that_only_its_own_handler_reads(self, tmp_path: Path) -> None:
        make(tmp_path, **tree("2", "x"), **{"3__state__my_state.npz": b""})
        with pytest.raises(UnsupportedFormatError, match=r"holds a later step, '3'.*open a step by its own"):
            open_(tmp_path)

        assert text(tmp_path / "2") == "x"
        make(tmp_path, **tree("4", "y"))
        assert text(tmp_path) == "y"

    def test_steps_with_several_kinds_of_names_are_refused(self, tmp_path: Path) -> None:
        make(tmp_path, **tree("a_1", "x"), **tree("b_2", "x"))

        with pytest.raises(UnsupportedFormatError, match="several names; open one of them: a_1, b_2"):
            open_(tmp_path)

    @pytest.mark.parametrize(
        ("name", "content", "expected"),
        [
            ("metadata___ROOT_METADATA", '{"custom": {"a": 1}}', {"a": 1}),
            ("metadata___ROOT_METADATA", '{"internal_metadata": {}, "custom_metadata": {"a": 1}}', {"a": 1}),
            ("metadata___ROOT_METADATA", '{"custom_metadata": null}', None),
            ("metadata___ROOT_METADATA", "{}", None),
            ("metadata__metadata", '{"a": 1, "custom": 2}', {"a": 1, "custom": 2}),
        ],
    )
    def test_metadata_of_the_root(self, name: str, content: str, expected: Any, tmp_path: Path) -> None:
        make(tmp_path, **tree("1", "x"), **{name: content})

        assert open_(tmp_path).root_custom_metadata == expected

    @pytest.mark.parametrize("content", ["", "{", "[]", '{"custom_metadata": 3}'])
    def test_damaged_metadata_of_the_root_is_named(self, content: str, tmp_path: Path) -> None:
        make(tmp_path, **tree("1", "x"), metadata___ROOT_METADATA=content)

        assert "metadata/_ROOT_METADATA: " in corrupt(tmp_path)
        assert text(tmp_path / "1") == "x"

    def test_a_step_without_any_document_is_told_by_its_items(self, tmp_path: Path) -> None:
        """Before Orbax 0.6. Its items may be called as steps are."""
        make(tmp_path, **tree("default", "tree"), **tree("layer_1", "other"))

        assert text(tmp_path) == "tree"
        assert text(tmp_path, "layer_1") == "other"


class TestItems:
    def test_items_are_named_by_their_directories(self, tmp_path: Path) -> None:
        make(tmp_path, **tree("a", "in a"), **tree("b", "in b"), _CHECKPOINT_METADATA=ENDED)

        assert text(tmp_path, "a") == text(tmp_path / "a") == "in a"
        assert open_(tmp_path, "b").committed_at_ns == 6
        for wrong in ("c", "", ".", "..", "a/../b", "_CHECKPOINT_METADATA"):
            with pytest.raises(NotACheckpointError, match=r"has no item .* \(its items: a, b\)"):
                open_(tmp_path, wrong)

    def test_items_of_the_latest_step_are_found(self, tmp_path: Path) -> None:
        make(tmp_path, **tree("1__a", "old"), **tree("2__a", "new"), **tree("2__b", "other"))

        assert text(tmp_path, "a") == "new"

    @pytest.mark.parametrize("usual", ["default", "state", "pytree"])
    def test_the_item_with_the_default_name_is_taken(self, usual: str, tmp_path: Path) -> None:
        make(tmp_path, **tree("a", "x"), **tree(usual, "tree"), **tree("z", "x"))

        assert text(tmp_path) == "tree"

    def test_one_of_several_items_without_a_tree_is_not_guessed(self, tmp_path: Path) -> None:
        make(tmp_path, cfg__metadata="3", orbax_checkpoint="")
        assert [leaf.spec.typestr for leaf in open_(tmp_path).leaves] == ["scalar"]

        make(tmp_path, metrics__metrics="4")
        with pytest.raises(
            UnsupportedFormatError, match=r"no tree; name an item.*'cfg' \(it has cfg, metrics\)"
        ):
            open_(tmp_path)

    def test_an_item_that_is_listed_and_missing_is_an_error(self, tmp_path: Path) -> None:
        make(tmp_path, cfg__metadata="3", _CHECKPOINT_METADATA='{"item_handlers": {"cfg": "x", "tree": "y"}}')

        assert "/tree: is missing" in corrupt(tmp_path)

    def test_an_item_of_an_unknown_kind_is_an_error(self, tmp_path: Path) -> None:
        make(tmp_path, **tree("a", "x"), b__other="")

        with pytest.raises(UnsupportedFormatError, match="/b: is not an item that penstock knows"):
            open_(tmp_path, "b")

    def test_inside_of_an_unfinished_save(self, tmp_path: Path) -> None:
        make(tmp_path, **tree("3.orbax-checkpoint-tmp__default", "x"))

        with pytest.raises(IncompleteCheckpointError, match="part of a save that was interrupted"):
            open_(tmp_path / "3.orbax-checkpoint-tmp" / "default")


class TestJson:
    @pytest.mark.parametrize("name", ["metadata", "data.json", "metrics"])
    def test_leaves_of_a_json_item_are_found(self, name: str, tmp_path: Path) -> None:
        value = {"b": [True, None, {"x.y": 2**64 - 1}], "a": "text", "e": [{}, []], "": -1.5}
        (tmp_path / name).write_text(json.dumps(value))

        found = open_(tmp_path).leaves

        assert [
            (leaf.info.key_path, leaf.spec.typestr, leaf.spec.dtype or leaf.spec.text) for leaf in found
        ] == [
            ("['b'][0]", "scalar", "bool"),
            ("['b'][1]", "None", None),
            ("['b'][2]['x.y']", "scalar", "uint64"),
            ("['a']", "string", "text"),
            ("['e'][0]", "Dict", None),
            ("['e'][1]", "List", None),
            ("['']", "scalar", "float64"),
        ]
        assert found[0].info.kinds == (KeyKind.MAPPING, KeyKind.SEQUENCE)

    @pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"nul", b"[" * 100_000, b"[" * 400 + b"]" * 400])
    def test_what_is_none_names_the_file(self, content: bytes, tmp_path: Path) -> None:
        (tmp_path / "metadata").write_bytes(content)

        assert "/metadata: " in corrupt(tmp_path)

    def test_an_int_that_no_array_holds_names_the_leaf(self, tmp_path: Path) -> None:
        (tmp_path / "metadata").write_text(f'{{"a": [{2**64}]}}')

        assert "an int of 65 bits; most are 64 (leaf ['a'][0])" in corrupt(tmp_path)


class TestRandomKeys:
    @pytest.mark.parametrize(
        ("flag", "problem"),
        [
            ("{}", "typed is None"),
            ('{"typed": 1}', "typed is 1"),
            ("[]", "the document is []"),
            ("", "is empty"),
        ],
    )
    def test_a_damaged_flag_is_named(
        self, flag: str, problem: str, tmp_path: Path, make_leaf: Any, write_flat: Any
    ) -> None:
        data = np.arange(4, dtype=np.uint32)
        write_flat(tmp_path / "jax_random_key", [make_leaf(0, ("checkpoint",), like=data)], {0: data})
        (tmp_path / "jax_random_key_metadata").mkdir()
        (tmp_path / "jax_random_key_metadata" / "metadata").write_text(flag)

        assert f"jax_random_key_metadata/metadata: {problem}" in corrupt(tmp_path)

    @pytest.mark.parametrize(("n", "impl"), [(2, "threefry2x32"), (4, "rbg"), (3, None)])
    def test_the_shape_tells_the_implementation(
        self, n: int, impl: str | None, tmp_path: Path, make_leaf: Any, write_flat: Any
    ) -> None:
        data = np.arange(n, dtype=np.uint32)
        write_flat(tmp_path / "jax_random_key", [make_leaf(0, ("checkpoint",), like=data)], {0: data})
        make(tmp_path, jax_random_key_metadata__metadata='{"typed": true}')

        (leaf,) = open_(tmp_path).leaves
        assert (leaf.info.keys, leaf.info.key_path, leaf.spec.extended_dtype) == ((), "", impl)

    def test_an_array_of_another_name_is_no_key(
        self, tmp_path: Path, make_leaf: Any, write_flat: Any
    ) -> None:
        data = np.arange(2, dtype=np.uint32)
        write_flat(tmp_path / "jax_random_key", [make_leaf(0, ("other",), like=data)], {0: data})
        make(tmp_path, jax_random_key_metadata__metadata='{"typed": true}')

        assert "is not the array of a random key" in corrupt(tmp_path)


def test_a_message_that_is_no_text_is_named(tmp_path: Path) -> None:
    make(tmp_path, **{"proto.pbtxt": b"\xff"})

    assert "/proto.pbtxt: is not UTF-8" in corrupt(tmp_path)


FILES = [
    "_METADATA",
    "_sharding",
    "_strings.json",
    "_CHECKPOINT_METADATA",
    "manifest.ocdbt",
    "array_metadatas/process_0",
]


@pytest.mark.parametrize("name", FILES)
def test_a_directory_in_place_of_a_file_is_named(
    name: str, tmp_path: Path, make_leaf: Any, write_flat: Any
) -> None:
    values = np.arange(300)
    leaves = [
        make_leaf(0, ("a",), "jax.Array", like=values, sharding="{}"),
        make_leaf(1, ("b",), "string", text="x"),
    ]
    write_flat(tmp_path, leaves, {0: values})
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()

    with pytest.raises((CorruptCheckpointError, StorageError), match=name):
        open_(tmp_path)


@pytest.mark.parametrize("codec", [None, {"id": "zstd", "level": 1}])
def test_a_directory_in_place_of_a_chunk_is_not_read_as_zeros(codec: Any, tmp_path: Path) -> None:
    zarray = {"chunks": [2], "compressor": codec, "dtype": "<f4", "fill_value": None, "filters": None}
    zarray |= {"order": "C", "shape": [2], "zarr_format": 2, "dimension_separator": "."}
    make(tmp_path, **{"a__.zarray": json.dumps(zarray), "a__0__": ""})
    checkpoint = open_(tmp_path)

    class Region:
        bounds = ((0, 2),)
        nbytes = 8

        def fresh(self) -> Region:
            raise NotImplementedError

        def view(self) -> memoryview:
            raise AssertionError

    with pytest.raises(CorruptCheckpointError, match=r"chunk 'a/0' is not a file \(leaf \['a'\]\)"):
        list(checkpoint.reads(0, checkpoint.leaves[0], Region(), 100))


def test_a_directory_in_place_of_an_arrays_metadata_is_named(tmp_path: Path) -> None:
    document = TREE.replace('"string"', '"np.ndarray"')
    make(tmp_path, _METADATA=document, **{"s__.zarray__": ""})

    told = f"{tmp_path}/s/.zarray: is not there as a file, and _METADATA lists the array (leaf ['s'])"
    assert told in corrupt(tmp_path)


class TestNames:
    def test_names_are_split_at_dots(self, tmp_path: Path) -> None:
        zarray = '{"chunks": [], "compressor": null, "dtype": "<f4", "fill_value": null, "filters": null,'
        zarray += '"order": "C", "shape": [], "zarr_format": 2}'
        make(
            tmp_path,
            **{f"{name}__.zarray": zarray for name in ("a.b", "a.0", "c", "d__e.f")},
            empty__="",
        )

        assert [leaf.info.keys for leaf in open_(tmp_path).leaves] == [
            ("a", "0"),
            ("a", "b"),
            ("c",),
            ("d/e", "f"),
        ]

        make(tmp_path, **{"a__.zarray": zarray})
        with pytest.raises(
            UnsupportedFormatError, match=r"of 'a' and 'a\.0' one would be inside of the other"
        ):
            open_(tmp_path)

    def test_names_do_not_replace_a_lost_document(self, tmp_path: Path) -> None:
        """There, what tells the structure is lost, and strings with it."""
        make(tmp_path, **{"a__.zarray": "{}", "commit_success.txt": ""})

        with pytest.raises(NotACheckpointError, match="holds neither _METADATA"):
            open_(tmp_path)


class TestRecordedTuples:
    def test_anything_of_another_type_opens_or_is_named(self, tmp_path: Path) -> None:
        leaf = {"category": "custom", "clazz": "ValueMetadataEntry", "data": {}}
        wrongs: list[Any] = [
            3,
            "{",
            "null",
            "[3]",
            '{"s": 3}',
            json.dumps({"category": "custom", "clazz": "tuple"}),
        ]
        wrongs += [json.dumps({"s": {"category": "custom", "clazz": "tuple", "entries": 3}})]
        wrongs += [json.dumps({"category": "namedtuple", "entries": [{"value": leaf}]})]
        wrongs += ['{"a":' * 20_000 + "{}" + "}" * 20_000]
        make(tmp_path, **tree("x", "text"))
        document = json.loads(TREE)
        for wrong in wrongs:
            (tmp_path / "x" / "_METADATA").write_text(json.dumps(document | {"value_metadata_tree": wrong}))
            assert "/_METADATA" in corrupt(tmp_path / "x")
        (tmp_path / "x" / "_METADATA").write_text(
            json.dumps(document | {"value_metadata_tree": json.dumps({"s": leaf})})
        )
        assert text(tmp_path / "x") == "text"
