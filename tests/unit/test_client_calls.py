"""Both clients against a fake server, over real gRPC: all calls, streams, retries, many prompts."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from pdserve.client import (
    AsyncClient,
    AsyncStream,
    Client,
    GenerateOptions,
    Outcome,
    Progress,
    Result,
    Retry,
    Stream,
    ToolCall,
    sending,
)
from pdserve.client.testing import FakeAnswer, FakeServer
from pdserve.errors import (
    Cancelled,
    DeadlineExpired,
    InvalidRequest,
    Overloaded,
    PdserveError,
    Unavailable,
    UnknownRequest,
    UnsupportedFeature,
)

SOON = Retry(attempts=3, max_wait_s=0.1)
BUSY = Overloaded("Busy: come back later.", retry_after_s=0.01)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        yield fake


class Both:
    """The blocking client's calls, made by either client."""

    def __init__(self, kind: str, address: str | list[str], **options: Any) -> None:
        self._loop = asyncio.new_event_loop() if kind == "asyncio" else None
        self.client: Any = (
            self.run(self._open(address, options)) if self._loop else Client(address, **options)
        )

    @staticmethod
    async def _open(address: str | list[str], options: Any) -> AsyncClient:
        return AsyncClient(address, **options)

    def run(self, work: Any) -> Any:
        return self._loop.run_until_complete(asyncio.wait_for(work, 20)) if self._loop else work

    def ask(self, name: str, *args: Any, **values: Any) -> Any:
        return self.run(getattr(self.client, name)(*args, **values))

    def stream(self, *args: Any, **values: Any) -> Any:
        if self._loop is None:
            return self.client.generate(*args, **values)

        async def begin() -> AsyncStream:
            return self.client.generate(*args, **values)  # type: ignore[no-any-return]

        return self.run(begin())

    def result(self, *args: Any, **values: Any) -> Result:
        return self.run(self.stream(*args, **values).result())  # type: ignore[no-any-return]

    def next(self, stream: Any) -> Any:
        return next(stream) if self._loop is None else self.run(anext(stream))

    def many(self, *args: Any, **values: Any) -> list[Any]:
        if self._loop is None:
            return list(self.client.generate_many(*args, **values))

        async def collect() -> list[Any]:
            return [answer async for answer in self.client.generate_many(*args, **values)]

        return self.run(collect())  # type: ignore[no-any-return]

    def close(self) -> None:
        self.ask("close")
        if self._loop:
            self._loop.close()


@pytest.fixture(params=["blocking", "asyncio"])
def both(request: pytest.FixtureRequest, server: FakeServer) -> Iterator[Both]:
    client = Both(request.param, server.address, retry=SOON)
    yield client
    client.close()


def test_both_clients_have_the_same_surface() -> None:
    def surface(cls: type) -> dict[str, list[Any]]:
        return {
            name: [
                (p.name, p.kind, p.default, str(p.annotation))
                for p in inspect.signature(member).parameters.values()
            ]
            for name, member in inspect.getmembers(cls, inspect.isfunction)
            if not name.startswith("_") or name == "__init__"
        }

    assert surface(AsyncClient) == surface(Client)
    assert surface(AsyncStream).keys() == surface(Stream).keys()

    def answers(cls: type) -> dict[str, str]:
        return {
            name: str(inspect.signature(member).return_annotation).replace("Async", "")
            for name, member in inspect.getmembers(cls, inspect.isfunction)
            if not name.startswith("_")
        }

    assert answers(AsyncClient) == answers(Client)


def test_every_call_has_an_answer(both: Both, server: FakeServer) -> None:
    assert both.ask("tokenize", "hé").ids == tuple("hé".encode())
    assert both.ask("tokenize", messages=[{"role": "user", "content": "x"}]).tokens[0] == b"u"
    assert both.ask("detokenize", list("hé".encode())) == "hé"
    assert len(both.ask("embed", ["a", [1, 2]], pooling="last").vectors) == 2
    assert [each.logprob for each in both.ask("score", "a", ["b", "cd"]).scores] == [-0.5, -1.0]
    assert both.ask("get_model").model == "fake"
    assert both.ask("get_status").router_id == "fake"
    with pytest.raises(UnknownRequest):
        both.ask("explain", "nobody")
    assert both.ask("abort", "nobody") is Outcome.UNKNOWN
    with pytest.raises(UnsupportedFeature):
        both.ask("get_experts")
    with pytest.raises(UnsupportedFeature):
        both.ask("rebalance_experts")
    assert all(0 < call.deadline_s < 601 for call in server.calls)


@pytest.mark.parametrize(
    ("name", "args", "values"),
    [
        ("tokenize", (), {}),
        ("tokenize", ("x",), {"messages": []}),
        ("tokenize", (5,), {}),
        ("detokenize", ([-1],), {}),
        ("embed", ("x",), {}),
        ("embed", (["x"],), {"pooling": "sum"}),
        ("score", ("x", "y"), {}),
        ("abort", (5,), {}),
    ],
)
def test_what_can_not_be_asked_is_refused_before_it_is_sent(
    both: Both, server: FakeServer, name: str, args: Any, values: Any
) -> None:
    with pytest.raises(InvalidRequest):
        both.ask(name, *args, **values)
    assert not server.calls


def test_a_result_has_all_that_came(both: Both, server: FakeServer) -> None:
    call = ToolCall(id="1", name="f", arguments="{}")
    server.answer(FakeAnswer(text="hello", reasoning="hm", tool_calls=(call,), chunks=3))
    result = both.result("x", n=2, logprobs=0, echo=True, client_request_id="mine")
    assert [choice.text for choice in result.choices] == ["hello", "hello"]
    assert (result.text, result.reasoning, result.tool_calls) == ("hello", "hm", (call,))
    assert [each.token for each in result.logprobs] == [bytes((each,)) for each in b"hello"]
    assert result.prompt is not None
    assert (result.prompt.text, result.client_request_id) == ("x", "mine")
    assert result.usage.completion_tokens == 10


def test_a_stream_tells_what_it_knows(both: Both, server: FakeServer) -> None:
    server.answer(FakeAnswer(text="abcdef", chunks=3))
    stream = both.stream("xyz", prompt_logprobs=0)
    assert both.next(stream).text == "ab"
    assert stream.request_id == "fake-1"
    assert (stream.prompt_tokens, stream.prompt.token_ids) == (3, (120, 121, 122))
    with pytest.raises(UnsupportedFeature, match="resum"):
        _ = stream.resume_token
    assert both.run(stream.result()).text == "abcdef"
    assert both.ask("abort", "fake-1") is Outcome.COMPLETE
    assert both.ask("explain", "fake-1").state == "done"


def test_cancelling_ends_the_stream_at_the_server(both: Both, server: FakeServer) -> None:
    server.hold()
    stream = both.stream("x")
    server.wait_for_calls(1)
    stream.cancel()
    with pytest.raises(Cancelled):
        both.run(stream.result())
    server.wait_for_cancelled()


def test_refused_requests_are_made_again_as_the_server_says(both: Both, server: FakeServer) -> None:
    server.fail(BUSY, times=2)
    assert both.result("x", deadline_s=30.0).text == "hello"
    assert len(server.requests) == 3
    deadlines = [request.deadline_s for request in server.requests]
    assert deadlines[0] == 30.0
    assert 25 < deadlines[2] < deadlines[1] < 30


def test_questions_are_asked_again(both: Both, server: FakeServer) -> None:
    server.fail(Unavailable("No worker yet.", retry_after_s=0.01), times=2, method="GetModel")
    assert both.ask("get_model").model == "fake"
    server.fail(Unavailable("No worker yet.", retry_after_s=0.01), times=3, method="GetModel")
    with pytest.raises(Unavailable, match="No worker"):
        both.ask("get_model")


def test_after_its_attempts_the_servers_own_error_comes(both: Both, server: FakeServer) -> None:
    server.fail(BUSY, times=3)
    with pytest.raises(Overloaded, match="come back") as caught:
        both.result("x")
    assert caught.value.retry_after_s == pytest.approx(0.01)
    assert len(server.requests) == 3


@pytest.mark.parametrize("chunks", [1, 3])
def test_an_admitted_request_is_never_made_again(both: Both, server: FakeServer, chunks: int) -> None:
    server.answer(FakeAnswer(text="abc", chunks=chunks, error=Unavailable("lost", retry_after_s=0.01)))
    stream = both.stream("x")
    assert both.next(stream).index == 0
    with pytest.raises(Unavailable, match="lost"):
        both.run(stream.result())
    assert len(server.requests) == 1


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_a_retry_ends_with_the_deadline_or_a_cancel(kind: str, server: FakeServer) -> None:
    """Waits so long that none of them can end by itself meanwhile."""
    both = Both(kind, server.address, retry=Retry(attempts=3, max_wait_s=300.0))
    server.fail(Overloaded("busy", retry_after_s=200.0))
    with pytest.raises(Overloaded):
        both.result("x", deadline_s=100.0)
    server.fail(Overloaded("busy", retry_after_s=200.0), times=9)
    stream = both.stream("x")
    server.wait_for_calls(2)
    stream.cancel()
    with pytest.raises((Cancelled, Overloaded)):
        both.run(stream.result())
    assert len(server.requests) == 2
    both.close()


def test_a_server_that_says_nothing_is_left_at_the_deadline(
    both: Both, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "GRACE_S", 0.0)
    gate = threading.Event()

    def silent(request: Any) -> Iterator[Any]:
        gate.wait(20)
        yield from ()

    server.answer(silent)
    with pytest.raises(DeadlineExpired):
        both.result("x", deadline_s=0.2)
    gate.set()
    assert len(server.requests) <= 1  # none where all the time was gone before it came there


PROMPTS: list[Any] = [
    "a",
    {"prompt": "b", "max_tokens": 3},
    {"token_ids": [99]},
    {"messages": [{"role": "user", "content": "d"}], "n": 2},
]


@pytest.mark.parametrize("ordered", [True, False])
def test_many_prompts_are_answered_whatever_fails(both: Both, server: FakeServer, ordered: bool) -> None:
    server.default = FakeAnswer(text="ok")
    told: list[Progress] = []
    prompts = [*PROMPTS, {"prompt": "bad", "regex": 5}, {"prompt": "x", "token_ids": [1]}, 7, *("12345678")]
    answers = both.many(prompts, concurrency=3, ordered=ordered, progress=told.append, max_tokens=5)
    indices = [answer.index for answer in answers]
    assert sorted(indices) == list(range(len(prompts)))
    assert indices == sorted(indices) or not ordered
    by_index = {answer.index: answer for answer in answers}
    failed = {index for index, answer in by_index.items() if not answer.ok}
    assert failed == {4, 5, 6}
    assert isinstance(by_index[4].error, InvalidRequest)
    with pytest.raises(InvalidRequest):
        _ = by_index[5].result
    assert by_index[0].result.text == "ok"
    assert len(by_index[3].result.choices) == 2
    assert told[-1] == Progress(done=len(prompts), failed=3, total=len(prompts))
    limits = {request.prompt: request.sampling.max_tokens for request in server.requests}
    assert (limits["a"], limits["b"]) == (5, 3)


@pytest.mark.parametrize("bad", [{"prompts": "abc"}, {"prompts": ["a"], "concurrency": 0}])
def test_what_is_no_list_of_prompts_is_refused(both: Both, bad: Any) -> None:
    with pytest.raises(InvalidRequest):
        both.many(**bad)


def endless() -> Iterator[str]:
    """Prompts without an end; they are read as they are needed, a few at a time."""
    for number in range(10**6):
        assert number < 40
        yield str(number)


def test_leaving_many_cancels_what_runs_and_reads_no_more() -> None:
    with FakeServer() as server, Client(server.address) as client:
        answers = client.generate_many(endless(), concurrency=4)
        assert next(answers).result.text == "hello"
        server.hold()
        answers.close()  # type: ignore[attr-defined]
        server.release()
        assert client.generate("last").result().text == "hello"
        assert len(server.requests) <= 9


async def test_leaving_many_cancels_what_runs_with_asyncio_too() -> None:
    with FakeServer() as server:
        async with AsyncClient(server.address) as client:
            answers = client.generate_many(endless(), concurrency=4)
            assert (await anext(answers)).result.text == "hello"
            server.hold()
            await answers.aclose()  # type: ignore[attr-defined]
            server.release()
            assert (await client.generate("last").result()).text == "hello"
            assert len(server.requests) <= 9


async def test_no_more_than_so_many_run_at_once() -> None:
    with FakeServer() as server:
        server.hold()
        async with AsyncClient(server.address) as client:
            answers: AsyncIterator[Any] = client.generate_many(["x"] * 9, concurrency=3)
            first = asyncio.ensure_future(anext(answers))
            await asyncio.to_thread(server.wait_for_calls, 3)
            assert len(server.requests) == 3
            server.release()
            await first
            assert [answer.index async for answer in answers] == list(range(1, 9))


def test_a_closed_client_says_so_at_once() -> None:
    with FakeServer() as server:
        client = Client(server.address)
        client.close()
        for call in (client.get_model, lambda: client.generate("x")):
            with pytest.raises(Unavailable, match="closed"):
                call()


async def test_a_closed_asyncio_client_says_so_at_once() -> None:
    with FakeServer() as server:
        client = AsyncClient(server.address)
        await client.close()
        with pytest.raises(Unavailable, match="closed"):
            await client.get_model()
        with pytest.raises(PdserveError):
            await client.generate("x").result()


def test_unknown_options_are_refused_by_name() -> None:
    options: Any = {"temprature": 1}
    with Client() as client, pytest.raises(InvalidRequest, match="temprature"):
        client.generate("x", **options)
    assert "temperature" in GenerateOptions.__annotations__


async def test_closing_while_a_question_is_under_way_ends_it() -> None:
    with FakeServer() as server:
        server.hold()
        client = AsyncClient(server.address)
        asked = asyncio.ensure_future(client.get_model())
        await asyncio.to_thread(server.wait_for_calls, 1)
        await client.close()
        with pytest.raises(Cancelled):
            await asked
