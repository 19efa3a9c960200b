"""Reads checkpoints as docs/checkpoint-format.md describes them, by code that shares nothing with the program or the
document's own readers. What is wrong is an assertion.
"""
import json
import math
import pathlib
import re
import zlib

import numpy as np

DTYPES = {"F64": "<f8", "F32": "<f4", "U8": "u1", "BF16": "<u2"}
NAME = re.compile(r"([a-z_]+)/([A-Za-z0-9_.]+)\[(\d+):(\d+)(?:,(\d+):(\d+))?\]")


def moment_levels():
    """{state: 255 levels}, ascending by code."""
    first, second, top = [0.0], [0.0], 1e-6
    for decade in range(7):
        count = 2 ** decade
        first += [top * (0.1 + 0.9 * i / count) for i in range(1, count + 1)]
        second += [top * (0.1 + 0.9 * i / (2 * count)) for i in range(1, 2 * count + 1)]
        top *= 10
    return {"exp_avg": np.float32([-x for x in reversed(first[1:])] + first), "exp_avg_sq": np.float32(second)}


LEVELS = moment_levels()


def safetensors(blob):
    """{name: array}; checks that the tensors are the rest of the file, in order, without gaps. BF16 as its bits."""
    size = int.from_bytes(blob[:8], "little")
    found, at = {}, 0
    for name, entry in json.loads(blob[8:8 + size]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            values = np.frombuffer(blob[8 + size + begin:8 + size + end], DTYPES[entry["dtype"]])
            assert begin == at and end >= begin, name
            found[name], at = values.reshape(entry["shape"]), end
    assert 8 + size + at == len(blob), "the tensors end before the file"
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
    return np.array(numbers).reshape(rows[1] - rows[0], cols[1] - cols[0])


def shapes_of(model, experts):
    hidden, ffn, vocab = model["hidden_size"], model["intermediate_size"], model["vocab_size"]
    head = model["head_dim"]
    q, kv = head * model["num_attention_heads"], head * model["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not model["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    of_family = {"qwen2": {"q_proj.bias": (q,), "k_proj.bias": (kv,), "v_proj.bias": (kv,)},
                 "qwen3": {"q_norm.weight": (head,), "k_norm.weight": (head,)}}.get(model["model_type"], {})
    attention = {"q_proj.weight": (q, hidden), "k_proj.weight": (kv, hidden), "v_proj.weight": (kv, hidden),
                 "o_proj.weight": (hidden, q)} | of_family
    for layer in range(model["num_hidden_layers"]):
        of_layer = {f"self_attn.{name}": shape for name, shape in attention.items()}
        of_layer |= {f"{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        dense, inner = "", ffn
        if experts and layer >= experts["dense-layers"]:
            own = experts["expert-ffn"]
            dense, inner = "shared_experts.", experts["shared-experts"] * own
            of_layer |= {"mlp.gate.weight": (experts["experts"], hidden),
                         "mlp.experts.gate_up_proj": (experts["experts"] * 2 * own, hidden),
                         "mlp.experts.down_proj": (experts["experts"] * hidden, own)}
        if inner:
            of_layer |= {f"mlp.{dense}{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
            of_layer[f"mlp.{dense}down_proj.weight"] = (hidden, inner)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    return shapes


def read_files(folder, manifest):
    """({tensor: array}, {row of FP8 or experts: [that of each file]}): all that the manifest lists and nothing else."""
    listed = {"manifest.json", *(entry["name"] for entry in manifest["files"])}
    assert {path.name for path in folder.iterdir()} == listed
    tensors, rows = {}, {}
    for entry in manifest["files"]:
        blob = (folder / entry["name"]).read_bytes()
        assert (len(blob), zlib.crc32(blob)) == (entry["bytes"], entry["crc32"]), entry["name"]
        content = safetensors(blob)
        assert list(content) == entry["tensors"], entry["name"]
        for name, values in content.items():
            if name.startswith(("fp8/", "experts/", "skip_step/", "loss_scale/")):
                count = (2 + int(manifest["flags"]["fp8-history"]) if name[0] == "f" else
                         129 if name[0] == "s" else 2 if name[0] == "l" else manifest["experts"]["experts"])
                assert values.dtype == "<f4" and values.shape == (count,), name
                rows.setdefault(name, []).append(values.tolist())
            else:
                assert name not in tensors, f"{name} is in two files"
                tensors[name] = values
    return tensors, rows


def read(folder):
    """(manifest, {state/parameter: array}, {row of FP8, or experts/...: [that of each file]}); all checked."""
    folder = pathlib.Path(folder)
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    assert manifest["format"] == "train70b checkpoint" and manifest["version"] == 1
    if not manifest["flags"]["batch-ramp"]:
        batch = int(manifest["flags"]["global-batch"])
        batches = [(each["from_step"], each["global_batch"]) for each in manifest.get("batches", ())] or [(1, batch)]
        ends = [step for step, _ in batches[1:]] + [manifest["step"] + 1]
        assert batches[0][0] == 1 and batches[-1][1] == batch
        assert manifest["next_sample"] == sum((end - step) * size for (step, size), end in zip(batches, ends))
    axes = [manifest["layout"][axis] for axis in ("tp", "cp", "dp", "pp")]  # ep: of the same ranks
    assert manifest["ranks"] == math.prod(axes) == len(manifest["files"])
    tensors, rows = read_files(folder, manifest)
    shapes = shapes_of(manifest["model"], manifest.get("experts"))

    def states_of(name):
        if manifest["kind"] == "weights":
            return ["weight"]
        muon = manifest["optimizer"] == "muon" and ".layers." in name and len(shapes[name]) == 2
        return ["weight", "exp_avg"] if muon else ["weight", "exp_avg", "exp_avg_sq"]
    wide = np.dtype("<f8" if manifest["dtype"] == "fp64" else "<f4")
    found = {f"{state}/{name}": np.full((*shape, 1)[:2], np.nan, wide)
             for name, shape in shapes.items() for state in states_of(name)}
    for name, values in tensors.items():
        match = NAME.fullmatch(name)
        state, param = match[1], match[2]
        (height, width), is_matrix = (*shapes[param], 1)[:2], len(shapes[param]) == 2
        rectangle = rows_of, cols = (int(match[3]), int(match[4])), (int(match[5] or 0), int(match[6] or 1))
        assert (match[5] is not None) == is_matrix, name
        assert 0 <= rows_of[0] < rows_of[1] <= height and 0 <= cols[0] < cols[1] <= width, name
        if state == "scale":
            assert all(name.replace("scale", each, 1) in tensors for each in LEVELS), f"{name} has no codes"
            continue
        assert values.shape == tuple(end - begin for begin, end in rectangle[:1 + is_matrix]), name
        values = values.reshape(rows_of[1] - rows_of[0], -1)
        if state != "weight" and manifest["optimizer"] == "adamw8bit":
            scales = tensors[name.replace(state, "scale", 1)]
            assert values.dtype == "u1" and values.max() < 255 and len(scales) == 2, name
            values = scales[int(state == "exp_avg_sq")][block_numbers(rows_of, cols, width)] * LEVELS[state][values]
        assert values.dtype == wide, name
        part = found[f"{state}/{param}"][slice(*rows_of), slice(*cols)]
        assert np.isnan(part).all(), f"{name} overlaps another"
        part[:] = values
    for name, values in found.items():
        assert np.isfinite(values).all(), f"{name} is not complete and finite"
    return manifest, {name: values.reshape(shapes[name.split("/")[1]]) for name, values in found.items()}, rows


def to_bf16(values):
    """The bits of the nearest bf16 values, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7fff + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def read_hf(folder):
    """{parameter: array} of a Hugging Face folder, BF16 as its bits."""
    blobs = [path.read_bytes() for path in sorted(pathlib.Path(folder).glob("*.safetensors"))]
    return {name: values for blob in blobs for name, values in safetensors(blob).items()}
