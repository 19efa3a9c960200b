#!/usr/bin/env python3
"""The conformance board: runs the cells of cells.json and writes docs/results/conformance.csv and the table of
docs/conformance.md. docs/conformance/run.sh calls it in the environment that it makes.

Run:   python3 docs/conformance/board.py --out out/conformance [--only picotron]
       python3 docs/conformance/board.py --write         # from the cells that have run: conformance.csv and conformance.md
       python3 docs/conformance/board.py --check         # that the page is what the CSV gives; all that the board promises
Watch: one line per cell. A cell that has run is not run again, so that the command can be repeated after an end.
"""
import argparse
import difflib
import importlib.metadata
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import programs  # noqa: E402
import tables  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CSV, PAGE = ROOT / "docs/results/conformance.csv", ROOT / "docs/conformance.md"
RANDOM = ROOT / "docs/results/conformance_random.csv"  # of random_models.py
FRAMEWORKS = ("torch", "transformers", "accelerate", "deepspeed", "torchtitan", "megatron-core", "nanotron", "picotron",
              "ring-flash-attention")
COLUMNS = ("framework", "version", "layout", "ranks", "reference", "worst gradient", "verdict", "cause", "patch", "patched",
           "patched gradient", "thread", "seconds")
VERDICTS = ("agrees", "differs", "stops", "hangs", "not run")
BEGIN, END = "<!-- (counted|written) by board.py --write -->", "<!-- end of what board.py writes -->"
PATCH_LINES = 5
MINUTES = 8  # for a cell


def cells():
    return json.loads((HERE / "cells.json").read_text("utf-8"))


def versions():
    """{framework: version or commit}, as run.sh installs them."""
    lines = [line.split("#")[0].strip() for line in (HERE / "requirements.txt").read_text("utf-8").split("\n")]
    pinned = dict(line.split("==") for line in lines if line)
    commits = [line.split() for line in (HERE / "clones.txt").read_text("utf-8").split("\n") if line and line[0] != "#"]
    return {**pinned, **{name: commit for name, _, commit in commits}}


def check_installed(framework):
    """What runs is what the table will say."""
    pinned = versions()[framework]
    if len(pinned) == 40:
        source = find({"picotron": "picotron", "ring-flash-attention": "ring_flash_attn"}[framework]).parent
        installed = pinned  # an unpacked archive says nothing
        if (source / ".git").exists():
            installed = programs.output(["git", "-C", source, "rev-parse", "HEAD"]).strip()
    else:
        installed = importlib.metadata.version(framework)
    if installed.split("+")[0] != pinned:
        raise SystemExit(f"{framework}: {installed} is installed, not {pinned}")


def find(name):
    """A package or file of the frameworks' installations and clones."""
    for folder in [*os.environ.get("PYTHONPATH", "").split(os.pathsep), *sys.path[1:]]:
        if folder and (pathlib.Path(folder) / name).exists():
            return pathlib.Path(folder) / name
    raise SystemExit(f"{name}: is not installed here")


def overlay(folder, edits):
    """Copies of the packages with the patch's lines, (sed expression, file), for PYTHONPATH."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    changed = 0
    for expression, file in edits:
        top, target = file.split("/")[0], folder / file
        if not (folder / top).exists():
            (shutil.copytree if find(top).is_dir() else shutil.copy)(find(top), folder / top)
        before = target.read_text("utf-8")
        programs.output(["sed", "-i", "-E", expression, target])
        if target.read_text("utf-8") == before:
            raise SystemExit(f"{file}: sed '{expression}' changes nothing")
        marks = [line[0] for line in difflib.ndiff(before.split("\n"), target.read_text("utf-8").split("\n"))]
        changed += max(marks.count("+"), marks.count("-"))
    if changed > PATCH_LINES:
        raise SystemExit(f"{folder}: the patch changes {changed} lines")


def launch(cell, reference, folder, log, patched):
    """The exit code, None if it did not end in time."""
    patch = cell.get("patch", {}) if patched else {}
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1",
                   "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore",
                   **cell.get("environment", {}), **patch.get("environment", {})}
    if patch.get("sed"):
        path = folder.with_suffix(".packages")
        overlay(path, patch["sed"])
        known = environment.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(path), known)))
    options = [*cell.get("options", "").split(), *patch.get("options", "").split()]
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", cell["ranks"],
             HERE / cell["script"], reference, folder, *options]
    with open(log, "w", encoding="utf-8") as file:
        seconds = cell.get("minutes", MINUTES) * 60
        return programs.run(words, seconds, environment, stdout=file, stderr=subprocess.STDOUT)[0]


def compare(folder, reference):
    """(verdict, worst gradient, cause)."""
    code, out, err = programs.run([sys.executable, ROOT / "docs/compare.py", folder, reference, "--diagnose"])
    folder.with_suffix(".compare").write_text(out + err, "utf-8")
    if code == 2:
        return "stops", "", err.strip()
    worst = re.search(r"^gradients at step 1.*\n.*\n +(\S+)", out, re.M)
    named = re.findall(r"^  explains A's numbers to rounding: (.*)$", out, re.M)
    first = re.search(r"^the runs DIFFER:\n +(.*)$", out, re.M)
    return "differs" if code else "agrees", worst[1], named[0] if named else first[1] if first else ""


def short(file):
    """As it is imported."""
    for folder in sorted([*os.environ.get("PYTHONPATH", "").split(os.pathsep), str(ROOT), str(HERE)], key=len, reverse=True):
        file = file.removeprefix(folder + "/") if folder else file
    return re.sub(r".*/(site-packages|[^/]*\.packages)/", "", file)


def where_it_stopped(log, framework=""):
    """file:line: message of the first traceback that is not about a peer's end or of the launcher; the line is the
    framework's last one, and what it called there is in brackets."""
    ranks = {}
    for line in log.read_text("utf-8", errors="replace").split("\n"):
        rank, text = re.match(r"(?:\[(rank\d+)\]: ?)?(.*)", line).groups()
        ranks.setdefault(rank, []).append(text)
    for lines in ranks.values():
        text = "\n".join(lines)
        for trace in re.finditer(r"^Traceback \(most recent call last\):\n((?:[ \t].*\n|\n)+)(\S.*)", text, re.M):
            files = re.findall(r'^ +File "([^"]+)", line (\d+)', trace[1], re.M)
            if files and not re.search(r"Connection closed|Connection reset|ChildFailedError|timed out", trace[2], re.I):
                shown = [(short(file), line) for file, line in files]
                top = framework.replace("-", "_").split("_core")[0] + "/"
                own = [each for each in shown if each[0].startswith(top)] or shown
                inner = "" if own[-1] == shown[-1] else f"({':'.join(shown[-1])}) "
                return f"{':'.join(own[-1])}: {inner}{re.sub(r'/[^ ]*/site-packages/', '', trace[2])[:240]}"
    last = [line for line in ranks.get(None, []) if line.strip()]
    return last[-1] if last else "no output"


def name_of(cell):
    return re.sub(r"[^\w]+", "-", f"{cell['framework']} {cell['layout']} {cell['reference']}").strip("-")


def recorded(cell, out):
    """What has run of a cell; nothing has of one that has changed since."""
    path = out / f"{name_of(cell)}.json"
    found = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return found if found.get("cell") == cell else {"cell": cell}


def run(cell, out, references):
    """Runs it as it is, and with its patch; what has run is in a file."""
    found, reference = recorded(cell, out), references / cell["reference"]
    for which in ("as it is", "patched")[: 1 + ("patch" in cell)]:
        if which in found:
            continue
        folder, begin = out / (name_of(cell) + ("-patched" if which == "patched" else "")), time.time()
        shutil.rmtree(folder, ignore_errors=True)
        code = launch(cell, reference, folder, folder.with_suffix(".log"), which == "patched")
        if code is None:
            verdict = "hangs", "", f"does not end in {cell.get('minutes', MINUTES)} minutes"
        else:
            verdict = compare(folder, reference) if code == 0 else (
                "stops", "", where_it_stopped(folder.with_suffix(".log"), cell["framework"]))
        found[which] = [*verdict, round(time.time() - begin)]
        print(f"{cell['framework']:<22}{cell['layout']:<48}{which:<9}{verdict[0]:<8}{verdict[1]:<9} {verdict[2][:110]}",
              flush=True)
        (out / f"{name_of(cell)}.json").write_text(json.dumps(found, indent=1), "utf-8")
    return found


def patch_text(patch):
    lines = [f"sed -i -E {shlex.quote(expression)} {file}" for expression, file in patch.get("sed", [])]
    lines += [f"{key}={value}" for key, value in patch.get("environment", {}).items()]
    return " ; ".join(lines + ([patch["options"]] if "options" in patch else []))


def rows(out):
    """Of cells.json, with what has run; the others are `not run`."""
    pinned, table, not_run = versions(), [], ["not run", "", "", ""]
    for cell in cells():
        found = recorded(cell, out)
        verdict, gradient, cause, seconds = found.get("as it is", not_run)
        after = found.get("patched", not_run) if "patch" in cell else ["", "", "", ""]
        table.append({
            "framework": cell["framework"], "version": pinned[cell["framework"]], "layout": cell["layout"],
            "ranks": cell["ranks"], "reference": cell["reference"], "worst gradient": gradient, "verdict": verdict,
            "cause": cause, "patch": patch_text(cell.get("patch", {})), "patched": after[0],
            "patched gradient": after[1], "thread": cell.get("thread", ""), "seconds": seconds})
    return table


def counts(table):
    count = {verdict: sum(row["verdict"] == verdict for row in table) for verdict in VERDICTS}
    green = sum(row["patched"] == "agrees" for row in table)
    words = ", ".join(f"{n} {verdict.removesuffix('s')}" for verdict, n in count.items() if n)
    return f"{len(table)} cells: {words}; {green} of those that do not agree do so with a patch."


def markdown(table):
    """What does not agree, its patches, and what agrees; a line for each framework above its rows."""
    def safe(text):
        return re.sub(r"([|*_<])", r"\\\1", str(text))

    def grouped(head, rows, cells):
        lines = []
        for above, row in zip([{"framework": ""}, *rows], rows):
            version = row["version"][:12] if len(row["version"]) == 40 else row["version"]
            if row["framework"] != above["framework"]:
                lines.append([f"**{row['framework']} {version}**"] + [""] * (len(head) - 1))
            layout = safe(row["layout"]) + (f" ([thread]({row['thread']}))" if row["thread"] else "")
            lines.append([f"{layout} ({row['ranks']}, {row['reference']})", *cells(row, above)])
        return tables.markdown(head, lines, "-" * len(head))

    def other(row, above):
        cause = re.sub(r"(?<=\w[.!]) [A-Z].*", "", row["cause"])  # its first sentence; the CSV has the others
        cause = "the same" if row["cause"] == above.get("cause") else cause
        patch = f"{patches.index(row['patch']) + 1}: {row['patched']} {row['patched gradient']}" if row["patch"] else ""
        return f"{row['verdict']} {row['worst gradient']}".strip(), safe(cause), patch

    red, green = ([row for row in table if (row["verdict"] == "agrees") == wanted] for wanted in (False, True))
    patches = list(dict.fromkeys(row["patch"] for row in red if row["patch"]))
    layout = "layout (ranks, reference)"
    lines = grouped([layout, "verdict", "cause", "with the patch"], red, other)
    lines += ["", "The patches:", ""]
    for number, patch in enumerate(patches, 1):
        lines += [f"    # {number}", *(f"    {line}" for line in patch.split(" ; "))]
    lines += ["", "What agrees:", ""]
    lines += grouped([layout, "worst gradient"], green, lambda row, above: [row["worst gradient"]])
    return "\n".join(lines)


def page_with(table):
    return tables.with_parts(PAGE.read_text("utf-8"), BEGIN, END, {"counted": f"{counts(table)}\n",
                                                                   "written": f"\n{markdown(table)}\n\n"})


def faults(table, page, pinned, planned):
    """What the board promises and does not keep, in words."""
    def key(row):
        return row["framework"], row["layout"], row["reference"]

    if page != page_with(table):
        yield "docs/conformance.md: its tables are not what conformance.csv gives: board.py --write"
    if [key(row) for row in table] != [key(cell) for cell in planned]:
        yield "conformance.csv and cells.json do not list the same cells"
    for framework in FRAMEWORKS:
        if not any(row["framework"] == framework for row in table):
            yield f"{framework}: has no row"
        if not re.fullmatch(r"\d+(\.\d+)+(\.post\d+)?|[0-9a-f]{40}", pinned.get(framework, "")):
            yield f"{framework}: its version is not pinned"
    for row in table:
        name = f"{row['framework']}, {row['layout']}"
        if row["verdict"] not in VERDICTS or row["patched"] not in (*VERDICTS, ""):
            yield f"{name}: {row['verdict']}, {row['patched']}: no such verdict"
        if row["version"] != pinned.get(row["framework"]):
            yield f"{name}: ran with {row['version']}, not with what is pinned"
        if row["verdict"] == "differs" and (not row["patch"] or row["patched"] != "agrees"):
            yield f"{name}: differs, without a patch that makes it agree"
        if row["patch"] and row["patched"] != "agrees":
            yield f"{name}: its patch does not make it agree"
        if row["patch"].count(" ; ") >= PATCH_LINES:
            yield f"{name}: its patch has more than {PATCH_LINES} lines"
        if row["verdict"] == "stops" and not re.match(r"\S+\.py:\d+: \S", row["cause"]):
            yield f"{name}: stops, without the line at which"
        if re.search(r"(^|[ (])/\w", row["cause"]):
            yield f"{name}: its cause has a path of the machine that it ran on"
        for verdict, gradient in ((row["verdict"], row["worst gradient"]), (row["patched"], row["patched gradient"])):
            if verdict in ("agrees", "differs") and not re.fullmatch(r"\d[\d.e+-]*", gradient):
                yield f"{name}: a verdict without a gradient"
            elif verdict == "agrees" and not float(gradient) <= 5e-6:
                yield f"{name}: agrees, beyond the tolerance of fp32"
    judged = [row for row in table if row["verdict"] in ("agrees", "differs")]
    if len(judged) < 24 or len({row["framework"] for row in judged}) < 4:
        yield f"{len(judged)} cells with a verdict: 24 of four frameworks are promised"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "out/conformance")
    parser.add_argument("--only", action="append", help="cells whose \"FRAMEWORK: LAYOUT\" has this in it; may be given again")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if args.check:
        found = list(faults(tables.read(CSV), PAGE.read_text("utf-8"), versions(), cells()))
        print("\n".join(found) or "the page is what the CSV gives, and the board keeps what it promises")
        return len(found) > 0
    if args.write:
        if not any(args.out.glob("*.json")):
            parser.error(f"--out {args.out}: has no results of cells")
        table = rows(args.out)
        tables.write(CSV, table, COLUMNS)
        PAGE.write_text(page_with(tables.read(CSV)), "utf-8")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    for cell in cells():
        name = f"{cell['framework']}: {cell['layout']}"
        if any(word in name for word in args.only or [""]):
            check_installed(cell["framework"])
            run(cell, args.out.resolve(), ROOT / "docs/references")
    return 0


if __name__ == "__main__":
    programs.start(main)
