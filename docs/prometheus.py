#!/usr/bin/env python3
"""The last values of a run's --metrics in Prometheus' text format, for node exporter's textfile collector.

    python3 docs/prometheus.py metrics.jsonl out.prom [--once]

Follows the metrics as they grow; writes at most once per second, always a complete file that replaces the last one.
Ends with the run: after its summary, or an alarm that ended it. --once: writes what is there now. Bad input, and an
OUT that is no regular file (a device, a link): exit code 2.
https://prometheus.io/docs/instrumenting/exposition_formats/
"""
import argparse
import collections
import json
import math
import os
import secrets
import stat
import sys
import time

# Metric: the key of a step that it is, if there is one, and its help. `a.b` is b of the object a.
METRICS = {"build_info": ("", "Always 1; the commit of the program."), "step": ("step", "Last optimizer step."),
           "loss": ("loss", "Mean loss over the step's batch."), "lr": ("lr", "Learning rate of the step."),
           "grad_norm": ("grad_norm", "Norm of the gradients before clipping."),
           "tokens_per_second": ("tokens_per_s", "Tokens per second of the step, all ranks."),
           "step_seconds": ("step_s", "Seconds of the step."),
           "expert_load_ratio": ("experts.max_over_mean", "Load of the busiest expert over the mean, worst layer."),
           "expert_load_entropy": ("experts.entropy", "Entropy of the experts' load over that of an even one."),
           "expert_dropped_ratio": ("experts.dropped", "Slots beyond the experts' capacity, of all slots."),
           "experts_dead": ("experts.dead", "Experts without any token in the step, all layers."),
           "data_seconds": ("data_s", "Seconds of the step in which data was read."),
           "straggler_rank": ("straggler.rank", "Rank with the most work of its own in the step."),
           "straggler_busy_seconds": ("straggler.busy_s", "Seconds of that rank's own work."),
           "straggler_waited_seconds": ("straggler.waited_s", "Seconds that the other ranks waited for it."),
           "memory_bytes": ("", "Memory of rank 0 after the step's update, by kind."),
           "memory_peak_bytes": ("", "Peak of rank 0's memory during the step, by kind."),
           "comm_bytes_total": ("", "Bytes that rank 0 sent, by group and operation."),
           "comm_seconds_total": ("", "Seconds of communication of rank 0."),
           "alarms_total": ("", "Alarms, by kind."), "checkpoint_step": ("", "Step of the last complete checkpoint."),
           "restarts_total": ("", "How often the run was continued from a checkpoint.")}


def real(value):
    return math.nan if value is None else float(value)  # null: not finite


def text_of(value):
    if isinstance(value, int):
        return str(value)
    return f"{value:.12g}" if math.isfinite(value) else {math.inf: "+Inf", -math.inf: "-Inf"}.get(value, "NaN")


def label(name, value):
    return '{%s="%s"}' % (name, value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n"))


class Run:
    """What the lines so far say: {metric: {labels: number}}; since the beginning of the file, all attempts together."""

    def __init__(self, path):
        self.path, self.offset, self.lines, self.ended = path, 0, 0, False
        self.values = {metric: collections.defaultdict(int) for metric in METRICS}
        for kind in ("checkpoint_failed", "expert_load", "loss_spike", "non_finite", "replicas_differ"):
            self.values["alarms_total"][label("kind", kind)] = 0

    def read(self):
        with open(self.path, "rb") as file:
            if os.fstat(file.fileno()).st_size < self.offset:  # written anew
                self.__init__(self.path)
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):  # half of one
                    break
                self.offset, self.lines = self.offset + len(line), self.lines + 1
                try:
                    self.add(json.loads(line))
                except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
                    raise OSError(0, f"line {self.lines} is not an event of --metrics", self.path) from None

    def add(self, event):
        name, values = event["event"], self.values
        kind = event["kind"] if name == "alarm" else name
        if name == "config":
            values["build_info"] = {label("commit", event["version"]["commit"]): 1}
            values["restarts_total"][""] += self.lines > 1  # the file of a run from the beginning begins anew
        elif name == "step":
            flat = {**event, **{f"{part}.{key}": value for part in ("straggler", "experts")
                                for key, value in event.get(part, {}).items()}}
            for metric, (key, _) in METRICS.items():
                if key in flat:
                    values[metric][""] = real(flat[key])
            for metric, kinds in ("memory_bytes", event["memory"]), ("memory_peak_bytes", event["memory"]["peak"]):
                values[metric] = {label("kind", key): real(kinds[key]) for key in kinds if key not in ("peak", "total")}
            for operation, count in event["comm_bytes"].items():
                values["comm_bytes_total"][label("operation", operation)] += count
            values["comm_seconds_total"][""] += event["comm_s"]
        elif name == "checkpoint" and event["folder"].startswith("step-"):
            values["checkpoint_step"][""] = real(event["step"])
        elif name == "alarm" or label("kind", name) in values["alarms_total"]:
            values["alarms_total"][label("kind", kind)] += 1
        self.ended = (self.ended and name not in ("config", "step")) or name == "summary" or kind in (
            "non_finite", "replicas_differ")

    def text(self):
        lines = []
        for metric, values in self.values.items():
            kind = "counter" if metric.endswith("_total") else "gauge"
            if values:
                lines += [f"# HELP train70b_{metric} {METRICS[metric][1]}", f"# TYPE train70b_{metric} {kind}"]
            lines += [f"train70b_{metric}{labels} {text_of(value)}" for labels, value in values.items()]
        return "".join(line + "\n" for line in lines)


def check(path, of):
    """Of a link os.stat: what it points to; os.lstat: itself, which would be replaced."""
    if not stat.S_ISREG(of(path).st_mode):
        raise OSError(0, "is no regular file", path)


def replace(path, text):
    """By way of a file with a new name, which nobody can have laid a link at."""
    if os.path.lexists(path):
        check(path, os.lstat)
    new = f"{path}.{secrets.token_hex(8)}.tmp"
    try:
        with open(new, "x", encoding="utf-8") as file:
            file.write(text)
        os.replace(new, path)
    except BaseException:
        if os.path.lexists(new):
            os.unlink(new)
        raise


def follow(run, out, once):
    written, ended = None, False
    while True:
        run.read()
        if run.offset != written:
            replace(out, run.text())
            written = run.offset
        if once or ended:
            return
        ended = run.ended  # and once more: the last checkpoint is complete after the summary
        time.sleep(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("metrics", help="the file of --metrics; it must exist")
    parser.add_argument("out", help="a file in the collector's folder, FILE.prom")
    parser.add_argument("--once", action="store_true", help="write what is there now, and end")
    options = parser.parse_args()
    try:
        check(options.metrics, os.stat)
        if os.path.realpath(options.out) == os.path.realpath(options.metrics):
            raise OSError(0, "is the file of --metrics itself", options.out)
        follow(Run(options.metrics), options.out, options.once)
    except OSError as error:
        print(f"prometheus.py: {error.filename or options.out}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
