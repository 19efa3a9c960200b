#include <sys/resource.h>

#include <algorithm>
#include <cstring>

#include "08_3d_full/checkpoint/snapshot.h"

namespace train70b {

namespace {

// All rectangles of all files, by "state/parameter", and their other tensors by name.
class SavedStates {
  public:
    explicit SavedStates(const Manifest& manifest) {
        const rlim_t count = manifest.files.size() + 256;  // open files, these and others
        rlimit limit{};
        if (::getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < count) {
            limit.rlim_cur = std::min(limit.rlim_max, count);
            ::setrlimit(RLIMIT_NOFILE, &limit);
        }
        files_.reserve(manifest.files.size());
        for (const CheckpointFile& file : manifest.files) {
            files_.emplace_back(manifest.folder + "/" + file.name);
            for (const auto& [name, tensor] : files_.back().tensors()) {
                const auto piece = Piece::parse(name);
                stored_[piece ? piece->state + "/" + piece->param : "row of " + name].push_back(
                    {piece ? piece->rect : Rect{}, &files_.back(), &tensor});
            }
        }
    }

    struct Stored {
        Rect rect;
        const SafetensorsFile* file;
        const StoredTensor* tensor;
    };
    const std::vector<Stored>& of(const std::string& name) const {
        static const std::vector<Stored> none;
        const auto found = stored_.find(name);
        return found == stored_.end() ? none : found->second;
    }
    const Stored& scale(const std::string& param, const Rect& rect) const {
        for (const Stored& stored : of("scale/" + param))
            if (stored.rect.row_begin == rect.row_begin && stored.rect.col_begin == rect.col_begin) return stored;
        usage_error("{}: scale/{} of rows {}+{} is missing", files_.front().path(), param, rect.row_begin, rect.rows);
    }

  private:
    std::vector<SafetensorsFile> files_;
    std::map<std::string, std::vector<Stored>> stored_;
};

// Reads a stored tensor from its beginning on, in large pieces.
class Window {
  public:
    explicit Window(const SavedStates::Stored& stored) : stored_(stored) {}

    const char* at(int64_t begin, int64_t count) {  // bytes [begin, begin + count)
        constexpr int64_t kBytes = 8 << 20;
        if (begin < begin_ || begin + count > begin_ + int64_t(bytes_.size())) {
            bytes_.resize(size_t(std::min(std::max(kBytes, count), stored_.tensor->bytes - begin)));
            stored_.file->read_bytes(*stored_.tensor, begin_ = begin, bytes_.data(), int64_t(bytes_.size()));
        }
        return bytes_.data() + (begin - begin_);
    }

  private:
    const SavedStates::Stored& stored_;
    std::vector<char> bytes_;
    int64_t begin_ = 0;
};

std::vector<float> all_numbers(const SavedStates::Stored& stored) {
    std::vector<float> numbers(size_t(stored.tensor->size()));
    stored.file->read_bytes(*stored.tensor, 0, numbers.data(), stored.tensor->bytes);
    return numbers;
}

// Calls `copy` for every run of elements that a rectangle and a segment have in common: their begins within the
// rectangle and within the segment, and the number of elements.
void for_each_common_run(const Rect& rect, const Segment& segment, int64_t size,
                         const std::function<void(int64_t in_rect, int64_t in_segment, int64_t count)>& copy) {
    const Rect& local = segment.param->local;
    const int64_t row_begin = std::max(rect.row_begin, local.row_begin + segment.offset / local.cols);
    const int64_t last_row = local.row_begin + (segment.offset + size - 1) / local.cols;
    const int64_t row_end = std::min(rect.row_begin + rect.rows, last_row + 1);
    const int64_t col_begin = std::max(rect.col_begin, local.col_begin);
    const int64_t col_end = std::min(rect.col_begin + rect.cols, local.col_begin + local.cols);
    for (int64_t row = row_begin; row < row_end; ++row) {
        // Of this row, as elements of the local rectangle, clipped to the segment.
        const int64_t row_start = (row - local.row_begin) * local.cols - local.col_begin;
        const int64_t from = std::max(row_start + col_begin, segment.offset);
        const int64_t to = std::min(row_start + col_end, segment.offset + size);
        if (from >= to) continue;
        copy((row - rect.row_begin) * rect.cols + from - row_start - rect.col_begin, from - segment.offset, to - from);
    }
}

// A state whose elements are stored as they are. Padding stays as it is, 0.
void read_elements(const SavedStates& source, const Segment& segment, const char* state, Tensor& values) {
    const bool on_host = values.device() == Device::cpu;
    Tensor host = on_host ? values : Tensor(values.shape(), values.dtype(), Device::cpu, Memory::workspace);
    if (!on_host) copy(host, values);
    const int64_t width = size_of(values.dtype());
    for (const SavedStates::Stored& stored : source.of(state + ("/" + segment.param->name))) {
        if (stored.tensor->dtype != values.dtype())
            usage_error("{}: {} is {}, but this run keeps it in {} (try the --dtype and --optimizer of the checkpoint)",
                        stored.file->path(), stored.tensor->name, name_of(stored.tensor->dtype),
                        name_of(values.dtype()));
        Window window(stored);
        for_each_common_run(stored.rect, segment, values.size(), [&](int64_t in_rect, int64_t in_segment, int64_t n) {
            std::memcpy(host.data<char>() + in_segment * width, window.at(in_rect * width, n * width),
                        size_t(n * width));
        });
    }
    if (!on_host) copy(values, host);
}

// Reads one 8-bit moment (the second if `second`): its codes, and one scale per block.
void read_moments(const SavedStates& source, const Segment& segment, bool second, Tensor& codes, float* scales) {
    const BlockLayout layout{segment.global_index(), segment.data.size()};
    std::vector<uint8_t> values(size_t(layout.size), 0);
    std::vector<float> scale_of(size_t(layout.size), -1.0f);
    const std::string& name = segment.param->name;
    for (const SavedStates::Stored& stored : source.of((second ? "exp_avg_sq/" : "exp_avg/") + name)) {
        const SavedStates::Stored& scale = source.scale(name, stored.rect);
        const BlockLayout blocks = blocks_of(stored.rect, segment.param->global_shape);
        if (stored.tensor->dtype != DType::u8 || scale.tensor->dtype != DType::f32 ||
            scale.tensor->size() != 2 * blocks.blocks())
            usage_error("{}: {} and its scales are not 8-bit moments", stored.file->path(), stored.tensor->name);
        const std::vector<float> scale_list = all_numbers(scale);
        const int64_t first = second ? blocks.blocks() : 0;
        Window window(stored);
        for_each_common_run(stored.rect, segment, layout.size, [&](int64_t in_rect, int64_t in_segment, int64_t n) {
            std::memcpy(&values[size_t(in_segment)], window.at(in_rect, n), size_t(n));
            for (int64_t i = 0; i < n; ++i)
                scale_of[size_t(in_segment + i)] = scale_list[size_t(first + block_of(blocks, in_rect + i))];
        });
    }
    join_blocks(values, scale_of, layout, second, scales);
    Tensor host(codes.shape(), DType::u8, Device::cpu, Memory::workspace);
    std::copy(values.begin(), values.end(), host.data<uint8_t>());
    copy(codes, host);
}

void restore_rows(const SavedStates& source, StepState& state, const std::string& own_file) {
    StepState::Rows rows = state.rows();
    if (rows.names.empty()) return;
    for (size_t i = 0; i < rows.names.size(); ++i) {
        float* row = &rows.values[i * size_t(rows.width)];
        std::fill_n(row, rows.width, 0.0f);
        const std::vector<SavedStates::Stored>& list = source.of("row of " + rows.kind + rows.names[i]);
        const auto is_own = [&](const SavedStates::Stored& stored) {
            return stored.file->path().ends_with("/" + own_file);
        };
        // Stages may have other layers than they had.
        const bool only_own = !own_file.empty() && std::any_of(list.begin(), list.end(), is_own);
        bool is_first = true;
        for (const SavedStates::Stored& stored : list) {
            if (only_own && !is_own(stored)) continue;
            if (stored.tensor->dtype != DType::f32 || stored.tensor->size() != rows.width)
                usage_error("{}: {} has {} numbers, but this run needs {} (try the --fp8-history of the checkpoint)",
                            stored.file->path(), stored.tensor->name, stored.tensor->size(), rows.width);
            const std::vector<float> numbers = all_numbers(stored);
            for (int64_t k = 0; k < rows.width; ++k)
                row[k] = is_first ? numbers[size_t(k)] : std::max(row[k], numbers[size_t(k)]);
            is_first = false;
        }
    }
    state.restore(rows);
}

}  // namespace

void restore(const Manifest& manifest, ParamStore& store, const std::vector<StepState*>& step_states,
             const std::string& own_file) {
    const SavedStates source(manifest);
    Tensor first, second;  // codes, until their scales are visited
    store.for_each_state([&](const Segment& segment, const char* state_name, Tensor& values) {
        const std::string state = state_name;
        if (state == "scale") {
            Tensor host(values.shape(), DType::f32, Device::cpu, Memory::workspace);
            read_moments(source, segment, false, first, host.data<float>());
            read_moments(source, segment, true, second, host.data<float>() + host.size() / 2);
            copy(values, host);
        } else if (values.dtype() == DType::u8) {
            (state == "exp_avg" ? first : second) = values;
        } else {
            read_elements(source, segment, state_name, values);
        }
    });
    for (StepState* state : step_states) restore_rows(source, *state, own_file);
    store.states_changed();
}

}  // namespace train70b
