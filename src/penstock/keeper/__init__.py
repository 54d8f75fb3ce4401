"""The keeper: a process that holds checkpoints in memory, so that they survive the training."""
