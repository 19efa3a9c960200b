"""Only this catches: a lesson's PyTorch snippet that does not run, or trains another model. Needs torch (2.15 ran).

The first block of Python in a lesson's section "The same in PyTorch" trains Llama on batch(step) for STEPS steps and
appends each whole batch's loss to `losses`. Two ranks (gloo; or RANKS; chapter 01: each alone) run it, and the last
must have one rank's losses; with its plant, others. By SGD, whose update is proportional to the gradient: a wrong scale
shows, which AdamW would hide.
Chapter 07's block defines Fp8 and model: they are held to the formats' errors, and to fp32's losses.
"""
import json
import pathlib
import re
import sys

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[1]
SECTION = re.compile(r"^## The same in PyTorch$.*?^```python\n(.*?)^```$", re.M | re.S)
SNIPPETS = {page.parent.name: found[1] for page in sorted(ROOT.glob("0*/**/README.md"))
            if (found := SECTION.search(page.read_text("utf-8")))}
PLANTS = {"01_single_gpu": ("y.numel() / targets.numel()", "1 / 3"),  # a mean of means
          "02_data_parallel": ("p.grad.copy_(part.view_as(p))", "part.view_as(p)"),
          "03_zero": ("[mesh.get_local_rank()]", "[0]"),
          "04_tensor_parallel": ("[mesh.get_local_rank()]", "[0]"),
          "05_pipeline": ("loss_fn=", "scale_grads=False, loss_fn="),
          "06_context_parallel": ("fully_shard(model, mesh=mesh)", ""),
          "08_3d_full": ("[dp.get_local_rank()]", "[mesh[\"tp\"].get_local_rank()]"),
          "experts": ('if "experts.weights" not in name', "if True")}
RANKS = {"08_3d_full": 8}
STEPS, WIDTH, TOKENS = 4, 32, 16


class Experts(nn.Module):  # every row through every expert: those that are not among its two have the weight 0
    def __init__(self):
        super().__init__()
        self.router, self.weights = nn.Linear(WIDTH, 4), nn.Parameter(torch.randn(4, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x):  # (B, T, E)
        scores, chosen = self.router(x).softmax(-1).topk(2)
        scores = torch.zeros(*x.shape[:2], 4).scatter(-1, chosen, scores)
        return torch.einsum("btn,nbtf->btf", scores, F.silu(x @ self.weights[:, None]))


class Block(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.norm, self.qkv, self.out = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts = Experts() if experts else None

    def forward(self, x):  # (B, T, E)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (-1, 3, WIDTH // 4)).permute(3, 0, 2, 1, 4)  # (B, H, T, D)
        x = x + self.out(F.silu(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)))
        return x + self.experts(x) if self.experts else x


class Llama(nn.Module):  # a stage of a pipeline has no embed, or no norm and head
    def __init__(self, experts=False):
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.norm, self.head = nn.Embedding(64, WIDTH), nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 64)
        self.blocks = nn.Sequential(*(Block(experts) for _ in range(4)))
        self.register_buffer("positions", torch.randn(TOKENS, WIDTH))

    def forward(self, x):
        x = self.blocks(self.embed(x) + self.positions if self.embed else x)
        return self.head(self.norm(x)) if self.head else x


def batch(step):
    samples = torch.randint(64, (8, TOKENS + 1), generator=torch.Generator().manual_seed(step))
    return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def one_rank(model):
    for step in range(STEPS):
        tokens, targets = batch(step)
        loss = cross_entropy(model(tokens), targets)
        yield loss.item()
        for parameter, grad in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()))):
            parameter.data -= 0.5 * grad


@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize("chapter", sorted(SNIPPETS.keys() - {"07_fp8"}))
def test_two_ranks_have_the_losses_of_one(run, chapter, planted):
    (run.folder / "it.py").write_text(SNIPPETS[chapter].replace(*(PLANTS[chapter] if planted else ("", ""))), "utf-8")
    launch = f"-m torch.distributed.run --standalone --nproc-per-node {RANKS.get(chapter, 2)}"
    losses = json.loads(run(sys.executable, launch, __file__, "it.py", seconds=240).out.partition("losses ")[2])
    expected = list(one_rank(Llama(experts=chapter == "experts")))
    assert planted == (losses != pytest.approx(expected, rel=1e-5)), losses


@pytest.mark.parametrize("plant", [("", ""), ("x.abs().amax() / torch.finfo(dtype).max", "torch.ones(())"),
                                   ("quantize(dy, E5M2)", "quantize(dy, E4M3)")])
def test_products_in_8_bits_have_the_errors_of_the_formats_and_nearly_the_losses(plant):
    scope = {"torch": torch, "Llama": Llama}
    exec(SNIPPETS["07_fp8"].replace(*plant), scope)
    x, w = torch.randn(256, 64, requires_grad=True), torch.randn(96, 64, requires_grad=True)
    dy = 1e-7 * torch.randn(256, 96)
    eight, exact = ((y, *torch.autograd.grad(y, (x, w), dy)) for y in (scope["Fp8"].apply(x, w), x @ w.t()))
    y, dx, dw = (((a - b).norm() / b.norm()).item() for a, b in zip(eight, exact))
    losses, wanted = list(one_rank(scope["model"])), list(one_rank(Llama()))
    right = 0.03 < y < 0.045 and 0.05 < dx < 0.07 and 0.05 < dw < 0.07 and losses == pytest.approx(wanted, rel=3e-4)
    assert right == (plant == ("", "")) and losses != wanted, (y, dx, dw, losses)


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    losses, library, no = [], torch.library.Library("aten", "IMPL"), torch.zeros(())
    # context_parallel knows CUDA's kernels only: here the CPU's have the name of one.
    name = "_scaled_dot_product_flash_attention"
    flash, forward, backward = (getattr(torch.ops.aten, name + end) for end in ("", "_for_cpu", "_for_cpu_backward"))
    library.impl(name, lambda *x, scale=None: (*forward(*x[:5], scale=scale), None, None, 0, 0, no, no, no), "CPU")
    library.impl(name + "_backward", lambda *x, scale=None: backward(*x[:6], *x[10:12], scale=scale), "CPU")
    sdpa = lambda q, k, v, is_causal: flash(q, k, v, 0.0, is_causal)[0]  # noqa: E731
    sdpa.__name__, F.scaled_dot_product_attention = "scaled_dot_product_attention", sdpa
    exec(pathlib.Path(sys.argv[1]).read_text("utf-8"))
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        print("losses", json.dumps(losses))
    torch.distributed.destroy_process_group()
