"""Comparison tables of the lessons, a file for each chapter: runs its program once for each row, and prints what the
runs say in their metrics and in their own tables. python3 docs/measure.py TABLE"""
import contextlib
import csv
import os
import pathlib
import re
import subprocess
import sys

import programs
import tables


class Run:
    """A run that has ended: its metrics, and the tables that it has printed."""

    def __init__(self, text, events):
        self.text, self.steps = text, [line for line in events if line["event"] == "step"]
        self.last = self.steps[-1]

    def loss(self):
        return f"{self.last['loss']:.9g}"

    def norm(self):
        return f"{self.last['grad_norm']:.9g}"

    def peaks(self, *kinds):
        """Bytes of rank 0 in the last step."""
        return [f"{self.last['memory']['peak'].get(kind, 0):,}" for kind in kinds]

    def sent(self, *operations):
        """Bytes that rank 0 sent in the last step; without operations: all but losses and norms."""
        sums = (count for name, count in self.last["comm_bytes"].items()
                if (name in operations if operations else not name.endswith("scalar")))
        return f"{sum(sums):,}"

    def row(self, caption, number=0):
        """The cells of a row of the table that is printed below the caption, with commas in large numbers."""
        lines = self.text[self.text.index("\n" + caption) + 1:].split("\n")
        head = next(i for i, line in enumerate(lines) if line.startswith(" "))
        cells = re.split(r"\s{2,}", lines[head + 1 + number].strip())
        return [f"{int(cell):,}" if cell.isdigit() else cell for cell in cells]


class Runs:
    def __init__(self, binaries, folder):
        self.programs, self.folder, self.commands = binaries, folder, []

    def file(self, ranks, program, flags, output_flag, name):
        """Runs the program on so many ranks and returns the file that output_flag made it write."""
        path, start = self.folder / name, programs.mpirun(ranks) if ranks > 1 else []
        command = " ".join([*start, f"build/bin/{program}", *flags, output_flag, name])
        self.commands.append(command.replace(f"{self.folder}/", ""))
        if not path.exists():
            print("  " + self.commands[-1], file=sys.stderr, flush=True)
            text = programs.output([*start, self.programs / program, *flags, output_flag, path])
            path.with_suffix(".txt").write_text(text, "utf-8")
        return path

    def metrics(self, ranks, program, flags, name, kind=None):
        return programs.events(self.file(ranks, program, flags, "--metrics", name), kind)

    def steps(self, ranks, program, flags, name):
        return self.metrics(ranks, program, flags, name, "step")

    def table(self, ranks, program, flags, output_flag, name):
        with open(self.file(ranks, program, flags, output_flag, name), newline="", encoding="utf-8") as file:
            return list(csv.reader(file))

    def run(self, ranks, program, flags):
        name = re.sub(r"\W+", "_", f"{ranks} {program} {flags}") + ".jsonl"
        path = self.file(ranks, program, flags.split(), "--metrics", name[-200:])
        return Run(path.with_suffix(".txt").read_text("utf-8"), programs.events(path))

    def booked(self, flags):
        """Bytes of each kind on a rank, each at its own peak, by chapter 08's dry run: no memory of the rank itself."""
        text = programs.output([self.programs / "08_3d_full", "--comm", "fake", "--dry-run", *flags.split()])
        table = text[re.search(r"^rank \d+: bytes", text, re.M).start():]
        return {kind: int(count) for kind, count in re.findall(r"^(\w+) +(\d+)", table, re.M)}


@contextlib.contextmanager
def box(nodes, mbit):
    """Nodes of two ranks on links of so many Mbit/s (docs/cluster/box.sh): how mpirun on them begins, and a folder that
    they have in common."""
    script = ["bash", "docs/cluster/box.sh"]
    # Not by programs, which leaves nothing running of what it starts.
    subprocess.run([*script, *f"up --nodes {nodes} --slots 2 --rate {mbit}mbit".split()], stdin=subprocess.DEVNULL,
                   check=True)
    try:  # there are more ranks than cores: one that waits must not keep another from computing
        yield ([*script, *f"exec 0 mpirun --mca mpi_yield_when_idle 1 -np {2 * nodes}".split()],
               pathlib.Path(os.environ.get("TRAIN70B_BOX", "/run/train70b-box")))
    finally:
        programs.output([*script, "down"])


def on_links(runs, name, head, rows_at, rates):
    """The rows of each of these rates of the box's links, in Mbit/s."""
    rows = [["mbit_per_s", *head]]
    runs.commands.append(f"python3 docs/measure.py {name}")
    for mbit in rates:
        table = runs.folder / f"{name}_{mbit}.csv"
        if not table.exists():
            tables.write(table, [head, *rows_at(runs, mbit)])
        rows += [[mbit, *row.values()] for row in tables.read(table)]
    return rows


def show(head, rows, aligned=None):
    """Prints a table as it stands in the lessons."""
    print("\n".join(tables.markdown(head, rows, aligned)) + "\n", flush=True)


def beside(measured, formula):
    """What is measured, and the formula's number where it is another one."""
    return measured if measured == formula else f"{measured} ({formula})"


ONE_RANK = ("one rank (chapter 01)", 1, "01_single_gpu", "")


def four_steps(runs, head, rows, values, common="--init-std 0.1 --tables off"):
    """A row for each run of four steps: (label, ranks, program, flags); values(run): behind losses and norms."""
    cells = []
    for label, ranks, program, flags in rows:
        words = common.replace("--tables off", "") if program == "01_single_gpu" else common
        run = runs.run(ranks, program, f"--steps 4 {words} {flags}")
        cells.append([label, run.loss(), run.norm(), *values(run)])
    show(["", "loss at step 4", "gradient norm", *head], cells)
