"""What the checkpointers, handlers and managers of Orbax's first API share."""
