"""How fast the data plane moves pages, beside the plainest way to move the same bytes: `python -m
benchmarks.transfer`. What lives here: one measured run of all ways, interleaved, between two processes, and
the latency of one page. What does not: anything about requests, or a network other than loopback."""
