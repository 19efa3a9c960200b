#pragma once
// What an op costs on a device. Every op takes launch_s, and then
//
//   matrix products   the longer of FLOPs / rate and bytes / copy_bytes_per_s. The rate is peak * efficiency for a
//                     large product (8192 x 8192 x 8192), times what a shape loses in comparison:
//                         max over tiles of  tile's rate * m n / (waves * multiprocessors * tile's m n) * k / (k + 128)
//                     Tiles of 128 x 256 or less are computed in waves, one on each multiprocessor; the last wave and
//                     tiles at the edges are not full. Each tile begins with loads and ends with stores, which take as
//                     long as 128 more columns of its depth k.
//   attention         FLOPs / rate, interpolated in `attention` by the number of keys. Without a mask of the future a
//                     row is like one of a causal sequence four times as long. Heads below 128 and groups of rows that
//                     do not occupy all multiprocessors are slower.
//   everything else   bytes / copy_bytes_per_s; by an entry in `pointwise_traffic`, so many times bytes and launch_s
//
// An op in `measured` costs its FLOPs or bytes at the measured rate, launch included.
#include "08_3d_full/complete/layout/device_model.h"
#include "08_3d_full/plan/sequence.h"

namespace train70b {

double op_seconds(const DeviceModel& device, const OpCall& op);  // of one op, alone on the device
double peak_flops(const DeviceModel& device, DType dtype);       // FLOP/s of products of these; not of FP8

// Adds what --bench --bench-csv FILE wrote to device.measured. Usage error "FLAG FILE: line 3: ..." for a bad row.
void read_device_csv(const std::string& path, const std::string& flag, DeviceModel& device);
void parse_device_csv(const std::string& text, const std::string& where, DeviceModel& device);

}  // namespace train70b
