"""The checks of docs/predict.py, on a miniature of a repository in which one figure or directive at a time is wrong;
and how answers are read and scored."""
import contextlib
import dataclasses
import io
import os
import pathlib
import tempfile
import textwrap

MINIATURE = {
    "CMakeLists.txt": "add_chapter(03_zero below)  # one\n",
    "docs/data/corpus.txt": "text",
    "03_zero/zero.cpp": "int bytes = 4096;  // of a rank\n", "04_later/later.cpp": "int later = 1;\n",
    "bin/03_zero": textwrap.dedent("""\
        #!/bin/sh
        if [ "$1" = --help ]; then
            echo '  --zero 0|1|2|3   stage [default: 0]'; echo '  --metrics FILE   lines'; exit 0
        fi
        bytes=4096; [ "$2" = 0 ] || bytes=$((4096 / $2))
        echo "stage   bytes   time"
        echo "stage $2  $bytes  7.50 ms"
        echo
        while [ "$1" != --metrics ]; do shift; done
        echo '{"event":"step","step":4,"loss":4.99719954,"comm_bytes":{"dp.all_reduce":'$bytes'},' \\
            '"memory":{"peak":{"params":'$bytes'}}}' > $2
        """),
    "03_zero/README.md": textwrap.dedent("""\
        # Chapter
        ## The idea
        <!-- measured: build/bin/03_zero --zero {1}
        2: step(4).loss
        3: [peak("params"), sent()]
        4: 100 / 8
        left out 5: times
        -->
        <!-- ask: 2 | 3.2 | The idea: How many bytes are sent
             in stage 2? -->
        | stage | loss | params, sent | share | time |
        |---|---|---|---|---|
        | `0` | 4.99719954 | 4,096 · 4,096 | 12.5% | 7.5 ms |
        | `2` | 4.9971996 | 2,048 · 2,048 | 12% | 7.5 ms |

        <!-- measured: build/bin/03_zero --zero 1
        "4096 bytes": printed("stage 1", 2, after="stage")
        -->
        It sends 4096 bytes.

        <!-- ask: stage 1 | 2 | The idea: How many bytes are sent in stage 1? -->
        <!-- prints times: build/bin/03_zero --zero 1 -->
        ```
        stage   bytes   time
        stage 1  4096  9.99 ms
        ```

        <!-- not measured: a picture -->
        | a | b |
        |---|---|
        | x | 17 |
        """)}

# (what is changed, from, to, and what has to be said about it; "": nothing)
MUTATIONS = [
    ("nothing changed", "", "", ""),
    ("a stale number of bytes", "2,048 · 2,048", "2,048 · 2,049",
     "README.md:14: column \"params, sent\" of \"stage 2\" has 2,049, today 2,048"),
    ("a stale loss", "4.9971996", "4.9972996",
     "README.md:14: column \"loss\" of \"stage 2\" has 4.9972996, today 4.9971995"),
    ("a loss that is rounded otherwise", "4.9971996", "4.9972195", ""),
    ("another time", "2,048 | 12% | 7.5 ms", "2,048 | 12% | 9.5 ms", ""),
    ("a stale share", "| 12.5%", "| 12.6%", "has 12.6, today 12.5"),
    ("a share with fewer digits", "| 12.5%", "| 13%", ""),
    ("a stale number in the text", "4096 bytes", "4095 bytes", "the text has 4095, today 4096"),
    ("a stale fence", "stage 1  4096  9.99 ms", "stage 1  4097  9.99 ms", "README.md:24: differs from the output of"),
    ("words that do not stand there", "\"4096 bytes\":", "\"4096 byte s\":", "does not stand in the paragraph once"),
    ("a column without a command", "4: 100 / 8\n", "", "has numbers, but no entry"),
    ("a row that does not exist", "left out 5: times", "left out 5: times\n7 | 3: 1", "no row begins with \"7\""),
    ("another number of numbers", "2,048 · 2,048", "2,048", "has 1 numbers"),
    ("a wrong flag", "03_zero --zero 1\n", "03_zero --sero 1\n", "03_zero has no --sero"),
    ("a wrong name", "sent()]", "sends()]", "NameError"),
    ("a step that is missing", "step(4)", "step(5)", "the metrics have no step 5"),
    ("a question about nothing", "ask: 2 |", "ask: 3 |", "is not one figure that is measured"),
    ("a question without an explanation", "| The idea:", "| The ideas:", "\"The ideas\" does not stand in the README"),
    ("a question about a time", "2 | 3.2 |", "2 | 5 |", "is not one figure that is measured"),
]

# (what is changed after a check, in which file, from, to, how many of the three commands run then)
CHANGES = [
    ("nothing", "", "", "", 0),
    ("a comment", "03_zero/zero.cpp", "// of a rank", "/* of\n   rank 0 */", 0),
    ("white space", "03_zero/zero.cpp", "int bytes = 4096;", "int bytes =\n    4096 ;", 0),
    ("a source of the chapter", "03_zero/zero.cpp", "4096", "4097", 3),
    ("a source of a later chapter", "04_later/later.cpp", "1", "2", 0),
    ("a comment of CMakeLists.txt", "CMakeLists.txt", "# one", "# two", 0),
    ("CMakeLists.txt", "CMakeLists.txt", "below", "above", 3),
    ("the course's text", "docs/data/corpus.txt", "text", "texts", 3),
    ("a figure of a table", "03_zero/README.md", "2,048 · 2,048", "2,048 · 2,049", 1),
    ("a figure of a paragraph", "03_zero/README.md", "4096 bytes", "4095 bytes", 1),
    ("a figure of a fence", "03_zero/README.md", "stage 1  4096", "stage 1  4097", 1),
    ("a time that is left out", "03_zero/README.md", "7.5 ms", "9.5 ms", 0),
    ("an expression", "03_zero/README.md", "step(4).loss", "1 * step(4).loss", 2),
    ("a tolerance", "03_zero/README.md", "4: 100 / 8", "4: 100 / 8 ~ 1%", 2),
    ("words", "03_zero/README.md", "# Chapter", "# The chapter", 0),
    ("lines of a record without their end", "checked.txt", " --zero 1", " --zero", 1),
    ("keys of a record", "checked.txt", "  03_zero", "0  03_zero", 3),
    ("what separates a record's columns", "checked.txt", "  03_zero", "\t03_zero", 3),
    ("the chapter in a record", "checked.txt", "03_zero/README.md", "04_later/README.md", 3),
    ("an empty record", "checked.txt", "", None, 3),
]

# (answer, its value or None: refused) of the question above, for which the first row has 4,096
ANSWERS = [("2048", 2048), ("2,048", 2048), ("2 KiB", 2048), ("2.048 kB", 2048), ("1/2", 2048), ("50%", 2048),
           ("same", 4096), ("1e3", 1000), ("-1", -1), ("abc", None), ("2 parsecs", None), ("1/0", None),
           ("9" * 5001 + "/2", None), ("2/" + "9" * 5001, None), ("-1e999", None), ("٢٠٤٨", None), ("２０４８", None)]
# (answer, points, words)
SCORES = [(2048, 10, "exact"), (2049, 10, "exact"), (2000, 7, "within 10%"), (1100, 4, "within a factor of 2"),
          (4000, 4, "within a factor of 2"), (100, 1, "the right direction"), (4096, 0, "no change predicted"),
          (8192, 0, "the wrong direction"), (float("nan"), 0, "missed")]
# (command line, exit code, what is said)
COMMAND_LINES = [
    ("--check --build ROOT", 0, "03_zero: 5 rows checked, 12 numbers"),
    ("--check --build ROOT", 0, "0 commands run, 3 commands unchanged since the last check"),
    ("--check --build ROOT", 0, "    unchanged since it was checked: 5 rows, 12 numbers"),
    ("--check --build ROOT --slice", 0, "3 commands run, 0 commands unchanged"),  # where TRAIN70B_TEST_SLICE is "all"
    ("--check --build ROOT --all --record", 0, "3 commands run, 0 commands unchanged"),
    ("--check --build ROOT --record 3", 2, "--record needs the whole check"), ("3 --record", 2, "belong to --check"),
    ("3 --list", 0, "1. How many bytes are sent in stage 2?"),
    ("", 2, "predict.py: which chapter?"), ("04", 2, "there is no chapter 04; chapters: 03_zero"),
    ("3 --question 3", 2, "--question 3: chapter 03_zero has questions 1 to 2"),
    ("3 --question x", 2, "--question"), ("3 --answers ROOT/none", 2, "none: No such file"),
    ("3 --answers ROOT/answers", 2, "answers:2: \"few\" is no number"),
    ("3 --question 1 --answers ROOT/answers", 2, "has 2 lines for 1 questions"),
    ("3", 2, "there is no build/bin (try bash tests/setup.sh)"),
    ("--check --build ROOT/03_zero", 2, "there is no"), ("3 --write", 2, "belong to --check"),
    ("--check --json", 2, "--check asks nothing"),
    ("--check --build ROOT", 1, "has 2,049, today 2,048"),
    ("--check --build ROOT", 1, "1 command run, 2 commands unchanged"),
    ("--check --build ROOT --record", 1, "docs/results/checked.txt remains as it is: figures differ"),
    ("--check --build ROOT --write", 0, "wrote 03_zero/README.md:14: 2,049 -> 2,048"),
    ("--check --build ROOT", 0, "0 commands run, 3 commands unchanged"),
]


def make(folder, text):
    root = pathlib.Path(folder).resolve()
    for path, content in {**MINIATURE, "03_zero/README.md": text}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)
    (root / "bin/03_zero").chmod(0o755)
    return root


def errors_of(predict, root, write=False, **options):
    checker = predict.Check(root, root / "bin", **options)
    checker.readme(root / "03_zero/README.md", write)
    return checker


def test_changes(predict, original, expect):
    """A command runs again where something changed, and only there."""
    def runs(**options):
        return len(errors_of(predict, root, **options).runner.runs)
    for name, file, old, new, count in CHANGES:
        with tempfile.TemporaryDirectory() as folder:
            root = make(folder, original)
            runs()
            text = (root / file).read_text() if file else ""
            if file:
                (root / file).write_text("\udcff" if new is None else text.replace(old, new), errors="surrogateescape")
                (root / "bin/03_zero").touch()
            checker = errors_of(predict, root)
            ran = len(checker.runner.runs)
            again = ran if checker.errors else 0  # what fails is not recorded
            expect(ran == count and runs() == again and runs(everything=True) == 3 and old in text,
                   f"after a check, {name}", f"{ran}, {runs()}: {checker.errors}")
    with tempfile.TemporaryDirectory() as folder:
        root = make(folder, original)
        ran = [runs(slice_=slice_) for slice_ in (3, 0, 0, 1)]
        expect([*ran, runs(), runs()] == [0, 1, 0, 1, 1, 0], "one eighth at a time", ran)
        (root / "03_zero/zero.cpp").write_text("int bytes = 4098;")
        expect([runs(), runs()] == [3, 3], "a program that is older than its source")
        record = root / "checked.txt"
        (root / "bin/03_zero").touch()
        (root / "03_zero/README.md").write_text(original.replace("4.9971996", "4.9972996"))
        errors, lines = errors_of(predict, root).errors, record.read_text().split("\n")
        expect(errors and len(lines) == 4, "only what passed is recorded", lines)
        (root / "03_zero/README.md").write_text(original)
        runs()
        (root / "bin/03_zero").write_text(MINIATURE["bin/03_zero"].replace("4.99719954", "4.98719954"))
        expect(not errors_of(predict, root).errors and errors_of(predict, root, everything=True).errors and
               errors_of(predict, root).errors, "what fails with --all leaves the build folder's record")


def self_test(predict):
    """1 if a check does not find what it is there for, else 0."""
    failed, original = [], MINIATURE["03_zero/README.md"]

    def expect(good, name, said=""):
        print(f"{'ok  ' if good else 'FAIL'} {name}" + ("" if good else f": {said}"))
        if not good:
            failed.append(name)
    import predict_answers  # beside predict, which has set the path
    for name, old, new, said in MUTATIONS:
        with tempfile.TemporaryDirectory() as folder:
            root = make(folder, original.replace(old, new) if old else original)
            errors = errors_of(predict, root).errors
            good = any(said in each for each in errors) if said else not errors
            if good and name.startswith("a stale number of"):  # --write mends it
                errors_of(predict, root, write=True)
                good = not errors_of(predict, root).errors and (root / "03_zero/README.md").read_text() == original
            expect(good and (not old or old in original), name, "\n".join(errors) or "no error")
    test_changes(predict, original, expect)
    with tempfile.TemporaryDirectory() as folder:
        root = make(folder, original)
        checker = errors_of(predict, root)
        counts = {key[1]: amount for key, (_, amount) in checker.left_out.items()}
        good = checker.checked["03_zero"][1] == 12 and counts == {"times": 2, "a picture": 1}
        expect(good, "what is counted", str(counts))
        out = io.StringIO()
        quiz = predict.Quiz(predict.Readme(root / "03_zero/README.md"), predict.Runner(root, root / "bin"), out)
        asked = quiz.asked[0]
        for text, value in ANSWERS:
            try:
                got = asked.value(predict_answers.parse_answer(text))
            except predict.UsageError:
                got = None
            expect(got == value, f"the answer {text}", got)
        for answer, points, words in SCORES:
            got = asked.points(answer, 2048)
            expect(got[:2] == (points, words), f"the points for {answer}", got)
        for answer, points in ((4090, 10), (4000, 0), (2048, 0)):
            got = asked.points(answer, 4096)
            expect(got[0] == points, f"the points for {answer} where nothing changes", got)
        in_gb = dataclasses.replace(asked, question=dataclasses.replace(asked.question, text="How many GB?"))
        expect([in_gb.value(predict_answers.parse_answer(text)) for text in ("3", "3 GB", "3000 MB")] == [3, 3, 3], "GB")
        results = quiz.run(quiz.asked, [predict_answers.parse_answer("1/2"), predict_answers.parse_answer("4200")])
        see = "03_zero/README.md:2, \"The idea\""
        expect(len(results) == 2 and results[1]["result"] == "within 10%" and results[0]["points"] == 10 and
               results[0]["actual"] == 2048 and see in out.getvalue(), "a question", out.getvalue())
        expect("question  points  predicted  actual  result\n       1      10      2,048   2,048  exact\n" in
               out.getvalue(), "the table of all scores", out.getvalue())
        expect(quiz.run(quiz.asked, [None, None]) == [], "a question that is skipped")
    with tempfile.TemporaryDirectory() as folder:
        predict.ROOT = make(folder, original)
        (predict.ROOT / "answers").write_text("1/2\nfew\n")
        for words, code, said in COMMAND_LINES:
            os.environ["TRAIN70B_TEST_SLICE"] = "all" if "--slice" in words else "0"
            if code == 1:  # and the next one mends it
                make(folder, original.replace("2,048 · 2,048", "2,048 · 2,049"))
            text = io.StringIO()
            with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
                try:
                    got = predict.main([word.replace("ROOT", folder) for word in words.split()])
                except SystemExit as end:  # argparse
                    got = end.code
            good = int(got) == code and said in text.getvalue() and (code != 2 or text.getvalue().count("\n") == 1)
            expect(good, f"predict.py {words}", f"{got}: {text.getvalue()}")
        lesson = predict.ROOT / predict.EXPERTS
        lesson.parent.mkdir(parents=True)
        lesson.write_text(original)
        with contextlib.redirect_stdout(io.StringIO()) as text:
            got = predict.main(["experts", "--list"])
        expect(got == 0 and "1. How many bytes are sent in stage 2?" in text.getvalue(), "predict.py experts --list",
               f"{got}: {text.getvalue()}")
    return int(bool(failed))
