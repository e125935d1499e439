"""What Ctrl-C, SIGTERM and a closed terminal mean at each stage of a service's life."""

from __future__ import annotations

import signal
import threading
from enum import Enum, auto
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Stage(Enum):
    STARTING = auto()
    SERVING = auto()
    DRAINING = auto()
    ENDING = auto()


class StopSignals:
    """While starting or draining a signal raises KeyboardInterrupt, once; while serving it sets `requested`.

    Once the end has begun, signals are ignored: cleaning up is bounded in time and must not be cut short.
    Made and used in the main thread; the handlers of before are put back at the end of the block.
    """

    def __init__(self) -> None:
        self.requested = threading.Event()
        self._stage = _Stage.STARTING
        self._before: dict[signal.Signals, object] = {}

    def serving(self) -> None:
        """From now on a signal asks for a drain."""
        self._stage = _Stage.SERVING

    def draining(self) -> None:
        """From now on a signal cuts the drain short."""
        self._stage = _Stage.DRAINING

    def ending(self) -> None:
        """From now on signals have no effect."""
        self._stage = _Stage.ENDING

    def __enter__(self) -> StopSignals:
        for number in SIGNALS:
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup: we are to outlive the terminal
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal gave us

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._stage is _Stage.SERVING:
            self.requested.set()
        elif self._stage is not _Stage.ENDING:
            self._stage = _Stage.ENDING
            raise KeyboardInterrupt
