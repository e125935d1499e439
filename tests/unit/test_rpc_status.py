"""Errors to statuses and back; google.rpc's own classes and grpcio-status read what we write."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import BY_LABEL, FieldViolation, InvalidRequest, Overloaded, PdserveError
from pdserve.rpc.status import (
    DETAILS_KEY,
    code_of,
    error_from_label,
    error_from_trailers,
    rich_status,
    trailers_of,
)


class FakeCall:
    """What grpcio-status needs of a failed call."""

    def __init__(self, error: PdserveError) -> None:
        self._error = error

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return trailers_of(self._error)

    def code(self) -> grpc.StatusCode:
        return code_of(self._error)

    def details(self) -> str:
        return self._error.message


@pytest.mark.parametrize("label", sorted(BY_LABEL))
def test_every_error_survives_the_wire(label: str) -> None:
    error = BY_LABEL[label]("do this", violations=(FieldViolation("f", "g"),), retry_after_s=1.5)
    again = error_from_trailers(code_of(error), trailers_of(error))
    assert type(again) is BY_LABEL[label]
    assert (again.message, again.violations, again.retry_after_s) == ("do this", error.violations, 1.5)
    assert type(error_from_label(label, "x")) is BY_LABEL[label]


def test_googles_own_classes_read_our_details() -> None:
    error = InvalidRequest.field("sampling.top_p", "must be at most 1")
    error.retry_after_s = 2.25
    status: Status = rpc_status.from_call(FakeCall(error))  # type: ignore[arg-type]
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert status.message == error.message
    info, bad, retry = (
        error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo(),
    )  # fmt: skip
    unpacked: list[Any] = [info, bad, retry]
    for detail, target in zip(status.details, unpacked, strict=True):
        assert detail.Unpack(target)
    assert (info.reason, info.domain) == ("invalid_request", "pdserve")
    assert [(v.field, v.description) for v in bad.field_violations] == [
        ("sampling.top_p", "must be at most 1")
    ]
    assert retry.retry_delay.ToMilliseconds() == 2250


def test_details_come_only_where_they_apply() -> None:
    names = [detail.type_url.rpartition(".")[2] for detail in rich_status(Overloaded("x")).details]
    assert names == ["ErrorInfo"]


def test_statuses_of_the_transport_get_an_error_of_ours_without_its_words() -> None:
    words = "failed to connect to ipv4:10.1.2.3:50051"
    for code, label in (
        (grpc.StatusCode.UNAVAILABLE, "unavailable"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "deadline_expired"),
        (grpc.StatusCode.CANCELLED, "cancelled"),
        (grpc.StatusCode.UNKNOWN, "internal"),
        (grpc.StatusCode.UNIMPLEMENTED, "unsupported"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "overloaded"),
    ):
        error = error_from_trailers(code, (), words)
        assert error.label == label
        assert "10.1.2.3" not in str(error)
    too_large = error_from_trailers(
        grpc.StatusCode.RESOURCE_EXHAUSTED, (), "Received message larger than max (5 vs. 4)"
    )
    assert too_large.label == "invalid_request"


@given(st.binary(max_size=60))
def test_any_bytes_as_details_leave_a_typed_error(value: bytes) -> None:
    error = error_from_trailers(grpc.StatusCode.UNAVAILABLE, ((DETAILS_KEY, value),))
    assert isinstance(error, PdserveError)


def test_details_of_another_domain_are_not_ours() -> None:
    status = rich_status(Overloaded("x"))
    info = error_details_pb2.ErrorInfo(reason="overloaded", domain="elsewhere")
    status.details[0].value = info.SerializeToString()
    trailers = ((DETAILS_KEY, status.SerializeToString()),)
    assert error_from_trailers(grpc.StatusCode.NOT_FOUND, trailers).label == "unknown_request"
