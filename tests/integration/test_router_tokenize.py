"""Tokenize and Detokenize over real gRPC: ids as Generate has them, bytes of tokens, and what is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from pdserve.api import ChatMessage, Tokenized, TokenizeInput
from pdserve.rpc import convert
from pdserve.rpc.channel import open_channel
from pdserve.rpc.status import error_from_rpc
from pdserve.rpc.v1 import inference_pb2, inference_pb2_grpc
from pdserve.types import Role
from tests.support.byte_model import CONTEXT, VOCAB
from tests.support.router_kit import FakeWorker, Fleet, fleet

TEXT = "naïve 🙂 <|end|> x"


@asynccontextmanager
async def stub_of(running: Fleet) -> AsyncIterator[Any]:
    channel = open_channel(running.router.address)
    try:
        yield inference_pb2_grpc.InferenceServiceStub(channel)
    finally:
        await channel.close(None)


async def tokenize(stub: Any, **ask: Any) -> Tokenized:
    request = convert.tokenize_to_pb(TokenizeInput(**ask))
    return convert.tokenized_from_pb(await stub.Tokenize(request))


async def test_tokens_are_those_that_generate_computes_and_spell_the_text() -> None:
    decode = FakeWorker("d", Role.DECODE)
    async with fleet(decode) as running, stub_of(running) as stub:
        told = await tokenize(stub, prompt=TEXT)
        await running.client.generate(TEXT, max_tokens=1).result()
        assert told.ids == decode.reserves[0].token_ids
        assert b"".join(told.tokens) == TEXT.encode()
        assert told.max_context == CONTEXT
        assert await tokenize(stub, prompt=TEXT, no_special_tokens=True) == told
        chat = await tokenize(stub, messages=(ChatMessage(role="user", content="hi <|end|>"),))
        assert b"".join(chat.tokens) == b"user: hi <|end|>\n"
        long = await tokenize(stub, prompt="long " * 30_000)
        assert len(long.ids) == 150_000
        back = await stub.Detokenize(inference_pb2.DetokenizeRequest(ids=(*told.ids, 256)))
        assert back.text == f"{TEXT}<|end|>"
        assert not (await stub.Detokenize(inference_pb2.DetokenizeRequest())).text


@pytest.mark.parametrize(
    ("ask", "label"),
    [
        ({}, "invalid_request"),
        ({"prompt": ""}, "invalid_request"),
        ({"prompt": "x", "model": "another"}, "unknown_model"),
        ({"messages": ()}, "invalid_request"),
        ({"messages": (ChatMessage(role="king", content="x"),)}, "invalid_request"),
        (
            {"messages": (ChatMessage(role="user", content="x"),), "no_special_tokens": True},
            "invalid_request",
        ),
    ],
)
async def test_what_can_not_be_tokenised_is_refused(ask: dict[str, Any], label: str) -> None:
    async with fleet(FakeWorker("d", Role.DECODE)) as running, stub_of(running) as stub:
        with pytest.raises(grpc.RpcError) as caught:
            await tokenize(stub, **ask)
        assert error_from_rpc(caught.value).label == label


async def test_ids_outside_the_vocabulary_and_unknown_models_are_refused() -> None:
    async with fleet(FakeWorker("d", Role.DECODE)) as running, stub_of(running) as stub:
        for request, label in (
            (inference_pb2.DetokenizeRequest(ids=[1, VOCAB]), "invalid_request"),
            (inference_pb2.DetokenizeRequest(ids=[1], model="another"), "unknown_model"),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                await stub.Detokenize(request)
            assert error_from_rpc(caught.value).label == label
