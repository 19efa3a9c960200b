// The ops on a GPU, in the order of ops.h; matrix product and attention have files of their own. Sums have a fixed
// order: no float atomics, so a run repeats bit for bit. One block per row where a row is reduced or mapped; a second
// reading of a row finds it in the cache.
#include <numbers>

#include "01_single_gpu/core/cuda.cuh"
#include "01_single_gpu/core/random.h"

namespace train70b::cuda {

namespace {

// ---- element by element ---------------------------------------------------------------------------------------------

template <class T>
__global__ void fill_kernel(T* x, int64_t n, float value) {
    float v[kPack];
    for (float& each : v) each = value;
    store(x, first_element(), n, v);
}

__global__ void fill_int_kernel(int32_t* x, int64_t n, int32_t value) {
    const int64_t i = first_element();
    for (int64_t j = i; j < min(i + kPack, n); ++j) x[j] = value;
}

template <class To, class From>
__global__ void cast_kernel(To* to, const From* from, int64_t n) {
    const int64_t i = first_element();
    float v[kPack];
    load(v, from, i, n);
    store(to, i, n, v);
}

template <class T>
__global__ void scale_kernel(T* x, int64_t n, float factor) {
    const int64_t i = first_element();
    float v[kPack];
    load(v, x, i, n);
    for (float& each : v) each *= factor;
    store(x, i, n, v);
}

template <class S, class A, class B>
__global__ void add_kernel(S* sum, const A* a, const B* b, int64_t n) {
    const int64_t i = first_element();
    float x[kPack], y[kPack];
    load(x, a, i, n);
    load(y, b, i, n);
    for (int j = 0; j < kPack; ++j) x[j] += y[j];
    store(sum, i, n, x);
}

constexpr int kPartials = 1024;  // blocks of the first stage of a sum over everything

template <class T>
__global__ void sum_squares_kernel(double* partial, const T* x, int64_t n) {
    double sum = 0;
    for (int64_t i = first_element(); i < n; i += int64_t(gridDim.x) * blockDim.x * kPack) {
        float v[kPack];
        load(v, x, i, n);
        for (float each : v) sum += double(each) * double(each);
    }
    sum = block_reduce(sum, Sum());
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__global__ void sum_partials_kernel(double* out, const double* partial, int count) {
    double sum = 0;
    for (int i = threadIdx.x; i < count; i += blockDim.x) sum += partial[i];
    sum = block_reduce(sum, Sum());
    if (threadIdx.x == 0) *out = sum;
}

// ---- embedding ------------------------------------------------------------------------------------------------------

template <class T>
__global__ void embedding_kernel(T* y, const int32_t* tokens, const T* table, int64_t cols, int64_t table_rows,
                                 int64_t first_row) {
    const int64_t row = tokens[blockIdx.x] - first_row;
    for (int64_t c = int64_t(threadIdx.x) * kPack; c < cols; c += int64_t(blockDim.x) * kPack) {
        float v[kPack] = {};
        if (row >= 0 && row < table_rows) load(v, table + row * cols, c, cols);
        store(y + blockIdx.x * cols, c, cols, v);
    }
}

// The block of a token's first occurrence sums all its occurrences, in their order; the blocks of later ones do
// nothing.
template <class W, class T>
__global__ void embedding_backward_kernel(W* dtable, const int32_t* tokens, const T* dy, int64_t rows, int64_t cols,
                                          int64_t table_rows, int64_t first_row) {
    const int64_t mine = blockIdx.x;
    const int32_t token = tokens[mine];
    const int64_t row = token - first_row;
    if (row < 0 || row >= table_rows) return;
    int seen_before = 0;
    for (int64_t r = threadIdx.x; r < mine; r += blockDim.x) seen_before |= tokens[r] == token;
    if (__syncthreads_or(seen_before)) return;
    for (int64_t c = int64_t(threadIdx.x) * kPack; c < cols; c += int64_t(blockDim.x) * kPack) {
        float sum[kPack] = {}, v[kPack];
        for (int64_t r = mine; r < rows; ++r) {
            if (tokens[r] != token) continue;
            load(v, dy + r * cols, c, cols);
            for (int j = 0; j < kPack; ++j) sum[j] += v[j];
        }
        load(v, dtable + row * cols, c, cols);
        for (int j = 0; j < kPack; ++j) sum[j] += v[j];
        store(dtable + row * cols, c, cols, sum);
    }
}

// ---- RMSNorm --------------------------------------------------------------------------------------------------------

// y = x * inv * weight for one row.
template <class T>
__device__ void norm_row(T* y, const T* x, const T* weight, float inv, int64_t cols) {
    for (int64_t c = int64_t(threadIdx.x) * kPack; c < cols; c += int64_t(blockDim.x) * kPack) {
        float v[kPack], w[kPack];
        load(v, x, c, cols);
        load(w, weight, c, cols);
        for (int j = 0; j < kPack; ++j) v[j] = v[j] * inv * w[j];
        store(y, c, cols, v);
    }
}

// With b, the residual addition: sum = a + b is stored and normalised. Without: a itself is.
template <class T, bool fused_add>
__global__ void rmsnorm_kernel(T* sum, T* y, float* inv_rms, const T* a, const T* b, const T* weight, float eps,
                               int64_t cols) {
    const int64_t row = blockIdx.x * cols;
    float squares = 0;
    for (int64_t c = int64_t(threadIdx.x) * kPack; c < cols; c += int64_t(blockDim.x) * kPack) {
        float v[kPack];
        load(v, a + row, c, cols);
        if constexpr (fused_add) {
            float w[kPack];
            load(w, b + row, c, cols);
            for (int j = 0; j < kPack; ++j) v[j] = to_float(from_float<T>(v[j] + w[j]));  // as it will be read again
            store(sum + row, c, cols, v);
        }
        for (float each : v) squares += each * each;
    }
    const float inv = rsqrtf(block_reduce(squares, Sum()) / float(cols) + eps);
    if (threadIdx.x == 0) inv_rms[blockIdx.x] = inv;
    // Each thread reads again the columns that it wrote itself.
    norm_row(y + row, (fused_add ? sum : a) + row, weight, inv, cols);
}

template <class T>
__global__ void rmsnorm_again_kernel(T* y, const T* x, const float* inv_rms, const T* weight, int64_t cols) {
    const int64_t row = blockIdx.x * cols;
    norm_row(y + row, x + row, weight, inv_rms[blockIdx.x], cols);
}

// Each block goes through its rows, writes their dx and keeps its own sums for dweight in shared memory; they end in
// partial (gridDim.x, cols) fp32.
template <class T>
__global__ void rmsnorm_backward_kernel(T* dx, float* partial, const T* dy, const T* x, const float* inv_rms,
                                        const T* weight, int64_t rows, int64_t cols) {
    extern __shared__ float4 shared[];  // float4: aligned for wide accesses
    float* mine = reinterpret_cast<float*>(shared);
    for (int64_t c = threadIdx.x; c < cols; c += blockDim.x) mine[c] = 0;
    __syncthreads();
    for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
        const float inv = inv_rms[r];
        float dot = 0;
        for (int64_t c = int64_t(threadIdx.x) * kPack; c < cols; c += int64_t(blockDim.x) * kPack) {
            float d[kPack], v[kPack], w[kPack];
            load(d, dy + r * cols, c, cols);
            load(v, x + r * cols, c, cols);
            load(w, weight, c, cols);
            for (int j = 0; j < kPack; ++j) dot += d[j] * w[j] * v[j];
        }
        const float mean = block_reduce(dot, Sum()) * inv * inv / float(cols);
        for (int64_t c = int64_t(threadIdx.x) * kPack; c < cols; c += int64_t(blockDim.x) * kPack) {
            float d[kPack], v[kPack], w[kPack], sum[kPack];
            load(d, dy + r * cols, c, cols);
            load(v, x + r * cols, c, cols);
            load(w, weight, c, cols);
            load(sum, mine, c, cols);
            for (int j = 0; j < kPack; ++j) {
                sum[j] += d[j] * v[j] * inv;
                v[j] = inv * (d[j] * w[j] - v[j] * mean);
            }
            store(mine, c, cols, sum);
            store(dx + r * cols, c, cols, v);
        }
    }
    for (int64_t c = int64_t(threadIdx.x) * kPack; c < cols; c += int64_t(blockDim.x) * kPack) {
        float sum[kPack];  // this thread's own columns: no barrier needed
        load(sum, mine, c, cols);
        store(partial + blockIdx.x * cols, c, cols, sum);
    }
}

template <class W>
__global__ void add_columns_kernel(W* out, const float* partial, int64_t blocks, int64_t cols) {
    const int64_t c = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (c >= cols) return;
    float sum = 0;
    for (int64_t b = 0; b < blocks; ++b) sum += partial[b * cols + c];
    out[c] = from_float<W>(to_float(out[c]) + sum);
}

// ---- RoPE -----------------------------------------------------------------------------------------------------------

// One block per row. direction +1: qkv -> q, k, v. -1: the gradient, q, k, v -> qkv with the inverse rotation.
template <class T, bool forward>
__global__ void split_rope_kernel(T* q, T* k, T* v, T* qkv, const int32_t* positions, Rope rope, int64_t q_cols,
                                  int64_t kv_cols) {
    __shared__ float cosines[kMaxHeadDim / 2], sines[kMaxHeadDim / 2];
    const int64_t row = blockIdx.x;
    const int half = rope.head_dim / 2;
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
        double s, c;
        sincos(positions[row] * rope.inv_freq[i], &s, &c);
        cosines[i] = float(c);
        sines[i] = forward ? float(s) : -float(s);
    }
    __syncthreads();
    T* packed = qkv + row * (q_cols + 2 * kv_cols);
    const int packs = (half + kPack - 1) / kPack;  // of the first half of a head
    const int64_t heads = (q_cols + 2 * kv_cols) / rope.head_dim, rotated = (q_cols + kv_cols) / rope.head_dim;
    for (int64_t work = threadIdx.x; work < heads * packs; work += blockDim.x) {
        const int64_t head = work / packs, column = head * rope.head_dim;  // of the packed row
        const int i = int(work % packs) * kPack;
        T* part = column < q_cols             ? q + row * q_cols + column
                  : column < q_cols + kv_cols ? k + row * kv_cols + column - q_cols
                                              : v + row * kv_cols + column - q_cols - kv_cols;
        T *from = forward ? packed + column : part, *to = forward ? part : packed + column;
        float a[kPack], b[kPack];
        load(a, from, i, half);
        load(b, from + half, i, half);
        if (head < rotated)
            for (int j = 0; j < kPack && i + j < half; ++j) {
                const float c = cosines[i + j], s = sines[i + j], x = a[j], y = b[j];
                a[j] = x * c - y * s;
                b[j] = y * c + x * s;
            }
        store(to, i, half, a);
        store(to + half, i, half, b);
    }
}

// ---- merging sets of keys, exchanging blocks ------------------------------------------------------------------------

// One block for each row and head.
template <class T>
__global__ void merge_attention_kernel(float* out, float* lse, const T* part_out, const float* part_lse,
                                       int64_t width) {
    const int64_t i = blockIdx.x;
    const float l1 = lse[i], l2 = part_lse[i], most = fmaxf(l1, l2);
    if (most == -INFINITY) return;
    const float l = most + logf(expf(l1 - most) + expf(l2 - most));
    const float keep = expf(l1 - l), take = expf(l2 - l);
    for (int64_t d = threadIdx.x; d < width; d += blockDim.x)
        out[i * width + d] = out[i * width + d] * keep + to_float(part_out[i * width + d]) * take;
    __syncthreads();  // all have read lse[i]
    if (threadIdx.x == 0) lse[i] = l;
}

// blockIdx.x: one of the a * b stretches of `width` units; blockIdx.y: its part of it.
template <class Unit>
__global__ void swap_blocks_kernel(Unit* to, const Unit* from, int64_t a, int64_t b, int64_t width) {
    const int64_t i = blockIdx.x, place = i % b * a + i / b;
    for (int64_t w = int64_t(blockIdx.y) * blockDim.x + threadIdx.x; w < width; w += int64_t(gridDim.y) * blockDim.x)
        to[place * width + w] = from[i * width + w];
}

// ---- SwiGLU ---------------------------------------------------------------------------------------------------------

template <class T>
__global__ void swiglu_kernel(T* h, const T* gate_up, int64_t cols) {
    const T *gate = gate_up + blockIdx.x * 2 * cols, *up = gate + cols;
    for (int64_t c = int64_t(threadIdx.x) * kPack; c < cols; c += int64_t(blockDim.x) * kPack) {
        float g[kPack], u[kPack];
        load(g, gate, c, cols);
        load(u, up, c, cols);
        for (int j = 0; j < kPack; ++j) g[j] = g[j] / (1.0f + expf(-g[j])) * u[j];
        store(h + blockIdx.x * cols, c, cols, g);
    }
}

template <class T>
__global__ void swiglu_backward_kernel(T* dgate_up, const T* dh, const T* gate_up, int64_t cols) {
    const T *gate = gate_up + blockIdx.x * 2 * cols, *up = gate + cols;
    T *dgate = dgate_up + blockIdx.x * 2 * cols, *dup = dgate + cols;
    for (int64_t c = int64_t(threadIdx.x) * kPack; c < cols; c += int64_t(blockDim.x) * kPack) {
        float g[kPack], u[kPack], d[kPack];
        load(g, gate, c, cols);
        load(u, up, c, cols);
        load(d, dh + blockIdx.x * cols, c, cols);
        for (int j = 0; j < kPack; ++j) {
            const float s = 1.0f / (1.0f + expf(-g[j]));
            u[j] = d[j] * u[j] * s * (1.0f + g[j] * (1.0f - s));
            d[j] = d[j] * g[j] * s;
        }
        store(dgate, c, cols, u);
        store(dup, c, cols, d);
    }
}

// ---- cross-entropy --------------------------------------------------------------------------------------------------

template <class T>
__global__ void softmax_stats_kernel(float* row_max, float* row_sum, float* target_logit, const T* logits,
                                     const int32_t* targets, int64_t cols, int64_t real, int64_t first_vocab) {
    const T* x = logits + blockIdx.x * cols;
    float max = -INFINITY, sum = 0;  // of this thread's columns, one pass
    for (int64_t c = int64_t(threadIdx.x) * kPack; c < real; c += int64_t(blockDim.x) * kPack) {
        float v[kPack];
        load(v, x, c, cols);
        float above = max;
        for (int j = 0; j < kPack && c + j < real; ++j) above = fmaxf(above, v[j]);
        if (above > max) sum *= expf(max - above);
        max = above;
        const float shift = max == -INFINITY ? 0.0f : max;  // masked logits only, so far
        for (int j = 0; j < kPack && c + j < real; ++j) sum += expf(v[j] - shift);
    }
    const float whole = block_reduce(max, Max());
    sum = block_reduce(max == -INFINITY && !isnan(sum) ? 0.0f : sum * expf(max - whole), Sum());
    if (threadIdx.x == 0) {
        const int64_t target = targets[blockIdx.x] - first_vocab;
        row_max[blockIdx.x] = whole;
        row_sum[blockIdx.x] = sum;
        target_logit[blockIdx.x] = target >= 0 && target < real ? to_float(x[target]) : 0.0f;
    }
}

__global__ void rescale_sums_kernel(float* row_sum, const float* row_max, const float* whole_max, int64_t rows) {
    const int64_t r = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (r < rows) row_sum[r] *= expf(row_max[r] - whole_max[r]);
}

__global__ void cross_entropy_kernel(float* loss, float* lse, const float* row_max, const float* row_sum,
                                     const float* target_logit, int64_t rows, float scale) {
    double sum = 0;
    for (int64_t r = threadIdx.x; r < rows; r += blockDim.x) {
        const double log_sum = double(row_max[r]) + log(double(row_sum[r]));
        lse[r] = float(log_sum);
        sum += log_sum - double(target_logit[r]);
    }
    sum = block_reduce(sum, Sum());
    if (threadIdx.x == 0) *loss = float(sum * double(scale));
}

template <class T>
__global__ void cross_entropy_backward_kernel(T* logits, const int32_t* targets, const float* lse, int64_t cols,
                                              int64_t real, float scale, int64_t first_vocab) {
    T* x = logits + blockIdx.x * cols;
    const int64_t target = targets[blockIdx.x] - first_vocab;
    const float row_lse = lse[blockIdx.x];
    for (int64_t c = int64_t(threadIdx.x) * kPack; c < cols; c += int64_t(blockDim.x) * kPack) {
        float v[kPack];
        load(v, x, c, cols);
        for (int j = 0; j < kPack; ++j)
            v[j] = c + j < real ? (expf(v[j] - row_lse) - (c + j == target ? 1.0f : 0.0f)) * scale : 0.0f;
        store(x, c, cols, v);
    }
}

// ---- AdamW and initial values ---------------------------------------------------------------------------------------

template <class P, class G>
__global__ void adamw_kernel(P* param, float* master, float* exp_avg, float* exp_avg_sq, const G* grad, int64_t n,
                             AdamWFactors<float> f) {
    const int64_t i = first_element();
    float g[kPack], m[kPack], v[kPack], w[kPack];
    load(g, grad, i, n);
    load(m, exp_avg, i, n);
    load(v, exp_avg_sq, i, n);
    if (master)
        load(w, master, i, n);
    else
        load(w, param, i, n);
    for (int j = 0; j < kPack; ++j) {
        const float gradient = g[j] * f.grad_scale;
        m[j] = f.beta1 * m[j] + (1.0f - f.beta1) * gradient;
        v[j] = f.beta2 * v[j] + (1.0f - f.beta2) * gradient * gradient;
        w[j] = w[j] * f.keep - f.step_size * m[j] / (sqrtf(v[j]) * f.inv_sqrt_correction2 + f.eps);
    }
    store(exp_avg, i, n, m);
    store(exp_avg_sq, i, n, v);
    if (master) store(master, i, n, w);
    store(param, i, n, w);
}

template <class T>
__global__ void fill_normal_kernel(T* x, int64_t n, uint64_t key, GlobalIndex index, float std) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const int64_t row = (index.offset + i) / index.cols, col = (index.offset + i) % index.cols;
    const uint64_t global = (index.row_begin + row) * index.global_cols + index.col_begin + col;
    const uint64_t bits = random_bits(key, global);
    const double u1 = (double(bits >> 32) + 0.5) * 0x1p-32, u2 = double(bits & 0xffffffff) * 0x1p-32;
    x[i] = from_float<T>(float(std * (sqrt(-2 * log(u1)) * cos(2 * std::numbers::pi * u2))));
}

}  // namespace

// ---- the same, with tensors -----------------------------------------------------------------------------------------

void fill(Tensor& x, double value) {
    const int64_t n = x.size();
    if (x.dtype() == DType::i32)
        fill_int_kernel<<<blocks_for(n), kThreads, 0, stream()>>>(x.data<int32_t>(), n, int32_t(value));
    else if (x.dtype() == DType::u8)
        CUDA_CHECK(cudaMemsetAsync(x.raw(), int(value), size_t(n), stream()));
    else
        with_float(x.dtype(), [&](auto zero) {
            fill_kernel<<<blocks_for(n), kThreads, 0, stream()>>>(x.data<decltype(zero)>(), n, float(value));
        });
    check_launch();
}

void copy(Tensor& to, const Tensor& from) {
    if (to.dtype() == from.dtype()) return cuda_copy(to.raw(), from.raw(), from.bytes(), CopyKind::within);
    with_float(to.dtype(), [&](auto to_zero) {
        with_float(from.dtype(), [&](auto from_zero) {
            cast_kernel<<<blocks_for(to.size()), kThreads, 0, stream()>>>(to.data<decltype(to_zero)>(),
                                                                          from.data<decltype(from_zero)>(), to.size());
        });
    });
    check_launch();
}

void scale(Tensor& x, double factor) {
    with_float(x.dtype(), [&](auto zero) {
        scale_kernel<<<blocks_for(x.size()), kThreads, 0, stream()>>>(x.data<decltype(zero)>(), x.size(),
                                                                      float(factor));
    });
    check_launch();
}

void add(Tensor& sum, const Tensor& a, const Tensor& b) {
    with_float(sum.dtype(), [&](auto sum_zero) {
        with_float(a.dtype(), [&](auto a_zero) {
            with_float(b.dtype(), [&](auto b_zero) {
                add_kernel<<<blocks_for(sum.size()), kThreads, 0, stream()>>>(
                    sum.data<decltype(sum_zero)>(), a.data<decltype(a_zero)>(), b.data<decltype(b_zero)>(), sum.size());
            });
        });
    });
    check_launch();
}

void swap_blocks(Tensor& to, const Tensor& from, int64_t a, int64_t b) {
    const int64_t width = from.bytes() / (a * b);
    const bool aligned = width % 16 == 0 && reinterpret_cast<uintptr_t>(to.raw()) % 16 == 0 &&
                         reinterpret_cast<uintptr_t>(from.raw()) % 16 == 0;
    const int64_t units = aligned ? width / 16 : width;
    const dim3 blocks(static_cast<unsigned>(a * b),
                      static_cast<unsigned>(std::clamp<int64_t>(units / (4 * kThreads), 1, 1024)));
    if (aligned)
        swap_blocks_kernel<<<blocks, kThreads, 0, stream()>>>(to.data<uint4>(), from.data<uint4>(), a, b, units);
    else
        swap_blocks_kernel<<<blocks, kThreads, 0, stream()>>>(to.data<char>(), from.data<char>(), a, b, units);
    check_launch();
}

void sum_squares(Tensor& out, const Tensor& x) {
    Tensor partial({kPartials}, DType::f64, Device::cuda, Memory::workspace);
    const int blocks = int(std::min<unsigned>(blocks_for(x.size()), kPartials));
    double* sums = partial.data<double>();
    with_float(x.dtype(), [&](auto zero) {
        sum_squares_kernel<<<blocks, kThreads, 0, stream()>>>(sums, x.data<decltype(zero)>(), x.size());
    });
    sum_partials_kernel<<<1, kThreads, 0, stream()>>>(out.data<double>(), sums, blocks);
    check_launch();
}

void embedding(Tensor& y, const Tensor& tokens, const Tensor& table, int64_t first_row) {
    with_float(y.dtype(), [&](auto zero) {
        using T = decltype(zero);
        embedding_kernel<<<y.rows(), kThreads, 0, stream()>>>(y.data<T>(), tokens.data<int32_t>(), table.data<T>(),
                                                              y.cols(), table.rows(), first_row);
    });
    check_launch();
}

void embedding_backward(Tensor& dtable, const Tensor& tokens, const Tensor& dy, int64_t first_row) {
    with_float(dtable.dtype(), [&](auto table_zero) {
        with_float(dy.dtype(), [&](auto dy_zero) {
            embedding_backward_kernel<<<dy.rows(), kThreads, 0, stream()>>>(
                dtable.data<decltype(table_zero)>(), tokens.data<int32_t>(), dy.data<decltype(dy_zero)>(), dy.rows(),
                dy.cols(), dtable.rows(), first_row);
        });
    });
    check_launch();
}

void rmsnorm(Tensor& y, Tensor& inv_rms, const Tensor& x, const Tensor& weight, double eps) {
    with_float(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        rmsnorm_kernel<T, false><<<x.rows(), kThreads, 0, stream()>>>(
            nullptr, y.data<T>(), inv_rms.data<float>(), x.data<T>(), nullptr, weight.data<T>(), float(eps), x.cols());
    });
    check_launch();
}

void add_rmsnorm(Tensor& sum, Tensor& y, Tensor& inv_rms, const Tensor& a, const Tensor& b, const Tensor& weight,
                 double eps) {
    with_float(a.dtype(), [&](auto zero) {
        using T = decltype(zero);
        rmsnorm_kernel<T, true><<<a.rows(), kThreads, 0, stream()>>>(sum.data<T>(), y.data<T>(), inv_rms.data<float>(),
                                                                     a.data<T>(), b.data<T>(), weight.data<T>(),
                                                                     float(eps), a.cols());
    });
    check_launch();
}

void rmsnorm_again(Tensor& y, const Tensor& x, const Tensor& inv_rms, const Tensor& weight) {
    with_float(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        rmsnorm_again_kernel<<<x.rows(), kThreads, 0, stream()>>>(y.data<T>(), x.data<T>(), inv_rms.data<float>(),
                                                                  weight.data<T>(), x.cols());
    });
    check_launch();
}

void rmsnorm_backward(Tensor& dx, Tensor& dweight, const Tensor& dy, const Tensor& x, const Tensor& inv_rms,
                      const Tensor& weight) {
    constexpr int64_t kBlocks = 264;  // two for each multiprocessor of an H100 or H200
    const int64_t rows = x.rows(), cols = x.cols(), blocks = std::min(rows, kBlocks);
    Tensor partial({blocks, cols}, DType::f32, Device::cuda, Memory::workspace);
    with_float(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        allow_shared_memory(rmsnorm_backward_kernel<T>, cols * sizeof(float));
        rmsnorm_backward_kernel<<<blocks, kThreads, cols * sizeof(float), stream()>>>(
            dx.data<T>(), partial.data<float>(), dy.data<T>(), x.data<T>(), inv_rms.data<float>(), weight.data<T>(),
            rows, cols);
    });
    with_float(dweight.dtype(), [&](auto zero) {
        add_columns_kernel<<<(cols + kThreads - 1) / kThreads, kThreads, 0, stream()>>>(
            dweight.data<decltype(zero)>(), partial.data<float>(), blocks, cols);
    });
    check_launch();
}

void split_rope(Tensor& q, Tensor& k, Tensor& v, const Tensor& qkv, const Tensor& positions, const Rope& rope) {
    with_float(qkv.dtype(), [&](auto zero) {
        using T = decltype(zero);
        split_rope_kernel<T, true><<<qkv.rows(), kThreads, 0, stream()>>>(
            q.data<T>(), k.data<T>(), v.data<T>(), qkv.data<T>(), positions.data<int32_t>(), rope, q.cols(), k.cols());
    });
    check_launch();
}

void split_rope_backward(Tensor& dqkv, const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& positions,
                         const Rope& rope) {
    with_float(dqkv.dtype(), [&](auto zero) {
        using T = decltype(zero);
        split_rope_kernel<T, false><<<dqkv.rows(), kThreads, 0, stream()>>>(dq.data<T>(), dk.data<T>(), dv.data<T>(),
                                                                            dqkv.data<T>(), positions.data<int32_t>(),
                                                                            rope, dq.cols(), dk.cols());
    });
    check_launch();
}

void merge_attention(Tensor& out, Tensor& lse, const Tensor& part_out, const Tensor& part_lse) {
    const int64_t width = out.cols() / lse.cols();
    with_float(part_out.dtype(), [&](auto zero) {
        merge_attention_kernel<<<static_cast<unsigned>(lse.size()), 128, 0, stream()>>>(
            out.data<float>(), lse.data<float>(), part_out.data<decltype(zero)>(), part_lse.data<float>(), width);
    });
    check_launch();
}

void swiglu(Tensor& h, const Tensor& gate_up) {
    with_float(h.dtype(), [&](auto zero) {
        using T = decltype(zero);
        swiglu_kernel<<<h.rows(), kThreads, 0, stream()>>>(h.data<T>(), gate_up.data<T>(), h.cols());
    });
    check_launch();
}

void swiglu_backward(Tensor& dgate_up, const Tensor& dh, const Tensor& gate_up) {
    with_float(dh.dtype(), [&](auto zero) {
        using T = decltype(zero);
        swiglu_backward_kernel<<<dh.rows(), kThreads, 0, stream()>>>(dgate_up.data<T>(), dh.data<T>(),
                                                                     gate_up.data<T>(), dh.cols());
    });
    check_launch();
}

void softmax_stats(Tensor& row_max, Tensor& row_sum, Tensor& target_logit, const Tensor& logits, const Tensor& targets,
                   int64_t first_vocab, int64_t vocab) {
    const int64_t real = std::clamp<int64_t>(vocab - first_vocab, 0, logits.cols());
    with_float(logits.dtype(), [&](auto zero) {
        softmax_stats_kernel<<<logits.rows(), kThreads, 0, stream()>>>(
            row_max.data<float>(), row_sum.data<float>(), target_logit.data<float>(), logits.data<decltype(zero)>(),
            targets.data<int32_t>(), logits.cols(), real, first_vocab);
    });
    check_launch();
}

void rescale_sums(Tensor& row_sum, const Tensor& row_max, const Tensor& whole_max) {
    rescale_sums_kernel<<<(row_sum.size() + kThreads - 1) / kThreads, kThreads, 0, stream()>>>(
        row_sum.data<float>(), row_max.data<float>(), whole_max.data<float>(), row_sum.size());
    check_launch();
}

void cross_entropy(Tensor& loss, Tensor& lse, const Tensor& row_max, const Tensor& row_sum, const Tensor& target_logit,
                   double scale) {
    cross_entropy_kernel<<<1, 1024, 0, stream()>>>(loss.data<float>(), lse.data<float>(), row_max.data<float>(),
                                                   row_sum.data<float>(), target_logit.data<float>(), lse.size(),
                                                   float(scale));
    check_launch();
}

void cross_entropy_backward(Tensor& logits, const Tensor& targets, const Tensor& lse, double scale, int64_t first_vocab,
                            int64_t vocab) {
    const int64_t real = std::clamp<int64_t>(vocab - first_vocab, 0, logits.cols());
    with_float(logits.dtype(), [&](auto zero) {
        cross_entropy_backward_kernel<<<logits.rows(), kThreads, 0, stream()>>>(
            logits.data<decltype(zero)>(), targets.data<int32_t>(), lse.data<float>(), logits.cols(), real,
            float(scale), first_vocab);
    });
    check_launch();
}

void adamw(Tensor& param, Tensor& master, Tensor& exp_avg, Tensor& exp_avg_sq, const Tensor& grad,
           const AdamWStep& step) {
    const AdamWFactors<float> factors(step);
    with_float(param.dtype(), [&](auto param_zero) {
        with_float(grad.dtype(), [&](auto grad_zero) {
            adamw_kernel<<<blocks_for(param.size()), kThreads, 0, stream()>>>(
                param.data<decltype(param_zero)>(), master ? master.data<float>() : nullptr, exp_avg.data<float>(),
                exp_avg_sq.data<float>(), grad.data<decltype(grad_zero)>(), param.size(), factors);
        });
    });
    check_launch();
}

void fill_normal(Tensor& x, uint64_t key, const GlobalIndex& index, float std) {
    with_float(x.dtype(), [&](auto zero) {
        fill_normal_kernel<<<(x.size() + kThreads - 1) / kThreads, kThreads, 0, stream()>>>(x.data<decltype(zero)>(),
                                                                                            x.size(), key, index, std);
    });
    check_launch();
}

}  // namespace train70b::cuda
