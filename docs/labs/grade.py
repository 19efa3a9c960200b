"""Compiles a lab, runs its programs, and makes the score card."""
import json
import os
import re
import resource
import shlex
import subprocess
import sys
import time

from lab_files import FULL_SECONDS, MOST_MEMORY, ROOT, ROW_SECONDS, Refused, body_of
import programs  # lab_files has set the path

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

def compile_target(lab, target):
    """None, or the compiler's first error."""
    if not (lab.build / "CMakeCache.txt").is_file():
        raise Refused(f"{lab.show(lab.build)} is no build folder: run `bash tests/setup.sh` first")
    done = subprocess.run(["cmake", "--build", str(lab.build), "-j", str(os.cpu_count()), "--target", target],
                          capture_output=True, encoding="utf-8", errors="replace", env={**os.environ, "LC_ALL": "C"})
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


def run(command, seconds=None):
    """(exit code or None after `seconds` or ROW_SECONDS, its output). At SIGTERM each rank prints where it waits."""
    def limit():  # memory of each process: an endless push_back must not make the machine swap
        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    code, output, _ = programs.run(command, seconds or ROW_SECONDS, ENVIRONMENT, stderr=subprocess.STDOUT, cwd=ROOT,
                                   preexec_fn=limit)
    return code, output


def drawn(lab):
    """What a seed has drawn, before a grader's command."""
    values = lab.drawn().items()
    return ["env", *(f"LAB_{name.upper()}={value}" for name, value in values)] if values else []


def test_program(name, ranks, cases=()):
    """The command that runs these test cases, or all."""
    command = [name, "--no-colors=1"]
    command += ["-tc=" + ",".join(case.replace(",", "\\,") for case in cases)] if cases else []
    return (programs.mpirun(ranks, "-q") if ranks else []) + command


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
    command = drawn(lab) + test_program(str(program), row.get("ranks"), cases)
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
    card["command"] = shlex.join(drawn(lab) + test_program(lab.show(program), row.get("ranks"), cases))
    if not wrong or not remark_fits:
        card["found"] = found
    if wrong or remark_fits:
        card["remark"] = remarks[0] if remarks else row.get("remark", "")
    return card


def graded_by_script(lab, *more):
    grader = [*drawn(lab), sys.executable, lab.of / lab.about["grader"], lab.build, lab.file, *more]
    code, output, errors = programs.run(grader, environment=ENVIRONMENT, cwd=ROOT)
    if code == 2:
        raise Refused(errors.strip())
    if code != 0:
        raise RuntimeError(errors)
    return json.loads(output)


def grade(lab, full, show_output=False):
    """The score card: {"lab", "points", "of", "rows", "seconds"} or {"lab", "error"}."""
    began = time.monotonic()
    text = lab.written()
    without = lab.about["drawn"]["without"] if lab.drawn() else []
    rows = [row for row in lab.about["rows"] if row["row"] not in without] if not lab.puzzle else []
    if full and lab.drawn():
        raise Refused("--full: the chapter's tests are of the course's own conventions, not of a seed's")
    card = {"lab": lab.name, "points": 0, "of": sum(row["points"] for row in rows) or 10, "rows": []}
    card |= {"seed": lab.seed, "drawn": lab.drawn()} if lab.seed else {}
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
