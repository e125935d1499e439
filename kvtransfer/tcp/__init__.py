"""Pages by TCP, one frame each. See `server`, `reader` and `visit`."""
