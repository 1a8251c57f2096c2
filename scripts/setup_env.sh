# Sourced by the other scripts. Detects the device of this host, and finds or installs a Python that can
# run the package. Messages go to standard error; nothing is written to standard output.

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)

DEFAULT_TRITON=3.7.1

say() { echo "$(basename -- "$0"): $*" >&2; }

die() {
    say "$*"
    exit 2
}

# detect_gpus: sets GPU_COUNT, the number of usable GPUs; HOST_HAS_GPU; and GPU_REASON, for messages.
detect_gpus() {
    GPU_COUNT=0 HOST_HAS_GPU=0
    local listed
    if ! command -v nvidia-smi >/dev/null; then
        GPU_REASON="there is no nvidia-smi on PATH"
        return
    fi
    if ! listed=$(nvidia-smi --list-gpus 2>&1); then
        GPU_REASON="nvidia-smi fails: ${listed%%$'\n'*}"
        return
    fi
    GPU_COUNT=$(grep -c '^GPU ' <<<"$listed") || true # grep fails if the count is 0
    GPU_REASON="nvidia-smi lists $GPU_COUNT GPU(s)"
    if ((GPU_COUNT > 0)); then HOST_HAS_GPU=1; fi
    if [[ $HOST_HAS_GPU == 1 && -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
        local -a visible
        IFS=, read -ra visible <<<"$CUDA_VISIBLE_DEVICES"
        GPU_COUNT=${#visible[@]}
        if [[ ${visible[0]:-} == -1 ]]; then GPU_COUNT=0; fi
        GPU_REASON="CUDA_VISIBLE_DEVICES='$CUDA_VISIBLE_DEVICES'"
    fi
}

# choose_device: sets DEVICE (cuda, cpu) and DEVICE_REASON. docs/how-to/cpu-ranks.md, section "Which
# kernels are interpreted", has the rule.
choose_device() {
    detect_gpus
    local asked=${TRITON_DIST_DEVICE:-auto}
    DEVICE=cpu DEVICE_REASON=$GPU_REASON
    case $asked in
        cpu) DEVICE_REASON="TRITON_DIST_DEVICE=cpu" ;;
        auto | cuda)
            if [[ $asked == auto ]] && asks_to_interpret; then
                DEVICE_REASON="TRITON_INTERPRET=$TRITON_INTERPRET"
            elif ((GPU_COUNT > 0)); then
                DEVICE=cuda
            elif [[ $asked == cuda ]]; then
                die "TRITON_DIST_DEVICE=cuda, but there is no GPU: $GPU_REASON"
            fi
            ;;
        *) die "TRITON_DIST_DEVICE=$asked, expected auto, cuda or cpu" ;;
    esac
}

asks_to_interpret() { [[ ${TRITON_INTERPRET:-} =~ ^(1|[Tt]rue|TRUE|[Oo]n|ON|[Yy]es|YES)$ ]]; }

# export_settings: exports the variables that kernels on $DEVICE need.
export_settings() {
    if [[ $DEVICE == cpu ]]; then
        export TRITON_DIST_DEVICE=cpu TRITON_INTERPRET=${TRITON_INTERPRET:-1} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
        return
    fi
    if asks_to_interpret; then
        say "ignoring TRITON_INTERPRET=$TRITON_INTERPRET, because TRITON_DIST_DEVICE=cuda"
        unset TRITON_INTERPRET
    fi
    # One hardware queue: work of all streams starts in the order in which it was queued. Copies are
    # queued before the GEMM that waits for them, so they cannot be blocked by it.
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
}

# use_python DEVICE [EXTRA]: calls find_python, then extends PATH and PYTHONPATH.
use_python() {
    find_python "$@" || exit 1
    PATH=$(dirname -- "$PYTHON"):$PATH
    export PATH PYTHONPATH=$ROOT/python${PYTHONPATH:+:$PYTHONPATH}
}

# find_python DEVICE [EXTRA]: sets PYTHON to a Python that meets the requirements of the package and of
# EXTRA (test, dev) on DEVICE (cuda, cpu): $PYTHON or python3, else the Python of $VENV, which is
# installed if needed. TRITON_VERSION selects a separate environment with this version of Triton.
find_python() {
    local device=$1 extra=${2:-} asked=${PYTHON:-python3} missing
    local -a need=(${extra:+"$extra"})
    if [[ $device == cuda ]]; then need+=(--cuda); fi
    TRITON_CONSTRAINTS=$ROOT/constraints/triton-${TRITON_VERSION:-$DEFAULT_TRITON}.txt
    if [[ ! -f $TRITON_CONSTRAINTS ]]; then
        local -a known=("$ROOT"/constraints/triton-*.txt)
        if [[ ! -f ${known[0]} ]]; then die "$ROOT has no folder constraints: clone the whole repository"; fi
        known=("${known[@]##*/triton-}")
        die "TRITON_VERSION=$TRITON_VERSION, expected one of: ${known[*]%.txt}"
    fi
    if [[ -n ${TRITON_VERSION:-} ]]; then
        missing="TRITON_VERSION=$TRITON_VERSION requires a separate environment"
    elif ! command -v "$asked" >/dev/null; then
        missing="not found"
    elif missing=$("$asked" "$ROOT/scripts/requirements.py" check "${need[@]}" 2>/dev/null); then
        PYTHON=$("$asked" -c 'import sys; print(sys.executable)')
        return
    fi
    VENV=$ROOT/.venv-triton-dist${TRITON_VERSION:+-triton-$TRITON_VERSION}
    if [[ -L $VENV ]]; then
        die "$VENV is a symbolic link, which is not supported: remove the link. $(other_python)"
    elif [[ -e $VENV && ! -f $VENV/$MARKER ]]; then
        die "$VENV was not created by this script and is not changed: move it away. $(other_python)"
    fi
    if ! is_ready "$device" "$extra"; then
        say "not using $asked: ${missing:-it does not run}"
        set_up "$device" "$extra" || return 1
    fi
    PYTHON=$VENV/bin/python
}

# Marks an environment that this script created; its content is the kind of torch (gpu, cpu). The script
# does not write to folders without this file.
MARKER=.made-by-triton-dist

# installation_stamp FLAVOUR: prints a text that changes if an input of the installation changes. The
# environment is then installed again. FLAVOUR is the kind of torch, gpu or cpu.
installation_stamp() { echo "$1 $(cat "$ROOT/pyproject.toml" "$ROOT/constraints/tested.txt" "$TRITON_CONSTRAINTS" | cksum) $ROOT"; }

# is_ready DEVICE EXTRA: succeeds if $VENV was installed for DEVICE and at least EXTRA.
is_ready() {
    local flavour extra
    local -a flavours=(gpu) extras=(dev)
    if [[ $1 == cpu ]]; then flavours+=(cpu); fi
    if [[ $2 != dev ]]; then extras+=(test); fi
    if [[ -z $2 ]]; then extras+=(run); fi
    for extra in "${extras[@]}"; do
        for flavour in "${flavours[@]}"; do
            if [[ "$(cat "$VENV/.ready-$extra" 2>/dev/null)" == "$(installation_stamp "$flavour")" ]]; then
                runs "$VENV/bin/python" && return 0
            fi
        done
    done
    return 1
}

runs() { "$1" -c '' 2>/dev/null; }

# set_up DEVICE EXTRA: creates $VENV with the first Python for which the installation succeeds.
set_up() {
    local base tried='' version found=0
    for base in "${PYTHON:-python3}" python3 python3.13 python3.12 python3.11 python3.10; do
        # The command may be a shim of a version manager, which fails if that version is not installed.
        version=$("$base" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
        if [[ " $tried" == *" $version "* ]]; then continue; fi
        tried+="$version "
        case $version in 3.10 | 3.11 | 3.12 | 3.13) ;; *) continue ;; esac
        found=1
        install_locked "$base" "$1" "$2" && return
    done
    if ((found == 0)); then
        say "no Python from 3.10 to 3.13 found, only: ${tried:-none}. Install one, or set PYTHON=/path/to/python3"
    fi
    return 1
}

# install_locked BASE DEVICE EXTRA: runs install under a lock; a process that had to wait skips it.
install_locked() {
    if [[ ! -e $VENV ]]; then
        # Create and rename, so that other processes never see the folder without the marker.
        mkdir "$VENV.$$" && : >"$VENV.$$/$MARKER" || return 1
        mv -T "$VENV.$$" "$VENV" 2>/dev/null || rm -r "$VENV.$$"
    fi
    exec 9>"$VENV/.set-up-lock" || return 1
    # The lock belongs to the open file, which this shell shares with the Python that takes the lock. It
    # is released when this shell ends, even if the shell is killed.
    if ! "$1" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null; then
        say "waiting for another process that installs $VENV"
        "$1" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)' || return 1
    fi
    local status=0
    is_ready "$2" "$3" || install "$1" "$3" || status=1
    exec 9>&-
    return $status
}

# install BASE EXTRA: installs $VENV; the caller holds the lock.
install() {
    local base=$1 extra=$2 flavour tool site problems begin=$SECONDS
    local -a wanted
    local PATH=$PATH # find_uv extends it
    flavour=$(cat "$VENV/$MARKER")
    # pip and uv treat a CPU build of torch as installed, so torch for GPUs needs an empty environment.
    if ! runs "$VENV/bin/python" || [[ $HOST_HAS_GPU == 1 && $flavour != gpu ]]; then
        find "$VENV" -mindepth 1 -maxdepth 1 ! -name .set-up-lock ! -name "$MARKER" -exec rm -rf {} +
        flavour=cpu
        if [[ $HOST_HAS_GPU == 1 ]]; then flavour=gpu; fi
        echo "$flavour" >"$VENV/$MARKER"
        say "creating $VENV with $("$base" --version)"
    fi
    rm -f "$VENV"/.ready-*
    # The extra "bench" is installed too. A Python of the user need not have it, because few scripts use it.
    mapfile -t wanted < <("$base" "$ROOT/scripts/requirements.py" list bench ${extra:+pins "$extra"})
    say "installing ${wanted[*]} ($(grep -v '^#' "$TRITON_CONSTRAINTS" | paste -sd ' '))"
    for tool in uv pip; do
        if [[ $tool == uv ]] && ! find_uv "$base"; then continue; fi
        # A single command, so that the versions of torch and triton match.
        "install_with_$tool" "$base" -c "$ROOT/constraints/tested.txt" -c "$TRITON_CONSTRAINTS" "${wanted[@]}" >&2 && break
        if [[ $tool == uv ]]; then
            say "uv failed; trying pip"
            continue
        fi
        say "pip must find all versions of constraints/tested.txt and ${TRITON_CONSTRAINTS#"$ROOT/"}, and a build of torch that" \
            "accepts this triton. $(remedy)"
        return 1
    done
    if [[ $flavour == gpu ]] && ! problems=$("$VENV/bin/python" "$ROOT/scripts/requirements.py" check --cuda); then
        say "$tool installed packages that the GPUs of this host cannot use: $problems. $(remedy)"
        return 1
    fi
    rm -rf "$VENV/.uv"
    site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "$ROOT/python" >"$site/triton_dist.pth"
    # pip does not compile bytecode, which would take half of its time. A launch imports a quarter of the
    # files: compile these now.
    env -u PYTHONDONTWRITEBYTECODE "$VENV/bin/python" -c \
        'import torch.distributed.run, triton_dist.kernels.nvidia' 2>/dev/null || true
    printf '#!/usr/bin/env bash\nexec %q -m triton_dist "$@"\n' "$VENV/bin/python" >"$VENV/bin/triton-dist"
    chmod +x "$VENV/bin/triton-dist"
    installation_stamp "$flavour" >"$VENV/.ready-${extra:-run}"
    say "installation with $tool took $((SECONDS - begin)) s"
}

# find_uv BASE: succeeds if uv is on PATH, or if pip of BASE installs it in the environment. uv installs
# torch and triton in half of pip's time.
find_uv() {
    if command -v uv >/dev/null; then return; fi
    "$1" -m pip install --disable-pip-version-check --no-input --no-compile --target "$VENV/.uv" \
        -c "$ROOT/constraints/tested.txt" uv &>/dev/null || return 1
    PATH=$VENV/.uv/bin:$PATH
}

# install_with_uv BASE ARGUMENTS OF PIP INSTALL...
install_with_uv() {
    local -a uv=("$1" "$ROOT/scripts/requirements.py" uv --directory "$ROOT" --no-python-downloads)
    if [[ ! -t 2 ]]; then uv+=(--quiet); fi
    runs "$VENV/bin/python" || "${uv[@]}" venv --allow-existing --python "$(command -v "$1")" "$VENV" || return 1
    "${uv[@]}" pip install --python "$VENV/bin/python" "${@:2}"
}

# install_with_pip BASE ARGUMENTS OF PIP INSTALL...
install_with_pip() {
    local -a pip=("$VENV/bin/python" -m pip)
    if ! runs "$VENV/bin/python"; then
        if ! "$1" -c 'import ensurepip, venv' 2>/dev/null; then
            say "$1 cannot create environments (on Debian and Ubuntu: apt install python3-venv)"
            return 1
        fi
        "$1" -m venv "$VENV" || return 1
    elif ! "${pip[@]}" --version >/dev/null 2>&1; then # uv creates environments without pip
        "$VENV/bin/python" -m ensurepip >/dev/null || return 1
    fi
    pip+=(install --disable-pip-version-check --no-input --no-compile)
    if [[ ! -t 2 ]]; then pip+=(--quiet --progress-bar off); fi
    "${pip[@]}" "${@:2}"
}

remedy() {
    echo "Check 'python3 -m pip config list' and PIP_ variables for other package indexes. $(other_python)"
}

other_python() { echo "Or set PYTHON=/path/to/python3, a Python with torch and triton"; }
