#!/usr/bin/env python3
"""Predicts published throughput: simulates every row of docs/results/08_published.json with chapter 08's program and
writes docs/results/08_published.csv, which docs/plots.py draws.

    python3 docs/published.py [ROW ...] [--bin build/bin] [--out docs/results] [--jobs N]
                             [--commands | --lesson summary|sources|calibration|comparisons|rows]
    python3 docs/published.py --estimate [ROW ...]      the planner's estimate of the same rows, in seconds

ROW: a part of a row's name; default: all, six minutes. --commands prints the dry runs. --lesson prints a part
of docs/published.md from the CSV. The last lines are the errors by role, and the worst rows.

Everything is compared as tokens per second and GPU. A row in TFLOP/s or MFU is converted by its own definition of the
FLOPs of a token (`flops` of its source), not by this course's; one in seconds by its batch.
"""
import argparse
import concurrent.futures
import itertools
import json
import os
import pathlib
import re
import shlex
import statistics
import sys
import tempfile
import textwrap

import programs
import tables

PEAK = 989.5e12  # bf16 of an H100, of all rows in MFU


def head_size(model):
    return model.get("head_dim", model["hidden"] // model["heads"])


def product_weights(model):
    """Weights that a token is multiplied with: blocks and head, without norms, the embedding and routers."""
    hidden, head = model["hidden"], head_size(model)
    attention = 2 * hidden * head * (model["heads"] + model["kv_heads"])
    ffn = model["top_k"] * model["expert_ffn"] if "experts" in model else model["ffn"]
    return model["layers"] * (attention + 3 * hidden * ffn) + model["vocab"] * hidden


def flops_per_token(model, seq_len, counted):
    """Of a training step. counted: the source's words, see "_" in the file of the rows."""
    width = model["heads"] * head_size(model)
    attention = model["layers"] * width * seq_len * (6 if counted.startswith("causal") else 12)
    embedding = 6 * model["vocab"] * model["hidden"] if "with embedding" in counted and not model["tied"] else 0
    flops = 6 * product_weights(model) + embedding + attention
    # With recomputation the forward pass runs twice; the head's is not run again.
    if "with recomputation" in counted:
        head = 6 * model["vocab"] * model["hidden"]
        flops = (flops - head) * 4 / 3 + head
    return flops


def published(row, data):
    """Tokens per second and GPU."""
    value, unit = row["value"], row["unit"]
    if unit == "tokens/s/GPU":
        return value
    if unit == "s/step":
        return row["global_batch"] * row["seq_len"] / value / row["gpus"]
    flops = flops_per_token(data["models"][row["model"]], row["seq_len"], data["sources"][row["source"]]["flops"])
    return {"TFLOP/s/GPU": value * 1e12, "MFU %": value / 100 * PEAK}[unit] / flops


def flags(row, data):
    """The flags of chapter 08's program, without --simulate."""
    model = data["models"][row["model"]]
    layout = row["layout"].split()
    shape = [f"--{key.replace('_', '-')} {model[key]}"
             for key in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "head_dim", "experts", "top_k",
                         "expert_ffn") if key in model]
    if model["tied"]:
        shape.append("--tied-embeddings on")
    if model.get("qk_norm"):
        shape.append("--qk-norm on")
    batch = f"--seq-len {row['seq_len']} --micro-batch {row['micro_batch']} --global-batch {row['global_batch']}"
    return shlex.split(" ".join([*shape, "--dtype bf16", batch, f"--comm fake --fake-world {row['gpus']}", *layout]))


def read_rows(path, names):
    data = json.loads(path.read_text("utf-8"))
    rows = [row for row in data["rows"] if not names or any(name in row["name"] for name in names)]
    if not rows:
        sys.exit(f"{path}: no row's name contains {' or '.join(names)}")
    return data, rows


def write_cluster(row, data, clusters, folder):
    """The row's cluster with as many nodes as it needs, as a file for --simulate."""
    entry = data["clusters"][row["cluster"]]
    cluster = json.loads((clusters / entry["base"]).read_text("utf-8"))
    cluster["nodes"] = -(-row["gpus"] // cluster["gpus_per_node"])
    device = {**entry["device"], **data["programs"].get(row.get("program"), {})}
    share, work = entry.get("sustained", 1), 1 + row.get("recomputed_products", 0) / 3
    device["product_efficiency"] /= work
    if "fp8_efficiency" in device:
        device["fp8_efficiency"] /= work
        device["sustained_fp8"] = entry["sustained_fp8"]
    device["sustained"] = share
    cluster["device"] = device
    path = folder / "cluster.json"
    path.write_text(json.dumps(cluster, indent=2), "utf-8")
    return path


def simulate(row, data, program, clusters):
    """Tokens per second and GPU."""
    with tempfile.TemporaryDirectory() as temporary:
        cluster = write_cluster(row, data, clusters, pathlib.Path(temporary))
        seconds = programs.step_seconds(programs.output([program, *flags(row, data), "--simulate", cluster]))
    return row["global_batch"] * row["seq_len"] / seconds / row["gpus"]


PLANNED = {"--tp": "1", "--cp": "1", "--pp": "1", "--ep": "1", "--zero": "0", "--recompute": "none",
           "--hybrid-shard": "0", "--sequence-parallel": "off", "--tp-overlap": "off"}


def estimate(row, data, program, clusters):
    """Tokens per second and GPU of the row's layout by the planner's estimate, whether it fits or not."""
    words = flags(row, data)
    options = PLANNED | dict(zip(words[::2], words[1::2]))
    for name in ("--dtype", "--comm", "--overlap", "--stage-layers"):  # bf16; what the planner decides itself
        options.pop(name, None)
    options["--gpus"] = options.pop("--fake-world")
    with tempfile.TemporaryDirectory() as temporary:
        path = write_cluster(row, data, clusters, pathlib.Path(temporary))
        cluster = json.loads(path.read_text("utf-8"))
        cluster["device"]["memory_bytes"] = 1e18
        path.write_text(json.dumps(cluster), "utf-8")
        table = path.with_suffix(".csv")
        programs.output([program, *itertools.chain(*options.items()), "--cluster", path, "--simulations", "0", "--best",
                         "1", "--csv", table])
        return float(tables.read(table)[0]["tokens/s/GPU"])


COLUMNS = ["row", "role", "software", "gpus", "published", "predicted", "error", "note"]


def signed(error):
    return f"{float(error):+.0f}%".replace("-", "−")


def table_of_sources(data, written):
    """The errors by source: what a README shows."""
    rows = []
    for name, source in data["sources"].items():
        errors = [float(line["error"]) for row, line in zip(data["rows"], written)
                  if row["source"] == name and row["role"] != "calibration"]
        if errors:
            median = statistics.median([abs(error) for error in errors])
            link = f"[{source['title']}]({source['page']})" if source["page"] else source["title"]
            ends = ", ".join(signed(error) for error in dict.fromkeys([min(errors), max(errors)]))
            rows.append([link, len(errors), f"{median:.0f}% ({ends})", source["explained"]])
    lines = tables.markdown(["source", "rows", "median error (lowest, highest)", "what explains them"], rows, "-::-")
    return "\n".join(lines)


def wrapped(text):
    return textwrap.fill(text, 150, break_on_hyphens=False)


def text_of_summary(data, written):
    held = [float(line["error"]) for line in written if line["role"] == "held out"]
    sizes, roles = [abs(error) for error in held], [line["role"] for line in written]
    return wrapped(
        f"Of {len(written)} rows {roles.count('calibration')} calibrate, {roles.count('doubtful')} are doubtful: they "
        f"lack something that changes the prediction by more than a tenth. The {len(held)} others, held out, have a "
        f"median error of {statistics.median(sizes):.1f}%; {sum(size <= 15 for size in sizes)} are within 15%, "
        f"{sum(size <= 30 for size in sizes)} within 30%; {sum(error > 0 for error in held)} are predicted too fast; "
        f"errors go from {signed(min(held))} to {signed(max(held))}.")


def table_of_calibration(data, written):
    """The figures that come from whole steps."""
    clusters = data["clusters"]
    names, rows = [row["name"] for row in data["rows"] if row["role"] == "calibration"], []
    for figure, value, start in (
            ("H100 and H200, 700 W: products and attention in bf16", clusters["hgx-h100"]["sustained"], "llm.c"),
            ("torchtitan's H100, 500 W: the same", clusters["grand-teton-h100"]["sustained"], "torchtitan"),
            ("FP8 products, both", clusters["hgx-h100"]["sustained_fp8"], "NeMo")):
        rows.append([figure, value, next(name for name in names if name.startswith(start))])
    return "\n".join(tables.markdown(["figure", "value", "from the row"], rows, "-:-"))


def short(layout):
    """"--tp 2 --sequence-parallel on --zero 1" as "tp=2,sp zero=1"; without the layers of each stage."""
    flags = dict(re.findall(r"--(\S+) (\S+)", layout))
    flags.pop("stage-layers", None)
    for name, of, text in (("sequence-parallel", "tp", "sp"), ("tp-overlap", "tp", "overlap"), ("pipeline", "pp", "{}"),
                           ("virtual-stages", "pp", "x{}"), ("cp-algorithm", "cp", "{}")):
        if name in flags:
            flags[of] += "," + text.format(flags.pop(name))
    return " ".join(f"{name}={value}" for name, value in flags.items())


def table_of_rows(data, written):
    """A line for each source, with the words with which its rows' names begin."""
    rows = []
    for name, source in data["sources"].items():
        mine = [pair for pair in zip(data["rows"], written) if pair[0]["source"] == name]
        same = os.path.commonprefix([row["name"] for row, _ in mine]) if len(mine) > 1 else ""
        same = same[:same.rfind(" ") + 1]
        rows.append([f"**{source['title']}**" + (f": *{same.strip()}*" if same else ""), "", "", ""])
        for row, line in mine:
            role = "" if row["role"] == "held out" else f" *({row['role']})*"
            rows.append([row["name"].removeprefix(same) + role, f"`{short(row['layout'])}`",
                         f"{float(line['published']):,.5g}",
                         f"{float(line['predicted']):,.5g} ({signed(line['error'])})"])
    return "\n".join(tables.markdown(["row", "layout", "published", "predicted (error)"], rows, "--::"))


def ratio_errors(pairs, written):
    """How wrong the ratio of two speeds is, in percent, for each pair of rows."""
    errors = {line["row"]: 1 + float(line["error"]) / 100 for line in written}
    return [100 * (max(errors[a], errors[b]) / min(errors[a], errors[b]) - 1) for a, b in pairs]


def same_program(data):
    return [pair for names in data["same_program"] for pair in itertools.combinations(names, 2)]


def comparison_errors(data, written):
    """Of each pair of rows that differ in their layout alone."""
    return ratio_errors(same_program(data), written)


def other_pairs(data):
    """Of dense rows of one source, model and number of GPUs in two layouts, beside those."""
    dense = [row for row in data["rows"]
             if row["role"] != "doubtful" and "experts" not in data["models"].get(row["model"], {})]
    return [(a["name"], b["name"]) for a, b in itertools.combinations(dense, 2)
            if all(a[key] == b[key] for key in ("source", "model", "gpus")) and a["layout"] != b["layout"] and
            (a["name"], b["name"]) not in same_program(data)]


def text_of_comparisons(data, written):
    errors, others = comparison_errors(data, written), ratio_errors(other_pairs(data), written)
    experts = list(itertools.combinations(data["with_experts"], 2))
    speeds = {line["row"]: (float(line["published"]), float(line["predicted"])) for line in written}
    ordered = sum((speeds[a][0] - speeds[b][0]) * (speeds[a][1] - speeds[b][1]) > 0 for a, b in experts)
    factors = [1 + error / 100 for error in ratio_errors(experts, written)]
    return wrapped(
        f"In {len(errors)} pairs of rows of one program and dense model in two layouts (1F1B and interleaved, tp with "
        "and without overlap, tp 2 to 32), the ratio of predicted speeds is off by "
        f"{statistics.median(errors):.1f}% in the median, {max(errors):.1f}% at most; in {len(others)} other pairs of "
        "one source, dense model and number of GPUs (length, batch or precision may differ) by "
        f"{statistics.median(others):.1f}%, {max(others):.1f}% at most. With experts, Qwen3-235B in "
        f"{len(data['with_experts'])} layouts, by a factor of {statistics.median(factors):.1f} in the median, "
        f"{max(factors):.1f} at most; {ordered} of {len(experts)} pairs is in the right order.")


LESSON = {"summary": text_of_summary, "calibration": table_of_calibration, "sources": table_of_sources,
          "comparisons": text_of_comparisons, "rows": table_of_rows}


def note(row):
    return "; ".join(row.get("differs", []) + row.get("assumed", []))


def summary(rows):
    """Lines: the errors of each role, then the rows that are off by more than 15%."""
    lines, rows = [], [row for row in rows if row["error"] != ""]
    for role in ("calibration", "held out", "doubtful"):
        errors = [abs(float(row["error"])) for row in rows if row["role"] == role]
        if errors:
            within = sum(error <= 15 for error in errors)
            lines.append(f"{role}: {len(errors)} rows, median error {statistics.median(errors):.1f}%, "
                         f"{within} within 15%, largest {max(errors):.0f}%")
    worst = sorted((row for row in rows if abs(float(row["error"])) > 15), key=lambda row: -abs(float(row["error"])))
    return lines + [f"  {float(row['error']):+6.0f}%  {row['row']}" for row in worst]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="ROW")
    parser.add_argument("--bin", type=pathlib.Path, default=pathlib.Path("build/bin"))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/results"))
    parser.add_argument("--rows", type=pathlib.Path, default=pathlib.Path("docs/results/08_published.json"))
    parser.add_argument("--clusters", type=pathlib.Path, default=pathlib.Path("08_3d_full/plan/clusters"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--estimate", action="store_true")
    parser.add_argument("--commands", action="store_true")
    parser.add_argument("--lesson", choices=LESSON)
    arguments = parser.parse_args()
    data, rows = read_rows(arguments.rows, arguments.names)
    program = arguments.bin / "08_3d_full"
    if arguments.commands:
        for row in rows:
            print(f"# {row['name']}\n{program} {' '.join(flags(row, data))} --dry-run")
        return 0

    if arguments.lesson:
        print(LESSON[arguments.lesson](data, tables.read(arguments.out / "08_published.csv")))
        return 0

    def predict(row):
        """Tokens per second and GPU, and what went wrong."""
        try:
            if arguments.estimate:
                return estimate(row, data, arguments.bin / "plan", arguments.clusters), ""
            return simulate(row, data, program, arguments.clusters), ""
        except programs.Failed as error:
            return None, str(error)

    failed, results = 0, []
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for row, (predicted, failure) in zip(rows, pool.map(predict, rows)):
            value = published(row, data)
            error = "" if predicted is None else f"{100 * (predicted / value - 1):.1f}"
            failed += bool(failure)
            results.append(dict(zip(COLUMNS, [row["name"], row["role"], row["software"], row["gpus"], f"{value:.5g}",
                                              "" if predicted is None else f"{predicted:.5g}", error,
                                              failure or note(row)])))
            print(f"{row['name']:48} {failure or f'{value:9.5g} {predicted:9.5g} {error:>6}%'}", flush=True)
    print("\n".join(summary(results)))
    if not (arguments.estimate or arguments.names or failed):
        tables.write(arguments.out / "08_published.csv", results, COLUMNS,
                     ["08_published: tokens/s per GPU, published and simulated; error in percent",
                      "command: python3 docs/published.py", "computed by the simulation"])
        print(arguments.out / "08_published.csv")
    return 1 if failed else 0


if __name__ == "__main__":
    programs.start(main)
