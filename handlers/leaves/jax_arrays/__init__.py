"""Parts of the jax.Array handler: devices, shardings, shards to the host, values put back."""
