"""Tables: CSVs that begin with comment lines, and what a script writes between two marks of a Markdown page."""
import csv
import os
import re


def read(path):
    """The rows of a CSV as dictionaries."""
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def write(path, rows, columns=(), comments=()):
    """rows: lists, the first of them the head; with columns, dictionaries. The file is there whole, or as it was."""
    with open(f"{path}.tmp", "w", newline="", encoding="utf-8") as file:
        file.writelines(f"# {line}\n" for line in comments)
        if columns:
            writer = csv.DictWriter(file, columns, lineterminator="\n", extrasaction="ignore", restval="")
            writer.writeheader()
        else:
            writer = csv.writer(file, lineterminator="\n")
        writer.writerows(rows)
    os.replace(f"{path}.tmp", path)


def markdown(head, rows, aligned=None):
    """Lines; aligned: of each column, "-" to the left, ":" to the right [the first to the left]."""
    aligned = aligned or "-" + ":" * (len(head) - 1)
    rule = "|" + "|".join("---" + ":" * (each == ":") for each in aligned) + "|"
    lines = ["|" + "|".join(f" {cell} " if cell != "" else " " for cell in row) + "|" for row in [head, *rows]]
    return [lines[0], rule, *lines[1:]]


def parts(text, begin, end):
    """{name: (begin, end)} of what stands between the lines `begin`, a regular expression with the name, and `end`."""
    found = {}
    for mark in re.finditer(rf"^{begin}\n", text, re.M):
        found[mark[1]] = mark.end(), text.index(end, mark.end())
    return found


def with_parts(text, begin, end, new):
    """The page with the text of these parts, where it has them."""
    for name, (first, last) in reversed(parts(text, begin, end).items()):
        if name in new:
            text = text[:first] + new[name] + text[last:]
    return text
