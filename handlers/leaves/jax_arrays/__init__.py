"""The room `handlers/leaves/jax_arrays`."""
