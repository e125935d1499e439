"""The SDK: `AsyncClient` and `Client`, streams of chunks, typed errors. Needs grpcio and protobuf only.

    with Client() as client:
        for chunk in client.generate("Once upon a time", max_tokens=64):
            print(chunk.text, end="", flush=True)

gRPC is loaded with the first client, so that importing this costs nothing.
"""

from pdserve.api import (
    ChatMessage,
    Chunk,
    ContinuationScore,
    Embeddings,
    ExpertReport,
    Explanation,
    FleetStatus,
    ModelInfo,
    Pooling,
    PromptInfo,
    RebalanceAnswer,
    Scores,
    Timings,
    Tokenized,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolChoice,
    ToolMode,
    WorkerStatus,
)
from pdserve.client.aio import AsyncClient
from pdserve.client.aio_stream import AsyncStream
from pdserve.client.blocking import Client
from pdserve.client.connect import ClientOptions, TlsOptions
from pdserve.client.many import Answer, Progress
from pdserve.client.request import GenerateOptions
from pdserve.client.result import Choice, Result
from pdserve.client.retry import Retry
from pdserve.client.stream import Stream
from pdserve.messages import Outcome
from pdserve.types import FinishReason, Grammar, GrammarKind, Ledger, TokenLogprob, Usage

__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncStream",
    "ChatMessage",
    "Choice",
    "Chunk",
    "Client",
    "ClientOptions",
    "ContinuationScore",
    "Embeddings",
    "ExpertReport",
    "Explanation",
    "FinishReason",
    "FleetStatus",
    "GenerateOptions",
    "Grammar",
    "GrammarKind",
    "Ledger",
    "ModelInfo",
    "Outcome",
    "Pooling",
    "Progress",
    "PromptInfo",
    "RebalanceAnswer",
    "Result",
    "Retry",
    "Scores",
    "Stream",
    "Timings",
    "TlsOptions",
    "TokenLogprob",
    "Tokenized",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolChoice",
    "ToolMode",
    "Usage",
    "WorkerStatus",
]
