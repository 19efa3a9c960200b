#!/usr/bin/env bash
# Rewrites docs/data/corpus.txt, the default training text, from the repository's own sources and lessons as they are in
# the last commit. Published losses refer to one snapshot: run this on purpose only, and measure the tables again.
set -euo pipefail
cd "$(dirname "$0")/.."
git ls-files '*.md' '*.h' '*.cpp' '*.cu' '*.cuh' '*.sh' '*.inc' '*CMakeLists.txt' | LC_ALL=C sort | while read -r file; do
    printf '\n==== %s ====\n' "$file"
    git show "HEAD:$file"
done > docs/data/corpus.txt.tmp
mv docs/data/corpus.txt.tmp docs/data/corpus.txt
