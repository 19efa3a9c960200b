#!/usr/bin/env bash
# The conformance board from nothing: an environment with the frameworks of requirements.txt, the clones of clones.txt,
# then every cell that has not run. Can be ended and started again.
#
# Run:   bash docs/conformance/run.sh [OUT, default out/conformance] [words for board.py, as --only torch:]
# Watch: one line per cell. Then `OUT/venv/bin/python docs/conformance/board.py --out OUT/cells --write` writes the page.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:-$here/../../out/conformance}")
shift || true
mkdir -p "$out/clones"
python=${PYTHON:-python3}
if [ ! -e "$out/venv/complete" ]; then
    begin=$(date +%s)
    "$python" -m venv "$out/venv"
    "$out/venv/bin/pip" install --quiet --disable-pip-version-check wheel setuptools
    "$out/venv/bin/pip" install --quiet --disable-pip-version-check -r "$here/requirements.txt"
    touch "$out/venv/complete"
    echo "installed in $(($(date +%s) - begin)) s, $(du -sm "$out/venv" | cut -f1) MB"
fi
path=${PYTHONPATH:-}
while read -r name address commit; do
    case $name in "" | "#"*) continue ;; esac
    clone=$out/clones/$name
    if [ ! -e "$clone" ]; then
        git clone --quiet "$address" "$clone" || { echo "$name: put a clone at $clone; its cells are left out"; continue; }
    fi
    git -C "$clone" checkout --quiet "$commit"
    path=$clone${path:+:$path}
done < "$here/clones.txt"
PYTHONPATH=$path exec "$out/venv/bin/python" "$here/board.py" --out "$out/cells" "$@"
