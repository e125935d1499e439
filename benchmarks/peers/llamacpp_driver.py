"""llama.cpp through llama-cpp-python: `llamacpp_driver.py FILE.gguf`. One request at a time."""

from __future__ import annotations

import os
import sys
from typing import Any

from driver_io import Stopwatch, Times, claim_stdout, serve


def main() -> None:
    """Loads once, then serves runs."""
    pipe = claim_stdout()
    import llama_cpp
    import numpy as np

    threads = len(os.sched_getaffinity(0))
    flags = {"n_ctx": 4096, "n_threads": threads, "n_threads_batch": threads, "n_batch": 512}
    model = llama_cpp.Llama(sys.argv[1], verbose=False, **flags)
    vocabulary = model.n_vocab()

    def greedy() -> int:
        logits = llama_cpp.llama_get_logits_ith(model.ctx, -1)
        return int(np.argmax(np.ctypeslib.as_array(logits, shape=(vocabulary,))))

    def run(prompts: list[list[int]], max_tokens: int) -> Times:
        watch = Stopwatch(len(prompts))
        for index, prompt in enumerate(prompts):
            model.reset()
            model.eval(prompt)
            for left in reversed(range(max_tokens)):
                token = greedy()
                watch.tokens(index, 1)
                if left:
                    model.eval([token])
        return watch.times

    hello: dict[str, Any] = {
        "version": f"llama-cpp-python {llama_cpp.__version__}",
        "threads": threads,
        "flags": flags,
        "system": llama_cpp.llama_print_system_info().decode().strip(),
    }
    serve(pipe, hello, run)


if __name__ == "__main__":
    main()
