"""One actor per file: what happens to a checkpoint between the caller and the disk."""
