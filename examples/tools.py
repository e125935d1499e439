"""A model that calls a function of ours and uses its answer. Usage: python examples/tools.py [HOST:PORT]

The default model's template has no place for tools; for it: PDSERVE_ROUTER_TOOL_FORMAT=hermes make serve
"""

import json
import sys

from pdserve.client import ChatMessage, Client, Tool, ToolCall, ToolChoice, ToolMode

NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
ADD = Tool(
    name="add",
    description="Adds two numbers.",
    parameters=json.dumps(
        {
            "type": "object",
            "properties": {"a": NUMBER, "b": NUMBER},
            "required": ["a", "b"],
            "additionalProperties": False,
        }
    ),
)

USE_IT = ToolChoice(mode=ToolMode.NAMED, name=ADD.name)  # "auto", the default, leaves it to the model


def call(wanted: ToolCall) -> str:
    """Carries out what the model wants called: never more than we offered, and nothing half said."""
    if wanted.name != ADD.name:
        return "There is no such tool."
    try:
        numbers = json.loads(wanted.arguments)
        return str(numbers["a"] + numbers["b"])
    except (ValueError, KeyError, TypeError):  # cut off by max_tokens
        return "These are not two numbers."


def main(address: str) -> None:
    """Asks, calls what the model wants, and asks again with the answers."""
    history = [ChatMessage(role="user", content="What is 2 plus 3?")]
    with Client(address) as client:
        asked = client.generate(messages=history, tools=[ADD], tool_choice=USE_IT, max_tokens=96).result()
        history.append(ChatMessage(role="assistant", content=asked.text, tool_calls=asked.tool_calls))
        for wanted in asked.tool_calls:
            answer = call(wanted)
            print(f"{wanted.name}({wanted.arguments}) = {answer}")
            history.append(ChatMessage(role="tool", content=answer, tool_call_id=wanted.id))
        print(client.generate(messages=history, tools=[ADD], tool_choice="none", max_tokens=24).result().text)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
