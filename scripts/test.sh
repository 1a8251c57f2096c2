#!/usr/bin/env bash
# Run the test suite. Arguments are passed to pytest; paths select tests.
#
#   bash scripts/test.sh
#   bash scripts/test.sh tests/runtime -k symmetric
#   bash scripts/test.sh --gpu                     only the tests that require NVIDIA GPUs
#   TRITON_VERSION=3.6.0 bash scripts/test.sh      use a separate environment, .venv-triton-dist-triton-3.6.0
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
    # Ranks of several workers wait for each other on the same GPUs, which the driver time-slices, while
    # other workers compile. Files with many tests come first.
    workers=$(($(nproc) / 3))
    workers=$((workers < 5 ? 5 : workers > 12 ? 12 : workers))
    exec "$PYTHON" -m pytest -m "gpu and not stress" -n $workers --dist loadfile --durations=25 "${@:-tests}"
fi

# torch resolves the host names of addresses when ranks connect. An unreachable name server would delay
# each start of ranks by 5 s.
export RES_OPTIONS="${RES_OPTIONS:-timeout:1 attempts:1}"

# Triton decides between interpreting and compiling when a kernel is decorated, so tests/compile runs in
# a separate process.
interpreted=() compiled=() options=()
for argument in "$@"; do
    case $argument in
        -*) options+=("$argument") ;;
        tests/compile | tests/compile/*) compiled+=("$argument") ;;
        *) if [[ -e ${argument%%::*} ]]; then interpreted+=("$argument"); else options+=("$argument"); fi ;;
    esac
done
if ((${#interpreted[@]} + ${#compiled[@]} == 0)); then
    interpreted=(tests --ignore=tests/compile --ignore=tests/gpu) compiled=(tests/compile)
    say "not running tests/gpu, which needs GPUs and no TRITON_INTERPRET: bash scripts/test.sh --gpu"
fi

# Hundreds of short processes import the package; without bytecode files each would compile it again.
unset PYTHONDONTWRITEBYTECODE

status=0
# Two workers. Tests of a file run on one worker, in the order of tests/conftest.py. Long tests are
# excluded unless the caller passes -m, which overrides this option.
run=("$PYTHON" -m pytest -m "not chaos and not stress" -n 2 --dist loadfile --no-loadscope-reorder)
# record_status STATUS: record a failure. Status 5 (no tests) is accepted with a selection (-k, -m).
record_status() {
    if (($1 != 0 && !($1 == 5 && ${#options[@]} > 0))); then status=$1; fi
}
report="" compile_pid=""
finish() {
    if [[ -n $compile_pid ]]; then kill "$compile_pid" 2>/dev/null; fi
    rm -f "$report"
}
# exec replaces the subshell by pytest, so that killing the subshell's process id kills pytest.
compile_only() {
    unset TRITON_INTERPRET
    exec nice -n 10 "${run[@]}" "$@" -o cache_dir=.pytest_cache/compile "${compiled[@]}" "${options[@]}"
}
interpret() {
    TRITON_INTERPRET=1 TRITON_DIST_DEVICE=cpu OMP_NUM_THREADS=1 \
        "${run[@]}" "${interpreted[@]}" "${options[@]}"
}
if ((${#interpreted[@]} == 0)); then
    (compile_only)
    record_status $?
elif ((${#compiled[@]} == 0)); then
    interpret
    record_status $?
else
    # Waiting ranks leave cores idle, so the compile tests run concurrently. Their output is printed at
    # the end, and their last failures have a separate pytest cache. They need one process: workers
    # would import and collect twice.
    report=$(mktemp)
    trap finish EXIT
    compile_only -n 0 >"$report" 2>&1 &
    compile_pid=$!
    interpret
    record_status $?
    say "tests/compile, in a separate process:"
    wait "$compile_pid"
    record_status $?
    compile_pid=""
    cat "$report"
fi
exit $status
