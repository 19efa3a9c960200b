#!/usr/bin/env bash
# The README's first command, 08_3d_full/demo.sh, with three steps: it builds what it needs, its losses agree, its
# pictures are there.   bash tests/demo.sh
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
bash 08_3d_full/demo.sh "$out" 3 >"$out/log" 2>&1 || { tail -20 "$out/log"; echo "FAIL demo.sh: exit code is not 0"; exit 1; }
awk '/eight ranks  /{table = 1; next} /^\(/{table = 0} table {steps++; if (!($4 < 5e-6)) bad = 1}
     END {exit !(steps == 3 && !bad)}' "$out/log" || { cat "$out/log"; echo "FAIL demo.sh: losses beside one another"; exit 1; }
[ "$(grep -c '^step  *3/3  loss 5.1185' "$out/log")" -ge 6 ] || { cat "$out/log"; echo "FAIL demo.sh: losses by technique"; exit 1; }
[ -s "$out/08_loss.png" ] && [ -s "$out/08_memory.png" ] || { tail -5 "$out/log"; echo "FAIL demo.sh: pictures"; exit 1; }
echo "ok   demo.sh: three steps of every technique, losses and pictures"
