"""What the image's definition must keep to: no rights, nothing writable, nothing unpinned, nothing secret."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.support.source_tree import ROOT

FOLDER = ROOT / "deploy" / "docker"
TEXT = (FOLDER / "Dockerfile").read_text()
LINES = re.sub(r"\\\n\s*", " ", TEXT).splitlines()


def instructions(name: str, stage: str = "") -> list[str]:
    """Arguments of every instruction of one name, in one stage or in all."""
    found, current = [], ""
    for line in LINES:
        word, _, rest = line.partition(" ")
        if word == "FROM":
            current = rest.split(" AS ")[-1]
        if word == name and stage in ("", current):
            found.append(rest.strip())
    return found


def test_the_linter_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run(
        [hadolint, "--failure-threshold", "style", FOLDER / "Dockerfile"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_it_runs_without_rights_and_ends_by_a_signal_we_drain_at() -> None:
    assert instructions("USER") == ["10001:10001"], "by number: Kubernetes checks runAsNonRoot by it"
    assert instructions("ENTRYPOINT") == ['["pdserve"]'], "no shell between the signal and us"
    assert instructions("STOPSIGNAL") == ["SIGTERM"]
    assert instructions("CMD") == []


def test_what_is_shipped_has_no_compiler_and_no_installer_of_ours() -> None:
    shipped = " ".join(instructions("RUN", "serve"))
    assert not re.search(r"g\+\+|gcc|clang|build-essential|\bpip\b", shipped)
    assert instructions("COPY", "serve") == ["--from=build /opt/pdserve /opt/pdserve"]
    assert "chmod" not in shipped, "the code is root's, and nobody else can change it"
    assert "chown" not in TEXT


def test_it_writes_where_the_manifests_have_room_alone() -> None:
    (environ,) = instructions("ENV", "serve")
    values = dict(pair.split("=", 1) for pair in environ.split())
    assert values["HOME"] == "/tmp"
    assert values["XDG_CACHE_HOME"].startswith("/tmp/")
    assert values["PYTHONDONTWRITEBYTECODE"] == "1"
    assert instructions("WORKDIR", "serve") == ["/opt/pdserve"], "Ray looks for modules there"


def test_the_base_is_named_to_the_last_digit_and_python_is_one_we_support() -> None:
    (base,) = [line for line in instructions("ARG") if line.startswith("PYTHON_IMAGE=")]
    found = re.fullmatch(r"PYTHON_IMAGE=python:(3\.1[12])\.\d+-slim-[a-z]+", base)
    assert found, base
    assert instructions("FROM") == ["${PYTHON_IMAGE} AS build", "${PYTHON_IMAGE} AS serve"]
    assert instructions("ADD") == [], "nothing is fetched by an address"
    assert not re.search(r"curl|wget .*http|git clone", " ".join(instructions("RUN")))


def test_everything_that_is_copied_is_let_through_and_is_there() -> None:
    let_through = {
        line[1:]
        for line in (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = {source for line in instructions("COPY", "build") for source in line.split()[:-1]}
    assert copied == let_through
    assert [path for path in copied if not (ROOT / path).exists()] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    assert packages <= copied


def test_its_extras_exist_and_torch_is_pinned_by_the_same_file_as_ours() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = [line for line in instructions("ARG") if line.startswith("EXTRAS=")]
    asked = extras.removeprefix("EXTRAS=").split(",")
    assert set(asked) <= set(project["optional-dependencies"])
    assert set(asked) >= {"worker", "http", "jwt", "tls", "otel", "cluster"}
    for script in (FOLDER / "build.sh", ROOT / "scripts" / "install.sh"):
        text = script.read_text()
        assert ". scripts/install_steps.sh" in text
        assert "pip install" not in text, "the steps are the shared ones"


def test_versions_and_labels_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"-t pdserve:{project['version']} " in TEXT
    labels = " ".join(instructions("LABEL"))
    assert project["license"] in labels
    assert f'title="{project["name"]}"' in labels


def test_no_secret_comes_in_by_an_argument_or_variable() -> None:
    names = " ".join([*instructions("ARG"), *instructions("ENV")])
    assert not re.search(r"secret|token|password|api_key", names, re.IGNORECASE)
