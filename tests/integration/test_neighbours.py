"""Contracts of others over a real fleet: Open Inference Protocol, vLLM's engine, reflection, health."""

from __future__ import annotations

import hashlib
import io
import json
import os
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2
from tokenizers import Tokenizer

from pdserve.client import Client
from pdserve.types import Role
from tests.support.stack import Stack

pb: Any = vllm_engine_pb2
common: Any = common_pb2
PROMPT = "The capital of France is"
BUF = Path(sys.executable).with_name("buf")


class Served:
    """A fleet whose router speaks everything, and whose decode worker is open to gateways."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.worker = f"127.0.0.1:{probe.getsockname()[1]}"
        flags = ("--protocols", "oip,vllm", "--reflection")
        port = int(self.worker.rpartition(":")[2])
        self.stack = Stack.start({Role.PREFILL: 1, Role.DECODE: 1}, router_flags=flags, vllm_port=port)
        self.router = self.stack.address


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.stack.stop()


def request(**changes: Any) -> Any:
    params = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **changes.pop("params", {})}
    sampling = pb.SamplingParams(**params)
    plain = {"request_id": "r1", "stream": True, **changes}
    if "tokenized" not in plain:
        plain.setdefault("text", PROMPT)
    return pb.GenerateRequest(sampling_params=sampling, **plain)


def generate(address: str, asked: Any) -> list[Any]:
    with grpc.insecure_channel(address) as channel:
        return list(
            vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(asked, timeout=60, wait_for_ready=True)
        )


def ours(served: Served, **options: Any) -> Any:
    with Client(served.router) as client:
        return client.generate(PROMPT, max_tokens=8, temperature=0, ignore_eos=True, **options).result()


@pytest.mark.parametrize("where", ["router", "worker"])
def test_vllm_tokens_are_those_of_our_own_contract(served: Served, where: str) -> None:
    want = ours(served)
    *chunks, last = generate(getattr(served, where), request(params={"logprobs": 2}))
    ids = [token for part in chunks for token in part.chunk.token_ids]
    whole = last.complete
    assert tuple(ids) == tuple(whole.output_ids) == want.token_ids
    assert whole.finish_reason == "length"
    assert (whole.prompt_tokens, whole.completion_tokens) == (want.usage.prompt_tokens, 8)
    assert list(whole.output_logprobs.token_ids) == ids
    assert len(whole.output_logprobs.token_logprobs) == 8
    assert all(len(top.values) == 2 and top.token_ids[0] == token
               for top, token in zip(whole.output_logprobs.top_logprobs, ids, strict=True))  # fmt: skip


def test_vllm_stop_texts_and_token_ids_end_a_request(served: Served) -> None:
    want = ours(served)
    second = want.token_ids[1]
    (last,) = generate(served.router, request(stream=False, params={"stop_token_ids": [second]}))
    assert last.complete.matched_token_id == second
    assert last.complete.finish_reason == "stop"
    (last,) = generate(served.router, request(stream=False, params={"stop": ["Paris"]}))
    assert last.complete.matched_stop_str == "Paris"


def test_what_the_vllm_contract_has_and_we_have_not_is_refused_by_name(served: Served) -> None:
    bad = [
        (request(kv_transfer_params_json="{}"), "kv_transfer_params_json"),
        (request(mm_inputs=pb.MultimodalInputs()), "mm_inputs"),
        (request(params={"structural_tag": "x"}), "structural_tag"),
        (request(params={"logprobs": -1}), "logprobs"),
        (request(params={"truncate_prompt_tokens": 3}), "truncate_prompt_tokens"),
        (request(tokenized=pb.TokenizedInput(input_ids=[10**6])), "tokens"),
    ]
    for asked, name in bad:
        with pytest.raises(grpc.RpcError) as caught:
            generate(served.router, asked)
        assert name in caught.value.details()


def test_vllm_abort_ends_a_request_by_the_clients_id(served: Served) -> None:
    with grpc.insecure_channel(served.router) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        stream = stub.Generate(request(request_id="long", params={"max_tokens": 2000}), timeout=60)
        next(stream)
        stub.Abort(pb.AbortRequest(request_ids=["long", "nobody"]), timeout=10)
        with pytest.raises(grpc.RpcError) as caught:
            list(stream)
        assert caught.value.code() is grpc.StatusCode.CANCELLED


@pytest.mark.parametrize("where", ["router", "worker"])
def test_vllm_gateways_learn_what_they_need(served: Served, where: str) -> None:
    with grpc.insecure_channel(getattr(served, where)) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        assert stub.HealthCheck(pb.HealthCheckRequest(), timeout=10, wait_for_ready=True).healthy
        info = stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=10)
        assert info.served_model_name == "smollm2-135m-instruct"
        assert (info.vocab_size, info.is_generation) == (49152, True)
        server = stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=10)
        assert (server.block_size, server.data_parallel_size, server.model_dtype) == (16, 1, "torch.float32")
        (load,) = stub.GetLoads(pb.GetLoadsRequest(), timeout=10).loads
        assert load.max_total_num_tokens == 256 * 16 * (2 if where == "router" else 1)
        chunks = list(stub.GetTokenizer(common.GetTokenizerRequest(), timeout=30))
        assert not stub.FlushCache(common.FlushCacheRequest(), timeout=10).success
    data = b"".join(chunk.data for chunk in chunks)
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        tokenizer = Tokenizer.from_str(archive.read("tokenizer.json").decode())
        assert "chat_template" in json.loads(archive.read("tokenizer_config.json"))
    with Client(served.router) as client:
        prompt = client.generate(PROMPT, max_tokens=1).result().usage.prompt_tokens
    assert len(tokenizer.encode(PROMPT).ids) == prompt


@pytest.mark.parametrize("where", ["router", "worker"])
def test_vllm_embed_is_the_last_tokens_vector(served: Served, where: str) -> None:
    with Client(served.router) as client:
        ids = client.tokenize(PROMPT).ids
        (want,) = client.embed([ids], pooling="last").vectors
    with grpc.insecure_channel(getattr(served, where)) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        asked = pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=ids))
        found = stub.Embed(asked, timeout=60)
    assert (found.embedding_dim, found.prompt_tokens) == (len(want), len(ids))
    assert list(found.embedding) == list(want)


def test_tritons_client_gets_texts_whole_and_streamed(served: Served) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.triton_client", served.router, PROMPT, "8"],
        capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    want = ours(served).text
    assert found["texts"] == [want, want]
    assert "".join(found["parts"]) == want
    assert found["finish"] == ["length", "length"]
    assert found["final"]
    assert (found["live"], found["ready"], found["model_ready"], found["other_ready"]) == (
        True,
        True,
        True,
        False,
    )
    assert (found["server"], found["id"]) == ("pdserve", "a")
    assert "parameters.best_before" in found["refused"]


def test_our_messages_are_those_of_the_protocol() -> None:
    """Field by field beside Triton's, which has more of them; each in a process of its own."""
    code = (
        "import json, importlib; m = importlib.import_module({module!r});"
        "walk = lambda d: [[d.full_name, f.name, f.number, f.type, f.is_repeated] for f in d.fields]"
        " + [row for n in d.nested_types for row in walk(n)];"
        "rows = [r for d in m.DESCRIPTOR.message_types_by_name.values() for r in walk(d)];"
        "rows += [[s.full_name, x.name, x.input_type.full_name, x.output_type.full_name, x.server_streaming]"
        " for s in m.DESCRIPTOR.services_by_name.values() for x in s.methods]; print(json.dumps(rows))"
    )
    modules = ("pdserve.rpc.oip.v2.open_inference_pb2", "tritonclient.grpc.service_pb2")
    mine, theirs = (
        {tuple(row) for row in json.loads(subprocess.run(
            [sys.executable, "-c", code.format(module=module)], capture_output=True, text=True, check=True,
        ).stdout)}
        for module in modules
    )  # fmt: skip
    assert len(mine) > 60
    assert mine <= theirs


def test_reflection_lets_buf_curl_call_without_protos(served: Served) -> None:
    url = f"http://{served.router}/pdserve.rpc.v1.InferenceService/GetModel"
    command = [
        str(BUF),
        "curl",
        "--reflect",
        "--protocol",
        "grpc",
        "--http2-prior-knowledge",
        "-d",
        "{}",
        url,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == "smollm2-135m-instruct"


def test_health_is_told_for_each_service(served: Served) -> None:
    names = (
        "",
        "pdserve.rpc.v1.InferenceService",
        "inference.GRPCInferenceService",
        "vllm.grpc.engine.VllmEngine",
    )
    with grpc.insecure_channel(served.router) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in names:
            status = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10).status
            assert status == health_pb2.HealthCheckResponse.SERVING, name
