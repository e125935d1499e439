"""The KV page cache: page layout, allocator, prefix index, the manager over both, and the pool's memory."""
