"""For measure.py: what a checkpoint costs a run, and how fast it is written."""
import os
import statistics
import time

import programs


def dd_rate(folder, size):
    """Bytes per second of dd, which writes as many zeros to the same folder and calls fsync."""
    count = max(size // (4 << 20), 1)
    begin = time.monotonic()
    programs.output(["dd", "if=/dev/zero", f"of={folder}/dd", "bs=4M", f"count={count}", "conv=fsync"])
    seconds = time.monotonic() - begin
    os.remove(f"{folder}/dd")
    return count * (4 << 20) / seconds


def cost(runs):
    """a checkpoint at every step, three times in turn with none: seconds per step of the whole run, the wait for the
    last checkpoint included, and the copy, for which a step waits, median; then the writing while nothing else runs,
    in turn with dd (bs=4M conv=fsync, the same size and folder), best of five, because others use the disk"""
    rows = [["what", "ranks", "checkpoint every", "s per step", "copy s", "bytes", "written B/s", "dd B/s"]]
    large = "--layers 8 --hidden 512 --ffn 1536 --seq-len 64"

    def run(ranks, flags, name, every):
        folder = runs.folder / name
        saving = ["--checkpoint-dir", str(folder), "--checkpoint-every", str(every)] if every else []
        events = runs.metrics(ranks, "08_3d_full", [*flags.split(), *saving], f"{name}.jsonl")
        summary = next(line for line in events if line["event"] == "summary")
        return summary, [line for line in events if line["event"] == "checkpoint"], folder

    for ranks, shape in {2: "--layers 6 --hidden 256 --ffn 768 --zero 1", 1: large}.items():
        for number in range(1, 4):
            for every in (0, 1):
                summary, written, _ = run(ranks, shape + " --steps 12", f"step_{ranks}_{number}_{every}", every)
                copy = round(statistics.median(line["copy_s"] for line in written), 5) if every else ""
                size = written[0]["bytes"] if every else ""
                rows.append([f"run {number}", ranks, every or "none", round(summary["seconds"] / 12, 4), copy, size])
    rates, dd = [], []
    for number in range(1, 6):
        _, written, folder = run(1, large + " --steps 1", f"write_{number}", 1)
        size = written[-1]["bytes"]
        rates.append(size / written[-1]["write_s"])
        dd.append(dd_rate(folder, size))
    rows.append(["writing", 1, 1, "", "", size, round(max(rates)), round(max(dd))])
    return rows
