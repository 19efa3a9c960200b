#include "01_single_gpu/complete/param.h"

#include <algorithm>
#include <numeric>

namespace train70b {

int64_t Param::global_size() const {
    int64_t size = 1;
    for (int64_t dim : global_shape) size *= dim;
    return size;
}

Rect Param::real() const {
    Rect rect = local;
    rect.rows = std::clamp<int64_t>(global_shape[0] - local.row_begin, 0, local.rows);
    return rect;
}

Param make_param(std::string name, Shape global_shape, double init_std) {
    CHECK(global_shape.size() == 1 || global_shape.size() == 2, "{} {}", name, to_string(global_shape));
    Param param;
    param.name = std::move(name);
    param.local = {.rows = global_shape[0], .cols = global_shape.size() == 2 ? global_shape[1] : 1};
    param.global_shape = std::move(global_shape);
    param.init_std = init_std;
    return param;
}

Param make_bias(std::string name, int64_t size) {
    Param param = make_param(std::move(name), {size}, 0);
    param.init_value = 0;
    return param;
}

uint64_t Param::key(uint64_t seed) const {  // FNV-1a over the seed's bytes and the name
    uint64_t h = 0xcbf29ce484222325u;
    const auto mix = [&h](unsigned char byte) { h = (h ^ byte) * 0x100000001b3u; };
    for (int i = 0; i < 8; ++i) mix(static_cast<unsigned char>(seed >> (8 * i)));
    for (char c : name) mix(static_cast<unsigned char>(c));
    return h;
}

void initialize(const Param& param, uint64_t seed, int64_t offset, Tensor& to) {
    CHECK(offset + to.size() <= param.local.size(), "{}: [{}, {}) of {}", param.name, offset, offset + to.size(),
          param.local.size());
    if (param.init_std == 0) return fill(to, param.init_value);
    const int64_t real = std::clamp<int64_t>(param.real().size() - offset, 0, to.size());
    if (real > 0) {
        Tensor part = to.element_slice(0, {real});
        fill_normal(part, param.key(seed), param.global_index(offset), float(param.init_std));
    }
    if (real < to.size()) {
        Tensor padding = to.element_slice(real, {to.size() - real});
        fill(padding, 0);
    }
}

int64_t total_size(const std::vector<Param*>& params) {
    int64_t total = 0;
    for (const Param* param : params) total += param->local.size();
    return total;
}

static void bind(const std::vector<Param*>& params, const Tensor& flat, Tensor Param::*view) {
    int64_t begin = 0;
    for (Param* param : params) {
        param->*view = flat ? flat.element_slice(begin, param->local_shape()) : Tensor();
        begin += param->local.size();
    }
}

void bind_data(const std::vector<Param*>& params, const Tensor& flat) { bind(params, flat, &Param::data); }
void bind_grads(const std::vector<Param*>& params, const Tensor& flat) { bind(params, flat, &Param::grad); }

Tensor zeros(Shape shape, DType dtype, Device device, Memory kind) {
    Tensor x(std::move(shape), dtype, device, kind);
    fill(x, 0);
    return x;
}

void copy_to_flat(const Tensor& flat, const std::vector<Tensor>& parts) {
    int64_t begin = 0;
    for (const Tensor& part : parts) {
        Tensor place = flat.element_slice(begin, part.shape());
        copy(place, part);
        begin += part.size();
    }
}

void copy_from_flat(const std::vector<Tensor>& parts, const Tensor& flat) {
    int64_t begin = 0;
    for (Tensor part : parts) {
        copy(part, flat.element_slice(begin, part.shape()));
        begin += part.size();
    }
}

int64_t total_size(const std::vector<Tensor>& parts) {
    int64_t total = 0;
    for (const Tensor& part : parts) total += part.size();
    return total;
}

double total_squares(const std::vector<Param*>& params, Which which) {
    std::vector<Tensor> tensors;
    for (const Param* param : params)
        tensors.push_back(param->replica > 0 ? Tensor() : which == Which::data ? param->data : param->grad);
    return total_squares(tensors);
}

double total_squares(const std::vector<Tensor>& tensors) {
    const std::vector<double> sums = squares(tensors);
    return std::accumulate(sums.begin(), sums.end(), 0.0);
}

std::vector<double> squares(const std::vector<Tensor>& tensors) {
    const auto some = std::find_if(tensors.begin(), tensors.end(), [](const Tensor& x) { return bool(x); });
    if (some == tensors.end()) return std::vector<double>(tensors.size());
    Tensor sums = zeros({int64_t(tensors.size())}, DType::f64, some->device(), Memory::workspace);
    for (size_t i = 0; i < tensors.size(); ++i) {
        Tensor sum = sums.row_slice(i, i + 1);
        if (tensors[i]) sum_squares(sum, tensors[i]);
    }
    return read(sums);
}

}  // namespace train70b
