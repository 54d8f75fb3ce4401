"""Plans a restore: which stored leaf becomes which leaf of the result, and what is read for it."""
