#include "08_3d_full/complete/layout/device_model.h"

namespace train70b {

// Sources. Peaks and bandwidth of the memory: NVIDIA's data sheets, dense, the SXM modules (A100: 80 GB).
//   [MAMF]  best matrix products that were measured, github.com/stas00/ml-engineering, "Maximum Achievable Matmul
//           FLOPS": bf16 A100 267.9, H100 and H200 794.5, B200 1745 TFLOP/s; FP8 H200 1453, B200 3433
//   [FA3]   Shah et al. 2024, FlashAttention-3, figure 5: cuDNN, causal, head size 128, forward, on an H100
//   [FA2]   Dao 2023, FlashAttention-2: up to 73% (forward) and 63% (backward) of an A100's peak
//   [cuDNN] cuDNN's fused attention on an H200, bf16, 64/8 heads of 128, causal: 591/474 TFLOP/s at 4k, 644/541 at 8k,
//           688/581 at 32k
//   [B200]  cuBLAS on a B200: 1006, 1532, 1610 TFLOP/s for 2048^3, 4096^3, 8192^3 (pyptx.dev/performance): small
//           products take about 4 us more than their share of the large one's time
//   [driver] what nvidia-smi reports as total: 81920, 81559, 143771 and 183359 MiB. "80 GB" are 80 GiB
//   [steps] two published training steps, one for each figure: docs/published.md, "What is calibrated"
// What nobody measured is derived: "as X" is the figure of X times the ratio of the peaks.
//   copy      an H200 copies at 4.3 of 4.8 TB/s, the others at the same share of their data sheet's bandwidth (A100
//             2.04, H100 3.35 TB/s); B200: 6.0 TB/s were measured, of 8 (newmind.ai/journal/18)
//   launch_s  3 us: [B200], without what the model's waves explain
//   host_s    5 us: an assumption, one or two launches of 2.5 us and the code between them
const std::vector<DeviceModel>& named_devices() {
    using Attention = std::vector<std::array<double, 3>>;
    // [FA3] forward; backward: times the ratio of [cuDNN], 0.80 up to 4k, 0.84 beyond.
    static const Attention h100 = {{512, 315e12, 252e12},  {1024, 410e12, 328e12}, {2048, 484e12, 387e12},
                                   {4096, 518e12, 415e12}, {8192, 529e12, 444e12}, {16384, 539e12, 453e12}};
    // [cuDNN]; below 4k as [FA3] falls.
    static const Attention h200 = {{512, 359e12, 288e12},  {1024, 468e12, 375e12}, {2048, 552e12, 443e12},
                                   {4096, 591e12, 474e12}, {8192, 644e12, 541e12}, {32768, 688e12, 581e12}};
    const auto scaled = [](Attention rows, double forward, double backward) {
        for (auto& row : rows) {
            row[1] *= forward;
            row[2] *= backward;
        }
        return rows;
    };
    static const std::vector<DeviceModel> devices = {
        {.name = "A100",
         .peak_bf16 = 312e12,
         .peak_fp32 = 19.5e12,
         .product_efficiency = 0.859,  // [MAMF]
         .sustained = 0.824,           // an assumption: as H100
         .copy_bytes_per_s = 1.83e12,
         .memory_bytes = 85.9e9,  // [driver]
         .multiprocessors = 108,
         .launch_s = 3e-6,
         .host_s = 5e-6,
         // [FA2] at 16k; below as an H100's falls.
         .attention = scaled(h100, 0.73 * 312 / 539, 0.63 * 312 / 453)},
        {.name = "H100",
         .peak_bf16 = 989e12,
         .peak_fp32 = 67e12,
         .peak_fp8 = 1979e12,
         .product_efficiency = 0.803,  // [MAMF]
         .fp8_efficiency = 0.734,      // as H200: the same chip
         .sustained = 0.824,           // [steps], 700 W
         .sustained_fp8 = 0.983,
         .copy_bytes_per_s = 3.0e12,
         .memory_bytes = 85.5e9,  // [driver]
         .multiprocessors = 132,
         .launch_s = 3e-6,
         .host_s = 5e-6,
         .attention = h100},
        {.name = "H200",
         .peak_bf16 = 989e12,
         .peak_fp32 = 67e12,
         .peak_fp8 = 1979e12,
         .product_efficiency = 0.804,  // 795 TFLOP/s; [MAMF]: 0.803
         .fp8_efficiency = 0.734,      // [MAMF]
         .sustained = 0.824,           // as H100: the same chip, 700 W
         .sustained_fp8 = 0.983,
         .copy_bytes_per_s = 4.3e12,  // measured
         .memory_bytes = 150.8e9,     // [driver]
         .multiprocessors = 132,
         .launch_s = 3e-6,
         .host_s = 5e-6,
         .attention = h200},
        {.name = "B200",
         .peak_bf16 = 2250e12,
         .peak_fp32 = 75e12,
         .peak_fp8 = 4500e12,
         .product_efficiency = 0.776,  // [MAMF]; [B200]: 0.716 for 8192^3
         .fp8_efficiency = 0.763,      // [MAMF]
         .sustained = 0.824,           // an assumption: as H100; so FP8's
         .sustained_fp8 = 0.824,
         .copy_bytes_per_s = 6.0e12,
         .memory_bytes = 192.3e9,  // [driver]
         .multiprocessors = 148,
         .launch_s = 3e-6,
         .host_s = 5e-6,
         .attention = scaled(h200, 2250.0 / 989, 2250.0 / 989)},  // as H200
    };
    return devices;
}

}  // namespace train70b
