"""Object stores: objects under keys, and checkpoints that a mark publishes."""
