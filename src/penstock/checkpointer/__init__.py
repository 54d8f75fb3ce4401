"""`Checkpointer`: saves in the background, restores, metadata, verification, and how it all ends."""
