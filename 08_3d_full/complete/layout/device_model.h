#pragma once
// A device in numbers: what its data sheet promises, and what single ops have been measured to reach.
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace train70b {

struct DeviceModel {
    std::string name;                                   // "H100"
    double peak_bf16 = 0, peak_fp32 = 0, peak_fp8 = 0;  // FLOP/s of products, dense, data sheet; peak_fp8 0: has none
    double product_efficiency = 0;                      // share of the peak that a large matrix product reaches
    double fp8_efficiency = 0;                          // the same of peak_fp8
    // Of these rates and attention's, the share that is left when the device computes all the time and its power is
    // limited; of FP8 products. From whole training steps (docs/published.md), 1 where there is none.
    double sustained = 1, sustained_fp8 = 1;
    double flops_per_s = 0;       // of a block's products in training, large and small: chapter 04's estimate
    double copy_bytes_per_s = 0;  // measured, read plus written
    double memory_bytes = 0;      // of the device
    int64_t multiprocessors = 0;  // over which the tiles of a product are divided; 0: evenly (a CPU)
    double launch_s = 0;          // of an op, besides its work
    double host_s = 0;            // least time from one op's launch to the next
    std::vector<std::array<double, 3>> attention;  // {tokens, forward, backward}: FLOP/s, causal, head size 128, bf16
    // An op that is not a product or attention: its bytes in multiples of the fused op's, and its kernels. For programs
    // that do not fuse it.
    std::map<std::string, std::array<double, 2>> pointwise_traffic;
    bool streams = true;  // false: communication and computation take turns (MPI)
    // An op's name: its FLOP/s and bytes/s, as --bench measured them (one of them 0); used instead of all of the above.
    std::map<std::string, std::array<double, 2>> measured;
};

// The devices that a cluster file may name: A100, H100, H200, B200.
const std::vector<DeviceModel>& named_devices();

}  // namespace train70b
