"""Pipelines: the value, what runs it, what a stage may use while it runs, and the future of a save."""
