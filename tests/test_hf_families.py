"""What only this catches: another formula than a family's own class in Hugging Face's transformers, in fp64: gradients,
losses, norms, trained weights, logits. Needs torch and transformers.

Each case draws a small model of a family and lets its class create it and save it. The program trains four steps from
that folder, on one rank and on eight (LAYOUTS); the class trains on the same batches with torch's AdamW. Every gradient
of step 1, every loss and norm, every weight after step 4 must agree to 1e-9 (of tensors: relative norm). Then
transformers loads what --save-hf wrote, with every key in its place, and must compute the same logits.

transformers computes norms, RoPE and softmax in fp32 whatever the model's dtype; here its code runs with fp64 in the
place of fp32 (in_double), or nothing could agree to more than seven digits. Of experts it holds one tensor per layer,
where the Hub's files have one for each expert: per_expert() cuts, and half of the folders have them stacked.
"""
import contextlib
import json
import os
import random

import pytest
from conftest import in_turn

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file  # noqa: E402

TOLERANCE = 1e-9
STEPS = 4
WITH_EXPERTS = ("mixtral", "qwen3-moe", "dots1", "deepseek")
FAMILIES = ("llama", "llama-linear", "llama-llama3", "mistral", "qwen2", "qwen3", "smollm2") + WITH_EXPERTS
LAYOUTS = ("--dp 2 --tp 2 --pp 2",)
EXPERTS_LAYOUTS = ("--dp 4 --tp 2 --ep 2", "--dp 2 --tp 2 --pp 2 --ep 2", "--dp 2 --cp 2 --tp 2 --ep 4",
                   "--dp 8 --ep 4")


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
                 "qwen3-moe": transformers.Qwen3MoeConfig, "dots1": transformers.Dots1Config,
                 "deepseek": transformers.DeepseekV3Config}.get(family, transformers.LlamaConfig)
    if family in ("qwen3", "qwen3-moe", "dots1") or family.startswith(("llama", "mi")) and dice.random() < 0.5:
        shape["head_dim"] = other_head
    window = dice.choice((None, 3, 9))  # of 16 or 24 tokens
    if family in ("mistral", "mixtral", "dots1"):
        shape["sliding_window"] = window
    if family.startswith("qwen"):
        shape.update(use_sliding_window=window is not None, sliding_window=window or 4096)
    if family in ("qwen2", "qwen3", "dots1"):
        shape["max_window_layers"] = dice.choice((0, 1))  # the first with a window
    if family == "mixtral":
        shape.update(num_local_experts=dice.choice((4, 8, 12)), num_experts_per_tok=dice.choice((2, 3)))
    if family == "qwen3-moe":
        normalized = dice.random() < 0.5
        shape.update(num_experts=dice.choice((4, 8, 12)), moe_intermediate_size=dice.choice((6, 10, 16)),
                     num_experts_per_tok=dice.choice((2, 3) if normalized else (1, 2, 3)), norm_topk_prob=normalized,
                     mlp_only_layers=dice.choice(([], [0])))
    if family in ("dots1", "deepseek"):
        normalized = dice.random() < 0.7
        groups, top_groups = dice.choice(((1, 1), (2, 1), (4, 2), (4, 3)))
        shape.update(n_routed_experts=dice.choice((8, 12, 16)), moe_intermediate_size=dice.choice((6, 10, 16)),
                     n_shared_experts=dice.choice((1, 2)), num_experts_per_tok=dice.choice((2, 3)),
                     norm_topk_prob=normalized, n_group=groups, topk_group=top_groups,
                     routed_scaling_factor=dice.choice((1.0, 2.5)), first_k_dense_replace=dice.choice((0, 1)))
    if family == "deepseek":
        shape.update(num_key_value_heads=heads, q_lora_rank=dice.choice((None, 6, 10)), kv_lora_rank=dice.choice((5, 8)),
                     qk_nope_head_dim=head_dim, v_head_dim=head_dim, qk_rope_head_dim=dice.choice((2, 4, 6)))
        if dice.random() < 0.3:
            shape["first_k_dense_replace"] = shape["num_hidden_layers"]  # no layer has experts
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
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype", "float64")
    if config["model_type"] == "qwen3_moe" and "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    (folder / "config.json").write_text(json.dumps(config))


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


def apart(ours, theirs):
    """Relative norm of a difference."""
    size = torch.linalg.norm(theirs)  # 0: of an expert that no token chose
    return float(torch.linalg.norm(ours.double() - theirs) / (size if size > 0 else 1))


def expect_close(what, ours, theirs):
    """Of tensors or numbers by name."""
    assert set(ours) == set(theirs), f"{what}: only on one side"
    worst = {name: apart(torch.as_tensor(ours[name]), torch.as_tensor(value)) for name, value in theirs.items()}
    assert not [name for name, value in worst.items() if not value <= TOLERANCE], f"{what}: {worst}"


def without_copy(tensors, tied):
    """Of a tied matrix."""
    return {name: value for name, value in tensors.items() if not (tied and name == "lm_head.weight")}


def check_saved(folder, model, tokens, tied):
    """transformers loads the folder of --save-hf, every key in its place, and computes the trained model's logits."""
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, output_loading_info=True, **eager(model.config))
    assert not {kind: keys for kind, keys in info.items() if keys} and type(loaded) is type(model)
    if not hasattr(model.config, "num_experts_per_tok"):
        result = loaded.load_state_dict(load_file(folder / "model.safetensors"), strict=not tied)
        assert not result.unexpected_keys and set(result.missing_keys) <= {"lm_head.weight"}
    with torch.no_grad():
        expected, got = (each(input_ids=tokens, use_cache=False).logits for each in (model.eval(), loaded.eval()))
    assert apart(got, expected) <= TOLERANCE


@pytest.mark.parametrize("family, tied, number", in_turn(
    [(family, tied, number) for number in (1, 2) for family in FAMILIES for tied in (False, True)]))
def test_family(family, tied, number, run):
    torch.set_num_threads(1)
    dice = random.Random(f"1 {family} {tied} {number}")
    config = draw_config(family, tied, dice)
    sparse = family in WITH_EXPERTS and getattr(config, "first_k_dense_replace", 0) < config.num_hidden_layers
    global_batch = 8 if sparse else dice.choice((4, 8))
    length = dice.choice((8, 24) if sparse else (8, 13, 24))
    flags = (f"--seq-len {length} --global-batch {global_batch} --lr {dice.choice(('1e-3', '1e-2'))} --eps 1e-6 "
             f"--clip {dice.choice(('0', '0.3', '1'))} --warmup-steps 2 --weight-decay {dice.choice(('0', '0.1'))} "
             f"--recompute {dice.choice(('none', 'pointwise', 'selective', 'full'))} --seed {number}")
    flags += " --aux-loss 0" * sparse
    zero, layout = dice.choice(("0", "1", "2", "3")), dice.choice(EXPERTS_LAYOUTS if sparse else LAYOUTS)
    parallel = f"--micro-batch 1 --zero {zero} {layout}"
    if config.num_hidden_layers % 2 == 1 and "--pp" in parallel:
        parallel += " --stage-layers 2,1"
    if length % 2 == 0:
        parallel += " --sequence-parallel " + ("on" if sparse else dice.choice(("on", "off")))
    old_keys, stacked = dice.random() < 0.5, sparse and dice.random() < 0.5
    key, here = dice.randrange(2 ** 31), run.folder
    (here / "data.txt").write_bytes(bytes(dice.randrange(256) for _ in range(4000)))
    with in_double():
        model = make_model(config, key)
        model.save_pretrained(here / "model")
        if stacked:
            save_file(weights_of(model), here / "model/model.safetensors", {"format": "pt"})
        if old_keys:
            write_old_keys(here / "model")
        for ranks, program, layout in ((1, "01_single_gpu", ""), (8, "08_3d_full", parallel)):
            run(program, f"--load-hf model --data data.txt --dtype fp64 --device cpu --steps {STEPS} --val-fraction 0",
                "--hf-ignore vocab_size",
                f"--save-reference reference{ranks} --save-hf saved{ranks}", flags, layout, ranks=ranks, seconds=300)
            ours = json.loads((here / f"reference{ranks}/reference.json").read_text())
            model = make_model(config, key)
            gradients, losses, norms = train(model, ours)
            found = load_file(here / f"reference{ranks}/gradients.safetensors")
            expect_close("gradients", without_copy(found, tied), without_copy(per_expert(gradients, family), tied))
            for what, theirs in ("loss", losses), ("grad_norm", norms):
                expect_close(what, dict(enumerate(step[what] for step in ours["steps"])), dict(enumerate(theirs)))
            found, weights = load_file(here / f"saved{ranks}/model.safetensors"), per_expert(weights_of(model), family)
            expect_close("weights", without_copy(found, tied), without_copy(weights, tied))
            check_saved(here / f"saved{ranks}", model, torch.tensor(ours["steps"][0]["tokens"])[:, :-1], tied)
