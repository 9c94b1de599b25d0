#!/usr/bin/env bash
# Several GPUs, each measuring arms of its own at the same time: `lanes.sh OUT "ARM,ARM" "ARM,ARM" ... -- [arguments]`,
# one list for each GPU, arguments as for full_shape.py. OUT/gpu0, OUT/gpu1, ... receive what full_shape.py keeps.
set -uo pipefail
. "$(dirname "$0")/env.sh"
if [ $# -eq 0 ]; then
    echo 'lanes.sh OUT "ARM,ARM" "ARM,ARM" ... -- [arguments]' >&2
    exit 2
fi
out=$1
shift
lists=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do lists+=("$1"); shift; done
if [ ${#lists[@]} -eq 0 ] || [ $# -eq 0 ]; then
    echo 'lanes.sh: the lists of arms end with --, and there is at least one' >&2
    exit 2
fi
shift
drivers=()
for gpu in "${!lists[@]}"; do
    # A home of its own, so that a server on one GPU does not wait for the start of one on the other.
    work=${TMPDIR:-/tmp}/full-shape-$gpu
    CUDA_VISIBLE_DEVICES=$gpu SPARKMOE_HOME=$work/home python3 "$root/tests/gpu/full_shape.py" \
        --out "$out/gpu$gpu" --work "$work" --arms "${lists[$gpu]}" "$@" > >(sed -u "s/^/gpu$gpu: /") 2>&1 &
    drivers+=($!)
done
failed=0
for driver in "${drivers[@]}"; do wait "$driver" || failed=1; done
exit $failed
