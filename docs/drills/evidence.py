"""What an incident is made of: a case that is drawn, the evidence that is found in its artefacts."""
import dataclasses
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "docs"))
import programs  # noqa: E402

CAUSES = {
    "hang": "one process is stuck in its own code, outside any collective",
    "dead-process": "one process was killed (out of memory, a crash); its node is well",
    "lost-node": "a node is gone, with all of its processes",
    "slow-device": "one rank's own work takes longer: a throttled or broken device",
    "slow-network": "the transfers take longer on all ranks",
    "slow-data": "steps wait for the data",
    "nan-one-rank": "NaN arises on one rank alone: its device or its kernels",
    "divergence": "training diverges: learning rate or initial values, alike on all ranks",
    "skipped-collective": "a rank leaves out a collective that the others call",
    "deadlock": "ranks call the collectives of two groups in different orders, so that each waits for another",
    "missing-gradient": "a rank's gradient is missing in the sum over the ranks",
    "wrong-group": "a gradient is divided by the size of a group that does not share the parameter",
    "rounding": "another order of sums: the last bits differ, nothing is wrong",
    "bit-flip": "a weight changed in one rank's memory between two updates",
    "other-data": "a rank trains on other samples than it should",
}
SHAPE = {"--layers": "2", "--hidden": "32", "--heads": "4", "--kv-heads": "2", "--ffn": "48", "--seq-len": "32",
         "--init-std": "0.1", "--global-batch": "12"}
# Not the embedding: a single row of it is seldom used.
PARAMETERS = ["model.norm.weight", "lm_head.weight"] + [
    f"model.layers.{layer}.{part}.weight" for layer in (0, 1)
    for part in ("input_layernorm", "self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
                 "mlp.down_proj")]
# Weights near 1, of which a flipped bit shows in the next step's loss.
NORMS = ["model.norm.weight"] + [f"model.layers.{layer}.{part}.weight" for layer in (0, 1)
                                 for part in ("input_layernorm", "post_attention_layernorm")]
# Whole on every tensor-parallel rank.
REPLICATED = ["model.norm.weight"] + [
    f"model.layers.{layer}.{part}.weight" for layer in (0, 1)
    for part in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")]
# The program keeps the matrices of all experts in two parameters; references have them one by one, as the Hub's files.
SAME_MATRIX = {"mlp.experts.gate_up_proj": "block_sparse_moe.experts.w1",
               "block_sparse_moe.experts.w3": "block_sparse_moe.experts.w1",
               "mlp.experts.down_proj": "block_sparse_moe.experts.w2"}
PER_NODE = 2


def hub_name(place):
    """Of a parameter of experts in the program, or of w3, which shares one with w1: as the drills' answers have it."""
    for its, name in SAME_MATRIX.items():
        place = place.replace(its, name)
    return place


def node_of(job, rank):
    return f"{job}-n{rank // PER_NODE + 1:02}"


@dataclasses.dataclass
class Case:
    """One drawing of an incident."""
    flags: dict             # of the job
    fault: list             # [(kind, rank, step, parameter or "")]
    answer: dict            # {"rank": {3}, "step": 7, "place": "dp.all_reduce", "cause": "hang"}
    ranks: int = 4


@dataclasses.dataclass
class Evidence:
    """`find(folder)` returns what the solution cites, or None. rerun: looks into another run of the job."""
    says: str
    find: object
    rerun: dict = None      # flags
    on: list = None         # ranks of the rerun
    one_rank: bool = False  # and a run of chapter 01 with the same flags, whose reference is beside it


def first_line(pattern, *files, longest=200):
    """Evidence.find: the first line of the files (globs) that the pattern matches, as FILE:LINE: TEXT."""
    def find(folder):
        for glob in files:
            for path in sorted(folder.glob(glob)):
                for number, text in enumerate(path.read_text("utf-8").splitlines(), 1):
                    if re.search(pattern, text):
                        shown = text if len(text) < longest else text[:longest] + " ..."
                        return f"{path.relative_to(folder)}:{number}: {shown}"
        return None
    return find


def events(folder, kind, file="metrics.jsonl"):
    return programs.events(folder / file, kind)


def last_step(step):
    """The metrics end with that step."""
    def find(folder):
        steps = events(folder, "step")
        if not steps or steps[-1]["step"] != step:
            return None
        return f"metrics.jsonl: the last step is {step}, with loss {steps[-1]['loss']}"
    return find


def unfinished(folder, rank):
    """The operations that a rank's log calls NOT ENDED."""
    text = (folder / f"logs/rank-{rank}.log").read_text("utf-8")
    return re.findall(rf"^rank {rank}:   (\S+) #.*NOT ENDED", text, re.M)


def only_missing(rank, ranks, operation):
    """Every rank but one is in that operation; that one has ended all of its own."""
    def find(folder):
        inside = [other for other in range(ranks) if operation in unfinished(folder, other)]
        text = (folder / f"logs/rank-{rank}.log").read_text("utf-8")
        if inside != [other for other in range(ranks) if other != rank] or unfinished(folder, rank):
            return None
        calls = re.findall(rf"^rank {rank}:   (\S+ #\d+)", text, re.M)
        return calls and (f"logs: ranks {listed(inside)} list {operation} as NOT ENDED; the last call of rank "
                          f"{rank} is {calls[-1]}, and it has ended")
    return find


def listed(numbers):
    return ", ".join(map(str, sorted(numbers)))


def straggles(rank, step):
    """From that step on the straggler is that rank, with about twice the median's work of its own."""
    def find(folder):
        stragglers = {line["step"]: line["straggler"] for line in events(folder, "step")}
        factors = {number: its["busy_s"] / its["median_busy_s"] if its["rank"] == rank else 0
                   for number, its in stragglers.items()}
        after = [value >= 1.5 for number, value in factors.items() if number >= step]
        if not after or not after[0] or factors[step - 1] >= 1.5 or factors.get(step - 2, 0) >= 1.5:
            return None
        if sum(after) < 0.9 * len(after):
            return None
        return (f"metrics.jsonl: step {step} is the first with straggler.rank {rank} and busy_s "
                f"{stragglers[step]['busy_s']:.3g}, {factors[step]:.1f} times the median; it stays so in "
                f"{sum(after)} of {len(after)} steps")
    return find


def waits_in(operation, rank, ranks):
    """In the trace that rank spends the least time in the operation."""
    def find(folder):
        sums, others = {}, [other for other in range(ranks) if other != rank]
        for span in json.loads((folder / "trace.json").read_text("utf-8"))["traceEvents"]:
            if span.get("ph") == "X" and span.get("cat", "").startswith("comm"):
                by_rank = sums.setdefault(span["name"], [0.0] * ranks)
                by_rank[span["pid"]] += span["dur"] / 1000
        most = max(sums, key=lambda name: sum(sums[name][other] - sums[name][rank] for other in others))
        mine = sums[operation]
        if most != operation or not mine[rank] < min(mine[other] for other in others):
            return None
        times = ", ".join(f"rank {other} {mine[other]:.0f}" for other in range(ranks))
        return f"trace.json: milliseconds in spans of {operation}: {times}"
    return find


def first_difference(step):
    """The losses are those of the good run up to that step, and differ in the next one."""
    def find(folder):
        pairs = list(zip(events(folder, "step"), events(folder, "step", "good.jsonl")))
        differ = [mine["step"] for mine, good in pairs if mine["loss"] != good["loss"]]
        if not differ or differ[0] != step + 1:
            return None
        mine, good = pairs[step]
        return (f"metrics.jsonl and good.jsonl: step {step} is equal, step {step + 1} has {mine['loss']} and "
                f"{good['loss']}")
    return find


def same_loss_other_norm(folder):
    mine, good = events(folder, "step")[0], events(folder, "step", "one-rank.jsonl")[0]
    if not abs(mine["loss"] / good["loss"] - 1) < 1e-6 or not abs(mine["grad_norm"] / good["grad_norm"] - 1) > 5e-6:
        return None
    return (f"metrics.jsonl and one-rank.jsonl, step 1: losses {mine['loss']} and {good['loss']}, norms "
            f"{mine['grad_norm']} and {good['grad_norm']}")


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


def all_terminated_but(dead, ranks):
    def find(folder):
        told = {rank for rank in range(ranks)
                if "terminated by SIGTERM" in (folder / f"logs/rank-{rank}.log").read_text("utf-8")}
        if told != set(range(ranks)) - dead:
            return None
        return (f'logs: ranks {listed(told)} say "terminated by SIGTERM"; those of ranks {listed(dead)} end without a '
                "word")
    return find


def out_of_order(early, ranks):
    """The early ranks are in tp.scalar, the others in dp.scalar, and before that dp.scalar came first."""
    def find(folder):
        for rank in range(ranks):
            if unfinished(folder, rank) != ["tp.scalar" if rank in early else "dp.scalar"]:
                return None
        return (f"logs: tp.scalar is NOT ENDED on ranks {listed(early)}, dp.scalar on ranks "
                f"{listed(set(range(ranks)) - early)}")
    return find


def usual_order(folder):
    for path in sorted(folder.glob("logs/rank-*.log")):
        calls = re.findall(r"^rank \d+:   (\S+) #(\d+)(.*)$", path.read_text("utf-8"), re.M)
        for before, after in zip(calls, calls[1:]):
            if before[0] == "dp.scalar" and after[0] == "tp.scalar" and "1 numbers" in before[2] and \
                    "1 numbers" in after[2] and "NOT ENDED" not in after[2]:
                return f"{path.relative_to(folder)}: a step before: dp.scalar #{before[1]}, then tp.scalar #{after[1]}"
    return None


def compared(*patterns):
    """In what build/bin/compare prints of the run's reference and one rank's: a line for each pattern."""
    def find(folder):
        lines = [first_line(pattern, "compare.txt", longest=400)(folder) for pattern in patterns]
        return None if None in lines else "\n    ".join(
            line.replace("compare.txt:", "build/bin/compare reference one, line ", 1) for line in lines)
    return find


class Incident:
    name = title = story = troubleshooting = reasoning = cluster = ""
    minutes = 10
    fields = ("rank", "step", "place", "cause")
    # What the fields ask for.
    rank = "the rank with the fault"
    step = "the first step that went wrong"
    place = ""
    hints = ()
    remarks = {}        # by field
    confusions = {}     # remarks on the cause, by wrong cause
    steps = 24
    step_tolerance = 0
    quiet = False       # measures times: needs two idle cores
    extra = {}          # {file: a run without the fault, "same" layout or "one" rank}

    # A subclass has draw(dice), which gives a Case, and evidence(case), a list.

    def job(self, **more):
        flags = {**SHAPE, "--steps": str(self.steps)}
        return {**flags, **{"--" + key.replace("_", "-"): str(value) for key, value in more.items()}}


class WrongGradient(Incident):
    """A run that ends well beside one good device's: loss, gradients and norm say what is wrong."""
    minutes = 25
    place = "the parameter"
    fields = ("rank", "place", "cause")
    confusions = {"other-data": "other samples would change every gradient, and the loss of step 1",
                  "nan-one-rank": "every value is a number",
                  "divergence": "the loss is nearly the right one: something is wrong, but not that"}
    troubleshooting = "The loss differs between two layouts"
    extra = {"one-rank.jsonl": "one"}

    def reference(self, says, find, on=None, **flags):
        """Evidence of a rerun whose first gradients are saved, beside those of one good device."""
        changed = {"--" + key.replace("_", "-"): value for key, value in flags.items()}
        return Evidence(says, find, {"--save-reference": "reference", **changed}, on, True)
