"""Pages by shared memory, between processes of one user on one machine. See `server` and `reader`."""
