"""Wrong files, folders, outputs and values of flags, each given to a program that starts in a folder of its own.

Only it catches: an exit code that is not 2, a second line, control characters, a file that is touched or left behind,
a process that hangs or takes a GiB, streams and disks that are closed or full, odd values of every flag of --help.
Readers' own tests and fuzz/ have more wrong files, refusals*.cpp flags that do not fit together, damaged checkpoints.
"""
import dataclasses
import json
import os
import re
import resource
import shutil
import stat
import struct
import subprocess

import pytest

from conftest import Process, in_turn

FIRST, LAST = "01_single_gpu", "08_3d_full"
PROGRAMS = [FIRST, "02_data_parallel", "03_zero", "04_tensor_parallel", "05_pipeline", "06_context_parallel", "07_fp8",
            LAST, "plan", "compare"]
# A small model, and a run that ends soon where bad input is accepted by mistake. Flags of a case replace these.
SHAPE = {"--layers": "2", "--hidden": "32", "--heads": "4", "--kv-heads": "2", "--ffn": "48"}
RUN = {"--data": "text.txt", "--seq-len": "16", "--global-batch": "2", "--steps": "1", "--metrics": "m.jsonl",
       "--trace": "t.json", "--val-fraction": "0"}
PLAN = {"--cluster": "my.json", "--model": "125m", "--gpus": "8", "--seq-len": "512", "--global-batch": "16",
        "--simulations": "1"}
NODE = {"name": "a node", "device": "H100", "nodes": 1, "gpus_per_node": 8,
        "nvlink": {"name": "NVLink", "bytes_per_s": 3.6e11, "seconds": 1e-6}}
TEXT = "".join(f"line {i} of a text\n" for i in range(100))
FAKE = "--comm fake --fake-world 2 "
LONGEST_LINE = 2000    # bytes
MOST_MEMORY = 1 << 20  # KiB, of a process that refuses its input
LIMIT = 20             # seconds


@dataclasses.dataclass
class Case:
    program: str
    flags: object     # a text, which blanks separate, or a list of words
    says: object      # what the line contains: a text, or several; None: there is no line
    files: dict = dataclasses.field(default_factory=dict)  # name: bytes, a text, or what is called with the path
    ranks: int = 1    # more than 1: under mpirun
    code: int = 2
    shell: str = ""   # bash runs this, with the command as "$@"
    env: dict = dataclasses.field(default_factory=dict)
    left: tuple = ()  # files that a run that began may leave
    disk: str = ""    # options of a tmpfs at the folder "disk"

    def words(self):
        given = self.flags.split() if isinstance(self.flags, str) else self.flags
        plan = {} if "--tp-efficiency" in given else PLAN
        defaults = {"plan": plan, "compare": {}, "schedule": {}}.get(self.program)
        if defaults is None:
            defaults = {**({} if "--load-hf" in given else SHAPE), **RUN}
            defaults.update({} if self.program in (FIRST, LAST) else {"--tables": "off"})
        taken = {word.split("=")[0] for word in given}
        if any(word.startswith("--bench") for word in given):  # which does not train
            taken |= {"--metrics", "--trace"}
        return [word for flag, value in defaults.items() if flag not in taken for word in (flag, value)] + list(given)

    def __str__(self):
        words = [self.flags] if isinstance(self.flags, str) else self.flags
        own = [os.fsdecode(name) for name in self.files if name not in ODD]
        return ascii(" ".join([self.program, *words, *own]))[1:-1][:120]


# ---- files ----------------------------------------------------------------------------------------------------------
def instead(make):
    def put(path):
        path.unlink(missing_ok=True)
        make(path)
    return put


def link(target):
    return instead(lambda path: path.symlink_to(target))


FOLDER, FIFO, GONE = instead(os.mkdir), instead(os.mkfifo), instead(lambda path: None)
LOOP = instead(lambda path: path.symlink_to(path.name))
SOCKET = instead(lambda path: os.mknod(path, stat.S_IFSOCK | 0o644))
ODD = {"folder": FOLDER, "fifo": FIFO, "loop": LOOP, "socket": SOCKET}


def changed(change):
    """The file with other content: change(its bytes)."""
    return lambda path: path.write_bytes(change(path.read_bytes()))


def cut(length):
    return changed(lambda content: content[:length])


def with_keys(found, values):
    return {key: value for key, value in {**found, **values}.items() if value is not GONE}


def keys(**values):
    """A JSON object with other values; GONE: without the key."""
    return changed(lambda content: json.dumps(with_keys(json.loads(content), values)).encode())


def make(case, folder, good):
    """The text, what the case copies of the good folders, and its own files."""
    copies = {"a": "reference", "b": "reference"} if case.program == "compare" else {"hf": "hf"}
    for name, source in copies.items():
        if name in case.words():
            shutil.copytree(good / source, folder / name)
    if case.disk:
        (folder / "disk").mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", folder / "disk"], check=True)
    for name, content in {"text.txt": TEXT, "my.json": json.dumps(NODE), **case.files}.items():
        path = folder / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if callable(content):
            content(path)
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if case.disk:
        subprocess.run(["mount", "-o", "remount," + case.disk, folder / "disk"], check=True)


@pytest.fixture(scope="module")
def good(module_run):
    """A folder with a Hugging Face folder and a reference run."""
    (module_run.folder / "text.txt").write_text(TEXT)
    for flags in ("--save-hf hf --steps 0", "--save-reference reference --steps 2"):
        module_run(FIRST, *Case(FIRST, flags, "").words())
    return module_run.folder


# ---- right is -------------------------------------------------------------------------------------------------------
def snapshot(folder):
    """{path: (mode, content or target)} of everything in the folder."""
    found = {}
    for at, folders, files in os.walk(folder):
        for path in (os.path.join(at, name) for name in folders + files):
            mode = os.lstat(path).st_mode
            content = os.readlink(path) if stat.S_ISLNK(mode) else None
            if stat.S_ISREG(mode):
                with open(path, "rb") as file:
                    content = file.read()
            found[os.path.relpath(path, folder)] = mode, content
    return found


def wrong_line(case, text):
    """What is wrong with stderr."""
    # Between rules mpirun says that a rank has ended with a code that is not 0.
    lines = re.sub(r"-{74}\n(?:Primary job|mpirun detected).*?-{74}\n", "", text, flags=re.S).split("\n")
    if case.says is None or len(lines) != 2 or lines[1]:
        return [f"{len(lines) - 1} lines"] if case.says is not None or text else []
    parts = [case.says] if isinstance(case.says, str) else case.says
    return [what for what, is_so in (
        *((f"'{part}' is not in it", part not in lines[0]) for part in parts),
        ("not the program's name first", not lines[0].startswith(f"{case.program}: ")),
        ("control characters", any(ord(one) < 32 or ord(one) == 127 for one in lines[0])),
        ("not UTF-8", "\ufffd" in lines[0]), ("a long line", len(lines[0].encode()) >= LONGEST_LINE)) if is_so]


def wrong(case, run, good):
    """What is wrong with how the program refuses the case; empty: nothing."""
    folder = run.folder / f"case-{len(run.started)}"
    folder.mkdir()
    try:
        make(case, folder, good)
        before, memory = snapshot(folder), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        words = run.command(case.program, [], case.ranks) + case.words()
        if case.shell:
            words = ["bash", "-c", case.shell, "bash", *words]
        # The first: some python3 are scripts, which need stderr themselves.
        process = Process(words, folder, {"PATH": f"/usr/bin:{os.environ['PATH']}",
                                          "OMPI_MCA_odls_base_sigkill_timeout": "0", **case.env})
        run.started.append(process)
        done = process.end(LIMIT if case.ranks == 1 else 2 * LIMIT)
        found = wrong_line(case, done.err)
        if done.code != case.code:
            found.append(f"exit code {done.code}, not {case.code}")
        used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # of the largest process so far
        if used > max(memory, MOST_MEMORY):
            found.append(f"{used >> 10} MiB of memory")
        after = snapshot(folder)
        touched = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
        found += [f"{path} is left, changed or gone" for path in sorted(touched - set(case.left))]
        found += [f"{path} ends within a line" for path in touched
                  if path.endswith("m.jsonl") and path in after and after[path][1][-1:] not in (b"\n", b"")]
        return f"{case}: {'; '.join(found)}\n{ascii(str(done))}" if found else ""
    finally:
        if case.disk:
            subprocess.run(["umount", folder / "disk"], check=False)
        shutil.rmtree(folder, ignore_errors=True)


# ---- the table ------------------------------------------------------------------------------------------------------
DEEP, LATIN = b"[" * 200000, os.fsdecode(b"caf\xe9")
# llm.c's format: magic number, version and tokens in a header of 1024 bytes; then the tokens, or the bytes of a mask.
SHARD = struct.pack("<3i", 20240520, 1, 200).ljust(1024, b"\0") + struct.pack("<200H", *range(200))
MASK = struct.pack("<3i", 20261122, 1, 200).ljust(1024, b"\0") + bytes([1] * 200)
SHORT_MASK = struct.pack("<3i", 20261122, 1, 199).ljust(1024, b"\0") + bytes([1] * 199)


def data(says, files, named="folder"):
    """files: of the folder that --data names, or the file."""
    return Case(FIRST, f"--data {named}", says, files)


DATA = [
    data(["0 tokens", "--seq-len + 1 = 17"], {"x.txt": ""}, "x.txt"),
    data(["10 tokens", "try --seq-len 9"], {"x.txt": "only a few"}, "x.txt"),
    *(data(f"x.bin: {why}", {"x.bin": content}, "x.bin") for content, why in (
        (SHARD[:1000], "truncated: 1000 bytes, but a .bin shard begins with a header of 1024"),
        (SHARD[:1400], "truncated or corrupt: the header says 200 tokens, 1424 bytes in total, but the file has 1400"),
        (b"\0" + SHARD[1:], "magic number"), (SHARD[:-1] + b"\1", "token 455 at position 199 is outside the vocab"))),
    data("folder has no files", {"folder/.hidden": TEXT}),
    data("folder/b.bin: cannot be read", {"folder/a.bin": SHARD, "folder/b.bin": link("nowhere")}),
    *(data(f"folder/b: {why}", {"folder/a.txt": TEXT, "folder/b": kind}) for kind, why in (
        (LOOP, "cannot be read"), (FIFO, "is not a regular file"), (link("/proc/self/task"), "is a link to a folder"))),
    *(data(f"folder/a.mask.bin: {why}", {"folder/a.bin": SHARD, "folder/a.mask.bin": kind}, named)
      for named in ("folder", "folder/a.bin") for kind, why in (
          (link("nowhere"), "cannot be read"), (FIFO, "is not a regular file (must be the mask of its shard"),
          (FOLDER, "is not a regular file"), (SHORT_MASK, "a mask of 199 tokens, but"), (MASK[:-1] + b"\2", "2 at"))),
    data("a.mask.bin: is a mask, but", {"folder/a.mask.bin": MASK}),
    data("must be all or none", {"folder/a.bin": SHARD, "folder/a.mask.bin": MASK, "folder/b.bin": SHARD}),
    *(data(why, {"b.txt": TEXT}, mixture) for mixture, why in (
        ("text.txt:0.7,b.txt:0.2", "sum to 0.9"), ("text.txt:0.5,./text.txt:0.5", "in one source"),
        ("text.txt:nan,b.txt:1", "at least 0"), ("text.txt:0.5,b.txt", "no weight"), (":0.5,b.txt:0.5", "no path"))),
]
MORE_DATA = [
    *(data(f"--data {path}", ODD, path) for path in ("fifo", "loop", "folder", "/dev/null", "/dev/zero", "/dev/stdin",
                                                     "/proc/1/task", "/proc/self/mem", "/proc/self/fd")),
    Case(FIRST, ["--data", "a\x1b[31m\n.txt"], "--data a\\x1b[31m\\x0a.txt", {"a\x1b[31m\n.txt": "few"}),
    Case(FIRST, ["--data", LATIN], "--data caf\\xe9"),
    data("--data é.txt", {"é.txt": "few"}, "é.txt"),
    data("folder/\\xe9.bin", {b"folder/\xe9.bin": SHARD[:-1]}),
    data("--seq-len 100000000: activations", {"x.txt": lambda path: (path.touch(), os.truncate(path, 1 << 28))},
         "x.txt --seq-len 100000000 --vocab 256"),
]

MODEL, INDEX = "model.safetensors", "model.safetensors.index.json"
HUGGING_FACE = [Case(FIRST, "--load-hf hf", f"{name}: {why}", {f"hf/{MODEL}": GONE, f"hf/{name}": content}
                     if name == INDEX else {f"hf/{name}": content}) for name, content, why in (
    *(("config.json", content, why) for content, why in (
        (keys(hidden_size=GONE), "hidden_size is missing"), (keys(vocab_size=2**64), "vocab_size 1.84467440737"),
        (keys(hidden_act="\x1b[31m\n"), "hidden_act"), (keys(model_type="m" * 3000), "model_type"),
        (keys(partial_rotary_factor=0.5), "partial_rotary_factor 0.5: only 1.0"), (keys(rope_parameters=7), "rope_par"),
        (keys(model_type="qwen2", use_sliding_window=True, max_window_layers="all"), 'max_window_layers "all"'),
        (keys(model_type="mixtral", num_local_experts=2, num_experts_per_tok=3), "num_experts_per_tok 3 must be at"),
        (cut(-10), "truncated or corrupt"), (b'{"a": 1, "a": 2}', 'lists "a" twice'), (DEEP, "nested deeper than 64"),
        (b'{"\xff": 1}', "truncated or corrupt"), (GONE, "cannot be read"), (FIFO, "is not a regular file"),
        (LOOP, "cannot be read"), (link("/dev/zero"), "is not a regular file"))),
    *((MODEL, content, why) for content, why in (
        (cut(-1), "tensor"), (b"\xff" * 16, "truncated, corrupt, or not a safetensors"),
        *((kind, "is not a regular file") for kind in (FIFO, FOLDER, link("/dev/zero"))))),
    *((INDEX, content, why) for content, why in (
        (FIFO, "is not a regular file"), (DEEP, "nested deeper"), (b'{"weight_map": {"a": ""}}', "weight_map maps"))))]
HUGGING_FACE += [Case(FIRST, "--load-hf hf", says, files) for says, files in (
    ("has neither model.safetensors nor", {f"hf/{MODEL}": GONE}),
    ("self_attn.q_norm.weight is missing", {"hf/config.json": keys(model_type="qwen3")}),
    ("is not part of this model", {"hf/config.json": keys(num_hidden_layers=1)}),
    ("according to config.json", {"hf/config.json": keys(vocab_size=512)}),
    ("tie_word_embeddings true", {"hf/config.json": keys(tie_word_embeddings=True)}),
    ("hf/\\x1b[31m\\x0a: missing", {f"hf/{MODEL}": GONE, f"hf/{INDEX}": rb'{"weight_map": {"a": "\u001b[31m\n"}}'}))]
HUGGING_FACE += [Case(FIRST, f"--load-hf {path}", f"--load-hf {path}", ODD) for path in (
    "text.txt", "nowhere", "fifo", "loop", "n" * 300)] + [Case(FIRST, ["--load-hf", LATIN], "--load-hf caf\\xe9")]
HUGGING_FACE += [Case(FIRST, f"--load-hf hf {flag}", [flag.split()[0], "--load-hf"]) for flag in (
    "--layers 2", "--qkv-bias on", "--mup 2", "--tied-embeddings on", "--model tiny", "--top-k 2")]
HUGGING_FACE += [Case("02_data_parallel", "--load-hf hf", "hf/config.json", {"hf/config.json": cut(-10)}, ranks=2)]


def step(**values):
    """reference.json with another first step."""
    return changed(lambda content: re.sub(rb'"steps": \[.*', b'"steps": [' + json.dumps(with_keys(
        json.loads(content)["steps"][0], values)).encode() + b"]}", content, flags=re.S))


EMPTY = struct.pack("<Q", 2) + b"{}"  # a safetensors file
COMPARE = [Case("compare", "a b", [f"{side}/{name}", why], {f"{side}/{name}": content})
           for side in "ab" for name, content, why in (
    *(("reference.json", content, why) for content, why in (
        (GONE, "cannot be read"), (FIFO, "not a file"), (LOOP, "cannot be read"), (b"", "is not JSON"), (b"[]", ""),
        (DEEP, "nested deeper"), (keys(format="other"), "is not a"), (keys(version=GONE), "of version 1, 2 or 3"),
        (keys(dtype="fp16"), '"dtype" must be fp32'), (keys(flags=[]), '"flags" is not an object'),
        (keys(steps=[]), '"steps" must be a list'), (step(loss="5"), "loss"), (step(grad_norm=-1), "must not be neg"),
        (step(lr="1"), "lr"), (step(tokens=[7]), "must be a list of samples"), (step(tokens=[[1.5]]), "has token 1.5"),
        (step(tokens=[["1" * 3000]]), "has token"), (step(tokens=GONE), "tokens"))),
    *((f"{name}.safetensors", content, why) for name in ("initial", "gradients", "after_step_1") for content, why in (
        (FOLDER, "not a file"), (b"", "is not a safetensors"), (cut(-1), "is it cut?"), (EMPTY, "has no tensors"))))]
COMPARE += [Case("compare", words, says) for words, says in (
    ([], "required: A, B"), (["a"], "B"), (["", "b"], "A: must name a folder"), (["a", LATIN], "caf"),
    (["a", "b", "--tolerance", "2"], "--tolerance: 2 must"), (["a", "a/reference.json"], "a/ref"))]


def cluster(path, value):
    """A cluster file with another value there; GONE: without the key."""
    good = {"name": "x", "device": {"name": "H100"}, "nodes": 2, "gpus_per_node": 8,
            "nvlink": {"bytes_per_s": 1e11, "seconds": 0}, "rail": {"bytes_per_s": 1e10, "seconds": 0}}
    outer, _, key = path.rpartition(".")
    value = with_keys(good[outer], {key: value}) if outer else value
    return json.dumps(with_keys(good, {outer or key: value})).encode()


CLUSTERS = [(b"nonsense", "truncated or corrupt"), (b"[]", "is not a JSON object"), (DEEP, "nested deeper than 64"),
            (b'{"name": "x", "device": "H100", "nodes": 1, "gpus_per_node": 8}', "nvlink is missing, and host: 8 dev")]
CLUSTERS += [(cluster(path, value), path.replace(".", ": ") + why) for path, why, values in (
    ("name", " ", ("", 7)), ("device", " is missing", (GONE,)), ("device", " 7: must be an object", (7,)),
    ("device", " H1000: unknown; must be one of A100 H100 H200 B200", ("H1000",)), ("device", ": name is miss", ({},)),
    ("device", ": peak_bf16 is missing", ({"name": "\x1b"},)), ("nodes", " ", (0, 1.5, "2", 10**12, GONE)),
    ("gpus_per_node", " 0: must be an integer", (0,)), ("gpus_per_node", " true: must be an integer", (True,)),
    ("nvlink", " 7: must be an object", (7,)), ("nvlink", " [1]: must be an object", ([1],)),
    ("rail", " is missing: 2 nodes", (GONE,)), ("rail", ": bytes_per_s 1: must be a n", ({"bytes_per_s": 1},)),
    ("nvls", " 1: must be true or false", (1,)), ("rails", " 0: must be an integer", (0,)),
    ("rails", " 1000000000.0: must be an integer", (1e9,)), ("cores", " 0: ", (0,)),
    ("cores", " null: is not a key with a value", (None,)),
    ("oversubscription", " 0.5: must be a number from 1", (0.5,)), ("links", " []: is not a key with a value", ([],)),
    ("rail.bytes_per_s", " 0: must be a number from 1000000", (0,)), ("rail.bytes_per_s", " is missing", (GONE,)),
    ("rail.seconds", " -1: must be a number from 0 to 1", (-1,)), ("rail.speed", " 1: is not a key", (1,)),
    ("device.peak_bf16", " ", (0, "1")), ("device.peak", " 1: is not a key", (1,)), ("device.launch_s", " -1: ", (-1,)),
    ("device.product_efficiency", " ", (0, 1.5)), ("device.streams", " 0: must be true or false", (0,)),
    ("device.attention", " ", ([], [[1, 2]], [[2, 1, 1], [1, 1, 1]])),
    ("device.pointwise_traffic", "", (7, {"add": 2}, {"add": [0, 1]}, {"matmul": [2, 1]}))) for value in values]
FILES = {"a100.json": json.dumps({**NODE, "device": "A100"}),
         "one.json": '{"name": "x", "device": "H100", "nodes": 1, "gpus_per_node": 1}',
         "o.csv": "op,calls,ms,floor_ms,share,gflops,gbytes_per_s\n"}
JSON_FILES = [Case(program, f"{flags} c.json", f"{flags.split()[-1]} c.json: {why}", {"c.json": content})
              for content, why in CLUSTERS
              for program, flags in ((LAST, FAKE + "--simulate"), ("plan", "--tp-efficiency"))]
SIMULATE = FAKE + "--simulate my.json "
JSON_FILES += [Case(program, flags, says, {**ODD, **FILES}) for program, flags, says in (
    (LAST, SIMULATE + "--device-csv nowhere", "--device-csv nowhere: cannot be read"),
    (LAST, SIMULATE + "--device-csv text.txt", "--device-csv text.txt: line 1: must be op,calls"),
    (LAST, SIMULATE + "--device-csv o.csv", "--device-csv o.csv: has no op"),
    (LAST, SIMULATE + "--trace my.json", "--trace my.json: would overwrite my.json"),
    (LAST, FAKE + "--simulate a100.json --dtype bf16 --fp8 current", "--fp8 current: A100 of --simulate a100.json"),
    (LAST, FAKE + "--simulate a100.json --dtype bf16 --fp8 mxfp8", "--fp8 mxfp8: not supported with --simulate"),
    ("plan", "--cluster a100.json --fp8 current", "--fp8 current: a A100"), ("plan", "--csv fifo", "--csv fifo: is a"),
    *(("plan", f"--tp-efficiency {path}", f"--tp-efficiency {path}: {why}") for path, why in (
        ("nowhere", "cannot be read"), ("fifo", "is not a regular file"), ("one.json", "has no link"))),
    ("plan", "--tp-efficiency one.json --tp 2", "--tp: has no meaning with --tp-efficiency"),
    ("plan", "--cluster fifo", "--cluster fifo"), ("plan", "--cluster " + "x" * 500, "File name too long"),
    ("plan", "--json my.json", "--json my.json: would overwrite my.json, which --cluster"))]
SCHEDULES = [Case(program, f"{flags}{path}", [path, says], {**ODD, "my.txt": text}) for path, text, says in (
    ("my.txt", b"\xff\x1b[31mF0 B0\n", "line 1, word 1"), ("my.txt", "F" * 100000 + "\n", "line 1, word 1"),
    ("my.txt", "F0.3999 B0 " * 2000 + "\n" + "F0 B0\n" * 3000, "fewer steps"), ("loop", "", "cannot be read"),
    *((path, "", "is not a regular file") for path in ("folder", "fifo", "/dev/zero")))
    for program, flags in (("schedule", "--file "), ("05_pipeline", FAKE + "--pipeline file:"))]

LINKS = {**ODD, "mine.txt": TEXT, "t.tmp": TEXT, "texts/a.txt": TEXT, "soft.txt": link("mine.txt"),
         "hard.txt": lambda path: os.link(path.parent / "mine.txt", path)}
OUTPUTS = [Case(FIRST, flags, says, LINKS) for flags, says in (
    ("--trace folder", "--trace folder: is a folder"), ("--trace fifo", "--trace fifo: is a FIFO"),
    *((f"--data mine.txt --metrics {name}", f"--metrics {name}: would overwrite")
      for name in ("mine.txt", "hard.txt", "soft.txt")),
    ("--data texts --trace texts/a.txt", ["--trace texts/a.txt", "--data"]),
    ("--data t.tmp --trace t", "--trace t: would overwrite t.tmp, which --data"),
    ("--trace d/config.json --save-hf d", ["--trace", "--save-hf"]), ("--save-hf d --save-reference d", "--save-ref"),
    *((f"--load-hf hf {flag}", [flag.split()[0], "--load-hf"]) for flag in (
        f"--metrics hf/{MODEL}", "--trace hf/config.json", "--save-hf hf", "--save-reference hf")))]
WRITTEN = ("--metrics", "--trace", "--memory-timeline")
MORE_OUTPUTS = [Case(FIRST, f"{flag} {path}", f"{flag.split()[-1]} {path}: {why}", ODD)
                for flag in (*WRITTEN, "--bench --bench-csv") for path, why in (
    ("folder/", "is a folder"), ("fifo", "is a FIFO"), ("socket", "is a socket"), ("loop", "circular symbolic links"),
    ("nowhere/x", "cannot be written"), ("text.txt/x", "cannot be written"), ("n" * 256, ""), ("/proc/x", ""))]
MORE_OUTPUTS += [Case(FIRST, f"{flag} {path}", flag, ODD) for flag in ("--save-hf", "--save-reference")
                 for path in ("text.txt", "fifo", "loop", "text.txt/d", "d/" + "n" * 256, "/proc/d")]
MORE_OUTPUTS += [Case(FIRST, f"{flag} d", [flag, name], {f"d/{name}": kind}) for kind in (FOLDER, FIFO, LOOP)
                 for flag, names in (("--save-hf", ("config.json", MODEL, INDEX)), ("--save-reference", (
                     "initial.safetensors", "gradients.safetensors", "after_step_1.safetensors", "reference.json")))
                 for name in names]
MORE_OUTPUTS += [Case(FIRST, "--save-hf d --data ../text.txt", "--", shell='mkdir g; cd g; rmdir ../g; exec "$@"')]
MORE_OUTPUTS += [Case(program, f"--tables on {flag} {path}", flag, ODD, ranks=2) for program, flag in (
    ("05_pipeline", "--pipeline-trace"), ("05_pipeline", "--draw")) for path in ("folder", "nowhere/x")]

# Streams that are closed or full; what the environment, ulimit and real ranks do.
PROCESSES = [case for program in PROGRAMS for case in (
    Case(program, "--help", "standard output", code=1, shell='exec "$@" >/dev/full'),
    Case(program, "--stepz", None, shell='exec "$@" 2>&-'), Case(program, "--stepz", None, shell='exec "$@" >&- 2>&-'),
    Case(program, "a b --stepz" if program == "compare" else "--stepz", "--stepz", shell='exec "$@" <&-'))]
PROCESSES += [Case(program, "", f"{variable}={value}: must be an integer from 1 to 1024", env={variable: value})
              for variable, programs in (("OMP_NUM_THREADS", (FIRST, LAST, "schedule", "plan")),
                                         ("OPENBLAS_NUM_THREADS", (FIRST, LAST)))
              for program in programs for value in ("0", "abc", "1.5", "99999999999")]
PROCESSES += [
    Case(FIRST, "", "standard output", code=1, shell='exec "$@" >/dev/full', left=("m.jsonl", "t.json")),
    Case(FIRST, "--trace nowhere/t.json", "--trace", shell='exec "$@" >&-'),
    Case(FIRST, "--bench --bench-side 1000000", "--bench-side 1000000: needs"),
    *(Case(FIRST, f"{flag} /dev/full", [f"{flag} /dev/full: write failed", "and the run goes on"], code=0,
           left=("m.jsonl", "t.json"))
      for flag in WRITTEN),
    *(Case(FIRST, flags, "ulimit -v leaves", {"x.txt": lambda path: (path.touch(), os.truncate(path, 1 << 24))},
           shell='ulimit -v 3000000 && exec "$@"')
      for flags in ("--data x.txt --seq-len 1000000", "--layers 8 --hidden 2048 --heads 32 --ffn 8192")),
    *(Case(program, flags, " ".join(flags.split()[-2:]), ranks=2) for program, flags in (
        ("02_data_parallel", "--dp 3"), ("02_data_parallel", "--fake-world 4 --comm fake"), ("05_pipeline", "--pp 3"),
        ("03_zero", "--trace nowhere/t.json"), ("04_tensor_parallel", "--tp 3"), ("06_context_parallel", "--cp 3"),
        ("07_fp8", "--tp 3"), (LAST, "--pp 2 --metrics nowhere/m"), (LAST, "--save-hf text.txt"),
        (LAST, "--load-hf nowhere"), (LAST, "--inject wrong-sum:2:1")))]


def fill(path):
    with open(path, "wb", buffering=0) as file:
        file.write(b"x" * (1 << 20))  # as much as there is room for


# A tmpfs of 128 KiB: read-only, too small for the model's files, or full.
OLD = {"disk/d": FOLDER, "disk/old": "old"}
ENDED = {"code": 1, "left": ("m.jsonl", "t.json", "disk/m.jsonl"), "disk": "rw"}
WARNED = {**ENDED, "code": 0}
DISKS = [Case(FIRST, f"{flag} {path}", f"{flag} {path}", OLD, disk="ro") for flags, paths in (
    (WRITTEN, ("disk/x", "disk/old")), (("--save-hf", "--save-reference"), ("disk", "disk/d", "disk/new/x")))
    for flag in flags for path in paths]
DISKS += [Case(program, flags, flags, OLD, disk="ro", ranks=2) for program, flags in (
    ("02_data_parallel", "--metrics disk/m"), (LAST, "--save-hf disk/d"))]
DISKS += [Case(FIRST, f"{flag} disk/d --hidden 128", flag, **ENDED) for flag in ("--save-hf", "--save-reference")]
DISKS += [Case(FIRST, f"{flag} disk/x", flag, {"disk/fill": fill}, **ENDED)
          for flag in ("--save-hf", "--save-reference")]
DISKS += [Case(FIRST, f"{flag} disk/x", flag, {"disk/fill": fill}, **WARNED) for flag in WRITTEN[1:]]
DISKS += [Case(FIRST, "--metrics disk/m.jsonl --steps 400", ["--metrics", "metrics from step "], **WARNED)]

TABLE = {"data": DATA, "outputs": OUTPUTS, "more data": in_turn(MORE_DATA), "Hugging Face": in_turn(HUGGING_FACE),
         "compare": in_turn(COMPARE), "JSON": in_turn(JSON_FILES), "schedules": in_turn(SCHEDULES),
         "more outputs": in_turn(MORE_OUTPUTS), "processes": in_turn(PROCESSES), "disks": in_turn(DISKS)}


@pytest.mark.parametrize("case", [pytest.param(case, id=f"{group}: {case}")
                                  for group, cases in TABLE.items() for case in cases])
def test_refused(run, good, case):
    if case.disk and os.geteuid() != 0:
        pytest.skip("only root mounts a tmpfs")
    found = wrong(case, run, good)
    assert not found, found


@pytest.mark.parametrize("ranks", (1, 2))
def test_a_file_that_shrinks_while_it_is_read(run, ranks):
    (run.folder / "data.txt").write_text(TEXT * 100)
    program = FIRST if ranks == 1 else "02_data_parallel"
    process = run.start(program, *Case(program, "--data data.txt --steps 1000000", "").words(), ranks=ranks)
    process.wait_for_steps(1)
    os.truncate(run.folder / "data.txt", 0)
    done = process.end(LIMIT).says("--data data.txt: has become shorter while it was in use")
    assert done.code == 1, done


# ---- flags ----------------------------------------------------------------------------------------------------------
INTEGERS = ["x", "1.5", "-1", "-2147483649", "", " ", " 1", "1 ", "010", "0x10", "1e3", "nan", "9" * 20, "1" * 3000,
            "1000000000000000001", str(2**57), str(2**63 - 1), str(2**64 + 1)]
NUMBERS = ["x", "", " ", "nan", "-nan", "inf", "-inf", "infinity", "1e999", "-1", "1,5", "1e-3x", "0x", "0x1p-3",
           " 1e-3", "1e-3 ", "1 2", "9" * 3000]
PATHS = ["", "nowhere/file", "folder", "fifo", "loop", "text.txt/file", "n" * 300, "a\nb/file", "a\x1b[31m/file"]
TABLES = ("--draw", "--pipeline-trace")


@pytest.fixture(scope="module")
def flags_of(binaries):
    """{program: {flag: its type by --help, "" of a switch}}."""
    def flags(program):
        text = subprocess.run([binaries / program, "--help"], capture_output=True, text=True, check=True).stdout
        return dict(re.findall(r"^  (--(?!help)[a-z0-9-]+)(?: (\S+))?(?: |$)", text, re.M))
    return {program: flags(program) for program in PROGRAMS}


def odd_values(flag, kind):
    """Values that no flag of the type takes."""
    if kind.startswith("INT"):
        own = ["1,,1", ",1", "1,x", ",".join(["1"] * 3000)] if kind == "INT,..." else ["1,2"]
        any_size = [value for value in INTEGERS if value.isdigit() and value[0] != "0" and len(value) < 20]
        return [value for value in INTEGERS + own if flag != "--seed" or value not in any_size]
    if kind == "NUMBER":
        return NUMBERS
    if "|" in kind:
        word = kind.split("|")[0]
        return ["bogus", "", word.upper() + "_", word + " ", word + "," + word, "\x1b[31m", "b" * 3000]
    if kind.startswith("FILE"):
        return PATHS
    if kind in ("DIR", "PATH"):  # which may be a folder, and is made
        return ["", "fifo", "loop", "text.txt/file", "n" * 300] + (["text.txt"] if kind == "DIR" else [])
    return []


def flag_cases(program, flags, known):
    """Every flag with odd values, without one and twice; of a flag that an earlier program has, too, one value."""
    beside = {"compare": ["a", "b"], FIRST: [], "plan": []}.get(program, FAKE.split())
    for flag, kind in flags.items():
        first, values = flag not in known, odd_values(flag, kind)
        if not first or program not in (FIRST, "compare") and values is not PATHS:  # the same checks: some values
            values = values[len(flag) % 3::3][:None if first else 1]
        before = [] if flag.startswith(("--comm", "--fake")) else beside
        before = before + ["--tables", "on"] if flag in TABLES else before
        good = {"INT": "1", "NUMBER": "0.5", "INT,...": "1,1"}.get(kind, kind.split("|")[0] if "|" in kind else "1")
        tried = [[flag, value] for value in values]
        if first:
            tried += [[flag], [flag + "="], [flag, good, flag, good]] if kind else [[flag + "=x"]]
        for words in tried:
            yield Case(program, before + words, flag, ODD)
    for word in ("--stepz", "-- --", "stray", "-x", "--steps\n", "\x1b[31m", "--" + "x" * 3000, "é"):
        yield Case(program, (beside if program == "compare" else []) + [word], "")


@pytest.mark.parametrize("program", PROGRAMS)
def test_odd_values_of_flags(run, good, flags_of, program):
    earlier = set().union(*(flags_of[name] for name in PROGRAMS[:PROGRAMS.index(program)]))
    cases = list(flag_cases(program, flags_of[program], earlier))
    assert len(cases) > 20
    found = [text for text in (wrong(case, run, good) for case in in_turn(cases, 40)) if text]
    assert not found, "\n".join(found)
