"""Orbax's `CheckpointManager`: its options, its policies, the names of steps, their directory."""
