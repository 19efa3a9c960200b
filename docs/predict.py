#!/usr/bin/env python3
"""Predict, then run: asks the questions of a chapter, runs its commands, and scores the answers.

    python3 docs/predict.py 05 [--question N] [--build build] [--list]     --list: the questions only, runs nothing;
                                                                           05: or another chapter, or experts
    python3 docs/predict.py 05 --answers FILE [--json]                     one answer per line, for a teacher's script

An answer is a number: 4096, 1.5 MB (10^6), 1.5 MiB (2^20), 27%, 3/16 (of what the table's first row has, where the
figure is in bytes or a count), `same` (as the first row's). `?`, an empty line or the end of the input skips the
question. Points: 10 for an exact answer (to 0.1%, as 12.8 MB for 12,796,800, or to the digits that the lesson
prints), 7 within 10%, 4 within a factor of 2, 1 for the right direction from the first row's figure; 0 for the wrong
one, unless within 10%. Where the figure is the same as the first row's, 10 (to 1%) or 0.

Questions, figures and their commands stand in the READMEs, in comments above the tables (tests/lessons_printed.py has
the syntax). Bad input ends with exit code 2.
"""
import argparse
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
EXPERTS = "08_3d_full/experts/README.md"  # a lesson of its own inside a chapter
sys.path.insert(0, str(ROOT / "tests"))
import programs  # noqa: E402
from lessons_printed import FigureError, Readme, Runner  # noqa: E402
from predict_answers import LEVELS, Quiz, UsageError, counted, read_answers  # noqa: E402


def readme_of(words):
    """The README of the chapter that is asked for."""
    readmes = [*sorted(ROOT.glob("[0-9][0-9]_*/README.md")), ROOT / EXPERTS]
    names = ", ".join(path.parent.name for path in readmes)
    if len(words) != 1:
        raise UsageError(f"which chapter? python3 docs/predict.py 05; chapters: {names}")
    for path in readmes:
        name = path.parent.name
        if words[0].strip("/") in (name, name[:2], name[:2].lstrip("0")):
            return path
    raise UsageError(f"there is no chapter {words[0]}; chapters: {names}")


def programs_of(build, commands):
    """The folder of the programs; all that the commands name must be there."""
    folder = (pathlib.Path(build) if build else ROOT / "build").resolve() / "bin"
    names = sorted(set(re.findall(r"build/bin/([\w.-]+)", " ".join(commands))))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not folder.is_dir():
        what = f"{', '.join(missing)} not built" if folder.is_dir() else f"there is no {build or 'build'}/bin"
        raise UsageError(f"--build {build or 'build'}: {what} (try bash tests/setup.sh{f' {build}' if build else ''})")
    return folder


def quiz(arguments):
    readme = Readme(readme_of(arguments.chapter))
    if readme.errors:
        raise UsageError(f"{readme.path.relative_to(ROOT)}:{readme.errors[0][0]}: {readme.errors[0][1]}")
    out = sys.stderr if arguments.json else sys.stdout
    game = Quiz(readme, None, out)
    chosen = game.asked
    if arguments.question is not None:
        if not 1 <= arguments.question <= len(chosen):
            raise UsageError(f"--question {arguments.question}: chapter {readme.path.parent.name} has questions 1 to "
                             f"{len(chosen)}")
        chosen = chosen[arguments.question - 1:arguments.question]
    if arguments.list:
        for asked in chosen:
            print(f"{asked.number}. {asked.question.text}\n       {asked.figure.command}")
        return 0
    answers = read_answers(arguments.answers, chosen) if arguments.answers else None
    binaries = programs_of(arguments.build, [asked.figure.command for asked in chosen])
    game.runner = Runner(ROOT, binaries, 900)
    game.say(f"{readme.path.parent.name}: {counted(len(chosen), 'question')}. A number (1.5 MB, 27%, 3/16), `same`, or ? "
             "to skip.")
    results = game.run(chosen, answers)
    if arguments.json:
        print(json.dumps({"chapter": readme.path.parent.name, "questions": len(chosen),
                          "points": sum(each["points"] for each in results), "of": LEVELS[0][0] * len(chosen),
                          "answers": results}, indent=1, ensure_ascii=False))
    return 0


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"predict.py: {' '.join(message.split())}\n")


def main(words=None):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chapter", nargs="*", help="01 to 08, or experts")
    parser.add_argument("--build", help="build folder (build)")
    parser.add_argument("--question", type=int, help="only this one")
    parser.add_argument("--answers", help="file with one answer per line")
    parser.add_argument("--json", action="store_true", help="the results as JSON on stdout")
    parser.add_argument("--list", action="store_true", help="print the questions")
    try:
        return quiz(parser.parse_args(words))
    except UsageError as error:
        print(f"predict.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except FigureError as error:
        print(f"predict.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    programs.start(main)
