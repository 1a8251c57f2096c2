#!/usr/bin/env bash
# Run the two commands of the README like a new user: in a clone of the last commit, with an empty HOME and
# only PATH in the environment. Runs once with pip's default index, whose torch includes CUDA (about 8 GB
# on disk), and once with a CPU build. Arguments are passed to scripts/test.sh.
#
#   bash scripts/fresh.sh
#   bash scripts/fresh.sh tests/runtime
#   KINDS=cpu bash scripts/fresh.sh
#
# The CPU build is taken from PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL if set, else from torch's index.
set -euo pipefail

. "$(dirname -- "${BASH_SOURCE[0]}")/setup_env.sh"

if [[ -n ${PIP_FIND_LINKS:-} ]]; then
    cpu_builds=PIP_FIND_LINKS=$PIP_FIND_LINKS
else
    cpu_builds=PIP_EXTRA_INDEX_URL=${PIP_EXTRA_INDEX_URL:-https://download.pytorch.org/whl/cpu}
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# run_in_clone COMMAND...: runs COMMAND in the clone with an empty environment.
run_in_clone() {
    say "$*"
    (cd "$folder/clone" && time env -i HOME="$folder/home" PATH=/usr/bin:/bin "$@")
}

for kind in ${KINDS:-default cpu}; do
    case $kind in
        default) environment=() ;;
        cpu) environment=(env "$cpu_builds") ;;
        *) die "KINDS=$KINDS, expected default, cpu or both" ;;
    esac
    rm -rf "$folder/home" "$folder/clone"
    mkdir "$folder/home"
    git clone --quiet "$ROOT" "$folder/clone"
    run_in_clone "${environment[@]}" bash scripts/launch.sh test_ag_gemm.py --case check
    run_in_clone "${environment[@]}" bash scripts/test.sh "$@"
done
