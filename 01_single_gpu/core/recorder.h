#pragma once
// What a rank does, written down while it does it: ops, communication, memory. Chapter 08's dry run is such a recording
// (08_3d_full/plan/record.h); without one, each of these costs one branch.
#include <cstdint>
#include <string>
#include <vector>

#include "01_single_gpu/core/memory.h"
#include "01_single_gpu/core/tensor.h"

namespace train70b {

struct RecordedCall;  // 02_data_parallel/runtime/work_queue.h

class Recorder {
  public:
    virtual ~Recorder() = default;
    // shape: of a product or of attention (Span); else empty.
    virtual void op(const char* name, const std::vector<int64_t>& shape, DType dtype, double flops, double bytes) = 0;
    virtual void book(Memory kind, int64_t bytes) = 0;
    virtual void phase(const std::string& name) = 0;  // MemoryLedger::phase
    // A group is split; returns the number by which calls refer to the new groups.
    virtual int split(int parent, const std::vector<int>& colors, const std::string& name) = 0;
    virtual uint64_t call(const RecordedCall& call) = 0;  // returns its number, from 1
    virtual void wait(uint64_t call) = 0;
    // Between the two, ops belong to the transport: a simulated process group fills its messages by ops.
    virtual void begin_transport() = 0;
    virtual void end_transport() = 0;
};
inline Recorder* recorder = nullptr;  // of this rank; usually none

}  // namespace train70b
