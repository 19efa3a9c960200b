"""Only this catches: a curve of docs/plot_run.py or a number of docs/tensorboard_run.py that no metrics have."""
import json
import math
import os
import sys
import types

import pytest

import plot_run
import tensorboard_run
from conftest import refused


def lines(*events):
    return "".join(json.dumps(event) + "\n" for event in events)


def step(number, loss, norm=1.0, **more):
    return {"event": "step", "step": number, "loss": loss, "grad_norm": norm, "tokens_per_s": 10, **more}


CONFIG, MEMORY = {"event": "config", "flags": {"lr": 1}}, {"memory": {"params": 8, "peak": {"total": 9}}, "mfu": None}
A = lines(CONFIG, step(1, 5.5), step(2, 5), {"event": "eval", "step": 2, "loss": 5.25, "sources": {"a.txt": 5.5}},
          step(3, 9), {"event": "eval", "step": 3, "loss": 9}, step(4, 9), CONFIG,
          step(3, None, None, **MEMORY), {"event": "summary"}) + lines(step(4, 3))[:-9]  # resumed; half a line
B = lines(step(1, 4), step(10, 2.5))


def same(found, expected):
    return str(found) == str(expected)  # nan is nan


def test_curves_are_those_of_the_files(call, tmp_path, monkeypatch):
    figures, draw = [], plot_run.draw
    monkeypatch.setattr(plot_run, "draw", lambda runs: figures.append(draw(runs)) or figures[0])
    (tmp_path / "d").mkdir()
    assert call(plot_run, "m.jsonl d/m.jsonl", {"m.jsonl": A, "d/m.jsonl": B}) == (0, "run.png\n", "")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    curves = [[(line.get_label(), list(line.get_xdata()), list(line.get_ydata())) for line in axis.lines]
              for axis in figures[0].axes]
    name, other, steps = f"{tmp_path.name}/m.jsonl", "d/m.jsonl", [1, 2, 3]
    assert [curve[1:] for curve in curves[0][2:]] == [([2], [5.25]), ([], [])]
    assert same([curves[0][:2], *curves[1:]], [[(name, steps, [5.5, 5.0, math.nan]), (other, [1, 10], [4.0, 2.5])],
                                               [(name, steps, [1.0, 1.0, math.nan]), (other, [1, 10], [1.0, 1.0])],
                                               [(name, steps, [10] * 3), (other, [1, 10], [10] * 2)]])


@pytest.mark.filterwarnings("error")
def test_a_run_without_a_finite_norm_is_drawn(call, tmp_path):
    assert call(plot_run, "m --out m.svg", {"m": lines(step(1, None, None), step(2, 1, 0))}) == (0, "m.svg\n", "")
    assert b"<svg" in (tmp_path / "m.svg").read_bytes()


def test_tensorboard_is_given_every_number(call, tmp_path, monkeypatch):
    written = []

    class Writer:
        def __init__(self, folder):
            self.folder = folder
            os.makedirs(folder)

        def add_scalar(self, *each):
            written.append((self.folder, *each))

        def close(self):
            written.append(self.folder)

    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "tensorboard.summary", types.SimpleNamespace(Writer=Writer))
    assert call(tensorboard_run, "logs m.jsonl b.jsonl", {"m.jsonl": A, "b.jsonl": B}) == (0, "logs/m\nlogs/b\n", "")
    rate, nan = {"tokens_per_s": 10.0}, math.nan
    expected = [("logs/m", name, value, number) for number, values in (
        (1, {"loss": 5.5, "grad_norm": 1.0, **rate}), (2, {"loss": 5.0, "grad_norm": 1.0, **rate}),
        (3, {"loss": nan, "grad_norm": nan, **rate, "memory/params": 8.0, "memory/peak/total": 9.0}),
        (2, {"eval/loss": 5.25, "eval/sources/a.txt": 5.5})) for name, value in values.items()]
    assert same(written[:14], expected + ["logs/m"]) and len(written) == 14 + 7, written
    for words, says in ("logs m.jsonl", "logs/m: is already there"), ("new m.jsonl m.b", "two files have one name"):
        refused(tmp_path, call(tensorboard_run, words, {"m.b": B}), ["m.jsonl", "b.jsonl", "m.b", "logs"],
                "tensorboard_run", says)


BAD = [("none", "", "none: cannot be read: No such file"), (".", "", ".: cannot be read: not a file"),
       ("", "", "required"),
       *(("m", text, "m: line 1 is not an event of --metrics") for text in (
           "text\n", "{}\n", "[1]\n", "5\n", "null\n", '{"event": "step"}\n', '{"event": []}\n', "[" * 9999 + "\n",
           "\0\n", lines(step("a", 1)), lines(step(None, 1)), '{"event": "step", "step": 1e999}\n')),
       ("m", B + "\n", "m: line 3 is not"), ("m", "", "m: has no steps"), ("m", lines(CONFIG), "m: has no steps"),
       ("m", lines(step(1, 1))[:-1], "m: has no steps"), ("m", b"\xff\n", "m: line 1 is not")]


@pytest.mark.parametrize("program, words, bad", [
    (plot_run, "", [("m", lines(step(1, "a")), "m: loss is not a number"), ("m --out m.jsonl", B, "--out: m.jsonl"),
                    ("m --out m", B, "--out: m must end"), ("m --out d/a.png", B, "d/a.png: No such file"),
                    ("m --foo", B, "--foo")]),
    (tensorboard_run, "logs ", [("m", B, "needs tensorboard: "), ("m --foo", B, "--foo")])])
def test_what_is_no_metrics_file_is_refused(call, tmp_path, monkeypatch, program, words, bad):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    for given, text, says in BAD + bad:
        refused(tmp_path, call(program, words + given, {"m": text}), ["m"], program.__name__, says)
