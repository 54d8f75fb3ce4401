"""`Checkpointer`: saves in the background, restores, metadata, and how it all ends."""
