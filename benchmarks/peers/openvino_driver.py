"""OpenVINO GenAI's continuous batching: `openvino_driver.py MODEL_DIR`."""

from __future__ import annotations

import itertools
import os
import sys
from importlib.metadata import version
from typing import Any

from driver_io import Stopwatch, Times, claim_stdout, serve

SCHEDULER = {"cache_size": 2, "max_num_batched_tokens": 2048, "enable_prefix_caching": False}


def main() -> None:
    """Loads once, then serves runs."""
    pipe = claim_stdout()
    import numpy as np
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    for name, value in SCHEDULER.items():
        setattr(scheduler, name, value)
    pipeline = openvino_genai.ContinuousBatchingPipeline(sys.argv[1], scheduler, "CPU")
    names = itertools.count()

    def run(prompts: list[list[int]], max_tokens: int) -> Times:
        config = openvino_genai.GenerationConfig(
            max_new_tokens=max_tokens, min_new_tokens=max_tokens, ignore_eos=True, do_sample=False
        )
        tensors = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        watch = Stopwatch(len(prompts))
        handles = [pipeline.add_request(next(names), tensor, config) for tensor in tensors]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for index, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        watch.tokens(index, len(output.generated_ids))
        return watch.times

    hello: dict[str, Any] = {
        "version": f"openvino-genai {version('openvino-genai')}, openvino {version('openvino')}",
        "threads": len(os.sched_getaffinity(0)),
        "flags": {**SCHEDULER, "device": "CPU"},
    }
    serve(pipe, hello, run)


if __name__ == "__main__":
    main()
