#!/usr/bin/env python3
"""Knows which replicas of a model take part in a step, where replicas may leave and come back (--elastic on).

    python3 08_3d_full/checkpoint/lighthouse.py --replicas 3 --port 29400 &
    for r in 0 1 2; do python3 08_3d_full/checkpoint/restart.py -- mpirun -np 4 build/bin/08_3d_full --elastic on \\
        --lighthouse 127.0.0.1:29400 --replica $r --tp 2 --pp 2 --metrics run-$r.jsonl & done; wait

Each replica is under an mpirun of its own, here in a loop that starts it again. The run begins when all have joined.
All vote at the end of a step: whether the sums over the replicas were complete. If all have voted so, all update. If one
does not vote (its connection is closed when it dies; else within --elastic-timeout), those that have voted do the step
again without it. Who joins takes part from the next step on, with weights and states from one that was there before.

Ends with exit code 0 when the replicas have finished, with 1 when all are lost: then checkpoints are where they go on.
"""
import argparse
import asyncio
import contextlib
import json
import sys


class Replica:
    """One that has joined. step: the last that its weights have seen; vote: of this round, None before it."""

    def __init__(self, joins, writer):
        self.number, self.step = int(joins["replica"]), int(joins["step"])
        self.addresses, self.timeout, self.settings = joins["addresses"], float(joins["timeout"]), joins["settings"]
        self.writer, self.vote = writer, None

    def send(self, message):
        self.writer.write(json.dumps(message).encode() + b"\n")


class Lighthouse:
    """Rounds: each is a step, or the healing of replicas that are behind."""

    def __init__(self, replicas, awaited=()):
        self.replicas, self.awaited = replicas, dict(awaited)  # awaited: {replica: step}
        self.members, self.joining = {}, {}  # by number: those of this round, of the next one
        self.step, self.generation, self.heal = 0, 0, []  # the last step done; of connections; [(replica, from)]
        self.deadline, self.end, self.round = None, asyncio.Event(), []  # round: the members it began with
        self.code = None  # 0 once a replica has finished, 1 when all are lost
        self.last, self.again = None, 0  # who has voted last; how often this step was done again

    async def serve(self, reader, writer):
        """A replica's connection, from its beginning to its end."""
        replica = None
        with contextlib.suppress(Exception, asyncio.CancelledError):  # strangers may send anything
            replica = Replica(json.loads(await reader.readline()), writer)
            if self.code is None:
                self.check(replica)
                for old in (self.members, self.joining):
                    self.leaves(old.get(replica.number), "it joins again")
                self.joining[replica.number] = replica
                self.consider()
            elif self.code == 0:
                replica.send({"over": True})
            while self.code != 1 and (line := await reader.readline()):
                replica.vote, self.last = json.loads(line), replica
                self.code = 0 if "over" in replica.vote else self.code
                if self.code == 0:
                    for each in (replica, *self.joining.values()):
                        each.send({"over": True})
                else:
                    self.consider()
        self.leaves(replica, "its connection is closed")
        writer.close()

    def check(self, replica):
        others = [each for each in (*self.members.values(), *self.joining.values()) if each.number != replica.number]
        if replica.number >= self.replicas or any(each.settings != replica.settings for each in others):
            print(f"replica {replica.number} is refused: numbers are 0 to {self.replicas - 1}; model, layout, data, "
                  "seed, steps, batch and learning rate those of the others", flush=True)
            raise ValueError

    def leaves(self, replica, why):
        if replica and self.joining.get(replica.number) is replica:
            self.joining.pop(replica.number).writer.close()
        if not replica or self.members.get(replica.number) is not replica:
            return
        del self.members[replica.number]
        replica.writer.close()
        if self.code is None:
            print(f"step {self.step + 1}: replica {replica.number} is left out: {why}", flush=True)
            # Weights of the last step: without them nobody can go on.
            self.code = None if any(each.step == self.step for each in self.members.values()) else 1
            self.consider() if self.code is None else None
        if self.code == 1 or not self.members:
            self.end.set()

    def consider(self):
        """Ends a round in which all have voted, and begins the next."""
        votes = [each.vote for each in self.members.values()]
        complete = all(vote["complete"] for vote in votes if vote)
        if not votes:
            if len(self.joining) == self.replicas:
                self.step = max(each.step for each in self.joining.values())
                self.begin(False)
        elif all(votes):
            step = complete and not self.heal
            here = self.members.keys() | self.joining.keys()
            if step and any(at == self.step + 2 and each not in here for each, at in self.awaited.items()):
                return  # until it joins
            self.again = 0 if complete else self.again + 1
            if self.again > 3 and self.last in self.members.values() and len(self.members) > 1:
                self.again = 0
                return self.leaves(self.last, "it has voted last, and the sums have failed four times")
            self.step += step
            for number, each in self.members.items():
                if step or complete and number in dict(self.heal):
                    each.step = self.step
            why = sorted({vote["why"] for vote in votes if vote.get("why")})
            if not complete:
                print(f"step {self.step + 1} again: {', '.join(why)}", flush=True)
            self.begin(step, complete)
        elif any(votes) and not self.deadline:
            seconds = max(each.timeout for each in self.members.values()) / 2
            self.deadline = asyncio.get_running_loop().call_later(seconds, self.too_late, seconds)

    def too_late(self, seconds):
        self.deadline = None
        voted = {number for number, each in self.members.items() if each.vote}
        pairs = [{*pair} for pair in self.heal if not voted & {*pair} and {*pair} <= self.members.keys()]
        for number in self.members.keys() - voted - set().union(*pairs):  # two that heal have all the time they need
            self.leaves(self.members[number], f"it has not voted {seconds:g} s after the first")
        self.consider() if self.code is None else None

    def begin(self, commit, complete=True):
        if self.deadline:
            self.deadline.cancel()
        self.deadline = None
        before = list(self.members.items())
        for number in [n for n in self.joining if not before or self.awaited.get(n, 0) <= self.step + 1]:
            each = self.joining.pop(number)
            if self.step > 0 and any(known.step == self.step for known in self.members.values()):
                each.step = -1  # of this step, too, its weights may be of another run: one replica's are all that count
            self.members[number] = each
        if not complete or before != self.round or before != list(self.members.items()):
            self.generation += 1
            print(f"from step {self.step + 1} on: replicas {sorted(self.members)}", flush=True)
        self.round = list(self.members.items())
        behind = [n for n, each in self.round if each.step != self.step]
        sources = [n for n, each in self.round if each.step == self.step]
        self.heal = list(zip(behind, sources))  # the rest of them in the next round
        for _, each in self.round:
            each.vote = None
            each.send({"commit": commit, "step": self.step + 1, "generation": self.generation, "heal": self.heal,
                       "replicas": self.replicas, "members": [(n, each.addresses) for n, each in sorted(self.round)]})


def awaited(text):
    with contextlib.suppress(ValueError):
        replica, step = map(int, text.split(":"))
        return replica, step
    raise argparse.ArgumentTypeError(f"{text}: must be REPLICA:STEP, as in 1:60")


async def run(options):
    lighthouse = Lighthouse(options.replicas, options.awaits)
    # Without `async with`, which waits until everybody has left, strangers too.
    server = await asyncio.start_server(lighthouse.serve, options.host, options.port, limit=1 << 24)
    host, port = server.sockets[0].getsockname()[:2]
    print(f"lighthouse: add --elastic on --lighthouse {host}:{port} --replica N, of 0 to {options.replicas - 1}",
          flush=True)
    await lighthouse.end.wait()
    return lighthouse.code


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"lighthouse.py: {' '.join(message.split())}\n")
    parser.add_argument("--replicas", type=int, required=True, metavar="N")
    parser.add_argument("--host", default="127.0.0.1", help="address that the replicas reach [127.0.0.1]")
    parser.add_argument("--port", type=int, default=0, help="[a free one]")
    parser.add_argument("--awaits", type=awaited, nargs="+", default=[], metavar="REPLICA:STEP",
                        help="for drills: if it was lost before, it comes back at this step, and the others wait")
    options = parser.parse_args()
    if options.replicas < 1:
        parser.error(f"--replicas {options.replicas}: must be at least 1")
    try:
        sys.exit(asyncio.run(run(options)))
    except (OSError, OverflowError) as error:
        parser.error(f"--host {options.host} --port {options.port}: {getattr(error, 'strerror', error)}")


if __name__ == "__main__":
    main()
