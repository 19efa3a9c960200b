"""For teachers: a tree for students, without the bodies of the labs; a leaderboard."""
import base64
import datetime
import fnmatch
import json
import os
import pathlib
import re
import shutil
import subprocess
import zlib

from grade import complete, graded_by_script
from lab_files import Lab, ROOT, Refused, all_labs, body_of, person, replace

PACKED = "docs/labs/bodies.txt"
LEFT_OUT = ("docs/labs/*/wrong/*", "docs/labs/*/solution.*", "docs/labs/*/drawn.inc")
FENCE = re.compile(r"<!-- cut: (\S+) \S+ -->\n```\w*\n(.*?)\n```\n", re.S)
COLUMNS = ["name", "date", "tokens/s/GPU", "GB"]


def student_tree(target):
    """The tracked files. A body is an #include of what CMake unpacks into the build folder, because programs and other
    labs' tests need it; a lesson's quotation of a body is left out. -> what was done, in one line."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise Refused(f"{target} is there already, and is not an empty folder")
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, encoding="utf-8").stdout.splitlines()
    if not names:
        raise Refused(f"{ROOT} is no clone: git ls-files lists nothing")
    names = [name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in LEFT_OUT)]
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target / name)
    bodies, lines = {}, set()  # lines: of bodies, with their file
    for lab in [Lab(name, ROOT) for _, name in all_labs()]:
        source = target / lab.about["source"]
        for tag in lab.tags() if not lab.puzzle else []:
            bodies[tag], indent = body_of(source.read_text("utf-8"), tag)
            lines |= {(lab.about["source"], line.strip()) for line in bodies[tag].split("\n") if len(line) > 20}
            include = f'{indent}// LAB {lab.name}: bash docs/lab.sh start {lab.name}\n#include "{tag}.inc"'
            source.write_text(replace(source.read_text("utf-8"), tag, include), "utf-8")

    def unquoted(match):
        return "*A lab's body.*\n" if any((match[1], x.strip()) in lines for x in match[2].split("\n")) else match[0]
    for page in [target / name for name in names if name.endswith(".md")]:
        page.write_text(FENCE.sub(unquoted, page.read_text("utf-8")), "utf-8")
    (target / PACKED).write_bytes(base64.b85encode(zlib.compress(json.dumps(bodies).encode())))
    return f"{len(names)} files, without the bodies of {len(bodies)} functions or parts of them"


def unpack(build):
    """Called by CMake in a student's tree."""
    (build / "bodies").mkdir(parents=True, exist_ok=True)
    for tag, body in json.loads(zlib.decompress(base64.b85decode((ROOT / PACKED).read_bytes()))).items():
        file = build / f"bodies/{tag}.inc"
        if not file.is_file() or file.read_text("utf-8") != body + "\n":
            file.write_text(body + "\n", "utf-8")


def enter(lab, card, path, name):
    """A row for each person, their best, the fastest first. -> the place of this person."""
    person(name, "--as")
    if "leaderboard" not in lab.about or lab.seed or not complete(card):
        raise Refused("the leaderboard is for full marks in a lab with a figure of merit (fit-70b), without a seed")
    rate, memory = graded_by_script(lab, "merit")
    rows = [line.split(",") for line in path.read_text("utf-8").splitlines()] if path.exists() else [COLUMNS]
    if rows[:1] != [COLUMNS] or any(len(row) != 4 or not row[2].isdigit() for row in rows[1:]):
        raise Refused(f"{path} is no leaderboard: {','.join(COLUMNS)}")
    rows = rows[1:] + [[name, datetime.date.today().isoformat(), str(rate), f"{memory:.2f}"]]
    best = {}
    for row in sorted(rows, key=lambda row: (-int(row[2]), float(row[3]), row[1])):
        best.setdefault(row[0], row)
    beside = pathlib.Path(f"{path}.{os.getpid()}.tmp")
    beside.write_text("".join(",".join(row) + "\n" for row in [COLUMNS, *best.values()]), "utf-8")
    os.replace(beside, path)
    return 1 + list(best).index(name)
