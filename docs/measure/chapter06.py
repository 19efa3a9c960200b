"""Chapter 06: long sequences on many ranks; who computes, sends and keeps how much with each algorithm."""
from measure import ONE_RANK, beside, four_steps, show

PROGRAM = "06_context_parallel"
ALGORITHMS = ("ring", "zigzag", "ulysses", "hybrid", "gather")
LENGTHS = [("8b", 131072, 1), ("8b", 131072, 8), ("8b", 262144, 8), ("8b", 1048576, 32), ("70b", 131072, 8),
           ("70b", 1048576, 128)]


def lengths(runs):
    text = runs.folder / "text.txt"
    text.write_text("text " * 300000, "utf-8")  # more tokens than the longest sequence
    rows = []
    for model, tokens, ranks in LENGTHS:
        peaks = []
        for recompute in ("none", "full"):
            run = runs.booked(f"--dtype bf16 --model {model} --fake-world {ranks} --cp {ranks} --seq-len {tokens} "
                              f"--micro-batch 1 --global-batch 1 --recompute {recompute} --data {text}")
            peaks.append((run["total"] - run["params"] - run["grads"] - run["optimizer"]) / 1e9)
        rows.append([model.upper(), f"{tokens:,}", ranks, *(f"{peak:.1f}" for peak in peaks)])
    show(["", "tokens", "ranks", "no recomputation, GB", "full recomputation, GB"], rows)


def algorithms(runs):
    rows = [ONE_RANK, *((f"`{name}`", 4, PROGRAM, f"--cp-algorithm {name}") for name in ALGORITHMS)]
    rows.append(("`--cp 2 --dp 4` (8 ranks)", 8, PROGRAM, "--cp 2 --dp 4"))
    kinds = ["params", "activations", "comm"]
    four_steps(runs, kinds, rows, lambda run: run.peaks(*kinds))


def work(runs):
    told = [runs.run(4, PROGRAM, f"--steps 1 --cp-algorithm {name}") for name in ALGORITHMS]
    for what, names in (("GFLOP", ALGORITHMS[:2]), ("CPU ms", ALGORITHMS)):
        cells = [run.row("attention of the last step", what == "CPU ms")[-5:] for run in told]
        show([what, "rank 0", "rank 1", "rank 2", "rank 3", "slowest / mean"],
             [[name, *each] for name, each in zip(names, cells)])
    rows = [run.row("bytes that a rank sends") for run in told]
    show(["bytes sent for a block", "ring", "all-to-all", "all-gather, reduce-scatter"],
         [[row[0], *(beside(row[i], row[i + 1]) for i in (1, 3, 5))] for row in rows])


def documents(runs):
    flags = "--steps 2 --seq-len 512 --global-batch 1 --document-token 10 --cp-algorithm"
    show(["pairs of query and key", "rank 0", "rank 1", "rank 2", "rank 3", "slowest / mean", "without documents"],
         [runs.run(4, PROGRAM, f"{flags} {name}").row("pairs of query") for name in ALGORITHMS[:4]])


def windows(runs):
    rows = []
    for window in (0, 512, 64):
        for name in ALGORITHMS[:2]:
            run = runs.run(8, PROGRAM, "--steps 1 --layers 1 --seq-len 2048 --global-batch 1 --window "
                                       f"{window} --cp-algorithm {name}")
            *gflop, uneven = run.row("attention of the last step", False)[-9:]
            rows.append([window or "all", name, f"{sum(map(float, gflop)):.2f}", uneven,
                         run.row("bytes that a rank sends")[1]])
    show(["window", "", "GFLOP of all ranks", "slowest / mean", "bytes sent"], rows)


def memory(runs):
    """With an all-reduce that books no buffer of its own."""
    rows = []
    for tokens in (512, 1024, 2048, 4096):
        _, _, *zigzag, = runs.run(4, PROGRAM, f"--steps 2 --seq-len {tokens} --global-batch 1 --all-reduce library") \
            .row("bytes of rank 0")
        gather = runs.run(4, PROGRAM, f"--steps 2 --seq-len {tokens} --global-batch 1 --all-reduce library "
                                      "--cp-algorithm gather").row("bytes of rank 0")
        rows.append([f"{tokens:,}", *zigzag, *gather[-2:]])
    show(["T", "activations", "one rank's / 4, by formula", "comm: zigzag", "workspace", "comm: gather", "workspace"],
         rows, ":::::::")


PRINTED = {"06_lengths": lengths, "06_algorithms": algorithms, "06_work": work, "06_documents": documents,
           "06_memory": memory, "06_windows": windows}
