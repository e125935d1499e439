"""A router that wants API keys with two real workers of a tiny model of bytes, all processes of their own.

For tests of the edge: access, tenants, limits, garbage. What is expected lies with the tests.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import grpc

from pdserve.rpc.fleet_auth import METADATA_KEY, fleet_token
from pdserve.rpc.v1 import inference_pb2_grpc
from pdserve.types import Role
from router.auth.keys import format_keys, make_key
from tests.support import tiny_models
from tests.support.byte_model import END_ID, VOCAB, byte_bundle
from tests.support.grpc_methods import Metadata
from tests.support.stack import Stack

CONTEXT = 512
TENANTS = {"admin": "ops", "shop": "shop", "bank": "bank"}


def bearer(key: str) -> Metadata:
    """As OpenAI's clients send it."""
    return (("authorization", f"Bearer {key}"),)


def byte_llama(directory: Path) -> Path:
    """A tiny llama whose tokens are the bytes of a text, with a chat template."""
    model = tiny_models.llama(vocab_size=VOCAB, bos_token_id=None, eos_token_id=END_ID)
    model.save_pretrained(directory)
    bundle = byte_bundle()
    (directory / "tokenizer.json").write_bytes(bundle.tokenizer_json)
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": bundle.chat_template}))
    return directory


@dataclass
class Edge:
    """keys: of an admin and two tenants, by name. fleet: what our own processes send."""

    stack: Stack
    keys: dict[str, str]
    key_file: Path
    log: Path

    @classmethod
    def start(cls, directory: Path, *flags: str) -> Edge:
        """flags: more of the router's."""
        made = {
            name: make_key(tenant, admin=name == "admin", note="", lives_s=None, now=time.time())
            for name, tenant in TENANTS.items()
        }
        key_file = directory / "keys"
        key_file.touch(mode=0o600)
        key_file.write_bytes(format_keys(entry for _, entry in made.values()))
        (directory / "model").mkdir()
        stack = Stack.start(
            {Role.PREFILL: 1, Role.DECODE: 1},
            router_flags=("--api-key-file", str(key_file), "--protocols", "oip,vllm", *flags),
            router_log=directory / "log",
            model=str(byte_llama(directory / "model")),
        )
        return cls(stack, {name: key for name, (key, _) in made.items()}, key_file, directory / "log")

    @property
    def fleet(self) -> Metadata:
        return ((METADATA_KEY, fleet_token(bytes.fromhex(self.stack.secret))),)

    def of(self, name: str) -> Metadata:
        """The credential of one of the keys."""
        return bearer(self.keys[name])

    def channel(self) -> grpc.Channel:
        return grpc.insecure_channel(self.stack.address)


def stub_on(channel: grpc.Channel) -> inference_pb2_grpc.InferenceServiceStub:
    """What clients call."""
    return inference_pb2_grpc.InferenceServiceStub(channel)
