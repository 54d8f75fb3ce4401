"""Reports of saves and restores: where the time went, in figures, words and pictures."""
