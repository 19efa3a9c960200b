"""What only this catches: a row of docs/troubleshooting.md that names a metric, flag or message which no program has.

In its rows, `event.key` is a key of that event in the metrics of a few short runs (or, of an event that only a failing
disk writes, in the sources), `train70b_...` a metric that docs/prometheus.py makes of them, `--flag VALUE` a flag of a
program or script and one of its values, `path/file` a file, any other `word` a program; "text" is part of a line that
the sources print.
"""
import json
import re
import subprocess
import sys

from conftest import ROOT
from lessons_commands import Program

PAGE = ROOT / "docs/troubleshooting.md"
ROWS = [(number, line) for number, line in enumerate(PAGE.read_text().split("\n"), 1)
        if line.startswith("| ") and not re.match(r"\| (symptom|\*\*)", line)]
RUNS = ((1, 0, "--steps 60 --lr 1e-6 --spike-window 8 --spike-z 0.01"),
        (1, 0, "--steps 22 --experts 4 --load-alarm 1.001 --aux-loss 0"),
        (4, 0, "--tp 2 --dp 2 --steps 4 --checkpoint-dir c --checkpoint-every 2 --eval-every 2 --probe on"),
        (4, 1, "--tp 2 --dp 2 --steps 4 --inject nan:1:2"),
        (4, 1, "--dp 4 --steps 4 --replica-check 1 --inject bitflip:3:2"))
SHAPE = ("--layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --seq-len 16 --global-batch 8 --device cpu "
         "--val-fraction 0.2 --metrics m.jsonl")


class Known:
    """What there is: events (by name, the lines), Prometheus metrics, flags, and the text of the sources."""

    def __init__(self, run):
        self.events, self.metrics, self.flags = {}, "", {}
        self.programs = {path.name for path in run.binaries.iterdir() if not path.name.startswith("test_")}
        for name in ("01_single_gpu", "08_3d_full", "compare"):
            self.flags |= Program(run.binaries / name).flags
        patterns = ("0*/**/*.cpp", "0*/**/*.h", "0*/**/*.cu", "0*/**/*.py")
        paths = [path for pattern in patterns for path in ROOT.glob(pattern)]
        # Texts that are split into several literals count as one.
        self.sources = "\n".join(re.sub(r'"\s*\n\s*"', "", path.read_text()) for path in paths)
        self.script = (ROOT / "08_3d_full/checkpoint/restart.py").read_text()
        for ranks, code, flags in RUNS:
            run("08_3d_full", SHAPE, flags, ranks=ranks, code=code, seconds=100)
            for event in map(json.loads, (run.folder / "m.jsonl").read_text().splitlines()):
                self.events.setdefault(event["event"], []).append(event)
            subprocess.run([sys.executable, ROOT / "docs/prometheus.py", "--once", "m.jsonl", "p.prom"], cwd=run.folder,
                           check=True)
            self.metrics += (run.folder / "p.prom").read_text()

    def has_key(self, token):
        path, _, value = token.partition("=")
        event, _, path = path.partition(".")
        if event not in self.events:
            written = re.search(r'\{"event", "' + event + r'"\}.*?\}\}', self.sources, re.S)
            return written and all(f'"{part}"' in written[0] for part in path.split("."))
        found = [each for line in self.events[event] for each in lookup(line, path)]
        return found and (not value or value in map(str, found))

    def has(self, token):
        """What stands in backticks."""
        word, *values = token.split()
        if word.startswith("--"):
            choices = self.flags.get(word, ())  # None: takes no value
            return f'"{word}"' in self.script if word not in self.flags else (
                not values or choices is not None and (not choices or values[0] in choices))
        if word.startswith("train70b_"):
            return f"# TYPE {word} " in self.metrics
        return (ROOT / word).exists() if "/" in word else self.has_key(word) if "." in word else word in self.programs


def lookup(value, path):
    """The values at a.b.c in dicts of dicts; a key may contain dots."""
    if not path:
        return [value]
    return [each for key in (value if isinstance(value, dict) else ()) if path == key or path.startswith(key + ".")
            for each in lookup(value[key], path[len(key) + 1:])]


def test_every_row_names_what_there_is(run):
    known = Known(run)
    assert len(ROWS) >= 25
    wrong = [f"docs/troubleshooting.md:{number}: three cells" for number, row in ROWS if row.count(" | ") != 2]
    for number, row in ROWS:
        wrong += [f"docs/troubleshooting.md:{number}: there is no {token}" for token in re.findall(r"`([^`]+)`", row)
                  if not known.has(token)]
        wrong += [f'docs/troubleshooting.md:{number}: no source prints "{text}"'
                  for text in re.findall(r'"([^"]+)"', re.sub(r"`[^`]*`", "", row)) if text not in known.sources]
    assert not wrong, "\n".join(wrong)
