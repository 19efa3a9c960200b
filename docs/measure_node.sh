#!/usr/bin/env bash
# Measures a machine with GPUs: ceilings, training steps, attention, rank slices, ops, tests, layouts; one CSV per part.
#
#   bash docs/measure_node.sh [--minutes 9] [--resume] [PART ...]      --help: the parts and all options
#
# Uses the programs in build/bin if they run here, and builds them (tests/setup.sh) if not. A build can be carried to a
# machine without compiler or network: docs/cluster.md says what it needs there. Without a usable GPU: exit code 2.
set -euo pipefail
from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bin=build/bin arguments=()
while [ $# -gt 0 ]; do
    word=$1
    case "$word" in
        -h | --help) exec python3 docs/measure_node.py --help ;;
        --bin | --out)
            [ $# -gt 1 ] || { echo "measure_node: $1 needs a folder" >&2; exit 2; }
            word="$1=$2"
            shift ;;
    esac
    case "$word" in # the caller's folders
        --bin=[!/]* | --out=[!/]*) [ "$from" = "$PWD" ] || word="${word%%=*}=$from/${word#*=}" ;;
    esac
    case "$word" in --bin=*) bin=${word#*=} ;; esac
    arguments+=("$word")
    shift
done
command -v python3 >/dev/null || { echo "measure_node: python3 is not there" >&2; exit 2; }

runs() { [ -x "$bin/08_3d_full" ] && OMPI_MCA_ess_singleton_isolated=1 "$bin/08_3d_full" --help >/dev/null 2>&1; }
# PyTorch's packages hold cuBLAS and NCCL: used where the system has none.
of_wheels() {
    python3 -c 'import glob, importlib.util
spec = importlib.util.find_spec("nvidia")
folders = spec.submodule_search_locations if spec else []
print(*(lib for folder in folders for lib in glob.glob(folder + "/*/lib")), sep=":")'
}
if ! runs; then
    LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$(of_wheels)
    export LD_LIBRARY_PATH
fi
if ! runs; then
    [ ! -x "$bin/08_3d_full" ] || ldd "$bin/08_3d_full" | grep 'not found' >&2 || true
    if [ "$bin" != build/bin ]; then
        echo "measure_node: $bin/08_3d_full is not there or does not run" >&2
        exit 2
    fi
    echo "== no build that runs here: building"
    bash tests/setup.sh build || { echo "measure_node: the build failed" >&2; exit 2; }
fi
exec python3 docs/measure_node.py --seconds-used "$SECONDS" ${arguments[@]+"${arguments[@]}"}
