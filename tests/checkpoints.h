#pragma once
// Runs of chapter 08 that write checkpoints, in a folder that all ranks share.
#include <nlohmann/json.hpp>

#include "08_3d_full/checkpoint/checkpoint.h"
#include "tests/composed.h"
#include "tests/files.h"

namespace train70b::test {

// A folder that all ranks share, gone at the end.
struct SharedFolder {
    std::optional<Folder> made;
    std::string path;
    SharedFolder() {
        if (this_rank == 0) made.emplace();
        path = made ? made->text() : std::string();
        std::vector<double> bytes(256);
        for (size_t i = 0; i < path.size(); ++i) bytes[i] = path[i];
        bytes = world().sum(bytes);
        path.clear();
        for (const double byte : bytes)
            if (byte > 0) path += char(byte);
    }
    std::string operator/(const std::string& name) const { return path + "/" + name; }
};

// A run of chapter 08 with checkpoints, from its first step to its last.
struct CheckpointedRun {
    TrainOptions options;
    CheckpointOptions checkpoint;
    nlohmann::ordered_json flags = {{"global-batch", std::to_string(options.global_batch)},
                                    {"steps", std::to_string(options.steps)}};
    CheckpointFolder folder;
    ComposedRun run;
    Checkpoints control;

    CheckpointedRun(const TrainOptions& o, const ParallelConfig& config, const CheckpointOptions& c,
                    const Comm& ranks = world(), RunControl* watching = nullptr)
        : options(o),
          checkpoint(c),
          folder(checkpoint, options, ComposedRun::validated(config, o, ranks), flags, ranks),
          run(options, ranks, config),
          control(folder, run.config, flags, run.session.trainer, ranks) {
        run.session.trainer.controls.push_back(&control);
        if (watching) run.session.trainer.controls.push_back(watching);
        run.session.trainer.run();
    }
    std::vector<double> history() const { return run.session.history(); }
    std::vector<double> weights() {  // of the whole model, on rank 0
        std::vector<double> list;
        for (const Param& param : all_params(options.model)) {
            const Tensor full = run.session.trainer.full(param, Which::data);
            if (!full) continue;
            const std::vector<double> part = values(full);
            list.insert(list.end(), part.begin(), part.end());
        }
        return list;
    }
};

// The steps of one run, which has ended when this returns.
inline std::vector<double> history_of(const TrainOptions& o, const ParallelConfig& config, const CheckpointOptions& c,
                                      const Comm& ranks = world()) {
    return CheckpointedRun(o, config, c, ranks).history();
}

inline TrainOptions shape(const Text& text, const std::string& dtype = "fp32") {
    TrainOptions o = tiny(text);
    o.model = {.name = "test", .layers = 4, .hidden = 32, .heads = 4, .kv_heads = 2, .ffn = 48, .vocab = 259};
    o.seq_len = 32;
    o.micro_batch = 1;
    o.steps = 6;
    o.lr = o.min_lr = 1e-3;
    o.dtype = dtype;
    if (dtype == "fp64") o.grad_dtype = dtype;
    // Other families too: a model of bf16 has biases of q, k, v, one of fp64 norms of q and k, of wide heads.
    o.model.qkv_bias = dtype == "bf16";
    o.model.qk_norm = dtype == "fp64";
    if (dtype == "fp64") o.model.head_size = 12;
    return o;
}

struct Case {
    std::string name, dtype;
    ParallelConfig config;
    int64_t global_batch = 8;
};
inline std::vector<Case> cases() {
    ParallelConfig plain{.mesh = {.dp = 8}}, mixed{.mesh = {.tp = 2, .dp = 2, .pp = 2}}, sharded = plain;
    mixed.zero.stage = 1;
    sharded.zero.stage = 3;
    ParallelConfig offload = sharded, hybrid = sharded, fp8 = sharded, interleaved = mixed, context = sharded,
                   v = mixed;
    offload.zero.offload = Offload::all;
    hybrid.zero.hybrid_shard = 2;
    hybrid.optimizer = "adamw8bit";
    fp8.mesh = {.tp = 2, .dp = 2, .pp = 2};
    fp8.fp8.recipe = "delayed";
    fp8.fp8.history = 3;
    interleaved.pipeline.schedule = "interleaved";
    interleaved.zero.stage = 2;
    interleaved.zero.offload = Offload::optimizer;
    interleaved.optimizer = "adamw8bit";
    context.mesh = {.tp = 2, .cp = 2, .dp = 2};
    context.tensor.sequence_parallel = true;
    context.zero.stage = 2;
    context.optimizer = "muon";
    v.pipeline.schedule = "zb-v";
    return {{"dp 8, ZeRO-0", "fp32", plain},
            {"tp 2, dp 2, pp 2, ZeRO-1", "fp16", mixed},
            {"dp 2, tp 2, pp 2, ZeRO-1", "bf16", mixed},
            {"ZeRO-3, offload", "bf16", offload},
            {"ZeRO-3, hybrid shard, 8-bit moments", "fp32", hybrid},
            {"ZeRO-3, tp 2, pp 2, delayed FP8", "bf16", fp8},
            {"interleaved, ZeRO-2, offload, 8-bit moments", "bf16", interleaved},
            {"zb-v, ZeRO-1", "fp32", v},
            {"tp 2, cp 2, sequence parallel, ZeRO-2, Muon", "fp64", context}};
}

}  // namespace train70b::test
