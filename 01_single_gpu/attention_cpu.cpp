// Attention on the CPU, tile by tile:
//   forward    S = q k^T / sqrt(D) for one tile; m, l: running maximum and sum of a row;  out <- out e^(m - m') + P v
//   backward   P = exp(S - lse);  dP = dout v^T;  dS = P (dP - delta),  delta = sum(dout * out) per row
//              dq = dS k / sqrt(D),  dk = dS^T q / sqrt(D),  dv = P^T dout
// The largest thing in memory is one kTile x kTile block of S per thread. One (sequence, head) is one thread's work; in
// the backward pass one (sequence, key/value head), because its query heads add to the same dk and dv.
#include <omp.h>

#include <cmath>
#include <vector>

#include "01_single_gpu/cpu.h"
#include "01_single_gpu/kernels.h"

namespace train70b::cpu {
namespace {

constexpr int64_t kTile = 64;

// Rows [begin, begin + count) of one head of a (rows, heads*D) tensor, to or from a dense fp32 (count, D) block.
template <class T>
void load(float* block, const Tensor& x, int64_t begin, int64_t count, int64_t head, int64_t dim, float factor = 1) {
    for (int64_t r = 0; r < count; ++r) {
        const T* in = x.data<T>() + (begin + r) * x.cols() + head * dim;
#pragma omp simd
        for (int64_t d = 0; d < dim; ++d) block[r * dim + d] = float(in[d]) * factor;
    }
}

void store(Tensor& x, const float* block, int64_t begin, int64_t count, int64_t head, int64_t dim) {
    with_float(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        for (int64_t r = 0; r < count; ++r) {
            T* out = x.data<T>() + (begin + r) * x.cols() + head * dim;
#pragma omp simd
            for (int64_t d = 0; d < dim; ++d) out[d] = T(block[r * dim + d]);
        }
    });
}

// How many of the keys [key, key + keys) query `row` may see.
int64_t visible(const AttentionShape& s, int64_t row, int64_t key, int64_t keys) {
    return s.causal ? std::clamp<int64_t>(row + 1 + s.key_len - s.query_len - key, 0, keys) : keys;
}

template <class T>
void forward_head(Tensor& out, Tensor& lse, const Tensor& q, const Tensor& k, const Tensor& v, const AttentionShape& s,
                  int64_t sequence, int64_t head) {
    const int64_t D = s.head_dim, kv_head = head / (s.heads / s.kv_heads);
    const float inv_sqrt_d = 1.0f / std::sqrt(float(D));
    std::vector<float> q_tile(kTile * D), k_tile(kTile * D), v_tile(kTile * D);  // (kTile, D)
    std::vector<float> scores(kTile * kTile);                                    // (queries, keys) of one tile
    std::vector<float> sum_tile(kTile * D), row_max(kTile), row_sum(kTile);      // running, unnormalised
    for (int64_t i = 0; i < s.query_len; i += kTile) {
        const int64_t queries = std::min(kTile, s.query_len - i), row0 = sequence * s.query_len + i;
        load<T>(q_tile.data(), q, row0, queries, head, D, inv_sqrt_d);
        std::fill(sum_tile.begin(), sum_tile.end(), 0.0f);
        std::fill(row_max.begin(), row_max.end(), -INFINITY);
        std::fill(row_sum.begin(), row_sum.end(), 0.0f);
        for (int64_t j = 0; j < s.key_len; j += kTile) {
            const int64_t keys = std::min(kTile, s.key_len - j), key0 = sequence * s.key_len + j;
            if (visible(s, i + queries - 1, j, keys) == 0) break;  // wholly above the diagonal, and so is the rest
            load<T>(k_tile.data(), k, key0, keys, kv_head, D);
            load<T>(v_tile.data(), v, key0, keys, kv_head, D);
            sgemm(false, true, queries, keys, D, 1, q_tile.data(), D, k_tile.data(), D, 0, scores.data(), kTile);
            for (int64_t r = 0; r < queries; ++r) {
                float* p = &scores[r * kTile];
                const int64_t seen = visible(s, i + r, j, keys);
                float max = row_max[r], sum = 0;
#pragma omp simd reduction(max : max)
                for (int64_t c = 0; c < seen; ++c) max = std::max(max, p[c]);
                const float shift = seen ? max : 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t c = 0; c < seen; ++c) sum += p[c] = exp_simd(p[c] - shift);
                std::fill(p + seen, p + keys, 0.0f);
                const float shrink = seen ? exp_simd(row_max[r] - max) : 1.0f;
                row_max[r] = max;
                row_sum[r] = row_sum[r] * shrink + sum;
                if (shrink != 1.0f)
                    for (int64_t d = 0; d < D; ++d) sum_tile[r * D + d] *= shrink;
            }
            sgemm(false, false, queries, D, keys, 1, scores.data(), kTile, v_tile.data(), D, 1, sum_tile.data(), D);
        }
        for (int64_t r = 0; r < queries; ++r) {
            const bool blind = row_sum[r] == 0;  // saw no key at all
            const float normalise = blind ? 0.0f : 1.0f / row_sum[r];
            for (int64_t d = 0; d < D; ++d) sum_tile[r * D + d] *= normalise;
            lse.data<float>()[(row0 + r) * s.heads + head] = blind ? -INFINITY : row_max[r] + std::log(row_sum[r]);
        }
        store(out, sum_tile.data(), row0, queries, head, D);
    }
}

template <class T>
void backward_kv_head(Tensor& dq, Tensor& dk, Tensor& dv, const Tensor& dout, const Tensor& q, const Tensor& k,
                      const Tensor& v, const Tensor& out, const Tensor& lse, const AttentionShape& s, int64_t sequence,
                      int64_t kv_head, float* scratch) {
    const int64_t D = s.head_dim, group = s.heads / s.kv_heads, key_row0 = sequence * s.key_len, all = s.key_len * D;
    const float inv_sqrt_d = 1.0f / std::sqrt(float(D));
    float *k_all = scratch, *v_all = scratch + all, *dk_all = scratch + 2 * all,
          *dv_all = scratch + 3 * all;                                                                // (Tk, D)
    std::vector<float> q_tile(kTile * D), o_tile(kTile * D), do_tile(kTile * D), dq_tile(kTile * D);  // (kTile, D)
    std::vector<float> p(kTile * kTile), dp(kTile * kTile);  // (queries, keys): P, then dP and dS
    load<T>(k_all, k, key_row0, s.key_len, kv_head, D);
    load<T>(v_all, v, key_row0, s.key_len, kv_head, D);
    std::fill(dk_all, dk_all + 2 * all, 0.0f);
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        for (int64_t i = 0; i < s.query_len; i += kTile) {
            const int64_t queries = std::min(kTile, s.query_len - i), row0 = sequence * s.query_len + i;
            load<T>(q_tile.data(), q, row0, queries, head, D, inv_sqrt_d);  // dk = dS^T (q / sqrt(D)) comes out right
            load<T>(o_tile.data(), out, row0, queries, head, D);
            load<T>(do_tile.data(), dout, row0, queries, head, D);
            std::fill(dq_tile.begin(), dq_tile.end(), 0.0f);
            float delta[kTile];
            for (int64_t r = 0; r < queries; ++r) {
                float dot = 0;
#pragma omp simd reduction(+ : dot)
                for (int64_t d = 0; d < D; ++d) dot += do_tile[r * D + d] * o_tile[r * D + d];
                delta[r] = dot;
            }
            for (int64_t j = 0; j < s.key_len; j += kTile) {
                const int64_t keys = std::min(kTile, s.key_len - j);
                if (visible(s, i + queries - 1, j, keys) == 0) break;
                const float *k_tile = &k_all[j * D], *v_tile = &v_all[j * D];
                sgemm(false, true, queries, keys, D, 1, q_tile.data(), D, k_tile, D, 0, p.data(), kTile);
                sgemm(false, true, queries, keys, D, 1, do_tile.data(), D, v_tile, D, 0, dp.data(), kTile);
                for (int64_t r = 0; r < queries; ++r) {
                    float *p_row = &p[r * kTile], *dp_row = &dp[r * kTile];
                    const int64_t seen = visible(s, i + r, j, keys);
                    const float row_lse = lse.data<float>()[(row0 + r) * s.heads + head];
#pragma omp simd
                    for (int64_t c = 0; c < seen; ++c) {
                        p_row[c] = exp_simd(p_row[c] - row_lse);
                        dp_row[c] = p_row[c] * (dp_row[c] - delta[r]);
                    }
                    std::fill(p_row + seen, p_row + keys, 0.0f);
                    std::fill(dp_row + seen, dp_row + keys, 0.0f);
                }
                sgemm(false, false, queries, D, keys, inv_sqrt_d, dp.data(), kTile, k_tile, D, 1, dq_tile.data(), D);
                sgemm(true, false, keys, D, queries, 1, dp.data(), kTile, q_tile.data(), D, 1, &dk_all[j * D], D);
                sgemm(true, false, keys, D, queries, 1, p.data(), kTile, do_tile.data(), D, 1, &dv_all[j * D], D);
            }
            store(dq, dq_tile.data(), row0, queries, head, D);
        }
    }
    store(dk, dk_all, key_row0, s.key_len, kv_head, D);
    store(dv, dv_all, key_row0, s.key_len, kv_head, D);
}

}  // namespace

void attention(Tensor& out, Tensor& lse, const Tensor& q, const Tensor& k, const Tensor& v,
               const AttentionShape& shape) {
    with_float(q.dtype(), [&](auto zero) {
        using T = decltype(zero);
        parallel_ranges(shape.batch * shape.heads, 1, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i)
                forward_head<T>(out, lse, q, k, v, shape, i / shape.heads, i % shape.heads);
        });
    });
}

void attention_backward(Tensor& dq, Tensor& dk, Tensor& dv, const Tensor& dout, const Tensor& q, const Tensor& k,
                        const Tensor& v, const Tensor& out, const Tensor& lse, const AttentionShape& shape) {
    const int64_t per_thread = 4 * shape.key_len * shape.head_dim;  // k, v, dk and dv of one head in fp32
    Tensor scratch({omp_get_max_threads(), per_thread}, DType::f32, Device::cpu, Memory::workspace);
    with_float(q.dtype(), [&](auto zero) {
        using T = decltype(zero);
        parallel_ranges(shape.batch * shape.kv_heads, 1, [&](int64_t begin, int64_t end) {
            float* mine = scratch.data<float>() + omp_get_thread_num() * per_thread;
            for (int64_t i = begin; i < end; ++i)
                backward_kv_head<T>(dq, dk, dv, dout, q, k, v, out, lse, shape, i / shape.kv_heads, i % shape.kv_heads,
                                    mine);
        });
    });
}

}  // namespace train70b::cpu
