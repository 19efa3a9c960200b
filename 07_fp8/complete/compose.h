#pragma once
// What chapter 07 composes: tensor parallelism, FP8 layers, ZeRO, and one of the optimizers.
#include "01_single_gpu/complete/trainer.h"
#include "03_zero/complete/zero.h"
#include "04_tensor_parallel/complete/flags.h"
#include "04_tensor_parallel/complete/tensor_parallel.h"
#include "07_fp8/complete/fp8.h"

namespace train70b {

struct Precision {
    Fp8Options fp8;
    std::string optimizer = "adamw";
};

// ranks: all of them; layout: those of tensor parallelism and of ZeRO.
struct Fp8Trainer {
    TensorParallel tensor_parallel;
    Fp8 fp8;
    Zero zero;

    // Construct it before Trainer::allocate(); it gives the trainer its roles. The model and the trainer outlive this.
    Fp8Trainer(Llama& model, Trainer& trainer, const TrainOptions& options, const Comm& ranks,
               const TensorComms& layout, const ZeroOptions& zero_options, const Precision& precision);
};

}  // namespace train70b
