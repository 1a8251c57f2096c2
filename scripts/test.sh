#!/usr/bin/env bash
# Runs the whole test suite. Arguments go to pytest; a path selects as pytest's would.
#
#   bash scripts/test.sh
#   bash scripts/test.sh tests/runtime -k symmetric
#   bash scripts/test.sh --gpu                     the tests that need NVIDIA GPUs, and only those
#   TRITON_VERSION=3.6.0 bash scripts/test.sh      in an environment of its own, .venv-triton-3.6.0
set -uo pipefail

. "$(dirname -- "${BASH_SOURCE[0]}")/setup_env.sh"

cd "$ROOT" || exit 1
detect_gpus
gpu=0 device=cpu
if [[ ${1:-} == --gpu ]]; then
    gpu=1
    shift
    if ((GPU_COUNT > 0)); then device=cuda; fi
fi
use_python $device test
say "using $PYTHON"
"$PYTHON" -c '
import importlib.metadata as installed, platform
print("Python", platform.python_version(), *(f"{name} {installed.version(name)}" for name in ("torch", "triton", "numpy")))
' || exit 1

if ((gpu)); then
    unset TRITON_INTERPRET
    exec "$PYTHON" -m pytest -m gpu "${@:-tests}"
fi

# Triton decides between interpreting and compiling when a kernel is decorated, so tests/compile has a
# process of its own.
interpreted=() compiled=() options=()
for argument in "$@"; do
    case $argument in
        -*) options+=("$argument") ;;
        tests/compile | tests/compile/*) compiled+=("$argument") ;;
        *) if [[ -e ${argument%%::*} ]]; then interpreted+=("$argument"); else options+=("$argument"); fi ;;
    esac
done
if ((${#interpreted[@]} + ${#compiled[@]} == 0)); then
    interpreted=(tests --ignore=tests/compile) compiled=(tests/compile)
fi

status=0
# Two workers. A file's tests stay together, and files come in the order of tests/conftest.py.
workers=(-n 2 --dist loadfile --no-loadscope-reorder)
# run_pytest ARGUMENTS: a selection (-k, -m) may leave nothing in one of the two processes.
# Long runs are left out, unless an -m of the caller's, which comes later, asks for them.
run_pytest() {
    "$PYTHON" -m pytest -m "not chaos and not stress" "${workers[@]}" "$@" "${options[@]}"
    local code=$?
    if ((code == 5 && ${#options[@]} > 0)); then code=0; fi
    if ((code != 0)); then status=$code; fi
}
if ((${#interpreted[@]} > 0)); then
    TRITON_INTERPRET=1 TRITON_DIST_DEVICE=cpu OMP_NUM_THREADS=1 run_pytest "${interpreted[@]}"
fi
if ((${#compiled[@]} > 0)); then
    unset TRITON_INTERPRET
    run_pytest "${compiled[@]}"
fi
exit $status
