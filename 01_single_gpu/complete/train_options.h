#pragma once
// What a training run is: the options that all chapters share. flags/options.h has their flags.
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "01_single_gpu/complete/llama.h"
#include "01_single_gpu/complete/lr_schedule.h"
#include "01_single_gpu/complete/optimizer.h"
#include "01_single_gpu/core/registry.h"
#include "01_single_gpu/ops/matmul_own.h"

namespace train70b {

// How many sequences a step has, and how long they are. A sample of the data is a window of --seq-len + 1 tokens, and a
// sequence is all of it or a piece.
// The same in every step; a chapter may derive others. They must not depend on the layout.
class StepSizes {
  public:
    StepSizes(int64_t global_batch, int64_t seq_len) : global_batch_(global_batch), seq_len_(seq_len) {}
    virtual ~StepSizes() = default;

    virtual int64_t samples(int64_t /*step*/) const { return global_batch_; }                // steps from 1
    virtual int64_t seq_len(int64_t /*step*/) const { return seq_len_; }                     // divides --seq-len
    virtual int64_t first_sample(int64_t step) const { return (step - 1) * global_batch_; }  // of all samples before it
    virtual bool vary() const { return false; }
    // Of a step in the learning rate's schedule, which ends at that of --steps.
    virtual double position(int64_t step) const { return double(step); }

    int64_t pieces(int64_t step) const { return seq_len_ / seq_len(step); }  // sequences of one sample
    int64_t sequences(int64_t step) const { return samples(step) * pieces(step); }
    int64_t tokens(int64_t step) const { return samples(step) * seq_len_; }
    int64_t tokens_until(int64_t step) const { return first_sample(step) * seq_len_; }

  protected:
    const int64_t global_batch_, seq_len_;
};

inline const std::vector<Named<DType>> kGradDTypes = {
    {"fp32", DType::f32}, {"bf16", DType::bf16}, {"fp64", DType::f64}};
inline const std::vector<Named<DType>> kTrainDTypes = {
    {"fp32", DType::f32}, {"bf16", DType::bf16}, {"fp16", DType::f32}, {"fp64", DType::f64}};  // fp16: fp16.h
inline const std::vector<Named<std::optional<Device>>> kDevices = {  // empty: chosen at run time
    {"auto", std::nullopt},
    {"cpu", Device::cpu},
    {"cuda", Device::cuda}};
inline const std::vector<Named<AttentionBy>> kAttention = {
    {"auto", AttentionBy::automatic}, {"own", AttentionBy::own}, {"cudnn", AttentionBy::cudnn}};
inline const std::vector<Named<MatmulBy>> kMatmul = {{"auto", MatmulBy::cublaslt},
                                                     {"naive", MatmulBy::naive},
                                                     {"tiled", MatmulBy::tiled},
                                                     {"registers", MatmulBy::registers},
                                                     {"mma", MatmulBy::mma}};

struct TrainOptions {
    LlamaConfig model;  // set by parse(): the preset with its overrides, or the loaded model's

    std::string data;
    int64_t seq_len = 128, micro_batch = 0, global_batch = 16;  // sequences; micro_batch 0: global / ranks
    double val_fraction = -1;                                   // < 0: depends on the kind of data
    int64_t eval_every = 0;
    bool mask_document_ends = false;              // the token after a document's end is no target
    std::optional<int64_t> document_token;        // ends a document (data.h); empty: every sequence is one document
    int64_t sample_every = 0;                     // steps between continuations of the prompt; 0: none
    std::string prompt;                           // text; empty: the beginning of the held-out data
    std::shared_ptr<const StepSizes> step_sizes;  // null: global_batch sequences of seq_len in every step

    int64_t steps = 200, warmup_steps = 20;
    double lr = 3e-3, min_lr = -1;  // min_lr < 0: a tenth of lr
    std::string lr_schedule = "cosine";
    double weight_decay = 0.1, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, clip = 1.0, init_std = 0.02;
    bool skip_step = false;
    double z_loss = 0, multi_token_weight = 0.3;
    double loss_scale = 0;        // of fp16(); 0: dynamic
    int64_t recompute_every = 1;  // blocks
    int64_t loss_chunk = 0;       // rows of logits at a time; 0: all of a micro-batch
    std::optional<int64_t> mup;   // base hidden size
    uint64_t seed = 1;

    std::string dtype = "fp32", grad_dtype = "fp32", recompute = "none", device = "auto", attention = "auto",
                matmul = "auto", optimizer = "adamw", matmul_autotune;
    std::string metrics, trace, memory_timeline;
    std::string load_hf, save_hf, save_reference;  // folders; empty: none
    std::vector<std::string> hf_ignore;            // keys of the loaded config.json
    std::string notes;                             // lines about the loaded model
    bool dry_run = false;                          // book memory, compute nothing
    bool append_metrics = false;                   // to the file of the run that this one continues

    LrSchedule schedule() const {  // at(sizes()->position(step))
        return {lr, min_lr, double(warmup_steps), sizes()->position(steps), lr_schedule};
    }
    std::shared_ptr<const StepSizes> sizes() const {  // never null
        return step_sizes ? step_sizes : std::make_shared<StepSizes>(global_batch, seq_len);
    }
    Llama::Options llama() const;  // dtype, device, recompute, initial values
    bool fp16() const { return dtype == "fp16"; }
    // Whether attention leaves out keys beside those after a query.
    bool masks_keys() const { return document_token || model.hides_keys(seq_len); }
    AdamW::Hyper adamw() const { return {beta1, beta2, eps, weight_decay}; }
    Device device_kind() const;  // auto: cuda if there is one and it has kernels for dtype
    AttentionBy attention_by() const { return find_entry(kAttention, "--attention", attention).value; }
    MatmulBy matmul_by() const { return find_entry(kMatmul, "--matmul", matmul).value; }
    bool writes_files() const;
    TrainOptions without_files() const;  // a copy without files and evaluation, for measurements
    int64_t accumulation(int64_t data_ranks) const { return global_batch / (micro_batch * data_ranks); }
};

}  // namespace train70b
