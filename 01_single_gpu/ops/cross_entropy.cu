// cross_entropy.h on a GPU: one block per row, which it reads once; one block sums the loss.
#include "01_single_gpu/core/cuda.cuh"
#include "01_single_gpu/ops/cross_entropy.h"

namespace train70b::cuda {
namespace {

template <class T>
__global__ void softmax_stats_kernel(float* row_max, float* row_sum, float* target_logit, const T* logits,
                                     const int32_t* targets, int64_t cols, int64_t real, int64_t first_vocab,
                                     float logit_scale) {
    if (targets[blockIdx.x] == kIgnored) {
        if (threadIdx.x == 0) {
            row_max[blockIdx.x] = target_logit[blockIdx.x] = 0;
            row_sum[blockIdx.x] = first_vocab == 0 ? 1.0f : 0.0f;
        }
        return;
    }
    const T* x = logits + blockIdx.x * cols;
    float max = -INFINITY, sum = 0;  // of this thread's columns, one pass
    for (int64_t c = int64_t(threadIdx.x) * kPack; c < real; c += int64_t(blockDim.x) * kPack) {
        float v[kPack];
        load(v, x, c, cols);
        const int count = int(min(int64_t(kPack), real - c));
        for (int j = 0; j < kPack; ++j)
            v[j] = j < count ? v[j] * logit_scale : -INFINITY;  // no branches, as in exp(-inf)
        float above = max;
        for (const float logit : v) above = fmaxf(above, logit);
        if (above > max) sum *= expf(max - above);
        max = above;
        const float shift = max == -INFINITY ? 0.0f : max;  // masked logits only, so far
        for (const float logit : v) sum += expf(logit - shift);
    }
    const float whole = block_reduce(max, Max());
    sum = block_reduce(max == -INFINITY && !isnan(sum) ? 0.0f : sum * expf(max - whole), Sum());
    if (threadIdx.x == 0) {
        const int64_t target = targets[blockIdx.x] - first_vocab;
        row_max[blockIdx.x] = whole;
        row_sum[blockIdx.x] = sum;
        target_logit[blockIdx.x] = target >= 0 && target < real ? to_float(x[target]) * logit_scale : 0.0f;
    }
}

__global__ void rescale_sums_kernel(float* row_sum, const float* row_max, const float* whole_max, int64_t rows) {
    const int64_t r = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (r < rows) row_sum[r] *= expf(row_max[r] - whole_max[r]);
}

__global__ void cross_entropy_kernel(float* loss, float* lse, const float* row_max, const float* row_sum,
                                     const float* target_logit, int64_t rows, float scale, float z_loss,
                                     bool has_z_loss) {
    double sum = 0, squares = 0;
    for (int64_t r = threadIdx.x; r < rows; r += blockDim.x) {
        const double log_sum = double(row_max[r]) + log(double(row_sum[r]));
        lse[r] = float(log_sum);
        sum += log_sum - double(target_logit[r]);
        squares += log_sum * log_sum;
    }
    sum = block_reduce(sum, Sum());
    if (threadIdx.x == 0) *loss = float(sum * double(scale));
    if (!has_z_loss) return;
    squares = block_reduce(squares, Sum());
    if (threadIdx.x == 0) loss[1] = float(squares * double(scale) * double(z_loss));
}

template <class T>
__global__ void cross_entropy_backward_kernel(T* logits, const int32_t* targets, const float* lse, int64_t cols,
                                              int64_t real, float scale, int64_t first_vocab, float logit_scale,
                                              float z_loss) {
    T* x = logits + blockIdx.x * cols;
    const int64_t target = targets[blockIdx.x] - first_vocab;
    const bool ignored = targets[blockIdx.x] == kIgnored;
    const float row_lse = lse[blockIdx.x], factor = scale * logit_scale;
    const float weight = z_loss == 0 ? 1.0f : 1.0f + 2 * z_loss * row_lse;  // of the softmax
    for (int64_t c = int64_t(threadIdx.x) * kPack; c < cols; c += int64_t(blockDim.x) * kPack) {
        float v[kPack];
        load(v, x, c, cols);
        for (int j = 0; j < kPack; ++j)
            v[j] = c + j < real && !ignored
                       ? (expf(v[j] * logit_scale - row_lse) * weight - (c + j == target ? 1.0f : 0.0f)) * factor
                       : 0.0f;
        store(x, c, cols, v);
    }
}

}  // namespace

void softmax_stats(Tensor& row_max, Tensor& row_sum, Tensor& target_logit, const Tensor& logits, const Tensor& targets,
                   int64_t first_vocab, int64_t vocab, double logit_scale) {
    const int64_t real = std::clamp<int64_t>(vocab - first_vocab, 0, logits.cols());
    with_float(logits.dtype(), [&]<class T>(T) {
        launch(softmax_stats_kernel<T>, {blocks_for(logits.rows(), 1)}, row_max, row_sum, target_logit, logits, targets,
               logits.cols(), real, first_vocab, float(logit_scale));
    });
}

void rescale_sums(Tensor& row_sum, const Tensor& row_max, const Tensor& whole_max) {
    launch(rescale_sums_kernel, {blocks_for(row_sum.size(), kThreads)}, row_sum, row_max, whole_max, row_sum.size());
}

void cross_entropy(Tensor& loss, Tensor& lse, const Tensor& row_max, const Tensor& row_sum, const Tensor& target_logit,
                   double scale, double z_loss) {
    launch(cross_entropy_kernel, {1, 1024}, loss, lse, row_max, row_sum, target_logit, lse.size(), float(scale),
           float(z_loss), loss.size() > 1);
}

void cross_entropy_backward(Tensor& logits, const Tensor& targets, const Tensor& lse, double scale, int64_t first_vocab,
                            int64_t vocab, double logit_scale, double z_loss) {
    const int64_t real = std::clamp<int64_t>(vocab - first_vocab, 0, logits.cols());
    with_float(logits.dtype(), [&]<class T>(T) {
        launch(cross_entropy_backward_kernel<T>, {blocks_for(logits.rows(), 1)}, logits, targets, lse, logits.cols(),
               real, float(scale), first_vocab, float(logit_scale), float(z_loss));
    });
}

}  // namespace train70b::cuda
