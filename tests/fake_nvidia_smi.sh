#!/bin/bash
# nvidia-smi as docs/measure_node_machine.py asks it, for tests. FAKE_SAMPLE: the end of each sample (clock in MHz,
# power in W, reasons, memory in MiB).
case "$*" in
    *--query-gpu=name,*) for _ in {1..8}; do echo "NVIDIA H100 80GB HBM3, 570.86.10, 81559, 4, 5, 16"; done ;;
    nvlink*) printf 'GPU 0: NVIDIA H100\n'; for i in {0..17}; do echo "	 Link $i: 26.562 GB/s"; done ;;
    *--query-gpu=index,*-lms=*)
        while :; do
            echo "0, ${FAKE_SAMPLE:-1410, 690.5, 0x0000000000000004, 1024}"
            sleep 0.05  # the runs of a test are short
        done ;;
    *) echo "unknown: $*" >&2; exit 1 ;;
esac
