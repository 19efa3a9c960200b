"""What only this catches: docs/prometheus.py at a metrics file that grows, ends in half a line or begins anew."""
import json
import os
import re
import subprocess
import sys
import time

from conftest import ROOT

PROGRAM = [sys.executable, str(ROOT / "docs/prometheus.py")]
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


CONFIG = {"event": "config", "version": {"commit": 'a"b\\c\nd'}}
SAVED = {"event": "checkpoint", "step": 2, "folder": "step-2"}
EVENTS = [json.dumps(each) + "\n" for each in (
    CONFIG, step(1), {"event": "alarm", "kind": "loss_spike"}, CONFIG,
    step(2, straggler={"rank": 3, "busy_s": 1, "waited_s": 0}, loss=None, lr=1e999,
         experts={"max_over_mean": 1.5, "entropy": 0.9, "dropped": 0, "dead": 2}),
    SAVED, {"event": "probe", "slow": []}, {"event": "summary"}, {**SAVED, "step": 4, "folder": "step-4"})]
EXPECTED = {r'build_info{commit="a\"b\\c\nd"}': "1", "step": "2", "loss": "NaN", "lr": "+Inf", "straggler_rank": "3",
            "expert_load_ratio": "1.5", "experts_dead": "2", 'memory_peak_bytes{kind="params"}': "8192",
            "comm_seconds_total": "0.5", 'alarms_total{kind="loss_spike"}': "1", 'alarms_total{kind="non_finite"}': "0",
            "restarts_total": "1", "checkpoint_step": "4", 'comm_bytes_total{operation="dp.all_reduce"}': str(2**54)}


def test_file_grows_begins_anew_and_bad_lines(tmp_path):
    metrics, out = tmp_path / "m.jsonl", tmp_path / "m.prom"
    metrics.write_text(9 * EVENTS[1] + EVENTS[4][:99])  # longer than what follows; half a line counts for nothing
    following = subprocess.Popen([*PROGRAM, metrics, out])
    try:
        for size, last in (0, "1"), (5, "2"), (9, "2"):
            if size:
                metrics.write_text("".join(EVENTS[:size]))
            end = time.monotonic() + 60
            while following.poll() is None and not (out.exists() and parsed(out.read_text()).get("step") == last):
                assert time.monotonic() < end, f"no step {last}"
                time.sleep(0.02)
        assert following.wait(60) == 0
    finally:
        following.kill()
    found = parsed(out.read_text())
    assert {name: found.get(name) for name in EXPECTED} == EXPECTED

    def refused(words, end):
        bad = subprocess.run([*PROGRAM, *words], capture_output=True, text=True, timeout=60)
        assert bad.returncode == 2 and re.fullmatch(r"prometheus.py: .+\n", bad.stderr), bad
        assert bad.stderr.endswith(end), bad

    strange = EVENTS[1].replace("9,", '"a",').strip()
    for line in ("{}", "step,loss", '{"event":"step"}', "[" * 9999, "\0\xff", strange, EVENTS[1][:99]):
        metrics.write_text(line + "\n", "latin1")
        refused([metrics, out, "--once"], "m.jsonl: line 1 is not an event of --metrics\n")
        assert parsed(out.read_text()) == found, line
    metrics.write_text(EVENTS[0])
    for words in [tmp_path / "none", out], [metrics, tmp_path / "none/a.prom"], [metrics, metrics]:
        refused(words, "\n")
    fifo, link = tmp_path / "fifo", tmp_path / "link.prom"
    os.mkfifo(fifo)
    link.symlink_to(out)
    (tmp_path / "m.prom.tmp").symlink_to(metrics)
    strange = [[tmp_path, out], [fifo, out, "--once"], [metrics, link], [metrics, fifo], [metrics, tmp_path]]
    for words in strange:
        refused(words, f"{next(each for each in words if each not in (metrics, out))}: is no regular file\n")
    before = metrics.read_text(), fifo.is_fifo(), link.is_symlink(), sorted(tmp_path.iterdir())
    assert subprocess.run([*PROGRAM, metrics, out, "--once"]).returncode == 0 and parsed(out.read_text()) != found
    assert before == (metrics.read_text(), fifo.is_fifo(), link.is_symlink(), sorted(tmp_path.iterdir()))
