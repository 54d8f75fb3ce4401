"""Commands that only look: nothing is written."""
