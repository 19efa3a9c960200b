"""What the programs of measure_node.py print, as rows of its CSVs."""
import json
import re

import programs
import tables
# Rates on the same hardware, of other programs (H200) or of these when cold (H100): a large copy (bytes read and
# written) and a bf16 product of 8192^3.
REFERENCE = {"NVIDIA H200": {"copy": 4.3e12, "product": 795e12},
             "NVIDIA H100 80GB HBM3": {"copy": 3.0e12, "product": 778e12}}
BF16_BOUND = 2e-2  # of a layout's loss against one rank's: that of tests/08_grid.cpp


class Unreadable(Exception):
    """The output does not hold what was asked for."""


class NotTested(Exception):
    pass


def found(pattern, text, what):
    match = re.search(pattern, text)
    if not match:
        raise Unreadable(f"the output has no {what}")
    return match


def doctest(text, _):
    cases = found(r"test cases:\s*(\d+) \|\s*(\d+) passed \|\s*(\d+) failed", text, "summary of the tests")
    assertions = int(found(r"assertions:\s*(\d+)", text, "number of assertions")[1])
    left_out = sorted(set(re.findall(r"NOT TESTED: .*|skipped: .*", text)))
    if assertions == 0 or any(re.search("no (usable )?GPU|no CUDA", line) for line in left_out):
        raise NotTested("; ".join(left_out) or "no assertions")
    return [{"cases": int(cases[1]), "failed": int(cases[3]), "assertions": assertions, "note": "; ".join(left_out)}]


def sanitizer_summary(text, _):
    row = doctest(text, None)[0]
    races = re.search(r"RACECHECK SUMMARY: .*?\((\d+) errors?, (\d+) warnings?\)", text)
    errors = races[1] if races else found(r"ERROR SUMMARY: (\d+) error", text, "summary of the sanitizer")[1]
    return [{"errors": int(errors), "warnings": int(races[2]) if races else 0, "note": row["note"]}]


def limits(text, node):
    rows, known = [], REFERENCE.get(node.name, {})
    for state, cold in (("cold", ", cold"), ("warm", "")):
        pattern = rf"measured limits{cold}: copy ([\d.]+) GB/s, (\w+) product ([\d.]+) TFLOP/s"
        match = found(pattern, text, "measured limits" + cold)
        product = known.get("product", 0) / 1e12 if match[2] == "bf16" else 0
        copy = known.get("copy", 0) / 1e9
        rows += [{"quantity": "copy", "state": state, "value": float(match[1]), "unit": "GB/s",
                  "reference": copy or ""},
                 {"quantity": f"{match[2]} product", "state": state, "value": float(match[3]), "unit": "TFLOP/s",
                  "reference": product or ""}]
    return rows


def links_of(ranks):
    def parse(_, node):
        links = json.loads(node.file.read_text("utf-8"))
        measured = {name: link for name, link in links.items() if isinstance(link, dict)}
        rows = []
        for name, link in measured.items():
            rows += [{"quantity": f"{name} bandwidth", "value": link["bytes_per_s"] / 1e9, "unit": "GB/s"},
                     {"quantity": f"{name} latency", "value": 1e6 * link["seconds"], "unit": "us"}]
        if not rows:
            raise Unreadable("no links")
        return [{**row, "ranks": ranks} for row in rows]
    return parse


def number(text):
    try:
        return float(text)
    except ValueError:
        return text


def csv_of(kind, row_of, wanted=lambda row: True):
    def parse(_, node):
        rows = [{key: number(value) for key, value in row.items()} for row in tables.read(node.file)]
        rows = [row_of(row) for row in rows if wanted(row)]
        if not rows:
            raise Unreadable(f"no rows of {kind}")
        return rows
    return parse


def op_row(node, row):
    ms, floor = row["ms"], row["floor_ms"]
    known, work = REFERENCE.get(node.name), all(isinstance(row[key], float) for key in ("gflops", "gbytes_per_s"))
    if known and work and ms > 0:
        reference = ms * max(row["gbytes_per_s"] * 1e9 / known["copy"], row["gflops"] * 1e9 / known["product"])
        row |= {"reference_floor_ms": round(reference, 4), "times_reference_floor": round(ms / reference, 2)}
    return {**row, "times_floor": round(ms / floor, 2) if isinstance(floor, float) and floor > 0 else ""}


def fp8_products(text, _):
    numbers = r"\s+([\d.]+)"
    lines = re.findall(r"^\s*(\d+)" + numbers * 5 + r"\s+([\d.]+) x", text, re.M)
    if not lines:
        raise Unreadable("the output has no table of products")
    names = ("rows", "in", "out", "bf16_tflops", "fp8_tflops", "casts_ms", "net_speedup")
    return [dict(zip(names, map(float, line))) for line in lines]


def rates(node, shape, ranks, tokens_per_s):
    flops = tokens_per_s * shape.flops_per_token() / ranks
    return {"ranks": ranks, "tokens_per_s": tokens_per_s, "tokens_per_s_per_rank": tokens_per_s / ranks,
            "model_tflops_per_rank": flops / 1e12}


def steps_of(node, shape, ranks=1, simulated=0, reference=None):
    def parse(_, node):
        steps = programs.events(node.file, "step")
        timed = steps[5:] or steps[2:] or steps[1:]
        if not timed:
            raise Unreadable("the metrics have no steps")
        middle = sorted(timed, key=lambda step: step["step_s"])[len(timed) // 2]
        first, last = steps[0]["loss"], steps[-1]["loss"]
        row = {**rates(node, shape, simulated or ranks, middle["tokens_per_s"]), "step_s": middle["step_s"],
               "mfu": middle["mfu"], "comm_s": middle["comm_s"], "first_loss": first, "last_loss": last,
               "peak_gib": max(step["memory"]["peak"]["total"] for step in steps) / 2**30}
        if used := [step["device_memory"] for step in steps if "device_memory" in step]:
            row |= {f"{name}_gib": max(each[key] for each in used) / 2**30
                    for name, key in (("device", "used"), ("other", "other"))}
        if simulated:
            row |= {"note": "tokens_per_s: if every rank took as long; losses among simulated peers mean nothing"}
        if reference and reference[0]["status"] == "ok":
            expected = float(reference[0]["first_loss"])
            row["loss_difference"] = abs(first - expected) / expected
            if not row["loss_difference"] <= BF16_BOUND:
                raise Unreadable(f"first loss {first}, of one rank {expected}")
        return [row]
    return parse


def json_lines(text):
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    if not lines:
        raise Unreadable("no lines of JSON")
    return lines


def torch_steps(node, shape):
    def parse(text, _):
        line, = json_lines(text)
        row = rates(node, shape, 1, line["tokens_per_s"])
        mfu = row["model_tflops_per_rank"] * 1e12 / node.peak if node.peak else ""
        return [{**row, "step_s": line["step_s"], "mfu": mfu, "peak_gib": line["peak_gib"], "last_loss": line["loss"],
                 "note": f"PyTorch {line['torch']}"}]
    return parse


def torch_attention(text, _):
    line, = json_lines(text)
    return [{"tokens": line["attention"], "op": op, "calls": 1, "ms": line[f"{direction}_ms"],
             "gflops": 1e3 * line[f"{direction}_tflops"], "note": f"PyTorch {line['torch']}"}
            for op, direction in (("attention", "forward"), ("attention_backward", "backward"))]
