"""Writes stored checkpoints again, piece by piece: nothing is restored, and no device is touched."""
