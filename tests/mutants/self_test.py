"""The self-test of run.py: every mistake of the list fits the sources exactly once and has results, and the program
does what it says.
Builds nothing."""
import argparse
import contextlib
import io
import os
import pathlib
import subprocess
import sys
import tempfile

import mutants
import results
import run

GOOD = "mutant a\nchapter 02\nwhat w\nfile x.cpp\n a\n-b\n+B\n+C\nfile x.cpp\n-d\n"
BAD = [("a line before the first mutant", "file x.cpp\n", "line 1: not understood"),
       ("an unknown key", GOOD + "chapters 02\n", "line 11: not understood"),
       ("a second chapter", GOOD + "chapter 03\n", "line 11: not understood"),
       ("code before the file", "mutant a\nchapter 02\nwhat w\n-b\n", "line 4: not understood"),
       ("a mutant twice", GOOD + GOOD, "a: two mutants have this name"),
       ("no chapter", GOOD.replace("chapter 02\n", ""), "its chapter is missing"),
       ("a chapter that is none", GOOD.replace("02", "2"), "its chapter is 2 (must be 01 to 08)"),
       ("no words", GOOD.replace("what w\n", ""), "says not what it is"),
       ("lab and file", GOOD + "lab zigzag/strided\n", "either `lab` or `file`"),
       ("neither", "mutant a\nchapter 02\nwhat w\n", "either `lab` or `file`"),
       ("a kernel", GOOD.replace("x.cpp", "x.cu"), "x.cu is no .cpp or .h file"),
       ("a block that is only added", GOOD.replace(" a\n-b\n", ""), "changes nothing"),
       ("a block that stays", GOOD.replace("-b\n+B\n+C\n", " b\n"), "changes nothing")]
REPORT = """<testsuite><testcase name="01_a" time="1" status="run"/><testcase name="01_b" time="2" status="fail"/>
<testcase name="01_c" time="9.9" status="fail"/><testcase name="01_d" time="0" status="notrun">
<skipped message="SKIP_RETURN_CODE=7"/></testcase></testsuite>"""

failed = 0


def expect(good, what):
    global failed
    failed += not good
    if not good:
        print(f"FAILED {what}")


def refusal(call, *arguments):
    try:
        call(*arguments)
    except (mutants.Refused, mutants.Error) as error:
        return str(error)
    return "is not refused"


def said_by(folder, *arguments):
    """Exit code, and the lines of stderr, of the program itself."""
    done = subprocess.run([sys.executable, run.HERE / "run.py", "--csv", folder / "r.csv", *arguments],
                          capture_output=True, text=True)
    return done.returncode, done.stderr.splitlines()


def check_list():
    listed = mutants.read(mutants.LIST)
    texts = {}
    for mutant in listed:
        try:
            changes = mutants.changed(mutant, mutants.ROOT)
        except mutants.Refused as refused:
            expect(False, f"{refused}")
            continue
        for file, text in changes.items():
            expect(text != (mutants.ROOT / file).read_text(), f"{mutant.name} changes nothing in {file}")
        key = repr(sorted(changes.items()))
        expect(key not in texts, f"{mutant.name} is {texts.get(key)} once more")
        texts[key] = mutant.name
        expect(len(mutant.what) <= 120, f"{mutant.name}: `what` is too long")
    expect(sorted({mutant.chapter for mutant in listed}) == mutants.CHAPTERS, "a chapter has no mutant")
    rows = results.read(mutants.HERE / "results.csv")
    for mutant in listed:
        expect(results.verdicts(rows, mutant), f"results.csv has no row of {mutant.name} as it is now (run run.py)")
    return len(listed)


def check_reading(folder):
    path = folder / "list.txt"

    def read(text):
        path.write_text(text)
        return mutants.read(path)
    for what, text, says in BAD:
        said = refusal(read, text)
        expect(says in said and "\n" not in said, f"{what}: {said}")
    mutant, = read("# a comment\n\n" + GOOD)
    source = folder / "x.cpp"
    for text, result in (("a\nb\nc\nd\n", "a\nB\nC\nc\n"), ("c\nd\na\nb", "c\na\nB\nC"), ("a\nb\na\nb\nd\n", None),
                         ("a\n b\nd\n", None), ("a\nbb\nd\n", None), ("a\nb\n", None)):
        source.write_text(text)
        if result is None:
            expect("times, not once" in refusal(mutants.changed, mutant, folder), f"not refused: {text!r}")
        else:
            expect(mutants.changed(mutant, folder) == {"x.cpp": result}, f"{text!r}")
    source.unlink()
    expect("there is no x.cpp" in refusal(mutants.changed, mutant, folder), "a file that is not there")
    for lab, says in (("zigzag/none", "no wrong body none"), ("none/strided", "there is no lab none"),
                      ("fit-70b/tp16", "no wrong body tp16")):
        said = refusal(mutants.changed, mutants.Mutant("a", "06", "w", lab), mutants.ROOT)
        expect(says in said, f"lab {lab}: {said}")
    digests = {mutants.digest(each) for each in
               (mutant, *read(GOOD.replace("+B", "+D")), *read(GOOD.replace("02", "03")),
                mutants.Mutant("a", "06", "w", "zigzag/strided"), mutants.Mutant("a", "06", "w", "zigzag/late-first"))}
    expect(len(digests) == 5, "digests of different mutants")
    expect(mutants.digest(*read(GOOD.replace("what w", "what v"))) == mutants.digest(mutant), "a digest of other words")


class FakeWork(run.Work):
    """A folder with one file, and tests that fail as `outcome` says."""

    def __init__(self, folder, outcome):
        self.source, self.outcome, self.log, self.commit = folder, outcome, [], "c"

    def compile(self, chapter):
        self.log.append((self.source / "x.cpp").read_text())

    def test(self, mutant, form):
        self.log.append(form)
        if self.outcome[form] is None:
            raise KeyboardInterrupt
        return self.outcome[form], 1.0


def check_runs(folder):
    (folder / "x.cpp").write_text("a\nb\nd\n")
    mutant = mutants.Mutant("m", "02", "w", "", [["x.cpp", ["b"], ["B"]]])
    options = argparse.Namespace(csv=folder / "results.csv", both=False, unchanged=False)

    def tried(outcome, rows, both=False, mutant=mutant):
        work, options.both = FakeWork(folder, outcome), both
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(KeyboardInterrupt, mutants.Error):
            run.try_mutant(work, mutant, rows, options)
        expect((folder / "x.cpp").read_text() == "a\nb\nd\n", f"the file is not as it was after {work.log}")
        return work.log
    caught, survives = {"short": ["02_x"], "long": ["02_x"]}, {"short": [], "long": ["02_y", "08_grid"]}
    expect(tried(caught, []) == ["a\nB\nd\n", "short"], "caught by short: no long form")
    expect(tried(caught, [], True) == ["a\nB\nd\n", "short", "long"], "--both")
    expect(tried({"short": None}, []) == ["a\nB\nd\n", "short"], "interrupted")
    options.csv.unlink()
    rows = results.read(options.csv)
    expect(tried(survives, rows) == ["a\nB\nd\n", "short", "long"], "survives short: the long form")
    expect(results.read(options.csv) == rows and [row["caught"] for row in rows] == ["no", "yes"], "rows of the file")
    expect(rows[1]["failed"] == "02_y; 08_grid" and rows[1]["form"] == "long", "a row")
    expect(not tried(survives, results.read(options.csv)), "what has been tried is tried again")
    expect(tried(survives, rows[:1]) == ["a\nB\nd\n", "long"], "resumed behind the short form")
    other = mutants.Mutant("m", "02", "w", "", [["x.cpp", ["b"], ["D"]]])
    expect(tried(caught, rows[:], mutant=other) == ["a\nD\nd\n", "short"], "another text of the same mutant")
    groups = [[each.name for each in members] for _, members in results.table([mutant, other], rows)]
    expect(groups == [[], ["m"], [], ["m"]], f"the table: {groups}")
    unchanged = mutants.Mutant("unchanged-02", "02", "no mistake")
    expect(tried(survives, [], mutant=unchanged) == ["a\nb\nd\n", "short"], "without a mistake")
    expect(tried(caught, (none := []), mutant=unchanged) and not none, "tests that fail without a mistake have no row")
    options.csv.write_text("a,b\n")
    expect("its columns are not mutant," in refusal(results.read, options.csv), "another CSV")


def check_tests():
    expect(results.failed_tests(REPORT, 10) == ["01_b", "01_c (timeout)"], "failed tests")
    unbuilt = REPORT.replace("SKIP_RETURN_CODE=7", "Unable to find executable")
    expect(refusal(results.failed_tests, unbuilt, 10) == "01_d is not built", "a test that is not built")
    expect("no such tests" in refusal(results.failed_tests, "<testsuite/>", 10), "no tests")
    text = 'LABELS "a" TIMEOUT "{}" X "200"\nTIMEOUT "60"'
    expect(run.limited(text.format(900), 120) == text.format(120), "time limits")
    expect(run.targets("03", {"tests_03", "test_08", "test_refusals", "x"}) == ["tests_03", "test_08", "test_refusals"],
           "targets")
    expect("no target tests_03" in refusal(run.targets, "03", {"test_08"}), "targets that are not there")
    for program, says in ((["false"], "what: exit code 1"), (["sh", "-c", "echo x -Werror; echo y: error: z; false"],
                                                             "what: y: error: z")):
        expect(refusal(run.run, "what", *program) == says, f"{program}")


def check_command_line(folder):
    listed = [mutants.Mutant(name, "01", "w") for name in "abcde"]
    parts = [each.name for i in range(3) for each in mutants.chosen(listed, [], (i, 3))]
    expect(sorted(parts) == list("abcde"), "slices")
    expect([each.name for each in mutants.chosen(listed, ["d", "b"], (0, 1))] == ["b", "d"], "names")
    (folder / "r.csv").unlink(missing_ok=True)
    for arguments, says in ((["none"], "there is no mutant none"), (["--slice", "2/2"], "--slice 2/2: must be I/N"),
                            (["--slice", "x"], "--slice x"), (["--timeout", "0"], "--timeout"), (["--jobs", "x"], "-j"),
                            (["--eighth", "8"], "--eighth"), (["--unknown"], "--unknown"),
                            (["--csv", str(folder)], str(folder))):
        code, lines = said_by(folder, *arguments, "--report")
        expect(code == 2 and len(lines) == 1 and says in lines[0], f"{arguments}: {code} {lines}")
    code, lines = said_by(folder, "--report")
    expect(code == 0 and not lines, f"--report: {code} {lines}")
    expect(not (folder / "r.csv").exists() and not os.listdir(folder).count("build"), "--report writes something")


def main():
    count = check_list()
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
        check_reading(pathlib.Path(folder))
        check_runs(pathlib.Path(folder))
        check_tests()
        check_command_line(pathlib.Path(folder))
    print(f"{failed} failures" if failed else f"{count} mutants fit the sources; run.py does what it says")
    return 1 if failed else 0
