"""Chapter 01's program as its user meets it: exit codes, standard streams, the files of a good run and no others."""
import csv
import json
import os
import re
import subprocess

import pytest

from conftest import ROOT

PROGRAM = "01_single_gpu"
SHAPE = {"--data": "text.txt", "--layers": "1", "--hidden": "32", "--heads": "4", "--kv-heads": "2", "--ffn": "48",
         "--seq-len": "16", "--global-batch": "2", "--steps": "3"}
# In the block two norms of 32, q and o 32 x 32, k and v 16 x 32, three of 48 x 32; a norm of 32; two of 256 x 32.
PARAMETERS = 24160
FILES = "--metrics m.jsonl --trace t.json --memory-timeline t.csv"
KINDS = ["params", "grads", "optimizer", "activations", "comm", "workspace"]


def shape(flags=""):
    """The flags of a tiny run, but for those given."""
    return [f"{name} {value}" for name, value in SHAPE.items() if name not in flags.split()] + [flags]


@pytest.fixture
def text(tmp_path):
    """A text in the folder of the run."""
    (tmp_path / "text.txt").write_text("".join(f"line {i} of a text\n" for i in range(100)))
    return tmp_path / "text.txt"


@pytest.fixture
def sanitized(binaries):
    return "asan" in subprocess.run(["ldd", binaries / PROGRAM], capture_output=True, text=True).stdout


def one_line(done, *parts):
    """Stderr is one line with every part."""
    assert done.err.count("\n") == 1 and done.err.endswith("\n"), f"not one line\n{done}"
    return done.says(*parts)


def left(folder):
    return {path.name for path in folder.iterdir()} - {"text.txt"}


# ---- bad input and what goes wrong; most of what is refused is in refusals_01.cpp ----
@pytest.mark.parametrize("flags, setting, parts", [
    ("--stepz 3", "", ["--stepz", "did you mean --steps?"]),
    *(("", setting, [f"{setting}: must be an integer from 1"])  # what the libraries read before main() begins
      for setting in ("OMP_NUM_THREADS=0", "OMP_NUM_THREADS=abc", "OPENBLAS_NUM_THREADS=1.5"))])
def test_refused(run, text, flags, setting, parts):
    environment = dict([setting.split("=")]) if setting else {}
    one_line(run.refused(PROGRAM, *shape(f"{flags} {FILES}"), env=environment, says=parts))


def test_refused_device(run, text):
    if run(PROGRAM, *shape("--device cuda --steps 0"), code=None).code == 0:
        pytest.skip("--device cuda works on this machine")
    one_line(run.refused(PROGRAM, *shape(f"--device cuda {FILES}"), says=["--device cuda", "try --device cpu"]))


def test_refused_run_leaves_an_older_file(run, text):
    (text.parent / "m.jsonl").write_text("kept\n")
    one_line(run(PROGRAM, *shape("--metrics m.jsonl --trace nowhere/t.json"), code=2), "--trace")
    assert (text.parent / "m.jsonl").read_text() == "kept\n"


def test_loss_that_is_not_finite(run, text):
    """Names step and parameter; the steps before it are on record."""
    done = run(PROGRAM, *shape(f"--lr 1e30 --warmup-steps 0 --clip 0 {FILES}"), code=1)
    one_line(done, "step 2: loss", " model.", "--lr")
    assert left(text.parent) == {"m.jsonl", "t.csv", "t.json"} and len(done.events()) == 1, done
    names = [event["name"] for event in json.loads((text.parent / "t.json").read_text())["traceEvents"]]
    assert names.count("update") == 2 and ",update," in (text.parent / "t.csv").read_text()


def test_skipped_steps_are_reported(run, text):
    """Forty characters of noise in a text that is learnt by heart; the line of the step, the event, the summary."""
    text.write_text("ab cd ef " * 300 + "QZXJVKWY01" * 4 + "ab cd ef " * 300)
    flags = "--lr 0.01 --steps 220 --global-batch 4 --metrics m.jsonl --skip-step on"
    done = run(PROGRAM, *shape(flags))
    skipped = [event["step"] for event in done.events() if event["skipped"]]
    assert skipped and min(skipped) > 64 and len(skipped) < 10, skipped
    assert [int(step) for step in re.findall(r"step +(\d+)/220 .*  skipped$", done.out, re.M)] == skipped, done
    assert done.events("summary")[0]["skipped"] == len(skipped)


def test_memory_limit(run, text, binaries, sanitized):
    """ulimit -v too low: before main(), and for the first product; then what the message suggests."""
    if sanitized:
        pytest.skip("OpenBLAS retries for ever to map its buffers")

    def limited(kib, *flags, code):
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        return run("prlimit", f"--as={1024 * kib} --cpu=20", binaries / PROGRAM, *flags, code=code, env=threads)

    least = 150_000  # in which the program itself has room, with CUDA's libraries if it is linked with them
    while limited(least, "--version", code=None).code == 127:
        least += 20_000
    for limit in (least, least + 140_000):
        done = limited(limit, *shape("--metrics m.jsonl"), code=2)
        one_line(done, f"ulimit -v {limit}: leaves no room", "try ulimit -v ")
        assert not left(text.parent)
    assert not limited(int(re.search(r"try ulimit -v (\d+)", done.err)[1]), *shape(), code=0).err


def test_output_that_cannot_be_written(run, text, binaries):
    one_line(run("prlimit", "--fsize=8192", binaries / PROGRAM, *shape("--save-hf d"), code=1),
             "--save-hf d", "File too large")
    assert not left(text.parent)
    done = run("prlimit", "--fsize=3072", binaries / PROGRAM, *shape(FILES))  # the results are right: exit code 0
    for flag in re.findall("--[a-z-]+", FILES):
        assert done.err.count(f"{PROGRAM}: {flag} ") == 1, done
    assert len(json.loads((text.parent / "t.json").read_text())["traceEvents"]) > 1
    assert (text.parent / "m.jsonl").read_text().endswith("}\n")


def test_loaded_model(run, text):
    """What is said about a loaded model, and what its files must have."""
    here = text.parent
    run(PROGRAM, *shape("--vocab 300 --experts 4 --steps 0 --dtype bf16 --save-hf hf"))
    (here / "hf/tokenizer.json").write_text("{}")
    config = json.loads((here / "hf/config.json").read_text())
    assert config["max_position_embeddings"] == 16 and config["router_aux_loss_coef"] == 0.01

    def load(flags, code=0, **keys):
        (here / "hf/config.json").write_text(json.dumps({**config, **keys}))
        return run(PROGRAM, f"--load-hf hf --data text.txt --global-batch 2 --seq-len 24 --steps {flags}", code=code)

    for flags in "1", "0 --generate 9":
        one_line(load(flags, code=2), "--data text.txt: is text", "the vocabulary of --load-hf hf has 300",
                 "docs/convert_tokens.py", "--hf-ignore vocab_size")
    done = load("1 --hf-ignore vocab_size --save-hf out", sliding_window=24)
    done.says("--lr 0.003 is the default, for new weights", "weights of hf in bf16: trained and saved in fp32",
              "--aux-loss 0.01, the router_aux_loss_coef of hf/config.json", where="out")
    saved = json.loads((here / "out/config.json").read_text())
    assert saved == {**config, "torch_dtype": "float32", "max_position_embeddings": 24, "sliding_window": 24}
    assert (here / "out/tokenizer.json").read_text() == "{}"
    flags = "1 --hf-ignore vocab_size --metrics m.jsonl --lr 1e-4 --dtype bf16"
    done = load(flags, router_aux_loss_coef=None)
    assert "--lr 0.0001 is" not in done.out and "weights of hf" not in done.out, done
    assert done.says("--aux-loss 0, ", where="out").events(kind="config")[0]["flags"]["aux-loss"] == "0"
    done = load(flags + " --aux-loss 0.5", router_aux_loss_coef=0.25)
    assert "--aux-loss" not in done.out and done.events(kind="config")[0]["flags"]["aux-loss"] == "0.5", done
    assert load(flags, sliding_window=23).events(kind="config")[0]["model"]["window"] == 23


def test_document_token_that_never_occurs(run, text):
    never, newline = (run(PROGRAM, *shape(f"--steps 0 --document-token {token}")).out for token in (1, 10))
    assert f"text.txt: --document-token 1 is not among the first {text.stat().st_size} tokens" in never, never
    assert "data: " in newline and "is not among" not in newline, newline


def test_error_begins_a_line_of_a_terminal(run, text, binaries):
    """Where the last progress line is still open."""
    job, flags = text.parent / "job", " ".join(shape("--steps 200 --metrics m.jsonl"))
    job.write_text(f"#!/bin/sh\nprlimit --fsize=30720 '{binaries / PROGRAM}' {flags}")
    job.chmod(0o755)
    lines = run("script", "-qec ./job /dev/null", code=None).out.split("\n")
    assert any("m.jsonl: write failed" in line and "eta" not in line for line in lines), lines
    assert not any("eta" in line and "write failed" in line for line in lines), lines


# ---- outputs that are no regular file ----
def test_link_is_followed(run, text):
    (text.parent / "link.json").symlink_to("soft.json")
    run(PROGRAM, *shape("--trace link.json"))
    assert (text.parent / "link.json").is_symlink() and json.loads((text.parent / "soft.json").read_text())


def test_device_stays_one(run, text):
    null = text.parent / "null"
    try:
        os.mknod(null, 0o20666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("may not make a device")
    run(PROGRAM, *shape("--trace null --memory-timeline null --metrics null"))
    assert null.is_char_device()


# ---- good runs ----
def shard():
    """One of llm.c: 256 int32 (magic, version, tokens), then uint16 tokens."""
    return b"".join(number.to_bytes(4, "little") for number in (20240520, 1, 200)) + bytes(4 * 253 + 2 * 200)


# flags, bytes per parameter of params, grads and optimizer
GOOD = {"": (4, 4, 8), "--dtype fp64": (8, 8, 16), "--dtype bf16": (2, 4, 12),
        "--dtype bf16 --grad-dtype bf16 --eval-every 2": (2, 2, 12),
        "--micro-batch 1 --recompute full --dtype fp64 --grad-dtype fp64 --device auto": (8, 8, 16),
        "--steps 0": (4, 4, 8), "--data good.bin": (4, 4, 8)}


@pytest.mark.parametrize("flags", GOOD)
def test_good_run(run, text, flags):
    """Silence on stderr, three files, and all that they hold."""
    (text.parent / "good.bin").write_bytes(shard())
    done = run(PROGRAM, *shape(f"{flags} {FILES}"))
    assert not done.err and left(text.parent) == {"m.jsonl", "t.json", "t.csv", "good.bin"}, done
    steps = check_metrics(done, GOOD[flags])
    assert len(steps) == (0 if flags == "--steps 0" else 3)
    assert [event["step"] for event in done.events("eval")] == ([2, 3] if "eval" in flags else [])
    assert all(4 < event["loss"] < 7 for event in done.events("eval"))
    check_trace(text.parent / "t.json", len(steps), 2 if "micro" in flags else 1)
    highest = check_timeline(text.parent / "t.csv")
    assert not steps or [highest] == done.events("summary")[0]["memory_per_rank"]


def check_metrics(done, sizes):
    lines = list(map(json.loads, (done.folder / "m.jsonl").read_text().splitlines()))
    config, summary, steps = lines[0], lines[-1], done.events()
    assert config["event"] == "config" and config["model"]["parameters"] == PARAMETERS
    assert re.fullmatch(r"[\w./+-]+", config["version"]["commit"])
    assert config["flags"]["layers"] == "1" and config["flags"]["lr-schedule"] == "cosine"
    assert config["flags"]["grad-dtype"] == {2: "bf16", 4: "fp32", 8: "fp64"}[sizes[1]]
    assert summary["event"] == "summary" and summary["steps"] == len(steps) and (steps or summary["loss"] is None)
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    assert [step["lr"] for step in steps] == [0.003 * step["step"] / 20 for step in steps]
    assert [list(memory) for memory in summary["memory_per_rank"]] == [KINDS + ["total"]]
    for step in steps:
        check_step(step, sizes, summary["memory_per_rank"][0])
    digits = 17 if config["flags"]["dtype"] == "fp64" else 9
    for event in lines:
        for key in ("loss", "grad_norm", "param_norm"):
            number = event.get(key) or 0.0
            assert number == float(f"{number:.{digits}g}"), (key, number)
    return steps


def check_step(step, sizes, highest):
    assert list(step) == ["event", "step", "loss", "grad_norm", "lr", "param_norm", "tokens_per_s", "mfu", "step_s",
                          "comm_s", "data_s", "memory", "comm_bytes"]
    memory, peak = step["memory"], step["memory"]["peak"]
    assert list(memory) == KINDS + ["peak"] and list(peak) == KINDS + ["total"]
    assert all(highest[kind] >= peak[kind] for kind in peak) and all(peak[kind] >= memory[kind] >= 0 for kind in KINDS)
    assert sum(memory[kind] for kind in KINDS) <= peak["total"] <= sum(peak[kind] for kind in KINDS)
    assert tuple(memory[kind] for kind in KINDS[:3]) == tuple(size * PARAMETERS for size in sizes), memory
    assert memory["activations"] == 0 and peak["activations"] > 0 and memory["comm"] == 0
    assert step["mfu"] is None and step["comm_bytes"] == {} and step["comm_s"] == 0
    assert 0 < step["data_s"] < step["step_s"] and abs(step["tokens_per_s"] * step["step_s"] / 32 - 1) < 1e-6
    assert 4 < step["loss"] < 7 and step["grad_norm"] > 0 and step["param_norm"] > 0


def check_trace(path, steps, micro_batches):
    events = json.loads(path.read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == ["rank 0"]
    events = [event for event in events if event["ph"] != "M"]
    assert all(event["ph"] == "X" and event["dur"] >= 0 and event["pid"] == 0 for event in events)
    for name, per_step in ("forward", micro_batches), ("backward", micro_batches), ("update", 1):
        assert sum(event["name"] == name and event["cat"] == "phase" for event in events) == per_step * steps, name


def check_timeline(path):
    """The highest of each column."""
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert list(rows[0]) == ["event", "seconds", "phase"] + KINDS + ["total"]
    assert all(int(row["total"]) == sum(int(row[kind]) for kind in KINDS) for row in rows)
    assert [int(row["event"]) for row in rows] == list(range(len(rows)))
    assert all(float(a["seconds"]) <= float(b["seconds"]) for a, b in zip(rows, rows[1:]))
    return {kind: max(int(row[kind]) for row in rows) for kind in KINDS + ["total"]}


def test_help_and_version(run):
    done = run(PROGRAM, "--help").says("--model ", "--kv-heads ", "--data ", "--lr-schedule ", "--recompute ",
                                       "--memory-timeline ", "--generate ", where="out")
    assert not done.err and not left(run.folder), done
    assert not run(PROGRAM, "--steps 0").err and not left(run.folder)  # the repository's own text, from any folder
    commit = run(PROGRAM, "--steps 0 --metrics m.jsonl").events("config")[0]["version"]["commit"]
    for program in (PROGRAM, "compare"):
        done = run(program, "--version")
        assert done.out == f"{program}: commit {commit}\n" and not done.err, done


def test_generate_repeats_itself(run, text):
    first, second = (run(PROGRAM, *shape("--generate 30")).out.splitlines()[-5:] for _ in range(2))
    assert first == second and not left(text.parent)


# ---- the commit of the build; the kernels ----
def test_version_of_a_build(run):
    """Of a folder without git, of a commit, of changed files, inside another repository."""
    output, folder = run.folder / "version.cpp", run.folder / "repository"
    (folder / "inner").mkdir(parents=True)

    def version(source):
        run("cmake", f"-DSOURCE={source} -DOUTPUT={output} -P", ROOT / "01_single_gpu/core/version.cmake")
        return re.search('return "(.*)"', output.read_text())[1]

    def git(*words):
        return subprocess.run(["git", "-C", folder, "-c", "user.name=x", "-c", "user.email=x", *words], check=True,
                              capture_output=True, text=True).stdout.strip()

    assert version(folder) == "unknown"
    (folder / "file").write_text("1")
    git("init"), git("add", "file"), git("commit", "-m", "x")
    commit = git("describe", "--always", "--abbrev=12")
    assert version(folder) == commit
    os.utime(output, (0, 0))
    assert version(folder) == commit and output.stat().st_mtime == 0  # unchanged: nothing to compile
    (folder / "file").write_text("2")
    assert version(folder) == f"{commit}-dirty"
    assert version(folder / "inner") == "unknown"


def test_kernels_fit_the_cpu(run, sanitized):
    """OpenBLAS takes it for an older one and says Prescott, until the environment chooses."""
    if sanitized or " avx2 " not in open("/proc/cpuinfo").read():
        pytest.skip("a program with the address sanitizer, or a CPU without AVX2")
    (run.folder / "core.c").write_text("""#include <stdlib.h>
const char* openblas_get_corename(void) {
    return getenv("OPENBLAS_CORETYPE") ? getenv("OPENBLAS_CORETYPE") : "Prescott";
}
""")
    run("g++", "-x c -shared -fPIC core.c -o core.so")
    preload = {"LD_PRELOAD": str(run.folder / "core.so")}
    first = run(PROGRAM, "--steps 0 --dtype fp64", env=preload).out.splitlines()[0]
    assert "(OpenBLAS Haswell kernels" in first, first
    nehalem = {**preload, "OPENBLAS_CORETYPE": "Nehalem"}
    first = run(PROGRAM, "--steps 0 --dtype fp64", env=nehalem).out.splitlines()[0]
    assert "(OpenBLAS Nehalem kernels" in first, first
