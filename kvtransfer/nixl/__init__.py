"""Pages by NIXL's one-sided reads: RDMA between hosts, the kernel's copy on one. See `server`, `reader`."""
