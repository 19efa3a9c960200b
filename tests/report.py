#!/usr/bin/env python3
"""What tests/run.sh says at its end.

    python3 tests/report.py unit [BEFORE]                      CPU seconds of one unit now; the mean with an earlier one
    python3 tests/report.py budgets UNIT BUILD... <PARTS       seconds and units of each part against tests/budgets.txt
    python3 tests/report.py skipped TIER BUILD... <LINES       what was not run, and why
    python3 tests/report.py write UNIT BUILD                   the CPU seconds of the tests, to tests/README.md
    python3 tests/report.py --self-test

PARTS: lines of BUDGET SECONDS CPU_SECONDS NAME; BUDGET - : none. Exit code 1: a part used more than its budget.
"""
import collections
import pathlib
import re
import resource
import subprocess
import sys

TESTS = pathlib.Path(__file__).resolve().parent
TOLERANCE = 1.15
SKIPPED = re.compile(r"^.*?(?:NOT TESTED|skipped|not tested): (.*?)\)?$", re.M)


def unit(before=None):
    start = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(["g++", "-std=c++20", "-O2", "-c", TESTS / "unit.cpp", "-o", "/dev/null"], check=True)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    now = end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime
    return (now + float(before)) / 2 if before else now


def limits(text):
    return {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if line and line[0] != "#"}


def cpu_seconds(builds):
    """{test: CPU seconds} of the last run in each build folder."""
    found = {}
    for build in builds:
        file = pathlib.Path(build, "cpu_seconds.txt")
        for line in file.read_text().splitlines() if file.exists() else []:
            name, seconds = line.split()
            found[name if build == "build" else f"{name} in {build}"] = float(seconds)
    return found


def budgets(one, parts, allowed, tests):
    """(lines to print, whether a part used too much)"""
    lines, too_much, whole = [f"== one unit: {one:.2f} CPU seconds", "   seconds  CPU units  budget"], False, 0.0
    for part in parts:
        budget, seconds, cpu, name = part.split(" ", 3)
        units = float(cpu) / one
        whole += float(seconds)
        limit = allowed[budget] if budget != "-" else float("inf")
        over = not units <= limit * TOLERANCE
        lines.append(f"{seconds:>10}{units:11.1f}{'' if budget == '-' else f'{limit:8.0f}':>8}  {name}"
                     f"{'  MORE THAN ITS BUDGET' if over else ''}")
        too_much |= over
    lines.append(f"{whole:10.0f} s in all: {whole / one:.0f} units of wall time")
    if too_much:
        slowest = sorted(tests.items(), key=lambda item: -item[1])[:10]
        lines.append("the slowest tests, in units: " + ", ".join(f"{name} {cpu / one:.1f}" for name, cpu in slowest))
    return lines, too_much


def skipped(tier, builds, others):
    """(what, why) of what was not run."""
    found = []
    rows = re.findall(r"^\| ([0-9a-z_]+) \| ([a-z, ]+) \|", (TESTS / "README.md").read_text(), re.M)
    if tier != "all":
        slow = [name for name, tiers in rows if tiers.split(", ")[0] == "all"]
        found.append((", ".join(slow), "only with --all"))
    for build in builds:
        log = pathlib.Path(build, "Testing/Temporary/LastTest.log")
        text = log.read_text(errors="replace") if log.exists() else ""
        names = collections.defaultdict(set)
        for name, output in re.findall(r"^\d+/\d+ Testing: (\S+)\n(.*?)\n<end of output>", text, re.M | re.S):
            for why in set(SKIPPED.findall(output)):
                names[why].add(name)
        found += [(", ".join(sorted(tests)) + ("" if build == "build" else f" in {build}"), why)
                  for why, tests in sorted(names.items())]
    found += [tuple(line.split(": ", 1)) for line in others if line]
    return found


def write(one, build):
    page, seconds = TESTS / "README.md", cpu_seconds([build])
    text = re.sub(r"^(\| ([0-9a-z_]+) \| [a-z, ]+ \|)[^|]*\|",
                  lambda row: f"{row[1]} {seconds[row[2]]:.1f} |" if row[2] in seconds else row[0],
                  page.read_text(), flags=re.M)
    page.write_text(re.sub(r"one unit was [\d.]+ s", f"one unit was {one:.1f} s", text))


def self_test():
    allowed = limits("# text\nbuild 10\nchange 5\n")
    lines, over = budgets(2.0, ["build 30 22.9 build", "change 9 9.9 tests"], allowed, {})
    assert not over and "35" not in lines[1] and "all: 20 units" in lines[-1], lines
    lines, over = budgets(2.0, ["build 30 23.1 build", "- 9 99 more"], allowed, {"a": 4.0, "b": 6.0})
    assert over and "MORE" in lines[2] and "MORE" not in lines[3] and "b 3.0, a 2.0" in lines[-1], lines
    assert budgets(float("nan"), ["build 30 1 build"], allowed, {})[1], "no number passes"
    try:
        budgets(2.0, ["bulid 30 1 build"], allowed, {})
        raise AssertionError("a budget that does not exist passes")
    except KeyError:
        pass
    assert SKIPPED.findall("x\nNOT TESTED: no GPU\nskipped: no clang++\nok\n") == ["no GPU", "no clang++"]
    print("ok   tests/report.py")


def main():
    verb, words = sys.argv[1] if len(sys.argv) > 1 else "", sys.argv[2:]
    if verb == "unit":
        print(f"{unit(*words):.3f}")
    elif verb == "budgets":
        allowed = limits((TESTS / "budgets.txt").read_text())
        lines, over = budgets(float(words[0]), sys.stdin.read().splitlines(), allowed, cpu_seconds(words[1:]))
        print("\n".join(lines))
        return over
    elif verb == "skipped":
        print("== not run")
        for what, why in skipped(words[0], words[1:], sys.stdin.read().splitlines()):
            print(f"   {what}: {why}")
    elif verb == "write":
        write(float(words[0]), words[1])
    elif verb == "--self-test":
        self_test()
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
