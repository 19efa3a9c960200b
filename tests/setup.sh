#!/usr/bin/env bash
# Installs the Debian/Ubuntu packages that are missing (as root or through sudo) and builds; a second run installs and
# rebuilds nothing. Without apt, or without root and sudo, CMake says what it does not find. Used by 08_3d_full/demo.sh
# and tests/run.sh.
#   bash tests/setup.sh [BUILD_FOLDER] [-DCMAKE_OPTION=VALUE ...] [TARGET ...]        default: build/, every target
#   bash tests/setup.sh --packages                                                    installs only
set -euo pipefail
caller=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case "${1:-}" in
    --packages | "" | [!-]*) ;;
    *) echo "tests/setup.sh: $1: unknown; valid: --packages, or a folder, options for CMake (-D...) and targets" >&2; exit 2 ;;
esac
packages=(g++ make cmake ninja-build libopenblas-openmp-dev libdnnl-dev libopenmpi-dev openmpi-bin libfmt-dev libcli11-dev
          nlohmann-json3-dev zlib1g-dev doctest-dev python3 python3-numpy python3-matplotlib python3-pytest strace)
missing=()
has() { command -v "$1" >/dev/null; }
if has dpkg-query && has apt-get; then
    for package in "${packages[@]}"; do
        dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
    done
else
    echo "== no apt here: nothing is installed"
fi
if [ ${#missing[@]} = 0 ]; then
    :
elif [ "$(id -u)" != 0 ] && ! has sudo; then
    echo "== neither root nor sudo: not installed, unless by other means: ${missing[*]}"
else
    began=$SECONDS
    echo "== installing ${missing[*]}"
    as_root=()
    if [ "$(id -u)" != 0 ]; then as_root=(sudo); fi
    ${as_root[@]+"${as_root[@]}"} apt-get update -qq
    DEBIAN_FRONTEND=noninteractive ${as_root[@]+"${as_root[@]}"} \
        apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
    echo "== installed in $((SECONDS - began)) s"
fi
if [ "${1:-}" = --packages ]; then exit 0; fi

folder=${1:-build}
if [ -n "${1:-}" ] && [ "$caller" != "$PWD" ] && [[ $1 != /* ]]; then folder=$caller/$1; fi
shift || true
by_hand() { echo "tests/setup.sh: $1 (README.md, \"By hand\")" >&2 && exit 2; }
has cmake || by_hand "no cmake here"
cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
options=() targets=()
for word in "$@"; do
    case "$word" in -D*) options+=("$word") ;; *) targets+=("$word") ;; esac
done
configure=$([ -f "$folder/build.ninja" ] || [ -f "$folder/Makefile" ] || echo new)
for option in ${options[@]+"${options[@]}"}; do # -DNAME=VALUE: does the cache hold it?
    name=${option%%=*}
    grep -qx "${name#-D}:[A-Z]*=${option#*=}" "$folder/CMakeCache.txt" 2>/dev/null || configure=${configure:-changed}
done
if [ -n "$configure" ]; then
    echo "== configuring $folder"
    if [ "$configure" = new ] && has ninja && [ -z "${CMAKE_GENERATOR:-}" ]; then options+=(-G Ninja); fi
    cmake -S . -B "$folder" ${options[@]+"${options[@]}"} >/dev/null || by_hand "install what CMake does not find"
fi
began=$SECONDS
echo "== building $folder: ${targets[*]:-every target} (on $cores cores; the first time, a chapter takes minutes)"
cmake --build "$folder" -j "$cores" ${targets[@]+--target "${targets[@]}"}
echo "== built in $((SECONDS - began)) s"
