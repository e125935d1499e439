"""What this router has sent to each worker and not yet seen to end. Pure; the policy's own view of load.

Heartbeats are seconds old; choices made within one heartbeat must see each other, so load is counted here,
at the moment of choice, and not taken from what workers report.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.types import Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Outstanding work of one worker. prefill_tokens: prompts to compute; decode_tokens: KV rows promised."""

    prefill_tokens: int = 0
    prefill_requests: int = 0
    decode_tokens: int = 0
    decode_requests: int = 0


NO_LOAD = Load()


@dataclass(slots=True)
class _Share:
    worker: int
    tokens: int


@dataclass(slots=True)
class InFlight:
    """Loads by incarnation. Called by the event loop only; releasing twice has no effect."""

    _loads: dict[int, Load] = field(default_factory=dict)
    _prefill: dict[Key, _Share] = field(default_factory=dict)
    _decode: dict[Key, _Share] = field(default_factory=dict)
    _last: dict[int, int] = field(default_factory=dict)
    _choices: int = 0
    _uncached: dict[Key, int] = field(default_factory=dict)
    uncached_tokens: int = 0
    """Prompt tokens of all tries that nobody is known to have, and that are not computed yet."""

    def add(self, key: Key, *, decode: int, prefill: int, prefill_tokens: int, decode_tokens: int) -> None:
        """Counts a try. prefill: who computes the prompt; the decode worker itself in local mode."""
        self._prefill[key] = _Share(prefill, prefill_tokens)
        self._set_uncached(key, prefill_tokens)
        self._decode[key] = _Share(decode, decode_tokens)
        self._change(prefill, tokens=prefill_tokens, requests=1)
        self._change(decode, decode_tokens=decode_tokens, decode_requests=1)
        self._choices += 1
        self._last[prefill] = self._last[decode] = self._choices

    def release_prefill(self, key: Key) -> int | None:
        """The prompt of this try is computed or given up. Returns the worker that has room again."""
        self._set_uncached(key, 0)
        share = self._prefill.pop(key, None)
        if share is None:
            return None
        self._change(share.worker, tokens=-share.tokens, requests=-1)
        return share.worker

    def release_decode(self, key: Key) -> int | None:
        """This try is over. Returns the decode worker that has room again."""
        self.release_prefill(key)
        share = self._decode.pop(key, None)
        if share is None:
            return None
        self._change(share.worker, decode_tokens=-share.tokens, decode_requests=-1)
        return share.worker

    def found(self, key: Key, hit_tokens: int) -> None:
        """The try's decode worker has pages of so many of its prompt tokens; as a rule prefill does, too."""
        self._set_uncached(key, max(0, self._uncached.get(key, 0) - hit_tokens))

    def computed(self, key: Key) -> None:
        """The try's first token has come: its prompt is computed, by whomever."""
        self._set_uncached(key, 0)

    def decode_of(self, key: Key) -> int | None:
        """The decode worker that this try is counted at."""
        share = self._decode.get(key)
        return None if share is None else share.worker

    def load(self, incarnation: int) -> Load:
        """What is outstanding at a worker; all zero for one that is not known."""
        return self._loads.get(incarnation, NO_LOAD)

    def last_chosen(self, incarnation: int) -> int:
        """Sequence number of the worker's latest choice, 0 if never: breaks ties."""
        return self._last.get(incarnation, 0)

    def forget(self, incarnation: int) -> None:
        """The worker is gone for good; its keys are released by their requests."""
        self._last.pop(incarnation, None)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is outstanding anywhere."""
        return not self._prefill and not self._decode

    def _set_uncached(self, key: Key, tokens: int) -> None:
        self.uncached_tokens += tokens - self._uncached.pop(key, 0)
        if tokens:
            self._uncached[key] = tokens

    def _change(
        self,
        worker: int,
        *,
        tokens: int = 0,
        requests: int = 0,
        decode_tokens: int = 0,
        decode_requests: int = 0,
    ) -> None:
        old = self.load(worker)
        new = Load(
            prefill_tokens=old.prefill_tokens + tokens,
            prefill_requests=old.prefill_requests + requests,
            decode_tokens=old.decode_tokens + decode_tokens,
            decode_requests=old.decode_requests + decode_requests,
        )
        if new == NO_LOAD:
            self._loads.pop(worker, None)
        else:
            self._loads[worker] = new
