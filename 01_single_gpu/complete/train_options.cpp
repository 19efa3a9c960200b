#include "01_single_gpu/complete/train_options.h"

namespace train70b {

Llama::Options TrainOptions::llama() const {
    const DType weights = find_entry(kTrainDTypes, "--dtype", dtype).value;
    const DType grads = find_entry(kGradDTypes, "--grad-dtype", grad_dtype).value;
    return {weights,         weights == DType::f64 ? weights : grads,
            device_kind(),   recompute_of(recompute),
            init_std,        z_loss,
            mup.value_or(0), loss_chunk,
            recompute_every, multi_token_weight};
}

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

}  // namespace train70b
