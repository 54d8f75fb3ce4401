"""A directory of steps in Orbax's newer API: its checkpointer, policies, names and errors."""
