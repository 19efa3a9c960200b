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
};

std::vector<Visit> visits_of(ParamStore& store) {
    std::vector<Visit> visits;
    store.for_each_state([&](const Segment& segment, const char* state, Tensor& values) {
        visits.push_back({segment, state, values.dtype()});
    });
    return visits;
}

// Elements of a segment without padding; 0 where another tensor-parallel rank writes them.
int64_t elements_to_write(const Segment& segment) {
    if (segment.param->replica > 0) return 0;
    return std::clamp<int64_t>(segment.param->real().size() - segment.offset, 0, segment.data.size());
}

struct Range {
    int64_t from = 0, size = 0;  // elements of a segment
};

// What this rank writes of each visit's segment: ranks that hold the same states divide the elements of all segments,
// one after another, into equal parts.
std::vector<Range> ranges_of(ParamStore& store, const std::vector<Visit>& visits) {
    std::vector<GroupPtr> groups;
    std::map<GroupPtr, int64_t> elements, begins;
    for (const Visit& visit : visits) {
        groups.push_back(store.state_replicas(*visit.segment.param));
        if (visit.state == "weight") elements[groups.back()] += elements_to_write(visit.segment);
    }
    std::vector<Range> ranges;
    for (size_t i = 0; i < visits.size(); ++i) {
        if (visits[i].state != "weight") {
            ranges.push_back(ranges.back());
            continue;
        }
        const GroupPtr& group = groups[i];
        const int64_t count = elements_to_write(visits[i].segment), begin = begins[group];
        const auto bound = [&](int64_t rank) {  // where this rank's part of all elements begins, in the segment
            return std::clamp<int64_t>(elements[group] * rank / group->size() - begin, 0, count);
        };
        const int64_t from = bound(group->rank());
        ranges.push_back({from, bound(group->rank() + 1) - from});
        begins[group] += count;
    }
    return ranges;
}

}  // namespace

Snapshot::Snapshot(ParamStore& store, const std::vector<StepState*>& step_states)
    : store_(store), step_states_(step_states) {
    const std::vector<Visit> visits = visits_of(store);
    const std::vector<Range> ranges = ranges_of(store, visits);
    DType dtype = DType::f32;
    int64_t values = 0, codes = 0;
    // Weights first, so that a file of weights only is the beginning of the others.
    for (const bool weights : {true, false}) {
        for (size_t i = 0; i < visits.size(); ++i) {
            const Visit& visit = visits[i];
            if ((visit.state == "weight") != weights || ranges[i].size == 0) continue;
            const auto [from, size] = ranges[i];
            if (visit.state == "scale") {
                add_scales(int64_t(i), visit.segment, from, size, values);
            } else if (visit.dtype == DType::u8) {
                parts_.push_back({int64_t(i), from, size, codes, true});
                add_tensors(code_tensors_, visit.segment, visit.state, visit.dtype, from, size);
                codes += size;
            } else {
                parts_.push_back({int64_t(i), from, size, values, false});
                add_tensors(value_tensors_, visit.segment, visit.state, dtype = visit.dtype, from, size);
                values += size;
            }
        }
        if (!weights) continue;
        weights_ = value_tensors_.size();
        weight_elements_ = values;
    }
    // copy() meets them in the order of the visits.
    std::sort(parts_.begin(), parts_.end(), [](const Part& a, const Part& b) { return a.visit < b.visit; });
    step_states_begin_ = values;
    values += (add_rows() * size_of(DType::f32) + size_of(dtype) - 1) / size_of(dtype);
    values_ = Tensor({values}, dtype, Device::cpu, Memory::host);
    if (codes > 0) codes_ = Tensor({codes}, DType::u8, Device::cpu, Memory::host);
}

void Snapshot::add_tensors(std::vector<StoredTensor>& tensors, const Segment& segment, const std::string& state,
                           DType dtype, int64_t from, int64_t size) {
    const Param& param = *segment.param;
    for (const Rect& rect : rectangles(param.local, segment.offset + from, size))
        tensors.push_back({Piece{state, param.name, rect, param.is_matrix()}.name(), dtype,
                           param.is_matrix() ? Shape{rect.rows, rect.cols} : Shape{rect.rows}});
}

void Snapshot::add_scales(int64_t visit, const Segment& segment, int64_t from, int64_t size, int64_t& values) {
    const Param& param = *segment.param;
    scales_.push_back({visit, from, values, rectangles(param.local, segment.offset + from, size)});
    for (const Rect& rect : scales_.back().rects) {
        const int64_t blocks = blocks_of(rect, param.global_shape).blocks();
        value_tensors_.push_back({Piece{"scale", param.name, rect, param.is_matrix()}.name(), DType::f32, {2, blocks}});
        values += 2 * blocks;
    }
}

int64_t Snapshot::add_rows() {
    int64_t numbers = 0;
    for (StepState* state : step_states_) {
        const StepState::Rows rows = state->rows();
        for (const std::string& name : rows.names) rows_.push_back({rows.kind + name, DType::f32, {rows.width}});
        numbers += int64_t(rows.values.size());
    }
    return numbers;
}

double Snapshot::copy() {
    const double start = now_seconds();
    std::deque<HostCopy> copies;
    auto part = parts_.begin();
    auto scales = scales_.begin();
    int64_t visit = 0;
    store_.for_each_state([&](const Segment& segment, const char*, Tensor& values) {
        if (part != parts_.end() && part->visit == visit) {
            Tensor& to = part->is_code ? codes_ : values_;
            copies.emplace_back(to.element_slice(part->begin, {part->size}),
                                values.element_slice(part->from, {part->size}));
            ++part;
        } else if (scales != scales_.end() && scales->visit == visit) {
            copy_scales(*scales++, segment, values);
        }
        ++visit;
    });
    for (HostCopy& copy : copies) copy.host_waits();
    copy_step_states();
    return now_seconds() - start;
}

void Snapshot::copy_scales(const Scales& scales, const Segment& segment, const Tensor& values) {
    const BlockLayout layout{segment.global_index(), segment.data.size()};
    const Tensor host = converted(values, values.dtype(), Device::cpu);
    float* to = values_.data<float>() + scales.begin;
    int64_t from = scales.from;
    for (const Rect& rect : scales.rects) {
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

void Snapshot::copy_step_states() {
    char* at = values_.data<char>() + step_states_begin_ * size_of(values_.dtype());
    for (StepState* state : step_states_) {
        const StepState::Rows rows = state->rows();
        if (!rows.values.empty()) std::memcpy(at, rows.values.data(), rows.values.size() * sizeof(float));
        at += rows.values.size() * sizeof(float);
    }
}

int64_t Snapshot::bytes() const { return values_.bytes() + (codes_ ? codes_.bytes() : 0); }

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
