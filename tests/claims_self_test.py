"""The check of claims.py on a small page: what it must find, and where figures, sources or records change."""
import pathlib
import tempfile

from claims import ARITHMETIC, Claims, ROOT, planted

# ---- the check of the check -----------------------------------------------------------------------------------------

PAGE = """\
# Page
<!-- measured: computed
M1 | 2: arithmetic("bf16 gradients")
M1 | 3: agree(run1.printed("bytes", 2), arithmetic("bf16 gradients"))
M1 | 4: run1(zero=2).printed("bytes", 2)
M2 | 2: run2.printed("bytes", 2)
M2 | 3: run2.printed("bytes", 2)
left out M3 | 2: open
-->
| | quoted | here | verdict | shown by |
|---|---|---|---|---|
| M1 | 16 bytes | 16 | **right** on `4 GPUs`: ZeRO-2 has 8 | run 1, arithmetic |
| M2 | 12 bytes | 16.0 | **wrong** | run 2 |
| M3 | 1 to 2 GB *(draft)* | - | **open** | - |

- M1, M2: somebody

| | quoted | verdict | reference |
|---|---|---|---|
| A1 | a name *(draft)* | **wrong** | [its page](https://example.org) |

    build/bin/03_zero --zero 1    # run 1; also --zero 2
    build/bin/03_zero --zero 1    # run 2
"""
PROGRAM = """\
#!/bin/sh
if [ "$1" = --help ]; then echo '  --zero 0|1|2|3   stage'; exit 0; fi
[ "$2" = 3 ] && { echo "bytes  nan"; exit 0; }
echo "bytes  $((16 / $2))"
"""
# (what is changed, from, to, what is said; "": nothing)
MUTATIONS = [
    ("nothing changed", "", "", ""),
    ("another figure", "| 16.0 |", "| 16.1 |", "column \"here\" of \"M2\" has 16.1, today 16.0"),
    ("a figure in the verdict", "ZeRO-2 has 8", "ZeRO-2 has 9", "column \"verdict\" of \"M1\" has 9, today 8"),
    ("a condition", "`4 GPUs`", "`8 GPUs`", ""),
    ("right, and is not", "| 16 bytes |", "| 18 bytes |", "M1: the verdict is \"right\", but quoted are [18.0]"),
    ("wrong, and is right", "| 12 bytes |", "| 16 bytes |", "M2: the verdict is \"wrong\""),
    ("no verdict", "**wrong**", "**no**", "M2: no verdict among"),
    ("a run that is not used", "| run 2 |", "| run 1, run 2 |", "M2: says run [1, 2], uses run [2]"),
    ("a run that is not named", "16.0 | **wrong** | run 2", "16.0 | **wrong** | run 3", "M2: says run [3]"),
    ("arithmetic that is not named", "run 1, arithmetic", "run 1", "is named or used, and not both"),
    ("arithmetic that does not exist", "arithmetic(\"bf16 gradients\")\nM1 | 3", "arithmetic(\"none\")\nM1 | 3",
     "docs/claims.py has no line \"M1  none\""),
    ("programs and arithmetic differ", "--zero 1    # run 1;", "--zero 2    # run 1;",
     "M1: the programs have 8, the arithmetic 16"),
    ("an option that the page does not name", "; also --zero 2", "", "run 1 with --zero 2: the page does not say so"),
    ("a figure without an expression", "M2 | 3: run2.printed(\"bytes\", 2)\n", "", "has numbers, but no entry"),
    ("output that is not a number", "--zero 1    # run 2", "--zero 3    # run 2", "M2: 1 quoted numbers"),
    ("not a number", "M2 | 3: run2.printed(\"bytes\", 2)", "M2 | 3: float(\"nan\") + run2.printed(\"bytes\", 2)",
     "is nan, no number"),
    ("output that is missing", "M2 | 3: run2.printed(\"bytes\", 2)", "M2 | 3: run2.printed(\"byte\", 2)",
     "the output has no line \"byte\""),
    ("a run without a row", "# run 2\n", "# run 2\n    build/bin/03_zero --zero 2    # run 3\n",
     "run 3: no row uses it"),
    ("an expression without a row", "| M2 | 12 bytes | 16.0 | **wrong** | run 2 |\n", "", "no row begins with \"M2\""),
    ("a run twice", "# run 2", "# run 1", "run 1 for the second time"),
    ("a figure that is left out", "M2 | 3: run2.printed(\"bytes\", 2)", "left out M2 | 3: no",
     "only what an open claim quotes"),
    ("no reference", "https://example.org", "page", "A1: no reference"),
    ("nobody who says it", "- M1, M2:", "- M1:", "M2: who says it?"),
    ("a draft that somebody says", "- M1, M2:", "- M1, M2, M3:", "M3: who says it?"),
    ("who says what is not there", "- M1, M2:", "- M1, M2, M9:", "who says M9: there is no such row"),
    ("nothing that shows it", "| **open** |", "| **right** |", "M3: neither a run nor arithmetic shows it"),
]


# (what is changed after a check, in which file, from, to, how many commands run then, how many figures are planted)
CHANGES = [
    ("nothing", "", "", "", 0, 0),
    ("a comment", "03_zero/zero.cpp", "// of a rank", "/* of\n   rank 0 */", 0, 0),
    ("a source of the chapter", "03_zero/zero.cpp", "16", "17", 2, 4),
    ("a source of a later chapter", "04_later/later.cpp", "1", "2", 0, 0),
    ("a figure", "docs/claims.md", "| 16.0 |", "| 16.1 |", 1, 0),
    ("a verdict", "docs/claims.md", "**wrong** | run 2", "**right if** | run 2", 1, 0),
    ("other words", "docs/claims.md", "# Page", "# The page", 0, 0),
    ("the command of a row", "docs/claims.md", "--zero 1    # run 2", "--zero 01    # run 2", 1, 1),
    ("an expression", "docs/claims.md", "M2 | 3: run2.printed(\"bytes\", 2)", "M2 | 3: 1 * run2.printed(\"bytes\", 2)",
     1, 1),
    ("the arithmetic of a row", "docs/claims.py", "BF16 + BF16 + MASTER + MOMENTS, \"w", "BF16 + MASTER, \"w", 2, 0),
    ("another row's arithmetic", "docs/claims.py", "states = 16 *", "states = 17 *", 0, 0),
    ("a damaged record", "checked.txt", "  docs/claims.md", " docs/claims.md", 2, 4),
    ("another row's record", "checked.txt", "  M2", "  M3", 1, 1),
]


def make(folder, page):
    root = pathlib.Path(folder).resolve()
    files = {"CMakeLists.txt": "add_chapter(03_zero below)\n", "03_zero/zero.cpp": "int bytes = 16;  // of a rank\n",
             "04_later/later.cpp": "int later = 1;\n", "bin/03_zero": PROGRAM, "docs/claims.md": page,
             **{f"docs/{name}": (ROOT / "docs" / name).read_text() for name in ("claims.py", "claims_models.py")}}
    for file, text in files.items():
        (root / file).parent.mkdir(exist_ok=True)
        (root / file).write_text(text)
    (root / "bin/03_zero").chmod(0o755)
    return root


def checked_again(root, *arguments, **options):
    """(checker, commands that ran beside the arithmetic, figures that were planted)"""
    checker, path = Claims(root, root / "bin", *arguments, **options), root / "docs/claims.md"
    checker.page(path, path.read_text())
    _, count = planted(checker, path, path.read_text())
    return checker, len(checker.runner.runs.keys() - {ARITHMETIC}), count


def test_changes(expect):
    for name, file, old, new, runs, count in CHANGES:
        with tempfile.TemporaryDirectory() as folder:
            root = make(folder, PAGE)
            checked_again(root)
            if file:
                text = (root / file).read_text()
                (root / file).write_text(text.replace(old, new))
                (root / "bin/03_zero").touch()
            checker, *ran = checked_again(root)
            good = ran == [runs, count] and (not file or old in text)
            if good and checker.errors:  # what fails is not recorded
                good = checked_again(root)[1] == runs
            elif good:
                good = checked_again(root)[1] == 0 and checked_again(root, everything=True)[2] == 4
            expect(good, f"after a check, {name}", f"{ran}: {checker.errors}")
    with tempfile.TemporaryDirectory() as folder:
        root = make(folder, PAGE)
        ran = [checked_again(root, slice_)[1:] for slice_ in (0, 1, 1, None)]
        expect(ran == [(2, 3), (1, 1), (0, 0), (0, 0)], "one eighth at a time", ran)
        (root / "03_zero/zero.cpp").write_text("int bytes = 18;")
        ran = [checked_again(root)[1:] for _ in range(2)]
        expect(ran == [(2, 4), (2, 4)], "a program that is older than its source", ran)


def self_test():
    failed = []

    def expect(good, name, said):
        print(f"{'ok  ' if good else 'FAIL'} {name}" + ("" if good else f": {said}"))
        failed.extend([] if good else [name])
    for name, old, new, said in MUTATIONS:
        with tempfile.TemporaryDirectory() as folder:
            root = make(folder, PAGE.replace(old, new) if old else PAGE)
            path = root / "docs/claims.md"
            text = path.read_text()
            checker = Claims(root, root / "bin")
            checker.page(path, text)
            good = any(said in error for error in checker.errors) if said else not checker.errors
            if good and name == "nothing changed":
                missed, count = planted(checker, path, text)
                good = not missed and count == 4
                checker.errors.append(f"{count} planted")
            if good and name == "another figure":  # --write mends it
                path.write_text(text)
                Claims(root, root / "bin").page(path, text, write=True)
                good = path.read_text() == text.replace("16.1", "16.0")
        expect(good, name, "; ".join(checker.errors or ["no error"]))
    test_changes(expect)
    return bool(failed)
