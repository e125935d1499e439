"""Mints the transfer ticket of a try: its facts from the request, the workers and their clocks."""

from __future__ import annotations

from dataclasses import dataclass

from kvtransfer.ticket import TicketFacts, mint, request_hash
from pdserve.types import HandoverMode, SamplingParams
from router.events import SendReserve
from router.membership import Member


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketMint:
    """lease_s is added to what is left of the deadline, so that an end in time can still be told."""

    secret: bytes
    lease_s: float

    def ticket(
        self,
        send: SendReserve,
        *,
        decode: Member,
        prefill: Member | None,
        sampling: SamplingParams,
        tenant: str,
        now: float,
        remaining_s: float,
        cache_salt: str = "",
    ) -> bytes:
        """A ticket for one try. now: our clock; each expiry is on that worker's own clock."""
        until = now + remaining_s + self.lease_s
        num_rows = len(send.token_ids) - send.num_forced + sampling.max_tokens
        sides = [decode.record, *([prefill.record] if prefill is not None else [])]
        page_size = min(record.page_size for record in sides)
        facts = TicketFacts(
            key=send.key,
            prefill_incarnation=0 if prefill is None else prefill.incarnation,
            decode_incarnation=decode.incarnation,
            emitter=decode.record.peer.worker_id,
            mode=HandoverMode.LOCAL if prefill is None else HandoverMode.DISAGGREGATED,
            tenant=tenant,
            request_hash=request_hash(send.token_ids, sampling, cache_salt),
            page_budget=-(-num_rows // page_size) + 1,
            num_choices=1,
            prefill_expires=0.0 if prefill is None else prefill.its_time(until),
            decode_expires=decode.its_time(until),
        )
        return mint(self.secret, facts)
