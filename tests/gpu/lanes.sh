#!/usr/bin/env bash
# Several GPUs, each measuring arms of its own at the same time: `lanes.sh OUT "ARM,ARM" "ARM,ARM" ... -- [arguments]`,
# one list for each GPU, arguments as for full_shape.py. OUT/gpu0, OUT/gpu1, ... receive what full_shape.py keeps.
set -uo pipefail
. "$(dirname "$0")/env.sh"
out=$1 gpu=0
shift
lists=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do lists+=("$1"); shift; done
shift
for arms in "${lists[@]}"; do
    # A home of its own, so that a server on one GPU does not wait for the start of one on the other.
    work=${TMPDIR:-/tmp}/full-shape-$gpu
    CUDA_VISIBLE_DEVICES=$gpu SPARKMOE_HOME=$work/home python3 "$root/tests/gpu/full_shape.py" \
        --out "$out/gpu$gpu" --work "$work" --arms "$arms" "$@" 2>&1 | sed -u "s/^/gpu$gpu: /" &
    gpu=$((gpu + 1))
done
wait
