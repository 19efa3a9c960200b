"""Chapter 01: what a model needs on one device; what recomputation and accumulation change."""
from measure import show

STATES = ("params", "grads", "optimizer")
LEVELS = ("none", "pointwise", "selective", "full")


def states(runs):
    rows = []
    for name, model in (("Llama-2 7B", "7b"), ("Llama-3 8B", "8b"), ("Llama-3 70B", "70b")):
        booked = {level: runs.booked(f"--model {model} --fake-world 1 --dtype bf16 --seq-len 4096 --global-batch 1 "
                                     f"--recompute {level}") for level in LEVELS}
        sizes = [booked["full"][kind] / 1e9 for kind in STATES]
        rows.append([name, f"{sizes[0] / 2:.3g} G", *(f"{size:#.3g} GB".replace(". GB", " GB") for size in sizes),
                     f"**{round(float(f'{sum(sizes):.3g}')):,} GB**",
                     " / ".join(f"{booked[level]['activations'] / 1e9:.1f}" for level in LEVELS) + " GB"])
    show(["", "Ψ", "weights 2 Ψ", "gradients 4 Ψ", "optimizer 12 Ψ", "total",
          "activations, one sequence of 4096: none / pointwise / selective / full"], rows)


def recompute(runs):
    rows = []
    for dtype in ("fp32", "bf16"):
        for level in LEVELS:
            run = runs.run(1, "01_single_gpu", f"--steps 4 --dtype {dtype} --recompute {level}")
            rows.append([dtype, level, *run.peaks(*STATES, "activations"),
                         run.loss() if dtype == "fp32" else f"{run.last['loss']:.2f}"])
    show(["`--dtype`", "`--recompute`", *STATES, "activations", "loss at step 4"], rows, "--:::::")


def micro_batches(runs):
    rows = []
    for size in (16, 4, 1):
        run = runs.run(1, "01_single_gpu", f"--steps 4 --init-std 0.1 --micro-batch {size}")
        rows.append([size, run.loss(), run.norm(), *run.peaks("activations")])
    show(["`--micro-batch`", "loss at step 4", "gradient norm at step 4", "activations"], rows, "::::")


def latent(runs):
    rows, E, H, D, F = [], 7168, 128, 128, 18432  # a dense block of DeepSeek-V3
    for name, flags, cached in (("one key/value head per query head", f"--kv-heads {H}", 2 * H * D),
                                ("one for 16", "--kv-heads 8", 2 * 8 * D),
                                ("latents of 512 and 1,536", "--kv-lora-rank 512 --q-lora-rank 1536", 512 + D // 2)):
        of_block = {}
        for level in LEVELS[:3]:
            one, two = (runs.booked(f"--layers {layers} --hidden {E} --heads {H} --head-dim {D} --ffn {F} --vocab 256 "
                                    f"--seq-len 4096 --global-batch 1 --dtype bf16 --fake-world 1 --recompute {level} "
                                    + flags) for layers in (2, 3))
            of_block[level] = {kind: two[kind] - one[kind] for kind in ("params", "activations")}
        attention = of_block["none"]["params"] / 2 - 3 * E * F
        rows.append([name, f"{attention / 1e6:.0f} M", *(f"{of_block[level]['activations'] / 4096 / 1e3:.0f} kB"
                                                         for level in LEVELS[:3]), f"{cached:,}"])
    show(["", "weights", "`none`", "`pointwise`", "`selective`", "numbers kept to generate"], rows, "-:::::")


def multi_token(runs):
    rows = []
    for switch in ("off", "on"):
        run = runs.run(1, "01_single_gpu", f"--steps 300 --mtp {switch}")
        last = run.steps[-10:]
        added = [step.get("mtp_loss", 0) / 0.3 for step in last]
        rows.append([switch, f"{sum(step['loss'] for step in last) / 10:.3f}",
                     f"{sum(added) / 10:.3f}" if switch == "on" else "–", *run.peaks("params", "activations")])
    show(["`--mtp`", "loss, last 10 of 300 steps", "of the token after the next", "params", "activations"], rows,
         ":::::")


def fp16(runs):
    rows = []
    for name, flags in (("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"),
                        *((f"fp16, loss scale {scale}", f"fp16 --loss-scale {scale}")
                          for scale in ("1", "4e-3", "2e-4", "1e-5"))):
        run = runs.run(1, "01_single_gpu", f"--steps 300 --dtype {flags}")
        mean = sum(step["loss"] for step in run.steps[-10:]) / 10
        rows.append([name, f"{run.steps[0]['grad_norm']:.3f}", f"{mean:.3f}"])
    show(["", "gradient norm of step 1", "loss, last 10 of 300 steps"], rows, "-::")


PRINTED = {"01_states": states, "01_recompute": recompute, "01_micro_batches": micro_batches, "01_latent": latent,
           "01_multi_token": multi_token, "01_fp16": fp16}
