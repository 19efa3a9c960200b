#!/usr/bin/env python3
"""Fault drills: incidents on a few CPU ranks, to be explained from logs, metrics and traces. See README.md beside this.

    bash docs/drill.sh list
    bash docs/drill.sh start NAME|NUMBER [--seed N]           a seed: the same incident on every machine
    bash docs/drill.sh rerun NAME [--on RANKS] [FLAG ...]     the same job on the same, still faulty, machines
    bash docs/drill.sh answer NAME FIELD=VALUE ... [--json]   exit code 0: full marks
    bash docs/drill.sh hint NAME                              the next of three
    bash docs/drill.sh solution NAME

The artefacts lie in build/drill/NAME. --bin FOLDER: of the programs; --folder FOLDER: of the artefacts.
"""
import itertools
import json
import pathlib
import random
import re
import shlex
import shutil
import sys
import tempfile

from evidence import CAUSES, PER_NODE, hub_name, node_of
from incidents import INCIDENTS
from jobs import ONE_RANK, OUTPUT, ROOT, Runner, Usage, clean, moved, pairs_of, words_of
from programs import mpirun  # evidence has set the path


STATE = {"drawn": list, "hints": int, "attempts": list, "solution": bool}  # of a drill, in drill.json


def named(word):
    for number, incident in enumerate(INCIDENTS, 1):
        if word in (incident.name, str(number)):
            return incident
    raise Usage(f"{word}: no such drill; drills: " +
                ", ".join(f"{number} {each.name}" for number, each in enumerate(INCIDENTS, 1)))


class Drill:
    """A drill that has been started."""

    def __init__(self, incident, folder):
        self.incident, self.folder = incident, folder / incident.name
        self.path = self.folder / "drill.json"
        try:
            self.state = json.loads(self.path.read_text("utf-8"))
            self.case = drawn(incident, *self.state["drawn"])
            if not all(isinstance(self.state[key], kind) for key, kind in STATE.items()):
                raise TypeError
        except FileNotFoundError:
            raise Usage(f"{incident.name} has not been started: bash docs/drill.sh start {incident.name}") from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise Usage(f"{self.path} is damaged: bash docs/drill.sh start {incident.name}") from None

    def save(self):
        beside = self.path.with_suffix(".tmp")
        beside.write_text(json.dumps(self.state), "utf-8")
        beside.replace(self.path)


def drawn(incident, seed, draw):
    return incident.draw(random.Random(f"{incident.name} {seed} {draw}"))


def brief(incident, case, shown, binaries):
    number = INCIDENTS.index(incident) + 1
    asks = {"rank": incident.rank, "step": incident.step, "place": incident.place, "cause": "one of the causes below"}
    command = shlex.join([*mpirun(case.ranks), str(short(binaries / "08_3d_full")),
                          *words_of({**case.flags, **OUTPUT})])
    there = {"logs/": "rank-R.log: what each rank printed; mpirun.log: the launcher",
             "metrics.jsonl": "one event a line",
             "metrics.prom": "what the dashboard read last, from docs/prometheus.py",
             "trace.json": "all ranks on one clock: ui.perfetto.dev", "nodes.txt": "which ranks share a node",
             "good.jsonl": "the metrics of a run without the fault",
             "one-rank.jsonl": "the metrics of one good device",
             "one-rank.sh": "that run again, with --save-reference one",
             "reference/": "gradients of step 1 and more, for build/bin/compare"}
    lines = [f"# Drill {number}: {incident.name}", "", incident.story, "", "## What you have", ""]
    lines += [f"- `{name}`: {what}" for name, what in there.items() if (shown / name).exists()]
    if not (shown / "trace.json").exists():
        lines += ["- no `trace.json`: it is written at the end, which this run did not reach"]
    lines += ["", "The job, which you can start yourself on good machines:", "", f"    {command}", "",
              "The faulty machines are still yours, too. `rerun` starts it there again, with more flags or on some of "
              "the ranks:", "", f"    bash docs/drill.sh rerun {incident.name} --dtype fp64",
              f"    bash docs/drill.sh rerun {incident.name} --on 0,1", "",
              "## What to answer", ""]
    lines += [f"- `{field}`: {asks[field]}" for field in incident.fields]
    blank = " ".join(f"{field}=..." for field in incident.fields)
    lines += ["", f"    bash docs/drill.sh answer {incident.name} {blank}", "", "Causes:", ""]
    lines += [f"- `{cause}`: {what}" for cause, what in CAUSES.items()]
    return "\n".join(lines) + "\n"


def set_up(runner, incident, case, folder):
    """Runs the incident in an empty folder and adds what belongs to its artefacts."""
    runner.job(incident.name, case.flags, case.fault, case.ranks, folder)
    for file, layout in incident.extra.items():
        plain = {flag: value for flag, value in case.flags.items()
                 if flag not in ("--save-reference", "--replica-check")}
        with tempfile.TemporaryDirectory(prefix="train70b_drill_") as name:
            work = pathlib.Path(name)
            if layout == "one":
                runner.one_rank(plain, work, "metrics.jsonl")
                clean(work, incident.name, [0])
            else:
                runner.job(incident.name, plain, [], case.ranks, work)
            shutil.copy(work / "metrics.jsonl", folder / file)
    (folder / "nodes.txt").write_text("".join(
        f"{node_of(incident.name, rank)}  ranks {rank} and {rank + PER_NODE - 1}\n"
        for rank in range(0, case.ranks, PER_NODE)), "utf-8")


def start(runner, incident, folder, seed):
    if seed is None:
        seed = random.SystemRandom().randrange(10**6)
    final = folder / incident.name
    if final.exists() and not (final / "drill.json").exists():
        raise Usage(f"{final} exists and is not a drill's folder: move it away, or give --folder")
    folder.mkdir(parents=True, exist_ok=True)
    for draw in (0, 0, 1, 1, 2, 2):  # again where the machine was too busy to show it
        case = drawn(incident, seed, draw)
        with tempfile.TemporaryDirectory(prefix=f".{incident.name}-", dir=folder) as name:
            work = pathlib.Path(name) / "new"
            work.mkdir()
            set_up(runner, incident, case, work)
            if not all(each.find(work) for each in incident.evidence(case) if each.rerun is None):
                continue
            if "one" in incident.extra.values():
                flags = {flag: value for flag, value in case.flags.items() if flag in ONE_RANK}
                command = shlex.join([str(runner.programs / "01_single_gpu"),
                                      *words_of({**flags, "--save-reference": "one"})])
                (work / "one-rank.sh").write_text(
                    "# The job's model and data on one good device: writes the folder `one` beside this file. More "
                    f'flags: as arguments.\ncd "$(dirname "$0")" && {command} "$@" >one-rank.log && '
                    f'echo "$(pwd)/one"\n', "utf-8")
            (work / "brief.md").write_text(brief(incident, case, work, runner.programs), "utf-8")
            state = {"drawn": [seed, draw], "hints": 0, "attempts": [], "solution": False}
            (work / "drill.json").write_text(json.dumps(state), "utf-8")
            shutil.rmtree(final, ignore_errors=True)
            work.rename(final)
        print((final / "brief.md").read_text("utf-8"))
        print(f"All of it is in {short(final)}, this text in {short(final / 'brief.md')}.")
        return 0
    why = "it measures times and needs two idle cores" if incident.quiet else "the machine is too busy"
    raise Usage(f"{incident.name} did not show its evidence in six runs: {why}. End what else runs here (uptime: a "
                "load below 1), or start another drill: bash docs/drill.sh list")


def short(path):
    try:
        return path.resolve().relative_to(pathlib.Path.cwd())
    except ValueError:
        return path


def taken(path):
    """Whether an empty folder of this name could be made."""
    try:
        path.mkdir()
        return True
    except FileExistsError:
        return False


def rerun(runner, drill, on, flags):
    case = drill.case
    on = list(range(case.ranks)) if on is None else on
    with tempfile.TemporaryDirectory(prefix=".rerun-", dir=drill.folder) as name:
        for fault in (moved(case.fault, on), []):  # without, where the fault has no place in that layout
            work = pathlib.Path(name) / ("faulty" if fault else "plain")
            work.mkdir()
            code = runner.job(drill.incident.name, {**case.flags, **flags}, fault, len(on), work, on)
            refused = [line for path in sorted(work.glob("logs/*.log")) for line in path.read_text("utf-8").splitlines()
                       if line.startswith("08_3d_full: ")]
            if code != 2 or not any("--inject" in line for line in refused):
                break
        if code == 2 and refused:
            raise Usage(refused[0].removeprefix("08_3d_full: "))
        paths = (drill.folder / f"rerun-{number}" for number in itertools.count(1))
        final = next(path for path in paths if taken(path))
        work.rename(final)  # onto an empty folder: of two reruns at once each has its own
    print(f"exit code {code}; in {short(final)}: " + ", ".join(sorted(path.name for path in final.iterdir())))
    return 0


def ranks_in(text, ranks):
    words = text.split(",")
    found = [int(word) for word in words if re.fullmatch("[0-9]{1,9}", word)]
    return found if len(set(found)) == len(words) and max(found) < ranks else None


def plain_name(place):
    """A place as it is compared: without number, case, and the parts that every parameter has."""
    return hub_name(re.sub(r"[\s#].*$", "", place.strip().lower()).removeprefix("model.").removesuffix(".weight"))


def marks_of(drill, field, text):
    """(marks from 0 to 1, remark)."""
    incident, right = drill.incident, drill.case.answer[field]
    remark = incident.remarks[field]
    if text is None:
        return 0, f"no answer: {remark}"
    if field == "rank":
        given = set(ranks_in(text, drill.case.ranks))
        if given == right:
            return 1, ""
        return (0.5, f"right, but not all: {remark}") if given < right else (0, remark)
    if field == "step":
        return (1, "") if abs(int(text) - right) <= incident.step_tolerance else (0, remark)
    if field == "place":
        return (1, "") if plain_name(text) == plain_name(right) else (0, remark)
    return (1, "") if text == right else (0, incident.confusions.get(text, remark))


def check_fields(drill, words):
    incident, case, given = drill.incident, drill.case, {}
    for word in words:
        field, equals, text = word.partition("=")
        if not equals or field not in incident.fields:
            raise Usage(f"{word}: must be FIELD=VALUE; fields of {incident.name}: {', '.join(incident.fields)}")
        if field in given:
            raise Usage(f"{word}: {field} is given twice")
        if field == "rank" and ranks_in(text, case.ranks) is None:
            raise Usage(f"{word}: must be ranks of 0 to {case.ranks - 1}, as in rank=1 or rank=0,2")
        if field == "step" and not (re.fullmatch("[0-9]{1,9}", text) and 1 <= int(text) <= incident.steps):
            raise Usage(f"{word}: must be a step of 1 to {incident.steps}")
        if field == "place" and not text.strip():
            raise Usage(f"{word}: must be {incident.place}")
        if field == "cause" and text not in CAUSES:
            raise Usage(f"{word}: no such cause; causes: {', '.join(CAUSES)}")
        given[field] = text
    if not given:
        raise Usage(f"answer {incident.name}: give " + " ".join(f"{field}=..." for field in incident.fields))
    return given


def answer(drill, words, as_json):
    incident, given = drill.incident, check_fields(drill, words)
    fields = {}
    for field in incident.fields:
        marks, remark = marks_of(drill, field, given.get(field))
        fields[field] = {"given": given.get(field), "marks": marks, "remark": remark}
    marks = sum(each["marks"] for each in fields.values())
    drill.state["attempts"].append(marks)
    drill.save()
    full = marks == len(fields)
    if as_json:
        print(json.dumps({"drill": incident.name, "marks": marks, "of": len(fields), "fields": fields,
                          "attempts": len(drill.state["attempts"]), "hints": drill.state["hints"],
                          "solution_seen": drill.state["solution"]}))
        return not full
    width = max(len(its["given"] or "-") for its in fields.values())
    for field, its in fields.items():
        verdict = "right" if its["marks"] == 1 else f"{'half' if its['marks'] else 'wrong'}: {its['remark']}"
        print(f"{field:<6} {its['given'] or '-':<{width}}  {verdict}")
    print(f"{marks:g} of {len(fields)} marks" + (f"; `bash docs/drill.sh solution {incident.name}` says what to do next"
                                                if full else ""))
    return not full


def hint(drill):
    count = min(drill.state["hints"] + 1, len(drill.incident.hints))
    drill.state["hints"] = count
    drill.save()
    for number, text in enumerate(drill.incident.hints[:count], 1):
        print(f"{number} of {len(drill.incident.hints)}: {text}")
    return 0


def cited(runner, drill):
    """(what a piece of evidence says, the line or figure), of all; reruns where it needs them."""
    done = {}
    with tempfile.TemporaryDirectory(prefix="train70b_drill_") as name:
        for its in drill.incident.evidence(drill.case):
            folder = drill.folder
            if its.rerun is not None:
                key = json.dumps([its.rerun, its.on, its.one_rank])
                if key not in done:
                    work = pathlib.Path(name) / str(len(done))
                    work.mkdir()
                    done[key] = runner.evidence_folder(drill.incident, drill.case, its, work)
                folder = done[key]
            yield its.says, its.find(folder)


def solution(runner, drill):
    incident, case = drill.incident, drill.case
    words = {"rank": ",".join(map(str, sorted(case.answer["rank"])))}
    words.update({field: str(value) for field, value in case.answer.items() if field != "rank"})
    print(f"{incident.name}: {' '.join(f'{field}={words[field]}' for field in incident.fields)}")
    print(f"  {CAUSES[case.answer['cause']]}\n\n{incident.reasoning}\n")
    for says, line in cited(runner, drill):
        print(f"- {says}\n    {line or '(not in these artefacts any more)'}")
    print(f"\nIn a cluster: {incident.cluster}\n\ndocs/troubleshooting.md has it under \"{incident.troubleshooting}\".")
    drill.state["solution"] = True
    drill.save()
    return 0


def list_drills(folder):
    print(f"{'':>2} {'name':<9} {'min':>3}  {'marks':<12} what the on-call engineer sees")
    for number, incident in enumerate(INCIDENTS, 1):
        try:
            state = Drill(incident, folder).state
            best = max(state["attempts"], default=None)
            marks = "started" if best is None else f"{best:g} of {len(incident.fields)}"
        except Usage:
            marks = "-"
        print(f"{number:>2} {incident.name:<9} {incident.minutes:>3}  {marks:<12} {incident.title}")
    print("\nbash docs/drill.sh start NAME|NUMBER [--seed N]")
    return 0


VERBS = ["list", "start", "rerun", "answer", "hint", "solution"]


def take(words, flag, default=None):
    """Removes `flag VALUE` from the words."""
    if flag not in words:
        return default
    i = words.index(flag)
    if i + 1 == len(words):
        raise Usage(f"{flag}: must be followed by a value")
    value = words[i + 1]
    del words[i:i + 2]
    return value


def program(words):
    if not words or words[0] in ("-h", "--help", "help"):
        print(__doc__.strip())
        return 0
    verb, *words = words
    if verb not in VERBS:
        raise Usage(f"{verb}: no such command; commands: {', '.join(VERBS)}")
    programs = pathlib.Path(take(words, "--bin", ROOT / "build/bin"))
    folder = pathlib.Path(take(words, "--folder", ROOT / "build/drill"))
    seed = take(words, "--seed") if verb == "start" else None
    if seed is not None and not re.fullmatch(r"\d{1,18}", seed):
        raise Usage(f"--seed {seed}: must be a number from 0 on")
    as_json = verb == "answer" and "--json" in words
    words = [word for word in words if not (verb == "answer" and word == "--json")]
    if verb == "list":
        if words:
            raise Usage(f"{words[0]}: list takes no arguments")
        return list_drills(folder)
    if not words:
        raise Usage(f"{verb}: needs a drill; drills: " + ", ".join(incident.name for incident in INCIDENTS))
    incident, words = named(words[0]), words[1:]
    if verb not in ("rerun", "answer") and words:
        raise Usage(f"{words[0]}: {verb} takes one drill" + (" and --seed N" if verb == "start" else ""))
    if verb == "start":
        return start(Runner(programs), incident, folder, None if seed is None else int(seed))
    drill = Drill(incident, folder)
    if verb == "answer":
        return answer(drill, words, as_json)
    if verb == "hint":
        return hint(drill)
    if verb == "solution":
        return solution(Runner(programs), drill)
    on = take(words, "--on")
    ranks = None if on is None else ranks_in(on, drill.case.ranks)
    if on is not None and ranks is None:
        raise Usage(f"--on {on}: must be ranks of 0 to {drill.case.ranks - 1}, as in --on 0,1")
    flags = pairs_of(words)
    for flag in ("--inject", *OUTPUT):
        if flag in flags:
            raise Usage(f"{flag}: cannot be set in a rerun, which has its own")
    return rerun(Runner(programs), drill, ranks, flags)


def main():
    try:
        return program(sys.argv[1:])
    except (Usage, OSError) as error:
        print(f"drill: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
