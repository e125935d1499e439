"""The gRPC edge: generated code (`v1`), conversion to our own types, statuses, servers and channels.

Nothing here decides anything; no torch and no ray.
"""
