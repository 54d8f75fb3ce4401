"""Reports of saves and restores, and those that are kept in a folder of checkpoints."""
