#!/usr/bin/env python3
"""Predicts published throughput: simulates every row of docs/results/08_published.json with chapter 08's program and
writes docs/results/08_published.csv, which docs/plots.py draws.

    python3 docs/published.py [ROW ...] [--bin build/bin] [--out docs/results] [--jobs N]
                             [--commands | --check | --lesson]
    python3 docs/published.py --estimate [ROW ...]      without a program: closed formulas, on the same rows

ROW: a part of a row's name; default: all, some minutes. --commands prints what would run. --check runs the dry runs
only: every layout must be one that the program accepts. --lesson writes the tables of docs/published.md and of
chapter 08's README from the CSV. The last lines are the errors by role, and the worst rows.

Everything is compared as tokens per second and GPU. A row in TFLOP/s or MFU is converted by its own definition of the
FLOPs of a token (`flops` of its source), not by this course's; one in seconds by its batch.
"""
import argparse
import concurrent.futures
import csv
import itertools
import json
import pathlib
import re
import shlex
import statistics
import subprocess
import sys
import tempfile

PEAK = 989.5e12  # bf16 of an H100, of all rows in MFU


# ---- the rows -------------------------------------------------------------------------------------------------------

def product_weights(model):
    """Weights that every token is multiplied with: blocks and head, without norms and the embedding."""
    hidden, head = model["hidden"], model["hidden"] // model["heads"]
    attention = 2 * hidden * hidden + 2 * hidden * model["kv_heads"] * head
    return model["layers"] * (attention + 3 * hidden * model["ffn"]) + model["vocab"] * hidden


def flops_per_token(model, seq_len, counted):
    """Of a training step. counted: the source's words, see "_" in the file of the rows."""
    attention = model["layers"] * model["hidden"] * seq_len * (6 if counted.startswith("causal") else 12)
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
             for key in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")]
    if model["tied"]:
        shape.append("--tied-embeddings on")
    batch = f"--seq-len {row['seq_len']} --micro-batch {row['micro_batch']} --global-batch {row['global_batch']}"
    return shlex.split(" ".join([*shape, "--dtype bf16", batch, f"--comm fake --fake-world {row['gpus']}", *layout]))


def read_rows(path, names):
    data = json.loads(path.read_text())
    rows = [row for row in data["rows"] if not names or any(name in row["name"] for name in names)]
    if not rows:
        sys.exit(f"{path}: no row's name contains {' or '.join(names)}")
    return data, rows


# ---- the simulation -------------------------------------------------------------------------------------------------

def run(command):
    """What the command prints."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"exit code {done.returncode}")
    return done.stdout


def write_cluster(row, data, clusters, folder):
    """The row's cluster with as many nodes as it needs, as a file for --simulate."""
    entry = data["clusters"][row["cluster"]]
    cluster = json.loads((clusters / entry["base"]).read_text())
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
    path.write_text(json.dumps(cluster, indent=2))
    return path


def simulate(row, data, program, clusters):
    """Seconds of the step: the line "the step" of the table that --simulate prints, in ms."""
    with tempfile.TemporaryDirectory() as temporary:
        cluster = write_cluster(row, data, clusters, pathlib.Path(temporary))
        text = run([str(program), *flags(row, data), "--simulate", str(cluster)])
    found = re.search(r"^the step +([\d.]+)", text, re.MULTILINE)
    if not found:
        raise RuntimeError("--simulate prints no line \"the step\"")
    return float(found.group(1)) / 1e3


# ---- an estimate in closed formulas, to know what to expect ----------------------------------------------------------

# Products in bf16 and FP8, attention forward and backward (FLOP/s), memory (bytes/s, read plus written); one direction
# of NVLink and of the network per GPU (bytes/s). What large ops reach; "H100, 500 W" is torchtitan's.
GRAND_TETON = (5.2e14, 9.0e14, 4.2e14, 3.4e14, 2.1e12, 3.6e11, 4.5e10)
DEVICES = {"grand-teton-h100": GRAND_TETON, "dgx-a100": (2.5e14, 0, 1.9e14, 1.7e14, 1.8e12, 2.3e11, 2.2e10),
           "h200": (6.6e14, 1.15e15, 6.0e14, 5.0e14, 4.3e12, 3.7e11, 4.5e10)}
H100 = (6.4e14, 1.1e15, 5.2e14, 4.3e14, 3.0e12, 3.7e11, 4.5e10)


def option(layout, name, default):
    words = layout.split()
    return type(default)(words[words.index(name) + 1]) if name in words else default


def estimate(row, data):
    """Tokens per second and GPU: products + attention + pointwise traffic, exposed collectives, bubble, update."""
    model, layout, seq = data["models"][row["model"]], row["layout"], row["seq_len"]
    tp, pp, cp = (option(layout, name, 1) for name in ("--tp", "--pp", "--cp"))
    zero, chunks, fp8 = option(layout, "--zero", 0), option(layout, "--virtual-stages", 1), "--fp8" in layout
    recompute = option(layout, "--recompute", "none")
    dp = row["gpus"] // (tp * pp * cp)
    micro_batches = row["global_batch"] // dp // row["micro_batch"]
    bf16, products8, forward, backward, memory, nvlink, network = DEVICES.get(row["cluster"], H100)
    tokens, hidden = row["micro_batch"] * seq / cp, model["hidden"]
    head = model["vocab"] * hidden
    weights = (product_weights(model) - head) / tp / pp
    # One micro-batch of one stage.
    passes = 4 if recompute == "full" else 3
    seconds = 2 * passes * tokens * weights / (products8 if fp8 else bf16)
    seconds += 6 * tokens * head / tp / pp / bf16
    pairs = model["layers"] / pp * tokens * hidden / tp * seq * 2  # FLOPs of causal attention forward
    seconds += pairs * ((2 if recompute == "full" else 1) / forward + 2.5 / backward)
    width = hidden / (tp if "--sequence-parallel on" in layout else 1)
    traffic = model["layers"] / pp * tokens * (40 * width + 32 * model["ffn"] / tp + 20 * hidden / tp)
    traffic += tokens * model["vocab"] / tp * 12 / pp
    eager = row["software"] == "eager"
    seconds += traffic * (4 if eager else 1.2 if recompute == "none" else 1.4) / memory
    # Collectives of tensor parallelism: two forward, two backward, two for a second forward pass, of bf16 activations.
    collectives = (6 if recompute == "full" else 4) * model["layers"] / pp
    tp_seconds = collectives * 2 * (tp - 1) / tp * 2 * tokens * hidden / (nvlink if tp <= 8 else network)
    seconds += tp_seconds * (0.3 if "--tp-overlap on" in layout else 1)
    # Keys and values of context parallelism, forward and backward, half hidden.
    key_values = 2 * 2 * tokens * cp * hidden / tp * model["kv_heads"] / model["heads"]
    seconds += (cp - 1) / cp * model["layers"] / pp * 2 * key_values / 2 / (nvlink if tp * cp <= 8 else network)
    # Weights and gradients over dp * cp, hidden behind nine tenths of the computation, with one adapter per GPU.
    shards, held = dp * cp, weights + 2 * head / tp / pp
    gathers = (2 * micro_batches if zero == 3 else 1 if zero else 0) * held * (1 if fp8 else 2)
    reductions = (micro_batches if zero >= 2 else 1 if zero else 2) * held * (2 if "--grad-dtype bf16" in layout else 4)
    link = nvlink if row["gpus"] <= 8 else min(nvlink, network * 8 / tp)
    wire = (gathers + reductions) * (shards - 1) / shards / link
    step = seconds * micro_batches * (1 + (pp - 1) / (chunks * micro_batches))
    step += max(0, wire - 0.9 * (step if zero >= 2 else seconds))
    step += held / (shards if zero else 1) * (80 if eager else 32) / memory
    return row["global_batch"] * seq / step / row["gpus"]


# ---- results --------------------------------------------------------------------------------------------------------

COLUMNS = ["row", "role", "software", "gpus", "published", "predicted", "error", "note"]
BEGIN, END = "<!-- published: {} -->\n", "<!-- end of published -->"
NOT_MEASURED = "<!-- not measured: docs/published.py simulates, tests/published.py checks -->\n"


def read_csv(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def signed(error):
    return f"{float(error):+.0f}%".replace("-", "−")


def table_of_sources(data, written):
    """The errors by source: what a README shows."""
    lines = ["| source | rows | median | lowest, highest error | what explains them |", "|---|---:|---:|---|---|"]
    for name, source in data["sources"].items():
        errors = [float(line["error"]) for row, line in zip(data["rows"], written)
                  if row["source"] == name and row["role"] != "calibration"]
        if errors:
            median = statistics.median([abs(error) for error in errors])
            link = f"[{source['title']}]({source['page']})" if source["page"] else source["title"]
            lines.append(f"| {link} | {len(errors)} | {median:.0f}% | "
                         f"{signed(min(errors))}, {signed(max(errors))} | {source['explained']} |")
    held = [abs(float(line["error"])) for line in written if line["role"] == "held out"]
    roles = [line["role"] for line in written]
    return NOT_MEASURED + "\n".join(lines) + (
        f"\n\n{NOT_MEASURED}Of {len(written)} rows {roles.count('calibration')} calibrate, and "
        f"{roles.count('doubtful')} lack something that changes the prediction by more than a tenth. The {len(held)} "
        f"others: median error {statistics.median(held):.1f}%, {sum(error <= 15 for error in held)} within 15%, "
        f"{sum(error <= 30 for error in held)} within 30%.")


def table_of_calibration(data, written):
    """The figures that come from whole steps."""
    clusters = data["clusters"]
    lines = ["| figure | value | from the row |", "|---|---:|---|"]
    for figure, value, start in (
            ("H100 and H200, 700 W: products and attention in bf16", clusters["hgx-h100"]["sustained"], "llm.c"),
            ("torchtitan's H100, 500 W: the same", clusters["grand-teton-h100"]["sustained"], "torchtitan"),
            ("FP8 products, both", clusters["hgx-h100"]["sustained_fp8"], "NeMo")):
        names = [row["name"] for row in data["rows"] if row["role"] == "calibration"]
        lines.append(f"| {figure} | {value} | {next(name for name in names if name.startswith(start))} |")
    return NOT_MEASURED + "\n".join(lines)


def table_of_rows(data, written):
    lines = []
    for name, source in data["sources"].items():
        lines += [f"**{source['title']}.** {source['explained'][0].upper()}{source['explained'][1:]}.", "",
                  NOT_MEASURED + "| row | role | layout | published | predicted | error |",
                  "|---|---|---|---:|---:|---:|"]
        for row, line in zip(data["rows"], written):
            if row["source"] == name:
                layout = re.sub(r" --stage-layers \S+", "", row["layout"])
                lines.append(f"| {row['name']} | {row['role']} | `{layout}` | {float(line['published']):,.5g} | "
                             f"{float(line['predicted']):,.5g} | {signed(line['error'])} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def comparison_errors(data, written):
    """How wrong the ratio of two speeds is, in percent, for each pair of rows that differ in their layout."""
    errors = {line["row"]: 1 + float(line["error"]) / 100 for line in written}
    return [100 * (max(errors[a], errors[b]) / min(errors[a], errors[b]) - 1)
            for names in data["same_program"] for a, b in itertools.combinations(names, 2)]


def text_of_comparisons(data, written):
    errors = comparison_errors(data, written)
    return NOT_MEASURED + (
        f"Of {len(errors)} pairs of rows of one program and model that differ in their layout (1F1B and interleaved, tp "
        f"with and without overlap, tp 2 to 32), the ratio of two predicted speeds is off by {statistics.median(errors):.1f}% "
        f"in the median, by {max(errors):.1f}% at most.")


def lessons(data, written, root):
    """{file: its text, with the tables that stand between the markers written anew}."""
    texts = {}
    for path in ("08_3d_full/README.md", "docs/published.md"):
        text = (root / path).read_text()
        for name, table in (("calibration", table_of_calibration), ("sources", table_of_sources),
                            ("comparisons", text_of_comparisons), ("rows", table_of_rows)):
            begin = text.find(BEGIN.format(name))
            if begin >= 0:
                begin += len(BEGIN.format(name))
                text = text[:begin] + "\n" + table(data, written) + "\n\n" + text[text.index(END, begin):]
        texts[path] = text
    return texts


def note(row):
    return "; ".join(row.get("differs", []) + row.get("assumed", []))


def summary(rows):
    """Lines: the errors of each role, then the rows that are off by more than 15%."""
    lines = []
    for role in ("calibration", "held out", "doubtful"):
        errors = [abs(float(row["error"])) for row in rows if row["role"] == role and row["error"] != ""]
        if errors:
            within = sum(error <= 15 for error in errors)
            lines.append(f"{role}: {len(errors)} rows, median error {statistics.median(errors):.1f}%, "
                         f"{within} within 15%, largest {max(errors):.0f}%")
    worst = sorted((row for row in rows if row["error"] != "" and abs(float(row["error"])) > 15),
                   key=lambda row: -abs(float(row["error"])))
    return lines + [f"  {float(row['error']):+6.0f}%  {row['row']}" for row in worst]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="ROW")
    parser.add_argument("--bin", type=pathlib.Path, default=pathlib.Path("build/bin"))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/results"))
    parser.add_argument("--rows", type=pathlib.Path, default=pathlib.Path("docs/results/08_published.json"))
    parser.add_argument("--clusters", type=pathlib.Path, default=pathlib.Path("08_3d_full/clusters"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--estimate", action="store_true")
    parser.add_argument("--commands", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--lesson", action="store_true")
    arguments = parser.parse_args()
    data, rows = read_rows(arguments.rows, arguments.names)
    program = arguments.bin / "08_3d_full"
    if arguments.commands:
        for row in rows:
            print(f"# {row['name']}\n{program} {' '.join(flags(row, data))} --dry-run")
        return 0

    if arguments.lesson:
        root = pathlib.Path(__file__).resolve().parents[1]
        for path, text in lessons(data, read_csv(arguments.out / "08_published.csv"), root).items():
            (root / path).write_text(text)
        return 0

    def predict(row):
        """Tokens per second and GPU, and what went wrong."""
        try:
            if arguments.estimate:
                return estimate(row, data), ""
            if arguments.check:
                run([str(program), *flags(row, data), "--dry-run", "--fake-rank", "0"])
                return None, ""
            seconds = simulate(row, data, program, arguments.clusters)
            return row["global_batch"] * row["seq_len"] / seconds / row["gpus"], ""
        except RuntimeError as error:
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
            text = failure or ("accepted" if predicted is None else f"{value:9.5g} {predicted:9.5g} {error:>6}%")
            print(f"{row['name']:48} {text}", flush=True)
    print("\n".join(summary(results)))
    if not (arguments.estimate or arguments.check or arguments.names or failed):
        with open(arguments.out / "08_published.csv", "w", newline="") as file:
            file.write("# 08_published: tokens/s per GPU, published and simulated; error in percent\n")
            file.write("# command: python3 docs/published.py\n# computed by the simulation\n")
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(results)
        print(arguments.out / "08_published.csv")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
