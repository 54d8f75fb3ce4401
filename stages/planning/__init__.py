"""How a restore is planned: which stored leaf becomes which leaf of the result, and what is read."""
