"""Tenants do not see each other: prefixes, requests, what was asked. And what logs hold of keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pdserve.cli.keys import _read, _write
from pdserve.messages import Outcome
from pdserve.rpc import convert
from pdserve.rpc.v1 import inference_pb2 as pb
from router.auth.keys import make_key
from tests.support.edge_kit import Edge, bearer, stub_on
from tests.support.grpc_methods import Metadata
from tests.support.leaks import leak_in

SECRET_PROMPT = "The vault opens with eleven blue herons at dawn, and nobody may know of it. "
Stub = Any


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    directory = tmp_path_factory.mktemp("edge")
    made = Edge.start(directory, "--audit-log", str(directory / "audit"), "--max-tenant-share", "0.5")
    yield made
    made.stack.stop()


@pytest.fixture
def stub(edge: Edge) -> Iterator[Stub]:
    with edge.channel() as channel:
        yield stub_on(channel)


def ask(edge: Edge, stub: Stub, who: str, prompt: str, max_tokens: int = 4) -> pb.End:
    request = pb.GenerateRequest(prompt=prompt, sampling={"max_tokens": max_tokens, "ignore_eos": True})
    events = list(stub.Generate(request, metadata=edge.of(who), timeout=60))
    return events[-1].end


def test_a_prompt_of_one_tenant_is_no_prefix_hit_of_another(edge: Edge, stub: Stub) -> None:
    assert ask(edge, stub, "shop", SECRET_PROMPT).usage.cached_tokens == 0
    again = ask(edge, stub, "shop", SECRET_PROMPT).usage
    assert again.cached_tokens > len(SECRET_PROMPT) // 2
    assert ask(edge, stub, "bank", SECRET_PROMPT).usage.cached_tokens == 0
    assert ask(edge, stub, "bank", SECRET_PROMPT).usage.cached_tokens == again.cached_tokens


def test_a_request_of_another_tenant_is_as_unknown_as_one_that_never_was(edge: Edge, stub: Stub) -> None:
    # Eight choices with log-probabilities: it must not be over before all has been asked of it.
    long = {"max_tokens": 480, "ignore_eos": True, "logprobs": 20}
    request = pb.GenerateRequest(prompt="count", sampling=long, n=8)
    call = stub.Generate(request, metadata=edge.of("shop"), timeout=120)
    request_id = next(call).admitted.request_id

    def abort(who: str, which: str) -> Outcome:
        answer = stub.Abort(pb.AbortRequest(request_id=which), metadata=edge.of(who), timeout=30)
        return convert.outcome_from_pb(answer.outcome)

    def explain(who: str, which: str) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.RpcError) as caught:
            stub.Explain(pb.ExplainRequest(request_id=which), metadata=edge.of(who), timeout=30)
        error: Any = caught.value
        return error.code(), error.details()

    for who in ("bank", "admin"):
        assert abort(who, request_id) is abort(who, "0" * 32) is Outcome.UNKNOWN
        assert explain(who, request_id) == explain(who, "0" * 32)
    assert stub.Explain(pb.ExplainRequest(request_id=request_id), metadata=edge.of("shop"), timeout=30)
    assert abort("shop", request_id) is Outcome.STOPPING
    with pytest.raises(grpc.RpcError):
        list(call)
    for who in ("bank", "admin"):
        assert abort(who, request_id) is Outcome.UNKNOWN
        assert explain(who, request_id) == explain(who, "0" * 32)
    assert abort("shop", request_id) is Outcome.COMPLETE


def test_a_key_that_is_added_or_revoked_counts_from_the_next_call_on(edge: Edge, stub: Stub) -> None:
    key, entry = make_key("late", admin=False, note="", lives_s=None, now=0)
    before = _read(edge.key_file)
    with pytest.raises(grpc.RpcError):
        stub.GetModel(pb.GetModelRequest(), metadata=bearer(key), timeout=30)
    _write(edge.key_file, [*before, entry])
    assert stub.GetModel(pb.GetModelRequest(), metadata=bearer(key), timeout=30).model
    _write(edge.key_file, before)
    with pytest.raises(grpc.RpcError):
        stub.GetModel(pb.GetModelRequest(), metadata=bearer(key), timeout=30)
    changes = [line["arguments"] for line in audit(edge) if line["action"] == "keys"]
    assert changes == [{"added": entry.id, "removed": ""}, {"added": "", "removed": entry.id}]


def audit(edge: Edge) -> list[dict[str, Any]]:
    file = edge.key_file.parent / "audit"
    assert file.stat().st_mode & 0o777 == 0o600
    return [json.loads(line) for line in file.read_text().splitlines()]


def refusal(stub: Stub, request: pb.RebalanceExpertsRequest, metadata: Metadata) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        stub.RebalanceExperts(request, metadata=metadata, timeout=60)
    error: Any = caught.value
    return str(error.details())


def test_calls_that_change_the_fleet_are_in_the_audit_log_with_who_and_how_they_ended(
    edge: Edge, stub: Stub
) -> None:
    seen = len(audit(edge))
    request = pb.RebalanceExpertsRequest(worker_id="decode-0")
    for who, metadata in (("nobody", ()), ("shop", edge.of("shop")), ("admin", edge.of("admin"))):
        if who == "admin":
            stub.RebalanceExperts(request, metadata=metadata, timeout=60)
        else:
            assert leak_in(refusal(stub, request, metadata)) == ""
    ask(edge, stub, "admin", "not an admin's business")
    nobody, shop, admin = audit(edge)[seen:]
    ids = {name: key.split("_")[1] for name, key in edge.keys.items()}
    assert (nobody["key_id"], nobody["outcome"]) == ("", "unauthenticated")
    assert (shop["key_id"], shop["tenant"], shop["outcome"]) == (ids["shop"], "shop", "permission_refused")
    assert (admin["key_id"], admin["tenant"], admin["outcome"]) == (ids["admin"], "ops", "ok")
    assert admin["action"] == "RebalanceExperts"
    assert admin["arguments"] == {"worker_id": "decode-0"}
    assert (admin["peer"], nobody["arguments"]) == ("127.0.0.1", {})
    assert all(line["time"] > 1.6e9 for line in (nobody, shop, admin))


def test_the_log_and_the_audit_log_hold_neither_prompts_nor_keys(edge: Edge, stub: Stub) -> None:
    ask(edge, stub, "shop", SECRET_PROMPT)
    for metadata in (bearer("a-guess-that-is-wrong"), (("x-api-key", "another-guess"),)):
        with pytest.raises(grpc.RpcError):
            stub.GetModel(pb.GetModelRequest(), metadata=metadata, timeout=30)
    for bad in (
        pb.GenerateRequest(prompt=SECRET_PROMPT * 100),
        pb.GenerateRequest(prompt=SECRET_PROMPT, n=99),
    ):
        with pytest.raises(grpc.RpcError):
            list(stub.Generate(bad, metadata=edge.of("shop"), timeout=30))
    for file in (edge.log, edge.key_file.parent / "audit", edge.key_file):
        text = Path(file).read_text()
        for word in ("herons", "guess", edge.stack.secret, *(k.split("_", 2)[2] for k in edge.keys.values())):
            assert word not in text
