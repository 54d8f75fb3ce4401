"""What several stages share: batches, the plan that arrives with them, codecs, files of handlers."""
