"""Code of other hands (Hugging Face's class: whole, under FSDP2, cut by torch) against compare and its doctor. Only
this catches: a right implementation that is called different; a fault in a trainer which shares nothing with the
doctor's NumPy that goes unseen, or is given another's name.

Needs torch >= 2.6, transformers and safetensors (2.15 and 5.24 ran).
"""

import importlib.util
import json
import re
import shutil
import sys

import pytest
import references
from conftest import ROOT, in_turn

FOREIGN = "torch", "transformers", "safetensors"
pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(module) for module in FOREIGN),
    reason="foreign code is not tried without torch, transformers and safetensors",
)
EXAMPLES = ROOT / "docs/validate/examples"
RANKS = {"hugging_face": 1, "fsdp2": 2, "parallel": 8}  # parallel: tp 2, pp 2, dp 2
SHAPE = "--hidden 64 --heads 4 --kv-heads 2 --ffn 96 --seq-len 32 --global-batch 8 --steps 3 --lr-schedule constant"
KERNELS = {"Prescott": "SSE41", "Nehalem": "SSE41", "Sandybridge": "AVX", "Haswell": "AVX2", "SkylakeX": "AVX512_CORE"}
RIGHT = [(layers, std, dtype) for layers in (2, 6, 16) for std in ("0.02", "0.1") for dtype in ("fp32", "fp64", "bf16")]

# (trainer, reference, a text of the trainer or a key of config.json, what stands there instead, facts, the name or "").
# A norm that each stage has of its own is no rule of the doctor's.
SUMMED = ('sum_over("dp", local)', "local.mul_(dp)")
COUNTED = ("(step.targets >= 0).sum()", "(step.targets.chunk(dp)[replica] >= 0).sum() * dp")
BETAS = ("optimizer =", "reference.betas = 0.9, 0.999\noptimizer =")
NORMS_SUMMED = ('if "q_norm" in name or "k_norm" in name:', "if False:")
TIED = ('if tied and "embed_tokens" in name and pp > 1:', "if False:")
AUX = "0.02 * model(input_ids=step.inputs, output_router_logits=True, use_cache=False).aux_loss"
OF_ALL = "the balancing loss is Hugging Face's, over all layers at once, of 0.02"
PLANTS = {
    "aux_loss": ("hugging_face", "experts", "loss.backward()", f"({AUX} + loss).backward()", "forward: right", OF_ALL),
    "aux_recorded": ("hugging_face", "experts", "loss = F.", f"loss = {AUX} + F.", "forward: wrong", f"{OF_ALL}, and"),
    "rope_base": ("hugging_face", "gqa", "rope_theta", 5e5, "forward: wrong", "RoPE: base 500000"),
    "norm_eps": ("hugging_face", "gqa", "rms_norm_eps", 1e-6, "backward: ", "RMSNorm: eps 1e-06"),
    "gelu": ("hugging_face", "gqa", "hidden_act", "gelu", "forward: wrong", "MLP: GELU instead of SiLU"),
    "not_zeroed": ("hugging_face", "gqa", "    model.zero_grad()\n", "", "first wrong norm: step 2", "are not zeroed"),
    "beta2": ("hugging_face", "gqa", *BETAS, "update of step 2", "beta2 is 0.999"),
    "sum_for_mean": ("fsdp2", "gqa", "(loss * world)", "loss", "all 30 are 1/2 x", "a sum for a mean"),
    "dp_not_reduced": ("parallel", "gqa", *SUMMED, "weights of targets", "only samples 0-3 of 8 count, 2 times"),
    "counted_per_rank": ("parallel", "masks", *COUNTED, "forward: wrong", "mean of means: each of 2 parts of the"),
    "no_clipping": ("parallel", "gqa", "p.grad *= ", "1 * ", "update: wrong", "no clipping"),
    "norm_of_stage": ("parallel", "gqa", '("pp", square), ', "", "norm: that of step 1", ""),
    "head_norms": ("parallel", "qk-norm", *NORMS_SUMMED, "every k_norm, q_norm", "q's and k's norms are not summed"),
    "tied_stages": ("parallel", "tied", *TIED, "first wrong: model.embed_tokens", "gradient of the head is lost"),
}


def trained(run, name, reference, out, script=None):
    words = [script or EXAMPLES / f"{name}.py", reference, out, *(["2 2"] if name == "parallel" else [])]
    launch = f"-m torch.distributed.run --standalone --nproc-per-node {RANKS[name]}" if RANKS[name] > 1 else ""
    run(sys.executable, launch, *words, seconds=300, env={"PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT / "docs")})
    return out


def compared(run, a, b, more="", code=None):
    return run(sys.executable, ROOT / "docs/compare.py", a, b, "--diagnose", more, code=code)


@pytest.mark.parametrize("layers, std, dtype", in_turn(RIGHT))
def test_a_right_implementation_agrees(run, tmp_path, layers, std, dtype):
    """The trainers, this course in a mixed layout and, but in bf16, on other kernels."""
    flags = f"--layers {layers} --init-std {std} --dtype {dtype} {SHAPE}"
    run("01_single_gpu", flags, "--save-reference reference")
    for name in RANKS:
        trained(run, name, tmp_path / "reference", tmp_path / name)
        # They compute RoPE, norms and softmax in fp32 in every dtype.
        compared(run, name, "reference", "--tolerance 5e-6" if dtype == "fp64" else "", code=0)
    layout = "--dp 2 --tp 2 --pp 2 --zero 1 --micro-batch 2 --sequence-parallel on --save-reference mesh"
    run("08_3d_full", flags, layout, ranks=8)
    compared(run, "mesh", "reference", code=0)
    for kernel, isa in KERNELS.items() if dtype != "bf16" else ():
        env = {"OPENBLAS_CORETYPE": kernel, "ONEDNN_MAX_CPU_ISA": isa}
        run("01_single_gpu", flags, f"--save-reference {kernel}", env=env)
        compared(run, kernel, "reference", code=0)


DDP = {  # what makes Hugging Face's example one of DDP, whose ranks record their local batches
    "record.load(model)": "record.load(model)\nmodel = torch.nn.parallel.DistributedDataParallel(model)",
    "reference = Reference": "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
    "mine = lambda x: {}\nrank, world = dist.get_rank(), dist.get_world_size()\nreference = Reference",
    "=step.inputs,": "=mine(step.inputs),", "step.targets.flatten()": "mine(step.targets).flatten()",
    "step.lr, step.inputs, step.targets": "step.lr, mine(step.inputs), mine(step.targets)"}


@pytest.mark.parametrize("mine", ["x.chunk(world)[rank]", "x[rank::world]"])
def test_local_batches_of_ddp_are_gathered(run, tmp_path, mine):
    text = (EXAMPLES / "hugging_face.py").read_text()
    for old, new in DDP.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new.replace("{}", mine))
    (tmp_path / "ddp.py").write_text(text)
    reference = ROOT / "docs/references/gqa"
    trained(run, "fsdp2", reference, tmp_path / "mine", tmp_path / "ddp.py")
    compared(run, "mine", reference, code=0)


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_fault_is_named(run, binaries, tmp_path, plant):
    trainer, name, old, new, facts, fault = PLANTS[plant]
    if name == "masks":  # Hugging Face's class knows no documents
        references.masked_text(tmp_path, (ROOT / "docs/data/corpus.txt").read_bytes())
        shape = [*references.SHAPE, *references.RUN, "--data", "text.bin", "--val-fraction", "0"]
        run("01_single_gpu", " ".join(shape), "--save-reference reference")
    else:
        shutil.copytree(ROOT / "docs/references" / name, tmp_path / "reference")
    shutil.copytree(tmp_path / "reference", tmp_path / "told")
    text = (EXAMPLES / f"{trainer}.py").read_text()
    config = json.loads((tmp_path / "told/config.json").read_text())
    assert old in config or text.count(old) == 1
    if old in config:
        (tmp_path / "told/config.json").write_text(json.dumps({**config, old: new}))
    else:
        text = text.replace(old, new)
    (tmp_path / "planted.py").write_text(text)
    trained(run, trainer, tmp_path / "told", tmp_path / "mine", tmp_path / "planted.py")
    done = compared(run, "mine", "reference", code=1).says(facts, where="out")
    names = re.findall("explains A's numbers to rounding: (.*)", done.out)
    assert len(names) == (fault != "") and fault in " ".join(names), done
