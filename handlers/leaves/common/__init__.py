"""What leaf handlers share: arrays as blocks of bytes, host buffers, how target and leaf differ."""
