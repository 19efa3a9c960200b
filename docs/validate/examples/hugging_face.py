# python3 docs/validate/examples/hugging_face.py docs/references/gqa out/mine
import math, pathlib, sys
sys.path[:0] = [str(pathlib.Path(__file__).parents[2])]
import torch, torch.nn.functional as F, transformers
from torch_reference import Recorder, Reference
reference = Reference(sys.argv[1])
config = transformers.AutoConfig.from_pretrained(sys.argv[1], torch_dtype=reference.dtype)
model = transformers.AutoModelForCausalLM.from_config(config).to(reference.dtype)
record = Recorder(reference, sys.argv[2])
record.load(model)
optimizer = reference.adamw(model.parameters())
for step in reference:
    model.zero_grad()
    logits = model(input_ids=step.inputs, use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), step.targets.flatten(), ignore_index=-1)
    loss.backward()
    record.gradients(model)  # before clipping
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), reference.clip or math.inf)
    for group in optimizer.param_groups:
        group["lr"] = step.lr
    optimizer.step()
    record.step(model, loss, norm, step.lr, step.inputs, step.targets)
record.write()
