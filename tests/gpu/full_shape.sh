#!/usr/bin/env bash
# The levers at full size on a GPU, from a checkout that is not installed: arguments as for full_shape.py.
set -uo pipefail
. "$(dirname "$0")/env.sh"
exec python3 "$root/tests/gpu/full_shape.py" "$@"
