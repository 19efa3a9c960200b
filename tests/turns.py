"""Of a list with a costly test of each entry the one whose turn it is, or all with TRAIN70B_TEST_SLICE=all."""
import os

from conftest import SLICE, in_turn


def one_in_turn(cases):
    """Of an eighth's entries the one that the commit's other digits choose (tests/run.sh: EMULATE_SEED)."""
    chosen, seed = in_turn(cases), int(os.environ.get("EMULATE_SEED", "1"))
    return chosen if SLICE == "all" else [chosen[max(seed - 1, 0) // 8 % len(chosen)]]
