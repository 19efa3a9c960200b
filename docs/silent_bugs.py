#!/usr/bin/env python3
"""Makes the bugs of docs/silent-bugs.md in this course's own program, one at a time, and records which check sees them.

    python3 docs/silent_bugs.py [NAME ...]     builds and runs what docs/results/silent_bugs.csv has not, or these again
    python3 docs/silent_bugs.py --check        the page's tables against the CSV, the CSV against the patches
    python3 docs/silent_bugs.py --write        writes these tables

A bug is a patch (docs/silent/patches) with a layout in which it shows (docs/silent/bugs.py). The rows "right" are
of the program without a patch, in each of these layouts. --work FOLDER: a clone of HEAD and its build, some minutes
the first time. Needs NumPy, git, cmake, ninja. Exit code 1 where the page is wrong, 2 for bad input.
"""

import argparse
import hashlib
import pathlib
import re
import shutil
import sys

sys.dont_write_bytecode = True
ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "docs/silent")]
from validate import comparison  # noqa: E402, F401  first: it finds the Python that has NumPy
import bugs  # noqa: E402
import checks  # noqa: E402
import page  # noqa: E402
import programs  # noqa: E402
import references  # noqa: E402
import tables  # noqa: E402

CSV, PATCHES = ROOT / "docs/results/silent_bugs.csv", ROOT / "docs/silent/patches"
TARGET = "08_3d_full"


def listed_patches():
    """{bug: its patch, without the words on top}."""
    listed = {path.stem: path.read_text("utf-8").partition("\n\n")[2] for path in PATCHES.glob("*.diff")}
    if set(listed) != {bug.name for bug in bugs.RUN}:
        raise checks.Failed(f"not both in {PATCHES.name} and bugs.py: {set(listed) ^ {bug.name for bug in bugs.RUN}}")
    return listed


def controls():
    """The right program, as a bug without a patch, in every layout."""
    seen = {}
    for bug in bugs.RUN:
        seen.setdefault((bug.layout, bug.model, bug.resumed), bugs.Bug("right", *(bug.layout, bug.model, bug.resumed)))
    return list(seen.values())


def key(bug, listed):
    """Of what decides a row: the lines that the patch changes, its flags, the shape."""
    changed = re.findall(r"^[-+](?!--|\+\+).*", listed.get(bug.name, ""), re.M)
    what = (bug, changed, checks.SHAPE, list(checks.SEEDS))
    return hashlib.sha256(repr(what).encode()).hexdigest()[:10]


def read(path=CSV):
    rows = tables.read(path) if path.exists() else []
    if rows and tuple(rows[0]) != checks.COLUMNS:
        raise checks.Failed(f"{path}: its columns are not {','.join(checks.COLUMNS)}")
    return rows


def command(what, *words):
    code, out, err = programs.run(words)
    if code:
        lines = (out + err).splitlines() or [f"exit code {code}"]
        found = next((line for line in lines if re.search(r"\berror\b", line, re.I)), lines[-1])
        raise checks.Failed(f"{what}: {found}")


class Runs:
    """A clone of HEAD and its build folder, which the next patch uses again, and the next time. Right runs, made once."""

    def __init__(self, folder):
        self.folder, self.rights = folder.resolve(), {}
        self.source, self.build = self.folder / "source", self.folder / "build"
        for name in ("programs", "runs"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
            (self.folder / name).mkdir(parents=True)
        references.masked_text(self.folder / "runs", (ROOT / "docs/data/corpus.txt").read_bytes())
        if not self.source.exists():
            command("git clone", "git", "clone", "--quiet", "--no-checkout", ROOT, self.source)
        command("git fetch", "git", "-C", self.source, "fetch", "--quiet", ROOT, "HEAD")
        command("git checkout", "git", "-C", self.source, "checkout", "--quiet", "--force", "--detach", "FETCH_HEAD")
        generator = [] if (self.build / "CMakeCache.txt").exists() else ["-G", "Ninja"]
        command("cmake", "cmake", "-S", self.source, "-B", self.build, "-DTRAIN70B_CUDA=OFF", *generator)

    def program(self, name):
        """The program with the bug of that name, or the right one, built once. The sources are then as they were."""
        to = self.folder / "programs" / name
        if to.exists():
            return to
        patch = [] if name == "right" else [PATCHES / f"{name}.diff"]
        apply = ["git", "-C", self.source, "apply", *patch]
        if patch:
            command(f"{name} does not apply", *apply)
        try:
            command(f"{name} does not build", "cmake", "--build", self.build, "--target", TARGET)
            return shutil.copy(self.build / "bin" / TARGET, to)
        finally:
            if patch:
                command(f"{name} stays applied", *apply, "--reverse")

    def right(self, model):
        if model not in self.rights:
            folder = self.folder / f"runs/right-{len(self.rights)}"
            self.rights[model] = checks.Right(self.program("right"), model, folder)
        return self.rights[model]


def measure_all(chosen, listed, options):
    wanted = [key(bug, listed) for bug in controls() + bugs.RUN]  # other rows go
    by_text, runs, errors = {row["text"]: row for row in read(options.csv)}, None, 0
    for bug in chosen:
        digest = key(bug, listed)
        if digest in by_text and not options.names:
            continue
        runs = runs or Runs(options.work)
        try:
            program, right = runs.program(bug.name), runs.right(bug.model)
            row = checks.cells(bug.name, digest, program, bug, right, runs.folder / "runs/bug")
        except (checks.Failed, OSError) as error:
            errors += 1
            print(f"ERROR {bug.name}: {error}", file=sys.stderr, flush=True)
            continue
        by_text[digest] = row
        tables.write(options.csv, [by_text[each] for each in wanted if each in by_text], checks.COLUMNS)
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
    parser.add_argument("--work", type=pathlib.Path, default=ROOT / "build/silent")
    options = parser.parse_args()
    try:
        listed = listed_patches()
        if options.check or options.write:
            rows = read(options.csv)
            lines = wrong(rows, listed) or page.differs(rows, options.write)
            print("\n".join(lines) or f"{page.PAGE.name}: its tables are those of {options.csv.name}")
            return 1 if lines else 0
        every = controls() + bugs.RUN
        if unknown := set(options.names) - {bug.name for bug in every}:
            raise checks.Failed(f"there is no bug {', '.join(sorted(unknown))} in docs/silent/bugs.py")
        return measure_all([bug for bug in every if not options.names or bug.name in options.names], listed, options)
    except (checks.Failed, OSError) as error:
        print(f"silent_bugs.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    programs.start(main)
