"""Every message survives the way to protobuf bytes and back; incomplete ones are refused."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve import messages, types
from pdserve.errors import InvalidRequest
from pdserve.rpc import convert
from pdserve.rpc.v1 import cluster_pb2, decode_pb2, inference_pb2, prefill_pb2, transfer_pb2
from tests.support import message_values as some

ROUND_TRIPS: list[tuple[str, st.SearchStrategy[Any], Callable[[Any], Any], Callable[[Any], Any]]] = [
    ("reserve", some.reserves, convert.reserve_to_pb, convert.reserve_from_pb),
    ("prefill", some.prefills, convert.prefill_to_pb, convert.prefill_from_pb),
    ("decode_event", some.decode_events, convert.decode_event_to_pb, convert.decode_event_from_pb),
    ("prefill_result", some.prefill_results, convert.prefill_result_to_pb, convert.prefill_result_from_pb),
    ("envelope", some.envelopes, convert.envelope_to_pb, convert.envelope_from_pb),
    ("join_event", some.join_events, convert.join_event_to_pb, convert.join_event_from_pb),
    ("join_answer", some.join_answers, convert.join_answer_to_pb, convert.join_answer_from_pb),
    ("worker_state", some.worker_states, convert.worker_state_to_pb, convert.worker_state_from_pb),
    ("generate", some.inputs, convert.generate_to_pb, convert.generate_from_pb),
    ("stream_event", some.stream_events, convert.stream_event_to_pb, convert.stream_event_from_pb),
    ("tokenize", some.tokenizes, convert.tokenize_to_pb, convert.tokenize_from_pb),
    ("tokenized", some.tokenized, convert.tokenized_to_pb, convert.tokenized_from_pb),
    ("embed", some.embeds, convert.embed_to_pb, convert.embed_from_pb),
    ("embeddings", some.embeddings, convert.embeddings_to_pb, convert.embeddings_from_pb),
    ("score", some.score_inputs, convert.score_to_pb, convert.score_from_pb),
    ("scores", some.scores, convert.scores_to_pb, convert.scores_from_pb),
    ("model_info", some.models, convert.model_info_to_pb, convert.model_info_from_pb),
    ("fleet_status", some.statuses, convert.fleet_status_to_pb, convert.fleet_status_from_pb),
    ("report", some.reports, convert.report_to_pb, convert.report_from_pb),
    ("explanation", some.explanations, convert.explanation_to_pb, convert.explanation_from_pb),
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
