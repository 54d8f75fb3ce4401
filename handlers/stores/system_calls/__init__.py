"""System calls that Python lacks, or that several steps must be made of."""
