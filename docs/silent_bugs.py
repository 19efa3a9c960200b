#!/usr/bin/env python3
"""Makes the bugs of docs/silent-bugs.md in this course's own program, one at a time, and records which check sees them.

    python3 docs/silent_bugs.py [NAME ...]     builds and runs what docs/results/silent_bugs.csv has not, or these again
    python3 docs/silent_bugs.py --check        the page's tables against the CSV, the CSV against the patches
    python3 docs/silent_bugs.py --write        writes these tables

A bug is a patch (docs/silent/patches.txt) with a layout in which it shows (docs/silent/bugs.py). The rows "right" are
of the program without a patch, in each of these layouts. --work FOLDER: a clone of HEAD and its build, some minutes
the first time. Needs NumPy, git, cmake, ninja. Exit code 1 where the page is wrong, 2 for bad input.
"""

import argparse
import csv
import hashlib
import pathlib
import shutil
import sys

sys.dont_write_bytecode = True
ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "docs/silent")]
from validate import comparison  # noqa: E402, F401  first: it finds the Python that has NumPy
import bugs  # noqa: E402
import checks  # noqa: E402
import page  # noqa: E402
import patches  # noqa: E402
import references  # noqa: E402

CSV, PATCHES = ROOT / "docs/results/silent_bugs.csv", ROOT / "docs/silent/patches.txt"


def listed_patches():
    """{bug: its patch}."""
    listed = patches.read(PATCHES)
    if set(listed) != {bug.name for bug in bugs.RUN}:
        raise patches.Refused(f"not both in patches.txt and bugs.py: {set(listed) ^ {bug.name for bug in bugs.RUN}}")
    return listed


def controls():
    """The right program, as a bug without a patch, in every layout."""
    seen = {}
    for bug in bugs.RUN:
        seen.setdefault((bug.layout, bug.model, bug.resumed), bugs.Bug("right", *(bug.layout, bug.model, bug.resumed)))
    return list(seen.values())


def key(bug, listed):
    """Of what decides a row: the patch, its flags, the shape."""
    what = (bug, listed.get(bug.name, ""), checks.SHAPE, list(checks.SEEDS))
    return hashlib.sha256(repr(what).encode()).hexdigest()[:10]


def read(path=CSV):
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != checks.COLUMNS:
            raise patches.Refused(f"{path}: its columns are not {','.join(checks.COLUMNS)}")
        return list(reader)


def write(path, rows, wanted):
    """In the order of bugs.py; what is not wanted any more goes."""
    rows = {row["text"]: row for row in rows}
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, checks.COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[each] for each in wanted if each in rows)


class Runs:
    """Programs and right runs, each made once."""

    def __init__(self, folder):
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.work, self.rights = patches.Work(self.folder), {}
        (self.folder / "programs").mkdir(exist_ok=True)
        shutil.rmtree(self.folder / "runs", ignore_errors=True)

    def program(self, name, texts):
        """Builds it with these texts of files."""
        to = self.folder / "programs" / name
        self.work.program(texts, to)
        return to

    def right(self, model):
        if model not in self.rights:
            folder = self.folder / f"runs/right-{len(self.rights)}"
            self.rights[model] = Right(self.right_program(), model, folder)
        return self.rights[model]

    def right_program(self):
        to = self.folder / "programs/right"
        return to if to.exists() else self.program("right", {})


class Right(checks.Right):
    def __init__(self, program, model, folder):
        folder.parent.mkdir(exist_ok=True)
        text(folder.parent)
        super().__init__(program, model, folder)


def text(folder):
    """The text whose targets are masked unevenly, beside the folders of the runs."""
    if not (folder / "text.bin").exists():
        references.masked_text(folder, (ROOT / "docs/data/corpus.txt").read_bytes())


def measure_all(chosen, listed, options):
    wanted = [key(bug, listed) for bug in controls() + bugs.RUN]
    rows, runs = read(options.csv), None
    known, errors = {row["text"] for row in rows}, 0
    for bug in chosen:
        digest = key(bug, listed)
        if digest in known and not options.names:
            continue
        runs = runs or Runs(options.work)
        try:
            program = runs.right_program() if bug.name == "right" else runs.program(
                bug.name, patches.changed(bug.name, listed[bug.name], runs.work.source))
            row = checks.cells(bug.name, digest, program, bug, runs.right(bug.model), runs.folder / "runs/bug")
        except (patches.Failed, checks.Failed, OSError) as error:
            errors += 1
            print(f"ERROR {bug.name}: {error}", file=sys.stderr, flush=True)
            continue
        rows = [each for each in rows if each["text"] != digest] + [{k: str(v) for k, v in row.items()}]
        write(options.csv, rows, wanted)
        print(" ".join(f"{k} {v}," for k, v in row.items() if k not in ("text", "flags")), flush=True)
    return 1 if errors else 0


def wrong(rows, listed):
    """What is wrong with the CSV, in lines."""
    wanted = {key(bug, listed): bug.name for bug in controls() + bugs.RUN}
    by_text = {row["text"]: row for row in rows}
    lines = [f"{name} has no row of its patch and layout: python3 docs/silent_bugs.py {name}"
             for text_, name in wanted.items() if text_ not in by_text]
    lines += [f"{row['bug']}: a row of another patch or layout" for row in rows if row["text"] not in wanted]
    for row in rows:
        if row["bug"] == "right" and any(checks.sees(row).values()):
            lines.append(f"the right program, {row['flags']}: seen by {[k for k, v in checks.sees(row).items() if v]}")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--csv", type=pathlib.Path, default=CSV)
    parser.add_argument("--page", type=pathlib.Path, default=page.PAGE)
    parser.add_argument("--work", type=pathlib.Path, default=ROOT / "build/silent")
    options = parser.parse_args()
    try:
        listed = listed_patches()
        if options.check or options.write:
            rows = read(options.csv)
            lines = wrong(rows, listed) or page.differs(options.page, rows, options.write)
            print("\n".join(lines) or f"{options.page.name}: its tables are those of {options.csv.name}")
            return 1 if lines else 0
        every = controls() + bugs.RUN
        if unknown := set(options.names) - {bug.name for bug in every}:
            raise patches.Refused(f"there is no bug {', '.join(sorted(unknown))} in docs/silent/bugs.py")
        return measure_all([bug for bug in every if not options.names or bug.name in options.names], listed, options)
    except (patches.Refused, patches.Failed, OSError) as error:
        print(f"silent_bugs.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
