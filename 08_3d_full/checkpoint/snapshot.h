#pragma once
// What a rank writes of a checkpoint, and its copy in host memory: training goes on while the copy is written.
//
// Ranks that hold the same states (data-parallel replicas) write equal parts of them. A file holds, in this order: all
// weights; moments and scales; rows of step states, which are FP8 histories and buffers; 8-bit codes.
#include <string_view>

#include "01_single_gpu/complete/roles.h"
#include "07_fp8/complete/adamw8bit.h"
#include "08_3d_full/checkpoint/format.h"

namespace train70b {

class Snapshot {
  public:
    // The trainer's optimizer states must exist. Allocates the copy, booked as Memory::host.
    Snapshot(ParamStore& store, const std::vector<StepState*>& step_states);

    double copy();  // returns the seconds that it took
    int64_t bytes() const { return values_.bytes() + (codes_ ? codes_.bytes() : 0); }

    // The tensors of the file, and its content as of the last copy(): header and data. For the writer thread. Of
    // weights only: those, and the rows without which they are another model (is_of_model).
    struct Content {
        std::vector<std::string> names;
        std::string header;
        std::vector<std::string_view> data;
    };
    Content content(bool weights_only) const;

  private:
    struct Part {  // of a state of a segment: elements [from, from + size), or the scales of their blocks
        int64_t visit, from, size;
        int64_t begin;  // in values_ or codes_
    };

    ParamStore& store_;
    std::vector<StepState*> step_states_;
    std::vector<Part> parts_;
    std::vector<StoredTensor> value_tensors_, rows_, code_tensors_;
    size_t weights_ = 0;  // the first tensors of value_tensors_
    int64_t weight_elements_ = 0, step_states_begin_ = 0;
    Tensor values_, codes_;  // fp32 (fp64 in an fp64 run), u8
};

// ---- the way back (restore.cpp): every rank picks from all rectangles what its own segments hold ----

// Writes the states of the store, and the step states, from a full checkpoint of this model and optimizer; then the
// parameters follow. own_file: the name of the file that this rank wrote if the layout is the same, empty otherwise:
// then FP8 histories are merged over all ranks. Collective, through ParamStore::states_changed.
void restore(const Manifest& manifest, ParamStore& store, const std::vector<StepState*>& step_states,
             const std::string& own_file);

}  // namespace train70b
