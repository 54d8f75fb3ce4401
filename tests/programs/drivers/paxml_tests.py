"""paxml: its own tests of checkpoints, where this Orbax can run them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tests.programs.program import Program, Tests, stand_in
from tests.programs.surroundings import bare_package, local_gfile

local_gfile()
bare_package("paxml", "praxis", "lingvo", "lingvo.core")
stand_in("lingvo.core.cluster", "lingvo.core.cluster_factory", "lingvo.core.hyperparams")
stand_in("paxml.base_task", "praxis.pax_fiddle", "praxis.base_input", "praxis.base_layer", "clu")
stand_in("clu.metrics", "tensorflow.compat", "tensorflow.compat.v2")
clusters: Any = import_module("lingvo.core.cluster_factory")
clusters.Current = lambda: None
tensorflow: Any = import_module("tensorflow.compat.v2")
tensorflow.io = import_module("tensorflow.io")
_MANAGERS = "paxml/checkpoint_managers_test.py"
_LEFT = (  # with its handlers of trees, which this Orbax calls otherwise, or with inputs of TensorFlow
    *("cleanup", "reinitialize0", "restore_no_inputs0", "restore_no_inputs1", "save_on_preemption"),
    *("restore_legacy_format0", "restore_legacy_format1", "restore_legacy_format2", "transforms"),
    *("restore_with_version_step_hint0", "restore_with_version_step_hint1", "save_max_to_keep0"),
    *("restoring_gda_independent_of_prefix0", "restoring_gda_independent_of_prefix1", "save_max_to_keep2"),
    *("save_checkpoint_keep_interval_timedelta0", "save_restore0", "save_restore2", "save_restore3"),
    *("save_restore_manager_case_1_default0", "save_restore_manager_case_2_mutant0"),
    *("save_restore_unpadded0", "todelete_subdir0"),
)
PROGRAM = Program(
    "paxml, its tests of checkpoints",
    repository="google/paxml@b397693fb4dd7b49e90ae549105d024644a03665",
    others=(
        "google/praxis@feeaff19915ca9c3de8b372b7427d15c81f0d757",
        "tensorflow/lingvo@e0be5dc4ce9b89d91c0be343f54c5d7a5b1bcb59",
    ),
    wheels=("typeguard==2.13.3",),
    tests=Tests(
        files=(_MANAGERS, "paxml/checkpoints_test.py"),
        deselected=tuple(
            f"paxml/checkpoint_managers_test.py::CheckpointManagerTest::test_{name}" for name in _LEFT
        ),
    ),
    meant={
        "paxml.checkpoint_managers_test.CheckpointManagerTest.test_restore_legacy_format3": (
            "the test writes into a document of a step, which has not the checksum of what was saved then"
        )
    },
)
