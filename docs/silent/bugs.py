"""The bugs of docs/silent-bugs.md that are run, patches.txt, and the layouts in which they show."""

import dataclasses


@dataclasses.dataclass
class Bug:
    name: str
    layout: str = ""   # flags of the parallel run; the right run has one rank
    model: str = ""    # flags of both
    resumed: int = 0   # the step after which the run ends and is resumed


RUN = [
    Bug("last-micro-batch-only", "--pp 2 --micro-batch 2"),
    Bug("divided-after-each-pass", "--pp 2 --micro-batch 2"),
    Bug("gradient-of-a-sum", "--pp 2 --micro-batch 2"),
    Bug("clipped-by-stage", "--pp 2 --micro-batch 2"),
    Bug("tied-copies-apart", "--pp 2 --micro-batch 2", "--tied-embeddings on"),
    Bug("final-norm-apart", "--tp 2 --sequence-parallel on"),
    Bug("key-value-copies-apart", "--tp 2", "--kv-heads 1"),
    Bug("cp-not-summed-without-dp", "--cp 2"),
    Bug("own-keys-in-ring-backward", "--cp 2 --cp-algorithm ring"),
    Bug("divided-by-cp", "--cp 2"),
    Bug("last-micro-batch-not-reduced", "--dp 2 --micro-batch 1"),
    Bug("weights-one-update-old", "--dp 2 --zero 1"),
    Bug("reduction-not-awaited", "--dp 2 --tp 2 --sequence-parallel on"),
    Bug("reduction-awaited-too-late", "--dp 2 --pp 2 --micro-batch 2", "--tied-embeddings on"),
    Bug("samples-twice", "--dp 2"),
    Bug("mean-of-ranks", "--dp 2", "--data ../text.bin --val-fraction 0"),
    Bug("mean-of-micro-batches", "--micro-batch 1", "--data ../text.bin --val-fraction 0"),
    Bug("documents-seen-together", "--dp 2", "--document-token 10"),
    Bug("rope-in-bf16", "--dp 2"),
    Bug("experts-times-ep", "--dp 2 --ep 2", "--experts 4"),
    Bug("not-zeroed", ""),
    Bug("norms-decay", "--dp 2"),
    Bug("schedule-by-samples", "--dp 2"),
    Bug("moments-not-restored", "--dp 2", "", 150),
]

# (threads, what was wrong, the patch that makes it here or ""). Each thread was read before it was listed; what it says
# is of the version that it names.
MEGATRON, TITAN, DEEPSPEED = "NVIDIA/Megatron-LM/", "pytorch/torchtitan/", "deepspeedai/DeepSpeed/"
AUTOMODEL, TRANSFORMERS = "NVIDIA-NeMo/Automodel/", "huggingface/transformers/"
THREADS = [
    ([("NeMo Automodel #3530", AUTOMODEL + "pull/3530"), ("Megatron-LM #7186", MEGATRON + "pull/7186")],
     "With a pipeline and several micro-batches, stages were initialised again between two of them, which cleared "
     "the gradients: only the last micro-batch trained. In Megatron-FSDP v2 each backward pass counted as the last "
     "one, with the same result.", "last-micro-batch-only"),
    ([("torchtitan #1733", TITAN + "issues/1733")],
     "The pipeline schedule divided *all* gradients by the number of micro-batches whenever it ended, and with "
     "gradient accumulation it ends several times: what came first was divided again and again.",
     "divided-after-each-pass"),
    ([("torchtitan #2972", TITAN + "issues/2972")],
     "Without a pipeline the sum of the losses was divided by the number of tokens before the backward pass; with "
     "one only the printed number was. Gradients were too large by the number of tokens.", "gradient-of-a-sum"),
    ([("torchtitan #596", TITAN + "issues/596"), ("#649", TITAN + "pull/649")],
     "Each pipeline stage clipped by the norm of its own gradients, not by that of the model.", "clipped-by-stage"),
    ([("Megatron-LM #656", MEGATRON + "issues/656")],
     "The embedding and the head were meant to be one matrix, and became different ones during training.",
     "tied-copies-apart"),
    ([("Megatron-LM #1446", MEGATRON + "issues/1446")],
     "With tensor and sequence parallelism the gradient of the final norm was different on each tensor-parallel "
     "rank before the update.", "final-norm-apart"),
    ([("bigcode Megatron-LM #11", "bigcode-project/Megatron-LM/issues/11")],
     "One key/value head on several tensor-parallel ranks: its gradients must be summed over them. The issue says "
     "that the distributed optimizer did not, and asks about the biases.", "key-value-copies-apart"),
    ([("torchtitan #685", TITAN + "pull/685")],
     "With context parallelism and no data parallelism the model was not wrapped by FSDP, which is what sums "
     "gradients.", "cp-not-summed-without-dp"),
    ([("diffusers #14265", "huggingface/diffusers/issues/14265")],
     "Ring attention: the forward pass sent keys and values around, the backward pass used the rank's own in every "
     "step.", "own-keys-in-ring-backward"),
    ([("DeepSpeed #5555", DEEPSPEED + "pull/5555")],
     "Ulysses with ZeRO-0: gradients were divided by the sequence-parallel ranks too, and their norm was a quarter "
     "with four of them.", "divided-by-cp"),
    ([("DeepSpeed #7985", DEEPSPEED + "pull/7985")],
     "bf16 with ZeRO-1: before the update the ranks' gradients differed, because the last micro-batch's were added "
     "too late for the reduction.", "last-micro-batch-not-reduced"),
    ([("Megatron-LM #950", MEGATRON + "issues/950")],
     "Gathering parameters while the forward pass runs: where modules run in another order than their buckets, a "
     "module was computed with the weights of the step before.", "weights-one-update-old"),
    ([("DeepSpeed #5294", DEEPSPEED + "issues/5294"), ("#8061", DEEPSPEED + "issues/8061")],
     "ZeRO-2 with `overlap_comm` gave other gradients than without; switching the overlap off was the remedy. In #8061 "
     "a reduction waited for one stream while gradients were copied into its bucket on several (there, NaN).",
     "reduction-not-awaited"),
    ([("Megatron-LM #1012", MEGATRON + "issues/1012")],
     "In a pipeline schedule the embedding's gradient was completed after the gradients' reduction had been enabled; "
     "the issue asks whether it must come before. Our patch is another race on the same gradient: the sum over the "
     "stages uses it while the sum over data parallelism may still run.", "reduction-awaited-too-late"),
    ([("Megatron-Bridge #5944", "NVIDIA-NeMo/Megatron-Bridge/pull/5944")],
     "The cyclic sampler gave data-parallel ranks streams of unequal length; the ranks restarted at different "
     "steps, and a global batch had a sample twice.", "samples-twice"),
    ([("torchtitan #1842", TITAN + "issues/1842"), ("prime-rl #1957", "PrimeIntellect-ai/prime-rl/pull/1957")],
     "Each rank took the mean over its own unmasked tokens, and FSDP the mean of these: tokens of ranks with few "
     "of them counted more.", "mean-of-ranks"),
    ([("Hugging Face's article of October 2024", "huggingface/blog/pull/2414"),
      ("transformers #35438", TRANSFORMERS + "pull/35438")],
     "Gradient accumulation took the mean of each micro-batch's mean instead of the mean over all tokens. A "
     "follow-up passed the number of tokens to the training step.", "mean-of-micro-batches"),
    ([("nanoVLM #204", "huggingface/nanoVLM/pull/204")],
     "Packed samples could see the samples before them: there was no mask for it. Restarting the positions alone "
     "changed almost nothing.", "documents-seen-together"),
    ([("transformers #29285", TRANSFORMERS + "pull/29285"), ("gpt-neox #1003", "EleutherAI/gpt-neox/issues/1003")],
     "RoPE's angles or tables were computed in bf16 or fp16; the error grows with the position.", "rope-in-bf16"),
    ([("PyTorch #160285", "pytorch/pytorch/issues/160285"), ("DeepSpeed #5618", DEEPSPEED + "issues/5618")],
     "The gradients of experts were larger by about the number of expert-parallel ranks.", "experts-times-ep"),
    ([("DeepSpeed #7839", DEEPSPEED + "pull/7839")],
     "bf16 with ZeRO-0: gradients were not zeroed between steps (and divided by a loss scale that had not been "
     "applied).", "not-zeroed"),
    ([("Fast-LLM #542", "ServiceNow/Fast-LLM/issues/542"), ("#545", "ServiceNow/Fast-LLM/pull/545")],
     "After a refactoring the weights of norms had weight decay, which they had not had.", "norms-decay"),
    ([("transformers #24088", TRANSFORMERS + "pull/24088")],
     "The learning rate's scheduler was stepped once for each process, although its number of steps already "
     "counted them.", "schedule-by-samples"),
    ([("KempnerForge #115", "KempnerInstitute/KempnerForge/pull/115"),
      ("transformers #25849", TRANSFORMERS + "issues/25849")],
     "A resumed run had its weights, schedule and data, but AdamW's moments began at 0: the fresh optimizer had no "
     "tensors yet to load them into. In transformers, FSDP's optimizer was not loaded either.",
     "moments-not-restored"),
    ([("Megatron-LM #7452", MEGATRON + "issues/7452")],
     "A report of eleven and more silent faults in combinations of parallelisms, found with a type checker; its "
     "author has not verified each. One: a gated norm's weight is replicated over tp and its gradient partial, but "
     "only summed with sequence parallelism.", ""),
    ([("Megatron-LM #1464", MEGATRON + "issues/1464")],
     "With context parallelism gradients deviated from one GPU's by up to 300 times bf16's rounding.", ""),
    ([("Megatron-LM #906", MEGATRON + "issues/906"), ("#673", MEGATRON + "issues/673")],
     "The loss was multiplied by the context-parallel ranks while gradients were divided by the data-parallel "
     "ranks only.", ""),
    ([("Megatron-LM #6660", MEGATRON + "issues/6660")],
     "Megatron-FSDP: where a buffer's data-parallel group had one rank, gradients doubled with every micro-batch.",
     ""),
    ([("Megatron-LM #1628", MEGATRON + "issues/1628")],
     "Experts with tensor parallelism but no expert parallelism: the synchronisation of gradients was wrong.", ""),
    ([("Megatron-LM #619", MEGATRON + "pull/619")],
     "The router's gradient was not summed over tensor-parallel ranks with sequence parallelism: routers went "
     "apart.", ""),
    ([("Megatron-LM #5047", MEGATRON + "pull/5047"), ("#1652", MEGATRON + "issues/1652")],
     "With a loss per token, the scale of the balancing loss of experts depended on the tensor- and "
     "context-parallel ranks.", ""),
    ([("Megatron-LM #3159", MEGATRON + "pull/3159")],
     "Multi-token prediction: its loss has fewer targets than the main one, but was divided by the main one's "
     "number.", ""),
    ([("Megatron-LM #4609", MEGATRON + "pull/4609")],
     "Parameters were gathered into the gradients' buffer, which was not zeroed afterwards: gradients were added "
     "to old weights.", ""),
    ([("torchtitan #3412", TITAN + "pull/3412")],
     "A chunked loss under tensor parallelism: partial gradients were labelled as summed. After 500 steps the loss "
     "was well above one GPU's.", ""),
    ([("torchtitan #1373, a comment", TITAN + "pull/1373")],
     "A commenter's own DeepSeek-V3: the part of the key that all heads share got the gradient of the rank's own "
     "heads only. Runs diverged after more than 1,000 steps.", ""),
    ([("PyTorch #190746", "pytorch/pytorch/issues/190746")],
     "Inside `loss_parallel()` the backward pass of every `log_softmax` returns its gradient unchanged, also where "
     "no cross-entropy follows that completes it.", ""),
    ([("PyTorch #190626", "pytorch/pytorch/issues/190626")],
     "FSDP2 with tensor parallelism: `reduce_dtype` fp32 was not applied to the reduction over the tensor-parallel "
     "ranks, which ran in bf16.", ""),
    ([("torchtitan #2318", TITAN + "issues/2318")],
     "Gradient norms with DDP or hybrid sharding differed from those with FSDP by a factor of 8.", ""),
    ([("DeepSpeed #7718", DEEPSPEED + "issues/7718"), ("#7724", DEEPSPEED + "pull/7724")],
     "From 0.17.6 on gradient norms with ZeRO-2 were a third to a half of what they had been. A fix of the same "
     "week, for another report: gradients were divided by the accumulation steps although the caller had declined "
     "that.", ""),
    ([("DeepSpeed #8224", DEEPSPEED + "issues/8224")],
     "ZeRO-2 in bf16 computed wrong gradients where a module is used more than once in a step.", ""),
    ([("DeepSpeed #8475", DEEPSPEED + "issues/8475")],
     "Clipping averaged the ranks' norms as if all held the same parameters, although they held different experts.",
     ""),
    ([("DeepSpeed #8415", DEEPSPEED + "issues/8415")],
     "In bf16 a step with a gradient that is not finite is skipped without a message; a run skipped all of them.",
     ""),
    ([("NeMo Automodel #1412", AUTOMODEL + "pull/1412")],
     "The gradient of the experts' balancing loss was never attached, and its scale was wrong.", ""),
    ([("transformers #48687", TRANSFORMERS + "issues/48687")],
     "With expert parallelism and one implementation of experts, the loss was right and the router's gradient "
     "wrong.", ""),
    ([("ring-flash-attention #42", "zhuzilin/ring-flash-attention/issues/42")],
     "Ring attention merges outputs that the kernel has rounded to 16 bits: the more ranks, the larger the errors "
     "of the gradients, while the loss looks reasonable.", ""),
    ([("OLMo-core #828", "allenai/OLMo-core/pull/828")],
     "Recomputed layers drew new dropout masks, so that gradients were those of another forward pass; the loss was "
     "0.3 higher after 150 steps.", ""),
]
