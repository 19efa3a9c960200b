#pragma once
// The tables of chapter 04: what a rank keeps and sends in the run's last step, measured and computed.
#include "02_data_parallel/runtime/program.h"
#include "04_tensor_parallel/complete/traffic.h"

namespace train70b {

void say_layout(const Program& program, int64_t tp, const TensorParallelOptions& options);
void print_tables(const Program& program, int64_t tp, const TensorParallelOptions& options);

}  // namespace train70b
