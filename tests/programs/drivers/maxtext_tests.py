"""MaxText: its own tests of checkpoints that need no data."""

from __future__ import annotations

from tests.programs.program import Program, Tests, stand_in
from tests.programs.surroundings import bare_package, local_gfile

local_gfile()
bare_package("maxtext", "maxtext.common", "maxtext.utils", "maxtext.input_pipeline", "maxtext.trainers")
bare_package("maxtext.checkpoint_conversion", "maxtext.checkpoint_conversion.utils")
stand_in("pathwaysutils", "grain", "grain.experimental", "grain.python")
stand_in("maxtext.checkpoint_conversion.utils.load_dynamic", "maxtext.common.grain_utility")
stand_in("maxtext.input_pipeline.multihost_dataloading", "maxtext.utils.elastic_utils")
stand_in("maxtext.input_pipeline.synthetic_data_processing", "maxtext.trainers.diloco")
stand_in("maxtext.trainers.diloco.utils", "maxtext.trainers.diloco.utils.spmd_diloco_checkpointing")
PROGRAM = Program(
    "MaxText, its tests of checkpoints",
    repository="AI-Hypercomputer/maxtext@e591f30cbbf217ed67ef71263ec0538239f9c3b8",
    path="src",
    tests=Tests(
        files=(
            "../tests/unit/checkpointing_nnx_roundtrip_test.py",
            "../tests/unit/checkpointing_nnx_load_test.py",
            "../tests/unit/checkpointing_nnx_missing_param_test.py",
            "../tests/unit/checkpointing_emergency_nnx_test.py",
            "../tests/unit/checkpoint_context_test.py",
        ),
        conftest=False,
    ),
    meant={
        ".TestBuildContext.test_todelete_full_path": "steps in a bucket are deleted, not moved",
        ".TestBuildContext.test_colocated_python_sets_pathways_impl": "there is no Pathways backend",
    },
)
