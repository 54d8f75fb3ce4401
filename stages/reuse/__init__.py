"""Reuses leaves of an earlier checkpoint instead of writing them again.

`incremental` decides which leaves are reused; `value_cache` knows which objects equal stored leaves.
"""
