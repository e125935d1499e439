"""A real Prometheus over a real router's `/targets`, with the configuration that people deploy.

Only what a test has to choose is changed: the router's address and how often it looks. What does not live
here: what is asked of it, and what is expected.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from pdserve.cli.prometheus import Prometheus, Series
from tests.support.source_tree import ROOT
from tests.support.tools import tool

DEPLOYED = ROOT / "deploy" / "prometheus"
LIMIT_S = 60.0


class Scraped(Prometheus):
    """A running Prometheus and what tests ask of it."""

    def until(self, promql: str, wanted: Callable[[list[Series]], bool]) -> list[Series]:
        """Asks until the answer is as wanted: Prometheus looks at its targets once a second."""
        end = time.monotonic() + LIMIT_S
        while not wanted(found := self.query(promql)):
            assert time.monotonic() < end, f"{promql}: {found}"
        return found

    def until_all_up(self, instances: int) -> None:
        """Returns when it has scraped so many processes since now."""
        now = time.time()
        self.until(f"count((timestamp(up) and up == 1) > {now})", lambda found: values(found) == [instances])


def values(found: list[Series]) -> list[float]:
    """The newest value of each series."""
    return [each.points[-1][1] for each in found]


@contextmanager
def prometheus(directory: Path, targets: str, scrape_s: float = 1.0) -> Iterator[Scraped]:
    """targets: the URL of a router's list. directory: empty, for its files."""
    configuration = _configured(directory, targets, scrape_s)
    command = [tool("prometheus"), "--config.file", str(configuration)]
    command += ["--storage.tsdb.path", str(directory / "data"), "--web.listen-address", "127.0.0.1:0"]
    log = directory / "log"
    with log.open("w") as sink:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=sink)
    try:
        yield Scraped(f"http://{_address(process, log)}")
    finally:
        process.terminate()
        process.wait()


def _configured(directory: Path, targets: str, scrape_s: float) -> Path:
    """The deployed files, looking elsewhere and more often."""
    copied = directory / "etc"
    shutil.copytree(DEPLOYED, copied)
    file = copied / "prometheus.yml"
    settings = yaml.safe_load(file.read_text())
    often = f"{round(scrape_s * 1000)}ms"
    settings["global"] |= {"scrape_interval": often, "evaluation_interval": often}
    settings["global"].pop("scrape_timeout", None)
    (job,) = settings["scrape_configs"]
    job["http_sd_configs"] = [
        {**one, "url": targets, "refresh_interval": "1s"} for one in job["http_sd_configs"]
    ]
    file.write_text(yaml.safe_dump(settings))
    return file


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Where it listens, once it is ready for requests."""
    end = time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < end:
        text = log.read_text()
        found = re.search(r'msg="Listening on" address=(\S+)', text)
        if found and "ready to receive web requests" in text:
            return found[1]
    raise AssertionError(log.read_text())
