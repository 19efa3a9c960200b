"""Bad input: texts, token shards and masks; reference runs for `compare`."""
import copy
import json
import os
import shutil
import struct
import threading
import time

from bad_input_common import FIRST, GENTLE, MAGIC16, MAGIC32, MASK, TEXT, after, mask, shard, shown
from bad_input_hf import Doubled, safetensors

# ---- data and token shards -----------------------------------------------------------------------------------------
def data_cases(add):
    def file(name, content, **more):
        add("data", f"{name}", FIRST, ["--data", name], [name] if name.isprintable() and name.isascii() else "--data",
            after(lambda folder: (folder / name).write_bytes(content)), **more)

    good = shard()
    for length in (0, 1, 4, 11, 12, 1000, 1023, 1024, 1025, len(good) - 1, len(good) + 1, len(good) + 2):
        file(f"cut_{length}.bin", (good + b"\0\0")[:length])
    for magic in (0, -1, MAGIC16 + 1, MAGIC32 + 1, 0x20240520,
            int.from_bytes(struct.pack(">i", MAGIC16), "little", signed=True)):
        file(f"magic_{magic}.bin", shard(magic))
    for version in (0, 2, 7, 99, -1, 2**31 - 1):
        file(f"version_{version}.bin", shard(version=version))
    for count in (-1, 0, 1, 16, 199, 201, 2**31 - 1, -2**31):
        file(f"count_{count}.bin", shard(count=count))
    file("version_of_32.bin", shard(MAGIC32, 1, 200, width=4))
    file("wide_as_narrow.bin", shard(MAGIC16, 1, 200, width=4))
    file("narrow_as_wide.bin", shard(MAGIC32, 7, 200))
    for at, token in ((0, 256), (100, 65535), (199, 300)):
        file(f"token_{at}_{token}.bin", shard(tokens=[token if i == at else 1 for i in range(200)]))
    for at, token in ((0, 256), (199, 2**32 - 1), (5, 2**31)):
        file(f"wide_token_{at}_{token}.bin", shard(MAGIC32, 7, tokens=[token if i == at else 1 for i in range(200)],
            width=4))
    file("empty.txt", b"")
    file("short.txt", b"only")
    file("one.txt", b"1")
    file("sixteen.txt", b"x" * 16)
    file("text.bin", TEXT.encode())
    file("zeros.bin", b"\0" * 4096)
    file("words.txt\n", b"few")
    file("\x1b[31mred.txt", b"few")
    file("é.txt", b"few")

    def folder_of(name, *files):
        def setup(folder):
            (folder / name).mkdir()
            for file_name, content in files:
                (folder / name / file_name).write_bytes(content)
        return setup
    for name, files, expected in (
            ("no_files", [], "no_files"), ("hidden_only", [(".hidden", b"text" * 100)], "hidden_only"),
            ("one_bad_shard", [("a.bin", good), ("b.bin", good[:-1])], "b.bin"),
            ("one_other_shard", [("a.bin", good), ("b.bin", shard(7))], "b.bin"),
            ("empty_files", [("a.txt", b""), ("b.txt", b"")], "empty_files"),
            ("latin", [(b"\xe9.bin".decode(errors="surrogateescape"), good[:-1])], "--data")):
        add("data", f"folder {name}", FIRST, ["--data", name], expected, after(folder_of(name, *files)))
    for name, step in (("fifo", lambda f: os.mkfifo(f / "fifo")), ("loop", lambda f: (f / "loop").symlink_to("loop")),
                       ("dangling", lambda f: (f / "dangling").symlink_to("nowhere"))):
        add("data", name, FIRST, ["--data", name], ["--data", name], after(step))
        add("data", name + ".bin", FIRST, ["--data", name + ".bin"], ["--data", name + ".bin"],
            after(step, lambda f, name=name: (f / name).rename(f / (name + ".bin"))))
        add("data", f"{name} in a folder", FIRST, ["--data", "folder"], ["--data", "folder"],
            after(lambda f: (f / "folder").mkdir(), step, lambda f, name=name: (f / name).rename(f / "folder" / name)))
    for name, make, expected in (
            ("a text that leads nowhere", lambda f: (f / "b").symlink_to("nowhere"), "folder/b"),
            ("a text that is a loop", lambda f: (f / "b").symlink_to("b"), "folder/b"),
            ("a text that is a FIFO", lambda f: os.mkfifo(f / "b"), "folder/b"),
            ("a link to a folder", lambda f: (f / "b").symlink_to("/proc/self/task"), ["folder/b", "a link to a folder"]),
            ("a shard that leads nowhere", lambda f: (f / "b.bin").symlink_to("nowhere"), "folder/b.bin"),
            ("a mask that leads nowhere", lambda f: (f / "a.mask.bin").symlink_to("nowhere"), "folder/a.mask.bin"),
            ("a mask that is a folder", lambda f: (f / "a.mask.bin").mkdir(), "folder/a.mask.bin"),
            ("a mask that is a FIFO", lambda f: os.mkfifo(f / "a.mask.bin"), "folder/a.mask.bin")):
        first = ("a.bin", good) if "shard" in name or "mask" in name else ("a.txt", TEXT.encode())
        setup = after(folder_of("folder", first), lambda folder, make=make: make(folder / "folder"))
        add("data", f"a folder with {name}", FIRST, ["--data", "folder"], expected, setup)
        if "mask" in name:
            add("masks", name, FIRST, ["--data", "folder/a.bin"], expected, setup)
    for path in ("/dev/null", "/dev/zero", "/dev/stdin", "/proc/1/task", "/proc/self/mem", "/proc/self/fd",
            "/sys/kernel/mm",
                 "/", "/proc/self/task"):
        if path != "/":
            add("data", path, FIRST, ["--data", path], ["--data", path])
    add("data", "a Latin-1 name that is not there", FIRST, ["--data", b"caf\xe9.txt"], "--data")
    add("data", "a sequence as long as a sparse file", FIRST,
        ["--data", "sparse.txt", "--seq-len", "100000000", "--vocab", "256"],
        "--seq-len", after(lambda f: os.truncate(f / "text.txt", 0), lambda f: os.mknod(f / "sparse.txt"),
                           lambda f: os.truncate(f / "sparse.txt", 1 << 28)), limit=GENTLE)
    def masked(name, content):
        add("masks", name, FIRST, ["--data", "a.bin"], ["--data a.mask.bin"],
            after(lambda folder: (folder / "a.bin").write_bytes(good),
                  lambda folder: (folder / "a.mask.bin").write_bytes(content)))

    ones = mask([1] * 200)
    for length in (0, 1000, 1024, len(ones) - 1, len(ones) + 1):
        masked(f"cut to {length}", (ones + b"\1")[:length])
    for count in (199, 201, 0):
        masked(f"of {count} tokens", mask([1] * count))
    for magic, version in ((MAGIC16, 1), (MAGIC32, 7), (MASK, 2), (0, 1)):
        masked(f"magic number {magic}, version {version}", mask([1] * 200, magic, version))
    for at, byte in ((0, 2), (199, 255)):
        masked(f"{byte} at {at}", mask([byte if i == at else 1 for i in range(200)]))
    add("masks", "a mask without its shard", FIRST, ["--data", "a.mask.bin"], ["--data a.mask.bin", "is a mask"],
        after(lambda folder: (folder / "a.mask.bin").write_bytes(ones)))
    for name, files, expected in (
            ("a mask without its shard in a folder", [("b.bin", good), ("a.mask.bin", ones)], "folder/a.mask.bin"),
            ("a folder of masks", [("a.mask.bin", ones)], "folder/a.mask.bin"),
            ("a shard without a mask", [("a.bin", good), ("a.mask.bin", ones), ("b.bin", good)], "folder/b.bin")):
        add("masks", name, FIRST, ["--data", "folder"], expected, after(folder_of("folder", *files)))
    add("masks", "--mask-document-ends without a document token", FIRST, ["--mask-document-ends", "on"],
        ["--mask-document-ends", "--document-token"])

    two = after(lambda folder: (folder / "other.txt").write_text(TEXT))
    for data, expected in (
            ("text.txt:0.7,other.txt:0.2", "sum to 0.9"), ("text.txt:0.9", "sum to 0.9"),
            ("text.txt:0.5,other.txt:0.500002", "sum to 1"), ("text.txt:0,other.txt:0", "sum to 0"),
            ("text.txt:-0.5,other.txt:1.5", "at least 0"), ("text.txt:nan,other.txt:1", "at least 0"),
            ("text.txt:inf,other.txt:0", "at least 0"), ("text.txt:1e400,other.txt:1", "no weight"),
            ("text.txt:0.5,other.txt", "no weight"), ("text.txt:0.5,", "no weight"), (":0.5,text.txt:0.5", "no path"),
            ("text.txt:0.5,other.txt:0.5:x", "no weight"), ("text.txt:0x1p-1,other.txt:0.5", "no weight"),
            ("text.txt:0.5,text.txt:0.5", "one source"), ("text.txt:0.5,./text.txt:0.5", "one source"),
            ("text.txt:0.5,.:0.5", "one source"), ("text.txt:0.5,missing:0.5", "missing"),
            ("text.txt:1,missing:0", "missing"), ("text.txt,other.txt", "text.txt,other.txt")):
        add("mixtures", data, FIRST, ["--data", data], ["--data", expected], two)
    add("mixtures", "an output that is a source", FIRST,
        ["--data", "text.txt:0.5,other.txt:0.5", "--metrics", "other.txt"], ["--metrics other.txt", "--data"], two)
    add("mixtures", "an output that is a mask", FIRST, ["--data", "a.bin", "--metrics", "a.mask.bin"],
        ["--metrics a.mask.bin", "--data"], after(lambda folder: (folder / "a.bin").write_bytes(good),
                                                  lambda folder: (folder / "a.mask.bin").write_bytes(ones)))
    add("mixtures", "on ranks", "02_data_parallel", ["--data", "text.txt:0.7,other.txt:0.2"], ["--data", "sum to 0.9"],
        two, ranks=2, limit=GENTLE)
    # while the program reads it
    for program, ranks in ((FIRST, 1), ("02_data_parallel", 2)):
        def shrink(folder, process):
            def wait():
                for _ in range(500):
                    metrics = folder / "m.jsonl"
                    if process.poll() is not None or (metrics.exists() and b'"step"' in metrics.read_bytes()):
                        break
                    time.sleep(0.01)
                os.truncate(folder / "data.txt", 0)
            threading.Thread(target=wait).start()
        add("data", "a file that shrinks while training", program, ["--data", "data.txt", "--steps", "1000000"],
            ["--data", "data.txt"],
            after(lambda f: (f / "data.txt").write_text(TEXT * 100)), ranks=ranks, code=1, meanwhile=shrink,
            left=("m.jsonl", "data.txt"), limit=GENTLE, lines=1 if ranks == 1 else -1)


# ---- compare -------------------------------------------------------------------------------------------------------
def compare_cases(add, base):
    good = json.loads((base / "reference.json").read_text())

    def runs(change=None, side="a"):
        def setup(folder):
            for name in ("a", "b"):
                shutil.copytree(base, folder / name)
            if change:
                change(folder / side)
        return setup

    def case(name, change, expected, **more):
        for side in ("a", "b"):
            add("compare", f"{side}: {name}", "compare", ["a", "b"],
                [f"{side}/"] + ([expected] if isinstance(expected, str) else expected),
                runs(change, side), **more)

    def text(content, name="reference.json"):
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        return lambda run: (run / name).write_bytes(raw)

    def step(**fields):
        copied = copy.deepcopy(good)
        for key, value in fields.items():
            if value is Doubled:
                del copied["steps"][0][key]
            else:
                copied["steps"][0][key] = value
        return text(copied)
    name = "reference.json"
    for label, content in (("empty", b""), ("a list", b"[]"), ("cut", json.dumps(good).encode()[:-3]),
            ("nested", b"[" * 200000), ("null", b"null"), ("not UTF-8", b'{"\xff": 1}')):
        case(f"reference.json {label}", text(content), name)
    for key, value in (("format", "other"), ("format", 7), ("version", 99), ("version", "2"), ("version", 0),
            ("dtype", "fp16"), ("dtype", 7), ("flags", []), ("flags", 7), ("steps", {}), ("steps", []),
                       ("steps", 7), ("steps", None), ("steps", [7]), ("steps", [[]]), ("steps", [{}]),
                       ("steps", ["a"])):
        case(f"{key} {value!r}", text({**good, key: value}), name)
    for key in ("format", "version", "steps"):
        case(f"no {key}", text({k: v for k, v in good.items() if k != key}), name)
    for key in ("loss", "grad_norm", "tokens"):
        case(f"no {key}", step(**{key: Doubled}), [name, key])
    for key, value in (("loss", "5"), ("loss", []), ("loss", True), ("grad_norm", "2"), ("grad_norm", -1),
            ("grad_norm", {}), ("lr", "1"), ("tokens", 7), ("tokens", [7]), ("tokens", [[1.5]]), ("tokens", [["1"]]),
                       ("tokens", [[None]]), ("tokens", {}), ("tokens", [[True]]), ("tokens", [[2**64]]),
                       ("tokens", [[1e30]]), ("tokens", [["1" * 3000]])):
        case(f"{key} {shown(value)}", step(**{key: value}), [name, "token" if key == "tokens" else key])
    for file in ("initial.safetensors", "gradients.safetensors", "after_step_1.safetensors"):
        if file != "after_step_1.safetensors":
            case(f"no {file}", lambda run, file=file: (run / file).unlink(), file)
        case(f"{file} cut", lambda run, file=file: (run / file).write_bytes((run / file).read_bytes()[:-1]), file)
        case(f"{file} empty", text(b"", file), file)
        case(f"{file} without tensors", text(safetensors({}, b""), file), file)
        case(f"{file} a folder", lambda run, file=file: ((run / file).unlink(), (run / file).mkdir()), file)
        case(f"{file} a FIFO", lambda run, file=file: ((run / file).unlink(), os.mkfifo(run / file)), file)
    case("no reference.json", lambda run: (run / name).unlink(), name)
    case("reference.json a folder", lambda run: ((run / name).unlink(), (run / name).mkdir()), name)
    case("reference.json a FIFO", lambda run: ((run / name).unlink(), os.mkfifo(run / name)), name)
    case("reference.json a loop", lambda run: ((run / name).unlink(), (run / name).symlink_to(name)), name)
    for arguments, expected in (([], "A"), (["a"], "B"), (["a", "nowhere"], "nowhere"), (["nowhere", "b"], "nowhere"),
            (["a", "b", "c"], "c"), (["a", ""], "B"), (["", "b"], "A"),
            (["a", "b", "--tolerance", "2"], "--tolerance"),
                                (["a", "a/reference.json"], "a/reference.json"), (["a", "n" * 300], "n"),
                                (["a", b"caf\xe9"], "caf"), (["a", "x\ny"], "x")):
        add("compare", f"arguments {ascii(arguments)[:40]}", "compare", arguments, expected, runs())
    # a run that is wrong, and no bad input
    negative = copy.deepcopy(good)
    negative["steps"][0]["loss"] = -negative["steps"][0]["loss"]
    add("compare", "a loss with the wrong sign", "compare", ["a", "b"], [], runs(text(negative), "b"), code=1, lines=0)
