#!/usr/bin/env bash
# Test the levers on a GPU from a checkout that is not installed: `run.sh OUT [pytest arguments]`, with SGLang's pinned
# environment active. OUT receives levers.json (written test by test), junit.xml and the log.
set -uo pipefail
. "$(dirname "$0")/env.sh"
out=$1
shift
export SPARKMOE_GPU_RECORD=$out/levers.json
cd "$root" || exit 1
python3 -m pytest tests/gpu -m gpu -p no:cacheprovider -W ignore --tb=short --durations=20 -v \
    --junitxml="$out/junit.xml" "$@" 2>&1 | tee "$out/log"
