"""Whether a reader's hello is good: the same answer on every transport, before a byte of the pool is shown.

What lives here: that check, the reader's check of the answer, and what a reader knows of the pages. What does
not: sockets.
"""

from __future__ import annotations

from kvtransfer.digest import page_header
from kvtransfer.transport import PageSource, ReaderConfig, ReadRequest
from kvtransfer.wire import Code, Frame, Hello, Kind, Welcome, WireError, pack

REFUSALS = {
    Code.BAD_TICKET: "bad ticket",
    Code.WRONG_POOL: "wrong pool",
    Code.WRONG_LAYOUT: "wrong layout",
    Code.NO_SUCH_PAGE: "no such page",
}


class Refused(Exception):
    """The source does not take this hello; the text is one of REFUSALS."""


def judge(hello: Hello, source: PageSource) -> tuple[Code, bytes]:
    """The verdict on a hello and the frame that says it; Code.NONE is a welcome."""
    facts = source.facts
    if not source.authorise(hello.ticket, hello.key):
        code = Code.BAD_TICKET
    elif hello.pool_id != facts.pool_id:
        code = Code.WRONG_POOL
    elif hello.layout != facts.layout:
        code = Code.WRONG_LAYOUT
    else:
        welcome = Welcome(pool_id=facts.pool_id, num_pages=facts.num_pages, page_bytes=facts.page_bytes)
        return Code.NONE, welcome.pack()
    return code, pack(Kind.REFUSED, code=code)


def introduce(config: ReaderConfig, request: ReadRequest) -> bytes:
    """The hello that goes with the first read."""
    hello = Hello(pool_id=config.pool_id, layout=config.layout, key=request.key, ticket=request.ticket)
    return hello.pack()


def accept(frame: Frame, config: ReaderConfig) -> Welcome:
    """The welcome in a source's answer. Raises Refused, or WireError if it is of another pool."""
    if frame.kind is Kind.REFUSED:
        raise Refused(refusal(frame.code))
    welcome = Welcome.unpack(frame.body)
    if (welcome.pool_id, welcome.page_bytes) != (config.pool_id, config.page_bytes):
        raise WireError("a welcome to another pool")
    return welcome


def digest_header(config: ReaderConfig) -> bytes:
    """The header under which this peer's pages are digested."""
    return page_header(
        layout=config.layout,
        layer_first=config.layer_first,
        layer_last=config.layer_last,
        shard=config.shard,
    )


def refusal(code: int) -> str:
    """The words for a code from the wire."""
    return next((words for known, words in REFUSALS.items() if known == code), "refused")
