"""Only this catches: a wrong figure, a dead link or a failing rank that .ci/run would let pass.

In a copy of the scripts and tests with one page, the built programs and CTest's entries of two tests; nothing is built.
"""
import re
import shutil
import subprocess

import pytest
from conftest import ROOT

RANKS_TEST = "05_minimal"
PAGE = """# A miniature
[The scripts](tests/run.sh).

<!-- prints: build/bin/schedule --name gpipe --stages 2 --micro-batches 2 -->
```
FENCE
```
"""
UNIT = "#include <regex>\nstd::regex unit(\"a|b\");\n"  # run.sh compiles it to know how fast the machine is


def entries(build, copy):
    """The lines of CTest's file for these tests, as the copy's."""
    text = "".join(path.read_text() for path in sorted(build.rglob("CTestTestfile.cmake")))
    found = re.findall(r"^add_test\(\[=\[(\S+)\]=\] (.*)$", text, re.M)
    names = [name for name, command in found if name == RANKS_TEST or "tests/test_lessons.py" in command]
    assert RANKS_TEST in names and len(names) > 1, f"CTest has not both {RANKS_TEST} and test_lessons.py: {names}"
    lines = [line for line in text.split("\n") for name in names if f"([=[{name}]=] " in line]
    return "\n".join(lines).replace(f"{build}/", f"{copy}/build/").replace(f"{ROOT}", f"{copy}")


@pytest.fixture
def copy(run, build, binaries):
    """run's folder, in which everything is right."""
    folder = run.folder
    for name in ("tests", ".ci"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.cu", "*.md"))
    (folder / "docs/data").mkdir(parents=True)
    for file in [*ROOT.glob("docs/*.py"), ROOT / "CMakeLists.txt", ROOT / "docs/data/corpus.txt"]:
        shutil.copy(file, folder / file.relative_to(ROOT))
    (folder / "tests/setup.sh").write_text("exit 0\n")
    (folder / "tests/unit.cpp").write_text(UNIT)
    (folder / "build").mkdir()
    (folder / "build/bin").symlink_to(binaries)
    (folder / "build/CTestTestfile.cmake").write_text(entries(build, folder))
    printed = run("schedule", "--name gpipe --stages 2 --micro-batches 2").out
    (folder / "README.md").write_text(PAGE.replace("FENCE", printed.split("\n\n")[0].strip()))
    return folder


def ci(run, copy, **environment):
    return run("bash", ".ci/run", code=None, seconds=300, env={"TRAIN70B_BUILD": "build", **environment})


def test_harness_passes_what_is_right(run, copy):
    run("ctest", "--test-dir build --output-on-failure").says("100% tests passed", where="out")


@pytest.mark.parametrize("old, new, says", [
    (r"(?m)^(bubble: .*?)\d", r"\g<1>9", "README.md:6: differs from the output of build/bin/schedule"),
    (r"tests/run\.sh", "tests/walk.sh", "README.md:2: link to tests/walk.sh: there is no such file")],
    ids=["figure", "link"])
def test_harness_fails_for_a_wrong_page(run, copy, old, new, says):
    page = copy / "README.md"
    changed = re.sub(old, new, page.read_text(), count=1)
    assert changed != page.read_text()
    page.write_text(changed)
    done = ci(run, copy)
    assert done.code not in (0, 124), done
    done.says(says, where="out")


def test_harness_fails_for_one_rank(run, copy):
    done = ci(run, copy, TRAIN70B_FAIL_RANK="2")
    assert done.code not in (0, 124), done
    done.says("rank 2: fails", RANKS_TEST, where="out")


@pytest.mark.parametrize("apt, cmake, code, says", [
    (False, "exit 0", 0, "no apt here"), (True, "exit 0", 0, "neither root nor sudo: not installed, unless by other"),
    (False, "exit 1", 2, "install what CMake does not find"), (False, None, 2, "no cmake here")])
def test_harness_sets_up_what_it_cannot_install(apt, cmake, code, says, tmp_path):
    tools, tests = tmp_path / "tools", tmp_path / "checkout/tests"
    tools.mkdir(), tests.mkdir(parents=True)
    for name in ("bash", "dirname", "nproc", "grep"):
        (tools / name).symlink_to(shutil.which(name))
    made = {"cmake": cmake and f'echo "$@" >>calls; {cmake}', "id": "echo 1000",
            "dpkg-query": "exit 1" if apt else None, "apt-get": "exit 1" if apt else None}
    for name, body in made.items():
        if body:
            (tools / name).write_text(f"#!/bin/bash\n{body}\n")
            (tools / name).chmod(0o755)
    shutil.copy(ROOT / "tests/setup.sh", tests)
    done = subprocess.run(["bash", "../checkout/tests/setup.sh", "here", "01_single_gpu"], cwd=tools, text=True,
                          capture_output=True, env={"PATH": str(tools)})
    assert done.returncode == code and says in done.stdout + done.stderr, done
    if cmake:
        assert f"-S . -B {tools}/here\n" in (tests.parent / "calls").read_text()
