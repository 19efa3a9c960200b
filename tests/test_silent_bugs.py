"""What only this catches: docs/silent-bugs.md beside another program than it was recorded with: its tables are those of
docs/results/silent_bugs.csv, every patch applies, and the right program is seen by no check.

The right program runs in an eighth of the layouts. With TRAIN70B_TEST_SLICE=all every bug is made, built and run
again, in the build's folder silent: the checks must see what the CSV says that they see.
"""
import importlib.util
import re
import subprocess
import sys

import pytest
from conftest import ROOT, SLICE, in_turn

SPEC = importlib.util.spec_from_file_location("docs_silent_bugs", ROOT / "docs/silent_bugs.py")
silent = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(silent)
checks, bugs = silent.checks, silent.bugs


def program(*words):
    done = subprocess.run([sys.executable, ROOT / "docs/silent_bugs.py", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_page_is_what_the_record_gives():
    program("--check")


def test_every_patch_applies_in_at_most_ten_lines():
    for name, patch in silent.listed_patches().items():
        silent.command(name, "git", "-C", ROOT, "apply", "--check", silent.PATCHES / f"{name}.diff")
        changed = re.findall(r"^([-+])(?!--|\+\+)", patch, re.M)
        assert 0 < max(changed.count("-"), changed.count("+")) <= 10, name


def test_every_bug_has_a_thread_and_none_twice():
    threads = [path for each in bugs.THREADS for _, path in each[0]]
    assert len(set(threads)) == len(threads)
    assert sorted(name for *_, name in bugs.THREADS if name) == sorted(bug.name for bug in bugs.RUN)


@pytest.mark.parametrize("bug", in_turn(silent.controls()), ids=lambda bug: f"{bug.layout} {bug.model}")
def test_right_program_is_seen_by_no_check(bug, binaries, tmp_path):
    silent.references.masked_text(tmp_path, (ROOT / "docs/data/corpus.txt").read_bytes())
    here, name, ranks = tmp_path / "layout", binaries / "08_3d_full", checks.ranks_of(bug.layout)
    here.mkdir()
    checks.run(name, 1, checks.flags_of(bug.model, steps=4, save_reference="one"), here)
    checks.run(name, ranks, checks.flags_of(bug.model, bug.layout, steps=4, save_reference="mine"), here)
    c = silent.comparison.Comparison(str(here / "mine"), str(here / "one"))
    assert not list(c.differences())
    assert checks.weights_after(c.a, c.b) <= checks.WEIGHTS
    flags = checks.flags_of(bug.model, bug.layout, steps=4, replica_check=1)
    assert checks.replicas(name, ranks, flags, here) in ("no", "none")


@pytest.mark.skipif(SLICE != "all", reason="some minutes for each bug: with TRAIN70B_TEST_SLICE=all")
def test_all_bugs_again_are_seen_by_the_same_checks(build, tmp_path):
    program("--csv", tmp_path / "again.csv", "--work", build / "silent")
    again = {row["text"]: checks.sees(row) for row in silent.read(tmp_path / "again.csv")}
    assert again == {row["text"]: checks.sees(row) for row in silent.read()}
