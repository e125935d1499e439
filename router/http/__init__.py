"""The HTTP edge of a router: OpenAI's, Anthropic's and vLLM's routes over the same hub as gRPC.

What lives here: bodies to `pdserve.api` values, events to JSON and server-sent events, the listener. What
does not: validation of values, limits, queues, generation (all behind `router.hub`). Needs the extra `http`.
"""
