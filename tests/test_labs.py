"""What only this catches: a lab (docs/labs) that is graded in another way than it promises: nothing for the blank file,
all for the shipped body, and of each wrong body the rows that lab.json says, with its remark.

One lab, or all with TRAIN70B_TEST_SLICE=all, in the build folder. What a student has written there is put aside and
back.
"""
import contextlib
import importlib.util
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from conftest import ROOT, in_turn

sys.path.insert(0, str(ROOT / "docs/labs"))
import grade  # noqa: E402
import lab as labs  # noqa: E402
import lab_files  # noqa: E402
import teacher  # noqa: E402

grade.ROW_SECONDS = 60  # the machine may be busy with other things
LABS = [lab_files.Lab(name, ROOT / "build") for _, name in lab_files.all_labs()]
CHOSEN = in_turn(LABS, len(LABS))
of_labs = pytest.mark.parametrize("lab", [each.name for each in CHOSEN], indirect=True)


@pytest.fixture(scope="module")
def lab(request, build):
    lab, aside = lab_files.Lab(request.param, build), build / "lab" / f"{request.param}.aside"
    if lab.folder.exists():
        shutil.rmtree(aside, ignore_errors=True)
        lab.folder.rename(aside)
    lab.folder.mkdir(parents=True)
    lab.file.write_text(lab.blank())
    yield lab
    shutil.rmtree(lab.folder)
    if aside.exists():
        aside.rename(lab.folder)


def graded(lab, text):
    """(the score card, what it prints)."""
    lab.file.write_text(text)
    card = grade.grade(lab, False)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        labs.print_card(card)
    return card, " ".join(printed.getvalue().split())


def with_body(lab, text):
    """The shipped file with the edits of `text` (blocks of lines that stay, " ", go, "-", and come, "+"; each stands there
    once), with its regions, or with it as the body of the lab's only region."""
    shipped = lab.source.read_text()
    if text[0] in " -+":
        for block in text.rstrip("\n").split("\n\n"):
            old, new = ("".join(f"{line[1:]}\n" for line in block.split("\n") if line[0] in " " + sign) for sign in "-+")
            assert shipped.count(f"\n{old}") == 1, f"stands {shipped.count(old)} times in {lab.source.name}:\n{old}"
            shipped = shipped.replace(f"\n{old}", f"\n{new}")
        return shipped
    found = lab_files.regions(text)
    if not found:
        return lab_files.replace(shipped, lab.tags()[0], textwrap.indent(text.rstrip("\n"), "    "))
    for tag, begin, end in found:
        shipped = lab_files.replace(shipped, tag, "\n".join(text.split("\n")[begin:end]))
    return shipped


@of_labs
def test_blank_file_gets_nothing(lab):
    assert len(lab.hints()) == 3 and len(lab.about["wrong"]) >= 3
    card, shown = graded(lab, lab.blank())
    assert card["points"] == 0 and not grade.complete(card) and "nothing is written yet" in card.get("error", ""), shown


@of_labs
def test_begun_file_compiles_and_is_told_what_is_not_written(lab):
    if lab.puzzle:
        pytest.skip("a puzzle is not compiled")
    card, shown = graded(lab, lab.blank() + "// begun\n")
    assert card["points"] < card["of"], shown
    assert any("not written yet" in row.get("found", "") + row.get("remark", "") for row in card["rows"]), shown


@of_labs
def test_shipped_body_gets_full_marks(lab):
    card, shown = graded(lab, (lab.of / "solution.txt" if lab.puzzle else lab.source).read_text())
    assert grade.complete(card) and card["points"] > 0, shown
    states = re.search(r"(\S+ GB) of parameters, gradients and optimizer states", str(card["rows"]))
    assert not states or states[1] in (lab.of / "solution.md").read_text()


@pytest.mark.parametrize("lab, wrong", [(each.name, wrong) for each in CHOSEN for wrong in each.about["wrong"]],
                         indirect=["lab"])
def test_wrong_body_loses(lab, wrong):
    text, promise = (lab.of / "wrong" / f"{wrong}.inc").read_text(), lab.about["wrong"][wrong]
    card, shown = graded(lab, text if lab.source.suffix == ".txt" else with_body(lab, text))
    lost = [row["row"] for row in card["rows"] if row["points"] < row["of"]]
    assert "error" not in card and lost == promise["loses"] and 0 < card["points"] < card["of"], shown
    assert promise["says"] in shown


@pytest.mark.parametrize("lab, text", [(each.name, text) for each in CHOSEN for text in each.about.get("refused", {})],
                         indirect=["lab"])
def test_refused_puzzle(lab, text):
    with pytest.raises(lab_files.Refused) as refused:
        graded(lab, text + "\n")
    assert lab.about["refused"][text] in str(refused.value) and "\n" not in str(refused.value)


@of_labs
def test_a_seed_draws_what_the_courses_own_body_does_not_do(lab):
    if "drawn" not in lab.about:
        pytest.skip("nothing is drawn")
    own, drawn = (lab.of / "solution.txt" if lab.puzzle else lab.source).read_text(), (lab.of / "drawn.inc").read_text()
    for text, full in ((own, False), (drawn if lab.puzzle else with_body(lab, drawn), True)):
        card, shown = graded(lab, f"{'#' if lab.puzzle else '//'} Seed anna: mine\n{text}")
        assert grade.complete(card) == full and card["drawn"] and "seed anna" in shown, shown


def test_a_seed_is_in_the_students_file_and_no_other_one_is_graded(tmp_path):
    lab = lab_files.Lab("mesh-groups", tmp_path, "anna")
    labs.start(lab, False)
    again = lab_files.Lab("mesh-groups", tmp_path)
    assert again.written() == again.blank() and again.drawn() == lab.drawn() != {}
    assert len({str(lab_files.Lab("mesh-groups", tmp_path, str(seed)).drawn()) for seed in range(20)}) > 10
    for seed, part in (("bert", "has seed anna, not bert"), ("=1+1", "1 to 40 letters"), ("", "1 to 40 letters")):
        with pytest.raises(lab_files.Refused, match=part):
            lab_files.Lab("mesh-groups", tmp_path, seed).written()


def test_a_tree_for_students_has_no_bodies_and_starts_labs_all_the_same(tmp_path):
    tree = tmp_path / "tree"
    teacher.student_tree(tree)
    assert not (tree / ".git").exists() and not any(tree.glob("docs/labs/*/*/*")) and (tree / "tests").is_dir()
    for lab in LABS:
        for tag in [] if lab.puzzle else lab.tags():
            own, left = (lab_files.body_of((root / lab.about["source"]).read_text(), tag)[0] for root in (ROOT, tree))
            assert f'#include "{tag}.inc"' in left and not set(own.split("\n")) & set(left.split("\n"))
    for words, code in ("start mesh-groups", 0), ("unpack", 0), ("solution mesh-groups", 2):
        done = subprocess.run(["bash", tree / "docs/lab.sh", *words.split(), "--build", tmp_path], capture_output=True)
        assert done.returncode == code and (tree / teacher.PACKED).is_file(), done.stderr
    lab = lab_files.Lab("mesh-groups", tmp_path)
    assert lab.file.read_text() == lab.blank()
    for tag in lab.tags():
        assert (tmp_path / f"bodies/{tag}.inc").read_text() == lab_files.body_of(lab.source.read_text(), tag)[0] + "\n"


def test_the_leaderboard_keeps_each_persons_best(tmp_path, monkeypatch):
    lab, board = lab_files.Lab("fit-70b", tmp_path), tmp_path / "board.csv"
    full = {"lab": lab.name, "rows": [], "points": 10, "of": 10}
    for name, merit, place in (("anna", (800, 60.0), 1), ("Bert", (848, 57.55), 1), ("anna", (874, 58.6), 1),
                               ("anna", (700, 40.0), 1), ("Zoë", (848, 50), 2)):
        monkeypatch.setattr(teacher, "graded_by_script", lambda _, what, merit=merit: merit)
        assert teacher.enter(lab, full, board, name) == place
    assert [line.split(",")[0::2] for line in board.read_text("utf-8").split("\n")[1:-1]] == [
        ["anna", "874"], ["Zoë", "848"], ["Bert", "848"]]
    assert list(tmp_path.iterdir()) == [board]  # nothing half-written beside it
    for name, points, file, part in (("=x", 10, board, "letters"), ("a,b", 10, board, "letters"),
                                     ("anna", 9, board, "full marks"), ("anna", 10, ROOT / "LICENSE", "no leader")):
        with pytest.raises(lab_files.Refused, match=part):
            teacher.enter(lab, {**full, "points": points}, file, name)


def test_lab_of_the_emulated_gpu_without_cudas_headers_names_their_packages(tmp_path, monkeypatch, capsys):
    of = importlib.util.spec_from_file_location("of_kernels", ROOT / "docs/labs/tiled-product/grade.py")
    of.loader.exec_module(grader := importlib.util.module_from_spec(of))
    monkeypatch.setattr(grader, "HEADERS", [tmp_path])
    with pytest.raises(SystemExit, match="2"):
        grader.headers(tmp_path)
    said = capsys.readouterr().err
    assert "nvidia-cuda-runtime nvidia-cuda-crt" in said and said.count("\n") == 1
    (tmp_path / "cuda_runtime_api.h").touch()
    assert grader.headers(tmp_path) == tmp_path


# ---- the grader itself ----
@pytest.mark.parametrize("words, parts", [
    (["start", "zig\nzag"], ["there is no lab zig zag"]),
    (["start", "zigzag", "--build", "FOLDER/file"], ["Not a directory (is --build a folder"]),
    (["start", "zigzag", "--build", "/proc"], ["/proc/lab: ", "is --build a folder"]),
    (["hint", "zigzag", "--build", "FOLDER"], ["hints is damaged: remove it"])])
def test_lab_sh_refuses(words, parts, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "lab/zigzag").mkdir(parents=True)
    (tmp_path / "lab/zigzag/hints").write_text("two")
    words = [word.replace("FOLDER", str(tmp_path)) for word in words]
    done = subprocess.run(["bash", ROOT / "docs/lab.sh", *words], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert all(part in done.stderr for part in parts), done.stderr


def test_start_starts_the_clock_and_check_shows_it(tmp_path, capsys):
    lab = lab_files.Lab("ring-all-reduce", tmp_path)
    assert labs.clock(lab) is None
    labs.start(lab, False)
    assert labs.clock(lab) == 0
    (lab.folder / "started").write_text(str(time.time() - 31.5 * 60))
    row = {"row": "right", "points": 3, "of": 3}
    labs.print_card({"lab": lab.name, "rows": [row], "points": 3, "of": 3, "seconds": 1, "minutes": labs.clock(lab),
                     "of_minutes": lab.about["minutes"]})
    assert "clock: 31 of 45 minutes" in capsys.readouterr().out
    labs.start(lab, True)
    assert labs.clock(lab) == 0


def test_lab_sh_takes_the_callers_folder_and_any_locale(tmp_path):
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for words in ("start fit-70b --build mine", "hint fit-70b --build mine", "solution fit-70b", "solution zigzag"):
        done = subprocess.run(["bash", ROOT / "docs/lab.sh", *words.split()], cwd=tmp_path, env=plain,
                              capture_output=True, encoding="utf-8")
        assert done.returncode == 0 and not done.stderr, done.stderr
    assert (tmp_path / "mine/lab/fit-70b").is_dir()


@pytest.mark.parametrize("lines, part", [
    ("[1/2] Linking\nld: cannot find -lopenblas\ncollect2: error: ld returned 1 exit status", "cannot find -lopenblas"),
    ("ninja: error: manifest 'build.ninja' still dirty after 100 tries", "still dirty")])
def test_a_build_that_fails_is_not_the_students_fault(lines, part, tmp_path, monkeypatch):
    (tmp_path / "CMakeCache.txt").write_text("")
    (tmp_path / "cmake").write_text(f"#!/bin/sh\ncat <<'END'\n{lines}\nEND\nexit 1\n")
    (tmp_path / "cmake").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(lab_files.Refused, match=part) as refused:
        grade.compile_target(lab_files.Lab("zigzag", tmp_path), "lab_zigzag")
    assert "rm -r " in str(refused.value)


def test_a_failed_expectation_is_shown_with_its_values():
    assert grade.of_doctest("""\
TEST CASE:  every schedule

05_schedule.cpp:51: ERROR: CHECK( in_flight(schedule, rank) == in_flight_formula(schedule, rank) ) is NOT correct!
  values: CHECK( 2 == 1 )
  logged: 1f1b, 3 stages
          rank 0

""") == "the test \"every schedule\" fails: 2 is not 1 (1f1b, 3 stages, rank 0)"
    assert grade.of_doctest("TEST CASE:  one\nx.cpp:1: ERROR: CHECK( good(x) ) is NOT correct!\n"
                            "  values: CHECK( false )\n") == "the test \"one\" fails: good(x) does not hold"


def test_a_child_that_keeps_stdout_open_is_not_waited_for():
    forks = ("import os, time\nprint(1, flush=True)\nif not os.fork():\n os.setsid(); print(os.getpid(), flush=True); "
             "time.sleep(40)")
    began = time.monotonic()
    code, output = grade.run([sys.executable, "-c", forks], 1)
    with contextlib.suppress(OSError, IndexError, ValueError):
        os.kill(int(output.split()[1]), signal.SIGKILL)
    assert code is None and output.startswith("1\n") and time.monotonic() - began < 20
