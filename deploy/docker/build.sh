#!/usr/bin/env bash
# What happens inside the build stage of the image: a virtual environment that needs nothing from here any more.
# The steps are those of `make install`. Run in the repository's root.
# usage: deploy/docker/build.sh torch PREFIX VARIANT              VARIANT: cpu or cuda
#        deploy/docker/build.sh pdserve PREFIX EXTRAS MODEL       MODEL: 1 brings the default model along, 0 none
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=scripts/install_steps.sh
. scripts/install_steps.sh

part="$1" prefix="$2"
python="$prefix/bin/python"

case "$part" in
  torch)
    [ -x "$python" ] || python3 -m venv "$prefix"
    case "$3" in cpu | cuda) install_torch "$3" ;; *) echo "VARIANT: must be cpu or cuda" >&2; exit 2 ;; esac
    ;;
  pdserve)
    install_pdserve "$3"
    case "$4" in 0) ;; 1) install_default_model ;; *) echo "MODEL: must be 0 or 1" >&2; exit 2 ;; esac
    step "our C++, for every kind of CPU it is tuned to: the image needs no compiler"
    # -P: the copy that was installed, not the sources here.
    "$python" -P -m pdserve.kernels.prebuilt
    ;;
  *) echo "first argument: torch or pdserve" >&2; exit 2 ;;
esac
step "done"
