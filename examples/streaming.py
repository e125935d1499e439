"""Tokens as they are made, with asyncio. Usage: python examples/streaming.py [HOST:PORT]"""

import asyncio
import sys

from pdserve.client import AsyncClient


async def main(address: str) -> None:
    """Prints an answer while it is made, then how it ended."""
    async with (
        AsyncClient(address) as client,
        client.generate("Once upon a time", max_tokens=24, temperature=0.7, seed=1) as stream,
    ):
        async for chunk in stream:
            print(chunk.text, end="", flush=True)
        result = await stream.result()
    print(f"\n[{result.finish_reason}, {result.usage.completion_tokens} tokens]")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"))
