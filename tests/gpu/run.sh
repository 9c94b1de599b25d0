#!/usr/bin/env bash
# Test the levers on a GPU from a checkout that is not installed: `run.sh OUT [pytest arguments]`, with SGLang's pinned
# environment active. OUT receives levers.json (written test by test), junit.xml and the log.
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
out=$1
shift
meta=$(mktemp -d)
mkdir -p "$meta/sparkmoe-0.1.0.dist-info"
printf 'Metadata-Version: 2.1\nName: sparkmoe\nVersion: 0.1.0\n' > "$meta/sparkmoe-0.1.0.dist-info/METADATA"
cat > "$meta/sparkmoe-0.1.0.dist-info/entry_points.txt" <<'T'
[sglang.srt.platforms]
torch_cpu = sparkmoe.sglang_plugin.torch_cpu:activate
[sglang.srt.plugins]
sparkmoe = sparkmoe.sglang_plugin:register
T
export PYTHONPATH=$root/lib:$meta${PYTHONPATH:+:$PYTHONPATH} SPARKMOE_GPU_RECORD=$out/levers.json PYTHONUNBUFFERED=1
cd "$root" || exit 1
python3 -m pytest tests/gpu -m gpu -p no:cacheprovider -W ignore --tb=short --durations=20 -v \
    --junitxml="$out/junit.xml" "$@" 2>&1 | tee "$out/log"
