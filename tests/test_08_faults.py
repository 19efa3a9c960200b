"""Only this catches: what --inject breaks, and --replica-check finds, of a run in every layout that has replicas."""
import collections
import re
import statistics

import pytest
from conftest import in_turn

PROGRAM = "08_3d_full"
SHAPE = ("--layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --vocab 259 --seq-len 32 --global-batch 8 "
         "--init-std 0.1 --lr 0.001")
SPARSE = "--dtype fp64 --experts 8 --ep 2 --zero 1"
GATE = "model.layers.1.mlp.gate_proj.weight"
EXPERTS = "model.layers.0.mlp.experts.down_proj"


def train(run, *flags, code=0, ranks=4, seconds=60, shape=SHAPE):
    return run(PROGRAM, shape, "--steps 6 --metrics m.jsonl", *flags, code=code, ranks=ranks, seconds=seconds)


def announced(done, *faults):
    """At the start, and when they strike."""
    for kind, rank, step in faults:
        done.says(f"FAULT INJECTION: {kind} of rank {rank} at step {step}", where="out")
        done.says(f"FAULT INJECTION: rank {rank}: {kind} at step {step}")


def of_steps(done, key="loss"):
    return [event[key] for event in done.events()]


@pytest.mark.parametrize("ranks, flags, says", [
    (2, "--inject nan:0:1,kill:2:1", ["--inject kill:2:1: valid ranks are 0 to 1"]),
    (2, "--inject deadlock:0:1", ["--inject deadlock:0:1: takes two groups", "--tp 2 --dp 2"]),
    (2, "--experts 8 --ep 2 --inject wrong-group:0:1:lm_head.weight", ['"lm_head.weight" is not divided over --ep']),
    (2, "--replica-check 1 --zero 3", ["--replica-check 1: --zero 3 keeps one copy", "--hybrid-shard"]),
    (2, "--replica-check 1 --pp 2", ["--replica-check 1: no two ranks hold the same"])])
def test_refused(run, ranks, flags, says):
    run.refused(PROGRAM, "--steps 1 --metrics m.jsonl", flags, ranks=ranks, says=says)


# ---- faults that end a run -------------------------------------------------------------------------------------------


def test_kill_ends_all_ranks(run):
    done = train(run, "--inject kill:1:3", code=None, seconds=5)
    announced(done, ("kill", 1, 3))
    assert done.code not in (0, 124) and len(done.events()) == 2, done
    assert done.events("config")[0]["flags"]["inject"] == "kill:1:3"


@pytest.mark.parametrize("kind, flags, says", [
    ("hang", "", ["dp.all_reduce #", "NOT ENDED", "no rank of this node has stopped"]), ("stop", "--tp 2 --pp 2", [])])
def test_a_rank_that_hangs_or_stops_ends_the_run_after_the_timeout(run, kind, flags, says):
    """The rank that does not run is named, no other, and no report tears another's lines."""
    done = train(run, f"--inject {kind}:2:3 --comm-timeout 2", flags, code=1, seconds=9)
    announced(done, (kind, 2, 3))
    done.says("has not ended after 2 s (--comm-timeout)", *says)
    assert set(re.findall(r"rank (\d) has not responded", done.err)) == ({"2"} if kind == "stop" else set()), done
    assert kind == "hang" or "no rank of this node has stopped" not in done.err, done
    peers = re.findall(r"^rank (\d):   pp\.(?:send|recv) .* rank (\d)  ", done.err, re.M)  # in the world, not in pp
    assert bool(peers) == ("--pp" in flags) and all(abs(int(a) - int(b)) == 2 for a, b in peers), done
    assert not re.search(r"[^\n]rank \d:   |^(?!rank \d: ).*( ms|NOT ENDED.*)$", done.err, re.M), done


@pytest.mark.parametrize("flags", ["--zero 0", "--zero 1", "--zero 2", "--zero 3", "--zero 3 --offload all",
                                   "--dp 2 --tp 2 --zero 1", GATE])
def test_nan_is_found_and_its_parameter_named(run, flags):
    fault = f"nan:1:3:{GATE}" if flags == GATE else f"nan:1:3 {flags}"
    done = train(run, "--inject", fault, code=1, seconds=8)
    announced(done, ("nan", 1, 3))
    name = re.search(r"the gradient of (.*) has a NaN$", done.err, re.M)[1]
    assert name == GATE or flags != GATE
    done.says(f"{PROGRAM}: step 3: loss",
              f"first non-finite parameter: {name} (its gradient) on rank 1 (1 of 4 ranks has one)")


@pytest.mark.parametrize("flags", ["--tp 2 --dp 2", "--tp 2 --cp 2 --zero 1"])
def test_deadlock_shows_two_ranks_in_either_group(run, flags):
    done = train(run, "--inject deadlock:1:3 --comm-timeout 2", flags, code=1, seconds=9)
    announced(done, ("deadlock", 1, 3), ("deadlock", 2, 3))
    done.says("has not ended after 2 s (--comm-timeout)")
    for call in ("rank [12]:   tp.scalar", "rank [03]:   [a-z_]*.scalar"):
        assert len(re.findall(f"{call}.*NOT ENDED", done.err)) == 2, f"{call}\n{done}"


LATE = r"has not ended after 2 s \(--comm-timeout\)|message truncated"


@pytest.mark.parametrize("check, flags, seconds, says", [
    *(("on", flags, 6, "mismatch(.|\n)*scalar") for flags in ("--dp 4", "--tp 4", "--zero 1", "--zero 3")),
    *(("off", flags, 9, LATE) for flags in ("--dp 4", "--tp 4", "--pp 2 --dp 2", "--pp 2 --tp 2"))])
def test_skip_collective_is_found_at_once_by_comm_check_otherwise_in_time(run, check, flags, seconds, says):
    fault = f"--inject skip-collective:1:3 --comm-check {check} --comm-timeout 2"
    done = train(run, fault, flags, code=1, seconds=seconds)
    announced(done, ("skip-collective", 1, 3))
    assert re.search(says, done.err), done


# ---- faults that do not ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(module_run):
    """The losses without a fault."""
    done = train(module_run)
    assert "FAULT" not in done.out + done.err, done
    return of_steps(done)


def test_slow_has_the_same_losses(run, plain):
    done = train(run, "--inject slow:1:4")
    announced(done, ("slow", 1, 4))
    assert of_steps(done) == plain


def test_slow_takes_longer(run):
    """Steps of many milliseconds: the machine's scheduler takes turns of a few."""
    done = run(PROGRAM, "--layers 2 --hidden 128 --heads 4 --ffn 256 --seq-len 64 --global-batch 16 --steps 60",
               "--inject slow:1:31 --metrics m.jsonl", ranks=2)
    times = of_steps(done, "step_s")
    assert statistics.median(times[30:]) > 1.4 * statistics.median(times[:30])


@pytest.mark.parametrize("flags, fault, first", [("", ("bitflip", 3, 2), 3),
                                                 ("--replica-check 1", ("wrong-sum", 3, 4), 5)])
def test_bitflip_and_wrong_sum_are_silent_and_change_the_losses_from_the_next_step_on(run, plain, flags, fault, first):
    """A wrong sum leaves the replicas equal."""
    done = train(run, "--inject {}:{}:{}".format(*fault), flags)
    announced(done, fault)
    assert of_steps(done)[:first - 1] == plain[:first - 1] and of_steps(done) != plain


def test_a_list_of_faults(run):
    done = train(run, "--inject slow:0:2,bitflip:3:2,kill:2:5", code=None)
    announced(done, ("slow", 0, 2), ("bitflip", 3, 2), ("kill", 2, 5))
    assert done.code not in (0, 124), done


@pytest.fixture(scope="module")
def one(module_run):
    """Reference runs of one rank: `one`, and `sparse_one` of a model with experts."""
    for name, flags in (("one", ""), ("sparse_one", "--experts 8")):
        module_run("01_single_gpu", SHAPE, "--steps 6 --dtype fp64", flags, "--save-reference", name)
    return module_run.folder


@pytest.mark.parametrize("flags", ["--zero 0", "--zero 1 --micro-batch 1", "--zero 2 --micro-batch 1",
                                   "--zero 3 --recompute full", "--tp 2 --dp 2 --zero 0",
                                   "--pp 2 --dp 2 --pipeline zero-bubble --zero 1"])
def test_wrong_sum_makes_one_gradient_wrong(run, one, flags):
    done = train(run, f"--dtype fp64 --inject wrong-sum:3:1:{GATE} --save-reference four", flags)
    announced(done, ("wrong-sum", 3, 1))
    done = run("compare", "four", one / "one", code=1)
    assert re.search(rf"gradient: {GATE} at step 1 by 0\.[1-9].*\(1 of 21 exceed it\)", done.out), done


def test_wrong_group_changes_the_norm_of_its_step_and_the_losses_from_the_next_on(run):
    """The replicas stay equal."""
    good = train(run, SPARSE).events()
    found = train(run, SPARSE, "--inject wrong-group:1:4,wrong-group:3:4 --replica-check 1").events()
    for key, same in (("grad_norm", 3), ("loss", 4)):
        assert [a[key] == b[key] for a, b in zip(good, found)][:same + 1] == [True] * same + [False], key


def test_wrong_group_halves_gradients_of_experts_as_compare_says(run, one):
    train(run, SPARSE, "--inject wrong-group:1:1,wrong-group:3:1 --save-reference halved")
    done = run("compare", "halved", one / "sparse_one", code=1)
    done.says("the 24 wrong ones are 1/2 x the reference's, nothing else", where="out")


# ---- replicas --------------------------------------------------------------------------------------------------------

OF_FOUR = "on rank 3 from ranks 0, 1 and 2"
# Rank 3 flips a bit after step 2: found after a step, the last one with equal replicas, and what is said.
Drill = collections.namedtuple("Drill", "flags every step equal says")
DRILLS = [
    Drill("--zero 0", 1, 2, 1, "weight of"),
    Drill("--zero 0", 3, 2, 0, OF_FOUR),
    Drill("--zero 0", 4, 3, 0, OF_FOUR),
    Drill("--zero 0", 100, 6, 0, OF_FOUR),
    Drill("--zero 1", 1, 2, 1, OF_FOUR),
    Drill("--zero 2", 1, 2, 1, OF_FOUR),
    Drill("--zero 2 --dtype bf16", 1, 2, 1, OF_FOUR),
    Drill("--zero 3 --hybrid-shard 2", 2, 3, 1,
          "between ranks 1 and 3; to tell which is wrong takes a majority of three or more"),
    Drill("--zero 3 --hybrid-shard 1", 2, 3, 1, OF_FOUR),
    Drill("--zero 1 --hybrid-shard 2", 1, 2, 1, OF_FOUR),
    Drill("--cp 2 --dp 2 --zero 0", 2, 3, 1, OF_FOUR),
    Drill("--tp 2 --dp 2 --zero 0", 2, 3, 1, "between ranks 1 and 3"),
]


def found(done, step, equal, *says):
    done.says(f"--replica-check: after step {step}: the ", *says,
              f"resume from the newest checkpoint before step {equal + 1}")
    assert done.err.count("--replica-check: after") == 1, done
    event, = done.events("replicas_differ")
    assert (event["step"], event["equal"]) == (step, equal), event


@pytest.mark.parametrize("drill", in_turn(DRILLS, 3), ids=lambda drill: f"{drill.flags}, every {drill.every}")
def test_replica_check_finds_a_flipped_bit(run, drill):
    done = train(run, f"--inject bitflip:3:2 --replica-check {drill.every}", drill.flags, code=1)
    name = re.search(r"after step 2: (.*), element", done.err)[1]
    found(done, drill.step, drill.equal, f"of {name} differs ", drill.says)


@pytest.mark.parametrize("flags, fault, says", [
    ("--zero 0", "1:2:model.norm.weight", "the weight of model.norm.weight differs on rank 1 from ranks 0, 2 and 3"),
    ("--pp 2 --zero 3 --tied-embeddings on", "0:2", "of model.embed_tokens.weight differs between ranks 0 and 2"),
    (SPARSE, f"3:2:{EXPERTS}", f"of {EXPERTS} differs between ranks 1 and 3")],
    ids=["a parameter that is named", "the tied matrix", "one of two copies of an expert"])
def test_replica_check_finds_a_flipped_bit_in(run, flags, fault, says):
    done = train(run, f"--inject bitflip:{fault} --replica-check 1", flags, code=1)
    found(done, 2, 1, says)
    assert not re.search("replica check every.*experts", done.out), done


def test_replica_check_says_that_an_expert_has_one_copy(run):
    done = train(run, f"--experts 8 --ep 4 --zero 1 --inject bitflip:3:2:{EXPERTS} --replica-check 1")
    says = "not compared: the shards of the optimizer states, which have one copy; what is divided over ep, which has one copy)"
    done.says(says, where="out")


EQUAL = [
    (4, "--tp 2 --dp 2 --sequence-parallel on --zero 0"),
    (4, "--zero 0 --dtype bf16"),
    (4, "--zero 1 --dtype bf16 --optimizer adamw8bit"),
    (4, "--zero 0 --optimizer adamw8bit"),
    (4, "--zero 2 --offload optimizer"),
    (4, "--zero 3 --hybrid-shard 2 --dtype bf16"),
    (4, "--zero 3 --hybrid-shard 2 --offload all"),
    (4, "--zero 3 --hybrid-shard 2 --optimizer adamw8bit"),
    (4, "--tp 4 --sequence-parallel on --zero 0"),
    (4, "--tp 2 --dp 2 --sequence-parallel on --zero 3 --dtype bf16"),
    (8, "--tp 2 --pp 2 --dp 2 --zero 1 --tp-overlap on --sequence-parallel on"),
    (8, "--cp 2 --pp 2 --dp 2 --zero 0 --pipeline zero-bubble"),
    (4, "--pp 2 --zero 3 --tied-embeddings on"),
    (8, "--tp 2 --pp 2 --zero 1 --tied-embeddings on --sequence-parallel on --dtype bf16 --optimizer adamw8bit"),
    (8, "--tp 2 --cp 2 --dp 2 --zero 2 --sequence-parallel on --fp8 delayed --dtype bf16"),
]


@pytest.mark.parametrize("ranks, flags", in_turn(EQUAL, 3))
def test_replica_check_finds_nothing_in_a_right_run(run, ranks, flags):
    """Two tensor-parallel ranks hold the only key/value head."""
    shape = SHAPE if "--tp 4" in flags else SHAPE.replace("--kv-heads 2", "--kv-heads 1")
    done = train(run, "--replica-check 1", flags, ranks=ranks, shape=shape)
    assert "replica check every step" in done.out and not done.err, done
