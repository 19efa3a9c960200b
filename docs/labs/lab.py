#!/usr/bin/env python3
"""The labs of the course: write the body of a function, and have it graded.

    bash docs/lab.sh list                     all labs, and what you have
    bash docs/lab.sh start NAME [--again]     your file in build/lab/NAME/; --again begins anew
    bash docs/lab.sh check NAME [--full]      compile it, link it in place of the course's own, print a score card;
                                              --full: also the chapter's other tests
    bash docs/lab.sh hint NAME [1|2|3]        the next hint, or this one
    bash docs/lab.sh solution NAME            the course's own body, and how yours differs

    --json    check: the score card as JSON     --output          check: also all that the programs print
    --build FOLDER    the build folder (build)

Exit code: 0 full marks, 1 less, 2 nothing to grade (unknown lab, no build, a file that does not compile).

A lab is a folder docs/labs/NAME with lab.json (its fields: docs/labs/README.md), task.md, hints.md (three sections
`## 1` to `## 3`), grade.cpp (test cases of its own) and wrong/*.inc (bodies that must lose points: tests/labs.py). Its
body lies in a .cpp file of a chapter, between `// tag::lab-NAME[]` and `// end::lab-NAME[]`.
"""
import argparse
import difflib
import json
import os
import pathlib
import re
import resource
import shlex
import signal
import subprocess
import sys
import textwrap
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
LABS = ROOT / "docs/labs"
MARKER = re.compile(r"^\s*// (tag|end)::([a-z0-9-]+)\[\]\s*$")
FULL_SECONDS = 900
MOST_MEMORY = 8 << 30  # bytes of addresses
ROW_SECONDS = 10  # more is a hang


class Refused(Exception):
    """One line for the user; exit code 2."""


def complain(message):
    print(f"lab.sh: {' '.join(str(message).split())}", file=sys.stderr)
    return 2


class Parser(argparse.ArgumentParser):
    def error(self, message):
        sys.exit(complain(f"{message} (bash docs/lab.sh help)"))


# ---- a lab's own files ----

def all_labs():
    return sorted((json.loads(path.read_text())["chapter"], path.parent.name) for path in LABS.glob("*/lab.json"))


class Lab:
    def __init__(self, name, build):
        names = [each for _, each in all_labs()]
        if name not in names:
            raise Refused(f"there is no lab {name}; the labs are: {', '.join(names)}")
        self.name, self.build, self.of = name, build, LABS / name
        self.about = json.loads((self.of / "lab.json").read_text())
        self.folder = build / "lab" / name
        self.source = ROOT / self.about["source"]  # of a puzzle: the file that `start` copies
        self.file = self.folder / self.source.name
        self.puzzle = "grader" in self.about

    def show(self, path):
        try:
            return str(path.relative_to(pathlib.Path.cwd()))
        except ValueError:
            return str(path)

    def task(self):
        return (self.of / "task.md").read_text().strip()

    def hints(self):
        return [part.strip("\n") for part in re.split(r"^## \d\n", (self.of / "hints.md").read_text(), flags=re.M)[1:]]

    def tags(self):
        return [name for name, _, _ in regions(self.source.read_text()) if self.owns(name)]

    def owns(self, tag):
        return tag == f"lab-{self.name}" or tag.startswith(f"lab-{self.name}-")

    def blank(self):
        """The shipped source with this lab's bodies removed, the task in the place of the first."""
        if self.puzzle:  # a text file in which # begins a comment
            task = [f"LAB {self.name}", ""] + self.task().split("\n")
            return "\n".join(f"# {line}".rstrip() for line in task) + "\n" + self.source.read_text()
        text, first = self.source.read_text(), True
        for tag in self.tags():
            indent = body_of(text, tag)[1]
            what = tag.removeprefix(f"lab-{self.name}").lstrip("-") or "the body"
            lines = [f"// LAB {self.name}: {what}"]
            if first:
                lines += ["//"] + [f"// {line}".rstrip() for line in self.task().split("\n")]
            lines.append(self.about.get("blank", {}).get(tag) or f'CHECK(false, "{what} is not written yet");')
            text = replace(text, tag, textwrap.indent("\n".join(lines), indent))
            first = False
        return text

    def written(self):
        if not self.file.is_file():
            raise Refused(f"lab {self.name} has not been started: bash docs/lab.sh start {self.name}")
        try:
            return self.file.read_text()
        except UnicodeDecodeError:
            raise Refused(f"{self.show(self.file)} is no text: start --again begins anew") from None


def regions(text):
    """[(name, line of its first line, line behind its last)], from 0."""
    open_at, found = {}, []
    for number, line in enumerate(text.split("\n")):
        if marker := MARKER.match(line):
            if marker[1] == "tag":
                open_at[marker[2]] = number + 1
            elif marker[2] in open_at:
                found.append((marker[2], open_at.pop(marker[2]), number))
    return sorted(found, key=lambda each: each[1])


def body_of(text, tag):
    """The lines of a region without the markers in it, and their indentation."""
    for name, begin, end in regions(text):
        if name == tag:
            lines = [line for line in text.split("\n")[begin:end] if not MARKER.match(line)]
            code = [line for line in lines if line.strip() and not line.startswith("#")]
            indent = min((len(line) - len(line.lstrip()) for line in code), default=0)
            return "\n".join(lines), " " * indent
    raise Refused(f"the markers // tag::{tag}[] and // end::{tag}[] are gone from the file: "
                  "put them around your body again, or start --again")


def replace(text, tag, body):
    for name, begin, end in regions(text):
        if name == tag:
            lines = text.split("\n")
            return "\n".join(lines[:begin] + body.split("\n") + lines[end:])
    raise Refused(f"no region {tag}")


# ---- compile and run ----

def compile_target(lab, target):
    """None, or the compiler's first error."""
    if not (lab.build / "CMakeCache.txt").is_file():
        raise Refused(f"{lab.show(lab.build)} is no build folder: run `bash tests/setup.sh` first")
    done = subprocess.run(["cmake", "--build", str(lab.build), "-j", str(os.cpu_count()), "--target", target],
                          capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    if done.returncode == 0:
        return None
    lines = (done.stdout + done.stderr).split("\n")
    if any("unknown target" in line or "No rule to make target" in line for line in lines):
        raise Refused(f"{lab.show(lab.build)} does not know this lab: run `cmake -S . -B {lab.show(lab.build)}` again")
    own = re.compile(rf"^\S*lab/{re.escape(lab.name)}/{re.escape(lab.file.name)}(?=:)")
    for number, line in enumerate(lines):
        if re.search(r":\d+(:\d+)?: (fatal )?error: ", line):
            shown = [own.sub(lab.show(lab.file), line)]
            if own.match(line):
                shown += [each for each in lines[number + 1:number + 3] if re.match(r"\s*(\d+ )?\|", each)]
            else:  # in a header: where the student's file comes to it
                shown += [own.sub(lab.show(lab.file), each) for each in lines[number + 1:] if own.match(each)][:1]
            return "\n".join(shown)
    for line in lines:
        if "undefined reference" in line or "multiple definition" in line:
            return "linker: " + re.sub(r"^.*?: (?=undefined|multiple)", "", line)
    # Not the student's fault. "ld returned 1 exit status" alone says nothing: the line before it does.
    said = [line for line in lines if line.strip()] or [f"exit code {done.returncode}"]
    at = next((number for number, line in enumerate(said) if "error" in line.lower()), len(said) - 1)
    what = said[max(0, at - 1):at + 1] if "ld returned" in said[at] else said[at:at + 1 + said[at].startswith("CMake")]
    raise Refused(f"{lab.show(lab.build)} does not build: {': '.join(map(str.strip, what))} (an old build folder? "
                  f"rm -r {lab.show(lab.build)}, then bash tests/setup.sh)")


def environment():
    return {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1",
            "OMPI_MCA_btl_vader_single_copy_mechanism": "none", "GOMP_SPINCOUNT": "1000", "CUDA_VISIBLE_DEVICES": ""}


def limit_memory():  # of each process: an endless push_back must not make the machine swap
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))


def run(command, seconds=None):
    """(exit code or None after `seconds` or ROW_SECONDS, its output). A child that has left the group and keeps stdout
    open is not waited for."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
                               errors="replace", env=environment(), start_new_session=True, preexec_fn=limit_memory)
    for patience, signal_after in ((seconds or ROW_SECONDS, signal.SIGTERM), (2, signal.SIGKILL), (2, None)):
        try:
            output = process.communicate(timeout=patience)[0]
            return process.returncode if signal_after == signal.SIGTERM else None, output
        except subprocess.TimeoutExpired as late:  # SIGTERM: each rank prints in which operation it waits
            output = (late.output or b"").decode(errors="replace")
            if signal_after:
                os.killpg(process.pid, signal_after)  # a group of its first process, which nobody has waited for
    process.stdout.close()
    process.wait()
    return None, output


def test_program(name, ranks, cases=()):
    """The command that runs these test cases, or all."""
    command = [name, "--no-colors=1"]
    command += ["-tc=" + ",".join(case.replace(",", "\\,") for case in cases)] if cases else []
    return (["mpirun", "--oversubscribe", "-q", "-np", str(ranks)] if ranks else []) + command


def of_doctest(output):
    """What the first failed expectation says: the test case, the expression with its values, what was logged."""
    lines = output.split("\n")
    at = next((number for number, line in enumerate(lines) if "ERROR: " in line), None)
    if at is None:
        return ""
    case = next((line.split("TEST CASE:", 1)[1].strip() for line in reversed(lines[:at]) if "TEST CASE:" in line), "")
    end = next((number for number in range(at, len(lines)) if not lines[number].strip()), len(lines))
    text = re.sub(r"^.*ERROR: ", "", lines[at])
    values = " ".join(line.split("values:")[1].strip() for line in lines[at:end] if "values:" in line)
    values = re.sub(r"^(?:CHECK|REQUIRE)\( (.*) \)$", r"\1", values)
    logged = next((number for number in range(at, end) if "logged:" in lines[number]), end)
    notes = ", ".join(line.replace("logged:", "").strip() for line in lines[logged:end])
    expected = re.fullmatch(r"(.+) (?:== |(<= |< |>= |> |!= ))(.+)", values)
    if "THREW" in text:
        text = re.sub(r"test case THREW", "threw", text) + " " + " ".join(each.strip() for each in lines[at + 1:end])
    elif "everywhere(" in text or values in ("true", "false") or not values:
        text = "" if notes else re.sub(r"^(?:CHECK|REQUIRE)\( (.*) \) is NOT correct!$", r"\1 does not hold", text)
    elif expected:
        text = f"{expected[1]} is not {expected[2] or ''}{expected[3]}"
    else:
        text = f"{values} does not hold"
    return f"the test \"{case}\" fails: " + text + (f" ({notes})" if notes and text else notes)


def shorten(text, most=300):
    return text if len(text) <= most else text[:most - 3] + "..."


def what_went_wrong(code, output):
    """(text, whether the rows' remark still fits): the lines of a failed program that say most."""
    lines = output.split("\n")
    own = [line[7:] for line in lines if line.startswith("found: ")]
    disagree = next((number for number, line in enumerate(lines) if line.startswith("mismatch: ")), None)
    checks = [re.sub(r"^rank \d+: check failed: (false: )?", "", line) for line in lines if "check failed: " in line]
    crashed = re.search(r"CRASHED: (SIG\w+)", output)
    if code is None:
        waiting = [line for line in lines if "NOT ENDED" in line]
        text = (f"did not end within {ROW_SECONDS} s: "
                "an endless loop, or a rank that waits for a message that no rank sends")
        return "\n".join([text, *map(shorten, waiting[:4])]), False
    if own:
        return shorten(own[0]), True
    if disagree is not None:
        return "\n".join(map(shorten, [lines[disagree]] + [line for line in lines[disagree + 1:disagree + 5]
                                                           if line.startswith("rank ")])), False
    if checks:
        return shorten(checks[0]), "not written yet" not in checks[0]
    if crashed or code in (139, -11, 136, -8, 134, -6):
        why = crashed[1] if crashed else f"exit code {code}"
        return f"crashes ({why}): an access outside of a tensor, or one without data", False
    ranks = [line.strip() for line in lines if re.match(r"\s+rank \d+: ", line)]
    if ranks:
        return shorten(ranks[0]), True
    return shorten(of_doctest(output)) or f"ended with exit code {code}", "threw" not in of_doctest(output)


def run_row(lab, row, program, show_output):
    """A row of the score card."""
    cases = row["cases"]
    command = test_program(str(program), row.get("ranks"), cases)
    code, output = run(command)
    if show_output:
        print(f"---- {row['row']}\n{output}")
    card = {"row": row["row"], "points": 0, "of": row["points"], "lesson": row["lesson"]}
    measured = [json.loads(line[5:]) for line in output.split("\n") if line.startswith("lab: {")]
    card["measured"] = [{key: value for key, value in each.items() if key != "remark"} for each in measured]
    ran = re.search(r"test cases: +(\d+)", output)
    if code == 0 and ran and int(ran[1]) < len(cases):
        raise Refused(f"lab {lab.name}, {row['row']}: the program has {ran[1]} of the {len(cases)} test cases {cases}")
    if code == 0 and ran:
        return {**card, "points": row["points"]}
    wrong = [each for each in measured if not each["good"]]
    remarks = [each["remark"] for each in wrong if each["remark"]]
    found, remark_fits = what_went_wrong(code, output)
    card["hung"] = code is None
    card["command"] = shlex.join(test_program(lab.show(program), row.get("ranks"), cases))
    if not wrong or not remark_fits:
        card["found"] = found
    if wrong or remark_fits:
        card["remark"] = remarks[0] if remarks else row.get("remark", "")
    return card


def graded_by_script(lab):
    done = subprocess.run([sys.executable, str(lab.of / lab.about["grader"]), str(lab.build), str(lab.file)],
                          capture_output=True, text=True, env=environment(), cwd=ROOT)
    if done.returncode == 2:
        raise Refused(done.stderr.strip())
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


def grade(lab, full, show_output=False):
    """The score card: {"lab", "points", "of", "rows", "seconds"} or {"lab", "error"}."""
    began = time.monotonic()
    text = lab.written()
    rows = lab.about["rows"] if not lab.puzzle else []
    card = {"lab": lab.name, "points": 0, "of": sum(row["points"] for row in rows) or 10, "rows": []}
    if text == lab.blank():
        line = 1 + next((number for number, each in enumerate(text.split("\n")) if f"LAB {lab.name}" in each), 0)
        card["error"] = f"nothing is written yet: the task is in {lab.show(lab.file)}, line {line}"
        return card
    if lab.puzzle:
        card["rows"] = graded_by_script(lab)
    else:
        for tag in lab.tags():
            body_of(text, tag)  # the markers are still there
        target = "lab_" + lab.name.replace("-", "_")
        if error := compile_target(lab, target):
            return {**card, "error": error, "compiles": False}
        hung = None
        for row in rows:
            if hung:
                card["rows"].append({"row": row["row"], "points": 0, "of": row["points"], "lesson": row["lesson"],
                                     "found": f"not run, because \"{hung}\" did not end"})
                continue
            card["rows"].append(run_row(lab, row, lab.build / "bin" / target, show_output))
            hung = row["row"] if card["rows"][-1].get("hung") else None
        if full and not hung:
            for test in lab.about["full"]:
                if error := compile_target(lab, f"{target}_{test['test']}"):
                    return {**card, "error": error, "compiles": False}
                program = lab.build / "bin" / f"{target}_{test['test']}"
                code, output = run(test_program(str(program), test.get("ranks")), FULL_SECONDS)
                found = {}
                if code != 0:
                    found = {"found": what_went_wrong(code, output)[0],
                             "command": shlex.join(test_program(lab.show(program), test.get("ranks")))}
                card["rows"].append({"row": f"tests/{test['test']}.cpp", "points": 0, "of": 0, "passed": code == 0,
                                     "lesson": lab.about["lesson"], **found})
    card["points"] = sum(row["points"] for row in card["rows"])
    card["of"] = sum(row["of"] for row in card["rows"])
    card["seconds"] = round(time.monotonic() - began, 1)
    return card


def complete(card):
    return "error" not in card and card["points"] == card["of"] and all(row.get("passed", True) for row in card["rows"])


# ---- what the user sees ----

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
    print(f"lab {card['lab']}")
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
    if command := next((row["command"] for row in card["rows"] if row.get("command")), None):
        print(f"  by hand (gdb, prints): {command}")


def list_labs(build):
    for chapter, name in all_labs():
        lab = Lab(name, build)
        state = ""
        if lab.file.is_file():
            last = lab.folder / "card.json"
            try:
                card = json.loads(last.read_text())
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
    lab.file.write_text(text)
    line = 1 + next((number for number, each in enumerate(text.split("\n")) if f"LAB {lab.name}" in each), 0)
    print(f"{lab.about['title']} (chapter {lab.about['chapter']:02d}, about {lab.about['minutes']} minutes)\n")
    print(lab.task())
    print(f"\nlesson  {lab.about['lesson']}\nfile    {lab.show(lab.file)}, line {line}\n"
          f"check   bash docs/lab.sh check {lab.name}")


def hint(lab, which):
    hints, seen = lab.hints(), lab.folder / "hints"
    try:
        count = int(seen.read_text()) if seen.is_file() else 0
    except ValueError:
        raise Refused(f"{lab.show(seen)} is damaged: remove it") from None
    which = min(count + 1, len(hints)) if which is None else which
    if not 1 <= which <= len(hints):
        raise Refused(f"lab {lab.name} has hints 1 to {len(hints)}")
    if lab.folder.is_dir():
        seen.write_text(str(max(which, count)))
    print(f"hint {which} of {len(hints)}\n\n{hints[which - 1]}")


def solution(lab):
    if lab.puzzle:
        return print((lab.of / "solution.md").read_text().strip())
    text = lab.source.read_text()
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
    parser.add_argument("verb", nargs="?", choices=("list", "start", "check", "hint", "solution", "help"))
    parser.add_argument("name", nargs="?")
    parser.add_argument("number", nargs="?", type=int)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build")
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
        if not arguments.name:
            raise Refused(f"which lab? {', '.join(name for _, name in all_labs())}")
        lab = Lab(arguments.name, build)
        if arguments.verb == "start":
            return start(lab, arguments.again)
        if arguments.verb == "hint":
            return hint(lab, arguments.number)
        if arguments.verb == "solution":
            return solution(lab)
        card = grade(lab, arguments.full, arguments.output)
        if card.get("compiles", True):
            (lab.folder / "card.json").write_text(json.dumps(card, indent=1) + "\n")
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
