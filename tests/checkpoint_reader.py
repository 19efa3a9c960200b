"""Checkpoints of chapter 08, read by code that shares nothing with the program, in plain Python.

Run:   python3 tests/checkpoint_reader.py build/bin       small runs in several layouts, and the checks below
       python3 tests/checkpoint_reader.py --read DIR/step-N     checks one checkpoint

Sizes and checksums, every element of every state in exactly one rectangle, weights equal to those of --save-hf, all
states equal to another layout's (fp64, 1e-10), biases of routers equal, 8-bit moments equal after loading in another layout, except for blocks
that it cuts. Where NumPy is there, the two programs in the document read the same numbers.
"""
import array
import json
import math
import os
import pathlib
import re
import struct
import subprocess
import sys
import tempfile
import zlib

DOCUMENT = pathlib.Path(__file__).resolve().parents[1] / "docs" / "checkpoint-format.md"
FORMATS = {"F64": "d", "F32": "f", "U8": "B"}
SIZES = {"F64": 8, "F32": 4, "U8": 1, "BF16": 2}
NAME = re.compile(r"([a-z_]+)/([A-Za-z0-9_.]+)\[(\d+):(\d+)(?:,(\d+):(\d+))?\]")


class Bad(Exception):
    pass


def require(condition, *what):
    if not condition:
        raise Bad(" ".join(str(each) for each in what))


def f32(x):
    return struct.unpack("f", struct.pack("f", x))[0]


def moment_levels():
    """{state: 255 levels}, ascending by code."""
    first, second, top = [0.0], [0.0], 1e-6
    for decade in range(7):
        count = 2 ** decade
        first += [f32(top * (0.1 + 0.9 * i / count)) for i in range(1, count + 1)]
        second += [f32(top * (0.1 + 0.9 * i / (2 * count))) for i in range(1, 2 * count + 1)]
        top *= 10
    return {"exp_avg": [-x for x in reversed(first[1:])] + first, "exp_avg_sq": second}


LEVELS = moment_levels()


def safetensors(blob):
    """[(name, dtype, shape, bytes)]; checks that the tensors are the rest of the file, in order, without gaps."""
    size = int.from_bytes(blob[:8], "little")
    entries = [(name, entry) for name, entry in json.loads(blob[8:8 + size]).items() if name != "__metadata__"]
    found, at = [], 0
    for name, entry in entries:
        begin, end = entry["data_offsets"]
        require(begin == at and end - begin == math.prod(entry["shape"]) * SIZES[entry["dtype"]], name, entry)
        found.append((name, entry["dtype"], entry["shape"], blob[8 + size + begin:8 + size + end]))
        at = end
    require(8 + size + at == len(blob), "the tensors end before the file")
    return found


def block_numbers(rows, cols, width):
    """The block of every element of a rectangle, by walking through it: a new one begins where the element's index in
    the parameter is a multiple of 256, and with every row of a rectangle that has only some of the columns."""
    whole = cols == (0, width)
    # A row of c of its columns touches at most this many blocks, and its scales take that many places.
    places = (cols[1] - cols[0] + 254) // 256 + 1
    numbers, number = [], 0
    for row in range(*rows):
        if not whole:
            number = (row - rows[0]) * places
        for col in range(*cols):
            begins_row = col == cols[0] and (row == rows[0] or not whole)
            number += (row * width + col) % 256 == 0 and not begins_row
            numbers.append(number)
    return numbers


def shapes_of(model, experts):
    hidden, ffn, vocab = model["hidden_size"], model["intermediate_size"], model["vocab_size"]
    head = model["head_dim"]
    q, kv = head * model["num_attention_heads"], head * model["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    count = experts["experts"] if experts else 0
    if not model["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(model["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
        }.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
        mlp, dense, inner = f"model.layers.{layer}.mlp.", "", ffn
        if count and layer >= experts["dense-layers"]:
            own, dense, inner = experts["expert-ffn"], "shared_experts.", experts["shared-experts"] * experts["expert-ffn"]
            shapes |= {f"{mlp}gate.weight": (count, hidden), f"{mlp}experts.gate_up_proj": (count * 2 * own, hidden),
                       f"{mlp}experts.down_proj": (count * hidden, own)}
        if inner:
            shapes |= {f"{mlp}{dense}{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
            shapes[f"{mlp}{dense}down_proj.weight"] = (hidden, inner)
        of_family = {"qwen2": {"q_proj.bias": q, "k_proj.bias": kv, "v_proj.bias": kv},
                     "qwen3": {"q_norm.weight": head, "k_norm.weight": head}}.get(model["model_type"], {})
        for name, size in of_family.items():
            shapes[f"model.layers.{layer}.self_attn.{name}"] = (size,)
    return shapes


def read(folder):
    """(manifest, {(state, parameter): values, row by row}, {name of an FP8 row, or experts/...: [row of each file]}); all
    checked."""
    folder = pathlib.Path(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    require(manifest["format"] == "train70b checkpoint" and manifest["version"] == 1, "format", manifest["format"])
    if not manifest["flags"]["batch-ramp"]:
        require(manifest["next_sample"] == manifest["step"] * int(manifest["flags"]["global-batch"]), "next_sample")
    axes = [manifest["layout"][axis] for axis in ("tp", "cp", "dp", "pp")]  # ep: of the same ranks
    require(manifest["ranks"] == math.prod(axes) == len(manifest["files"]), "ranks")
    listed = {"manifest.json", *(entry["name"] for entry in manifest["files"])}
    require({path.name for path in folder.iterdir()} == listed, "files", sorted(folder.iterdir()))
    tensors, fp8 = {}, {}
    for entry in manifest["files"]:
        blob = (folder / entry["name"]).read_bytes()
        require(len(blob) == entry["bytes"] and zlib.crc32(blob) == entry["crc32"], entry["name"], "size or checksum")
        content = safetensors(blob)
        require([name for name, *_ in content] == entry["tensors"], entry["name"], "lists other tensors")
        for name, dtype, shape, data in content:
            values = array.array(FORMATS[dtype], data)
            if name.startswith("fp8/"):
                require(dtype == "F32" and shape == [2 + int(manifest["flags"]["fp8-history"])], name, shape)
                fp8.setdefault(name[4:], []).append(list(values))
            elif name.startswith("experts/"):
                require(dtype == "F32" and shape == [manifest["experts"]["experts"]], name, shape)
                fp8.setdefault(name, []).append(list(values))
            else:
                require(name not in tensors, name, "is in two files")
                tensors[name] = (dtype, shape, values)
    shapes = shapes_of(manifest["model"], manifest.get("experts"))
    states = ["weight"] if manifest["kind"] == "weights" else ["weight", "exp_avg", "exp_avg_sq"]
    wide = "F64" if manifest["dtype"] == "fp64" else "F32"
    found = {(state, name): [None] * math.prod(shape) for name, shape in shapes.items() for state in states}
    for name, (dtype, shape, values) in tensors.items():
        match = NAME.fullmatch(name)
        require(match, name)
        state, param = match[1], match[2]
        whole = shapes[param]
        require((match[5] is not None) == (len(whole) == 2), name, "of", whole)
        rows, cols = (int(match[3]), int(match[4])), (int(match[5] or 0), int(match[6] or 1))
        width = whole[1] if len(whole) == 2 else 1
        require(0 <= rows[0] < rows[1] <= whole[0] and 0 <= cols[0] < cols[1] <= width, name, "of", whole)
        if state == "scale":
            require(all(name.replace("scale", each, 1) in tensors for each in LEVELS), name, "has no codes")
            continue
        require(shape == [b - a for a, b in ((rows, cols) if len(whole) == 2 else (rows,))], name, shape)
        if state != "weight" and manifest["optimizer"] == "adamw8bit":
            blocks = block_numbers(rows, cols, width)
            _, scale_shape, scales = tensors[name.replace(state, "scale", 1)]
            require(dtype == "U8" and scale_shape[0] == 2 and max(blocks) < scale_shape[1], name, scale_shape)
            first = scale_shape[1] if state == "exp_avg_sq" else 0
            values = [scales[first + block] * LEVELS[state][code] for code, block in zip(values, blocks)]
        else:
            require(dtype == wide, name, dtype)
        full, size = found[state, param], cols[1] - cols[0]
        for row in range(*rows):
            at, begin = row * width + cols[0], (row - rows[0]) * size
            require(full[at:at + size] == [None] * size, name, "overlaps another")
            full[at:at + size] = values[begin:begin + size]
    for (state, name), values in found.items():
        require(None not in values, state, name, "is not complete")
        require(all(map(math.isfinite, values)), state, name, "is not finite")
    return manifest, found, fp8


def read_hf(folder):
    """{parameter: (dtype, values)}"""
    found = {}
    for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
        for name, dtype, _, data in safetensors(path.read_bytes()):
            if dtype == "BF16":
                values = [struct.unpack("<f", b"\0\0" + data[i:i + 2])[0] for i in range(0, len(data), 2)]
            else:
                values = list(array.array(FORMATS[dtype], data))
            found[name] = (dtype, values)
    return found


def to_bf16(x):
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    return struct.unpack("<f", struct.pack("<I", (bits + 0x7fff + (bits >> 16 & 1)) >> 16 << 16 & 0xffffffff))[0]


def check_hf(states, folder, dtype):
    """The weights of a checkpoint are those of a Hugging Face folder, bit for bit."""
    saved = read_hf(folder)
    weights = {name: values for (state, name), values in states.items() if state == "weight"}
    require(saved.keys() == weights.keys(), folder, "has other parameters", sorted(saved))
    for name, (stored, values) in saved.items():
        require(stored == {"bf16": "BF16", "fp32": "F32", "fp64": "F64"}[dtype], name, stored)
        mine = [to_bf16(x) for x in weights[name]] if dtype == "bf16" else list(weights[name])
        require(mine == values, folder, name, "differs")


def relative_difference(a, b):
    """The largest ||a - b|| / ||b|| of a state of a parameter."""
    require(a.keys() == b.keys(), "other states")
    worst = 0.0
    for key in a:
        norm = math.sqrt(math.fsum(y * y for y in b[key]))
        far = math.sqrt(math.fsum((x - y) ** 2 for x, y in zip(a[key], b[key])))
        require(len(a[key]) == len(b[key]) and norm > 0, key)
        worst = max(worst, far / norm)
    return worst


def check_again_quantized(a, b):
    """8-bit moments that were loaded in another layout. Returns the part of them that differs."""
    differ = total = 0
    for (state, name), values in a.items():
        if state == "weight":
            require(values == b[state, name], name, "differs")
            continue
        # Half of the widest gap between two levels, of the largest magnitude that a block can have.
        bound = max(y - x for x, y in zip(LEVELS[state], LEVELS[state][1:])) / 2 * 1.0001
        begins = range(0, len(values), 256)
        largest = {begin: max(map(abs, values[begin:begin + 256])) for begin in begins}
        for i, (x, y) in enumerate(zip(values, b[state, name])):
            require(abs(x - y) <= bound * largest[i // 256 * 256], state, name, i, x, y)
            require(state == "exp_avg" or (x > 0) == (y > 0), name, "has a second moment that became 0", i, x, y)
            differ += x != y
            total += 1
    return differ / total


# ---- the runs --------------------------------------------------------------------------------------------------------

SHAPE = ("--layers 4 --hidden 48 --heads 6 --kv-heads 2 --ffn 80 --vocab 259 --seq-len 24 --global-batch 4 "
         "--init-std 0.1 --lr 0.002 --warmup-steps 2 --steps 4").split()
ENVIRONMENT = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
               "OMPI_MCA_btl_vader_single_copy_mechanism": "none", "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "1000"}


class Runs:
    def __init__(self, program, work):
        self.program, self.work = program, work

    def __call__(self, ranks, flags):
        self.start(ranks, [*SHAPE, *flags.split()])

    def start(self, ranks, flags):
        command = ["mpirun", "--oversubscribe", "-np", str(ranks), self.program, *flags]
        done = subprocess.run(command, cwd=self.work, capture_output=True, text=True, timeout=60, env=ENVIRONMENT)
        require(done.returncode == 0, "exit code", done.returncode, " ".join(command), done.stderr[-1000:])

    def checkpoint(self, name, ranks, flags):
        """Trains 3 of 4 steps, and saves the weights too. Returns what read() returns."""
        self(ranks, f"{flags} --stop-after 3 --checkpoint-dir {name} --save-hf {name}-hf")
        return read(self.work / name / "step-3")


def check_layouts(run):
    """fp64: all states of every layout are one rank's."""
    _, one, _ = run.checkpoint("one", 1, "--dtype fp64")
    check_hf(one, run.work / "one-hf", "fp64")
    worst = 0.0
    for name, flags in (("tp-pp", "--tp 2 --pp 2"), ("dp-tp", "--dp 2 --tp 2 --zero 1 --sequence-parallel on"),
                        ("dp-cp", "--dp 2 --cp 2 --zero 3")):
        manifest, states, _ = run.checkpoint(name, 4, f"--dtype fp64 {flags}")
        require(manifest["kind"] == "full" and manifest["step"] == 3, manifest["kind"], manifest["step"])
        difference = relative_difference(states, one)
        require(difference <= 1e-10, name, difference)
        worst = max(worst, difference)
    tied = "--dtype fp64 --tied-embeddings on"
    _, one, _ = run.checkpoint("tied-one", 1, tied)
    check_hf(one, run.work / "tied-one-hf", "fp64")
    _, states, _ = run.checkpoint("tied", 4, f"{tied} --tp 2 --pp 2")
    require(("weight", "lm_head.weight") not in states, "a tied model's head")
    difference = relative_difference(states, one)
    require(difference <= 1e-10, "tied", difference)
    return f"4 layouts, the largest relative difference {max(worst, difference):.1e}"


def check_weights(run):
    """bf16 with weights only, 8-bit moments, FP8: the weights are those that --save-hf writes."""
    manifest, states, fp8 = run.checkpoint("bf16", 4, "--dtype bf16 --tp 2 --dp 2 --zero 2 --optimizer adamw8bit "
                                           "--fp8 delayed --fp8-history 4 --weights-every 2")
    check_hf(states, run.work / "bf16-hf", "bf16")
    require(any(x != to_bf16(x) for x in states["weight", "lm_head.weight"]), "no fp32 masters")
    require(fp8 and all(len(rows) == 4 for rows in fp8.values()), "FP8 rows", {k: len(v) for k, v in fp8.items()})
    for rows in fp8.values():
        require(all(row[1] == 0 or row[1] > 0 for row in rows) and all(x >= 0 for row in rows for x in row), rows)
    kind, weights, none = read(run.work / "bf16" / "weights-2")
    require(kind["kind"] == "weights" and {state for state, _ in weights} == {"weight"} and not none, "weights-2")
    again = "--dtype bf16 --optimizer adamw8bit --fp8 delayed --fp8-history 4 --stop-after 3 --resume-from"
    run(1, f"{again} bf16/step-3 --save-hf bf16-again")
    check_hf(states, run.work / "bf16-again", "bf16")
    # Another layout takes the largest number of all ranks; other stages of the same layout too.
    largest = {name: [list(map(max, *rows))] for name, rows in fp8.items()}
    require(any(rows[0] != rows[-1] for rows in fp8.values()), "all ranks have the same FP8 rows")
    run(2, f"{again} bf16/step-3 --pp 2 --checkpoint-dir bf16-pp")
    run(2, f"{again} bf16-pp/step-3 --pp 2 --stage-layers 1,3 --checkpoint-dir bf16-stages")
    for name in ("bf16-pp", "bf16-stages"):
        require(read(run.work / name / "step-3")[2] == largest, name, "has other FP8 rows")
    return f"{len(states)} states, {len(fp8)} FP8 rows; --resume-from with --save-hf writes the same weights"


def check_other_layout(run):
    """8-bit moments in another layout: equal where blocks are cut or stay, quantized again where they are joined."""
    flags = "--optimizer adamw8bit"
    _, one, _ = run.checkpoint("eight", 1, flags)
    for name, ranks, layout in (("same", 1, ""), ("rows", 4, "--dp 4 --zero 3"), ("columns", 4, "--tp 2 --pp 2")):
        run(ranks, f"{flags} {layout} --resume-from eight/step-3 --stop-after 3 --checkpoint-dir eight-{name}")
        _, cut, _ = read(run.work / f"eight-{name}" / "step-3")
        require(cut == one, name, "differs by", check_again_quantized(one, cut))
    _, columns, _ = run.checkpoint("joined", 4, f"{flags} --tp 2 --pp 2")
    run(1, f"{flags} --resume-from joined/step-3 --stop-after 3 --checkpoint-dir joined-one")
    _, joined, _ = read(run.work / "joined-one" / "step-3")
    part = check_again_quantized(columns, joined)
    require(0 < part < 0.5, "quantized again:", part)
    return f"quantized again from tp 2 to one rank: {part:.1%}"


def check_experts(run):
    """Experts: all states, biases and loads are one rank's; weights alone have the biases, which --save-hf writes too."""
    flags = ("--dtype fp64 --qk-norm on --experts 4 --expert-ffn 32 --shared-experts 1 --dense-layers 1 --router sigmoid "
             "--router-bias-rate 0.01 --aux-loss-over batch")
    _, one, rows = run.checkpoint("sparse-one", 1, flags)
    _, states, of_ranks = run.checkpoint(
        "sparse", 4, f"{flags} --dp 2 --tp 2 --ep 2 --sequence-parallel on --zero 1 --weights-every 3")
    difference = relative_difference(states, one)
    require(difference <= 1e-10, difference)
    biases = {f"experts/model.layers.{layer}.mlp.gate.weight.bias" for layer in (1, 2, 3)}
    require({name for name in rows if name.endswith(".bias")} == biases and len(rows) == 6, sorted(rows))
    require(rows.keys() == of_ranks.keys() and all(row == rows[name][0] for name, all_of in of_ranks.items()
                                                   for row in all_of), "rows differ", rows, of_ranks)
    require(all(any(rows[name][0]) for name in biases), "no bias has moved", rows)
    saved = read_hf(run.work / "sparse-hf")
    for name in biases:
        stored = saved[name.removeprefix("experts/").removesuffix("weight.bias") + "e_score_correction_bias"]
        require(stored == ("F32", rows[name][0]), name, stored)
    _, weights, kept = read(run.work / "sparse" / "weights-3")
    require(kept == {name: of_ranks[name] for name in biases}, "weights-3", sorted(kept))
    require(all(values == states[key] for key, values in weights.items()), "weights-3 differs")
    return f"{len(states)} states, the largest relative difference {difference:.1e}; {len(rows)} rows equal"


def check_document(run):
    """The document's programs, on the checkpoints of the above: the same numbers."""
    fences = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), re.M | re.S)
    require(len(fences) == 2, "the document has", len(fences), "programs, not 2")
    for name, text in zip(("read_checkpoint.py", "checkpoint_to_hf.py"), fences):
        require(text.startswith(f"# {name}"), "a program is not", name)
        (run.work / name).write_text(text)
    python = next((each for each in (sys.executable, "/usr/bin/python3") if subprocess.run(
        [each, "-c", "import numpy"], capture_output=True).returncode == 0), None)
    if not python:
        return "skipped: no NumPy (Debian: python3-numpy)"

    def start(*arguments):
        done = subprocess.run([python, *arguments], cwd=run.work, capture_output=True, text=True, timeout=60)
        require(done.returncode == 0, arguments, done.stderr[-2000:])

    def refuses(what, *arguments):
        done = subprocess.run([python, *arguments], cwd=run.work, capture_output=True, text=True, timeout=60)
        require(done.returncode == 1 and what in done.stderr and done.stderr.count("\n") == 1, arguments, done.stderr)

    count = 0
    for name in ("one/step-3", "dp-cp/step-3", "bf16/step-3", "bf16/weights-2", "eight-columns/step-3", "sparse/step-3",
                 "sparse/weights-3"):
        start("read_checkpoint.py", name, "full.npz")
        manifest, states, rows = read(run.work / name)
        dump = ("import numpy, json\n"
                "for k, v in numpy.load('full.npz').items(): print(json.dumps([k, v.ravel().tolist()]))")
        done = subprocess.run([python, "-c", dump], cwd=run.work, capture_output=True, text=True, check=True)
        theirs = dict(json.loads(line) for line in done.stdout.splitlines())
        rows = {key: row[0] for key, row in rows.items() if key.startswith("experts/")}
        require({key: theirs.pop(key) for key in rows} == rows, name, "has other rows of experts")
        require(theirs.keys() == {f"{state}/{param}" for state, param in states}, name, sorted(theirs)[:3])
        for (state, param), values in states.items():
            mine = list(map(f32, values)) if manifest["dtype"] != "fp64" else list(values)
            require(mine == theirs[f"{state}/{param}"], name, state, param, "differs")
            count += len(mine)
        if rows:
            refuses("has experts", "checkpoint_to_hf.py", name, "sparse-converted")
            require(not (run.work / "sparse-converted").exists(), "a refused conversion leaves a folder")
            continue
        start("checkpoint_to_hf.py", name, "converted")
        check_hf(states, run.work / "converted", manifest["dtype"])
        folder = name.split("/")[0] + "-hf"
        if name.endswith("step-3") and (run.work / folder).exists():
            mine, theirs = (json.loads((run.work / each / "config.json").read_text()) for each in ("converted", folder))
            require(mine == theirs, name, "config.json", mine)
    data = bytearray((run.work / "one/step-3/rank-00000.safetensors").read_bytes())
    data[-1] ^= 1
    (run.work / "one/step-3/rank-00000.safetensors").write_bytes(data)
    refuses("rank-00000.safetensors: corrupt", "read_checkpoint.py", "one/step-3", "x.npz")
    run.start(1, "--load-hf converted --seq-len 24 --global-batch 4 --steps 1".split())
    return f"{count} numbers equal; the program loads what was converted"


def main():
    if len(sys.argv) == 3 and sys.argv[1] == "--read":
        manifest, states, fp8 = read(sys.argv[2])
        print(f"step {manifest['step']}, {manifest['kind']}: {len(states)} states, {len(fp8)} rows of FP8 and experts; all is there")
        return 0
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    failed = 0
    with tempfile.TemporaryDirectory() as work:
        run = Runs(str(pathlib.Path(sys.argv[1], "08_3d_full").resolve()), pathlib.Path(work))
        for check in (check_layouts, check_weights, check_other_layout, check_experts, check_document):
            name = check.__doc__.split("\n")[0].rstrip(".")
            try:
                print(f"ok   {name}: {check(run)}", flush=True)
            except (Bad, subprocess.TimeoutExpired) as error:
                print(f"FAIL {name}: {error}", flush=True)
                failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
