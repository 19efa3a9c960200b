#!/usr/bin/env bash
# All tests: installs what is missing, builds, runs CTest; then once more, CPU only, under the address and
# undefined-behaviour sanitizers. --fast leaves the sanitizers out.
#   bash tests/run.sh [--fast]
set -euo pipefail
cd "$(dirname "$0")/.."
fast=0
case "${1:-}" in
    "") ;;
    --fast) fast=1 ;;
    *) echo "tests/run.sh: $1: unknown; --fast leaves out the sanitizers" >&2; exit 2 ;;
esac

bash tests/setup.sh build
echo "== tests"
ctest --test-dir build --output-on-failure
if [ $fast = 0 ]; then
    bash tests/setup.sh build-sanitize -DTRAIN70B_SANITIZE=address,undefined
    echo "== tests under the sanitizers"
    # The scripts start the programs again and again, which takes minutes under the sanitizers; what the programs are
    # made of is in the other tests. ctest --test-dir build-sanitize runs them, too.
    ctest --test-dir build-sanitize --output-on-failure -LE script
fi
echo "== all tests passed"
