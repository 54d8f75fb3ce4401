"""The processes of a job agree on an operation: keys, pure decisions, membership, the operation, services."""
