#!/usr/bin/env bash
# Makes .venv with what `pdserve` needs, pinned: to serve, or also to test and develop (EXTRAS: dev).
# Called by make; safe to run again at any time. usage: scripts/install.sh STAMP EXTRAS [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/install_steps.sh
. scripts/install_steps.sh

stamp="$1" extras="$2" asked="${3:-}" venv=.venv

has_python() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; }

# A name on the path may be a shim that runs nothing: only what answers counts.
python="${asked:-python3}"
for candidate in "$venv/bin/python" ${asked:-python3 python3.12 python3.11}; do
  if has_python "$candidate"; then
    python="$candidate"
    break
  fi
done
command -v "$python" >/dev/null || { echo "pdserve needs Python 3.11 or 3.12, and $python is not there." >&2; exit 1; }
"$python" scripts/check_platform.py

if [ "$python" != "$venv/bin/python" ]; then
  step "making $venv with $("$python" --version)"
  "$python" -m venv --clear "$venv"
fi
python="$venv/bin/python"

install_torch cpu
install_pdserve "$extras" --editable
install_default_model

touch "$stamp"
step "done"
