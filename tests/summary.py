#!/usr/bin/env python3
"""The end of tests/run.sh: python3 tests/summary.py BUILD_FOLDER... <LINES

LINES: its parts, and what it skipped. Adds what tests of its last CTest runs say that they skipped, and the ten
dearest.
"""
import collections
import pathlib
import re
import sys
import xml.etree.ElementTree

SKIPPED = re.compile(r"^SKIPPED \[\d+\] [^ ]+ (.*)$|^.*?(?:NOT TESTED|skipped|not tested): (.*?)\)?$", re.M)

seconds, reasons = {}, collections.defaultdict(set)
for build in sys.argv[1:]:
    report = pathlib.Path(build, "tests.xml")
    if not report.exists():
        continue
    for test in xml.etree.ElementTree.parse(report).iter("testcase"):
        name = test.get("name") + ("" if build == "build" else f" in {build}")
        seconds[name] = float(test.get("time"))
        for by_pytest, by_others in SKIPPED.findall(test.findtext("system-out") or ""):
            reasons[by_pytest or by_others].add(name)
print(sys.stdin.read(), end="")
for reason, names in sorted(reasons.items()):
    print(f"skipped: {', '.join(sorted(names))}: {reason}")
print(f"skipped: {len(reasons)} reasons named by tests" if reasons else "skipped: no test")
dearest = sorted(seconds, key=seconds.get, reverse=True)[:10]
print("the dearest tests: " + ", ".join(f"{name} {seconds[name]:.0f} s" for name in dearest))
