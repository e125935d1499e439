"""Seeds that once found a defect of the product, kept (docs/failure-modes.md has the table).

A seed means another story once the simulated world changes, so each defect also has a short test of its
own; its name is given with the seed.
"""

from __future__ import annotations

import pytest

from tests.simulation.runner import Bias, run_seed

LONG_READS = Bias(io_longer_than_lease=0.3)
FOUND = [
    (6, LONG_READS, "test_d13_cancel_while_pulling_tells_prefill_and_waits_for_reads"),
    (793, Bias(), "test_p8_an_ack_ends_a_rehash_that_its_nack_began"),
]


@pytest.mark.parametrize(("seed", "bias", "short_test"), FOUND, ids=[str(seed) for seed, _, _ in FOUND])
def test_a_seed_that_found_a_defect_finds_none_now(seed: int, bias: Bias, short_test: str) -> None:
    assert run_seed(seed, bias=bias).seed == seed
