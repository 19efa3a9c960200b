#!/usr/bin/env python3
"""Families of models against Hugging Face's own classes, in fp64: gradients, losses, norms, trained weights, logits.

Run:   hf_families.py [--bin build/bin] [--seed N] [--cases N] [--tied on|off|both] [--family NAME,...] [--ranks 1|8]
Needs transformers and torch from PyPI, so tests/run.sh leaves it out.

Each case draws a small model of a family and lets its class in transformers create it and save it. The program trains
four steps from that folder, on one rank and on eight (LAYOUTS); the class trains on the same batches with torch's
AdamW. Every gradient of step 1, every loss and norm, every weight after step 4 must agree to 1e-9 (of tensors: relative norm).
Then transformers loads what --save-hf wrote, with every key in its place, and must compute the same logits.

transformers computes norms, RoPE and softmax in fp32 whatever the model's dtype; here its code runs with fp64 in the
place of fp32 (in_double), or nothing could agree to more than seven digits. Of experts it holds one tensor per layer,
where the Hub's files have one for each expert: per_expert() cuts, and half of the folders have them stacked.
"""
import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import transformers
from safetensors.torch import load_file, save_file

TOLERANCE = 1e-9
STEPS = 4
WITH_EXPERTS = ("mixtral", "qwen3-moe", "dots1")
FAMILIES = ("llama", "llama-linear", "llama-llama3", "mistral", "qwen2", "qwen3", "smollm2") + WITH_EXPERTS
LAYOUTS = ("--dp 2 --tp 2 --pp 2",)
EXPERTS_LAYOUTS = ("--dp 4 --tp 2 --ep 2", "--dp 2 --tp 2 --pp 2 --ep 2", "--dp 2 --cp 2 --tp 2 --ep 4", "--dp 8 --ep 4")


@contextlib.contextmanager
def in_double():
    """Casts to fp32 become casts to fp64."""
    before = torch.Tensor.to, torch.Tensor.type, torch.Tensor.float, torch.arange, torch.nn.functional.softmax
    to, to_type, _, arange, softmax = before

    def swapped(value):
        return torch.float64 if value is torch.float32 else value

    def in_place_of(function):
        return lambda *args, **kwargs: function(*map(swapped, args),
                                                **{key: swapped(value) for key, value in kwargs.items()})
    torch.Tensor.to, torch.Tensor.type, torch.Tensor.float = in_place_of(to), in_place_of(to_type), torch.Tensor.double
    torch.arange, torch.nn.functional.softmax = in_place_of(arange), in_place_of(softmax)
    try:
        yield
    finally:
        torch.Tensor.to, torch.Tensor.type, torch.Tensor.float, torch.arange, torch.nn.functional.softmax = before


def draw_config(family, tied, dice):
    heads = dice.choice((2, 4, 6, 8))
    kv_heads = dice.choice([k for k in range(1, heads + 1) if heads % k == 0 and (k % 2 == 0 or k == 1)])
    head_dim = dice.choice((4, 6, 8))
    shape = dict(
        vocab_size=dice.choice((256, 259, 300)), hidden_size=heads * head_dim, num_attention_heads=heads,
        num_key_value_heads=kv_heads, num_hidden_layers=dice.choice((2, 3, 4)), max_position_embeddings=64,
        intermediate_size=dice.choice((24, 40, 66)), rms_norm_eps=dice.choice((1e-6, 1e-5, 1e-3)),
        tie_word_embeddings=tied, attention_dropout=0.0, bos_token_id=None, eos_token_id=None)
    rope = {"rope_type": "default", "rope_theta": dice.choice((1e4, 1e5, 1e6))}
    if family == "llama-linear":
        rope.update(rope_type="linear", factor=dice.choice((2.0, 3.5)))
    if family == "llama-llama3":
        rope.update(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                    original_max_position_embeddings=dice.choice((16, 256)))
    if family == "smollm2":
        shape.update(num_attention_heads=6, num_key_value_heads=2, hidden_size=6 * head_dim, rms_norm_eps=1e-5)
        rope["rope_theta"] = 1e5
    other_head = dice.choice((2, 10, 12))
    config_of = {"mistral": transformers.MistralConfig, "qwen2": transformers.Qwen2Config,
                 "qwen3": transformers.Qwen3Config, "mixtral": transformers.MixtralConfig,
                 "qwen3-moe": transformers.Qwen3MoeConfig, "dots1": transformers.Dots1Config}.get(family, transformers.LlamaConfig)
    if family in ("qwen3", "qwen3-moe", "dots1") or family.startswith(("llama", "mi")) and dice.random() < 0.5:
        shape["head_dim"] = other_head
    if family in ("mistral", "mixtral", "dots1"):
        shape["sliding_window"] = None
    if family == "mixtral":
        shape.update(num_local_experts=dice.choice((4, 8, 12)), num_experts_per_tok=dice.choice((2, 3)))
    if family == "qwen3-moe":
        normalized = dice.random() < 0.5
        shape.update(num_experts=dice.choice((4, 8, 12)), moe_intermediate_size=dice.choice((6, 10, 16)),
                     num_experts_per_tok=dice.choice((2, 3) if normalized else (1, 2, 3)), norm_topk_prob=normalized,
                     mlp_only_layers=dice.choice(([], [0])))
    if family == "dots1":
        normalized = dice.random() < 0.7
        groups, top_groups = dice.choice(((1, 1), (2, 1), (4, 2), (4, 3)))
        shape.update(n_routed_experts=dice.choice((8, 12, 16)), moe_intermediate_size=dice.choice((6, 10, 16)),
                     n_shared_experts=dice.choice((1, 2)), num_experts_per_tok=dice.choice((2, 3)),
                     norm_topk_prob=normalized, n_group=groups, topk_group=top_groups,
                     routed_scaling_factor=dice.choice((1.0, 2.5)), first_k_dense_replace=dice.choice((0, 1)))
    return config_of(**shape, rope_parameters=rope)


def eager(config):
    experts = hasattr(config, "num_experts_per_tok")  # grouped products have no kernel for fp64
    return {"attn_implementation": "eager", **({"experts_implementation": "eager"} if experts else {})}


def make_model(config, key):
    """The family's own class, in fp64, all of its parameters drawn: none starts as 0 or 1."""
    torch.manual_seed(key)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64, **eager(config))
    model = model.double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
        for bias in biases(model).values():  # an fp32 number in any file
            bias.copy_(torch.randn(bias.shape, dtype=torch.float32).mul(0.05))
    return model.train()


def biases(model):
    """The selection biases, which are buffers."""
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")}


def weights_of(model):
    return {**{name: p.detach() for name, p in model.named_parameters()}, **biases(model)}


def per_expert(tensors, family):
    """Tensors by the names of transformers' classes -> by those of the Hub's files."""
    if family not in WITH_EXPERTS:
        return tensors
    gate, up, down = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    result = {}
    for name, value in tensors.items():
        if family == "mixtral":
            name = name.replace(".mlp.", ".block_sparse_moe.")
        prefix, _, kind = name.rpartition(".")
        for expert, matrix in enumerate(value if value.dim() == 3 else []):
            parts = zip((gate, up), matrix.chunk(2)) if kind == "gate_up_proj" else [(down, matrix)]
            result.update({f"{prefix}.{expert}.{part}.weight": rows for part, rows in parts})
        if value.dim() != 3:
            result[name] = value
    return result


def write_old_keys(folder):
    """config.json as transformers 4 wrote it: rope_theta and rope_scaling; num_experts of Qwen3-MoE."""
    path = os.path.join(folder, "config.json")
    with open(path) as file:
        config = json.load(file)
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype", "float64")
    if config["model_type"] == "qwen3_moe" and "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    with open(path, "w") as file:
        json.dump(config, file)


def run_program(args, ranks, folder, model, flags):
    program = os.path.join(args.bin, "01_single_gpu" if ranks == 1 else "08_3d_full")
    command = [program, "--load-hf", model, "--data", os.path.join(folder, "data.txt"), "--dtype", "fp64",
               "--device", "cpu", "--steps", str(STEPS), "--save-reference", os.path.join(folder, f"reference{ranks}"),
               "--save-hf", os.path.join(folder, f"saved{ranks}"), "--val-fraction", "0"] + flags
    if ranks > 1:
        command = ["mpirun", "--oversubscribe", "-np", str(ranks)] + command
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                   "OMP_NUM_THREADS": "1", "OMPI_MCA_btl_vader_single_copy_mechanism": "none"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-3000:]}")
    with open(os.path.join(folder, f"reference{ranks}", "reference.json")) as file:
        return json.load(file)


def train(model, run):
    """What the class computes from the run's batches: gradients of step 1, losses, norms."""
    flag = {key: run["flags"][key] for key in ("beta1", "beta2", "eps", "weight-decay", "clip")}
    beta1, beta2, eps, decay, clip = map(float, flag.values())
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    adamw = torch.optim.AdamW([{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}],
                              betas=(beta1, beta2), eps=eps)
    gradients, losses, norms = {}, [], []
    for step in run["steps"]:
        tokens = torch.tensor(step["tokens"])
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        assert logits.dtype == torch.float64
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))
        adamw.zero_grad()
        loss.backward()
        norm = torch.sqrt(sum((p.grad ** 2).sum() for p in model.parameters()))
        if not gradients:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        if clip > 0:
            for p in model.parameters():
                p.grad.mul_(min(1.0, clip / (float(norm) + 1e-6)))
        for group in adamw.param_groups:
            group["lr"] = step["lr"]
        adamw.step()
        losses.append(float(loss.detach()))
        norms.append(float(norm))
    return gradients, losses, norms


class Worst(dict):
    """The largest deviation of each kind."""

    def add(self, kind, deviation):
        deviation = float(deviation)
        self[kind] = max(self.get(kind, 0.0), deviation if deviation == deviation else float("inf"))


def tensors_differ(worst, kind, ours, theirs, tied):
    expected = {name: value for name, value in theirs.items() if not (tied and name == "lm_head.weight")}
    missing = set(expected) ^ (set(ours) - ({"lm_head.weight"} if tied else set()))
    if missing:
        sys.exit(f"{kind}: only on one side: {sorted(missing)[:5]}")
    for name, value in expected.items():
        size = torch.linalg.norm(value)  # 0: of an expert that no token chose
        worst.add(kind, torch.linalg.norm(ours[name].double() - value) / (size if size > 0 else 1))


def check_saved(worst, folder, model, tokens, tied):
    """transformers loads the folder of --save-hf, every key in its place, and computes the trained model's logits."""
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, output_loading_info=True, **eager(model.config))
    wrong = {kind: keys for kind, keys in info.items() if keys}
    if wrong:
        sys.exit(f"{folder}: {wrong}")
    if not hasattr(model.config, "num_experts_per_tok"):
        state = load_file(os.path.join(folder, "model.safetensors"))
        result = loaded.load_state_dict(state, strict=not tied)
        if tied and (result.unexpected_keys or set(result.missing_keys) - {"lm_head.weight"}):
            sys.exit(f"{folder}: {result}")
    if type(loaded) is not type(model):
        sys.exit(f"{folder}: a {type(loaded).__name__}, not a {type(model).__name__}")
    with torch.no_grad():
        expected, got = (each(input_ids=tokens, use_cache=False).logits for each in (model.eval(), loaded.eval()))
    worst.add("logits", torch.linalg.norm(got - expected) / torch.linalg.norm(expected))


def run_case(args, family, tied, number, worst):
    dice = random.Random(f"{args.seed} {family} {tied} {number}")
    config = draw_config(family, tied, dice)
    global_batch = 8 if family in WITH_EXPERTS else dice.choice((4, 8))
    flags = ["--seq-len", str(dice.choice((8, 24) if family in WITH_EXPERTS else (8, 13, 24))), "--global-batch", str(global_batch),
             "--lr", dice.choice(("1e-3", "1e-2")), "--clip", dice.choice(("0", "0.3", "1")), "--eps", "1e-6",
             "--warmup-steps", "2", "--weight-decay", dice.choice(("0", "0.1")),
             "--recompute", dice.choice(("none", "pointwise", "selective", "full")), "--seed", str(number)]
    sparse = family in WITH_EXPERTS
    layouts = EXPERTS_LAYOUTS if sparse else LAYOUTS
    parallel = ["--micro-batch", "1", "--zero", dice.choice(("0", "1", "2", "3"))] + dice.choice(layouts).split()
    if config.num_hidden_layers % 2 == 1 and "--pp" in parallel:
        parallel += ["--stage-layers", "2,1"]
    if int(flags[1]) % 2 == 0:
        parallel += ["--sequence-parallel", "on" if sparse else dice.choice(("on", "off"))]
    if sparse:
        flags += ["--aux-loss", "0"]
    old_keys, stacked = dice.random() < 0.5, sparse and dice.random() < 0.5
    key = dice.randrange(2 ** 31)
    text = bytes(dice.randrange(256) for _ in range(4000))
    folder = tempfile.mkdtemp(prefix="hf_families_")
    try:
        with open(os.path.join(folder, "data.txt"), "wb") as file:
            file.write(text)
        model_folder = os.path.join(folder, "model")
        with in_double():
            model = make_model(config, key)
            model.save_pretrained(model_folder)
            if stacked:
                save_file(weights_of(model), os.path.join(model_folder, "model.safetensors"), {"format": "pt"})
            if old_keys:
                write_old_keys(model_folder)
            for ranks in args.ranks:  # one rank first
                run = run_program(args, ranks, folder, model_folder, flags + (parallel if ranks > 1 else []))
                model = make_model(config, key)
                gradients, losses, norms = train(model, run)
                reference, saved = (os.path.join(folder, f"{kind}{ranks}") for kind in ("reference", "saved"))
                tensors_differ(worst, "gradients", load_file(os.path.join(reference, "gradients.safetensors")),
                               per_expert(gradients, family), tied)
                for step, loss, norm in zip(run["steps"], losses, norms):
                    worst.add("losses", abs(step["loss"] / loss - 1))
                    worst.add("norms", abs(step["grad_norm"] / norm - 1))
                tensors_differ(worst, "weights", load_file(os.path.join(saved, "model.safetensors")),
                               per_expert(weights_of(model), family), tied)
                check_saved(worst, saved, model, torch.tensor(run["steps"][0]["tokens"])[:, :-1], tied)
    finally:
        shutil.rmtree(folder)
    if not max(worst.values()) <= TOLERANCE:
        print(f"{family}, tied {tied}, case {number}: {json.dumps(worst)}\n{config.to_json_string()}{flags} {parallel}",
              flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bin", default="build/bin")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=2, help="of each family")
    parser.add_argument("--tied", choices=("on", "off", "both"), default="both")
    parser.add_argument("--family", default=",".join(FAMILIES))
    parser.add_argument("--ranks", choices=("1", "8", "both"), default="both")
    args = parser.parse_args()
    args.ranks = [1, 8] if args.ranks == "both" else [int(args.ranks)]
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    failed = False
    kinds = ("gradients", "losses", "norms", "weights", "logits")
    print(f"{'family':<16} {'tied':<5} {'cases':>5} " + " ".join(f"{kind:>10}" for kind in kinds))
    for family in args.family.split(","):
        if family not in FAMILIES:
            sys.exit(f"--family {family}: unknown (try {', '.join(FAMILIES)})")
        for tied in {"on": (True,), "off": (False,), "both": (False, True)}[args.tied]:
            worst = Worst()
            for number in range(1, args.cases + 1):
                run_case(args, family, tied, number, worst)
            failed |= not max(worst.values()) <= TOLERANCE
            print(f"{family:<16} {'on' if tied else 'off':<5} {args.cases:>5} " +
                  " ".join(f"{worst[kind]:>10.1e}" for kind in kinds), flush=True)
    print(f"{'FAILED' if failed else 'passed'}: transformers {transformers.__version__}, torch {torch.__version__}, "
          f"at most {TOLERANCE}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
