"""Structured output: grammars that an answer must conform to, compiled under limits, as masks over tokens.

gbnf: GBNF as Lark. vocabulary: a model's tokens as llguidance sees them. compile, compiler: a grammar checked
and compiled, for a model. cache, store: by tenant, made off the event loop. masks: how far each sequence has
come. worker: all of it together.
Nothing here knows tensors, processes or the wire; sequences' state follows from their tokens alone.
"""
