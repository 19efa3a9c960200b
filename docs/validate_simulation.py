#!/usr/bin/env python3
"""Measures the step time of small layouts on this machine's cores and simulates the same steps.

    python3 docs/validate_simulation.py [--bin build/bin] [--out docs/results/08_simulation.csv] [--steps 40]
                                        [LAYOUT ...]

Each layout: the median step of a run on MPI ranks with one thread each, against --simulate on a cluster file that is
calibrated here: ops from chapter 01's --bench with one rank's shapes, on as many cores at once as the layout uses;
links from chapter 08's --probe-file. LAYOUT: only rows whose name contains one of these. Meant for a quiet machine.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import statistics
import sys
import tempfile

import programs
import tables

# Two cores. The eager limit: a message of this size leaves without its sender's help, which may be computing.
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMPI_MCA_btl_vader_eager_limit": "524288"}
MODEL = {"--layers": 4, "--hidden": 128, "--heads": 8, "--kv-heads": 4, "--head-dim": 16, "--ffn": 352,
         "--seq-len": 128}
BATCH = 32  # sequences
# Name: ranks, flags, sequences of a micro-batch, and what differs in one rank's shapes.
HALVES = {"--heads": 4, "--kv-heads": 2, "--ffn": 176}
LAYOUTS = {
    "one rank": (1, "", 16, {}),
    "dp 2": (2, "--dp 2", 16, {}),
    "dp 2, ZeRO-1": (2, "--dp 2 --zero 1", 16, {}),
    "dp 2, ZeRO-3": (2, "--dp 2 --zero 3", 16, {}),
    "tp 2": (2, "--tp 2", 16, HALVES),
    "tp 2, sequence parallel": (2, "--tp 2 --sequence-parallel on", 16, HALVES),
    **{f"pp 2, {schedule}": (2, f"--pp 2 --pipeline {schedule.lower()}", 4, {"--layers": 2})
       for schedule in ("GPipe", "1F1B", "interleaved", "zero-bubble")},
    "cp 2, zigzag": (2, "--cp 2", 16, {"--seq-len": 64}),
    "cp 2, Ulysses": (2, "--cp 2 --cp-algorithm ulysses", 16, {"--seq-len": 64}),
    "dp 2 x tp 2": (4, "--dp 2 --tp 2 --zero 1", 16, HALVES),
    "dp 2 x pp 2": (4, "--dp 2 --pp 2", 4, {"--layers": 2}),
}


def words(flags):
    return [str(word) for pair in flags.items() for word in pair]


class Machine:
    def __init__(self, programs, folder, steps):
        self.programs, self.folder, self.steps = programs, folder, steps
        self.cores = len(os.sched_getaffinity(0))
        self.benches = {}

    def start(self, ranks):
        return programs.mpirun(ranks, "--bind-to", "none") if ranks > 1 else []

    def run(self, ranks, program, flags):
        try:
            return programs.output([*self.start(ranks), self.programs / program, *flags], 600, ENVIRONMENT)
        except programs.Failed as why:
            sys.exit(f"{program} {' '.join(flags)}: {why}")

    def step_seconds(self, ranks, flags):
        metrics = self.folder / "metrics.jsonl"
        self.run(ranks, "08_3d_full", [*flags, "--steps", str(self.steps), "--metrics", str(metrics)])
        steps = [step["step_s"] for step in programs.events(metrics, "step")]
        metrics.unlink()
        return statistics.median(steps[3:])

    def links(self, ranks=2):
        path = self.folder / "links.json"
        self.run(ranks, "08_3d_full", ["--steps", "1", "--probe-file", str(path)])
        return json.loads(path.read_text("utf-8"))

    def bench(self, shapes, micro_batch, copies):
        """One rank's ops, measured while so many copies run at once: the CSV, the limits, seconds between two ops."""
        key = (tuple(words(shapes)), micro_batch, copies)
        if key not in self.benches:
            files = [self.folder / f"bench-{len(self.benches)}-{i}.csv" for i in range(copies)]
            batches = {"--micro-batch": micro_batch, "--global-batch": 2 * micro_batch}
            flags = [*words(shapes | batches), "--bench-csv"]
            with concurrent.futures.ThreadPoolExecutor(copies) as pool:
                texts = list(pool.map(lambda file: self.run(1, "01_single_gpu", [*flags, str(file)]), files))
            copy, product = re.search(r"copy ([\d.]+) GB/s, fp32 product ([\d.]+) TFLOP/s", texts[0]).groups()
            rows = {row["op"]: row for row in tables.read(files[0])}
            calls = sum(int(row["calls"]) for op, row in rows.items() if op not in ("between the ops", "whole_step"))
            between = 1e-3 * float(rows["between the ops"]["ms"]) / calls
            # Of a call of a few microseconds the table has the launch, not the rate of a large one.
            large = [row for row in rows.values() if float(row["ms"]) >= 5e-3 * int(row["calls"] or 1)]
            tables.write(files[0], large, list(next(iter(rows.values()))))
            self.benches[key] = (files[0], 1e9 * float(copy), 1e12 * float(product), between)
        return self.benches[key]

    def cluster(self, links, bench):
        _, copy, product, between = bench
        device = {"name": "CPU core", "peak_bf16": product, "peak_fp32": product, "product_efficiency": 1,
                  "copy_bytes_per_s": copy, "memory_bytes": 1e9, "launch_s": 0, "host_s": between, "streams": False}
        path = self.folder / "cluster.json"
        path.write_text(json.dumps({"name": "this machine", "device": device, **links,
                                    "cores": self.cores}), "utf-8")
        return path

    def simulated_seconds(self, ranks, flags, cluster, bench):
        text = self.run(1, "08_3d_full", [*flags, "--comm", "fake", "--fake-world", str(ranks), "--simulate",
                                          str(cluster), "--device-csv", str(bench[0])])
        return programs.step_seconds(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*")
    parser.add_argument("--bin", type=pathlib.Path, default=pathlib.Path("build/bin"))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/results/08_simulation.csv"))
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(arguments.bin, pathlib.Path(folder), arguments.steps)
        links = machine.links() | {"gpus_per_node": 64}
        print(f"links: {json.dumps(links['host'])}", file=sys.stderr)
        for name, (ranks, layout, micro_batch, differs) in LAYOUTS.items():
            if arguments.layouts and not any(word in name for word in arguments.layouts):
                continue
            flags = [*words(MODEL), *layout.split(), "--micro-batch", str(micro_batch), "--global-batch", str(BATCH)]
            bench = machine.bench(MODEL | differs, micro_batch, min(ranks, machine.cores))
            simulated = machine.simulated_seconds(ranks, flags, machine.cluster(links, bench), bench)
            measured = machine.step_seconds(ranks, flags)
            error = 100 * (simulated / measured - 1)
            rows.append([name, ranks, f"{1e3 * measured:.1f}", f"{1e3 * simulated:.1f}", f"{error:+.1f}"])
            print(f"{name:24} {ranks} ranks  measured {rows[-1][2]:>7} ms  simulated {rows[-1][3]:>7} ms  "
                  f"{rows[-1][4]}%", file=sys.stderr, flush=True)
    head = ["layout", "ranks", "measured_ms", "simulated_ms", "error_%"]
    about = "step time of layouts on CPU ranks, one thread each: median measured, and simulated"
    tables.write(arguments.out, [head, *rows],
                 comments=[about, "docs/validate_simulation.py", f"{machine.cores} cores"])


if __name__ == "__main__":
    programs.start(main)
