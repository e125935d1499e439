"""The integrity tests. A package, so that pytest ends their shared worker processes with the last of them."""
