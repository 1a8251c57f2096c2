#!/usr/bin/env bash
# Start one process per rank of a script, on the GPUs of this host or, without GPUs, on CPU ranks.
set -euo pipefail

usage() {
    cat <<'END'
Usage: bash scripts/launch.sh [--nproc_per_node=N] [TORCHRUN OPTIONS] SCRIPT [ARGUMENTS OF SCRIPT]
       bash scripts/launch.sh [--nproc_per_node=N] [TORCHRUN OPTIONS] -m MODULE [ARGUMENTS OF MODULE]

Runs SCRIPT in one process per rank with torchrun. Uses the current python3 if it meets all
requirements; otherwise installs .venv-triton-dist in the repository first. With NVIDIA GPUs there is
one rank per GPU, or more with --share-gpus. Without GPUs there are 2 CPU ranks, on which Triton's
interpreter runs the kernels.

SCRIPT is a path, or the name of a file in tests/ or python/triton_dist/test/*/. With -m MODULE each
rank runs a module, like python -m.

  --nproc_per_node=N     ranks on this host (also --nproc_per_node N, --nproc-per-node)
  --share-gpus           put several ranks on each GPU if there are more ranks than GPUs; for
                         correctness tests, not for measurements
  --help                 print this text

Other options before SCRIPT are passed to torchrun: --max-restarts=1, --tee 3, ...

Environment:
  TRITON_DIST_DEVICE=cpu   use CPU ranks even if there are GPUs; cuda: fail if there are no GPUs
  TRITON_DIST_SHARE_GPUS=1 the same as --share-gpus, but ignored without GPUs
  NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT
                           several hosts: run the command on each host with its own NODE_RANK
  TORCHRUN                 replaces torchrun; may be several words: "compute-sanitizer torchrun"
  PYTHON                   the Python to run, or to create .venv-triton-dist with; ignored if it does not run
  TRITON_VERSION           use a separate environment with this version of Triton
  PIP_EXTRA_INDEX_URL, ... variables of pip, for the installation of .venv-triton-dist
END
}

. "$(dirname -- "${BASH_SOURCE[0]}")/setup_env.sh"

# Arguments: options of torchrun, the script, arguments of the script.

nproc=${ARNOLD_WORKER_GPU:-}
options=()
share="" read_as_value=""
is_path=1 # SCRIPT is a file, not a module or a program, and is searched for
while (($# > 0)); do
    case $1 in
        -h | --help)
            usage
            exit 0
            ;;
        --nproc_per_node=* | --nproc-per-node=*) nproc=${1#*=} ;;
        --nproc_per_node | --nproc-per-node)
            (($# > 1)) || die "$1 requires a number of ranks"
            nproc=$2
            shift
            ;;
        --share-gpus | --share_gpus) share=option ;;
        -m | --module | --no-python | --no_python)
            is_path=0
            options+=("$1")
            ;;
        --standalone | --run-path | --run_path | --virtual-local-rank | --virtual_local_rank | --*=*) options+=("$1") ;;
        -*) # all other options of torchrun take a value
            (($# > 1)) || die "$1 requires a value"
            options+=("$1" "$2")
            read_as_value=" ($2 was read as the value of $1)"
            shift
            ;;
        *) break ;;
    esac
    shift
done
case $nproc in
    '' | gpu | cpu | auto) ;; # torchrun accepts these words
    *[!0-9]* | 0*) die "--nproc_per_node=$nproc is not a number of ranks: pass 1 or more" ;;
esac
read -r asked <<<"${TRITON_DIST_SHARE_GPUS:-}" # strips surrounding blanks
case ${asked,,} in
    1 | true | on | yes) share=${share:-asked} ;;
    '' | 0 | false | off | no) ;;
    *) die "TRITON_DIST_SHARE_GPUS=$asked, expected 0 or 1" ;;
esac
(($# > 0)) || die "SCRIPT is missing$read_as_value. See: bash scripts/launch.sh --help"

script=$1
shift
if ((is_path)) && [[ ! -f $script ]]; then
    [[ $script != */* ]] || die "$script: no such file"
    found=()
    for candidate in "$ROOT/tests/$script" "$ROOT"/python/triton_dist/test/*/"$script"; do
        if [[ -f $candidate ]]; then found+=("$candidate"); fi
    done
    case ${#found[@]} in
        0) die "$script: no such file in this folder, in $ROOT/tests or in $ROOT/python/triton_dist/test/*" ;;
        1) script=${found[0]} ;;
        *) die "$script: several files match, pass the path: ${found[*]}" ;;
    esac
fi

choose_device
export_settings
if [[ $DEVICE == cuda ]]; then
    if [[ -n $share ]] && ((GPU_COUNT == 1)); then nproc=${nproc:-2}; fi
    nproc=${nproc:-$GPU_COUNT}
    ranks_per_gpu=one
    if [[ $nproc =~ ^[0-9]+$ ]] && ((nproc > GPU_COUNT)); then
        if [[ -z $share ]]; then
            die "--nproc_per_node=$nproc, but there are $GPU_COUNT GPU(s) ($GPU_REASON); each rank needs its own." \
                "For correctness tests, --share-gpus lets several ranks share a GPU"
        fi
        ranks_per_gpu="up to $(((nproc + GPU_COUNT - 1) / GPU_COUNT))"
        export TRITON_DIST_SHARE_GPUS=1
    fi
    say "device: cuda, $nproc rank(s), $ranks_per_gpu per GPU, because $DEVICE_REASON"
else
    if [[ $share == option ]]; then die "--share-gpus, but ranks would be on the CPU, because $DEVICE_REASON"; fi
    nproc=${nproc:-2}
    how="in Triton's interpreter"
    if ! asks_to_interpret; then how="whose kernels are compiled (TRITON_INTERPRET=$TRITON_INTERPRET)"; fi
    say "device: cpu, $nproc rank(s) $how, because $DEVICE_REASON"
fi

use_python "$DEVICE"
say "using $PYTHON"
if [[ -n ${TORCHRUN:-} ]]; then
    read -ra torchrun <<<"$TORCHRUN"
else
    torchrun=("$PYTHON" "$ROOT/scripts/torchrun.py")
fi

# Started in a rank of another job: with its variables this job would use that job's port and store.
if [[ -n ${LOCAL_RANK:-}${TORCHELASTIC_RUN_ID:-} && -z ${NNODES:-} && " ${options[*]}" != *" --nnodes"* ]]; then
    unset "${!TORCHELASTIC_@}" MASTER_ADDR MASTER_PORT RANK LOCAL_RANK GROUP_RANK ROLE_RANK ROLE_NAME
    unset WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE ROLE_WORLD_SIZE
    unset NODE_RANK ARNOLD_WORKER_NUM ARNOLD_ID ARNOLD_WORKER_0_HOST ARNOLD_WORKER_0_PORT
fi
nnodes=${NNODES:-${ARNOLD_WORKER_NUM:-1}}
node_rank=${NODE_RANK:-${ARNOLD_ID:-0}}
if [[ " ${options[*]}" != *" --nnodes"* ]]; then # the option overrides NNODES
    [[ $nnodes =~ ^([0-9]+:)?[1-9][0-9]*$ ]] || die "NNODES=$nnodes, expected the number of hosts"
    last=$((${nnodes##*:} - 1)) # torchrun also accepts MIN:MAX
    if [[ ! $node_rank =~ ^[0-9]+$ ]] || ((10#$node_rank > last)); then
        die "NODE_RANK=$node_rank, expected 0 to $last: set NNODES, the number of hosts"
    fi
fi
master_port=${MASTER_PORT:-${ARNOLD_WORKER_0_PORT:-}}
master_port=${master_port%%,*} # schedulers may set a list of ports
if [[ -z $master_port ]]; then
    [[ $nnodes == 1 ]] || die "NNODES=$nnodes requires MASTER_PORT, an equal value on every host"
    master_port=$("$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
fi
master_addr=${MASTER_ADDR:-${ARNOLD_WORKER_0_HOST:-}}
if [[ -z $master_addr ]]; then
    [[ $nnodes == 1 ]] || die "NNODES=$nnodes requires MASTER_ADDR, the address of the host with NODE_RANK=0"
    master_addr=127.0.0.1
fi

command=(
    "${torchrun[@]}"
    --nnodes="$nnodes" --node_rank="$node_rank" --nproc_per_node="$nproc"
    --master_addr="$master_addr" --master_port="$master_port"
    "${options[@]}" "$script" "$@"
)
say "running:$(printf ' %q' "${command[@]}")"
exec "${command[@]}"
