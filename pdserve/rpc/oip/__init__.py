"""The Open Inference Protocol, which is not ours: generated code of each version."""
