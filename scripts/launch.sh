#!/usr/bin/env bash
# Starts one process per rank of a script, on the GPUs of this host or, without any, on CPU ranks.
set -euo pipefail

usage() {
    cat <<'END'
Usage: bash scripts/launch.sh [--nproc_per_node=N] [TORCHRUN OPTIONS] SCRIPT [ARGUMENTS OF SCRIPT]
       bash scripts/launch.sh [--nproc_per_node=N] [TORCHRUN OPTIONS] -m MODULE [ARGUMENTS OF MODULE]

Runs SCRIPT in one process per rank with torchrun. Uses the current python3 if it has all that is
needed, else sets up .venv-triton-dist in the repository first. With NVIDIA GPUs there is one rank per
GPU, or with --share-gpus more; without, 2 ranks on the CPU, where Triton's interpreter runs the same
kernels.

SCRIPT is looked for as given; a bare name then in tests/ and python/triton_dist/test/*/. With -m
MODULE each rank runs a module, as python -m does.

  --nproc_per_node=N     ranks on this host (also --nproc_per_node N, --nproc-per-node)
  --share-gpus           several ranks on each GPU where there are more ranks than GPUs; to see that
                         programs are right, not how fast they are
  --help                 this text

Options before SCRIPT that are not listed here go to torchrun: --max-restarts=1, --tee 3, ...

Environment:
  TRITON_DIST_DEVICE=cpu   CPU ranks although there are GPUs; cuda: fail if there are none
  TRITON_DIST_SHARE_GPUS=1 as --share-gpus, where there are GPUs
  NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT
                           several hosts: run the same command on each, with its own NODE_RANK
  TORCHRUN                 replaces torchrun; may be several words: "compute-sanitizer torchrun"
  PYTHON                   the Python to use, or to make .venv-triton-dist with; left out if it does not run
  TRITON_VERSION           an environment of its own with this version of Triton
  PIP_EXTRA_INDEX_URL, ... pip's own, for when .venv-triton-dist is set up
END
}

. "$(dirname -- "${BASH_SOURCE[0]}")/setup_env.sh"

# Arguments: options of torchrun, then the script, then what belongs to the script.

nproc=${ARNOLD_WORKER_GPU:-}
options=()
share="" took=""
is_path=1 # of what follows the options; a module or another program is not looked for
while (($# > 0)); do
    case $1 in
        -h | --help)
            usage
            exit 0
            ;;
        --nproc_per_node=* | --nproc-per-node=*) nproc=${1#*=} ;;
        --nproc_per_node | --nproc-per-node)
            (($# > 1)) || die "$1 needs a number of ranks after it"
            nproc=$2
            shift
            ;;
        --share-gpus | --share_gpus) share=option ;;
        -m | --module | --no-python | --no_python)
            is_path=0
            options+=("$1")
            ;;
        --standalone | --run-path | --run_path | --virtual-local-rank | --virtual_local_rank | --*=*) options+=("$1") ;;
        -*) # every other option of torchrun takes a value
            (($# > 1)) || die "$1 needs a value after it"
            options+=("$1" "$2")
            took=" ($1 took $2 as its value)"
            shift
            ;;
        *) break ;;
    esac
    shift
done
case $nproc in
    '' | gpu | cpu | auto) ;; # the words are torchrun's
    *[!0-9]* | 0*) die "--nproc_per_node=$nproc is no number of ranks: give 1 or more" ;;
esac
read -r asked <<<"${TRITON_DIST_SHARE_GPUS:-}" # without the blanks around it
case ${asked,,} in
    1 | true | on | yes) share=${share:-asked} ;;
    '' | 0 | false | off | no) ;;
    *) die "TRITON_DIST_SHARE_GPUS=$asked, expected 0 or 1" ;;
esac
(($# > 0)) || die "which script?$took See: bash scripts/launch.sh --help"

script=$1
shift
if ((is_path)) && [[ ! -f $script ]]; then
    [[ $script != */* ]] || die "$script: no such file"
    found=()
    for candidate in "$ROOT/tests/$script" "$ROOT"/python/triton_dist/test/*/"$script"; do
        if [[ -f $candidate ]]; then found+=("$candidate"); fi
    done
    case ${#found[@]} in
        0) die "$script: no such file here, in $ROOT/tests or in $ROOT/python/triton_dist/test/*" ;;
        1) script=${found[0]} ;;
        *) die "$script: there are several, give the path: ${found[*]}" ;;
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
                "With --share-gpus several ranks share a GPU, to see that a program is right"
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

# In a rank of another job: its variables would make this job take the port and the store of that job.
if [[ -n ${LOCAL_RANK:-}${TORCHELASTIC_RUN_ID:-} && -z ${NNODES:-} && " ${options[*]}" != *" --nnodes"* ]]; then
    unset "${!TORCHELASTIC_@}" MASTER_ADDR MASTER_PORT RANK LOCAL_RANK GROUP_RANK ROLE_RANK ROLE_NAME
    unset WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE ROLE_WORLD_SIZE
    unset NODE_RANK ARNOLD_WORKER_NUM ARNOLD_ID ARNOLD_WORKER_0_HOST ARNOLD_WORKER_0_PORT
fi
nnodes=${NNODES:-${ARNOLD_WORKER_NUM:-1}}
node_rank=${NODE_RANK:-${ARNOLD_ID:-0}}
if [[ " ${options[*]}" != *" --nnodes"* ]]; then # with which torchrun has another number than this
    [[ $nnodes =~ ^([0-9]+:)?[1-9][0-9]*$ ]] || die "NNODES=$nnodes, expected the number of hosts"
    last=$((${nnodes##*:} - 1)) # torchrun takes MIN:MAX too
    if [[ ! $node_rank =~ ^[0-9]+$ ]] || ((10#$node_rank > last)); then
        die "NODE_RANK=$node_rank, expected 0 to $last: set NNODES, the number of hosts"
    fi
fi
master_port=${MASTER_PORT:-${ARNOLD_WORKER_0_PORT:-}}
master_port=${master_port%%,*} # schedulers may hand out a list of ports
if [[ -z $master_port ]]; then
    [[ $nnodes == 1 ]] || die "NNODES=$nnodes needs MASTER_PORT, the same free port on every host"
    master_port=$("$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
fi
master_addr=${MASTER_ADDR:-${ARNOLD_WORKER_0_HOST:-}}
if [[ -z $master_addr ]]; then
    [[ $nnodes == 1 ]] || die "NNODES=$nnodes needs MASTER_ADDR, the address of the host with NODE_RANK=0"
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
