#!/bin/bash
# nvidia-smi as docs/measure_node_machine.py asks it, for tests. FAKE_DRIVER: the driver's version; FAKE_SAMPLE: the end
# of each sample (clock in MHz, power in W, reasons, memory in MiB); FAKE_APPS: lines of other processes.
case "$*" in
    *driver_version*) echo "${FAKE_DRIVER:-580.95.05}" ;;
    *--query-compute-apps*) printf '%b' "${FAKE_APPS:-}" ;;
    *--query-gpu=index,*-lms=*)
        period=$(sed 's/.*-lms=\([0-9]*\).*/\1/' <<<"$*")
        while :; do
            echo "0, ${FAKE_SAMPLE:-1410, 690.5, 0x0000000000000004, 1024}"
            sleep "$(printf '0.%03d' "$((period / 10))")"  # ten times as often: the runs of a test are short
        done ;;
    *) echo "unknown: $*" >&2; exit 1 ;;
esac
