"""Answers of a given form: JSON by a schema, one of several texts, a regular expression.

Usage: python examples/structured_output.py [HOST:PORT]
"""

import json
import sys
from typing import Any

from pdserve.client import Client

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def main(address: str) -> None:
    """Prints three answers; each has the form that was asked for, whatever the model would rather say."""
    with Client(address) as client:
        text = client.generate("A person as JSON:", json_schema=PERSON, max_tokens=48).result().text
        print(json.loads(text))
        question = "Is the sky green? Answer:"
        print(client.generate(question, choice=["yes", "no"], max_tokens=8).result().text)
        print(client.generate("Call me at ", regex=r"[0-9]{3}-[0-9]{4}", max_tokens=12).result().text)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
