"""Slurm itself, in docs/cluster/box.sh: how it starts and binds ranks, the examples of docs/cluster.md, a lost node."""
import json
import os
import pathlib
import re
import shutil
import tempfile
import time

import pytest

import programs
import test_box
from conftest import PATIENCE, ROOT
from lessons_commands import working_folder
from lessons_text import parse
from test_box import BIN, PROGRAM, SMALL, box, nodes  # noqa: F401  (a fixture)



@pytest.fixture
def slurm(nodes):  # noqa: F811
    """The same with Slurm; what it makes first is a folder for files that all nodes see."""
    if not all(map(shutil.which, ("slurmctld", "slurmd", "srun", "munged"))):
        pytest.skip("no Slurm here (slurm-wlm, munge)")

    def up(*flags):
        try:
            nodes("--slurm", *flags)
        except AssertionError as error:
            if "Slurm did not start" in str(error):
                pytest.skip(str(error).strip().splitlines()[-1])
            raise
        (folder := pathlib.Path(test_box.FOLDER, "files")).mkdir()
        return folder
    return up


def wait(what, true, log=None):
    end = time.monotonic() + 120 * PATIENCE
    while not true():
        assert time.monotonic() < end, f"no {what}\n{log.read_text('utf-8')[-3000:] if log and log.exists() else ''}"
        time.sleep(0.1)


def submit(job, *before, cwd=ROOT):
    """Waits for its end, as sbatch --wait does, which looks every ten seconds."""
    box("exec", 0, *before, "sbatch", job, cwd=cwd)
    wait("end of the job", lambda: not box("exec", 0, "squeue", "-h"))


def script(file, *lines, flags=()):
    """An sbatch script; the path."""
    file.write_text("\n".join(["#!/bin/bash", *(f"#SBATCH {flag}" for flag in flags), *lines, ""]), "utf-8")
    return file


def test_launchers_and_masks(slurm):
    """mpirun in a job has its nodes from Slurm and starts its daemons by srun; srun binds as --cpus-per-task says."""
    files = slurm()
    own = ["env", "-u", "OMPI_MCA_plm_rsh_agent", "-u", "OMPI_MCA_orte_default_hostfile"]  # of the box: not these
    train = f"{PROGRAM} {' '.join(SMALL)} --tables off"
    job = script(files / "job", f"mpirun {train}", flags=["-N2", "--ntasks-per-node=2", f"-o {files}/out"])
    submit(job, *own)
    for said in (files / "out").read_text("utf-8"), box("exec", 0, *own, "salloc", "-Q", "-N2", "--ntasks-per-node=2",
                                                        "mpirun", *train.split()):
        assert "node0: ranks 0 to 1, node1: ranks 2 to 3" in said, said

    def srun(*flags, code=0):
        return box("exec", 0, "env", "-u", "OMP_NUM_THREADS", "srun", *flags, BIN / "02_data_parallel", *SMALL,
                   code=code)
    for kind in ("none", "pmi2"):
        said = srun(f"--mpi={kind}", "-n2", code=2)
        assert said.count("each would train alone: type srun --mpi=pmix -n 2 or mpirun -np 2") == 1, said
    if "task/affinity" in pathlib.Path(test_box.FOLDER, "slurm.conf").read_text("utf-8"):
        cores = len(os.sched_getaffinity(0))
        for flags, threads, bound in (("-N2 -n4", 1, cores > 2), ("-N2 -n2", 1, cores > 1),
                                      ("-N2 -n2 --cpus-per-task=2", 2, cores > 2)):
            said = srun("--mpi=pmix", *flags.split())
            assert re.search(rf"kernels, {threads} thread", said), said
            assert ("a rank is bound to" in said) == bound, said
    else:
        print("NOT TESTED: masks; Slurm binds nothing here")


# ---- the examples of docs/cluster.md ----
SHAPE = "--layers 4 --hidden 32 --heads 4 --ffn 48 --steps 2"
SIZES = {r"--model \w+": SHAPE, "--tp 8": "--tp 2", "--seq-len 4096": "--seq-len 16", r'--data \S+': "",
         r"--global-batch \d+": "--global-batch 8"}
FOUR = {"-np 16": "-np 4", "ppr:8:node": "ppr:2:node", "slots=8": "slots=2", r"node-(\d)": r"node\1"}
SBATCH = {"--nodes=4-8": "--nodes=2", "--nodes=8": "--nodes=2", "--ntasks-per-node=8": "--ntasks-per-node=2",
          "(?m)^#SBATCH --gpus-per-node=8\n": "", "--cpus-per-task=12": "--cpus-per-task=1", "--pp 4": "--pp 2",
          "#!/bin/bash\n": "#!/bin/bash\n#SBATCH --output=log\n", "(?m)^export": "RUN=run\nexport"}
RESTART = {r"hosts \.\.\.": "hosts -np 4", r"08_3d_full \.\.\.": f"08_3d_full {SHAPE} --seq-len 16", "/data/": "",
           "-every 100": "-every 1"}
EXAMPLES = {  # how a block begins: what is substituted, and what it prints here; or why it does not run here
    "mpirun -np 8": (SIZES | {"-np 8": "-np 2"}, "node0: ranks 0 to 1\n"),
    "# hosts": (SIZES | FOUR, "node0: ranks 0 to 1, node1: ranks 2 to 3"),
    "#!/bin/bash": (SIZES | SBATCH, "ended with exit code 0"),
    "sudo bash docs/cluster/box.sh up": ({"sudo bash": "bash"}, "node2: ranks 4 to 5"),
    "python3 08_3d_full/checkpoint/restart.py": (RESTART, "ended with exit code 0"),
    "bash docs/measure_node.sh": "measures a GPU",
    "module load": "modules have other names everywhere",
    "mkdir -p kit": "downloads packages",
    "for deb in": "needs those packages"}


def blocks():
    """{how it begins: its text} of the page's code, and the blocks that are in no entry, or in several."""
    found, strange = {}, []
    for block in parse((ROOT / "docs/cluster.md").read_text("utf-8")):
        if block.kind != "text":
            text = "\n".join(line.removeprefix("    " if block.kind == "indented" else "") for line in block.lines)
            begins = [begin for begin in EXAMPLES if text.startswith(begin)]
            strange += [text] if len(begins) != 1 or begins[0] in found else []
            found[begins[0] if begins else text] = text
    return found, strange


def test_every_example_of_the_page_is_listed():
    found, strange = blocks()
    assert not strange and found.keys() == EXAMPLES.keys()


@pytest.mark.parametrize("begin", [begin for begin, how in EXAMPLES.items() if isinstance(how, tuple)])
def test_example_runs(begin, slurm, monkeypatch):
    substitutions, says = EXAMPLES[begin]
    text = blocks()[0][begin]
    for old, new in substitutions.items():
        text, count = re.subn(old, new, text)
        assert count, f"{old}: is not in the example"
    monkeypatch.setattr(tempfile, "tempdir", "/run")  # nodes have a /tmp of their own
    hosts, _, command = text.partition("\n\n") if begin == "# hosts" else ("node0 slots=2\nnode1 slots=2", "", text)
    with working_folder(ROOT, BIN) as folder:
        pathlib.Path(folder, "hosts").write_text(hosts + "\n", "utf-8")
        pathlib.Path(folder, "example").write_text(command + "\n", "utf-8")
        if "box.sh" in begin:
            said = programs.output(["bash", "-e", "example"], 60 * PATIENCE, {"TRAIN70B_BOX": test_box.FOLDER},
                                   cwd=folder)
        elif slurm() and "#SBATCH" in text:
            submit("example", cwd=folder)
            said = pathlib.Path(folder, "log").read_text("utf-8")
        else:
            said = box("exec", 0, "bash", "-e", "example", cwd=folder)
    assert says in said, text + said


# ---- a node that is gone ----
def test_requeued_when_nodes_are_gone(slurm, run):
    """On three of four nodes. The spare one replaces the first that goes, with bitwise the same losses in the steps that
    are repeated; after the second the run resumes on two."""
    files = slurm("--nodes", 4)
    shape = ("--layers 1 --heads 4 --hidden 32 --ffn 48 --seq-len 16 --global-batch 12 --micro-batch 1 --dtype fp64 "
             "--steps 100000")
    metrics, log = files / "m.jsonl", files / "log"
    job = script(files / "job", "python3 08_3d_full/checkpoint/restart.py -- srun --mpi=pmix --nodes=3 "
                 f"--ntasks-per-node=2 {PROGRAM} {shape} --checkpoint-dir {files}/d --checkpoint-every 50 "
                 f"--comm-timeout 4 --metrics {metrics}",
                 flags=["--nodes=2-3", "--exclusive", "--requeue", "--open-mode=append", f"--output={log}"])
    number = box("exec", 0, "sbatch", "--parsable", job).strip()

    def steps():  # of whole lines
        text = metrics.read_text("utf-8") if metrics.exists() else ""
        return [line for line in map(json.loads, text.split("\n")[:-1]) if line["event"] == "step"]

    def lose(node):
        """Between two checkpoints. Slurm waits two minutes before it starts the job again: nodes may be told late to end
        it, and end what then runs. Here the lost nodes stay lost."""
        begun = len(steps())
        wait("steps", lambda: len(steps()) > begun + 50 and 5 < steps()[-1]["step"] % 50 < 20, log)
        box("gone", node)
        begun, cut = len(steps()), []

        def resumed():
            reason, *restarts = box("exec", 0, "squeue", "-h", "-O", "reason,restartcnt").split()
            if reason == "BeginTime" and restarts not in cut:
                cut.append(restarts)
                box("exec", 0, "scontrol", "update", f"JobId={number}", "StartTime=now+2")
            return len(steps()) > begun + 10
        wait("steps after it", resumed, log)
        return begun
    first = lose(2)
    second = lose(3)
    box("exec", 0, "scancel", "--signal=USR1", number)
    wait("end", lambda: "restart: ended with exit code 0" in log.read_text("utf-8"), log)
    said = log.read_text("utf-8")
    for part in (*(f"node0: ranks 0 to 1, node1: ranks 2 to 3{last}\n" for last in (", node2: ranks 4 to 5",
                                                                                  ", node3: ranks 4 to 5", "")),
                 "no rank of this node has stopped: one of another is missing", f"restart: requeues job {number}\n",
                 "restart: 4 slots are left: 4 ranks, dp 4, ep 1\n"):
        assert part in said, f"{part}\n{said[-3000:]}"
    found = [(line["step"], line["loss"]) for line in steps()]
    parts = before, same, two = [*map(dict, (found[:first], found[first:second], found[second:]))]
    assert before.keys() & same and same.keys() & two
    assert all(same[step] == before[step] for step in before.keys() & same)
    one = run("08_3d_full", shape, "--stop-after", max(found)[0], "--metrics m.jsonl")
    expected = {line["step"]: line["loss"] for line in one.events()}
    for part in parts:
        assert part == pytest.approx({step: expected[step] for step in part}, rel=1e-10)
