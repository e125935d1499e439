"""The engines we measure ourselves against, each in its own venv under `benchmarks/.peers` (git-ignored).

What lives here: their installation, the model in their formats, child processes and the drivers these run.
A driver (`*_driver.py`) runs with its peer's interpreter and imports nothing of ours but `driver_io`.
"""
