"""Only this catches: an include that leads upwards or round in a circle, a minimal.cpp that stands on too much, a first
screen that is too full, a Python program that reads text by the locale, a test that is not run."""
import ast
import re

import pytest
from conftest import ROOT

# Names on the first screen of a chapter.
MOST = {"08_3d_full": 9}
# Folders and beginnings of files, lower ones first. Each may include itself and what stands in the lines above,
# chapters 02 to 07 also those with a lower number: nothing else of its own line, so that there is no circle.
LAYERS = """
01_single_gpu/core/
01_single_gpu/ops/
01_single_gpu/complete/
01_single_gpu/complete/data/ 01_single_gpu/complete/hf/
01_single_gpu/minimal
01_single_gpu/complete/flags/config_file
01_single_gpu/complete/flags/flags
01_single_gpu/complete/experts/
01_single_gpu/complete/flags/
01_single_gpu/complete/non_finite
01_single_gpu/complete/trainer
01_single_gpu/complete/report/
01_single_gpu/complete/run/
01_single_gpu/complete/main
02_ 03_ 04_ 05_ 06_ 07_ 08_3d_full/minimal
08_3d_full/complete/layout/
08_3d_full/checkpoint/
08_3d_full/experts/
08_3d_full/watch/
08_3d_full/complete/
08_3d_full/plan/
08_3d_full/complete/main 08_3d_full/plan/main
"""
PLACES = {place: number for number, line in enumerate(LAYERS.split("\n")) for place in line.split()}
SOURCES = {str(path.relative_to(ROOT)): path.read_text() for path in ROOT.glob("0*/**/*")
           if path.suffix in (".h", ".cpp", ".cu", ".cuh")}
INCLUDES = {path: re.findall(r'^#include "(0[1-8]_[^"]+)"', text, re.M) for path, text in SOURCES.items()}
DOOR = r"(?i)expert|router|moe"  # a word of a mixture of experts: behind one door, and in at most so many other files
BEHIND_IT, MOST_FILES = r"0\d_\w+/experts/|01_single_gpu/(complete/experts|ops)/", 20
MOST_LINES = 7000  # a minimal.cpp with all that it includes, and X.cpp beside X.h


def place(path):
    """The longest of LAYERS that the path begins with."""
    return max((each for each in PLACES if path.startswith(each)), key=len)


def is_below(path, other):
    layers = [(PLACES[place(each)], each[:2]) for each in (path, other)]
    return layers[0] < layers[1] or place(path) == place(other)


def closure(path):
    found, waiting = set(), [path]
    while waiting:
        each = waiting.pop()
        if each not in found and each in SOURCES:
            found.add(each)
            waiting += INCLUDES[each] + [each.removesuffix(".h") + ".cpp"] * each.endswith(".h")
    return found


def opens_text(call):
    """Whether a call opens text without saying its encoding, which is then the locale's."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name not in ("open", "read_text", "write_text") and not any(key.arg == "text" for key in call.keywords):
        return False
    given = [*call.args, *(key.value for key in call.keywords)]
    words = [str(each.value) for each in given if isinstance(each, ast.Constant)]
    return not any(re.fullmatch(r"utf-8|[rwax]\+?b|[rwax]b\+?", word) for word in words) and not (
        isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "os")


def test_programs_read_and_write_utf_8_in_any_locale():
    files = [path for place in ("docs/**/", "0*/**/", "tests/lessons", "tests/checkpoint_reader")
             for path in ROOT.glob(f"{place}*.py")]
    calls = [(path, node) for path in files for node in ast.walk(ast.parse(path.read_text("utf-8")))
             if isinstance(node, ast.Call)]
    found = [f"{path.relative_to(ROOT)}:{node.lineno}" for path, node in calls if opens_text(node)]
    assert len(files) > 50 and not found, "\n".join(found)


def test_includes_lead_downwards():
    wrong = [f"{path} includes {each}" for path in SOURCES for each in INCLUDES[path] if not is_below(each, path)]
    assert not wrong, "\n".join(wrong)


def test_minimal_stands_on_little():
    lines = {path: sum(SOURCES[each].count("\n") for each in closure(path)) for path in SOURCES
             if path.endswith("/minimal.cpp")}
    print(*(f"{count:6} {path}" for path, count in sorted(lines.items())), sep="\n")
    assert len(lines) == 9 and max(lines.values()) <= MOST_LINES, lines


def test_experts_stand_behind_one_door():
    files = [path for path, text in SOURCES.items() if re.search(DOOR, text) and not re.match(BEHIND_IT, path)]
    assert "01_single_gpu/minimal.h" not in files and len(files) <= MOST_FILES, "\n".join(sorted(files))


@pytest.mark.parametrize("chapter", sorted(ROOT.glob("0[1-8]_*")), ids=lambda path: path.name)
def test_first_screen(chapter):
    names = [path.name for path in chapter.iterdir() if not path.name.startswith((".", "__"))]
    assert {"README.md", "minimal.cpp", "complete"} <= set(names) and len(names) <= MOST.get(chapter.name, 7), names


def test_files_of_tests_are_listed_and_run():
    page, run = ((ROOT / "tests" / name).read_text() for name in ("README.md", "CMakeLists.txt"))
    for file in (path for each in ("[0-9]*.cpp", "test_*.py") for path in ROOT.glob(f"tests/{each}")):
        assert file.name in page
        assert re.search(rf"\b({file.name}|{file.stem}|{file.stem.split('_', 1)[1]})\b", run), file.name
