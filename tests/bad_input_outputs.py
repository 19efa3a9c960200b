"""Bad input: output paths, streams that close, disks that are full or read-only."""
import copy
import json
import os
import shutil
import subprocess
import tempfile

from bad_input_common import FIRST, PROGRAMS, after, flags_of, odd_files, shown

# ---- output paths --------------------------------------------------------------------------------------------------
def cluster_files():
    """(bytes, what is wrong) of files that are no cluster."""
    good = {"name": "x", "device": {"name": "H100"}, "nodes": 2, "gpus_per_node": 8,
            "nvlink": {"bytes_per_s": 1e11, "seconds": 0}, "rail": {"bytes_per_s": 1e10, "seconds": 0}}
    for content, name in ((b"", "empty"), (b"[]", "a list"), (b"{}", "an object"), (b"[" * 100000, "nested"),
                          (b'{"name": "x", "device": {"name": "\x1b"}}', "ESC"), (b'{"nodes": 1e999}', "infinite"),
                          (b'{"name": "x", "name": "x"}', "a key twice")):
        yield content, name
    for path, values in (
            ("name", ("", 7, None)), ("device", (7, [], {}, "H1000", {"name": "mine"}, None)),
            ("nodes", (0, -1, 1.5, "2", 10**12, None)), ("gpus_per_node", (0, True, 10**6, None)),
            ("nvlink", (7, {}, [1])), ("rail", (None, {"bytes_per_s": 1})), ("nvls", (1, "true")),
            ("rails", (0, 1e9)), ("oversubscription", (0.5, -1)), ("cores", (0,)), ("links", ([],)),
            ("rail.bytes_per_s", (0, -1, "1", None)), ("rail.seconds", (-1, 2, [])), ("rail.speed", (1,)),
            ("host", ({"bytes_per_s": 0, "seconds": 1},)), ("device.peak_bf16", (0, "1")),
            ("device.product_efficiency", (0, 1.5)), ("device.attention", ([], 7, [[1, 2]], [[2, 1, 1], [1, 1, 1]])),
            ("device.pointwise_traffic", (7, [], {"add": 2}, {"add": [0, 1]}, {"add": [1, 0]}, {"matmul": [2, 1]})),
            ("device.streams", (0,)), ("device.launch_s", (-1,)), ("device.peak", (1,))):
        for value in values:
            bad = copy.deepcopy(good)
            *folders, key = path.split(".")
            inner = bad[folders[0]] if folders else bad
            inner[key] = value
            if value is None:
                del inner[key]
            yield json.dumps(bad).encode(), f"{path} {'missing' if value is None else json.dumps(value)}"


def simulate_cases(add):
    """--simulate and its files."""
    good = json.dumps({"name": "two", "device": "H100", "nodes": 1, "gpus_per_node": 2,
                       "nvlink": {"bytes_per_s": 1e11, "seconds": 0}})
    table = "op,calls,ms,floor_ms,share,gflops,gbytes_per_s\n"
    for name, world, flags, expected in (
            ("fewer devices", 4, "", ["--simulate c.json", "2 devices"]),
            ("no simulated ranks", 0, "", "--simulate"),
            ("--device-csv alone", -2, "--device-csv o.csv", "--device-csv"),
            ("--simulate-slow alone", -2, "--simulate-slow 0:2", "--simulate-slow"),
            ("--simulate-slow-network alone", -2, "--simulate-slow-network 0:2", "--simulate-slow-network"),
            *((f"--simulate-slow-network {value}", 2, f"--simulate-slow-network {value}", "--simulate-slow-network")
              for value in ("x", "1:2", "-1:2", "0:0", "0:nan", "0:2,0:3")),
            ("--simulate-jitter alone", -2, "--simulate-jitter 0.1", "--simulate-jitter"),
            ("no such table", 2, "--device-csv nowhere", "--device-csv nowhere"),
            ("no table", 2, "--device-csv text.txt", "--device-csv text.txt"),
            ("a table without ops", 2, "--device-csv o.csv", "--device-csv o.csv"),
            ("the trace over the cluster", 2, "--trace c.json", ["--trace", "--simulate"]),
            *((f"--simulate-slow {value}", 2, f"--simulate-slow {value}", "--simulate-slow")
              for value in ("x", "0", "0:", ":2", "2:2", "-1:2", "0:0", "0:-1", "0:nan", "0:2,0:3", "0:2x", "0:2;1:2",
                            "0:1e999", "99999999999999999999:2"))):
        fake = ["--comm", "fake", "--fake-world", str(abs(world))] if world else []
        add("--simulate", name, "08_3d_full", fake + (["--simulate", "c.json"] if world >= 0 else []) + flags.split(),
            expected, after(lambda f: (f / "c.json").write_text(good), lambda f: (f / "o.csv").write_text(table)))
    add("--simulate", "FP8 on a device without", "08_3d_full",
        ["--comm", "fake", "--fake-world", "2", "--dtype", "bf16", "--fp8", "current", "--simulate", "c.json"],
        ["--fp8 current", "A100"], after(lambda f: (f / "c.json").write_text(good.replace("H100", "A100"))))
    for content, name in cluster_files():
        add("--simulate", name, "08_3d_full", ["--comm", "fake", "--fake-world", "2", "--simulate", "c.json"],
            "--simulate c.json", after(lambda f, content=content: (f / "c.json").write_bytes(content)))


def output_cases(add, base, binaries):
    def copies(folder):
        shutil.copytree(base, folder / "hf")
    files = [flag for flag, kind in flags_of(binaries, FIRST).items() if kind.startswith("FILE")]
    for flag in files:
        bench = ["--steps", "1"]
        without = ("--metrics", "--trace") if flag == "--bench-csv" else ()
        for path, expected in (("text.txt", "--data"), ("./text.txt", "--data"), ("hard.txt", "--data"),
                ("soft.txt", "--data"), ("folder", "folder"), ("folder/", "folder"), ("fifo", "FIFO"),
                ("loop", "loop"),
                               ("nowhere/x", "nowhere"), ("text.txt/x", "text.txt"), ("", "empty"), ("x/", "x/"),
                               ("n" * 256, "n")) + \
                ((("n" * 253, "n"),) if flag != "--metrics" else ()):
            add("output paths", f"{flag} {shown(path)}", FIRST, bench + [flag, path], [flag, expected],
                without=without,
                setup=after(odd_files, lambda f: os.link(f / "text.txt", f / "hard.txt"),
                    lambda f: (f / "soft.txt").symlink_to("text.txt")))
        add("output paths", f"{flag} over weights", FIRST, ["--load-hf", "hf", flag, "hf/model.safetensors"],
            [flag, "--load-hf"], after(copies))
        add("output paths", f"{flag} over config.json", FIRST, ["--load-hf", "hf", flag, "hf/config.json"],
            [flag, "--load-hf"], after(copies))
        for other in files + ["--save-hf", "--save-reference"]:
            if "--bench-csv" in (flag, other):
                continue  # alone, as --bench does not train
            if other > flag and not other.startswith("--save"):
                add("output paths", f"{flag} and {other}, one name", FIRST, [flag, "x", other, "./x"], [flag, other])
            elif other.startswith("--save"):
                add("output paths", f"{flag} in {other}", FIRST, [flag, "d/config.json", other, "d"], [flag, other],
                    after(lambda f: (f / "d").mkdir()))
        add("output paths", f"{flag} on a socket", FIRST, [flag, "socket"], [flag, "socket"],
            after(lambda f: os.mknod(f / "socket", 0o140644)))
        add("output paths", f"{flag} in a Latin-1 folder", FIRST, [flag, b"caf\xe9/x"], flag, without=without)
        add("output paths", f"{flag} in a folder with ESC", FIRST, [flag, "\x1b[31m\n/x"], flag, without=without)
        if os.geteuid() == 0:
            add("output paths", f"{flag} on a block device", FIRST, [flag, "block"], [flag, "block"],
                after(lambda f: os.mknod(f / "block", 0o060644, os.makedev(7, 250))))
    for flag, names in (("--save-hf", ["config.json", "model.safetensors", "model.safetensors.index.json"]),
                        ("--save-reference", ["config.json", "initial.safetensors", "gradients.safetensors",
                            "after_step_1.safetensors", "reference.json"])):
        for path, expected in (("text.txt", flag), ("fifo", flag), ("loop", flag), ("", "empty"),
                ("text.txt/d", flag), ("n" * 256, flag), ("d/" + "n" * 256, flag)):
            add("output paths", f"{flag} {shown(path)}", FIRST, [flag, path], [flag, expected], after(odd_files))
        for name in names:
            for what, make in (("folder", lambda p: p.mkdir()), ("FIFO", os.mkfifo),
                    ("loop", lambda p: p.symlink_to(p.name))):
                add("output paths", f"{flag} with a {what} {name}", FIRST, [flag, "d"], [flag, name],
                    after(lambda f: (f / "d").mkdir(), lambda f, name=name, make=make: make(f / "d" / name)))
        add("output paths", f"{flag} over --load-hf", FIRST, ["--load-hf", "hf", flag, "hf"], [flag, "--load-hf"],
            after(copies))
        add("output paths", f"{flag} in a deleted folder", FIRST, [flag, "d"], "--", deleted=True)
        add("output paths", f"{flag} in /proc", FIRST, [flag, "/proc/d"], flag)
    add("output paths", "--save-hf and --save-reference, one folder", FIRST,
        ["--save-hf", "d", "--save-reference", "d"], ["--save-hf", "--save-reference"])
    for program, flag in (("02_data_parallel", "--all-reduce-csv"), ("02_data_parallel", "--modes-csv"),
                          ("04_tensor_parallel", "--efficiency-csv"), ("05_pipeline", "--pipeline-trace"),
                          ("05_pipeline", "--draw")):
        for path in ("folder", "fifo", "loop", "nowhere/x", "text.txt"):
            add("output paths", f"{program} {flag} {path}", program, ["--tables", "on", flag, path], flag,
                after(odd_files), ranks=2)
    for content, name in cluster_files():
        add("--links", name, "04_tensor_parallel", ["--tables", "on", "--links", "links.json"],
            ["--links", "links.json"],
            after(lambda f, content=content: (f / "links.json").write_bytes(content)))
    for name, step in (("a folder", lambda f: (f / "links.json").mkdir()),
            ("a FIFO", lambda f: os.mkfifo(f / "links.json")),
            ("a loop", lambda f: (f / "links.json").symlink_to("links.json")), ("nothing", lambda f: None)):
        add("--links", name, "04_tensor_parallel", ["--tables", "on", "--links", "links.json"],
            ["--links", "links.json"], after(step))
        add("--links", name, "04_tensor_parallel", ["--tables", "on", "--links", "links.json"],
            ["--links", "links.json"], after(step), ranks=2)


# ---- streams, full disks, read-only folders ------------------------------------------------------------------------
def stream_cases(add, binaries):
    for program in PROGRAMS + ["compare"]:
        if os.path.exists("/dev/full"):
            add("streams", f"{program} --help >/dev/full", program, None, "standard output", None, code=1,
                streams=">/dev/full", words=["--help"])
        add("streams", f"{program}: no stderr", program, None, [], None, lines=0, streams="2>&-", words=["--stepz"])
        add("streams", f"{program}: neither stream", program, None, [], None, lines=0, streams=">&- 2>&-",
            words=["--stepz"])
        add("streams", f"{program}: no stdin", program, None, ["--stepz"], None, streams="<&-",
            words=(["a", "b"] if program == "compare" else []) + ["--stepz"])
    add("streams", "a run >/dev/full", FIRST, [], "standard output", code=1, streams=">/dev/full",
        left=("m.jsonl", "t.json"))
    add("streams", "a run >&-: progress is not mixed into the metrics", FIRST, [], "--trace", code=2, streams=">&-",
        words=None, trace="nowhere/t.json")
    for flag in ("--metrics", "--trace", "--memory-timeline"):
        add("streams", f"{flag} /dev/full", FIRST, [flag, "/dev/full"], [flag, "/dev/full"], code=1,
            left=("m.jsonl", "t.json", "t.csv"))


def environment_cases(add):
    """What OpenMP and OpenBLAS read before the program begins."""
    for program in (FIRST, "08_3d_full", "schedule", "plan"):
        for value in ("0", "abc", "1.5", "-1", "", "99999999999"):
            add("environment", f"OMP_NUM_THREADS={shown(value)} {program}", program, [], "OMP_NUM_THREADS",
                environment={"OMP_NUM_THREADS": value})
    for program in (FIRST, "08_3d_full"):
        for value in ("0", "abc", "1.5", "-1", "1x", " 1", "1025"):
            add("environment", f"OPENBLAS_NUM_THREADS={value} {program}", program, [], "OPENBLAS_NUM_THREADS",
                environment={"OPENBLAS_NUM_THREADS": value})


def disk_cases(add):
    """A tmpfs of 128 KiB; the model's files do not fit. Or one that is read only."""
    def disk(folder):
        (folder / "disk").mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", folder / "disk"], check=True)

    def fill(folder):
        disk(folder)
        try:
            (folder / "disk/fill").write_bytes(b"x" * (1 << 20))
        except OSError:
            pass

    def read_only(folder):
        disk(folder)
        (folder / "disk/d").mkdir()
        (folder / "disk/old").write_text("old")
    for path in ("disk/x", "disk/old", "disk/new/x"):
        for flag in ("--metrics", "--trace", "--memory-timeline", "--bench-csv"):
            add("full and read-only disks", f"{flag} {path}, read only", FIRST, [flag, path], [flag, path],
                after(read_only), mount="ro",
                without=("--metrics", "--trace") if flag == "--bench-csv" else ())
    for flag in ("--save-hf", "--save-reference"):
        for path in ("disk", "disk/d", "disk/new", "disk/new/er"):
            add("full and read-only disks", f"{flag} {path}, read only", FIRST, [flag, path], [flag, path],
                after(read_only), mount="ro")
        add("full and read-only disks", f"{flag}, too small a disk", FIRST, [flag, "disk/d"], [flag], after(disk),
            mount="rw", code=1,
            left=("m.jsonl", "t.json"), without=("--hidden",), more=["--hidden", "128"])
        add("full and read-only disks", f"{flag}, a full disk", FIRST, [flag, "disk/d"], [flag], after(fill),
            mount="rw", code=1, left=("m.jsonl", "t.json"))
    add("full and read-only disks", "two ranks, read only", "02_data_parallel", ["--metrics", "disk/m"],
        ["--metrics", "disk/m"], after(read_only), mount="ro", ranks=2)
    add("full and read-only disks", "two ranks, --save-hf, read only", "08_3d_full", ["--save-hf", "disk/d"],
        ["--save-hf"], after(read_only), mount="ro", ranks=2)
    for flag in ("--trace", "--memory-timeline"):
        add("full and read-only disks", f"{flag}, a full disk", FIRST, [flag, "disk/x"], [flag], after(fill),
            mount="rw", code=1, left=("m.jsonl", "t.json"))
    add("full and read-only disks", "--metrics ends with a whole line", FIRST,
        ["--metrics", "disk/m.jsonl", "--steps", "1000"], ["--metrics"], after(disk), mount="rw", code=1,
        left=("disk/m.jsonl",), whole_lines="disk/m.jsonl")


def can_mount():
    with tempfile.TemporaryDirectory() as folder:
        if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True, check=False).returncode != 0:
            return False
        return subprocess.run(["umount", folder], capture_output=True, check=False).returncode == 0
