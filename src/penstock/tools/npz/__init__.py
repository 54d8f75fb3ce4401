"""Writes NumPy archives: `npz_members` plans what they hold, and `npz_writing` writes them."""
