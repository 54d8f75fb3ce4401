"""The budget of host bytes: its accounts and its limit, fresh buffers, and the one bounded cache."""
