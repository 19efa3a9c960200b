#!/usr/bin/env python3
"""Holds the labs to what they promise (docs/labs): the blank file gets nothing and a line that helps, the shipped body
full marks, and each wrong body loses the marks that lab.json says, no others, with its remark.

    python3 tests/labs.py BUILD_FOLDER [NAME ...]

One lab per commit; all of them with tests/run.sh --all (TRAIN70B_TEST_SLICE, tests/support.h). What a student has
written in BUILD_FOLDER/lab is put aside and back.
"""
import contextlib
import io
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs/labs"))
import grade  # noqa: E402
import lab as labs  # noqa: E402
import lab_files  # noqa: E402

grade.ROW_SECONDS = 60  # the machine may be busy with other things


class Verdicts:
    def __init__(self):
        self.failed = 0

    def __call__(self, what, wrong, seconds):
        self.failed += bool(wrong)
        print(f"{'FAILED' if wrong else 'ok    '} {what} ({seconds:.1f} s)" + (f": {wrong}" if wrong else ""), flush=True)


def card_text(card):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        labs.print_card(card)
    return " ".join(text.getvalue().split())


def with_body(lab, text):
    """The shipped file with the regions of `text`, or with `text` as the body of its only region."""
    shipped = lab.source.read_text()
    found = lab_files.regions(text)
    if not found:
        return lab_files.replace(shipped, lab.tags()[0], textwrap.indent(text.rstrip("\n"), "    "))
    for tag, begin, end in found:
        shipped = lab_files.replace(shipped, tag, "\n".join(text.split("\n")[begin:end]))
    return shipped


def blank_fails(lab):
    card = grade.grade(lab, False)
    if card["points"] != 0 or grade.complete(card) or "nothing is written yet" not in card.get("error", ""):
        return f"the blank file: {card_text(card)}"
    # The blank body also fails where it is compiled: one written region of two, or a comment added.
    if lab.puzzle:
        return ""
    lab.file.write_text(lab.blank() + "// begun\n")
    card = grade.grade(lab, False)
    if card["points"] == card["of"] or not any("not written yet" in row.get("found", "") or "not written yet" in
                                               row.get("remark", "") for row in card["rows"]):
        return f"the blank body: {card_text(card)}"
    return ""


def shipped_passes(lab):
    lab.file.write_text((lab.of / "solution.txt" if lab.puzzle else lab.source).read_text())
    card = grade.grade(lab, False)
    if not grade.complete(card) or card["points"] == 0:
        return card_text(card)
    states = re.search(r"(\S+ GB) of parameters, gradients and optimizer states", str(card["rows"]))
    if states and states[1] not in (lab.of / "solution.md").read_text():
        return f"solution.md does not have the {states[0]} of the largest rank"
    return ""


def wrong_fails(lab, name, promise):
    text = (lab.of / "wrong" / f"{name}.inc").read_text()
    lab.file.write_text(text if lab.puzzle else with_body(lab, text))
    card = grade.grade(lab, False)
    shown = card_text(card)
    lost = [row["row"] for row in card["rows"] if row["points"] < row["of"]]
    if "error" in card or lost != promise["loses"] or not 0 < card["points"] < card["of"]:
        return f"loses {lost}, not {promise['loses']}: {shown}"
    return "" if promise["says"] in shown else f"does not say \"{promise['says']}\": {shown}"


def puzzle_refuses(lab, text, says):
    lab.file.write_text(text + "\n")
    try:
        grade.grade(lab, False)
    except lab_files.Refused as refused:
        return "" if says in str(refused) and "\n" not in str(refused) else f"does not say \"{says}\": {refused}"
    return "is not refused"


def check_lab(lab, verdict):
    if len(lab.hints()) != 3:
        verdict(f"{lab.name}: hints", f"{len(lab.hints())} hints, not 3", 0)
    if len(lab.about["wrong"]) < 3:
        verdict(f"{lab.name}: wrong bodies", f"{len(lab.about['wrong'])}, not 3", 0)
    lab.folder.mkdir(parents=True, exist_ok=True)
    lab.file.write_text(lab.blank())
    steps = [("blank", lambda: blank_fails(lab)), ("shipped", lambda: shipped_passes(lab))]
    steps += [(f"wrong: {name}", lambda name=name, promise=promise: wrong_fails(lab, name, promise))
              for name, promise in lab.about["wrong"].items()]
    steps += [(f"refused: {text}", lambda text=text, says=says: puzzle_refuses(lab, text, says))
              for text, says in lab.about.get("refused", {}).items()]
    for what, step in steps:
        began = time.monotonic()
        try:
            wrong = step()
        except lab_files.Refused as refused:
            wrong = str(refused)
        verdict(f"{lab.name}, {what}", wrong, time.monotonic() - began)


def says(command, *parts):
    done = subprocess.run(["bash", "docs/lab.sh", *command], cwd=ROOT, capture_output=True, text=True)
    good = done.returncode == 2 and done.stderr.count("\n") == 1 and all(part in done.stderr for part in parts)
    return "" if good else f"exit code {done.returncode}: {done.stderr}"


def said_of_build(folder, *lines):
    """What is said where cmake prints these lines and fails."""
    (folder / "CMakeCache.txt").write_text("")
    (folder / "cmake").write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join(lines) + "\nEND\nexit 1\n")
    (folder / "cmake").chmod(0o755)
    path = os.environ["PATH"]
    os.environ["PATH"] = f"{folder}:{path}"
    try:
        return grade.compile_target(lab_files.Lab("zigzag", folder), "lab_zigzag") or ""
    except lab_files.Refused as refused:
        return f"refused: {refused}"
    finally:
        os.environ["PATH"] = path


def expected_in(text, *parts):
    missing = [part for part in parts if part not in text]
    return f"no {missing} in: {text}" if missing else ""


def check_tools(verdict, folder):
    """The grader itself: bad input, an old build folder, a test that fails, a program that does not end."""
    began = time.monotonic()
    (folder / "file").write_text("")
    (folder / "lab/zigzag").mkdir(parents=True)
    (folder / "lab/zigzag/hints").write_text("two")
    for what, wrong in (
            ("a name of two lines", says(["start", "zig\nzag"], "there is no lab zig zag")),
            ("--build FILE", says(["start", "zigzag", "--build", folder / "file"],
                                  "Not a directory (is --build a folder")),
            ("--build /proc", says(["start", "zigzag", "--build", "/proc"], "/proc/lab: ", "is --build a folder")),
            ("damaged hints", says(["hint", "zigzag", "--build", folder], "hints is damaged: remove it")),
            ("a library that is gone", expected_in(
                said_of_build(folder, "[1/2] Linking", "/usr/bin/ld: cannot find -lopenblas", "collect2: error: ld "
                              "returned 1 exit status"), "refused: ", "cannot find -lopenblas", "rm -r ")),
            ("a build folder of another time", expected_in(
                said_of_build(folder, "ninja: error: manifest 'build.ninja' still dirty after 100 tries"),
                "refused: ", "still dirty", "rm -r ")),
            ("a failed expectation", expected_in(
                grade.of_doctest(DOCTEST), "\"every schedule\" fails: 2 is not 1 (1f1b, 3 stages, rank 0)")),
            ("a failed expectation without values", expected_in(
                grade.of_doctest("TEST CASE:  one\nx.cpp:1: ERROR: CHECK( good(x) ) is NOT correct!\n  values: CHECK( "
                                "false )\n"), "\"one\" fails: good(x) does not hold"))):
        verdict(f"lab.sh, {what}", wrong, time.monotonic() - began)
    began = time.monotonic()
    forks = "import os, time\nprint(1, flush=True)\nif not os.fork():\n os.setsid(); print(os.getpid(), flush=True); " \
            "time.sleep(40)"
    code, output = grade.run([sys.executable, "-c", forks], 1)
    seconds = time.monotonic() - began
    ended = code is None and output.startswith("1\n") and seconds < 20
    verdict("lab.sh, a child that keeps stdout open", "" if ended else f"{code} after {seconds:.1f} s: {output}", seconds)
    with contextlib.suppress(OSError, IndexError, ValueError):
        os.kill(int(output.split()[1]), signal.SIGKILL)


DOCTEST = """
TEST CASE:  every schedule

05_schedule.cpp:51: ERROR: CHECK( in_flight(schedule, rank) == in_flight_formula(schedule, rank) ) is NOT correct!
  values: CHECK( 2 == 1 )
  logged: 1f1b, 3 stages
          rank 0

"""


def one_of(names):
    """Of an eighth's labs the one whose turn it is: the commit says, by the digits that have not chosen the eighth."""
    seed = int(os.environ.get("EMULATE_SEED", "1"))  # tests/run.sh: commit % 1000 + 1
    return names[max(seed - 1, 0) // 8 % len(names)]


def main():
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 2
    build, names = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2:]
    share = os.environ.get("TRAIN70B_TEST_SLICE", "0")
    every = [name for _, name in lab_files.all_labs()]
    chosen = names or (every if share == "all" else [one_of(every[int(share) % 8::8])])
    verdict = Verdicts()
    with tempfile.TemporaryDirectory() as folder:
        check_tools(verdict, pathlib.Path(folder))
    for name in chosen:
        lab, aside = lab_files.Lab(name, build), build / "lab" / f"{name}.aside"
        if lab.folder.exists():
            shutil.rmtree(aside, ignore_errors=True)
            lab.folder.rename(aside)
        try:
            check_lab(lab, verdict)
        finally:
            shutil.rmtree(lab.folder, ignore_errors=True)
            if aside.exists():
                aside.rename(lab.folder)
    print(f"{verdict.failed} failures" if verdict.failed else f"{len(chosen)} of {len(every)} labs are graded as promised")
    return 1 if verdict.failed else 0


if __name__ == "__main__":
    sys.exit(main())
