#!/usr/bin/env python3
"""Holds the table of docs/troubleshooting.md to the programs; exit code 1 and the row where a name does not exist.

    python3 tests/troubleshooting.py BIN_FOLDER

In its rows, `event.key` is a key of that event in the metrics of a few short runs (or, of an event that only a failing
disk writes, in the sources), `train70b_...` a metric that docs/prometheus.py makes of them, `--flag VALUE` a flag of a
program or script and one of its values, `path/file` a file, any other `word` a program; "text" is part of a line that
the sources print. Ends by checking that wrong names are found.
"""
import json
import pathlib
import re
import subprocess
import sys
import tempfile

from lessons_commands import Program, mpi_environment

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Flags that the table may name although no program has them yet.
ALLOWED_MISSING = set()
LEAST_ROWS = 25
SHAPE = ("--layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --seq-len 16 --global-batch 8 --device cpu "
         "--val-fraction 0.2 ").split()


class Known:
    """What there is: events (by name, the lines), Prometheus metrics, flags, and the text of the sources."""

    def __init__(self, folder):
        self.events, self.metrics, self.flags = {}, set(), {}
        self.programs = {path.name for path in folder.iterdir() if not path.name.startswith("test_")}
        for name in sorted(self.programs & {"01_single_gpu", "08_3d_full", "compare"}):
            for flag, values in Program(folder / name).flags.items():
                self.flags[flag] = values
        patterns = ("0*/**/*.cpp", "0*/**/*.h", "0*/**/*.cu", "0*/*.py")
        paths = [path for pattern in patterns for path in ROOT.glob(pattern)]
        # Texts that are split into several literals count as one.
        self.sources = "\n".join(re.sub(r'"\s*\n\s*"', "", path.read_text()) for path in paths)
        self.script = (ROOT / "08_3d_full/checkpoint/restart.py").read_text()

    def run(self, folder, ranks, program, flags, code):
        """A short run; its metrics are added."""
        with tempfile.TemporaryDirectory() as work:
            words = [] if ranks == 1 else ["mpirun", "--oversubscribe", "-np", str(ranks)]
            words += [str(folder / program), *SHAPE, *flags.split(), "--metrics", "m.jsonl"]
            done = subprocess.run(words, cwd=work, capture_output=True, text=True, timeout=100,
                                  env=dict(mpi_environment(), OMP_NUM_THREADS="1"))
            if done.returncode != code:
                sys.exit(f"{' '.join(words)}: exit code {done.returncode}, not {code}\n{done.stderr[:2000]}")
            for line in pathlib.Path(work, "m.jsonl").read_text().splitlines():
                event = json.loads(line)
                self.events.setdefault(event["event"], []).append(event)
            subprocess.run(["python3", str(ROOT / "docs/prometheus.py"), "--once", "m.jsonl", "p.prom"], cwd=work,
                           check=True)
            text = pathlib.Path(work, "p.prom").read_text()
            self.metrics |= set(re.findall(r"^# TYPE (\w+)", text, re.M))

    def key(self, token):
        """None if event.key or event.key=value exists, else why not."""
        path, _, value = token.partition("=")
        event, _, path = path.partition(".")
        if event not in self.events:
            written = re.search(r'\{"event", "' + event + r'"\}.*?\}\}', self.sources, re.S)
            if written and all(f'"{part}"' in written[0] for part in path.split(".")):
                return None
            return f"no run writes {event} with {path}"
        found = [each for line in self.events[event] for each in lookup(line, path)]
        if not found:
            return f"{event} has no {path}"
        return None if not value or value in map(str, found) else f"{path} is never {value}"

    def problem(self, token):
        """None if what stands in backticks exists, else why not."""
        word, *values = token.split()
        if word.startswith("--"):
            if word not in self.flags:
                known = word in ALLOWED_MISSING or f'"{word}"' in self.script
                return None if known else f"no program has {word}"
            choices = self.flags[word]
            if values and choices and values[0] not in choices:
                return f"{word} is one of {'|'.join(sorted(choices))}"
            return f"{word} takes no value" if values and choices is None else None
        if word.startswith("train70b_"):
            return None if word in self.metrics else f"no {word} in what docs/prometheus.py writes"
        if "/" in word:
            return None if (ROOT / word).exists() else f"no file {word}"
        if "." in word:
            return self.key(word)
        return None if word in self.programs else f"{word}: what is it?"

    def problems(self, row):
        """What is wrong with a row of the table."""
        tokens = re.findall(r"`([^`]+)`", row)
        texts = re.findall(r'"([^"]+)"', re.sub(r"`[^`]*`", "", row))
        found = [self.problem(token) for token in tokens]
        return [each for each in found if each] + [f'no source prints "{text}"' for text in texts
                                                   if text not in self.sources]


def lookup(value, path):
    """The values at a.b.c in dicts of dicts; a key may contain dots."""
    if not path:
        return [value]
    if not isinstance(value, dict):
        return []
    return [each for key in value if path == key or path.startswith(key + ".")
            for each in lookup(value[key], path[len(key) + 1:])]


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = pathlib.Path(sys.argv[1]).resolve()
    known = Known(folder)
    known.run(folder, 1, "08_3d_full", "--steps 60 --lr 1e-6 --spike-window 8 --spike-z 0.01", 0)
    known.run(folder, 1, "08_3d_full", "--steps 22 --experts 4 --load-alarm 1.001 --aux-loss 0", 0)
    layout = "--tp 2 --dp 2 --steps 4 "
    known.run(folder, 4, "08_3d_full", layout + "--checkpoint-dir c --checkpoint-every 2 --eval-every 2 --probe on", 0)
    known.run(folder, 4, "08_3d_full", layout + "--inject nan:1:2", 1)
    known.run(folder, 4, "08_3d_full", "--dp 4 --steps 4 --replica-check 1 --inject bitflip:3:2", 1)

    path = ROOT / "docs/troubleshooting.md"
    rows = [(number, line) for number, line in enumerate(path.read_text().split("\n"), 1)
            if line.startswith("| ") and not re.match(r"\| (symptom|\*\*)", line)]
    errors = [f"docs/troubleshooting.md:{number}: {why}" for number, row in rows for why in known.problems(row)]
    errors += [f"docs/troubleshooting.md:{number}: three cells" for number, row in rows if row.count(" | ") != 2]
    if len(rows) < LEAST_ROWS:
        errors.append(f"docs/troubleshooting.md: {len(rows)} rows")
    for wrong in ("`step.straggler.name`", "`stop.loss`", "`alarm.kind=other`", "`checkpoint_failed.nothing`",
                  "`train70b_nothing`", "`--no-such-flag`", "`--zero 4`", "`--resume 5`", "`docs/nothing.md`",
                  "`nothing`", '"a line that nothing prints"'):
        if len(known.problems(f"| x | {wrong} | y |")) != 1:
            errors.append(f"the check does not see that {wrong} does not exist")
    for error in errors:
        print(error)
    print(f"{len(errors)} differences" if errors else f"{len(rows)} rows agree with the programs")
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
