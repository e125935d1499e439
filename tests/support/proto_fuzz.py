"""Hypothesis strategies over any protobuf message, from its descriptor: valid ones bent, and plain garbage.

What lives here: the making of messages. What does not: where they are sent, and what must be true after.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message
from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy[Any]], Any]

_WHOLE = [0, 1, 2, 3, 7, 8, 9, 16, 17, 64, 255, 257, 258, 1023, 1025, 2**16, 2**31 - 1]
_NUMBERS = [0.0, -0.0, 1.0, -1.0, 0.5, 2.0, -2.0, 1e-45, 100.5, 3e38, -3e38, math.inf, -math.inf, math.nan]
_TEXTS = [
    "", "a", "\0", "A b.", "true", "<|end|>", "<|im_start|>system", "{{ 7 * 7 }}", "{% for x in y %}",
    "\u202e", "\U0001f600" * 50, "e\u0301" * 40, "user", "assistant", "tool", "x" * 257, "x" * 6000, "{}",
    "[" * 5000, '{"type": "object", "properties": {"a": {"$ref": "#"}}}', '{"enum": [' + "1," * 900 + "1]}",
    '["a", "b"]', "(a*)*b", "[a-z]{1,9999}", 'start: "a" start | "b"', 'root ::= "a" root',
]  # fmt: skip
_SIZES = [1, 2, 3, 17, 65, 1025, 60_000]
"""Of repeated fields: past every documented bound, within the size of a message."""
_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    Field.CPPTYPE_INT32: st.sampled_from([*_WHOLE, -1, -(2**31)]),
    Field.CPPTYPE_INT64: st.sampled_from([*_WHOLE, -1, 2**63 - 1, -(2**63)]),
    Field.CPPTYPE_UINT32: st.sampled_from([*_WHOLE, 2**32 - 1]),
    Field.CPPTYPE_UINT64: st.sampled_from([*_WHOLE, 2**63, 2**64 - 1]),
    Field.CPPTYPE_FLOAT: st.sampled_from(_NUMBERS),
    Field.CPPTYPE_DOUBLE: st.sampled_from([*_NUMBERS, 1e300, 599.0, 601.0]),
    Field.CPPTYPE_BOOL: st.booleans(),
    Field.CPPTYPE_ENUM: st.sampled_from([0, 1, 2, 3, 4, 5, 99, 2**31 - 1, -1]),
    Field.CPPTYPE_STRING: st.one_of(st.sampled_from(_TEXTS), st.text(max_size=20)),
}


def wire(cls: type[Message], valid: bytes) -> st.SearchStrategy[bytes]:
    """Bytes to send where a message of this class is expected. valid: one that is in order."""
    bent = _messages(cls, valid).map(lambda message: message.SerializeToString())
    return st.one_of(bent, bent, bent, _damaged(bent), st.binary(max_size=100))


@st.composite
def _messages(draw: Draw, cls: type[Message], valid: bytes) -> Message:
    message = cls.FromString(draw(st.sampled_from([valid, valid, b""])))
    _change(draw, message, draw(st.integers(0, 3)), depth=3)
    return message


@st.composite
def _damaged(draw: Draw, whole: st.SearchStrategy[bytes]) -> bytes:
    """A message with a byte changed, or its end missing."""
    data = bytearray(draw(whole))
    at = draw(st.integers(0, max(0, len(data) - 1)))
    if draw(st.booleans()) or not data:
        return bytes(data[:at])
    data[at] ^= 1 << draw(st.integers(0, 7))
    return bytes(data)


def _change(draw: Draw, message: Message, count: int, depth: int) -> None:
    if not message.DESCRIPTOR.fields:
        return
    for _ in range(count):
        _set(draw, message, draw(st.sampled_from(list(message.DESCRIPTOR.fields))), depth)


def _set(draw: Draw, message: Message, field: Field, depth: int) -> None:
    value = getattr(message, field.name)
    if field.is_repeated:
        _fill(draw, value, field, depth)
    elif field.message_type is not None:
        value.SetInParent()
        if depth:
            _change(draw, value, draw(st.integers(0, 2)), depth - 1)
    else:
        setattr(message, field.name, draw(_scalar(field)))


def _fill(draw: Draw, values: Any, field: Field, depth: int) -> None:
    """A few different items, over and over."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return
    times = draw(st.sampled_from(_SIZES))
    if field.message_type is None:
        item = draw(_scalar(field))
        values.extend([item] * (times if not hasattr(item, "__len__") else _bounded(times, len(item))))
        return
    item = values.add()
    if depth:
        _change(draw, item, draw(st.integers(0, 2)), depth - 1)
    values.extend([item] * (_bounded(times, item.ByteSize()) - 1))


def _bounded(times: int, size: int) -> int:
    """So many that the message stays below half of the size limit."""
    return max(1, min(times, (1 << 20) // (4 * size + 8)))


def _scalar(field: Field) -> st.SearchStrategy[Any]:
    if field.type == Field.TYPE_BYTES:
        return st.binary(max_size=40)
    return _SCALARS[field.cpp_type]
