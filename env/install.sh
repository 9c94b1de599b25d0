#!/bin/sh
# install.sh VENV LOCK: create VENV from LOCK with nothing but a Python 3.11 or 3.12, and sparkmoe in it.
# PYTHON=/path/to/python3.12 chooses the interpreter. WHEELHOUSE=folder takes the wheels from there and asks no network
# (`make wheelhouse` fills one). An interrupted installation is picked up where it stopped.
set -eu
venv=$1 lock=$2
need_gb=12

fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; }

case "$(uname -s)-$(uname -m)" in
    Linux-x86_64 | Linux-aarch64) ;;
    *) echo "error: $(uname -s) on $(uname -m) is not supported, Linux on x86-64 or aarch64 is: use a container or WSL 2 (README.md)" >&2; exit 2 ;;
esac

from=
set -- # from here on: what pip is told about where wheels come from
if [ -n "${WHEELHOUSE:-}" ]; then
    ls "$WHEELHOUSE"/*.whl >/dev/null 2>&1 || { echo "error: no wheels in $WHEELHOUSE; fill it on a machine like this one: make wheelhouse TO=FOLDER" >&2; exit 2; }
    from=" from $WHEELHOUSE"
    set -- --no-index --find-links "$WHEELHOUSE"
fi

if [ ! -x "$venv/bin/python" ] || ! fits "$venv/bin/python"; then
    for python in ${PYTHON:-python3 python3.12 python3.11}; do
        fits "$python" && break
        python=
    done
    [ -n "$python" ] || { echo "error: no Python 3.11 or 3.12 found (looked for: ${PYTHON:-python3, python3.12, python3.11}); set PYTHON=/path/to/python3.12" >&2; exit 2; }
    free_gb=$(df -Pk "$(dirname "$venv")" | awk 'NR==2 {print int($4 / 1048576)}')
    [ "$free_gb" -ge $need_gb ] || { echo "error: the installation needs $need_gb GB, $free_gb GB are free here" >&2; exit 2; }
    "$python" -m venv --clear "$venv" || { echo "error: $python cannot make a virtual environment (on Debian and Ubuntu: apt-get install python3-venv)" >&2; exit 2; }
fi

count=$(grep -c '^[a-zA-Z0-9].*==' "$lock")
echo "Installing $count pinned packages into $venv$from: 11 GB on disk, 3 to 10 minutes. This happens once."
# The lock is complete and hashed, so pip has nothing to resolve: --no-deps. The awk lines say how far it is.
log=$venv/install.log
{ "$venv/bin/python" -m pip install "$@" --no-deps --require-hashes --progress-bar off -r "$lock" 2>&1 && echo '@done'; } | tee "$log" | awk -v n="$count" '
    /^(Collecting|Processing|Requirement already satisfied)/ { i++; if (i % 20 == 0) { printf "  %d of %d packages fetched\n", i, n; fflush() } }
    /^Installing collected packages/ { print "  unpacking all of them"; fflush() }
    /^ERROR/ { print > "/dev/stderr" }
    /^@done$/ { ok = 1 }
    END { exit !ok }' || { echo "error: the installation failed; the whole log is in $log" >&2; exit 1; }
"$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation -e . || { echo "error: sparkmoe itself could not be installed" >&2; exit 1; }
echo "Installed: $("$venv/bin/python" -c 'import sys; print("Python %d.%d" % sys.version_info[:2])'), $(du -sh "$venv" | cut -f1) in $venv."
