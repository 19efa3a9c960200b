"""The rows of results.csv: one per mutant and form of the tests; and the table of who noticed what."""
import csv
import xml.etree.ElementTree

import mutants

COLUMNS = ("mutant", "text", "chapter", "form", "caught", "failed", "seconds", "commit")


def read(path):
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise mutants.Refused(f"{path}: its columns are not {','.join(COLUMNS)}")
        return list(reader)


def failed_tests(report, limit):
    """Of CTest's JUnit report; limit: seconds after which it ended a test."""
    cases = list(xml.etree.ElementTree.fromstring(report).iter("testcase"))
    if not cases:
        raise mutants.Error("there are no such tests (--short-label?)")
    failed = []
    for case in cases:
        name, skipped = case.get("name"), case.find("skipped")
        if skipped is not None and "executable" in skipped.get("message", ""):
            raise mutants.Error(f"{name} is not built")
        if case.get("status") == "fail":
            failed.append(name + (" (timeout)" if float(case.get("time", 0)) >= limit - 0.5 else ""))
    return failed


def row(mutant, form, failed, seconds, commit):
    return dict(zip(COLUMNS, (mutant.name, mutants.digest(mutant), mutant.chapter, form, "yes" if failed else "no",
                              "; ".join(failed), f"{seconds:.0f}", commit)))


def add(path, rows, new):
    """To the list and, at once, to the file."""
    begins = not path.exists()
    with open(path, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if begins:
            writer.writeheader()
        writer.writerow(new)
    rows.append(new)


def verdicts(rows, mutant):
    """{form: whether it has caught the mutant}, of the text that it has now."""
    text = mutants.digest(mutant)
    return {row["form"]: row["caught"] == "yes" for row in rows if (row["mutant"], row["text"]) == (mutant.name, text)}


def missing_forms(rows, mutant, both):
    known = verdicts(rows, mutant)
    if "short" not in known:
        return ["short", "long"] if both else ["short"]
    return ["long"] if "long" not in known and (both or not known["short"]) else []


def table(listed, rows):
    """The groups of the report: [(title, mutants)]."""
    groups = {"short": [], "long": [], "none": [], "open": []}
    for mutant in listed:
        known = verdicts(rows, mutant)
        by = "short" if known.get("short") else "long" if known.get("long") else "none" if len(known) > 1 else "open"
        groups[by].append(mutant)
    titles = ("caught by the short form", "caught only by the long form", "caught by neither", "not tried to the end")
    return list(zip(titles, groups.values()))


def report(listed, rows):
    for title, members in table(listed, rows):
        print(f"{len(members):3} {title}")
        for mutant in members:
            failed = [row["failed"] for row in rows if row["mutant"] == mutant.name and row["failed"]]
            print(f"      {mutant.chapter}  {mutant.name:38} {mutant.what}" + (f" [{failed[-1]}]" if failed else ""))
