"""docs/prometheus.py: the text format by a strict parser of its own; metrics that grow or begin anew; bad input."""
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time

PROGRAM = [sys.executable, str(pathlib.Path(__file__).resolve().parents[1] / "docs/prometheus.py")]
LABEL = r'[a-zA-Z_]\w*="(?:[^"\\\n]|\\\\|\\"|\\n)*"'
SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(\{%s(?:,%s)*\})? ([+-]?(?:\d[\d.]*(?:e[+-]\d+)?|Inf)|NaN)" % (LABEL, LABEL))


def parsed(text):
    """{name and labels: value}. HELP and TYPE before the samples of a metric, all of them together, none twice."""
    values = {}
    assert text.startswith("# HELP ") and text.endswith("\n")
    for block in text[:-1].split("# HELP ")[1:]:
        about, kind, *samples = block.rstrip("\n").split("\n")
        metric = about.split(" ")[0]
        assert re.fullmatch(rf"# TYPE {metric} {'counter' if metric.endswith('_total') else 'gauge'}", kind), kind
        assert not any(re.split("[{ ]", name)[0] == metric for name in values), metric + " in two places"
        for line in samples:
            match = SAMPLE.fullmatch(line)
            assert match and match[1] == metric and (match[1] + (match[2] or "")) not in values, line
            values[match[1] + (match[2] or "")] = match[3]
    return {name.removeprefix("train70b_"): value for name, value in values.items()}


def step(number, **more):
    return {"event": "step", "step": number, "loss": 2.5, "grad_norm": 1, "lr": 1e-5, "tokens_per_s": 9, "step_s": 0.5,
            "comm_s": 0.25, "data_s": 0, "memory": {"peak": {"params": 8192}},
            "comm_bytes": {"dp.all_reduce": 2**53}, **more}


def refused(words, end):
    bad = subprocess.run([*PROGRAM, *words], capture_output=True, text=True)
    assert bad.returncode == 2 and re.fullmatch(r"prometheus.py: .+\n", bad.stderr) and bad.stderr.endswith(end), bad


config = {"event": "config", "version": {"commit": 'a"b\\c\nd'}}
alarm, saved = {"event": "alarm", "kind": "loss_spike"}, {"event": "checkpoint", "step": 2, "folder": "step-2"}
with tempfile.TemporaryDirectory() as work:
    metrics, out = pathlib.Path(work, "m.jsonl"), pathlib.Path(work, "m.prom")
    lines = [json.dumps(each) + "\n" for each in (
        config, step(1), alarm, config, step(2, straggler={"rank": 3, "busy_s": 1, "waited_s": 0}, loss=None, lr=1e999,
                                          experts={"max_over_mean": 1.5, "entropy": 0.9, "dropped": 0, "dead": 2}),
        saved, {"event": "probe", "slow": []}, {"event": "summary"}, {**saved, "step": 4, "folder": "step-4"})]
    metrics.write_text(9 * lines[1] + lines[4][:99])  # longer than what follows; half a line counts for nothing
    following = subprocess.Popen([*PROGRAM, metrics, out])
    for size, last in (0, "1"), (5, "2"), (9, "2"):
        metrics.write_text("".join(lines[:size])) if size else None
        while following.poll() is None and not (out.exists() and parsed(out.read_text()).get("step") == last):
            time.sleep(0.02)
    assert following.wait(20) == 0
    found = parsed(out.read_text())
    for name, value in {r'build_info{commit="a\"b\\c\nd"}': "1", "step": "2", "loss": "NaN", "lr": "+Inf",
                        "straggler_rank": "3", "expert_load_ratio": "1.5", "experts_dead": "2",
                        'memory_peak_bytes{kind="params"}': "8192", "comm_seconds_total": "0.5",
                        'alarms_total{kind="loss_spike"}': "1", 'alarms_total{kind="non_finite"}': "0",
                        "restarts_total": "1", "checkpoint_step": "4",
                        'comm_bytes_total{operation="dp.all_reduce"}': str(2**54)}.items():
        assert found.get(name) == value, f"{name} {found.get(name)}, not {value}"
    strange = lines[1].replace("9,", '"a",')
    for what in "{}", "step,loss", '{"event":"step"}', "[" * 9999, "\0\xff", strange, lines[1][:99]:
        metrics.write_text(what.strip() + "\n", "latin1")
        refused([metrics, out, "--once"], "m.jsonl: line 1 is not an event of --metrics\n")
        assert parsed(out.read_text()) == found, what
    metrics.write_text(lines[0])
    for words in [work + "/none", out], [metrics, work + "/none/a.prom"], [metrics, metrics], [work, out]:
        refused(words, "\n")
