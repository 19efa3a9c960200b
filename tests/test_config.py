"""--config and --print-config: what was given comes back, the command line's wins, and nothing in a file is guessed."""
import json
import pathlib
import re

import pytest

from conftest import ROOT, in_turn

PROGRAMS = ["01_single_gpu", "02_data_parallel", "03_zero", "04_tensor_parallel", "05_pipeline", "06_context_parallel",
            "07_fp8", "08_3d_full", "plan", "schedule"]
SHAPE = "--layers 2 --hidden 32 --heads 4 --ffn 48 --seq-len 16 --global-batch 4 --steps 3"


def losses(run, file="m.jsonl"):
    return [json.loads(line)["loss"] for line in (run.folder / file).read_text().splitlines() if '"step"' in line[:16]]


def test_what_was_given_comes_back(run):
    prompt = pathlib.PurePosixPath('a "b" # it\'s, \\n [1,2]')  # not split at blanks
    printed = run("01_single_gpu", "--lr 1e-3 --data a#b:1,c:2 --steps 8 --prompt", prompt, "--print-config").out
    assert set(printed.splitlines()) == {"# 01_single_gpu", "lr = 1e-3", 'data = "a#b:1,c:2"', "steps = 8",
                                         'prompt = "a \\"b\\" # it\'s, \\\\n [1,2]"'}
    (run.folder / "run.toml").write_text(printed)
    assert run("01_single_gpu", "--config run.toml --print-config").out == printed
    assert "steps = 4\n" in run("01_single_gpu", "--config run.toml --steps 4 --print-config").out  # the line's wins


@pytest.mark.parametrize("program", in_turn(PROGRAMS, 4))
def test_every_program(run, program):
    (run.folder / "run.toml").write_text("stepz = 3\n")
    run.refused(program, "--config run.toml", says=["--config run.toml: stepz: unknown flag; did you mean"])
    assert "# " + program in run(program, "--print-config").out


@pytest.mark.parametrize("text, says", in_turn([
    ("[training]\nsteps = 3", ["line 1: [training]: must be NAME = VALUE"]), ("steps", ["line 1: steps"]),
    ("# a run\n\ndtype = bf16", ["line 3: dtype = bf16", '"a text"']), ("steps = 3\nsteps = 4", ["line 2: steps: is there twice"]),
    ("steps = 3 4", ["line 1"]), ('prompt = "a', ["line 1"]), ("\0\xff", ["line 1"]), ("config = 'b'", ["config"]),
    ("steps = -1", ["--steps: -1 must be an integer"]), ("steps = [1, 2]", ["--steps: 1,2 must be an integer"]),
    ("help = true", ["help"]), (None, ["--config: run.toml was not readable"])], 4))
def test_refused(run, text, says):
    if text is not None:
        (run.folder / "run.toml").write_text(text)
    run.refused("01_single_gpu", "--config run.toml", says=says)


def test_a_run_starts_again_from_what_it_wrote(run):
    """From its metrics, its reference and its checkpoint."""
    (run.folder / "run.toml").write_text("".join(
        f"{flag.split()[0]} = {flag.split()[1]} # a comment\n" for flag in SHAPE.split("--")[1:]) + "zero = [2]\n")
    run("08_3d_full", "--config run.toml --dp 2 --metrics m.jsonl --checkpoint-dir c --checkpoint-every 3", ranks=2)
    expected = losses(run)
    run("08_3d_full", f"{SHAPE} --dp 2 --zero 2 --metrics n.jsonl --save-reference r", ranks=2)
    assert losses(run, "n.jsonl") == expected and len(expected) == 3
    manifest = next((run.folder / "c").rglob("manifest.json"))
    first = json.loads((run.folder / "m.jsonl").read_text().splitlines()[0])
    for place, written in (("metrics", first), ("reference", json.loads((run.folder / "r/reference.json").read_text())),
                           ("checkpoint", json.loads(manifest.read_text()))):
        text = re.sub(r'(checkpoint-dir|save-reference) = "\w+', rf"\g<0>-{place}", written["flags"]["config"])
        (run.folder / f"{place}.toml").write_text(text)
        run("08_3d_full", f"--config {place}.toml --metrics {place}.jsonl", ranks=2)
        assert losses(run, f"{place}.jsonl") == expected, text


def test_docs_configs_are_the_commands_of_the_page(run):
    (run.folder / "long.txt").write_text("a" * 1_100_000)  # for a sequence of 1,048,576
    page = (ROOT / "docs/configurations.md").read_text()
    commands = re.findall(r"configurations.py ([\w-]+) -->\n<!-- template[^\n]*\n    mpirun -np (\d+) build/bin/08_3d_full "
                          r"((?:.*\\\n)*.*)", page)
    assert len(commands) == len(list((ROOT / "docs/configs").glob("*.toml"))) == 8
    for name, ranks, flags in in_turn(commands, 4):
        printed = run("08_3d_full", flags.replace("\\\n", " "), "--print-config").out
        text = (ROOT / f"docs/configs/{name}.toml").read_text()
        assert text == f"# mpirun -np {ranks} build/bin/08_3d_full --config docs/configs/{name}.toml\n" + \
            printed.partition("\n")[2], name
        dry = run("08_3d_full", "--config", ROOT / f"docs/configs/{name}.toml", "--data long.txt --comm fake --dry-run",
                  f"--fake-world {ranks} --fake-rank 0", seconds=120)
        assert f"{ranks} ranks" in dry.out, dry
