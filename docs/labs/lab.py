#!/usr/bin/env python3
"""The labs of the course: write the body of a function, and have it graded.

    bash docs/lab.sh list                     all labs, and what you have
    bash docs/lab.sh start NAME [--again]     your file in build/lab/NAME/, and the clock; --again begins anew
        [--seed YOURS]                        a number or a name: conventions or sizes drawn for you (mesh-groups, ...)
    bash docs/lab.sh check NAME [--full]      compile it, link it in place of the course's own, print a score card;
                                              --full: also the chapter's other tests
        [--leaderboard FILE.csv --as YOU]     fit-70b: enters your best layout, by simulated tokens/s/GPU
    bash docs/lab.sh hint NAME [1|2|3]        the next hint, or this one
    bash docs/lab.sh solution NAME            the course's own body, and how yours differs
    bash docs/lab.sh student-tree FOLDER      a copy of this clone without bodies and solutions

    --json    check: the score card as JSON     --output          check: also all that the programs print
    --build FOLDER    the build folder (the checkout's build)

Exit code: 0 full marks, 1 less, 2 nothing to grade (unknown lab, no build, a file that does not compile).

A lab is a folder docs/labs/NAME with lab.json (its fields: docs/labs/README.md), task.md, hints.md (three sections
`## 1` to `## 3`), grade.cpp (test cases of its own) and wrong/*.inc (bodies that lose points: tests/test_labs.py). Its
body lies in a .cpp file of a chapter, between `// tag::lab-NAME[]` and `// end::lab-NAME[]`.
"""
import argparse
import difflib
import json
import os
import pathlib
import sys
import textwrap
import time

from grade import complete, grade
from lab_files import Lab, ROOT, Refused, all_labs, body_of
from teacher import enter, student_tree, unpack


def complain(message):
    print(f"lab.sh: {' '.join(str(message).split())}", file=sys.stderr)
    return 2


class Parser(argparse.ArgumentParser):
    def error(self, message):
        sys.exit(complain(f"{message} (bash docs/lab.sh help)"))


def number(value):
    if value is None:  # so JSON has it
        return "infinite or not a number"
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}" if isinstance(value, float) else str(value)


def figure_text(each):
    text = f"{each['what']}: {number(each['got'])}" + (f" {each['unit']}" if each["unit"] else "")
    if "bound" in each:
        return f"{text}, {each['bound']} {number(each['expected'])} ({each['formula']})"
    return text + ("" if each["good"] else f", expected {number(each['expected'])}") + f" = {each['formula']}"


def print_card(card):
    print(f"lab {card['lab']}" + (f", seed {card['seed']}" if "seed" in card else ""))
    if "error" in card:
        return print(card["error"])
    wide = max(len(row["row"]) for row in card["rows"])
    said = set()
    for row in card["rows"]:
        marks = f"{row['points']:2d} of {row['of']:2d}" if row["of"] else "passed  " if row["passed"] else "FAILED  "
        failed = row["points"] < row["of"] or not row.get("passed", True)
        shown = [figure_text(each) for each in row.get("measured", [])]
        repeated = row.get("found") in said
        if row.get("found"):
            shown = ["the same"] if repeated else row["found"].split("\n") + shown
            said.add(row["found"])
        if failed and not repeated:
            shown += textwrap.wrap(row.get("remark", ""), 96)
            shown += [f"read: {row['lesson']}"] if "remark" in row else []
        print(f"  {row['row']:<{wide}}  {marks}  {shown[0] if shown else ''}".rstrip())
        for line in shown[1:]:
            print(f"  {'':<{wide}}            {line}")
    full_tests = "" if all(row.get("passed", True) for row in card["rows"]) else "; the chapter's tests fail"
    print(f"  {card['points']} of {card['of']} points{full_tests}, {card['seconds']} s")
    if "place" in card:
        print(f"  leaderboard: place {card['place']}")
    if card.get("minutes") is not None:
        print(f"  clock: {card['minutes']} of {card['of_minutes']} minutes")
    if command := next((row["command"] for row in card["rows"] if row.get("command")), None):
        print(f"  by hand (gdb, prints): {command}")


def clock(lab):
    """Whole minutes since `start`; None for a file that came from elsewhere."""
    try:
        return int((time.time() - float((lab.folder / "started").read_text("utf-8"))) / 60)
    except (OSError, ValueError):
        return None


def list_labs(build):
    for chapter, name in all_labs():
        lab = Lab(name, build)
        state = ""
        if lab.file.is_file():
            try:
                card = json.loads((lab.folder / "card.json").read_text("utf-8"))
                state = f"{card['points']} of {card['of']} points"
            except (OSError, ValueError, KeyError, TypeError):  # not checked yet
                state = "started"
        print(f"{chapter:02d}  {name:<22} {lab.about['minutes']:>3} min  {lab.about['title']:<60} {state}".rstrip())


def start(lab, again):
    if lab.file.exists() and not again:
        raise Refused(f"{lab.show(lab.file)} exists: --again replaces it")
    lab.folder.mkdir(parents=True, exist_ok=True)
    for name in ("card.json", "hints"):
        (lab.folder / name).unlink(missing_ok=True)
    text = lab.blank()
    lab.file.write_text(text, "utf-8")
    (lab.folder / "started").write_text(str(time.time()), "utf-8")
    line = 1 + next((number for number, each in enumerate(text.split("\n")) if f"LAB {lab.name}" in each), 0)
    print(f"{lab.about['title']} (chapter {lab.about['chapter']:02d}, about {lab.about['minutes']} minutes)\n")
    print(lab.task())
    print(f"\nlesson  {lab.about['lesson']}\nfile    {lab.show(lab.file)}, line {line}\n"
          f"check   bash docs/lab.sh check {lab.name}")


def hint(lab, which):
    hints, seen = lab.hints(), lab.folder / "hints"
    try:
        count = int(seen.read_text("utf-8")) if seen.is_file() else 0
    except ValueError:
        raise Refused(f"{lab.show(seen)} is damaged: remove it") from None
    which = min(count + 1, len(hints)) if which is None else which
    if not 1 <= which <= len(hints):
        raise Refused(f"lab {lab.name} has hints 1 to {len(hints)}")
    if lab.folder.is_dir():
        seen.write_text(str(max(which, count)), "utf-8")
    print(f"hint {which} of {len(hints)}\n\n{hints[which - 1]}")


def solution(lab):
    if not (lab.of / "wrong").is_dir():
        raise Refused("this is a tree for students: your teacher has the solutions")
    if lab.puzzle:
        return print((lab.of / "solution.md").read_text("utf-8").strip())
    text = lab.source.read_text("utf-8")
    mine = lab.written() if lab.file.is_file() else None
    for tag in lab.tags():
        body = body_of(text, tag)[0]
        print(f"{lab.about['source']}, {tag}:\n\n{body}\n")
        if mine is not None:
            difference = list(difflib.unified_diff(body_of(mine, tag)[0].split("\n"), body.split("\n"), "yours",
                                                   "the course's", lineterm="", n=1))
            print("\n".join(map(str.rstrip, difference)) if difference else "yours is the same", end="\n\n")


def main():
    parser = Parser(prog="lab.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", nargs="?", choices="list start check hint solution student-tree unpack help".split())
    parser.add_argument("name", nargs="?")
    parser.add_argument("number", nargs="?", type=int)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build")
    parser.add_argument("--seed")
    parser.add_argument("--leaderboard", type=pathlib.Path)
    parser.add_argument("--as", dest="person", default="")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--output", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.verb in (None, "help"):
        print(textwrap.dedent(__doc__.split("\n\n", 1)[1].rsplit("\n\n", 1)[0]))
        return 0 if arguments.verb else 2
    build = pathlib.Path(os.path.abspath(arguments.build))
    try:
        if arguments.verb == "list":
            return list_labs(build)
        if arguments.verb == "unpack":
            return unpack(build)
        if not arguments.name:
            raise Refused(f"which lab? {', '.join(name for _, name in all_labs())}")
        if arguments.verb == "student-tree":
            return print(student_tree(pathlib.Path(arguments.name)))
        lab = Lab(arguments.name, build, arguments.seed)
        if arguments.verb == "start":
            return start(lab, arguments.again)
        if arguments.verb == "hint":
            return hint(lab, arguments.number)
        if arguments.verb == "solution":
            return solution(lab)
        card = grade(lab, arguments.full, arguments.output)
        card |= {"minutes": clock(lab), "of_minutes": lab.about["minutes"]}
        if card.get("compiles", True):
            (lab.folder / "card.json").write_text(json.dumps(card, indent=1) + "\n", "utf-8")
        if arguments.leaderboard:
            card["place"] = enter(lab, card, arguments.leaderboard, arguments.person)
    except Refused as refused:
        return complain(refused)
    print(json.dumps(card, indent=1)) if arguments.json else print_card(card)
    return 0 if complete(card) else 1 if card.get("compiles", True) else 2


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        sys.exit(complain(f"{error.filename}: {error.strerror} (is --build a folder that you may write?)"))
