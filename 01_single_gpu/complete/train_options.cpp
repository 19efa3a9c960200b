#include "01_single_gpu/complete/train_options.h"

#include "01_single_gpu/core/registry.h"

namespace train70b {

namespace {
const std::vector<Named<DType>> kTrainDTypes = {{"fp32", DType::f32}, {"bf16", DType::bf16}, {"fp64", DType::f64}};
const char* const kFp16 = "fp16";                             // of --dtype alone: products of fp32 tensors (fp16.h)
const std::vector<Named<std::optional<Device>>> kDevices = {  // empty: chosen at run time
    {"auto", std::nullopt},
    {"cpu", Device::cpu},
    {"cuda", Device::cuda}};
const std::vector<Named<AttentionBy>> kAttention = {
    {"auto", AttentionBy::automatic}, {"own", AttentionBy::own}, {"cudnn", AttentionBy::cudnn}};
const std::vector<Named<MatmulBy>> kMatmul = {{"auto", MatmulBy::cublaslt},
                                              {"naive", MatmulBy::naive},
                                              {"tiled", MatmulBy::tiled},
                                              {"registers", MatmulBy::registers},
                                              {"mma", MatmulBy::mma}};
}  // namespace

std::vector<std::string> grad_dtype_names() { return names_of(kTrainDTypes); }
std::vector<std::string> train_dtype_names() {
    std::vector<std::string> names = grad_dtype_names();
    names.insert(names.begin() + 2, kFp16);
    return names;
}
std::vector<std::string> device_names() { return names_of(kDevices); }
std::vector<std::string> attention_names() { return names_of(kAttention); }
std::vector<std::string> matmul_names() { return names_of(kMatmul); }

bool TrainOptions::fp16() const { return dtype == kFp16; }

LrSchedule TrainOptions::schedule() const {
    return {lr, min_lr, double(warmup_steps), sizes()->position(steps), lr_schedule};
}

std::shared_ptr<const StepSizes> TrainOptions::sizes() const {
    return step_sizes ? step_sizes : std::make_shared<StepSizes>(global_batch, seq_len);
}

Llama::Options TrainOptions::llama() const {
    const DType weights = fp16() ? DType::f32 : find_entry(kTrainDTypes, "--dtype", dtype).value;
    const DType grads = find_entry(kTrainDTypes, "--grad-dtype", grad_dtype).value;
    return {weights,         weights == DType::f64 ? weights : grads,
            device_kind(),   recompute_of(recompute),
            init_std,        z_loss,
            mup.value_or(0), loss_chunk,
            recompute_every, multi_token_weight};
}

AdamW::Hyper TrainOptions::adamw() const { return {beta1, beta2, eps, weight_decay}; }

bool TrainOptions::writes_files() const {
    for (const std::string* path : {&metrics, &trace, &memory_timeline, &save_hf, &save_reference})
        if (!path->empty()) return true;
    return false;
}

TrainOptions TrainOptions::without_files() const {
    TrainOptions o = *this;
    o.metrics = o.trace = o.memory_timeline = o.load_hf = o.save_hf = o.save_reference = "";
    o.eval_every = o.sample_every = 0;
    return o;
}

Device TrainOptions::device_kind() const {
    if (dry_run) return Device::meta;
    if (const auto chosen = find_entry(kDevices, "--device", device).value) return *chosen;
    return dtype != "fp64" && !fp16() && why_no_cuda().empty() ? Device::cuda : Device::cpu;
}

AttentionBy TrainOptions::attention_by() const { return find_entry(kAttention, "--attention", attention).value; }
MatmulBy TrainOptions::matmul_by() const { return find_entry(kMatmul, "--matmul", matmul).value; }

}  // namespace train70b
