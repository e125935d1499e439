"""Every message survives the way to protobuf bytes and back; incomplete ones are refused."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve import api, messages, types
from pdserve.errors import InvalidRequest
from pdserve.rpc import convert
from pdserve.rpc.v1 import cluster_pb2, decode_pb2, inference_pb2, prefill_pb2, transfer_pb2

text = st.text(st.characters(codec="utf-8"), max_size=12)
name = text.filter(bool)
u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
i32 = st.integers(-(2**31), 2**31 - 1)
single = st.floats(0, 100, width=32)
double = st.floats(allow_nan=False, allow_infinity=False)
ids = st.lists(u32, max_size=6).map(tuple)
blob = st.binary(max_size=20)

keys = st.builds(types.Key, request_id=name, term=u32, epoch=u32)
samplings = st.builds(
    types.SamplingParams,
    temperature=single,
    top_k=u32,
    top_p=single,
    min_p=single,
    seed=u64,
    max_tokens=u32,
    stop_token_ids=ids,
    ignore_eos=st.booleans(),
)
peers = st.builds(
    types.PeerRef, worker_id=name, incarnation=st.integers(1, 2**64 - 1), control=text, host_id=text,
    shm=text, tcp=text, nixl=text,
)  # fmt: skip
usages = st.builds(types.Usage, prompt_tokens=u32, cached_tokens=u32, completion_tokens=u32)
stats = st.builds(types.TransferStats, path=text, pages=u32, bytes=u64, hit_pages=u32, resent_pages=u32)
spans = st.builds(
    types.Span, phase=st.sampled_from(types.Phase), begin_s=double, end_s=double, begin_clock=text,
    end_clock=text, on_path=st.booleans(), count=u32, sum_s=double,
)  # fmt: skip
clocks = st.builds(types.ClockOffset, worker=text, offset_s=double, uncertainty_s=double)
samples = st.builds(types.ClockSample, sent_s=double, received_s=double, replied_s=double, answered_s=double)
ages = st.builds(
    types.PageAges,
    state=st.sampled_from(types.UsedState),
    counts=st.lists(u32, min_size=4, max_size=4).map(tuple),
)
ledgers = st.builds(
    types.Ledger,
    prefill_worker=text,
    decode_worker=text,
    prefill_computed_tokens=u32,
    prefill_cached_tokens=u32,
    decode_computed_prompt_tokens=u32,
    decode_hit_tokens=u32,
    prefill_queue_s=double,
    prefill_compute_s=double,
    transfer_s=double,
    decode_s=double,
    num_retractions=u32,
    transfer=stats,
    spans=st.lists(spans, max_size=3).map(tuple),
    clocks=st.lists(clocks, max_size=2).map(tuple),
    ttft_s=st.none() | double,
    residual_s=st.none() | double,
    handover_s=st.none() | double,
    wire_hidden=st.none() | double,
)
capabilities = st.builds(
    types.CapabilityRecord,
    layout=text,
    numerics=text,
    model=text,
    tokenizer=text,
    dtype=text,
    page_size=u32,
    page_bytes=u64,
    transports=st.lists(text, max_size=3).map(tuple),
    protocol=st.tuples(u32, u32),
)
limits = st.builds(
    types.ModelLimits,
    vocab_size=st.integers(1, 2**32 - 1),
    max_context=st.integers(1, 2**32 - 1),
    end_token_ids=ids,
    bos_token_id=st.none() | u32,
)
loads = st.builds(
    types.WorkerLoad,
    **{
        f: u32
        for f in types.WorkerLoad.__dataclass_fields__
        if f not in ("waiting_tokens", "draining", "ready", "page_ages")
    },
    page_ages=st.lists(ages, max_size=2).map(tuple),
    waiting_tokens=u64,
    draining=st.booleans(),
    ready=st.booleans(),
)
records = st.builds(
    types.WorkerRecord,
    peer=peers,
    role=st.sampled_from(types.Role),
    capability=capabilities,
    limits=limits,
    model_name=text,
    pool_pages=u32,
    page_size=u32,
    pid=u32,
)
finishes = st.sampled_from(types.FinishReason)
outcomes = st.sampled_from(messages.Outcome)
modes = st.sampled_from(types.HandoverMode)
tokens = st.lists(u32, min_size=4, max_size=8).map(tuple)
orders = st.builds(replace, samplings, max_tokens=st.integers(4, 2**32 - 1))
work: dict[str, Any] = {
    "key": keys,
    "receiver_incarnation": u64,
    "ticket": blob,
    "token_ids": tokens,
    "num_forced": st.integers(0, 3),
    "sampling": orders,
    "tenant": text,
    "deadline_s": st.floats(0.001, 600),
    "priority": i32,
    "use_prefix_cache": st.booleans(),
    "trace_id": text,
}
reserves = st.builds(
    messages.Reserve, **work, mode=st.just(types.HandoverMode.DISAGGREGATED), prefill=peers
) | st.builds(messages.Reserve, **work, mode=st.just(types.HandoverMode.LOCAL), prefill=st.none())
prefills = st.builds(messages.PrefillRequest, **work, decode=peers)
refusals = st.builds(
    messages.Refused, key=keys, reason=st.sampled_from(messages.Refusal), detail=text, retry_after_s=double
)
ended = {"key": keys, "usage": usages, "ledger": ledgers, "retryable": st.booleans(), "error_message": text}
decode_events = st.one_of(
    st.builds(messages.Reserved, key=keys, mode=modes, hit_tokens=u32),
    refusals,
    st.builds(messages.Token, key=keys, index=u32, token_id=u32, ledger=st.none() | ledgers),
    st.builds(messages.Ended, finish=finishes, **ended),
    st.builds(messages.Ended, finish=st.none(), error_label=name, **ended),
)
prefill_results = refusals | st.builds(
    messages.Prefilled, key=keys, outcome=outcomes, detail=text, ledger=ledgers
)
pages = st.builds(types.PageName, pool_id=u64, page=u32, generation=u64)
transfers = st.one_of(
    st.builds(messages.Grant, key=keys, want=ids, credit=u32, ticket=blob),
    st.builds(
        messages.Announce,
        key=keys,
        index=u32,
        page=pages,
        valid_rows=u32,
        content_key=blob,
        digest=blob,
        sealed_s=double,
    ),
    st.builds(messages.Ack, key=keys, index=u32),
    st.builds(messages.Nack, key=keys, index=u32, digest=blob),
    st.builds(
        messages.Finish,
        key=keys,
        index=u32,
        token_id=u32,
        next_counter=u64,
        finish=st.none() | finishes,
        num_announced=u32,
        digest_of_digests=blob,
        ledger=ledgers,
    ),
    st.builds(messages.Commit, key=keys),
    st.builds(messages.Renew, keys=st.lists(keys, max_size=3).map(tuple), answer=st.booleans()),
    st.builds(messages.Abort, key=keys, outcome=outcomes, detail=text),
)
envelopes = st.builds(
    messages.Envelope,
    sender=name,
    sender_incarnation=st.integers(1, 2**64 - 1),
    receiver_incarnation=u64,
    message=transfers,
)
join_events = st.one_of(
    st.builds(convert.Register, record=records, monotonic_s=double),
    st.builds(convert.Heartbeat, load=loads, monotonic_s=double, sample=st.none() | samples),
    st.builds(convert.Leave, reason=text),
)
join_answers = st.builds(
    convert.JoinAnswer, router_id=text, accepted=st.booleans(), problem=text, echo_s=double,
    received_s=double, replied_s=double,
)  # fmt: skip
worker_states = st.builds(
    convert.WorkerState, record=records, load=loads, integrity_problem=text, idle=st.booleans()
)
asked = st.builds(
    api.SamplingInput,
    temperature=st.none() | single,
    top_k=st.none() | u32,
    top_p=st.none() | single,
    min_p=st.none() | single,
    seed=st.none() | u64,
    max_tokens=st.none() | u32,
    stop_token_ids=ids,
    ignore_eos=st.booleans(),
)
plain: dict[str, Any] = {
    "model": text,
    "sampling": asked,
    "stop": st.lists(text, max_size=3).map(tuple),
    "deadline_s": double,
    "priority": i32,
    "client_request_id": text,
    "no_prefix_cache": st.booleans(),
    "trace_id": text,
    "no_text": st.booleans(),
    "resume_window_s": double,
    "n": u32,
}
chats = st.lists(st.builds(api.ChatMessage, role=text, content=text), max_size=3).map(tuple)
inputs = st.one_of(
    st.builds(api.GenerateInput, prompt=text, **plain),
    st.builds(api.GenerateInput, messages=chats, **plain),
    st.builds(api.GenerateInput, token_ids=ids, **plain),
    st.builds(api.GenerateInput, **plain),
)
timings = st.builds(api.Timings, queue_s=double, tokenise_s=double, ttft_s=double, total_s=double)
stream_events = st.one_of(
    st.builds(api.Admitted, request_id=text, client_request_id=text, prompt_tokens=u32),
    st.builds(api.Chunk, index=u32, token_ids=ids, text=text),
    st.builds(api.End, finish_reason=finishes, usage=usages, timings=timings, ledger=ledgers, epochs=u32),
)
models = st.builds(
    api.ModelInfo, model=text, limits=limits, has_chat_template=st.booleans(), dtype=text, model_digest=text
)
statuses = st.builds(
    api.FleetStatus,
    router_id=text,
    workers=st.lists(
        st.builds(
            api.WorkerStatus,
            record=records,
            load=loads,
            outstanding_tokens=u64,
            outstanding_requests=u32,
            heartbeat_age_s=double,
            suspect=st.booleans(),
        ),
        max_size=2,
    ).map(tuple),
    queued=u32,
    running=u32,
    uptime_s=double,
    draining=st.booleans(),
    pairing_problems=st.lists(text, max_size=2).map(tuple),
)
reports = st.none() | st.builds(messages.Report, doing=text, ledger=ledgers)
explanations = st.builds(
    api.Explanation,
    **{f: text for f, value in api.Explanation.__dataclass_fields__.items() if value.type == "str"},
    usage=usages,
    max_tokens=u32,
    epochs=u32,
    age_s=double,
    total_s=double,
    ledger=ledgers,
)

ROUND_TRIPS: list[tuple[str, st.SearchStrategy[Any], Callable[[Any], Any], Callable[[Any], Any]]] = [
    ("reserve", reserves, convert.reserve_to_pb, convert.reserve_from_pb),
    ("prefill", prefills, convert.prefill_to_pb, convert.prefill_from_pb),
    ("decode_event", decode_events, convert.decode_event_to_pb, convert.decode_event_from_pb),
    ("prefill_result", prefill_results, convert.prefill_result_to_pb, convert.prefill_result_from_pb),
    ("envelope", envelopes, convert.envelope_to_pb, convert.envelope_from_pb),
    ("join_event", join_events, convert.join_event_to_pb, convert.join_event_from_pb),
    ("join_answer", join_answers, convert.join_answer_to_pb, convert.join_answer_from_pb),
    ("worker_state", worker_states, convert.worker_state_to_pb, convert.worker_state_from_pb),
    ("generate", inputs, convert.generate_to_pb, convert.generate_from_pb),
    ("stream_event", stream_events, convert.stream_event_to_pb, convert.stream_event_from_pb),
    ("model_info", models, convert.model_info_to_pb, convert.model_info_from_pb),
    ("fleet_status", statuses, convert.fleet_status_to_pb, convert.fleet_status_from_pb),
    ("report", reports, convert.report_to_pb, convert.report_from_pb),
    ("explanation", explanations, convert.explanation_to_pb, convert.explanation_from_pb),
]


@pytest.mark.parametrize(
    ("to_pb", "from_pb", "values"),
    [(t, f, v) for _, v, t, f in ROUND_TRIPS],
    ids=[n for n, *_ in ROUND_TRIPS],
)
def test_round_trip_through_bytes(
    to_pb: Callable[[Any], Any], from_pb: Callable[[Any], Any], values: st.SearchStrategy[Any]
) -> None:
    @settings(max_examples=40)
    @given(values)
    def check(value: Any) -> None:
        message = to_pb(value)
        again = type(message).FromString(message.SerializeToString())
        assert from_pb(again) == value

    check()


def test_enums_are_complete_both_ways() -> None:
    for outcome in messages.Outcome:
        assert convert.outcome_from_pb(convert.outcome_to_pb(outcome)) is outcome
    for role in types.Role:
        assert convert.role_from_pb(convert.role_to_pb(role)) is role
    for mode in types.HandoverMode:
        assert convert.mode_from_pb(convert.mode_to_pb(mode)) is mode
    for finish in (None, *types.FinishReason):
        assert convert.finish_from_pb(convert.finish_to_pb(finish)) is finish


def good_reserve(**changes: Any) -> decode_pb2.ReserveRequest:
    reserve = messages.Reserve(
        key=types.Key(request_id="r"),
        receiver_incarnation=1,
        ticket=b"t",
        token_ids=(1, 2),
        num_forced=0,
        sampling=types.SamplingParams(),
        tenant="",
        mode=types.HandoverMode.LOCAL,
        prefill=None,
        deadline_s=1.0,
    )
    message = convert.reserve_to_pb(reserve)
    for field, value in changes.items():
        setattr(message, field, value)
    return message


def without(message: Any, *path: str) -> Any:
    for field in path[:-1]:
        message = getattr(message, field)
    message.ClearField(path[-1])
    return message


def incomplete() -> list[tuple[Callable[[Any], Any], Any]]:
    no_key, no_seed = good_reserve(), good_reserve()
    without(no_key, "key")
    without(no_seed, "sampling", "seed")
    named = prefill_pb2.PrefillResponse(key={"request_id": "r"}, refused={"reason": "moody"})
    sender = {"sender": "d", "sender_incarnation": 1}
    return [
        (convert.reserve_from_pb, decode_pb2.ReserveRequest()),
        (convert.reserve_from_pb, no_key),
        (convert.reserve_from_pb, no_seed),
        (convert.reserve_from_pb, good_reserve(mode=1)),  # disaggregated, but no prefill worker
        (convert.reserve_from_pb, good_reserve(mode=9)),
        (convert.reserve_from_pb, good_reserve(num_forced=2)),  # no prompt token left
        (convert.reserve_from_pb, good_reserve(deadline_s=float("nan"))),
        (convert.reserve_from_pb, good_reserve(deadline_s=0.0)),
        (convert.prefill_from_pb, prefill_pb2.PrefillRequest(key={"request_id": "r"}, token_ids=[1])),
        (convert.decode_event_from_pb, decode_pb2.ReserveResponse(key={"request_id": "r"})),
        (convert.decode_event_from_pb, decode_pb2.ReserveResponse(key={"request_id": "r"}, ended={})),
        (convert.prefill_result_from_pb, prefill_pb2.PrefillResponse(key={"request_id": "r"})),
        (convert.prefill_result_from_pb, named),
        (convert.envelope_from_pb, transfer_pb2.Envelope(ack={"key": {"request_id": "r"}})),
        (convert.envelope_from_pb, transfer_pb2.Envelope(**sender)),
        (convert.envelope_from_pb, transfer_pb2.Envelope(**sender, abort={"key": {"request_id": "r"}})),
        (convert.join_event_from_pb, cluster_pb2.JoinRequest()),
        (convert.join_event_from_pb, cluster_pb2.JoinRequest(register={})),
        (convert.stream_event_from_pb, inference_pb2.GenerateResponse()),
        (convert.stream_event_from_pb, inference_pb2.GenerateResponse(end={})),
    ]


@pytest.mark.parametrize(("convert_it", "message"), incomplete())
def test_incomplete_messages_are_refused(convert_it: Callable[[Any], Any], message: Any) -> None:
    with pytest.raises(InvalidRequest):
        convert_it(message)


@given(temperature=st.floats(0, 100))
def test_floats_reach_the_worker_as_the_ticket_hashes_them(temperature: float) -> None:
    params = types.SamplingParams(temperature=temperature)
    again = convert.sampling_from_pb(convert.sampling_to_pb(params))
    assert again.temperature == struct.unpack("f", struct.pack("f", temperature))[0]
