"""Hypothesis strategies for every dataclass that crosses a process border."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from pdserve import api, messages, types
from pdserve.rpc import convert

text = st.text(st.characters(codec="utf-8"), max_size=12)
name = text.filter(bool)
u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
i32 = st.integers(-(2**31), 2**31 - 1)
single = st.floats(0, 100, width=32)
double = st.floats(allow_nan=False, allow_infinity=False)
ids = st.lists(u32, max_size=6).map(tuple)
blob = st.binary(max_size=20)

keys = st.builds(types.Key, request_id=name, term=u32, epoch=u32)
grammars = st.builds(types.Grammar, kind=st.sampled_from(types.GrammarKind), text=text)
biases = st.lists(st.tuples(u32, single), max_size=3).map(tuple)
words = st.lists(ids, max_size=3).map(tuple)
others = st.builds(types.TokenLogprob, token_id=u32, logprob=single, token=blob)
logprobs = st.builds(
    types.TokenLogprob, token_id=u32, logprob=single, token=blob, top=st.lists(others, max_size=3).map(tuple)
)
lists = {
    "logit_bias": biases,
    "bad_words": words,
    "logprobs": st.none() | u32,
    "grammar": st.none() | grammars,
}
samplings = st.builds(
    types.SamplingParams,
    typical_p=single,
    repetition_penalty=single,
    presence_penalty=single,
    frequency_penalty=single,
    min_tokens=u32,
    **lists,
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
    "cache_salt": text,
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
    st.builds(
        messages.Token,
        key=keys,
        index=u32,
        token_id=u32,
        ledger=st.none() | ledgers,
        logprob=st.none() | logprobs,
    ),
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
        logprob=st.none() | logprobs,
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
    typical_p=st.none() | single,
    repetition_penalty=st.none() | single,
    presence_penalty=st.none() | single,
    frequency_penalty=st.none() | single,
    min_tokens=st.none() | u32,
    **lists,
)
tools = st.lists(st.builds(api.Tool, name=text, description=text, parameters=text), max_size=2).map(tuple)
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
    "bad_words": st.lists(text, max_size=3).map(tuple),
    "best_of": u32,
    "beam_width": u32,
    "length_penalty": st.none() | single,
    "echo": st.booleans(),
    "prompt_logprobs": st.none() | u32,
    "tools": tools,
    "tool_choice": st.none() | st.builds(api.ToolChoice, mode=st.sampled_from(api.ToolMode), name=text),
    "thinking": st.none() | st.booleans(),
}
calls = st.builds(api.ToolCall, id=text, name=text, arguments=text)
chats = st.lists(
    st.builds(
        api.ChatMessage,
        role=text,
        content=text,
        tool_calls=st.lists(calls, max_size=2).map(tuple),
        tool_call_id=text,
        reasoning=text,
    ),
    max_size=3,
).map(tuple)
token_logprobs = st.lists(logprobs, max_size=3).map(tuple)
inputs = st.one_of(
    st.builds(api.GenerateInput, prompt=text, **plain),
    st.builds(api.GenerateInput, messages=chats, **plain),
    st.builds(api.GenerateInput, token_ids=ids, **plain),
    st.builds(api.GenerateInput, **plain),
)
timings = st.builds(api.Timings, queue_s=double, tokenise_s=double, ttft_s=double, total_s=double)
stream_events = st.one_of(
    st.builds(api.Admitted, request_id=text, client_request_id=text, prompt_tokens=u32),
    st.builds(
        api.Chunk,
        index=u32,
        token_ids=ids,
        text=text,
        choice=u32,
        logprobs=token_logprobs,
        reasoning=text,
        tool_calls=st.lists(
            st.builds(api.ToolCallDelta, index=u32, id=text, name=text, arguments=text), max_size=2
        ).map(tuple),
    ),
    st.builds(api.PromptInfo, token_ids=ids, text=text, logprobs=token_logprobs),
    st.builds(
        api.ChoiceEnd,
        choice=u32,
        finish_reason=finishes,
        completion_tokens=u32,
        stop_text=text,
        stop_token_id=st.none() | u32,
        cumulative_logprob=st.none() | double,
    ),
    st.builds(api.End, finish_reason=finishes, usage=usages, timings=timings, ledger=ledgers, epochs=u32),
)
models = st.builds(
    api.ModelInfo, model=text, limits=limits, has_chat_template=st.booleans(), dtype=text, model_digest=text
)
seconds = st.builds(
    api.SecondsHistogram,
    bounds=st.lists(double, max_size=3).map(tuple),
    counts=st.lists(u64, max_size=4).map(tuple),
    sum=double,
)
traffics = st.builds(
    api.Traffic, prompt_tokens=u64, cached_tokens=u64, completion_tokens=u64, finished_requests=u64,
    failed_requests=u64, ttft=seconds, itl=seconds,
)  # fmt: skip
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
    traffic=traffics,
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

some_texts = st.lists(text | ids, max_size=3).map(tuple)
tokenizes = st.one_of(
    st.builds(api.TokenizeInput, model=text, prompt=text, no_special_tokens=st.booleans()),
    st.builds(api.TokenizeInput, messages=chats, tools=tools),
)
tokenized = st.builds(api.Tokenized, ids=ids, tokens=st.lists(blob, max_size=3).map(tuple), max_context=u32)
embeds = st.builds(
    api.EmbedInput, inputs=some_texts, model=text, pooling=st.sampled_from(api.Pooling),
    no_normalise=st.booleans(), deadline_s=double,
)  # fmt: skip
vectors = st.lists(st.lists(single, max_size=4).map(tuple), max_size=2).map(tuple)
embeddings = st.builds(api.Embeddings, vectors=vectors, usage=usages)
score_inputs = st.builds(
    api.ScoreInput, prompt=text | ids, continuations=some_texts, model=text, deadline_s=double
)
scores = st.builds(
    api.Scores,
    scores=st.lists(st.builds(api.ContinuationScore, logprob=double, tokens=token_logprobs), max_size=2).map(
        tuple
    ),
    usage=usages,
)
