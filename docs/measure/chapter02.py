"""Chapter 02: data parallelism on 1 to 8 ranks; its three forms; all-reduce algorithms."""
import re

from measure import show

PROGRAM = "02_data_parallel"
FORMS = (("naive", "0", "off"), ("bucketed", "25", "off"), ("bucketed", "1", "off"), ("overlapped", "25", "on"),
         ("overlapped", "1", "on"))


def ranks(runs):
    rows = []
    for n in (1, 2, 4, 8):
        run = runs.run(n, PROGRAM, "--steps 4 --init-std 0.1 --tables off")
        rows.append([n, run.loss(), run.norm(), *run.peaks("params", "grads", "optimizer", "activations"),
                     run.sent("dp.all_reduce") if n > 1 else "none"])
    show(["N", "loss at step 4", "gradient norm", "params", "grads", "optimizer", "activations",
          "`dp.all_reduce` bytes per step"], rows, "::::::::")


def forms_of(runs):
    """[form, bucket in MiB, seconds of the quickest step, and of its collectives, bytes, all-reduces]"""
    for form, bucket, overlap in FORMS:
        run = runs.run(2, PROGRAM, f"--steps 30 --bucket-mb {bucket} --overlap {overlap} --tables off")
        calls = int(re.search(r"in (\d+) bucket", run.text)[1])
        quickest = min(run.steps, key=lambda step: step["step_s"])
        yield [form, bucket, quickest["step_s"], quickest["comm_s"], run.last["comm_bytes"]["dp.all_reduce"], calls]


def forms(runs):
    show(["form", "bucket", "step", "in collectives", "bytes sent", "all-reduces"],
         [[form, f"{bucket} MiB" if bucket != "0" else "one per parameter", f"{1e3 * step:.1f} ms",
           f"{1e3 * comm:.2f} ms", f"{count:,}", calls] for form, bucket, step, comm, count, calls in forms_of(runs)])


def data_parallel(runs):
    """a step's time and that of its collectives on two ranks: naive, bucketed, overlapped; the quickest of 30 steps"""
    rows = [[2, form, bucket, f"{step:.9g}", f"{comm:.9g}", *rest]
            for form, bucket, step, comm, *rest in forms_of(runs)]
    return [["ranks", "form", "bucket_mb", "step_s", "comm_s", "bytes", "all_reduces"], *rows]


def all_reduce(runs):
    """time and bus bandwidth of each all-reduce over the size of the message, on two ranks"""
    return runs.table(2, "test_measure", ["all-reduce"], "--csv", "all_reduce.csv")


PRINTED = {"02_ranks": ranks, "02_forms": forms}
