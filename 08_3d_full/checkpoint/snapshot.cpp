#include "08_3d_full/checkpoint/snapshot.h"

#include <algorithm>
#include <deque>
#include <map>

#include "01_single_gpu/core/files.h"
#include "03_zero/complete/offload.h"

namespace train70b {

Snapshot::Snapshot(ParamStore& store, const std::vector<StepState*>& step_states)
    : store_(store), step_states_(step_states) {
    // What this rank writes of each segment: all of its elements that count are divided over the replicas.
    const auto elements = [](const Segment& segment) {  // without padding; 0 for what another tp rank writes
        if (segment.param->replica > 0) return int64_t(0);
        return std::clamp<int64_t>(segment.param->real().size() - segment.offset, 0, segment.data.size());
    };
    struct Visit {
        Segment segment;
        std::string state;
        DType dtype;
    };
    std::vector<Visit> visits;
    // What the same ranks hold is divided among them: the elements of all segments, one after another.
    struct Replicated {
        int64_t all = 0, begin = 0, first = 0, end = 0;
    };
    std::map<const Group*, Replicated> of_replicas;
    const auto replicated = [&](const Segment& segment) -> Replicated& {
        return of_replicas[store_.state_replicas(*segment.param).get()];
    };
    store_.for_each_state([&](const Segment& segment, const char* state, Tensor& values) {
        visits.push_back({segment, state, values.dtype()});
        if (visits.back().state == "weight") replicated(segment).all += elements(segment);
    });
    for (auto& [group, its] : of_replicas) {
        its.first = its.all * group->rank() / group->size();
        its.end = its.all * (group->rank() + 1) / group->size();
    }

    const auto visit_range = [&](const Visit& visit, int64_t& from, int64_t& size) {
        const Replicated& its = replicated(visit.segment);
        const int64_t count = elements(visit.segment);
        from = std::clamp<int64_t>(its.first - its.begin, 0, count);
        size = std::clamp<int64_t>(its.end - its.begin, 0, count) - from;
        return size > 0;
    };
    int64_t wide = 0, codes = 0;
    DType wide_dtype = DType::f32;
    // Weights first, so that a file of weights only is the beginning of the others.
    for (const bool weights : {true, false}) {
        for (auto& [group, its] : of_replicas) its.begin = 0;
        for (size_t i = 0; i < visits.size(); ++i) {
            const Visit& visit = visits[i];
            const Param& param = *visit.segment.param;
            const bool is_weight = visit.state == "weight";
            int64_t from = 0, size = 0;
            // begin: of this segment, whose first state is the weight
            if (is_weight && i > 0) replicated(visits[i - 1].segment).begin += elements(visits[i - 1].segment);
            if (is_weight != weights || !visit_range(visit, from, size)) continue;
            const std::vector<Rect> rects = rectangles(param.local, visit.segment.offset + from, size);
            const auto piece = [&](const Rect& rect) {
                return Piece{visit.state, param.name, rect, param.is_matrix()}.name();
            };
            if (visit.state == "scale") {
                Scales scales{.visit = int64_t(i), .from = from, .begin = wide, .rects = rects};
                for (const Rect& rect : rects) {
                    const int64_t blocks = blocks_of(rect, param.global_shape).blocks();
                    wide_tensors_.push_back({piece(rect), DType::f32, {2, blocks}});
                    wide += 2 * blocks;
                }
                scales_.push_back(std::move(scales));
                continue;
            }
            const bool is_code = visit.dtype == DType::u8;
            if (!is_code) wide_dtype = visit.dtype;
            int64_t& at = is_code ? codes : wide;
            parts_.push_back({int64_t(i), from, size, at, is_code});
            at += size;
            for (const Rect& rect : rects)
                (is_code ? code_tensors_ : wide_tensors_)
                    .push_back(
                        {piece(rect), visit.dtype, param.is_matrix() ? Shape{rect.rows, rect.cols} : Shape{rect.rows}});
        }
        if (weights) {
            weights_ = wide_tensors_.size();
            weight_elements_ = wide;
        }
    }
    // copy() meets them in the order of the visits.
    std::sort(parts_.begin(), parts_.end(), [](const Part& a, const Part& b) { return a.visit < b.visit; });
    step_states_begin_ = wide;
    int64_t numbers = 0;  // of step states, fp32
    for (StepState* state : step_states_) {
        const StepState::Rows rows = state->rows();
        for (const std::string& name : rows.names) rows_.push_back({rows.kind + name, DType::f32, {rows.width}});
        numbers += int64_t(rows.values.size());
    }
    wide += (numbers * size_of(DType::f32) + size_of(wide_dtype) - 1) / size_of(wide_dtype);
    wide_ = Tensor({wide}, wide_dtype, Device::cpu, Memory::host);
    if (codes > 0) codes_ = Tensor({codes}, DType::u8, Device::cpu, Memory::host);
}

double Snapshot::copy() {
    const double start = now_seconds();
    std::deque<HostCopy> copies;
    auto part = parts_.begin();
    auto scales = scales_.begin();
    int64_t visit = 0;
    store_.for_each_state([&](const Segment& segment, const char*, Tensor& values) {
        if (part != parts_.end() && part->visit == visit) {
            Tensor& to = part->is_code ? codes_ : wide_;
            copies.emplace_back(to.element_slice(part->begin, {part->size}),
                                values.element_slice(part->from, {part->size}));
            ++part;
        } else if (scales != scales_.end() && scales->visit == visit) {
            const BlockLayout layout{segment.global_index(), segment.data.size()};
            Tensor host(values.shape(), values.dtype(), Device::cpu, Memory::workspace);
            train70b::copy(host, values);
            float* to = wide_.data<float>() + scales->begin;
            int64_t from = scales->from;
            for (size_t i = 0; i < scales->rects.size(); ++i) {
                const BlockLayout rect = blocks_of(scales->rects[i], segment.param->global_shape);
                for (int moment = 0; moment < 2; ++moment)
                    for (int64_t block = 0; block < rect.blocks(); ++block) {
                        const BlockLayout::Range range = rect.block(block);
                        *to++ =
                            range.begin < range.end
                                ? host.data<float>()[moment * layout.blocks() + block_of(layout, from + range.begin)]
                                : 0;
                    }
                from += rect.size;
            }
            ++scales;
        }
        ++visit;
    });
    for (HostCopy& copy : copies) copy.host_waits();
    add_step_states();
    return now_seconds() - start;
}

void Snapshot::add_step_states() {
    auto* at = reinterpret_cast<float*>(wide_.data<char>() + step_states_begin_ * size_of(wide_.dtype()));
    for (StepState* state : step_states_) {
        const StepState::Rows rows = state->rows();
        at = std::copy(rows.values.begin(), rows.values.end(), at);
    }
}

int64_t Snapshot::bytes() const { return wide_.bytes() + (codes_ ? codes_.bytes() : 0); }

Snapshot::Content Snapshot::content(bool weights_only) const {
    std::vector<StoredTensor> tensors = wide_tensors_;
    if (weights_only) tensors.resize(weights_);
    const int64_t elements = weights_only ? weight_elements_ : step_states_begin_, width = size_of(wide_.dtype());
    Content content;
    content.data.emplace_back(wide_.data<char>(), size_t(elements * width));
    const char* row = wide_.data<char>() + step_states_begin_ * width;
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
