"""Only this catches: a printed figure, a snippet, a command, a link or a trap's test in a document that is stale.

    python3 -m pytest -k lessons                  every page, and a 24th of the commands that print their figures
    python3 -m pytest -k "lessons and 04_tensor"
"""
import pytest
from conftest import SLICE, in_turn
from lessons import PAGES, ROOT, Lessons
from lessons_printed import Runner, check, commands_of

COMMANDS = [(page, command, parts) for page in PAGES for command, parts in commands_of(page).items()]


def is_cheap(command):
    """Measurements and runs of several ranks are dear: first, so that each part has its share of them."""
    return not command.startswith(("python3", "mpirun"))


COMMANDS.sort(key=lambda each: is_cheap(each[1]))


def name_of(value):
    return str(value.relative_to(ROOT)) if value in PAGES else value if isinstance(value, str) else ""


@pytest.fixture(scope="module")
def checks(binaries):
    return Lessons(binaries), Runner(ROOT, binaries, 600)


def agrees(lessons):
    errors, lessons.errors = lessons.errors, []
    assert not errors, "\n".join(errors)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_page(checks, page):
    """Snippets, commands, links, traps, exercises, minutes, questions."""
    checks[0].check_lesson(page)
    agrees(checks[0])


def test_snippets_and_pictures(checks):
    checks[0].check_all()
    agrees(checks[0])


@pytest.mark.parametrize("page, command, parts", in_turn(COMMANDS, 24), ids=name_of)
def test_figures(checks, page, command, parts):
    """What the command prints is what the page shows."""
    if any(shown.slow for shown in parts) and SLICE != "all":
        pytest.skip(f"minutes (python3 tests/lessons.py build/bin {page.relative_to(ROOT)} --run --all)")
    for shown in parts:
        check(*checks, page, shown)
    agrees(checks[0])
