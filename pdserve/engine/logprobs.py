"""Log-probabilities of a token and of the likeliest ones at its place, by the model's own distribution.

What lives here: the figures of one row. What does not: which requests ask for them, and their way to clients.
"""

from __future__ import annotations

import numpy as np

from pdserve.engine.sampler import FloatRow, falling
from pdserve.types import TokenLogprob


def token_logprob(row_V: FloatRow, token_id: int, num_top: int) -> TokenLogprob:
    """The token's log-probability and those of the num_top likeliest tokens, lower id first among equals.

    row_V: the model's logits [V], as nothing changed them. Natural logarithms, summed in float64 and rounded
    to float32: what goes by wire, so that it does not matter which worker made the token.
    """
    best = float(row_V.max())
    total = best + float(np.log(np.exp(row_V.astype(np.float64) - best).sum()))

    def rounded(token: int) -> float:
        return float(np.float32(float(row_V[token]) - total))

    top = falling(row_V, num_top)[:num_top].tolist() if num_top else []
    return TokenLogprob(
        token_id=token_id,
        logprob=rounded(token_id),
        top=tuple(TokenLogprob(token_id=token, logprob=rounded(token)) for token in top),
    )
