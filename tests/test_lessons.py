"""Only this catches: a printed figure, a snippet, a command, a link or a trap's test in a document that is stale.

    python3 -m pytest -k lessons                  every page, and a sixteenth of the commands that print their figures
    python3 -m pytest -k "lessons and 04_tensor"
"""
import pytest
from conftest import in_turn
from lessons import PAGES, ROOT, Lessons
from lessons_printed import Printed, commands_of

COMMANDS = [(page, command, held) for page in PAGES for command, held in commands_of(page).items()]


def is_cheap(command):
    """Tables of times and several runs are dear: first, so that each eighth has one or two of them."""
    return not command.startswith(("python3", "bash")) and ("mpirun" not in command or "--tables off" in command)


COMMANDS.sort(key=lambda each: is_cheap(each[1]))


def name_of(value):
    return str(value.relative_to(ROOT)) if value in PAGES else value if isinstance(value, str) else ""


@pytest.fixture(scope="module")
def checks(binaries):
    lessons = Lessons(binaries)
    return lessons, Printed(lessons)


def agrees(lessons):
    errors, lessons.errors = lessons.errors, []
    assert not errors, "\n".join(errors)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_page(checks, page):
    """Snippets, commands, links, traps, exercises, minutes; where the figures of lessons are from."""
    checks[0].check_lesson(page)
    agrees(checks[0])


def test_snippets_and_pictures(checks):
    checks[0].check_all()
    agrees(checks[0])


@pytest.mark.parametrize("page, command, held", in_turn(COMMANDS, 16), ids=name_of)
def test_figures(checks, page, command, held):
    """What the command prints is what the page shows."""
    if held.slow:
        pytest.skip(f"{held.slow} (python3 tests/lessons.py build/bin {page.relative_to(ROOT)} --run --all)")
    checks[1].check(page, command, held)
    agrees(checks[0])
