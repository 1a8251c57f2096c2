#!/usr/bin/env bash
# Runs the whole test suite. Arguments go to pytest; a path selects as pytest's would.
#
#   bash scripts/test.sh
#   bash scripts/test.sh tests/runtime -k symmetric
#   bash scripts/test.sh --gpu                     the tests that need NVIDIA GPUs, and only those
#   TRITON_VERSION=3.6.0 bash scripts/test.sh      in an environment of its own, .venv-triton-dist-triton-3.6.0
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
    # Workers, too, have ranks that wait for one another on the same GPUs: these take turns.
    exec "$PYTHON" -m pytest -m "gpu and not stress" -n 5 --dist loadfile --no-loadscope-reorder \
        --durations=25 "${@:-tests}"
fi

# Where ranks connect, torch looks up the names of addresses. A name server that does not answer would
# cost each start of ranks five seconds.
export RES_OPTIONS="${RES_OPTIONS:-timeout:1 attempts:1}"

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

# Hundreds of short processes import the package: each would compile it anew.
unset PYTHONDONTWRITEBYTECODE

status=0
# Two workers. A file's tests stay together, and files come in the order of tests/conftest.py. Long
# runs are left out, unless an -m of the caller's, which comes later, asks for them.
run=("$PYTHON" -m pytest -m "not chaos and not stress" -n 2 --dist loadfile --no-loadscope-reorder)
# note STATUS: a selection (-k, -m) may leave nothing in one of the two processes.
note() {
    if (($1 != 0 && !($1 == 5 && ${#options[@]} > 0))); then status=$1; fi
}
report="" beside=""
finish() {
    if [[ -n $beside ]]; then kill "$beside" 2>/dev/null; fi
    rm -f "$report"
}
# In a subshell, which pytest replaces: so it can be ended by the number of the subshell.
compile_only() {
    unset TRITON_INTERPRET
    exec nice -n 5 "${run[@]}" -o cache_dir=.pytest_cache/compile "${compiled[@]}" "${options[@]}"
}
interpret() {
    TRITON_INTERPRET=1 TRITON_DIST_DEVICE=cpu OMP_NUM_THREADS=1 \
        "${run[@]}" "${interpreted[@]}" "${options[@]}"
}
if ((${#interpreted[@]} == 0)); then
    (compile_only)
    note $?
elif ((${#compiled[@]} == 0)); then
    interpret
    note $?
else
    # Ranks that wait for one another leave the cores idle now and then: compiling goes on beside
    # them, and after them on both cores. What it says comes in one piece, at the end, and what failed
    # last is remembered apart.
    report=$(mktemp)
    trap finish EXIT
    compile_only >"$report" 2>&1 &
    beside=$!
    interpret
    note $?
    say "tests/compile, in a process of its own:"
    wait "$beside"
    note $?
    beside=""
    cat "$report"
fi
exit $status
