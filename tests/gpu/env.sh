# Sourced: makes this checkout importable as if it were installed, entry points of SGLang's plugins included.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
meta=$(mktemp -d)
mkdir -p "$meta/sparkmoe-0.1.0.dist-info"
printf 'Metadata-Version: 2.1\nName: sparkmoe\nVersion: 0.1.0\n' > "$meta/sparkmoe-0.1.0.dist-info/METADATA"
cat > "$meta/sparkmoe-0.1.0.dist-info/entry_points.txt" <<'T'
[sglang.srt.platforms]
torch_cpu = sparkmoe.sglang_plugin.torch_cpu:activate
[sglang.srt.plugins]
sparkmoe = sparkmoe.sglang_plugin:register
T
export PYTHONPATH=$root/lib:$meta${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
