#include "08_3d_full/checkpoint/snapshot.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>

#include "01_single_gpu/core/files.h"
#include "03_zero/complete/offload.h"

namespace train70b {

namespace {

// A state of a segment, in the order of ParamStore::for_each_state. A segment's first state is its weight.
struct Visit {
    Segment segment;
    std::string state;
    DType dtype;
    int64_t from = 0, size = 0;  // the elements of the segment that this rank writes
};

// Elements of a segment without padding; 0 where another tensor-parallel rank writes them.
int64_t elements_to_write(const Segment& segment) {
    if (segment.param->replica > 0) return 0;
    return std::clamp<int64_t>(segment.param->real().size() - segment.offset, 0, segment.data.size());
}

// Ranks that hold the same states divide the elements of all segments, one after another, into equal parts.
std::vector<Visit> visits_of(ParamStore& store) {
    std::vector<Visit> visits;
    store.for_each_state([&](const Segment& segment, const char* state, Tensor& values) {
        visits.push_back({segment, state, values.dtype()});
    });
    std::vector<GroupPtr> groups;
    std::map<GroupPtr, int64_t> elements, begins;
    for (const Visit& visit : visits) {
        groups.push_back(store.state_replicas(*visit.segment.param));
        if (visit.state == "weight") elements[groups.back()] += elements_to_write(visit.segment);
    }
    for (size_t i = 0; i < visits.size(); ++i) {
        Visit& visit = visits[i];
        if (visit.state != "weight") {
            visit.from = visits[i - 1].from, visit.size = visits[i - 1].size;
            continue;
        }
        const GroupPtr& group = groups[i];
        const int64_t count = elements_to_write(visit.segment), begin = begins[group];
        const auto bound = [&](int64_t rank) {  // where this rank's part of all elements begins, in the segment
            return std::clamp<int64_t>(elements[group] * rank / group->size() - begin, 0, count);
        };
        visit.from = bound(group->rank());
        visit.size = bound(group->rank() + 1) - visit.from;
        begins[group] += count;
    }
    return visits;
}

// The scales of the blocks of elements [from, from + size) of a segment, of which `scales` has all.
void copy_scales(float* to, const Segment& segment, int64_t from, int64_t size, const Tensor& scales) {
    const BlockLayout layout{segment.global_index(), segment.data.size()};
    const Tensor host = converted(scales, scales.dtype(), Device::cpu);
    for (const Rect& rect : rectangles(segment.param->local, segment.offset + from, size)) {
        const BlockLayout blocks = blocks_of(rect, segment.param->global_shape);
        for (int moment = 0; moment < 2; ++moment)
            for (int64_t block = 0; block < blocks.blocks(); ++block) {
                const BlockLayout::Range range = blocks.block(block);
                *to = 0;
                if (range.begin < range.end)
                    *to = host.data<float>()[moment * layout.blocks() + block_of(layout, from + range.begin)];
                ++to;
            }
        from += rect.size();
    }
}

}  // namespace

Snapshot::Snapshot(ParamStore& store, const std::vector<StepState*>& step_states)
    : store_(store), step_states_(step_states) {
    const std::vector<Visit> visits = visits_of(store);
    DType dtype = DType::f32;
    int64_t values = 0, codes = 0;
    // Weights first, so that a file of weights only is the beginning of the others.
    for (const bool weights : {true, false}) {
        for (size_t i = 0; i < visits.size(); ++i) {
            const auto& [segment, state, state_dtype, from, size] = visits[i];
            if ((state == "weight") != weights || size == 0) continue;
            const bool are_codes = state_dtype == DType::u8, are_scales = state == "scale";
            if (!are_codes && !are_scales) dtype = state_dtype;
            int64_t& end = are_codes ? codes : values;
            parts_.push_back({int64_t(i), from, size, end});
            const Param& param = *segment.param;
            for (const Rect& rect : rectangles(param.local, segment.offset + from, size)) {
                const Shape shape = are_scales          ? Shape{2, blocks_of(rect, param.global_shape).blocks()}
                                    : param.is_matrix() ? Shape{rect.rows, rect.cols}
                                                        : Shape{rect.rows};
                (are_codes ? code_tensors_ : value_tensors_)
                    .push_back({Piece{state, param.name, rect, param.is_matrix()}.name(), state_dtype, shape});
                end += are_scales ? 2 * shape[1] : rect.size();
            }
        }
        if (!weights) continue;
        weights_ = value_tensors_.size();
        weight_elements_ = values;
    }
    // copy() meets them in the order of the visits.
    std::ranges::sort(parts_, {}, &Part::visit);
    step_states_begin_ = values;
    int64_t numbers = 0;  // of step states
    for (StepState* state : step_states) {
        const StepState::Rows rows = state->rows();
        for (const std::string& name : rows.names) rows_.push_back({rows.kind + name, DType::f32, {rows.width}});
        numbers += int64_t(rows.values.size());
    }
    values += (numbers * size_of(DType::f32) + size_of(dtype) - 1) / size_of(dtype);
    values_ = Tensor({values}, dtype, Device::cpu, Memory::host);
    if (codes > 0) codes_ = Tensor({codes}, DType::u8, Device::cpu, Memory::host);
}

double Snapshot::copy() {
    const double start = now_seconds();
    std::deque<HostCopy> copies;
    auto part = parts_.begin();
    int64_t visit = -1;
    store_.for_each_state([&](const Segment& segment, const char* state, Tensor& values) {
        ++visit;
        if (part == parts_.end() || part->visit != visit) return;
        if (state == std::string("scale")) {
            copy_scales(values_.data<float>() + part->begin, segment, part->from, part->size, values);
        } else {
            Tensor& to = values.dtype() == DType::u8 ? codes_ : values_;
            copies.emplace_back(to.element_slice(part->begin, {part->size}),
                                values.element_slice(part->from, {part->size}));
        }
        ++part;
    });
    for (HostCopy& copy : copies) copy.host_waits();
    char* at = values_.data<char>() + step_states_begin_ * size_of(values_.dtype());
    for (StepState* state : step_states_) {
        const StepState::Rows rows = state->rows();
        if (!rows.values.empty()) std::memcpy(at, rows.values.data(), rows.values.size() * sizeof(float));
        at += rows.values.size() * sizeof(float);
    }
    return now_seconds() - start;
}

Snapshot::Content Snapshot::content(bool weights_only) const {
    std::vector<StoredTensor> tensors = value_tensors_;
    if (weights_only) tensors.resize(weights_);
    const int64_t elements = weights_only ? weight_elements_ : step_states_begin_, width = size_of(values_.dtype());
    Content content;
    content.data.emplace_back(values_.data<char>(), size_t(elements * width));
    const char* row = values_.data<char>() + step_states_begin_ * width;
    for (const StoredTensor& tensor : rows_) {
        const size_t bytes = size_t(tensor.shape[0] * size_of(DType::f32));
        if (!weights_only || is_of_model(tensor.name)) {
            tensors.push_back(tensor);
            content.data.emplace_back(row, bytes);
        }
        row += bytes;
    }
    if (!weights_only && codes_) {
        tensors.insert(tensors.end(), code_tensors_.begin(), code_tensors_.end());
        content.data.emplace_back(codes_.data<char>(), size_t(codes_.bytes()));
    }
    content.header = safetensors_header(tensors);
    for (const StoredTensor& tensor : tensors) content.names.push_back(tensor.name);
    return content;
}

}  // namespace train70b
