#!/usr/bin/env python3
"""The fault drills of docs/drills: each incident is started with two seeds. The right answer gets full marks, every
wrong field loses its mark and gets its remark; the artefacts hold the evidence that the solution cites, and nothing
that gives the fault away. Then bad input.

    python3 tests/drills.py BIN_FOLDER [NAME ...]

Without names: one of them, as TRAIN70B_TEST_SLICE says, or all of them where it is "all".
"""
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from verdicts import exit_code, verdict

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs/drills"))
import drill as drills  # noqa: E402
from evidence import CAUSES, PARAMETERS  # noqa: E402
from incidents import INCIDENTS  # noqa: E402

SEEDS = [7, 23]


class Shell:
    """docs/drill.sh with the folders of this test."""

    def __init__(self, programs, folder):
        self.folder, self.options = folder, ["--bin", str(programs), "--folder", str(folder)]

    def run(self, *words, options=None, environment=None):
        return subprocess.run(["bash", "docs/drill.sh", *words, *(self.options if options is None else options)],
                              cwd=ROOT, capture_output=True, text=True, timeout=400, env=environment)

    def marks(self, name, answer):
        """The JSON of an answer, with the exit code."""
        done = self.run("answer", name, *(f"{field}={value}" for field, value in answer.items()), "--json")
        return {**json.loads(done.stdout or "{}"), "code": done.returncode, "error": done.stderr}


def texts(case, fields):
    """The right answer as it is typed."""
    its = {**case.answer, "rank": ",".join(map(str, sorted(case.answer["rank"])))}
    return {field: str(its[field]) for field in fields}


def wrong_values(incident, case):
    """{field: [(wrong value, marks of that field)]}."""
    right = case.answer
    other = next(rank for rank in range(case.ranks) if rank not in right["rank"])
    ranks = [(str(other), 0), (",".join(map(str, range(case.ranks))), 0)]
    if len(right["rank"]) > 1:
        ranks.append((str(min(right["rank"])), 0.5))
    found = {"rank": ranks,
             "place": [(next(name for name in PARAMETERS if name != right["place"]), 0), ("dp.barrier", 0)],
             "cause": [(cause, 0) for cause in CAUSES if cause != right["cause"]]}
    if "step" in right:
        far = incident.step_tolerance + 1
        found["step"] = [(str(right["step"] - far), 0), (str(min(right["step"] + far, incident.steps)), 0)]
    return found


def reveals(remark, field, case):
    """Whether a remark has the answer in it."""
    if field == "rank":
        return any(re.search(rf"\brank[s=]* ?{rank}\b", remark) for rank in case.answer["rank"]
                   if f"rank={rank}," not in remark)
    return field != "cause" and re.search(rf"(?<![\w.]){re.escape(str(case.answer[field]))}(?![\w.])", remark)


def definitions():
    rows = [line.split("|")[1].strip() for line in (ROOT / "docs/troubleshooting.md").read_text().splitlines()
            if line.startswith("| ")]
    table = (ROOT / "docs/drills/README.md").read_text()
    problems = [f"two drills are called {name}" for name in {each.name for each in INCIDENTS}
                if sum(each.name == name for each in INCIDENTS) > 1]
    for number, each in enumerate(INCIDENTS, 1):
        if each.troubleshooting not in rows:
            problems.append(f"{each.name}: docs/troubleshooting.md has no row \"{each.troubleshooting}\"")
        if f"| {number} | {each.name} | {each.title} | {each.teaches} | {each.needs} | {each.minutes} |" not in table:
            problems.append(f"{each.name}: its row is not in docs/drills/README.md")
        if each.quiet != (f"`{each.name}` measures times and needs a quiet machine" in table):
            problems.append(f"{each.name}: docs/drills/README.md says otherwise of its machine")
        if set(each.remarks) != set(each.fields) or len(each.hints) != 3 or not set(each.confusions) < set(CAUSES):
            problems.append(f"{each.name}: remarks, hints or confusions")
        for seed in range(200):
            case = drills.drawn(each, seed, 0)
            right = case.answer["cause"]
            if right in each.confusions or set(case.answer) != set(each.fields):
                problems.append(f"{each.name}: the right cause has a remark, or the fields are not those of the answer")
            told = each.story + each.title
            if re.search(rf"\b{right.replace('-', '[- ]')}", told) or str(case.answer["place"]) in told:
                problems.append(f"{each.name}: the story gives the answer")
    verdict("incidents: rows of the two documents, three hints, remarks on every field", *sorted(set(problems)))
    shown, its = "model.layers.3.block_sparse_moe.experts", "layers.3.mlp.experts"
    same = [(f"{shown}.w1.weight", f"{shown}.w3", f"{its}.gate_up_proj"), (f"{shown}.w2.weight", f"{its}.down_proj")]
    others = [f"{shown}.0.w2", f"{shown}.7.w3", f"{its}.0.down_proj"]
    names = {drills.plain_name(name) for each in same for name in each}
    verdict("an expert's parameter: by the Hub's name or the program's, without a number",
            "" if len(names) == 2 else f"{names}", *[name for name in others if drills.plain_name(name) in names])
    drawn = {each.name: {str(drills.drawn(each, seed, 0).answer) for seed in range(200)} for each in INCIDENTS}
    verdict("seeds draw different incidents", *[f"{name}: {len(answers)}" for name, answers in drawn.items()
                                               if len(answers) < 20])


def giveaways(folder):
    """Files in which the fault is announced."""
    found = []
    for path in folder.rglob("*"):
        data = path.read_bytes().lower() if path.is_file() else b""
        if b"inject" in data or b"fault injection" in data:
            found.append(str(path.relative_to(folder)))
    return found


def play(shell, incident, seed, with_solution):
    name, folder = incident.name, shell.folder / incident.name
    title = f"{name}, seed {seed}: "
    done = shell.run("start", name, "--seed", str(seed))
    verdict(title + "start", done.stderr if done.returncode else "", "" if folder.is_dir() else "no folder")
    if done.returncode or not folder.is_dir():
        return
    drill = drills.Drill(incident, shell.folder)
    case, right = drill.case, texts(drill.case, incident.fields)
    brief = (folder / "brief.md").read_text()
    state = (folder / "drill.json").read_text()
    verdict(title + "nothing gives it away", *giveaways(folder),
            f"{right['place']} in the brief" if right["place"] in brief.split("Causes:")[0] else "",
            "the state is readable" if right["place"] in state or '"seed"' in state else "",
            *[f"{word} is missing" for word in ("## What you have", "## What to answer", "`logs/`", "metrics.jsonl")
              if word not in brief])
    verdict(title + "the evidence is there", *[its.says for its in incident.evidence(case)
                                               if its.rerun is None and not its.find(folder)])
    its = shell.marks(name, right)
    full = its["code"] == 0 and its["marks"] == its["of"] == len(right)
    verdict(title + "the right answer", "" if full else str(its))
    problems = []
    for field, values in wrong_values(incident, case).items():
        if field not in incident.fields:
            continue
        for value, marks in values:
            drills.check_fields(drill, [f"{field}={value}"])
            got, remark = drills.marks_of(drill, field, value)
            if got != marks or not remark:
                problems.append(f"{field}={value}: {got} marks, {remark}")
            if reveals(remark, field, case):
                problems.append(f"{field}={value}: the remark has the answer: {remark}")
        value, marks = values[-1]
        its = shell.marks(name, {**right, field: value})
        if its["code"] != 1 or its["marks"] != its["of"] - 1 + marks:
            problems.append(f"{field}={value}: {its}")
        if [key for key, each in its["fields"].items() if each["remark"]] != [field]:
            problems.append(f"{field}={value}: remarks on {its['fields']}")
    partly = shell.marks(name, {"cause": right["cause"]})
    if partly["marks"] != 1 or partly["code"] != 1 or partly["fields"]["rank"]["given"] is not None:
        problems.append(f"one field: {partly}")
    verdict(title + "wrong fields lose their marks, with a remark", *problems)
    if not with_solution:
        return
    hints = [shell.run("hint", name).stdout for _ in range(4)]
    verdict(title + "three hints, one after another", "" if hints[2] == hints[3] else "a fourth",
            *[f"after {number}: {text}" for number, text in enumerate(hints, 1)
              if text.count(" of 3: ") != min(number, 3)])
    done = shell.run("solution", name)
    first = f"{name}: " + " ".join(f"{key}={value}" for key, value in right.items())
    verdict(title + "the solution cites the artefacts", done.stderr if done.returncode else "",
            "" if first in done.stdout else "no answer",
            f"not in the artefacts: {done.stdout}" if "not in these artefacts" in done.stdout else "",
            "" if f'"{incident.troubleshooting}"' in done.stdout else "no row of docs/troubleshooting.md")
    rerun = shell.run("rerun", name, "--on", "0,1", "--steps", "3")
    verdict(title + "a rerun on two ranks", rerun.stderr if rerun.returncode else "", *giveaways(folder),
            "" if "rerun-1" in rerun.stdout and (folder / "rerun-1/metrics.jsonl").exists() else rerun.stdout)


def bad_input(shell, programs, started):
    def refused(name, words, *parts, **more):
        done = shell.run(*words, **more)
        lines = done.stderr.splitlines()
        verdict(f"refused: {name}", f"exit code {done.returncode}" if done.returncode != 2 else "",
                "" if len(lines) == 1 and lines[0].startswith("drill: ") else f"not one line: {done.stderr}",
                *[f"no {part} in: {done.stderr}" for part in parts if part not in done.stderr],
                done.stdout and f"output: {done.stdout}")

    name = started.name
    other = next(each.name for each in INCIDENTS if not (shell.folder / each.name).exists()) if len(
        list(shell.folder.iterdir())) < len(INCIDENTS) else None
    refused("an unknown command", ["begin"], "begin", "start", "solution")
    refused("an unknown drill", ["start", "hang"], "hang: no such drill", *[each.name for each in INCIDENTS])
    refused("a drill too many", ["start", str(len(INCIDENTS) + 1)], f"{len(INCIDENTS) + 1}: no such drill", "aurora")
    refused("no drill", ["hint"], "needs a drill", "aurora")
    refused("two drills", ["start", name, name], f"{name}: start takes one drill")
    refused("a seed that is no number", ["start", name, "--seed", "x"], "--seed x: must be a number")
    refused("a seed without a number", ["start", name, "--seed"], "--seed", options=[])
    refused("list of something", ["list", name], "list takes no arguments")
    if other:
        for verb in ("answer", "hint", "solution", "rerun"):
            refused(f"{verb} before start", [verb, other], f"bash docs/drill.sh start {other}")
    refused("an answer without fields", ["answer", name], "rank=...", "cause=...")
    refused("an unknown field", ["answer", name, "host=3"], "host=3", "fields of", *started.fields)
    refused("no field", ["answer", name, "3"], "FIELD=VALUE")
    refused("a field twice", ["answer", name, "rank=1", "rank=2"], "rank is given twice")
    refused("a rank that does not exist", ["answer", name, "rank=99"], "rank=99: must be ranks of 0 to")
    refused("no rank", ["answer", name, "rank="], "rank=: must be ranks")
    refused("an empty place", ["answer", name, "place="], "place=: must be")
    refused("an unknown cause", ["answer", name, "cause=gremlins"], "cause=gremlins: no such cause", *CAUSES)
    if "step" in started.fields:
        refused("step 0", ["answer", name, "step=0"], "step=0: must be a step of 1 to")
        refused("a step that is no number", ["answer", name, "step=two"], "step=two: must be a step")
    refused("a rerun on no rank", ["rerun", name, "--on", "9,9"], "--on 9,9: must be ranks of 0 to")
    refused("a rerun with a fault", ["rerun", name, "--inject", "nan:0:1"], "--inject: cannot be set")
    refused("a rerun with the program's bad input", ["rerun", name, "--heads", "5"], "--heads 5")
    refused("a rerun with an unknown flag", ["rerun", name, "--frobnicate"], "--frobnicate")
    refused("a rerun with a word", ["rerun", name, "fast"], "fast: must be a flag")
    (shell.folder / "elsewhere" / name).mkdir(parents=True)
    (shell.folder / "file").write_text("")
    for where, part in (("elsewhere", "not a drill's folder"), ("file", "ile")):
        refused(f"a folder: {where}", ["start", name], part,
                options=["--bin", str(programs), "--folder", str(shell.folder / where)])
    refused("no programs", ["start", name], "bash tests/setup.sh", options=["--bin", str(shell.folder / "nothing")])
    with tempfile.TemporaryDirectory() as path:  # of programs, without mpirun
        for tool in ("bash", "python3", "dirname"):
            where = subprocess.run(["which", tool], capture_output=True, text=True, check=True).stdout.strip()
            os.symlink(where, os.path.join(path, tool))
        refused("no mpirun", ["start", name], "no mpirun: run `bash tests/setup.sh`",
                options=["--bin", str(programs), "--folder", str(shell.folder / "x")],
                environment={**os.environ, "PATH": path})
    state = shell.folder / name / "drill.json"
    kept = state.read_text()
    for damage in ("", "{}", kept.replace("sealed", "seal"), kept[:30]):
        state.write_text(damage)
        refused(f"a damaged state of {len(damage)} bytes", ["hint", name], "is damaged", f"start {name}")
    state.write_text(kept)
    table = shell.run("list")
    verdict("the list has every drill and the best marks", *[f"no {each.name}" for each in INCIDENTS
                                                           if each.name not in table.stdout],
            "" if f"{len(started.fields)} of {len(started.fields)}" in table.stdout else table.stdout)


def busy_machine(folder):
    """A drill that times, on a machine where nothing shows."""
    incident = next(each for each in INCIDENTS if each.quiet)

    class Nothing:
        def job(self, name, flags, fault, ranks, folder):
            (folder / "metrics.jsonl").write_text("")
    try:
        drills.start(Nothing(), incident, folder, 7)
        said = "started"
    except drills.Usage as usage:
        said = str(usage)
    wanted = ("needs two idle cores", "End what else runs here", "bash docs/drill.sh list")
    verdict("a drill on a busy machine says what to do", *[f"no {part} in: {said}" for part in wanted
                                                         if part not in said])


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    programs, names = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2:]
    part = os.environ.get("TRAIN70B_TEST_SLICE", "0")
    chosen = [each for each in INCIDENTS if each.name in names or not names and part == "all"]
    if not chosen:  # of an eighth's one or two the one whose turn it is: tests/labs.py
        eighth, seed = INCIDENTS[int(part) % 8::8], int(os.environ.get("EMULATE_SEED", "1"))
        chosen = [eighth[max(seed - 1, 0) // 8 % len(eighth)]]
    definitions()
    with tempfile.TemporaryDirectory() as name:
        busy_machine(pathlib.Path(name))
    with tempfile.TemporaryDirectory(prefix="train70b_drills_") as name:
        shell = Shell(programs, pathlib.Path(name))
        for incident in chosen:
            for seed in SEEDS:
                play(shell, incident, seed, seed == SEEDS[0])
        bad_input(shell, programs, chosen[-1])
    sys.exit(exit_code())


if __name__ == "__main__":
    main()
