"""Measurements beside the peers. What lives here: the one runner (`benchmarks.run`), its cases, the peers'
drivers and the results. What does not: tests; nothing of the product imports this package."""
