"""The one bridge between blocking callers and event loops: threads, loops in threads, and the sync face."""
