"""Two incidents after bugs of docs/silent-bugs.md: a gradient that lacks a part of a sum, over the ranks of an axis.

Reading on spoils the drills."""
import re

from evidence import Case, Evidence, WrongGradient, compared, events, same_loss_other_norm

REPLICATED = ["model.norm.weight"] + [
    f"model.layers.{layer}.{part}.weight" for layer in (0, 1)
    for part in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")]


class NormOfTensorRanks(WrongGradient):
    name = "iris"
    title = "Sequence parallelism saves memory, and the loss is that of the run without it. Nearly."
    teaches = "which gradients tensor-parallel ranks sum, and how to halve a mesh along an axis"
    needs = "chapter 04, \"Sequence parallelism\"; drill 8"
    story = """iris has two tensor-parallel ranks times two data-parallel ones, sequence parallelism, and norms of q
and k. The loss falls. Beside one device (one-rank.jsonl) it is right at step 1, and differs in the last digits
later: rounding, says the owner. reference/ has the first gradients;
one-rank.sh makes those of one good device: build/bin/compare build/drill/iris/reference build/drill/iris/one"""
    hints = ("The loss of step 1 and the gradient norm of step 1, in metrics.jsonl and one-rank.jsonl: which of "
             "them is wrong by more than rounding?",
             "bash build/drill/iris/one-rank.sh, then compare: one gradient differs. With sequence parallelism each "
             "tensor-parallel rank has a part of the rows, and so only a part of which gradients?",
             "Halve along an axis at a time: ranks 0,1 and ranks 2,3 are the tensor-parallel groups (rerun iris --on "
             "0,1). Then one rank alone, on which nothing is divided: --on 0 --tp 1 --sequence-parallel off")
    remarks = {"rank": "`rerun iris --on` two ranks of a group, then one alone with --tp 1 --sequence-parallel off",
               "place": "build/bin/compare lists the gradients that differ most",
               "cause": "would rounding change one gradient of 25, and stay as large in fp64?"}
    confusions = {**WrongGradient.confusions,
                  "rounding": "rounding is of the size 1e-7 in every gradient, and 1e-15 in fp64; this is neither",
                  "bit-flip": "a changed weight would change the loss of step 1",
                  "skipped-collective": "a rank that skips a call waits or disagrees in the next one; this run "
                                        "ends well"}
    reasoning = """Weights that every tensor-parallel rank holds whole (norms) see only that rank's rows when the
sequence is divided, so their gradients are parts, which a sum over tp completes. Here one rank's part of one of
them is missing. AdamW hides it: the direction of most elements is still right. In Megatron-LM #1446 no rank had
added the others' parts of the final norm's gradient, with the same symptom; there the copies also went apart,
which --replica-check 1 sees."""
    cluster = """Compare the gradients of step 1 with one device's for every combination of parallelisms that you
use, not for each of them alone: this sum is needed only where two are on. docs/silent-bugs.md has more of the
kind."""

    def draw(self, dice):
        rank, name = dice.randrange(4), dice.choice(REPLICATED)
        flags = self.job(tp=2, sequence_parallel="on", qk_norm="on", save_reference="reference")
        return Case(flags, [("wrong-sum", rank, 1, name)], {"rank": {rank}, "place": name, "cause": "missing-gradient"})

    def evidence(self, case):
        (rank,), name = case.answer["rank"], re.escape(case.answer["place"])
        group, other = ([0, 1], [2, 3]) if rank < 2 else ([2, 3], [0, 1])
        wrong = compared(rf"gradient: {name} at step 1 by .* \(1 of 25 exceed it\)")
        return [Evidence("step 1: the loss is right, the norm is not", same_loss_other_norm),
                self.reference("compare: one gradient", wrong),
                self.reference("in fp64 as well", wrong, dtype="fp64"),
                self.reference(f"rerun --on {group[0]},{group[1]}: still wrong", wrong, group),
                self.reference(f"rerun --on {other[0]},{other[1]}: right", compared("within"), other),
                self.reference(f"rerun --on {rank}: nothing is left of it", compared(rf"^ +1 +\S+ +{name}$"), [rank],
                               tp="1", sequence_parallel="off")]


def wrong_steps(folder, good, key, bound):
    pairs = zip(events(folder, "step"), events(folder, "step", good))
    return [mine["step"] for mine, right in pairs if not abs(mine[key] / right[key] - 1) < bound]


def norm_first_wrong(step, good):
    """Loss and norm are those of one rank up to that step, whose norm differs; the losses follow later."""
    def find(folder):
        norms, losses = wrong_steps(folder, good, "grad_norm", 1e-5), wrong_steps(folder, good, "loss", 1e-6)
        if not norms or norms[0] != step or not losses or losses[0] <= step:
            return None
        mine, right = (events(folder, "step", file)[step - 1] for file in ("metrics.jsonl", good))
        return (f"metrics.jsonl and {good}: step {step} is the first with another norm, {mine['grad_norm']} and "
                f"{right['grad_norm']}; the first loss that differs is that of step {losses[0]}")
    return find


def norms_agree(folder):
    wrong = wrong_steps(folder, "one.jsonl", "grad_norm", 1e-5)
    return None if wrong else "metrics.jsonl and one.jsonl: all norms are equal"


class TiedMatrix(WrongGradient):
    name = "juniper"
    title = "The first gradients have been checked. The run drifts away later."
    teaches = "what a check of step 1 cannot see; the two uses of a tied matrix"
    needs = "chapter 05, tied embeddings; drill 8"
    fields = ("rank", "step", "place", "cause")
    step = "the first step whose update is wrong"
    story = """juniper has two pipeline stages times two data-parallel ranks and ties its embeddings. Step 1 was
compared with one device, gradient by gradient, and signed. Two days later the loss is no longer that of one
device (one-rank.jsonl). The code has not changed since. Which device is it, since when, and what does it lose?"""
    hints = ("In a step come, in this order: the loss, the gradients, their norm, the update. Which number of which "
             "step is the first that differs between metrics.jsonl and one-rank.jsonl?",
             "The gradients of step 1 cannot show what begins later; the norm of each step can, also on fewer ranks. "
             "Which pipelines of two ranks, one of each stage, have the norms of one-rank.jsonl? (rerun juniper --on "
             "0,2)",
             "On one rank alone, with --pp 1, a device computes the whole model: one that is well has all norms of "
             "one-rank.jsonl. And of which matrix may a gradient be lost without the loss rising again?")
    remarks = {"rank": "`rerun juniper --on 0,2` and `--on 1,3` are pipelines of two; then one rank alone with "
                       "--pp 1",
               "step": "the first step whose norm differs from one-rank.jsonl's; its loss is still right",
               "place": "which matrix has two gradients, of which one may be lost while the other still trains it?",
               "cause": "is the wrong norm smaller or larger, and does it stay wrong in fp64?"}
    confusions = {**WrongGradient.confusions,
                  "rounding": "rounding does not begin at a step; and in fp64 it would vanish",
                  "bit-flip": "a changed weight would change the loss first, and the norm with it",
                  "other-data": "other samples would change that step's loss as well",
                  "divergence": "loss and norm stay small; something is wrong, but not that",
                  "skipped-collective": "a rank that skips a call disagrees in the next one; this run ends well"}
    reasoning = """Up to that step all numbers are those of one device; then the norm is wrong first, and the loss
one step later: a gradient. A tied matrix has two, of lookup and of product, on the first and the last stage,
whose sum is its gradient. One device has lost its part from that step on. The other part still trains the
matrix, so the loss goes on falling."""
    cluster = """A check at step 1 says nothing of step 10,000: repeat it from a checkpoint, after each change of
machines, and keep the norm of one small run beside the large one. docs/silent-bugs.md has tied matrices whose
copies went apart."""

    def draw(self, dice):
        rank, step = dice.randrange(4), dice.randint(6, self.steps - 6)
        name = "model.embed_tokens.weight"
        flags = self.job(pp=2, tied_embeddings="on", save_reference="reference")
        return Case(flags, [("wrong-sum", rank, step, name)],
                    {"rank": {rank}, "step": step, "place": name, "cause": "missing-gradient"})

    def evidence(self, case):
        (rank,), step = case.answer["rank"], case.answer["step"]
        pipelines = ([0, 2], [1, 3])
        faulty, well = pipelines if rank in (0, 2) else pipelines[::-1]
        wrong = norm_first_wrong(step, "one.jsonl")
        return [Evidence("the norm of one step is the first wrong number", norm_first_wrong(step, "one-rank.jsonl")),
                self.reference("step 1 agrees, gradient by gradient", compared("within")),
                self.reference(f"rerun --on {faulty[0]},{faulty[1]}: the same step", wrong, faulty),
                self.reference(f"rerun --on {well[0]},{well[1]}: no step", norms_agree, well),
                self.reference(f"rerun --on {rank} --pp 1: the same step", wrong, [rank], pp="1")]
