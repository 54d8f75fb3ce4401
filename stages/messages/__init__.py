"""Batches of messages and the plan that they carry: helpers that stages share."""
