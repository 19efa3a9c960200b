"""The list of mistakes, mutants.txt: read, checked, and made in a tree of sources."""
import dataclasses
import hashlib
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent))
import labs  # noqa: E402  tests/labs.py

LIST = HERE / "mutants.txt"
CHAPTERS = [f"{number:02d}" for number in range(1, 9)]


class Refused(Exception):
    """One line for the user; exit code 2."""


class Error(Exception):
    """A mistake could not be tried."""


@dataclasses.dataclass
class Mutant:
    name: str
    chapter: str = ""
    what: str = ""
    lab: str = ""  # LAB/WRONG_BODY
    patches: list = dataclasses.field(default_factory=list)  # [file, lines before, lines after]


def read(path, endings=(".cpp", ".h")):
    listed = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        key, _, value = line.partition(" ")
        mutant = listed[-1] if listed else None
        if not line or line[0] == "#":
            continue
        if key == "mutant" and re.fullmatch(r"[a-z0-9-]+", value):
            listed.append(Mutant(value))
        elif mutant and key in ("chapter", "what", "lab") and value and not getattr(mutant, key):
            setattr(mutant, key, value)
        elif mutant and key == "file" and value:
            mutant.patches.append([value, [], []])
        elif mutant and mutant.patches and line[0] in " -+":
            for sign, lines in zip("-+", mutant.patches[-1][1:]):
                lines += [line[1:]] * (line[0] in " " + sign)
        else:
            raise Refused(f"{path.name}, line {number}: not understood: {line}")
    for mutant in listed:
        check(mutant, [each.name for each in listed], endings)
    return listed


def check(mutant, names, endings):
    def refuse(why):
        raise Refused(f"{mutant.name}: {why}")
    if names.count(mutant.name) > 1:
        refuse("two mutants have this name")
    if mutant.chapter not in CHAPTERS:
        refuse(f"its chapter is {mutant.chapter or 'missing'} (must be 01 to 08)")
    if not mutant.what:
        refuse("says not what it is")
    if bool(mutant.lab) == bool(mutant.patches):
        refuse("must have either `lab` or `file`")
    for file, before, after in mutant.patches:
        if not file.endswith(endings):
            refuse(f"{file} is no {' or '.join(endings)} file")
        if not before or before == after:
            refuse(f"the block of {file} changes nothing")


def changed(mutant, root):
    """{file: its text with the mistake} in the sources below `root`; refused where the mistake does not fit them."""
    if mutant.lab:
        return changed_by_lab(mutant, root)
    texts = {}
    for file, before, after in mutant.patches:
        if file not in texts:
            if not (root / file).is_file():
                raise Refused(f"{mutant.name}: there is no {file}")
            texts[file] = (root / file).read_text()
        lines, size = texts[file].split("\n"), len(before)
        places = [at for at in range(len(lines)) if lines[at:at + size] == before]
        if len(places) != 1:
            raise Refused(f"{mutant.name}: {file} has its block {len(places)} times, not once: {before[0].strip()}")
        lines[places[0]:places[0] + size] = after
        texts[file] = "\n".join(lines)
    return texts


def changed_by_lab(mutant, root):
    name, _, wrong = mutant.lab.partition("/")
    try:
        lab = labs.labs.Lab(name, root / "build")
        if wrong not in lab.about["wrong"] or lab.puzzle:
            raise labs.lab_files.Refused(f"lab {name} has no wrong body {wrong}")
        lab.source = root / lab.about["source"]
        return {lab.about["source"]: labs.with_body(lab, body(mutant.lab))}
    except labs.lab_files.Refused as refused:
        raise Refused(f"{mutant.name}: {refused}") from None


def body(lab):
    name, _, wrong = lab.partition("/")
    return (labs.lab_files.LABS / name / "wrong" / f"{wrong}.inc").read_text()


def digest(mutant):
    """Of what decides a mutant's results."""
    what = (mutant.chapter, body(mutant.lab) if mutant.lab else mutant.patches)
    return hashlib.sha256(repr(what).encode()).hexdigest()[:10]


def part(text):
    """(I, N) of "I/N"."""
    if not re.fullmatch(r"\d+/\d+", text) or int(text.split("/")[0]) >= int(text.split("/")[1]):
        raise Refused(f"--slice {text}: must be I/N, with I from 0 to N - 1")
    return tuple(map(int, text.split("/")))


def chosen(listed, names, slice_of):
    known = {mutant.name for mutant in listed}
    for name in names:
        if name not in known:
            raise Refused(f"there is no mutant {name} in {LIST.name}")
    i, n = slice_of
    return [mutant for mutant in listed if not names or mutant.name in names][i::n]
