"""Batches of messages, and the plan that they carry: what every stage does with what it gets."""
