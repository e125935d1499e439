#!/usr/bin/env bash
# The Triton kernels on a GPU: checked against plain forms on fresh random data, then timed against the machine's
# own copy bandwidth and bfloat16 matrix rate. Needs torch (2.11 or later, with CUDA) and triton (3.6 or later)
# and nothing else; ends within 10 minutes.
# usage: benchmarks/gpu/run.sh [--out FOLDER] [--seed N] [--interpret]
#   --interpret   tiny shapes in Triton's interpreter, without a GPU: shows that the script runs, times nothing
# PYTHON names the interpreter (python3).
set -euo pipefail
cd "$(dirname "$0")/../.."
for argument in "$@"; do
  if [ "$argument" = --interpret ]; then export TRITON_INTERPRET=1; fi
done
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec timeout 570 "${PYTHON:-python3}" -m benchmarks.gpu.kernels "$@"
