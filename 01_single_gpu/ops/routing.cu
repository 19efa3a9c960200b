// routing.h on a GPU. The router's ops: one warp per row, whose scores are in shared memory. No atomics: all sums have
// one order, and each slot has one place, whatever the order of blocks.
#include "01_single_gpu/core/cuda.cuh"
#include "01_single_gpu/ops/routing.h"

namespace train70b::cuda {
namespace {

constexpr int kRouterWarps = kThreads / 32, kMaxExperts = 512, kMaxTopK = 32;  // a lane for each choice

// ---- the router: one warp per row -----------------------------------------------------------------------------------

__device__ int lane() { return threadIdx.x % 32; }
__device__ int64_t row_of_warp() { return int64_t(blockIdx.x) * kRouterWarps + threadIdx.x / 32; }

__device__ float* floats_of_warp(int count) {  // of the block's shared memory
    extern __shared__ float4 shared[];
    return reinterpret_cast<float*>(shared) + threadIdx.x / 32 * count;
}

// Scores of one row: its softmax, or a sigmoid of each logit. Returns log(sum of exp(logits)).
__device__ float scores_of(float* p, const float* logits, int experts, bool sigmoid) {
    float largest = -INFINITY, sum = 0;
    for (int e = lane(); e < experts; e += 32) largest = fmaxf(largest, logits[e]);
    largest = warp_reduce(largest, Max());
    for (int e = lane(); e < experts; e += 32) {
        p[e] = expf(logits[e] - largest);
        sum += p[e];
    }
    sum = warp_reduce(sum, Sum());
    for (int e = lane(); e < experts; e += 32) p[e] = sigmoid ? 1.0f / (1.0f + expf(-logits[e])) : p[e] / sum;
    __syncwarp();
    return largest + logf(sum);
}

struct Ranked {
    float value;
    int index;
};
__device__ bool precedes(Ranked a, Ranked b) {  // in descending order; of equal ones the lower index
    return a.value > b.value || (a.value == b.value && a.index < b.index);
}

// The first of x that `last` precedes. Without any (NaN): index n.
__device__ Ranked next_largest(const float* x, int n, Ranked last) {
    Ranked best{-INFINITY, n};
    for (int i = lane(); i < n; i += 32) {
        const Ranked element{x[i], i};
        if (precedes(last, element) && precedes(element, best)) best = element;
    }
    for (int offset = 16; offset > 0; offset /= 2) {
        const Ranked other{__shfl_xor_sync(~0u, best.value, offset), __shfl_xor_sync(~0u, best.index, offset)};
        if (precedes(other, best)) best = other;
    }
    return best;
}

// Leaves out, as -infinity, the experts of all groups but the best ones. scores: room for those of the groups.
__device__ void keep_best_groups(float* rank, float* scores, int experts, int groups, int top_groups) {
    const int in_group = experts / groups;
    for (int g = lane(); g < groups; g += 32) {
        float first = -INFINITY, second = -INFINITY;
        for (int e = g * in_group; e < (g + 1) * in_group; ++e) {
            second = fmaxf(second, fminf(first, rank[e]));
            first = fmaxf(first, rank[e]);
        }
        scores[g] = in_group > 1 ? first + second : first;
    }
    __syncwarp();
    Ranked last{INFINITY, -1};
    for (int j = 0; j < top_groups; ++j) last = next_largest(scores, groups, last);
    for (int e = lane(); e < experts; e += 32)
        if (precedes(last, {scores[e / in_group], e / in_group})) rank[e] = -INFINITY;
    __syncwarp();
}

__global__ void choose_experts_kernel(int32_t* chosen, const float* logits, const float* bias, int64_t rows,
                                      int experts, int top_k, bool sigmoid, int groups, int top_groups) {
    float* rank = floats_of_warp(2 * experts);
    const int64_t row = row_of_warp();
    if (row >= rows) return;
    scores_of(rank, logits + row * experts, experts, sigmoid);
    for (int e = lane(); bias && e < experts; e += 32) rank[e] += bias[e];
    __syncwarp();
    if (top_groups < groups) keep_best_groups(rank, rank + experts, experts, groups, top_groups);
    Ranked last{INFINITY, -1};
    for (int j = 0; j < top_k; ++j) {
        last = next_largest(rank, experts, last);
        if (lane() == 0) chosen[row * top_k + j] = last.index < experts ? last.index : j;
    }
}

__global__ void router_weights_kernel(float* weights, const float* logits, const int32_t* chosen, int64_t rows,
                                      int experts, int top_k, bool sigmoid, bool normalize, float scale) {
    float* p = floats_of_warp(experts);
    const int64_t row = row_of_warp(), slot = row * top_k + lane();
    if (row >= rows) return;
    scores_of(p, logits + row * experts, experts, sigmoid);
    const float score = lane() < top_k ? p[chosen[slot]] : 0.0f;
    const float sum = warp_reduce(score, Sum());
    if (lane() < top_k) weights[slot] = scale * score / (normalize ? sum : 1.0f);
}

// losses (R, 2) fp64: of each row.
__global__ void row_losses_kernel(double* losses, const float* logits, const float* piece_grads, double z_loss,
                                  int64_t rows, int64_t rows_of_piece, int experts, bool sigmoid) {
    float* p = floats_of_warp(experts);
    const int64_t row = row_of_warp();
    if (row >= rows) return;
    const double lse = scores_of(p, logits + row * experts, experts, sigmoid);
    double sum = 0, dot = 0;
    if (piece_grads)
        for (int e = lane(); e < experts; e += 32) {
            sum += double(p[e]);
            dot += double(piece_grads[row / rows_of_piece * experts + e]) * double(p[e]);
        }
    sum = warp_reduce(sum, Sum());
    dot = warp_reduce(dot, Sum());
    if (lane() > 0) return;
    losses[2 * row] = sigmoid && piece_grads ? dot / sum : dot;
    losses[2 * row + 1] = z_loss * lse * lse;
}

__global__ void sum_losses_kernel(double* sums, const double* losses, int64_t rows) {  // one block
    double balance = 0, z = 0;
    for (int64_t r = threadIdx.x; r < rows; r += blockDim.x) {
        balance += losses[2 * r];
        z += losses[2 * r + 1];
    }
    balance = block_reduce(balance, Sum());
    z = block_reduce(z, Sum());
    if (threadIdx.x > 0) return;
    sums[0] += balance;
    sums[1] += z;
}

__global__ void router_backward_kernel(float* dlogits, const float* dweights, const float* logits,
                                       const int32_t* chosen, const float* piece_grads, float z_loss, int64_t rows,
                                       int64_t rows_of_piece, int experts, int top_k, bool sigmoid, bool normalize,
                                       float scale) {
    float *p = floats_of_warp(2 * experts), *dp = p + experts;
    const int64_t row = row_of_warp(), slot = row * top_k + lane();
    if (row >= rows) return;
    const float *x = logits + row * experts, lse = scores_of(p, x, experts, sigmoid);
    float all = 0;
    for (int e = lane(); e < experts; e += 32) {
        all += p[e];
        dp[e] = 0;
    }
    all = warp_reduce(all, Sum());
    __syncwarp();
    const int expert = lane() < top_k ? chosen[slot] : 0;
    const float score = lane() < top_k ? p[expert] : 0.0f, dw = lane() < top_k ? dweights[slot] : 0.0f;
    const float sum = warp_reduce(score, Sum()), dot = warp_reduce(dw * score, Sum());
    if (lane() < top_k) dp[expert] = scale * (normalize ? (dw - dot / sum) / sum : dw);
    __syncwarp();
    if (piece_grads) {
        const float* grads = piece_grads + row / rows_of_piece * experts;
        float mean = 0;
        for (int e = lane(); e < experts; e += 32) mean += grads[e] * p[e] / all;
        mean = warp_reduce(mean, Sum());
        for (int e = lane(); e < experts; e += 32) dp[e] += sigmoid ? (grads[e] - mean) / all : grads[e];
    }
    float through_sum = 0;  // of the softmax
    for (int e = lane(); e < experts; e += 32) through_sum += dp[e] * p[e];
    through_sum = warp_reduce(through_sum, Sum());
    for (int e = lane(); e < experts; e += 32) {
        float dx = p[e] * (sigmoid ? dp[e] * (1.0f - p[e]) : dp[e] - through_sum);
        if (z_loss != 0) dx += 2 * z_loss * lse * expf(x[e] - lse);
        dlogits[row * experts + e] = dx;
    }
}

// ---- the permutation ------------------------------------------------------------------------------------------------

// One block per piece and expert, as below.
__global__ void count_choices_kernel(int32_t* counts, const int32_t* chosen, int64_t experts, int64_t slots) {
    const int64_t begin = blockIdx.x / experts * slots, expert = blockIdx.x % experts;
    int count = 0;
    for (int64_t i = threadIdx.x; i < slots; i += blockDim.x) count += chosen[begin + i] == expert;
    count = block_reduce(count, Sum());
    if (threadIdx.x == 0) counts[blockIdx.x] = count;
}

// Walks along the slots of the piece, kThreads at a time, and counts those of the expert before each.
__global__ void place_slots_kernel(int32_t* order, int32_t* place, const int32_t* chosen, const int32_t* begin,
                                   const int32_t* keep, int64_t experts, int64_t slots) {
    __shared__ int counts[kRouterWarps];
    const int warp = threadIdx.x / 32;
    const int64_t first = blockIdx.x / experts * slots, expert = blockIdx.x % experts;
    int seen = 0;
    for (int64_t i = 0; i < slots; i += kThreads) {
        const int64_t slot = first + i + threadIdx.x;
        const bool is_mine = slot < first + slots && chosen[slot] == expert;
        const unsigned votes = __ballot_sync(~0u, is_mine);
        __syncthreads();  // the previous pass may still read the counts
        if (lane() == 0) counts[warp] = __popc(votes);
        __syncthreads();
        int before = seen + __popc(votes & ((1u << lane()) - 1));
        for (int w = 0; w < kRouterWarps; ++w) {
            if (w < warp) before += counts[w];
            seen += counts[w];
        }
        if (!is_mine) continue;
        const int32_t at = before < keep[blockIdx.x] ? begin[blockIdx.x] + before : -1;
        place[slot] = at;
        if (at >= 0) order[at] = int32_t(slot);
    }
}

// ---- rows of activations --------------------------------------------------------------------------------------------

// One block per place.
template <class T>
__global__ void gather_slots_kernel(T* y, const T* x, const int32_t* order, const float* weights, int64_t top_k,
                                    int64_t cols) {
    const int64_t slot = order[blockIdx.x];
    const float weight = weights ? weights[slot] : 1.0f;
    for (int64_t c = int64_t(threadIdx.x) * kPack; c < cols; c += int64_t(blockDim.x) * kPack) {
        float v[kPack];
        load(v, x + slot / top_k * cols, c, cols);
        for (int j = 0; j < kPack; ++j) v[j] *= weight;
        store(y + blockIdx.x * cols, c, cols, v);
    }
}

// One block per row.
template <class T>
__global__ void sum_slots_kernel(T* y, const T* z, const int32_t* place, const float* weights, int64_t top_k,
                                 int64_t cols) {
    for (int64_t c = int64_t(threadIdx.x) * kPack; c < cols; c += int64_t(blockDim.x) * kPack) {
        float sum[kPack] = {}, v[kPack];
        for (int64_t i = blockIdx.x * top_k; i < (blockIdx.x + 1) * top_k; ++i) {
            const int64_t at = place[i];
            if (at < 0) continue;
            const float weight = weights ? weights[i] : 1.0f;
            load(v, z + at * cols, c, cols);
            for (int j = 0; j < kPack; ++j) sum[j] += weight * v[j];
        }
        store(y + blockIdx.x * cols, c, cols, sum);
    }
}

// One block per slot.
template <class T>
__global__ void slot_products_kernel(float* dots, const T* dy, const T* z, const int32_t* place, int64_t top_k,
                                     int64_t cols) {
    const int64_t at = place[blockIdx.x];
    float dot = 0;
    for (int64_t c = int64_t(threadIdx.x) * kPack; at >= 0 && c < cols; c += int64_t(blockDim.x) * kPack) {
        float a[kPack], b[kPack];
        load(a, dy + blockIdx.x / top_k * cols, c, cols);
        load(b, z + at * cols, c, cols);
        for (int j = 0; j < kPack; ++j) dot += a[j] * b[j];
    }
    dot = block_reduce(dot, Sum());
    if (threadIdx.x == 0) dots[blockIdx.x] = dot;
}

// A launch with a warp for each row and so many arrays of the row's scores.
Grid warp_per_row(const Tensor& logits, const RouterShape& shape, int64_t arrays) {
    CHECK(shape.experts <= kMaxExperts && shape.top_k <= kMaxTopK, "{} of {} experts, the kernels take {} of {}",
          shape.top_k, shape.experts, kMaxTopK, kMaxExperts);
    return {blocks_for(logits.rows(), kRouterWarps), kThreads,
            size_t(kRouterWarps * arrays * shape.experts) * sizeof(float)};
}

int64_t rows_of_piece(const Tensor& logits, const Tensor& piece_grads) {
    return piece_grads ? logits.rows() / piece_grads.rows() : 0;
}

}  // namespace

void choose_experts(Tensor& chosen, const Tensor& logits, const Tensor& bias, const RouterShape& shape) {
    launch(choose_experts_kernel, warp_per_row(logits, shape, 2), chosen, logits, OrNull{bias}, logits.rows(),
           int(shape.experts), int(shape.top_k), shape.sigmoid, int(shape.groups), int(shape.top_groups));
}

void router_weights(Tensor& weights, const Tensor& logits, const Tensor& chosen, const RouterShape& shape) {
    launch(router_weights_kernel, warp_per_row(logits, shape, 1), weights, logits, chosen, logits.rows(),
           int(shape.experts), int(shape.top_k), shape.sigmoid, shape.normalize, float(shape.scale));
}

void router_losses(Tensor& sums, const Tensor& logits, const Tensor& piece_grads, double z_loss,
                   const RouterShape& shape) {
    Tensor losses({logits.rows(), 2}, DType::f64, Device::cuda, Memory::workspace);
    launch(row_losses_kernel, warp_per_row(logits, shape, 1), losses, logits, OrNull{piece_grads}, z_loss,
           logits.rows(), rows_of_piece(logits, piece_grads), int(shape.experts), shape.sigmoid);
    launch(sum_losses_kernel, {1, 1024}, sums, losses, logits.rows());
}

void router_backward(Tensor& dlogits, const Tensor& dweights, const Tensor& logits, const Tensor& chosen,
                     const Tensor& piece_grads, double z_loss, const RouterShape& shape) {
    launch(router_backward_kernel, warp_per_row(logits, shape, 2), dlogits, dweights, logits, chosen,
           OrNull{piece_grads}, float(z_loss), logits.rows(), rows_of_piece(logits, piece_grads), int(shape.experts),
           int(shape.top_k), shape.sigmoid, shape.normalize, float(shape.scale));
}

void count_choices(Tensor& counts, const Tensor& chosen) {
    launch(count_choices_kernel, {blocks_for(counts.size(), 1)}, counts, chosen, counts.cols(),
           chosen.size() / counts.rows());
}

void place_slots(Tensor& order, Tensor& place, const Tensor& chosen, const Tensor& begin_keep) {
    const int64_t pieces = begin_keep.shape()[1], experts = begin_keep.shape()[2];
    const int32_t* begin = begin_keep.data<int32_t>();
    launch(place_slots_kernel, {blocks_for(pieces * experts, 1)}, order, place, chosen, begin, begin + pieces * experts,
           experts, chosen.size() / pieces);
}

void gather_slots(Tensor& y, const Tensor& x, const Tensor& order, int64_t top_k, const Tensor& weights) {
    with_float(y.dtype(), [&]<class T>(T) {
        launch(gather_slots_kernel<T>, {blocks_for(y.rows(), 1)}, y, x, order, OrNull{weights}, top_k, y.cols());
    });
}

void sum_slots(Tensor& y, const Tensor& z, const Tensor& place, const Tensor& weights) {
    with_float(y.dtype(), [&]<class T>(T) {
        launch(sum_slots_kernel<T>, {blocks_for(y.rows(), 1)}, y, z, place, OrNull{weights}, place.cols(), y.cols());
    });
}

void slot_products(Tensor& dots, const Tensor& dy, const Tensor& z, const Tensor& place) {
    with_float(dy.dtype(), [&]<class T>(T) {
        launch(slot_products_kernel<T>, {blocks_for(place.size(), 1)}, dots, dy, z, place, place.cols(), dy.cols());
    });
}

}  // namespace train70b::cuda
