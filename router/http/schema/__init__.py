"""Bodies of requests as pydantic models: which fields there are, their types, and how they become our input.

A field that is not here is refused by name. Of fields that we do not have, those are here whose value may say
"off". What does not live here: limits on values; the hub checks those for HTTP as for gRPC.
"""
