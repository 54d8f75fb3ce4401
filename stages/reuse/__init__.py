"""What a save takes over from an earlier checkpoint instead of writing it again.

`incremental` decides it leaf by leaf; `value_cache` knows which objects in memory equal which stored leaves.
"""
