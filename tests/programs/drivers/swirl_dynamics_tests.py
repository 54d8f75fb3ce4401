"""Swirl-Dynamics: its own tests of the callbacks that save, and of states that are restored."""

from __future__ import annotations

from tests.programs.program import Program, Tests, stand_in
from tests.programs.surroundings import bare_package, local_gfile

local_gfile()
stand_in("clu.metric_writers", "clu.parameter_overview", "clu.periodic_actions", "clu.values")
stand_in("matplotlib", "matplotlib.pyplot", "tqdm", "tqdm.auto", "xarray", "gin")
bare_package("swirl_dynamics", "swirl_dynamics.templates")
_CALLBACKS = "swirl_dynamics/templates/callbacks_test.py"
PROGRAM = Program(
    "Swirl-Dynamics, its tests of checkpoints",
    repository="google-research/swirl-dynamics@7eeea7a53417ace1d485d58939e09faee0896f22",
    wheels=("clu==0.0.12", "wrapt==1.17.2", "deprecated==1.2.18"),
    tests=Tests(
        files=(_CALLBACKS, "swirl_dynamics/templates/train_states_test.py"),
        deselected=(f"{_CALLBACKS}::ProgressReportCallbackTest", f"{_CALLBACKS}::TqdmProgressBarTest"),
    ),
)
