"""Only this catches: docs/predict.py that misreads an answer, scores it wrongly, or takes bad input."""
import dataclasses
import json
import sys

import pytest
from conftest import ROOT  # the path to docs/ first

import predict
import predict_answers
from lessons_printed import Readme

README = """# Chapter
## The idea
<!-- prints: build/bin/03_zero --zero 2 -->
<!-- ask: 2 | 2.2 | The idea: How many bytes are sent in stage 2? -->
| stage | params, sent |
|---|---|
| `0` | 4,096 · 4,096 |
| `2` | 2,048 · 2,048 |
"""


@pytest.fixture
def asked(tmp_path):
    (tmp_path / "README.md").write_text(README)
    page = Readme(tmp_path / "README.md")
    assert not page.errors
    return predict_answers.Asked(1, page.questions[0])


@pytest.mark.parametrize("text, value", [
    ("2048", 2048), ("2,048", 2048), ("2 KiB", 2048), ("2.048 kB", 2048), ("1/2", 2048), ("50%", 2048), ("same", 4096),
    ("1e3", 1000), ("-1", -1), ("abc", None), ("2 parsecs", None), ("1/0", None), ("9" * 5001 + "/2", None),
    ("2/" + "9" * 5001, None), ("-1e999", None), ("٢٠٤٨", None), ("２０４８", None)], ids=lambda value: str(value)[:20])
def test_predict_reads_an_answer(asked, text, value):
    if value is None:
        with pytest.raises(predict_answers.UsageError):
            predict_answers.parse_answer(text)
    else:
        assert asked.value(predict_answers.parse_answer(text)) == value


@pytest.mark.parametrize("text", ["3", "3 GB", "3000 MB"])
def test_predict_reads_the_unit_of_the_question(asked, text):
    asked = dataclasses.replace(asked, question=dataclasses.replace(asked.question, text="How many GB?"))
    assert asked.value(predict_answers.parse_answer(text)) == 3


@pytest.mark.parametrize("answer, actual, points", [
    (2048, 2048, (10, "exact")), (2049, 2048, (10, "exact")), (2000, 2048, (7, "within 10%")),
    (2030, 2048, (7, "within 10%")), (1800, 2048, (4, "within a factor of 2")), (900, 2048, (1, "the right direction")),
    (1100, 2048, (4, "within a factor of 2")), (4000, 2048, (4, "within a factor of 2")),
    (100, 2048, (1, "the right direction")), (4096, 2048, (0, "no change predicted")),
    (8192, 2048, (0, "the wrong direction")), (float("nan"), 2048, (0, "missed")),
    (4090, 4096, (10, "exact")), (4000, 4096, (0, "it does not change")), (2048, 4096, (0, "it does not change"))])
def test_predict_scores(asked, answer, actual, points):
    """The first row has 4,096."""
    assert asked.points(answer, actual)[:2] == points


@pytest.mark.parametrize("words, says", [
    ("", "which chapter?"), ("19", "there is no chapter 19; chapters: 01_single_gpu"),
    ("3 --question 99", "--question 99: chapter 03_zero has questions 1 to"), ("3 --question x", "--question"),
    ("3 --answers none", "none: No such file"), ("3 --answers few", "few:2: \"few\" is no number"),
    ("3 --question 1 --answers few", "has 2 lines for 1 questions"), ("3 --build none", "there is no none/bin")])
def test_predict_refuses(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "few").write_text("1/2\nfew\n")
    try:
        code = predict.main(words.split())
    except SystemExit as end:
        code = end.code
    err = capsys.readouterr().err
    assert code == 2 and err.startswith("predict.py: ") and err.count("\n") == 1 and says in err, (code, err)


def test_predict_prints_questions_in_any_locale(run):
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for chapter in ("07", "08"):
        done = run(sys.executable, ROOT / "docs/predict.py", chapter, "--list", env=plain)
        assert not done.out.isascii()


def test_predict_asks_runs_and_scores(run, build):
    (run.folder / "answers").write_text("19.8\n")
    done = run(sys.executable, ROOT / "docs/predict.py", "3 --question 1 --json --answers", run.folder / "answers",
               "--build", build)
    result = json.loads(done.out)
    assert (result["points"], result["of"]) == (10, 10), done
    assert result["answers"][0]["actual"] == 19.8
    done.says("10 of 10 points for 1 answer", "03_zero/README.md:")
