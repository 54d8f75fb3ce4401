"""Building, publishing, reading and deleting a checkpoint, the same in every store."""
