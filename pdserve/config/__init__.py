"""Settings: declared once per component (`fields`), read from file, environment and flags (`resolve`)."""

from pdserve.config.resolve import Resolved as Resolved
from pdserve.config.resolve import resolve as resolve
from pdserve.config.serve import ServeConfig as ServeConfig
from pdserve.config.worker import WorkerConfig as WorkerConfig
