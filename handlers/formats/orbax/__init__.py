"""The names and JSON files of a checkpoint directory."""
