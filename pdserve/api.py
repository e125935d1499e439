"""The public inference API as plain data: what a client asks and what it gets back.

What lives here: the dataclasses the SDK and the router share, before they meet protobuf
(`pdserve.rpc.convert`). What does not: what is asked about the fleet (`pdserve.insight`; its names can be had
from here too), messages between our own processes (`pdserve.messages`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pdserve.insight import (
    ExpertReport as ExpertReport,
)
from pdserve.insight import (
    Explanation as Explanation,
)
from pdserve.insight import (
    FleetStatus as FleetStatus,
)
from pdserve.insight import (
    ModelInfo as ModelInfo,
)
from pdserve.insight import (
    RebalanceAnswer as RebalanceAnswer,
)
from pdserve.insight import (
    SecondsHistogram as SecondsHistogram,
)
from pdserve.insight import (
    Traffic as Traffic,
)
from pdserve.insight import (
    WorkerStatus as WorkerStatus,
)
from pdserve.types import (
    FinishReason,
    Grammar,
    Ledger,
    TokenLogprob,
    Usage,
)
from pdserve.types import Pooling as Pooling  # a part of this API


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A function that the model wants called. arguments: a JSON object, as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message of a conversation. role: "system", "user", "assistant" or "tool".

    tool_calls: what an assistant called. tool_call_id: the call that a tool answers. reasoning: what an
    assistant thought.
    """

    role: str
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call. parameters: a JSON schema of an object, as text; empty: none."""

    name: str
    description: str = ""
    parameters: str = ""


class ToolMode(StrEnum):
    """Whether tools are called. named: the one of `ToolChoice.name`."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """How tools are to be used. name: of the tool to call, with mode named."""

    mode: ToolMode = ToolMode.AUTO
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingInput:
    """Sampling as asked; None takes the server's documented default."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateInput:
    """One request as asked, not yet validated. Exactly one of prompt, messages and token_ids is not None.

    deadline_s: seconds from now, 0 takes the default. priority: lower is served first. n, best_of,
    beam_width: 0 is not asked for. bad_words: texts; sampling has those given as token ids. tools,
    tool_choice, thinking: of a chat.
    """

    model: str = ""
    prompt: str | None = None
    messages: tuple[ChatMessage, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    sampling: SamplingInput = SamplingInput()
    stop: tuple[str, ...] = ()
    deadline_s: float = 0.0
    priority: int = 0
    client_request_id: str = ""
    no_prefix_cache: bool = False
    trace_id: str = ""
    no_text: bool = False
    resume_window_s: float = 0.0
    n: int = 0
    bad_words: tuple[str, ...] = ()
    best_of: int = 0
    beam_width: int = 0
    length_penalty: float | None = None
    echo: bool = False
    prompt_logprobs: int | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice | None = None
    thinking: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """First event of a stream: the id the router knows the request by."""

    request_id: str
    client_request_id: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """A part of a tool call. id and name come with its first part; its arguments, once joined, are a JSON
    object."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens that arrived together. index: of the first one among its choice's completion tokens.

    text: what became complete with these tokens; never half a character. logprobs: one for each token, if
    asked for. reasoning, tool_calls: of a chat; neither is part of text.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    choice: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptInfo:
    """The prompt, before the first chunk, where it or its log-probabilities were asked for. logprobs: one for
    each token; the first has none: it is 0, without alternatives."""

    token_ids: tuple[int, ...]
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceEnd:
    """The end of one choice; each has one before the stream's End. stop_text, stop_token_id: what ended it,
    if one did. cumulative_logprob: of its tokens, where log-probabilities were computed."""

    choice: int
    finish_reason: FinishReason
    completion_tokens: int = 0
    stop_text: str = ""
    stop_token_id: int | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds spent on the router's side of one request."""

    queue_s: float = 0.0
    tokenise_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0


_NO_USAGE, _NO_TIMINGS, _NO_LEDGER = Usage(), Timings(), Ledger()


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Last event of a stream that ended without an error. finish_reason: of the first choice. usage: of all.
    epochs: tries it took, 1 when nothing failed."""

    finish_reason: FinishReason
    usage: Usage = _NO_USAGE
    timings: Timings = _NO_TIMINGS
    ledger: Ledger = _NO_LEDGER
    epochs: int = 1


StreamEvent = Admitted | PromptInfo | Chunk | ChoiceEnd | End


TextOrTokens = str | tuple[int, ...]
"""A text, or its token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeInput:
    """A plain prompt or a chat to tokenise; exactly one of prompt and messages is not None."""

    model: str = ""
    prompt: str | None = None
    messages: tuple[ChatMessage, ...] | None = None
    tools: tuple[Tool, ...] = ()
    no_special_tokens: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenized:
    """A prompt's tokens. tokens: bytes of each one's text."""

    ids: tuple[int, ...]
    tokens: tuple[bytes, ...]
    max_context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedInput:
    """Texts to make vectors of. no_normalise: vectors keep their own length; else it is 1."""

    inputs: tuple[TextOrTokens, ...]
    model: str = ""
    pooling: Pooling = Pooling.MEAN
    no_normalise: bool = False
    deadline_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Embeddings:
    """A vector for each input, [hidden size] of the model."""

    vectors: tuple[tuple[float, ...], ...]
    usage: Usage = _NO_USAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreInput:
    """Continuations of one prompt whose log-probabilities are asked for."""

    prompt: TextOrTokens
    continuations: tuple[TextOrTokens, ...]
    model: str = ""
    deadline_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuationScore:
    """logprob: sum of its tokens' log-probabilities."""

    logprob: float
    tokens: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """One for each continuation, in order."""

    scores: tuple[ContinuationScore, ...]
    usage: Usage = _NO_USAGE
