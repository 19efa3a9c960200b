"""The checks of tests/lessons.py, on a miniature of a repository in which one thing at a time is wrong."""
import pathlib
import tempfile
import textwrap

MINIATURE = {
    "CMakeLists.txt": "option(TRAIN70B_X)\nadd_chapter(03_zero below)\n",
    "tests/CMakeLists.txt": "foreach(name zero cuda)\n    add_unit_test(03_${name} lib)\nendforeach()\n",
    "tests/03_zero.cpp": 'TEST_CASE(\n    "the ledger: each stage "\n    "counts") {\n',
    "03_zero/zero.cpp": "void f() {\n    // tag::around[]\n    gather(unit);\n    // tag::inner[]\n    if (x) {\n"
                        "        g();\n    }\n    // end::inner[]\n    // end::around[]\n}\n",
    "bin/03_zero": "#!/bin/sh\necho '  --zero 0|1|2|3   stage [default: 0]'\necho '  --dry-run   book'\necho\n"
                   "echo 'stage   bytes   time'\necho '1       100     2.50 ms'\n",
    "loop.py": "'--times'\n",
    "docs/results/a.png": "",
    "docs/results/a.csv": "# a: what it is\n# command: build/bin/03_zero --zero 3\nx,y\n",
    "03_zero/README.md": textwrap.dedent("""\
        # Chapter
        See [zero](zero.cpp), run `build/bin/03_zero --zero 2`. 4 minutes to read.

            mpirun --oversubscribe -np 2 build/bin/03_zero --zero 1 \\
                --dry-run                              # a comment: a|b ...
            for stage in 0 3; do build/bin/03_zero --zero $stage; done
            python3 loop.py --times 3 -- mpirun -np 2 build/bin/03_zero --dry-run
            cmake --build build --target 03_zero test_03
            ctest --test-dir build -R '^03'

        <!-- template: S is a stage -->
            build/bin/03_zero --zero S

        <!-- cut: 03_zero/zero.cpp around -->
        ```cpp
        gather(unit);
        if (x) {
            g();
        }
        ```

        <!-- prints times: build/bin/03_zero -->
        ```
        stage   bytes   time
        1       100     9.99 ms
        ```

        ## The code
        <!-- ask: predict.py's, on
             two lines -->
        | file | see |
        |---|---|
        | [zero.cpp](zero.cpp) | `gather` |

        ## Traps
        1. *One.* Nothing breaks.
           `tests/03_zero.cpp: "the ledger: each stage counts"`

        ## Exercises

        1. What does stage 2 print?

           <details><summary>Answer</summary>

           Read the line:

               build/bin/03_zero --zero 3

           </details>

        2. Write stage 4.

           <details><summary>Hint</summary>

           Begin with stage 3.

           </details>

        ## References
        1. Nobody
        """)}

# (what is changed, in which file, from, to, and what has to be said about it)
MUTATIONS = [
    ("a changed source", "03_zero/zero.cpp", "gather(unit);", "gather(next);", "README.md:16: differs from"),
    ("a changed snippet", "03_zero/README.md", "    g();\n", "    h();\n", "-    h();"),
    ("a region that is gone", "03_zero/zero.cpp", "::around[]", "::body[]", "has no tag::around[]"),
    ("a region without its end", "03_zero/zero.cpp", "    // end::inner[]\n", "", "tag::inner[] has no end"),
    ("a wrong flag", "03_zero/README.md", "--dry-run  ", "--dryrun  ", "03_zero has no --dryrun"),
    ("a wrong flag in a template", "03_zero/README.md", "--zero S", "--stage S", "03_zero has no --stage"),
    ("a wrong value", "03_zero/README.md", "--zero 1 ", "--zero 4 ", "--zero 4 is none of"),
    ("a wrong value in a loop", "03_zero/README.md", "in 0 3;", "in 0 5;", "--zero 5 is none of"),
    ("a variable without a value", "03_zero/README.md", "for stage", "for level", "$stage is not set"),
    ("alternatives", "03_zero/README.md", "--zero 1 ", "--zero 1|2 ", "\"|\" cannot be pasted"),
    ("a placeholder", "03_zero/README.md", "oversubscribe -np 2", "oversubscribe -np N", "N is a placeholder"),
    ("a placeholder in the text", "03_zero/README.md", "--zero 2`", "--zero S`", "README.md:2: S is a placeholder"),
    ("dots", "03_zero/README.md", "--zero 1 ", "... ", "\"...\" cannot be pasted"),
    ("a missing program", "03_zero/README.md", "`build/bin/03_zero ", "`build/bin/03_zeros ", "no program 03_zeros"),
    ("a missing script", "03_zero/README.md", "cmake --build build", "bash tests/x.sh", "there is no tests/x.sh"),
    ("a wrong flag of a script", "03_zero/README.md", "--times 3", "--time-s 3", "loop.py has no --time-s"),
    ("a wrong flag behind a script", "03_zero/README.md", "03_zero --dry-run\n", "03_zero --dryrun\n", "no --dryrun"),
    ("a missing target", "03_zero/README.md", "test_03", "test_09", "no target test_09"),
    ("a missing test", "03_zero/README.md", "'^03'", "'^04'", "no test is called ^04"),
    ("a missing link", "03_zero/README.md", "[zero](zero.cpp)", "[zero](zeros.cpp)", "link to zeros.cpp"),
    ("a missing name", "03_zero/README.md", "`gather`", "`unshard`", "`unshard` is in none of"),
    ("a trap without a test", "03_zero/README.md", "   `tests/03_zero.cpp: \"the ledger: each stage counts\"`\n", "",
     "this trap names no test"),
    ("a trap with a missing test", "03_zero/README.md", "stage counts", "stage measures", "has no test case"),
    ("an exercise without an answer", "03_zero/README.md", "Hint", "Note", "this exercise has no <details>"),
    ("an answer that is not closed", "03_zero/README.md", "stage 3.\n\n   </details>", "stage 3.", "it is not closed"),
    ("an empty answer", "03_zero/README.md", "   Begin with stage 3.\n\n", "", "the answer of this exercise is empty"),
    ("an exercise that is left out", "03_zero/README.md", "2. Write", "3. Write", "exercise 3, where 2"),
    ("a wrong command in an answer", "03_zero/README.md", "       build/bin/03_zero --zero 3",
     "       build/bin/03_zero --zer 3", "03_zero has no --zer,"),
    ("minutes that are too few", "03_zero/README.md", "4 minutes", "2 minutes", "README.md:2: 2 minutes to read"),
    ("a picture without data", "docs/results/a.png", None, None, "b.png:1: a picture without its CSV"),
    ("a wrong flag in a CSV", "docs/results/a.csv", "--zero 3", "--stage 3", "a.csv:2: 03_zero has no --stage"),
    ("another printed number", "bin/03_zero", "100 ", "101 ", "+1       101     2.50 ms"),
]


def self_test(lessons):
    """1 if a check does not find what it is there for, else 0."""
    failed = 0
    for name, file, old, new, said in [("nothing changed", "bin/03_zero", "", "", ""), *MUTATIONS]:
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder).resolve()
            for path, text in MINIATURE.items():
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_text(text.replace(old, new) if path == file and old else text)
            if old is None:
                (root / file).rename(root / file.replace("a.png", "b.png"))
            (root / "bin/03_zero").chmod(0o755)
            errors = lessons(root, root / "bin").check(run=True)
            good = len(errors) == 1 and said in errors[0] if said else not errors
            if good and "snippet" in name:  # --write mends it
                lessons(root, root / "bin").check(write=True)
                good = lessons(root, root / "bin").check() == [] and (root / file).read_text() == MINIATURE[file]
        print(f"{'ok  ' if good else 'FAIL'} {name}" + ("" if good else ": " + ("\n".join(errors) or "no error")))
        failed += not good
    return int(failed > 0)
