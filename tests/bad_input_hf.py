"""Bad input: a good folder of Hugging Face's with one thing wrong."""
import copy
import json
import os
import shutil
import struct

from bad_input_common import FIRST, SHAPE, after, odd_files, shown, write_text

# ---- Hugging Face folders ------------------------------------------------------------------------------------------
def read_tensors(path):
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8:8 + size]), data[8 + size:]


def safetensors(header, data, size=None, text=None):
    text = json.dumps(header).encode() if text is None else text
    return struct.pack("<Q", len(text) if size is None else size) + text + data


class Doubled:
    """JSON text with a key twice."""


def hf_cases(add, base):
    config = json.loads((base / "config.json").read_text())
    header, data = read_tensors(base / "model.safetensors")
    first = next(name for name in header if name != "__metadata__")

    def folder_with(**files):
        """Copies the good folder to hf and replaces files: name__ext=bytes, None: removed."""
        def setup(folder):
            write_text(folder)
            shutil.copytree(base, folder / "hf")
            for name, content in files.items():
                path = folder / "hf" / name.replace("__", ".")
                if content is None:
                    path.unlink()
                else:
                    path.write_bytes(content)
        return setup

    def case(name, setup, expected, **more):
        add("Hugging Face folders", name, FIRST, ["--load-hf", "hf"], expected, setup, **more)

    def changed(key, value):
        copied = {**config, key: value}
        return json.dumps(copied).encode()

    needed = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
        "rms_norm_eps"]
    for key in needed:
        without = {k: v for k, v in config.items() if k != key}
        case(f"config.json without {key}", folder_with(config__json=json.dumps(without).encode()),
            ["config.json", key])
    integers = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "vocab_size",
                "head_dim", "max_position_embeddings"]
    for key in integers:
        for value in ("32", [1], {"a": 1}, True, 0, -1, 1.5, 2**31, 2**63 - 1, 2**64, 1e30):
            case(f"config.json {key} {value!r}", folder_with(config__json=changed(key, value)), ["config.json", key])
    for key in ("rms_norm_eps", "rope_theta"):
        for value in ("1e-5", [1], {}, True, 0, -1e-5):
            case(f"config.json {key} {value!r}", folder_with(config__json=changed(key, value)), ["config.json", key])
        for value in ("NaN", "Infinity", "1e999"):
            text = json.dumps({**config, key: 7e77}).replace("7e+77", value).encode()
            case(f"config.json {key} {value}", folder_with(config__json=text), ["config.json"])
    for value in (1e308, 1e-308, 0.5):
        case(f"config.json rope_theta {value!r}", folder_with(config__json=changed("rope_theta", value)), "rope_theta")
    for key, value in (("model_type", "gemma2"), ("model_type", "qwen2_moe"), ("model_type", 1),
                       ("hidden_act", "gelu"), ("hidden_act", ["silu"]),
            ("attention_bias", True),
                       ("attention_bias", "yes"), ("mlp_bias", True), ("tie_word_embeddings", True),
                       ("tie_word_embeddings", 1), ("tie_word_embeddings", "yes"), ("tie_word_embeddings", [True]),
                       ("quantization_config", {"a": 1}),
                       ("partial_rotary_factor", 0.5), ("rope_scaling", []),
                       ("rope_scaling", {"type": "dynamic", "factor": 2}), ("rope_scaling", {"type": "linear"}),
                       ("rope_scaling", {"rope_type": "linear", "factor": "2"}),
                       ("rope_scaling", {"rope_type": "linear", "factor": 0}),
                       ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
                       ("rope_scaling", {"rope_type": "longrope", "factor": 4.0}),
                       ("layer_types", ["full_attention", "sliding_attention"]), ("layer_types", "full_attention"),
                       ("head_dim", 7), ("head_dim", 258), ("num_experts", 8), ("num_local_experts", 8),
                       ("rope_scaling", {"rope_type": "llama3"}), ("rope_scaling", {"rope_type": 3}),
                       ("rope_scaling", "none"),
                       ("rope_scaling", {"rope_type": "llama3", "factor": "8", "low_freq_factor": 1,
                           "high_freq_factor": 4, "original_max_position_embeddings": 8192}),
                       ("rope_scaling", {"rope_type": "llama3", "factor": 1e-300, "low_freq_factor": 1,
                           "high_freq_factor": 4, "original_max_position_embeddings": 8192}),
                       ("rope_scaling", {"rope_type": "linear", "factor": 1e300}),
                       ("rope_scaling", {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4,
                           "high_freq_factor": 1, "original_max_position_embeddings": 8192}),
                       ("rope_scaling", {"factor": 2}), ("rope_parameters", {"rope_theta": -1}),
                       ("rope_parameters", 7),
                       ("hidden_act", "\x1b[31m\n"), ("model_type", "m" * 3000)):
        case(f"config.json {key} {shown(value)}", folder_with(config__json=changed(key, value)), ["config.json", key])
    for name, changes, key in (
            ("a mistral without sliding_window", {"model_type": "mistral"}, "sliding_window"),
            ("a mistral with a window", {"model_type": "mistral", "sliding_window": 4096}, "sliding_window"),
            ("a qwen2 with windows", {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1},
             "use_sliding_window"),
            ("a qwen3 with windows", {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 0},
             "use_sliding_window"),
            ("a qwen2 whose use_sliding_window is 1", {"model_type": "qwen2", "use_sliding_window": 1},
             "use_sliding_window"),
            ("a qwen2 whose max_window_layers is text",
             {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": "all"}, "max_window_layers"),
            ("a mixtral without experts", {"model_type": "mixtral"}, "num_local_experts is missing"),
            ("a mixtral with too few experts",
             {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok"),
            ("a qwen3_moe without a size of experts",
             {"model_type": "qwen3_moe", "num_experts": 2, "num_experts_per_tok": 1}, "moe_intermediate_size"),
            ("a qwen3 with biases", {"model_type": "qwen3", "attention_bias": True}, "attention_bias")):
        case(f"config.json of {name}", folder_with(config__json=json.dumps({**config, **changes}).encode()),
            ["config.json", key])
    for name, changes, tensor in (("qwen2", {"model_type": "qwen2"}, "self_attn.q_proj.bias is missing"),
                                  ("mixtral", {"model_type": "mixtral", "num_local_experts": 2,
                                               "num_experts_per_tok": 1}, "block_sparse_moe.gate.weight is missing"),
                                  ("qwen3", {"model_type": "qwen3"}, "self_attn.q_norm.weight is missing"),
                                  ("wider heads", {"head_dim": 10}, "self_attn.q_proj.weight")):
        case(f"config.json of {name}, unlike the weights",
            folder_with(config__json=json.dumps({**config, **changes}).encode()), tensor)
    for key in ("hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size", "num_attention_heads",
            "num_key_value_heads"):
        other = {"num_attention_heads": 2, "num_key_value_heads": 1}.get(key, 2 * config[key])
        case(f"config.json {key} unlike the weights", folder_with(config__json=changed(key, other)), "hf")
    for name, text, expected in (
            ("empty", b"", "config.json"), ("a list", b"[]", "config.json"), ("a number", b"7", "config.json"),
            ("null", b"null", "config.json"),
            ("cut", json.dumps(config).encode()[:-10], "config.json"),
            ("more after it", json.dumps(config).encode() + b"{}", "config.json"),
            ("not UTF-8", b'{"model_type": "\xff\xfe"}', "config.json"), ("of zeros", b"\0" * 100, "config.json"),
            ("a comment", b"// comment\n" + json.dumps(config).encode(), "config.json"),
            ("nested lists", b"[" * 200000, "config.json"), ("nested objects", b'{"a":' * 200000, "config.json"),
            ("nested in a key", b'{"rope_scaling": ' + b"[" * 100 + b"]" * 100 + b"}", "config.json"),
            ("a key twice", b'{"hidden_size": 64, ' + json.dumps(config).encode()[1:], ["config.json", "hidden_size"]),
            ("UTF-16", json.dumps(config).encode("utf-16"), "config.json"),
            ("a newline in a string", b'{"model_type": "a\nb"}', "config.json")):
        case(f"config.json {name}", folder_with(config__json=text), expected)
    case("no config.json", folder_with(config__json=None), "config.json")
    case("no weights", folder_with(model__safetensors=None), "hf")

    # model.safetensors
    good = safetensors(header, data)
    for length in (0, 1, 7, 8, 9, 100, len(good) - len(data) - 1, len(good) - len(data), len(good) - 1):
        case(f"model.safetensors cut to {length}", folder_with(model__safetensors=good[:length]), "model.safetensors")
    case("model.safetensors with a byte more", folder_with(model__safetensors=good + b"\0"), "model.safetensors")
    for size in (0, 1, 2**31, 2**62, 2**63, 2**64 - 1, 2**64 - 8, len(good)):
        case(f"model.safetensors: header of {size} bytes", folder_with(model__safetensors=safetensors(header, data,
            size)), "model.safetensors")
    for name, text in (("[]", b"[]"), ("7", b"7"), ("{", b"{"),
            ("nested lists", b'{"a":{"shape":' + b"[" * 200000 + b"}}"), ("null", b"null"),
                       ("nested objects", b'{"a":' * 200000), ("zeros", b"\0" * 64), ("not UTF-8", b'{"\xff": {}}')):
        case(f"model.safetensors: header {name}", folder_with(model__safetensors=safetensors(header, data,
            text=text)), "model.safetensors")

    def entry(**fields):
        copied = copy.deepcopy(header)
        for key, value in fields.items():
            if value is None:
                del copied[first][key]
            else:
                copied[first][key] = value
        return safetensors(copied, data)
    begin, end = header[first]["data_offsets"]
    shape = header[first]["shape"]
    for name, fields in (
            ("no dtype", {"dtype": None}), ("dtype I64", {"dtype": "I64"}), ("dtype F16", {"dtype": "F16"}),
            ("dtype 7", {"dtype": 7}),
            ("dtype BF16", {"dtype": "BF16"}), ("dtype F64", {"dtype": "F64"}),
            ("dtype with ESC", {"dtype": "\x1b[31m"}), ("dtype long", {"dtype": "F" * 3000}),
            ("no shape", {"shape": None}), ("shape 7", {"shape": 7}), ("shape empty", {"shape": []}),
            ("shape negative", {"shape": [-shape[0], -shape[1]]}),
            ("shape of strings", {"shape": ["1"]}), ("shape fractional", {"shape": [1.5]}),
            ("shape transposed", {"shape": [shape[1], shape[0]]}),
            ("shape flat", {"shape": [shape[0] * shape[1]]}), ("shape of three", {"shape": [1] + shape}),
            ("shape of 2^62", {"shape": [2**62, 4]}),
            ("shape of 2^63", {"shape": [2**63, 2]}), ("shape of 2^64", {"shape": [2**64]}),
            ("shape with zero", {"shape": [0, 2**60]}),
            ("shape of 300000 ones", {"shape": [1] * 300000}), ("shape of 300000 strings", {"shape": ["1"] * 300000}),
            ("shape 2^32 x 2^32", {"shape": [2**32, 2**32]}),
            ("no offsets", {"data_offsets": None}), ("offsets 7", {"data_offsets": 7}),
            ("offsets of one", {"data_offsets": [0]}), ("offsets of three", {"data_offsets": [0, 1, 2]}),
            ("offsets negative", {"data_offsets": [-1, end]}), ("offsets reversed", {"data_offsets": [end, begin]}),
            ("offsets beyond", {"data_offsets": [begin, 2**62]}),
            ("offsets 2^64", {"data_offsets": [begin, 2**64 - 1]}),
            ("offsets shifted", {"data_offsets": [begin + 4, end + 4]}),
            ("offsets shorter", {"data_offsets": [begin, end - 4]})):
        case(f"model.safetensors: {name}", folder_with(model__safetensors=entry(**fields)),
            ["model.safetensors", first])

    def tensors(change):
        copied = copy.deepcopy(header)
        change(copied)
        return safetensors(copied, data)
    case("a tensor missing", folder_with(model__safetensors=tensors(lambda h: h.pop(first))), "hf")
    case("a tensor renamed", folder_with(model__safetensors=tensors(lambda h: h.update(other=h.pop(first)))), "hf")
    case("a tensor more", folder_with(model__safetensors=tensors(lambda h: h.update(more={"dtype": "F32",
        "shape": [0], "data_offsets": [0, 0]}))), ["model.safetensors", "more"])
    case("a tensor more with ESC",
        folder_with(model__safetensors=tensors(lambda h: h.update({"\x1b[31m\n": {"dtype": "F32", "shape": [0],
            "data_offsets": [0, 0]}}))), "model.safetensors")
    case("a tensor more with a long name",
        folder_with(model__safetensors=tensors(lambda h: h.update({"m" * 5000: {"dtype": "F32", "shape": [0],
            "data_offsets": [0, 0]}}))), "model.safetensors")
    case("a tensor's entry is a list", folder_with(model__safetensors=tensors(lambda h: h.update({first: []}))),
        ["model.safetensors", first])
    case("a tensor's entry is null", folder_with(model__safetensors=tensors(lambda h: h.update({first: None}))),
        ["model.safetensors", first])
    twice = json.dumps(header)[:-1] + f', "{first}": {json.dumps(header[first])}' + "}"
    case("a tensor twice", folder_with(model__safetensors=safetensors(header, data, text=twice.encode())),
        ["model.safetensors", first])
    shape_twice = json.dumps(header).replace('"shape"', '"shape": [7], "shape"', 1)
    case("a shape twice", folder_with(model__safetensors=safetensors(header, data, text=shape_twice.encode())),
        ["model.safetensors", "shape"])

    # the index
    names = [name for name in header if name != "__metadata__"]
    def indexed(weight_map, text=None, *more):
        def setup(folder):
            folder_with()(folder)
            (folder / "hf/model.safetensors").rename(folder / "hf/a.safetensors")
            content = json.dumps({"weight_map": weight_map}).encode() if text is None else text
            (folder / "hf/model.safetensors.index.json").write_bytes(content)
            for step in more:
                step(folder / "hf")
        return setup
    full = {name: "a.safetensors" for name in names}
    index = "model.safetensors.index.json"
    for name, weight_map, expected in (
            ("traversal", {**full, first: "../hf/a.safetensors"}, index),
            ("absolute", {**full, first: "/etc/passwd"}, index), ("empty name", {**full, first: ""}, index),
            ("dots", {**full, first: ".."}, index), ("a dot", {**full, first: "."}, index),
            ("a number", {**full, first: 7}, index), ("null", {**full, first: None}, index),
            ("a list", {**full, first: ["a.safetensors"]}, index),
            ("a missing file", {**full, first: "b.safetensors"}, "b.safetensors"),
            ("a name of 300 bytes", {**full, first: "b" * 300}, "hf"),
            ("a name with ESC", {**full, first: "\x1b[31m"}, "hf"),
            ("a name with a newline", {**full, first: "a\nb"}, "hf"),
            ("a name with zero", {**full, first: "a.safetensors\0"}, "hf"),
            ("config.json as a shard", {**full, first: "config.json"}, "config.json"),
            ("a tensor more", {**full, "more": "a.safetensors"}, "more"),
            ("a tensor less", {k: v for k, v in full.items() if k != first}, first), ("empty", {}, index),
            ("a list of pairs", [[first, "a.safetensors"]], index),
            ("a long name", {**full, first: "b" * 5000}, "hf"), ("itself", {**full, first: index}, index)):
        case(f"index: {name}", indexed(weight_map), expected)
    for name, text in (("empty", b""), ("a list", b"[]"), ("no map", b"{}"), ("cut", b'{"weight_map": {'),
            ("null map", b'{"weight_map": null}'), ("nested", b"[" * 200000),
                       ("nested in the map", b'{"weight_map": {"a": ' + b"[" * 100000 + b"}}"),
                       ("not UTF-8", b'{"weight_map": {"\xff": "a.safetensors"}}')):
        case(f"index: {name}", indexed(None, text), index)
    case("index: a file with a tensor twice", indexed({**full, first: "b.safetensors"}, None,
        lambda hf: shutil.copy(hf / "a.safetensors", hf / "b.safetensors")), "b.safetensors")

    # what is no regular file
    for name in ("config.json", "model.safetensors", index):
        def remake(make, name=name):
            def setup(folder):
                (indexed(full) if name == index else folder_with())(folder)
                (folder / "hf" / name).unlink()
                make(folder / "hf" / name)
            return setup
        case(f"{name} is a folder", remake(lambda p: p.mkdir()), [name])
        case(f"{name} is a FIFO", remake(os.mkfifo), [name])
        case(f"{name} is a loop", remake(lambda p: p.symlink_to(p.name)), ["hf"])
        case(f"{name} is a device", remake(lambda p: p.symlink_to("/dev/zero")), [name])
        case(f"{name} leads nowhere", remake(lambda p: p.symlink_to("nowhere")), ["hf"])
    for name, value in (("a file", "text.txt"), ("nothing", "nowhere"), ("a FIFO", "fifo"), ("a loop", "loop"),
            ("a long name", "n" * 300), ("a Latin-1 name", b"caf\xe9")):
        add("Hugging Face folders", f"--load-hf {name}", FIRST, ["--load-hf", value], "--load-hf", after(odd_files))
    for flag in [*SHAPE, "--head-dim", "--qkv-bias", "--qk-norm", "--mup"]:
        value = "on" if flag.startswith("--q") else "2"
        add("Hugging Face folders", f"--load-hf with {flag}", FIRST, ["--load-hf", "hf", flag, value],
            [flag, "--load-hf"], folder_with())
    add("Hugging Face folders", "--load-hf with --tied-embeddings", FIRST,
        ["--load-hf", "hf", "--tied-embeddings", "on"], ["--tied-embeddings", "--load-hf"], folder_with())
    add("Hugging Face folders", "--load-hf with --model", FIRST, ["--load-hf", "hf", "--model", "tiny"],
        ["--model", "--load-hf"], folder_with())
    for ranks, program in ((2, "02_data_parallel"), (2, "08_3d_full")):
        add("Hugging Face folders", "a tensor missing", program, ["--load-hf", "hf"], "hf",
            folder_with(model__safetensors=tensors(lambda h: h.pop(first))), ranks=ranks)
