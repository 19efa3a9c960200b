"""What only this catches: a fault drill (docs/drills) whose evidence is not in its artefacts, or that gives its fault
away.

One of them, or all with TRAIN70B_TEST_SLICE=all, with two seeds: the right answer gets full marks, every wrong field
loses its mark and gets its remark.
"""
import json
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, Programs, in_turn

with pytest.MonkeyPatch.context() as path:
    path.syspath_prepend(str(ROOT / "docs/drills"))
    import drill as drills
    from evidence import CAUSES, PARAMETERS
    from incidents import INCIDENTS

CHOSEN, SEEDS = in_turn(INCIDENTS, len(INCIDENTS)), [7, 23]


class Shell:
    """docs/drill.sh with the folders of this test."""

    def __init__(self, binaries, folder):
        self.folder, self.binaries, self.run = folder / "drills", binaries, Programs(binaries, folder)
        self.folder.mkdir()

    def __call__(self, *words, code=0, folder=None, binaries=None, env=None):
        return self.run("bash", ROOT / "docs/drill.sh", *words, "--bin", binaries or self.binaries, "--folder",
                        folder or self.folder, code=code, seconds=400, env=env)

    def marks(self, name, answer, code):
        """The JSON of an answer."""
        fields = [f"{key}={value}" for key, value in answer.items()]
        return json.loads(self("answer", name, *fields, "--json", code=code).out)

    def started(self, incident, seed):
        """(the drill, the right answer as it is typed); started if it is not."""
        if not (self.folder / incident.name).exists():
            self("start", incident.name, "--seed", str(seed))
        drill = drills.Drill(incident, self.folder)
        its = {**drill.case.answer, "rank": ",".join(map(str, sorted(drill.case.answer["rank"])))}
        return drill, {field: str(its[field]) for field in incident.fields}


@pytest.fixture(scope="module")
def shell(binaries, tmp_path_factory):
    shell = Shell(binaries, tmp_path_factory.mktemp("drills"))
    yield shell
    shutil.rmtree(shell.folder.parent)


# ---- what incidents.py says ----
@pytest.mark.parametrize("each", INCIDENTS, ids=lambda each: each.name)
def test_definition(each):
    rows = [line.split("|")[1].strip() for line in (ROOT / "docs/troubleshooting.md").read_text().splitlines()
            if line.startswith("| ")]
    page = (ROOT / "docs/drills/README.md").read_text()
    assert [other.name for other in INCIDENTS].count(each.name) == 1 and each.troubleshooting in rows
    row = rf"^\| {INCIDENTS.index(each) + 1} \| {each.name} \| {re.escape(each.title)} \|.*\| {each.minutes} \|$"
    assert len(re.findall(row, page, re.M)) == 1
    assert each.quiet == (f"`{each.name}` measures times and needs a quiet machine" in page)
    assert set(each.remarks) == set(each.fields) and len(each.hints) == 3 and set(each.confusions) < set(CAUSES)
    answers = [drills.drawn(each, seed, 0).answer for seed in range(200)]
    assert len(set(map(str, answers))) >= 20, "seeds draw the same incidents"
    for right in answers:
        assert right["cause"] not in each.confusions and set(right) == set(each.fields)
        told = each.story + each.title
        assert not re.search(rf"\b{right['cause'].replace('-', '[- ]')}", told) and str(right["place"]) not in told


def test_parameter_of_an_expert_by_the_hubs_name_or_the_programs_without_a_number():
    shown, its = "model.layers.3.block_sparse_moe.experts", "layers.3.mlp.experts"
    same = [(f"{shown}.w1.weight", f"{shown}.w3", f"{its}.gate_up_proj"), (f"{shown}.w2.weight", f"{its}.down_proj")]
    names = [{drills.plain_name(name) for name in each} for each in same]
    assert [len(each) for each in names] == [1, 1] and names[0] != names[1]
    for other in (f"{shown}.0.w2", f"{shown}.7.w3", f"{its}.0.down_proj"):
        assert drills.plain_name(other) not in names[0] | names[1]


def test_busy_machine_is_told_what_to_do(tmp_path):
    class Nothing:
        def job(self, name, flags, fault, ranks, folder):
            (folder / "metrics.jsonl").write_text("")
    with pytest.raises(drills.Usage) as usage:
        drills.start(Nothing(), next(each for each in INCIDENTS if each.quiet), tmp_path, 7)
    for part in ("needs two idle cores", "End what else runs here", "bash docs/drill.sh list"):
        assert part in str(usage.value)


# ---- one drill ----
def giveaways(folder):
    """Files in which the fault is announced."""
    return [path.name for path in folder.rglob("*") if path.is_file()
            and any(word in path.read_bytes().lower() for word in (b"inject", b"fault injection"))]


def wrong_values(incident, case):
    """(field, wrong value, marks of that field)."""
    right = case.answer
    yield "rank", str(next(rank for rank in range(case.ranks) if rank not in right["rank"])), 0
    yield "rank", ",".join(map(str, range(case.ranks))), 0
    if len(right["rank"]) > 1:
        yield "rank", str(min(right["rank"])), 0.5
    yield "place", next(name for name in PARAMETERS if name != right["place"]), 0
    yield "place", "dp.barrier", 0
    for cause in CAUSES:
        if cause != right["cause"]:
            yield "cause", cause, 0
    if "step" in right:
        far = incident.step_tolerance + 1
        yield "step", str(right["step"] - far), 0
        yield "step", str(min(right["step"] + far, incident.steps)), 0


def reveals(remark, field, case):
    """Whether a remark has the answer in it."""
    if field == "rank":
        return any(re.search(rf"\brank[s=]* ?{rank}\b", remark) for rank in case.answer["rank"]
                   if f"rank={rank}," not in remark)
    return field != "cause" and re.search(rf"(?<![\w.]){re.escape(str(case.answer[field]))}(?![\w.])", remark)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("incident", CHOSEN, ids=lambda each: each.name)
def test_answers(incident, seed, shell):
    name, folder = incident.name, shell.folder / incident.name
    shutil.rmtree(folder, ignore_errors=True)
    drill, right = shell.started(incident, seed)
    brief, state = (folder / "brief.md").read_text(), (folder / "drill.json").read_text()
    assert not giveaways(folder) and right["place"] not in brief.split("Causes:")[0]
    assert right["place"] not in state and right["cause"] not in state, "the state is readable"
    assert all(word in brief for word in ("## What you have", "## What to answer", "`logs/`", "metrics.jsonl"))
    missing = [its.says for its in incident.evidence(drill.case) if its.rerun is None and not its.find(folder)]
    assert not missing
    its = shell.marks(name, right, 0)
    assert its["marks"] == its["of"] == len(right)

    last = {}
    for field, value, marks in wrong_values(incident, drill.case):
        if field in incident.fields:
            drills.check_fields(drill, [f"{field}={value}"])
            got, remark = drills.marks_of(drill, field, value)
            assert got == marks and remark and not reveals(remark, field, drill.case), (field, value, got, remark)
            last[field] = value, marks
    for field, (value, marks) in last.items():
        its = shell.marks(name, {**right, field: value}, 1)
        assert its["marks"] == its["of"] - 1 + marks, its
        assert [key for key, each in its["fields"].items() if each["remark"]] == [field], its
    partly = shell.marks(name, {"cause": right["cause"]}, 1)
    assert partly["marks"] == 1 and partly["fields"]["rank"]["given"] is None


@pytest.mark.parametrize("incident", CHOSEN, ids=lambda each: each.name)
def test_hints_solution_and_rerun(incident, shell):
    drill, right = shell.started(incident, SEEDS[0])
    name, folder = incident.name, shell.folder / incident.name
    hints = [shell("hint", name).out for _ in range(4)]
    assert [text.count(" of 3: ") for text in hints] == [1, 2, 3, 3] and hints[2] == hints[3]
    done = shell("solution", name)
    answer = " ".join(f"{key}={value}" for key, value in right.items())
    done.says(f"{name}: {answer}", f'"{incident.troubleshooting}"', where="out")
    assert "not in these artefacts" not in done.out, done
    shell("rerun", name, "--on", "0,1", "--steps", "3").says("rerun-1", where="out")
    assert (folder / "rerun-1/metrics.jsonl").exists() and not giveaways(folder)


# ---- bad input: words, and what the one line says; NAME is a drill that has been started ----
REFUSED = [
    ("begin", "begin", "start", "solution"), ("start hang", "hang: no such drill", *[each.name for each in INCIDENTS]),
    (f"start {len(INCIDENTS) + 1}", f"{len(INCIDENTS) + 1}: no such drill", "aurora"),
    ("hint", "needs a drill", "aurora"),
    ("start NAME NAME", "NAME: start takes one drill"), ("start NAME --seed x", "--seed x: must be a number"),
    ("list NAME", "list takes no arguments"), ("answer NAME", "rank=...", "cause=..."),
    ("answer NAME host=3", "host=3", "fields of", "rank", "cause"), ("answer NAME 3", "FIELD=VALUE"),
    ("answer NAME rank=1 rank=2", "rank is given twice"), ("answer NAME rank=99", "rank=99: must be ranks of 0 to"),
    ("answer NAME rank=", "rank=: must be ranks"), (f"answer NAME rank={'9' * 5000}", "must be ranks of 0 to"),
    (f"answer NAME step={'9' * 5000}", "must be a step of 1 to"), (f"rerun NAME --on {'9' * 5000}", "must be ranks of"),
    ("answer NAME rank=0,0", "must be ranks of 0 to"), ("answer NAME place=", "place=: must be"),
    ("answer NAME cause=gremlins", "cause=gremlins: no such cause", *CAUSES), ("answer NAME step=0", "step=0"),
    ("answer NAME step=two", "step=two"), ("rerun NAME --on 9,9", "--on 9,9: must be ranks of 0 to"),
    ("rerun NAME --inject nan:0:1", "--inject: cannot be set"), ("rerun NAME --heads 5", "--heads 5"),
    ("rerun NAME --frobnicate", "--frobnicate"), ("rerun NAME fast", "fast: must be a flag")]


def refused(done, *parts):
    assert len(done.err.splitlines()) == 1 and done.err.startswith("drill: ") and not done.out, done
    done.says(*parts)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[0][:40])
def test_refuses(case, shell):
    shell.started(CHOSEN[-1], SEEDS[1])
    words, *parts = [text.replace("NAME", CHOSEN[-1].name) for text in case]
    refused(shell(*words.split(), code=2), *parts)


@pytest.mark.parametrize("verb", ["answer", "hint", "solution", "rerun"])
def test_refuses_before_start(verb, shell, tmp_path):
    refused(shell(verb, CHOSEN[-1].name, code=2, folder=tmp_path), f"bash docs/drill.sh start {CHOSEN[-1].name}")


def test_refuses_folders_and_missing_programs(shell, tmp_path):
    name = CHOSEN[-1].name
    (tmp_path / "elsewhere" / name).mkdir(parents=True)
    (tmp_path / "file").write_text("")
    refused(shell("start", name, code=2, folder=tmp_path / "elsewhere"), "not a drill's folder")
    refused(shell("start", name, code=2, folder=tmp_path / "file"), "ile")
    refused(shell("start", name, code=2, binaries=tmp_path / "nothing"), "bash tests/setup.sh")
    (tmp_path / "path").mkdir()  # of programs, without mpirun
    for tool in ("bash", "dirname", "python3"):
        (tmp_path / "path" / tool).symlink_to(sys.executable if tool == "python3" else shutil.which(tool))
    refused(shell("start", name, code=2, folder=tmp_path / "x", env={"PATH": str(tmp_path / "path")}),
            "no mpirun: run `bash tests/setup.sh`")
    done = subprocess.run(["bash", ROOT / "docs/drill.sh", "start", name, "--seed"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("drill: ") and "--seed" in done.stderr


def test_of_two_reruns_at_once_each_has_its_own_folder(shell, tmp_path):
    class Both:  # a runner whose first run begins another before it ends
        begun = 0

        def job(self, name, flags, fault, ranks, folder, on):
            self.begun += 1
            (folder / "metrics.jsonl").write_text(str(self.begun))
            return drills.rerun(self, drill, None, {}) if self.begun == 1 else 0

    drill, runner = shell.started(CHOSEN[-1], SEEDS[1])[0], Both()
    drill.folder = tmp_path
    (tmp_path / "rerun-x").mkdir()
    drills.rerun(runner, drill, None, {})
    assert [(tmp_path / f"rerun-{number}/metrics.jsonl").read_text() for number in (1, 2)] == ["2", "1"]


@pytest.mark.parametrize("incident", [each for each in INCIDENTS if "one" in each.extra.values()][:1])
def test_script_of_one_rank_in_a_folder_with_a_space_and_a_command(incident, binaries, tmp_path):
    class Nothing:
        programs = tmp_path / "it's $(touch x)"

        def job(self, name, flags, fault, ranks, folder, on=None):
            (folder / "metrics.jsonl").write_text("")

        def one_rank(self, flags, folder, metrics):
            self.job(None, None, None, None, folder)

    Nothing.programs.mkdir()
    (Nothing.programs / "01_single_gpu").write_text("#!/bin/sh\nfor word; do echo \"$word\"; done\n")
    (Nothing.programs / "01_single_gpu").chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(incident, "evidence", lambda case: [])
        drills.start(Nothing(), incident, tmp_path, 7)
    script = tmp_path / incident.name / "one-rank.sh"
    done = subprocess.run(["bash", script, "--dtype", "a b"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == f"{script.parent}/one\n", done
    assert (script.parent / "one-rank.log").read_text().endswith("--save-reference\none\n--dtype\na b\n")
    assert not list(tmp_path.rglob("x"))


def test_damaged_state_and_list(shell):
    drill, right = shell.started(CHOSEN[-1], SEEDS[1])
    shell.marks(CHOSEN[-1].name, right, 0)
    done = shell("list")
    done.says(*(each.name for each in INCIDENTS), f"{len(right)} of {len(right)}", where="out")
    kept = drill.path.read_text()
    for damage in ("", "{}", kept.replace("drawn", "draw"), kept[:30], kept.replace("hints", "hint"), "[" * 99999):
        drill.path.write_text(damage)
        refused(shell("hint", CHOSEN[-1].name, code=2), "is damaged", f"start {CHOSEN[-1].name}")
    drill.path.write_text(kept)
