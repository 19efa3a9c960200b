"""A small model trained by chapter 01 on one rank, and what other programs must make of the same flags on several."""
import shutil

from conftest import ROOT

DATA = ["--data", ROOT / "README.md"]
TRAINING = [*DATA, "--steps 3 --val-fraction 0.05 --eval-every 2"]
TOLERANCE = 5e-6  # of fp32: what the order of sums leaves


def one_rank(run, *flags):
    """Three steps on one rank: the model `one`, its reference run one_reference, evaluations in one.jsonl."""
    clear(run, "one", "one_reference")
    return run("01_single_gpu", *flags, *TRAINING, "--save-hf one --save-reference one_reference --metrics one.jsonl")


def like_one_rank(run, program, *flags, ranks=4):
    """The same on several ranks: weights, gradients and evaluations are one rank's, and each step sends as many bytes.

    Leaves the model `several`, its reference run several_reference, m.jsonl and t.json.
    """
    clear(run, "several", "several_reference")
    done = run(program, *flags, *TRAINING, "--comm-check on --save-hf several --save-reference several_reference",
               "--metrics m.jsonl --trace t.json", ranks=ranks)
    assert not done.err, done
    same_run(run, "several_reference", "one_reference")
    same_evaluations(done)
    sent = [comm_bytes(step) for step in done.events()[1:]]  # in the first the file's gradients are gathered
    assert sent[0] == sent[1], f"{sent}\n{done}"
    return done


def same_run(run, folder, other, tolerance="5e-06"):
    """Two reference runs are one, as `compare` finds; fp64: "1e-10"."""
    run("compare", folder, other).says(f"the runs agree within {tolerance}", where="out")


def same_evaluations(done, file="m.jsonl", other="one.jsonl"):
    found, expected = ([event["loss"] for event in done.events("eval", name)] for name in (file, other))
    assert len(found) == len(expected) > 1, (found, expected)
    assert all(abs(a / b - 1) <= TOLERANCE for a, b in zip(found, expected)), (found, expected)


def loads_and_saves(run, program, *flags, ranks):
    """Ranks that load `one` and learn nothing in a step save the same file; flags: not those of a model."""
    clear(run, "again")
    done = run(program, "--load-hf one --hf-ignore vocab_size --lr 0 --steps 1 --save-hf again", *DATA, *flags, ranks=ranks)
    one, again = (run.folder / name / "model.safetensors" for name in ("one", "again"))
    assert one.read_bytes() == again.read_bytes(), done
    return done


def comm_bytes(step):
    """What a step has sent: {collective: bytes}."""
    return {name: sent for name, sent in step["comm_bytes"].items() if sent > 0}


def clear(run, *folders):
    for folder in folders:
        shutil.rmtree(run.folder / folder, ignore_errors=True)
