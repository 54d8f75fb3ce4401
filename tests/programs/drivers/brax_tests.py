"""brax: its own tests of the checkpoints of PPO and SAC."""

from __future__ import annotations

from tests.programs.program import Program, Tests, stand_in

stand_in("mujoco", "brax.io")
PROGRAM = Program(
    "brax, its tests of checkpoints",
    repository="google/brax@0b96d056328d15ea7ebfd3ce07f42be72ec76e40",
    wheels=("ml_collections==1.1.0",),
    tests=Tests(
        files=("brax/training/agents/ppo/checkpoint_test.py", "brax/training/agents/sac/checkpoint_test.py")
    ),
    devices=1,
)
