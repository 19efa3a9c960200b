# What all scripts of tests share: an empty folder $work, gone at the end, and verdicts. The script ends with
# `exit $failed`.
set -u
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

failed=0
verdict() { # NAME PROBLEM: no problem is a pass
    if [ -z "$2" ]; then
        echo "ok   $1"
    else
        echo "FAIL $1: ${2//$'\n'/ }"
        failed=1
    fi
}
