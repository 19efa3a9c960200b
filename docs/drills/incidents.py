"""The incidents: how each is drawn from a seed, its story, hints, evidence and solution. drill.py runs them.

Reading on spoils the drills."""
import re

from evidence import (Case, Evidence, Incident, NORMS, PARAMETERS, PER_NODE, REPLICATED, WrongGradient,
                      all_terminated_but, compared, first_difference, first_line, hub_name, last_step, node_of,
                      norm_first_wrong, norms_agree, only_missing, out_of_order, same_loss_other_norm, straggles,
                      usual_order, waits_in)


class Nan(Incident):
    name = "aurora"
    title = "The run ends by itself with exit code 1 in the middle of the night."
    minutes = 5
    place = "the parameter"
    story = """02:14, a page: aurora has ended with exit code 1. The owner had raised the learning rate the day
before, and asks whether to start again with half of it."""
    hints = ("The last line of metrics.jsonl is an event that says why the run has ended.",
             "alarm.parameter and alarm.of say where the first NaN or infinity was found; alarm.step says when.",
             "If the numbers of the model had grown too large, how many ranks would have found it? Look at "
             "alarm.ranks.")
    remarks = {"rank": "the last line of metrics.jsonl names a rank",
               "step": "the run ended inside a step: the one of the alarm, not the last that was completed",
               "place": "the alarm has the name of a parameter",
               "cause": "compare the number of ranks that found the value with the number of ranks (alarm.ranks)"}
    confusions = {"divergence": "numbers that grow too large do so on all replicas; look at alarm.ranks, and at the "
                                "gradient norms of the steps before"}
    reasoning = """The alarm counts the ranks that hold a NaN or an infinity. After a divergence all of them
do, and loss and norm have grown for some steps before. Here one of four has it, and the norms of the steps before
are quiet."""
    cluster = """Take the host out, run its device's memory test, and resume on another host from the last
checkpoint with the same learning rate: halving it would not have helped and would have cost training time."""
    troubleshooting = "NaN or infinity"

    def draw(self, dice):
        rank, step, name = dice.randrange(4), dice.randint(6, self.steps - 4), dice.choice(PARAMETERS)
        return Case(self.job(lr="0.004"), [("nan", rank, step, name)],
                    {"rank": {rank}, "step": step, "place": name, "cause": "nan-one-rank"})

    def evidence(self, case):
        (rank,), step, name = case.answer["rank"], case.answer["step"], case.answer["place"]
        alarm = rf'"kind":"non_finite","step":{step},.*"parameter":"{re.escape(name)}".*"rank":{rank},"ranks":1\b'
        return [Evidence("the alarm: step, parameter, rank, and one rank of four", first_line(alarm, "metrics.jsonl")),
                Evidence("the same in words",
                         first_line(rf"step {step}: .*first non-finite parameter: {re.escape(name)} "
                                    rf".*on rank {rank} \(1 of 4", "logs/rank-0.log")),
                Evidence("the step before was normal", last_step(step - 1))]


class Hang(Incident):
    name = "basalt"
    title = "No step for minutes, then the watchdog ends the run."
    minutes = 10
    place = "the operation in which the other ranks waited"
    story = """The dashboard's train70b_step had not moved for minutes when basalt ended. Four ranks, no change of
the code since yesterday. Two teams are asked to look: network and drivers. Which of them do you call?"""
    hints = ("logs/rank-*.log: each rank lists its last calls. Which calls are NOT ENDED?",
             "Those who wait are not the ones to blame: a collective waits for every rank of its group. Who is not "
             "in it?",
             "The missing rank's last call has ended. Was it inside another call since then, or in none?")
    remarks = {"rank": "the watchdog speaks on a rank that waits; look for the rank that lists no call as NOT ENDED",
               "step": "metrics.jsonl ends with the last step that was completed; the next one hung",
               "place": "the call that is NOT ENDED on those that waited, as GROUP.OPERATION",
               "cause": "is every rank inside a call, or is one of them in none? Did its process still answer SIGTERM?"}
    confusions = {"deadlock": "in a deadlock every rank waits in some call; here one rank waits in none",
                  "skipped-collective": "a rank that skips a call goes on to its next one, and would be seen there",
                  "dead-process": "a dead process prints nothing when SIGTERM comes; look at all four logs",
                  "lost-node": "a node that is gone prints nothing; look at all four logs",
                  "slow-network": "a slow transfer ends; and one of the ranks has not even called it"}
    reasoning = """Three ranks are inside the same collective. The fourth has ended its previous call and begun no
other one; but its process is alive, for it prints its log at SIGTERM. So its main thread is somewhere between two
calls: in a driver call, a data loader, a lock."""
    cluster = """Before it is killed, look at that process: `gdb -p PID -batch -ex "thread apply all bt"` shows
where it stands. Then call the driver team, not the network's. Restart without the host: docs/cluster.md,
08_3d_full/checkpoint/restart.py."""
    troubleshooting = "Nothing is printed any more"

    def draw(self, dice):
        rank, step = dice.randrange(4), dice.randint(6, self.steps - 4)
        stage, operation = dice.choice([(0, "dp.all_reduce"), (1, "dp.reduce_scatter"), (3, "dp.all_gather")])
        flags = self.job(zero=stage, comm_timeout=3, **({"prefetch": 0} if stage == 3 else {}))
        return Case(flags, [("hang", rank, step, "")],
                    {"rank": {rank}, "step": step, "place": operation, "cause": "hang"})

    def evidence(self, case):
        (rank,), step, place = case.answer["rank"], case.answer["step"], case.answer["place"]
        return [Evidence("who waited, and who did not", only_missing(rank, 4, place)),
                Evidence("the watchdog's report", first_line(rf"{place} #.*has not ended after", "logs/rank-*.log")),
                Evidence("that rank's process was alive", first_line("terminated by SIGTERM", f"logs/rank-{rank}.log")),
                Evidence("the last step before", last_step(step - 1))]


class LostNode(Incident):
    name = "cobalt"
    title = "The run ends at once; mpirun names one rank."
    minutes = 10
    place = "the node, as in nodes.txt"
    rank = "all ranks that died, as in rank=0,5"
    story = """cobalt ended with a signal. The launcher's message names one rank, so a colleague wants to restart
that one process where it was. Eight ranks, two on each node (nodes.txt)."""
    hints = ("logs/mpirun.log names only the first process whose end it noticed.",
             "When a rank dies, the launcher sends SIGTERM to those that are left, and each of them prints its last "
             "calls.",
             "Which logs lack that line? Put these ranks beside nodes.txt.")
    remarks = {"rank": "name all of them (rank=1,5): those whose logs lack the line that SIGTERM makes a rank print",
               "step": "metrics.jsonl ends with the last step that was completed; the next one was interrupted",
               "place": "nodes.txt says which ranks share a node",
               "cause": "how many ranks died, and what do they share?"}
    confusions = {"dead-process": "count the logs that end without the line that SIGTERM makes a rank print: is it "
                                  "one?",
                  "hang": "a process that hangs still answers SIGTERM"}
    reasoning = """Six ranks were alive when the launcher ended the job: they say so. Two say nothing at all, not
even that they were terminated, and these are exactly the two of one node."""
    cluster = """Do not start there again: leave the node out (a spare one, or fewer data-parallel ranks) and resume
from the last checkpoint. 08_3d_full/checkpoint/restart.py does so when a host does not answer. Then ask for its power supply
and its BMC log."""
    troubleshooting = "A rank is killed"

    def draw(self, dice):
        node, step = dice.randrange(4), dice.randint(6, self.steps - 4)
        dead = {node * PER_NODE, node * PER_NODE + 1}
        return Case(self.job(zero=1, global_batch=8), [("kill", rank, step, "") for rank in sorted(dead)],
                    {"rank": dead, "step": step, "place": node_of(self.name, node * PER_NODE), "cause": "lost-node"}, 8)

    def evidence(self, case):
        dead, step, place = case.answer["rank"], case.answer["step"], case.answer["place"]
        return [Evidence("who was left, and who was not", all_terminated_but(dead, 8)),
                Evidence("the launcher's message, which names one of them",
                         first_line(rf"process rank ({'|'.join(map(str, dead))}) on node {place} exited on signal 9",
                                    "logs/mpirun.log")),
                Evidence("what they share", first_line(rf"^{place} +ranks {min(dead)} and {max(dead)}$", "nodes.txt")),
                Evidence("the last step before", last_step(step - 1))]


class Slow(Incident):
    name = "dune"
    title = "The loss is right, but tokens per second have halved since some step."
    minutes = 10
    place = "the operation in which the other ranks wait for it"
    step_tolerance = 1
    steps = 40
    quiet = True
    story = """dune completes, and its losses are right. But finance asks why the second half costs twice the GPU
hours of the first. The steps' communication seconds have gone up on three of four ranks, so the network team is
already on the call."""
    hints = ("metrics.jsonl: how does step_s develop, and who is step.straggler.rank in the slow steps and before "
             "them?",
             "straggler.busy_s is a rank's own work, without waiting; compare it with median_busy_s, step by step.",
             "trace.json (ui.perfetto.dev, or a few lines of Python over its spans): in which operation do three ranks "
             "spend much longer than the fourth, in the slow steps?")
    remarks = {"rank": "the slow rank is not the one that waits; see straggler.rank over all the slow steps",
               "step": "the first step in which straggler.busy_s is about twice median_busy_s, and stays so",
               "place": "in the trace: the comm span that is much longer on the other ranks than on the slow one",
               "cause": "compare straggler.busy_s with straggler.median_busy_s, and data_s with step_s"}
    confusions = {"slow-network": "then every rank would wait for about the same time, and busy_s would stay as it was",
                  "slow-data": "see data_s"}
    reasoning = """A collective ends when the last rank arrives, so a slow rank makes the communication of all the
*others* look slow. Its own work, busy_s, is about twice the median from one step on; in the trace the three
others stand in the operation to which it comes late."""
    cluster = """Read that device's clocks and throttle reasons (`nvidia-smi -q -d PERFORMANCE`), its temperature
and its PCIe link width; take the host out. `--probe strict` refuses such a host before the next run begins."""
    troubleshooting = "One rank is slower than the others"

    def draw(self, dice):
        rank, step = dice.randrange(4), dice.randint(12, 24)
        # steps of many milliseconds: four ranks share two cores by slices of a few
        flags = self.job(comm_timeout=30, hidden=128, seq_len=64, global_batch=16)
        return Case(flags, [("slow", rank, step, "")],
                    {"rank": {rank}, "step": step, "place": "dp.scalar", "cause": "slow-device"})

    def evidence(self, case):
        (rank,), step, place = case.answer["rank"], case.answer["step"], case.answer["place"]
        return [Evidence("whose own work takes longer, from when on", straggles(rank, step)),
                Evidence("where the others wait", waits_in(place, rank, 4)),
                Evidence("the dashboard at the end", first_line(rf"^train70b_straggler_rank {rank}$", "metrics.prom"))]


class Skipped(Incident):
    name = "ember"
    title = "MPI ends the run, with a message about a message."
    minutes = 15
    place = "the operation that was left out"
    story = """ember ran last week. Since then somebody has merged an option that prints more on some ranks. Now it
ends in the middle, with an error of MPI or a timeout. The machines are fine: the fault is in the code, and comes
again in each run."""
    hints = ("An error of MPI says where two ranks no longer fit together, not where they parted. In the logs, "
             "compare the calls of the same number (dp.scalar #41) on all ranks.",
             "Run it again so that the ranks compare their calls before they exchange data: "
             "bash docs/drill.sh rerun ember --comm-check on",
             "In \"mismatch: the ranks of group dp disagree\" one rank is ahead: what do the others call, which it "
             "left out?")
    remarks = {"rank": "one rank is one call ahead of the others; `rerun` with --comm-check on lists all calls",
               "step": "metrics.jsonl ends with the last step that was completed; the next one failed",
               "place": "what the other ranks call when the odd one calls something else, as GROUP.OPERATION",
               "cause": "the odd rank is inside a collective, too: a later one"}
    confusions = {"hang": "a rank that hangs is in no call; each of these is in one",
                  "deadlock": "there is one group only: nobody waits in another one",
                  "slow-network": "a slow network delivers what was sent; this message has another length"}
    reasoning = """The numbers of a group's collectives count its calls, so equal numbers must be equal calls. One
rank's call of that number is the next one of the step: it left out the sum of the loss. Without --comm-check the
two messages meet and have different lengths, or nobody answers."""
    cluster = """Find the `if` around the collective: `if rank == ...`, a cache that one rank has, an exception that
one rank swallows. Keep --comm-check on (TORCH_DISTRIBUTED_DEBUG=DETAIL in PyTorch) in the tests of such changes."""
    troubleshooting = "The ranks wait for each other after a change of the code"

    def draw(self, dice):
        rank, step = dice.randrange(4), dice.randint(6, self.steps - 4)
        return Case(self.job(comm_timeout=3), [("skip-collective", rank, step, "")],
                    {"rank": {rank}, "step": step, "place": "dp.scalar", "cause": "skipped-collective"})

    def evidence(self, case):
        (rank,), step, check = case.answer["rank"], case.answer["step"], {"--comm-check": "on"}
        call = r"of 4: dp\.scalar #\d+"
        return [Evidence("how it ended", first_line("message truncated|has not ended after", "logs/rank-*.log")),
                Evidence("the last step before", last_step(step - 1)),
                Evidence("rerun --comm-check on: the others call the sum of one number",
                         first_line(rf"^  rank {(rank + 1) % 4} {call}, 1 numbers", "logs/rank-0.log"), check),
                Evidence("and this rank is at the call after it",
                         first_line(rf"^  rank {rank} {call}, 3 numbers", "logs/rank-0.log"), check)]


class BitFlip(Incident):
    name = "fjord"
    title = "No error, no spike, but not the loss of last week's run with the same seed."
    minutes = 15
    place = "the parameter"
    step = "the last step whose loss is still that of good.jsonl"
    story = """fjord repeats last week's run: same commit, same seed, same layout, so that its losses must be equal
bit for bit (good.jsonl is last week's). They are not, and a check that runs every few steps has ended it. From which
checkpoint may it be resumed, and without which device?"""
    hints = ("The last line of metrics.jsonl and the line in logs/ that begins with --replica-check's name.",
             "The check runs every few steps only. Which are the first losses that differ between metrics.jsonl and "
             "good.jsonl?",
             "A loss is computed from the weights that the step before has left. To see it narrower: "
             "bash docs/drill.sh rerun fjord --replica-check 1")
    remarks = {"rank": "with three copies or more the check names the one that disagrees with the majority",
               "step": "compare the losses with good.jsonl: the first that differs was computed from weights that were "
                       "already changed, so the answer is the step before it",
               "place": "the check names a tensor",
               "cause": "which replicas agree with each other, and which kind of fault would have spread to all of "
                        "them?"}
    confusions = {"rounding": "one build and one layout: the order of sums is the same, and replicas are bitwise equal",
                  "missing-gradient": "a wrong sum is equally wrong on all ranks: the replicas would agree",
                  "other-data": "other samples change the summed gradient on all ranks alike: the replicas would agree",
                  "nan-one-rank": "every loss is a number"}
    reasoning = """Gradients are summed, so whatever goes wrong before the sum reaches all replicas alike. Here one
replica's weight differs from the other three: it was changed after an update, in that rank's memory. The losses
tell the step: equal up to it, different from the next one on."""
    cluster = """Resume from a checkpoint before that step (replicas_differ.equal is always safe), leave the device
out, and read its ECC counters. 08_3d_full/checkpoint/restart.py sets aside the checkpoints after the last good check."""
    troubleshooting = "A rank computes other numbers than its replicas"
    extra = {"good.jsonl": "same"}

    def draw(self, dice):
        every = dice.choice([4, 5, 6])
        # The check ends the run before a step's loss is written: one wrong loss at least must be.
        step = dice.choice([step for step in range(6, self.steps - 7) if (step + 1) % every])
        rank, name = dice.randrange(4), dice.choice(NORMS)
        return Case(self.job(replica_check=every), [("bitflip", rank, step, name)],
                    {"rank": {rank}, "step": step, "place": name, "cause": "bit-flip"})

    def evidence(self, case):
        (rank,), step, name = case.answer["rank"], case.answer["step"], re.escape(case.answer["place"])
        others = [other for other in range(4) if other != rank]
        line = rf"the weight of {name} differs on rank {rank} from ranks {others[0]}, {others[1]} and {others[2]}"
        return [Evidence("which replica differs, and in what", first_line(line, "logs/rank-*.log")),
                Evidence("the event", first_line(r'"event":"replicas_differ"', "metrics.jsonl")),
                Evidence("the first loss that differs", first_difference(step)),
                Evidence("rerun --replica-check 1", first_line(rf"after step {step}: {line}", "logs/rank-*.log"),
                         {"--replica-check": "1"})]


class Deadlock(Incident):
    name = "granite"
    title = "No step for minutes, then the watchdog ends the run: is it basalt again?"
    minutes = 20
    place = "the call that came too early on these ranks"
    rank = "all ranks that do not follow the usual order of calls, as in rank=0,1"
    story = """granite trains in two dimensions, tensor and data parallel. Since a refactoring it stops at some step,
every time at the same one, and the watchdog ends it. All four processes are alive, and all four are inside a collective.
Which ranks run the wrong code?"""
    hints = ("logs/rank-*.log: note for each rank the call that is NOT ENDED, and its group. The head of "
             "logs/rank-0.log shows which ranks form a tp group (a row) and a dp group (a column).",
             "Draw an arrow from each rank to the rank for which it waits. What shape is it?",
             "All four ranks run the same program. Which of the two calls came first in the steps before? One log "
             "lists 64 calls, enough for some steps.")
    remarks = {"rank": "name all of them (rank=0,1): those that wait in the call that used to come second",
               "step": "metrics.jsonl ends with the last step that was completed; the next one stopped",
               "place": "of the two calls that are NOT ENDED, the one that used to come second in the steps before",
               "cause": "is any rank outside of all calls? Draw who waits for whom"}
    confusions = {"hang": "a rank that hangs is in no call; is there one?",
                  "skipped-collective": "nobody is ahead in the numbers of a group; are the two that wait in "
                                        "different groups?",
                  "slow-network": "a slow transfer ends"}
    reasoning = """Two ranks are in tp.scalar and wait for their tp neighbours; these are in dp.scalar and wait for
their dp neighbours, which are the first two: a cycle of four, in which nobody is missing and all are waiting. In
the steps before, the loss's sum over dp came first, then the norm's over tp. So those in tp.scalar are early."""
    cluster = """No host is at fault, and a restart stops at the same step. Make the order the same on all ranks:
look for a branch, a dict or set that is iterated, a hook whose order depends on timing. Chapter 05 has the deadlock
of blocking sends: build/bin/schedule --name 1f1b --stages 2 --micro-batches 4"""
    troubleshooting = "All ranks wait, and none is missing"

    def draw(self, dice):
        early, step = dice.choice([{0, 3}, {1, 2}]), dice.randint(6, self.steps - 4)
        return Case(self.job(tp=2, comm_timeout=3), [("deadlock", min(early), step, "")],
                    {"rank": early, "step": step, "place": "tp.scalar", "cause": "deadlock"})

    def evidence(self, case):
        early, step = case.answer["rank"], case.answer["step"]
        return [Evidence("who waits where", out_of_order(early, 4)),
                Evidence("the usual order", usual_order),
                Evidence("the groups", first_line(r"^ +stage 0 +dp 0 +\| 0 1$", "logs/rank-0.log")),
                Evidence("the last step before", last_step(step - 1))]


class WrongSum(WrongGradient):
    name = "harbour"
    title = "A good loss curve. Is it the right one?"
    story = """harbour is the first run on a new cluster, four ranks. Its loss falls as it should; beside the run on
one rank (one-rank.jsonl) it differs in the last digits, and more later on. The owner says: rounding. Do you sign?
one-rank.sh runs it on one good device and saves its first gradients; reference/ has those of this run:
build/bin/compare build/drill/harbour/reference build/drill/harbour/one shows the gradients that differ most."""
    hints = ("Compare loss and grad_norm of step 1 in metrics.jsonl and one-rank.jsonl. The weights are still equal "
             "there: how much may rounding change either?",
             "bash build/drill/harbour/one-rank.sh, and then compare the two references: which gradient differs? With "
             "--dtype fp64 in both runs (`rerun`, and behind one-rank.sh), rounding would vanish.",
             "The sum hides whose part is wrong. Run the job on some of the ranks only (rerun harbour --on 0,1) and "
             "compare rerun-1/reference with one; halve until one is left.")
    remarks = {"rank": "`rerun harbour --on RANKS` leaves out the others; compare its reference with one rank's",
               "place": "build/bin/compare lists the gradients that differ most",
               "cause": "would rounding change one gradient of twenty by a tenth and more, and stay as large in fp64?"}
    confusions = {**WrongGradient.confusions,
                  "rounding": "in fp32 gradients of step 1 differ by about 1e-7 for every parameter; in fp64 by 1e-15",
                  "bit-flip": "a changed weight would change the loss of step 1 on one rank, and --replica-check "
                              "would see it",
                  "wrong-group": "a wrong divisor leaves every element of a gradient the same factor; and one group "
                                 "sums all gradients here"}
    reasoning = """At step 1 the weights are equal, and so is the loss: the forward pass is right. The gradient norm
is not. One gradient of 21 differs, by far more than rounding, while the others agree to 1e-6: a part of its sum is
missing. Reruns on fewer ranks are right without the faulty one, and on it alone that gradient is 0."""
    cluster = """AdamW divides by the gradient's size, which hides a missing part: the loss alone proves nothing.
Compare step-1 gradients on every new cluster, library version and layout. The usual cause is a bucket that is sent
before its last gradient is added (chapter 02, trap 2)."""

    def draw(self, dice):
        rank, name = dice.randrange(4), dice.choice(PARAMETERS)
        return Case(self.job(save_reference="reference"), [("wrong-sum", rank, 1, name)],
                    {"rank": {rank}, "place": name, "cause": "missing-gradient"})

    def evidence(self, case):
        (rank,), name = case.answer["rank"], re.escape(case.answer["place"])
        wrong = compared(rf"gradient: {name} at step 1 by .* \(1 of 21 exceed it\)")
        return [Evidence("step 1: the loss is right, the norm is not", same_loss_other_norm),
                self.reference("compare: one gradient", wrong),
                self.reference("in fp64 as well", wrong, dtype="fp64"),
                self.reference(f"rerun --on {rank}: nothing is left of it", compared(rf"^ +1 +\S+ +{name}$"), [rank]),
                self.reference("on the others there is no difference", compared("within"),
                               [other for other in range(4) if other != rank])]


class WrongGroup(WrongGradient):
    name = "indigo"
    title = "Experts on several ranks. The loss of step 1 is right; is the run?"
    place = "the parameter, as compare names it, without the number of the expert; of w1 and w3 either"
    rank = "all ranks whose gradient is wrong, as in rank=0,1"
    story = """indigo has experts, eight in each layer, over two ranks of each of two copies (--ep 2 on four ranks).
Since a new optimizer library is in use its gradient norm differs from that of one rank (one-rank.jsonl), from step 1
on; the loss of step 1 does not. It falls, and the owner would leave it at that: experts, he says, are noisy, and a
rounded score sends a token elsewhere. Which weights are trained wrongly, on which ranks, and by what?

one-rank.sh runs it on one good device and saves its first gradients; reference/ has those of this run:

    bash build/drill/indigo/one-rank.sh
    build/bin/compare build/drill/indigo/reference build/drill/indigo/one

Both have the Hub's names, a tensor for each expert. In the program all experts of a layer share two parameters:
mlp.experts.gate_up_proj (w1 and w3 of every expert) and mlp.experts.down_proj (w2). Answer with the name that compare
shows, without the expert's number: place=model.layers.LAYER.block_sparse_moe.experts.w2, or w1 for w1 and w3."""
    hints = ("Loss and grad_norm of step 1, in metrics.jsonl and one-rank.jsonl. A token that goes elsewhere would "
             "change both, and by how much?",
             "compare names the gradients that differ, and with them the experts. With --ep 2 the first half of the "
             "experts is on the ranks of even number, the other half on the others.",
             "compare says that one factor explains all that is wrong. Which sizes could it be: of dp, of ep, of edp = "
             "dp / ep? `rerun indigo --ep 4`, then `--ep 1`, and compare rerun-1/reference and rerun-2/reference with "
             "one.")
    remarks = {"rank": "name all of them (rank=0,1): those that hold the experts which compare lists",
               "place": "build/bin/compare lists the gradients that differ most; leave out the number of the expert",
               "cause": "is it one factor for all elements, and does it follow --ep?"}
    confusions = {**WrongGradient.confusions,
                  "rounding": "a choice that rounding decides changes the loss of step 1, and some rows; not a factor",
                  "missing-gradient": "what is missing in a sum differs from element to element; here is one factor",
                  "bit-flip": "a weight that has changed would change the loss of step 1",
                  "divergence": "it is wrong from the first step on, before any update"}
    reasoning = """The loss of step 1 is right, so routing, dispatch and products are. The gradients of one parameter
of the program are wrong (w2, or w1 and w3), of half of its experts, and all by one factor, so nothing is missing: it
has been divided once too often. With --ep 4 the factor is 1/4, with --ep 1 it is 1: the divisor is ep, not edp = dp /
ep. These ranks average over ep, as if its ranks held the same experts; but they hold others, and have sent their rows
here already."""
    cluster = """Roll the library back on these hosts, and start again from the first checkpoint: AdamW hides a factor
in a gradient, but not in the norm that clips all others. Make one comparison of step-1 gradients in fp64, on one rank
and with every value of --ep, a condition of each upgrade. (Here the loss is divided once by the tokens of all ranks,
and every gradient is a plain sum. Where each rank's loss is its own mean, an expert's gradient is summed over edp and
divided by dp x cp like all others: dividing by edp makes it ep times too large.)"""
    troubleshooting = "Gradients of experts depend on --ep"

    def draw(self, dice):
        its, name = dice.choice([(0, 2), (1, 3)]), dice.choice(["gate_up_proj", "down_proj"])
        name = f"model.layers.{dice.randrange(6)}.mlp.experts.{name}"
        return Case(self.job(layers=6, experts=8, ep=2, save_reference="reference"),
                    [("wrong-group", rank, 1, name) for rank in its],
                    {"rank": set(its), "place": hub_name(name), "cause": "wrong-group"})

    def evidence(self, case):
        layer, _, matrix = case.answer["place"].rpartition(".")
        matrices = ("w2",) if matrix == "w2" else ("w1", "w3")

        def scaled(ep, factor):  # which experts, as far as compare names them: the first three tensors, wrong and right
            faulty = {rank % ep for rank in case.answer["rank"]}
            wrong = [expert for expert in range(8) if expert * ep // 8 in faulty]
            right = [expert for expert in range(wrong[0], 8) if expert not in wrong]

            def names(experts):
                return ", ".join([rf"{re.escape(layer)}\.{expert}\.{each}\.weight"
                                  for expert in experts for each in matrices][:3])
            return compared(rf"first wrong: {names(wrong)} and", rf"right after the first: {names(right)}",
                            rf"the {4 * len(matrices)} wrong ones are {factor} x the reference's, nothing else")

        return [Evidence("step 1: the loss is right, the norm is not", same_loss_other_norm),
                self.reference("half of the experts, each by the factor 1/2", scaled(2, "1/2")),
                self.reference("the same in fp64", scaled(2, "1/2"), dtype="fp64"),
                self.reference("--ep 4: the factor is 1/4", scaled(4, "1/4"), ep="4"),
                self.reference("--ep 1: there is no difference", compared("within"), ep="1")]


class NormOfTensorRanks(WrongGradient):
    name = "iris"
    title = "Sequence parallelism saves memory, and the loss is that of the run without it. Nearly."
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


class TiedMatrix(WrongGradient):
    name = "juniper"
    title = "The first gradients have been checked. The run drifts away later."
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


INCIDENTS = [kind() for kind in (Nan, Hang, LostNode, Slow, Skipped, BitFlip, Deadlock, WrongSum, WrongGroup,
                                 NormOfTensorRanks, TiedMatrix)]
