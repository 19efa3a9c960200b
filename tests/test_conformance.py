"""What only this catches: a conformance board (docs/conformance.md) that is not what its record gives, or breaks its
promises: every framework has a row and a pinned version, every red cell a patch with which it is green. No cell runs."""
import csv
import subprocess
import sys

from conftest import ROOT


def test_board_is_what_its_record_gives():
    board = ROOT / "docs/conformance/board.py"
    done = subprocess.run([sys.executable, board, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_twenty_random_models_agree():
    with open(ROOT / "docs/results/conformance_random.csv", newline="", encoding="utf-8") as file:
        models = list(csv.DictReader(file))
    assert all(model["verdict"] == "agrees" for model in models) and len({model["flags"] for model in models}) >= 20
