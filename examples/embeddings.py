"""Which text is nearest to a question, by vectors and by likelihood.

Usage: python examples/embeddings.py [HOST:PORT]
"""

import sys

from pdserve.client import Client

TEXTS = ("A cat sat on the mat.", "Shares fell by two percent.", "Rain is expected in the north.")
QUESTION = "What will the weather be like?"


def main(address: str) -> None:
    """Prints each text with its cosine to the question, and how likely it is as an answer."""
    with Client(address) as client:
        question, *vectors = client.embed([QUESTION, *TEXTS]).vectors
        scores = client.score(f"{QUESTION}\n", TEXTS).scores
    for text, vector, score in zip(TEXTS, vectors, scores, strict=True):
        cosine = sum(a * b for a, b in zip(question, vector, strict=True))  # vectors have length 1
        print(f"{cosine:.3f}  {score.logprob / len(score.tokens):.2f} per token  {text}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
