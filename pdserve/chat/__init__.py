"""Chats beyond plain text: tools, tool calls and reasoning, in the formats that models' chat templates teach.

Pure: no torch, no gRPC. Not here: rendering a template (`pdserve.tokenizer`), streams and stops (`router`).
"""
