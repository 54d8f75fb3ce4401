"""The store of a keeper's memory, and the messages between the two."""
