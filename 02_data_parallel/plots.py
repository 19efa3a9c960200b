#!/usr/bin/env python3
"""The measured tables of chapter 02 and their pictures: runs the program under mpirun and draws what it wrote.

    python3 02_data_parallel/plots.py [--ranks 2] [--out docs/results] [--bin build/bin]

02_all_reduce.csv, 02_all_reduce.png          time and bus bandwidth of each algorithm over the size of the message
02_data_parallel.csv, 02_data_parallel.png    a step's time and its waiting: naive, bucketed, overlapped
"""
import argparse
import csv
import pathlib
import platform
import subprocess
import sys
import tempfile

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "docs"))
import style

COLORS = (style.GREY, style.RED, style.BLUE, style.GREEN, style.PURPLE, style.CYAN, style.YELLOW)  # library: grey


def hardware():
    model = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    return f"{len(model)} cores of {model[0] if model else platform.processor()}"


def measure(program, ranks, out):
    """Both CSVs, with hardware, commit and command in comment lines."""
    command = ["mpirun", "--oversubscribe", "-np", str(ranks), str(program), "--steps", "3"]
    with tempfile.TemporaryDirectory() as folder:
        files = [pathlib.Path(folder) / "all_reduce.csv", pathlib.Path(folder) / "modes.csv"]
        subprocess.run([*command, "--all-reduce-csv", files[0], "--modes-csv", files[1]], check=True,
                       stdout=subprocess.DEVNULL)
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        for file, name in zip(files, ("02_all_reduce.csv", "02_data_parallel.csv")):
            note = f"# hardware: {hardware()}\n# commit: {commit}\n# command: {' '.join(command)}\n"
            (out / name).write_text(note + file.read_text())


def rows(path):
    return list(csv.DictReader(line for line in open(path) if not line.startswith("#")))


def all_reduce_picture(out):
    table = rows(out / "02_all_reduce.csv")
    figure, (time, bandwidth) = plt.subplots(1, 2, figsize=(10, 3.8))
    for algorithm, color in zip(dict.fromkeys(row["algorithm"] for row in table), COLORS):
        mine = [row for row in table if row["algorithm"] == algorithm]
        x = [int(row["bytes"]) for row in mine]
        line = dict(color=color, marker="o", ms=3, lw=1.4, label=algorithm)
        time.loglog(x, [1e6 * float(row["seconds"]) for row in mine], **line)
        bandwidth.semilogx(x, [float(row["bus_bytes_per_s"]) / 1e9 for row in mine], **line)
    time.set(xlabel="bytes", ylabel="time (us)", title=f"all-reduce over {table[0]['ranks']} ranks")
    bandwidth.set(xlabel="bytes", ylabel="bus bandwidth (GB/s)", title="n / t x 2 (N-1)/N")
    bandwidth.set_ylim(bottom=0)
    time.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out / "02_all_reduce.png", dpi=130)


def data_parallel_picture(out):
    table = rows(out / "02_data_parallel.csv")
    names = [f"{row['form']}\n{row['bucket_mb'] + ' MiB' if float(row['bucket_mb']) else 'per parameter'}\n"
             f"{row['all_reduces']} all-reduces" for row in table]
    step = [1e3 * float(row["step_s"]) for row in table]
    waiting = [1e3 * float(row["waiting_s"]) for row in table]
    figure, axis = plt.subplots(figsize=(8, 3.6))
    axis.bar(names, [a - b for a, b in zip(step, waiting)], color=style.BLUE, label="computing")
    axis.bar(names, waiting, bottom=[a - b for a, b in zip(step, waiting)], color=style.RED,
             label="waiting for communication")
    axis.set(ylabel="ms per step, without update", title=f"data parallelism, {table[0]['ranks']} ranks")
    axis.tick_params(axis="x", labelsize=8)
    axis.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(out / "02_data_parallel.png", dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/results"))
    parser.add_argument("--bin", type=pathlib.Path, default=pathlib.Path("build/bin"))
    arguments = parser.parse_args()
    measure(arguments.bin / "02_data_parallel", arguments.ranks, arguments.out)
    all_reduce_picture(arguments.out)
    data_parallel_picture(arguments.out)


if __name__ == "__main__":
    main()
