#!/usr/bin/env bash
# Installs the Debian/Ubuntu packages that are missing (as root or through sudo) and builds into build/.
# Sourced or run by 08_3d_full/demo.sh and tests/run.sh; a second run installs and rebuilds nothing.
#   bash tests/setup.sh [BUILD_FOLDER] [CMAKE_OPTION ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

packages=(g++ make cmake libopenblas-openmp-dev libopenmpi-dev openmpi-bin libfmt-dev libcli11-dev
          nlohmann-json3-dev doctest-dev python3 python3-matplotlib)
missing=()
for package in "${packages[@]}"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
    echo "== installing ${missing[*]}"
    as_root=()
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null || { echo "need root or sudo to install: ${missing[*]}" >&2; exit 2; }
        as_root=(sudo)
    fi
    "${as_root[@]}" apt-get update -qq
    DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

folder=${1:-build}
shift || true
if [ ! -f "$folder/CMakeCache.txt" ] || [ $# -gt 0 ]; then
    echo "== configuring $folder"
    cmake -S . -B "$folder" "$@" >/dev/null
fi
echo "== building $folder (on $(nproc) cores; the first time takes a minute or two)"
cmake --build "$folder" -j "$(nproc)" | grep -E 'error|warning|Building|Linking' || [ "${PIPESTATUS[0]}" = 0 ]
