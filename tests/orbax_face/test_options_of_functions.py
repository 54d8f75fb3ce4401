"""What options of functions of trees, types and paths do, on both libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as _orbax
import pytest
from etils import epath
from tests.orbax_face.shown_options import Cases, Shown, refused

import penstock.orbax as _penstock

ours: Any = _penstock
theirs: Any = _orbax  # it has no types
CASES = Cases()


@CASES.shows(
    "transform_utils.intersect_trees.target",
    "tree.to_flat_dict.is_leaf",
    "merge_trees.target",
)
def functions_of_trees(ocp: Any, root: Path) -> Any:
    del root
    a, b = {"x": [1, 2], "y": 3}, {"x": [4, 5]}
    return (
        ocp.transform_utils.intersect_trees(a, b, target={"x": [0, 0]}),
        ocp.transform_utils.merge_trees(a, b, target={"x": [0, 0], "y": 0}),
        ocp.tree.to_flat_dict(a, is_leaf=lambda node: isinstance(node, list)),
    )


@CASES.shows(
    "utils.get_save_directory.name",
    "utils.get_save_directory.step_prefix",
    "utils.get_save_directory.override_directory",
    "utils.get_save_directory.step_format_fixed_length",
    "utils.get_save_directory.step_name_format",
    "path.step.standard_name_format.temporary_path_cls",
)
def directories_of_steps(ocp: Any, root: Path) -> Any:
    find = ocp.utils.get_save_directory
    names = ocp.step.standard_name_format(step_prefix="at", temporary_path_cls=None)
    found = [
        find(3, root),
        find(3, root, name="item"),
        find(3, root, step_prefix="run", step_format_fixed_length=4),
        find(3, root, override_directory=root / "other", name="item"),
        find(3, root, step_prefix="ignored", step_name_format=names),
    ]
    written = str(names), str(ocp.step.composite_name_format(names, [names]))
    return [str(path.relative_to(root)) for path in found], str(find(3, "relative", name="x")), written


@CASES.shows(
    "type_handlers.is_supported_type.pytree_metadata_options",
    "type_handlers.is_supported_empty_value.pytree_metadata_options",
    "type_handlers.get_ts_context.data_copy_concurrency_limit",
    "type_handlers.register_type_handler.func",
    "type_handlers.ScalarHandler.metadata_key",
    "type_handlers.get_json_tspec_write.metadata_key",
    "type_handlers.ParamInfo.value_typestr",
)
def functions_of_types(ocp: Any, root: Path) -> Any:
    types = ocp.type_handlers
    plain = ocp.v1.options.PyTreeOptions.Saving().pytree_metadata_options
    rich = type(plain)(support_rich_types=True)

    class Even:
        pass

    types.register_type_handler(Even, types.ScalarHandler(), func=lambda kind: kind is Even, override=True)
    context = types.get_ts_context(data_copy_concurrency_limit=3)
    info = types.ParamInfo(
        name="a", parent_dir=epath.Path(root), value_typestr="mine", is_ocdbt_checkpoint=False
    )
    spec = types.get_json_tspec_write(info, False, (4,), (2,), np.float32, metadata_key="mine")
    return (
        [types.is_supported_type((), pytree_metadata_options=one) for one in (rich, plain)],
        [types.is_supported_empty_value((), pytree_metadata_options=one) for one in (rich, plain)],
        types.has_type_handler(Even),
        context["data_copy_concurrency"].to_json(),
        info.value_typestr,
        spec["metadata_key"],
    )


@CASES.shows("test_utils.print_directory.level", "v1.tree.merge.is_leaf")
def helpers_of_examples(ocp: Any, root: Path) -> Any:
    (root / "a").mkdir()
    ocp.test_utils.print_directory(epath.Path(root), level=1)  # into the log
    absent = refused(ocp.test_utils.print_directory, epath.Path(root / "none"), level=1)
    merged = ocp.v1.tree.merge({"a": [1]}, {"b": [2]}, is_leaf=lambda node: isinstance(node, list))
    return absent, merged


@pytest.mark.parametrize("shown", CASES, ids=lambda shown: shown.case.__name__)
def test_options_do_what_they_do_in_orbax(tmp_path: Path, shown: Shown) -> None:
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()

    assert shown.case(ours, tmp_path / "ours") == shown.case(theirs, tmp_path / "theirs")
