"""The SDK: `AsyncClient` and `Client`, streams of chunks, typed errors. Needs grpcio and protobuf only.

    with Client() as client:
        for chunk in client.generate("Once upon a time", max_tokens=64):
            print(chunk.text, end="", flush=True)

gRPC is loaded with the first client, so that importing this costs nothing.
"""

from pdserve.api import (
    ChatMessage,
    Chunk,
    ExpertReport,
    Explanation,
    FleetStatus,
    ModelInfo,
    PromptInfo,
    RebalanceAnswer,
    Timings,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolChoice,
    ToolMode,
    WorkerStatus,
)
from pdserve.client.aio import AsyncClient, AsyncStream
from pdserve.client.blocking import Client, Stream
from pdserve.client.connect import TlsOptions
from pdserve.client.request import GenerateOptions
from pdserve.client.result import Choice, Result
from pdserve.messages import Outcome
from pdserve.types import FinishReason, Grammar, GrammarKind, Ledger, TokenLogprob, Usage

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "ChatMessage",
    "Choice",
    "Chunk",
    "Client",
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
    "PromptInfo",
    "RebalanceAnswer",
    "Result",
    "Stream",
    "Timings",
    "TlsOptions",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolChoice",
    "ToolMode",
    "Usage",
    "WorkerStatus",
]
