"""Arguments of `generate` into a GenerateInput, the same for both clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

from pdserve.api import ChatMessage, GenerateInput, SamplingInput
from pdserve.errors import InvalidRequest

if TYPE_CHECKING:
    from pdserve.rpc.v1 import inference_pb2

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_DEADLINE_S = 600.0
CONTROL_TIMEOUT_S = 10.0
PLAN_TIMEOUT_S = 140.0
"""A placement of experts is planned first: seconds for the largest models, at most the worker's limit."""
GRACE_S = 5.0
"""How long after a deadline we still wait for the server to say so: its error tells more than ours."""


class GenerateOptions(TypedDict, total=False):
    """Options of `generate`; what is left out takes the server's documented default.

    temperature 0 is greedy. stop: texts that end the stream. deadline_s: 600 at most. priority: lower is
    served first. client_request_id: a label, returned as it is. no_prefix_cache: neither use nor fill the
    prefix cache. no_text: token ids only.
    """

    model: str
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    max_tokens: int | None
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    stop: Sequence[str]
    deadline_s: float
    priority: int
    client_request_id: str
    no_prefix_cache: bool
    trace_id: str
    no_text: bool


Message = ChatMessage | Mapping[str, str]

_SAMPLING = frozenset(SamplingInput.__dataclass_fields__)


def build(
    prompt: str | None,
    messages: Sequence[Message] | None,
    token_ids: Sequence[int] | None,
    options: GenerateOptions,
) -> GenerateInput:
    """One request. Raises InvalidRequest unless exactly one of the three inputs is given."""
    given = [value for value in (prompt, messages, token_ids) if value is not None]
    if len(given) != 1:
        raise InvalidRequest.field("input", "give exactly one of prompt, messages and token_ids.")
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in options.items()}
    values["deadline_s"] = values.get("deadline_s") or DEFAULT_DEADLINE_S
    sampling = {name: values.pop(name) for name in tuple(values) if name in _SAMPLING}
    return GenerateInput(
        prompt=prompt,
        messages=None if messages is None else tuple(_message(message) for message in messages),
        token_ids=None if token_ids is None else tuple(token_ids),
        sampling=SamplingInput(**sampling),  # type: ignore[arg-type]
        **values,  # type: ignore[arg-type]
    )


def to_wire(source: GenerateInput) -> inference_pb2.GenerateRequest:
    """Raises InvalidRequest for values of a wrong type, or that no message can carry (a negative id)."""
    from pdserve.rpc.convert.generate import generate_to_pb

    try:
        return generate_to_pb(source)
    except (TypeError, ValueError) as error:
        raise InvalidRequest("A value of the request has a wrong type or is out of range.") from error


def _message(message: Message) -> ChatMessage:
    if isinstance(message, ChatMessage):
        return message
    if set(message) != {"role", "content"}:
        raise InvalidRequest.field("messages", 'each must have "role" and "content" and nothing else.')
    return ChatMessage(role=message["role"], content=message["content"])
