"""OpenVINO GenAI's continuous batching: `openvino_driver.py MODEL_DIR [SCHEDULER_JSON]`."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any

from driver_io import Stopwatch, Times, claim_stdout, flags_of, serve

SCHEDULER = {"cache_size": 2, "max_num_batched_tokens": 2048, "enable_prefix_caching": False}


class Pipeline:
    """Its pipeline with handles by request."""

    def __init__(self, folder: str, settings: dict[str, Any]) -> None:
        import numpy as np
        import openvino
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        for name, value in settings.items():
            setattr(scheduler, name, value)
        self._genai, self._tensor, self._array = openvino_genai, openvino.Tensor, np.array
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU")
        self._names = itertools.count()
        self._handles: dict[int, Any] = {}

    def add(self, request: int, prompt: Sequence[int], max_tokens: int) -> None:
        """See Batching."""
        config = self._genai.GenerationConfig(
            max_new_tokens=max_tokens, min_new_tokens=max_tokens, ignore_eos=True, do_sample=False
        )
        tensor = self._tensor(self._array([prompt], dtype="int64"))
        self._handles[request] = self._pipeline.add_request(next(self._names), tensor, config)

    def busy(self) -> bool:
        """See Batching."""
        if self._pipeline.has_non_finished_requests():
            return True
        self._handles.clear()
        return False

    def step(self) -> Iterator[tuple[int, int]]:
        """See Batching."""
        self._pipeline.step()
        for request, handle in self._handles.items():
            while handle.can_read():
                for output in handle.read().values():
                    yield request, len(output.generated_ids)

    def abort(self) -> None:
        """See Batching."""
        for handle in self._handles.values():
            handle.cancel()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        self._handles.clear()


def main() -> None:
    """Loads once, then serves runs."""
    pipe = claim_stdout()
    settings = flags_of(SCHEDULER)
    pipeline = Pipeline(sys.argv[1], settings)

    def run(prompts: list[list[int]], max_tokens: int) -> Times:
        watch = Stopwatch(len(prompts))
        for index, prompt in enumerate(prompts):
            pipeline.add(index, prompt, max_tokens)
        while pipeline.busy():
            for index, count in pipeline.step():
                watch.tokens(index, count)
        return watch.times

    hello: dict[str, Any] = {
        "version": f"openvino-genai {version('openvino-genai')}, openvino {version('openvino')}",
        "threads": len(os.sched_getaffinity(0)),
        "flags": {**settings, "device": "CPU"},
    }
    serve(pipe, hello, run, pipeline)


if __name__ == "__main__":
    main()
