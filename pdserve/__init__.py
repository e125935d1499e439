"""pdserve: language-model serving with prefill and decode on separate workers. See docs/architecture.md."""

__version__ = "0.1.0"
