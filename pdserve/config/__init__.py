"""Settings: declared once per component (`fields`), read from file, environment and flags (`resolve`)."""

from pdserve.config.worker import WorkerConfig as WorkerConfig
