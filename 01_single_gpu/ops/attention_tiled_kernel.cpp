// Attention on the CPU, tile by tile:
//   forward    S = q k^T / sqrt(D) for one tile; m, l: running maximum and sum of a row;  out <- out e^(m - m') + P v
//   backward   P = exp(S - lse);  dP = dout v^T;  dS = P (dP - delta),  delta = sum(dout * out) per row
//              dq = dS k / sqrt(D),  dk = dS^T q / sqrt(D),  dv = P^T dout
// A tile is kQueryTile queries by kKeyTile keys; the products take kBlockRows of its rows at a time (micro_kernel.h),
// and each block of rows stops at the last key that its last row sees, so almost no work is done above the diagonal;
// with documents it begins at the first key that its first row sees. Its definition: naive_attention(), attention.cpp.
//
// This file is compiled twice: by itself for the instruction set of the build (x86-64-v3: AVX2), and inside
// attention_tiled_avx512.cpp for AVX-512, which doubles the width of a vector and the number of registers;
// attention_tiled.cpp chooses at run time. Everything but the table at the end has internal linkage, and no inline
// function of a shared header is called: the linker keeps one copy of such a function for the whole program, which must
// not be the one with AVX-512 instructions.
#include "01_single_gpu/ops/attention_tiled.h"
#include "01_single_gpu/ops/micro_kernel.h"

#ifndef ATTENTION_KERNELS  // attention_tiled_avx512.cpp names its own
#define ATTENTION_KERNELS kPortableAttention
#endif

namespace train70b::cpu {
namespace {

constexpr int64_t kQueryTile = 64, kKeyTile = 64;
constexpr double kInf = __builtin_inf();

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t round_up(int64_t a, int64_t unit) { return (a + unit - 1) / unit * unit; }

// How many of the keys [key, key + keys) query `row` sees.
int64_t visible(const AttentionShape& s, int64_t row, int64_t key, int64_t keys) {
    const int64_t limit = s.causal ? row + 1 + s.key_len - s.query_len - key : keys;
    return limit < 0 ? 0 : smaller(limit, keys);
}

// How many of the keys [key, key + keys) come before the document of query `row` of all sequences.
template <bool kDocuments>
int64_t hidden(const AttentionArgs& t, int64_t row, int64_t key, int64_t keys) {
    if constexpr (!kDocuments) return 0;
    const int64_t before = t.starts[row] - t.shape.key_offset - key;
    return before < 0 ? 0 : smaller(before, keys);
}

// Where each tile is in a thread's scratch. D: head_dim, W: the same padded to whole vectors, T: keys padded to tiles.
template <class C>
struct Scratch {
    C *k_t, *v_t;            // (T / kKeyTile, D, kKeyTile): transposed, tile by tile
    C *k, *v, *dk, *dv;      // (T, W)
    C *q, *out, *dout, *dq;  // (kQueryTile, W)
    C *p, *ds;               // (kQueryTile, kKeyTile); the forward pass needs kBlockRows of it
    int64_t W, elements = 0;

    Scratch(const AttentionShape& s, Direction direction, C* base) : W(round_up(s.head_dim, kPad)) {
        const auto take = [&](int64_t rows, int64_t cols, bool needed = true) {
            C* begin = base ? base + elements : nullptr;
            if (needed) elements += rows * cols;
            return begin;
        };
        const bool forward = direction == Direction::forward, backward = !forward;
        const int64_t T = round_up(s.key_len, kKeyTile);
        k_t = take(T, s.head_dim), v_t = take(T, s.head_dim, backward);
        k = take(T, W, backward), v = take(T, W, forward);
        dk = take(T, W, backward), dv = take(T, W, backward);
        q = take(kQueryTile, W), out = take(kQueryTile, W);
        dout = take(kQueryTile, W, backward), dq = take(kQueryTile, W, backward);
        p = take(forward ? kBlockRows : kQueryTile, kKeyTile), ds = take(kQueryTile, kKeyTile, backward);
    }
};

// bf16 <-> fp32 as bf16.h has it, here once more for the reason given above.
struct Bf16 {
    uint16_t bits;
};
template <class C, class T>
C widen(T x) {
    if constexpr (std::is_same_v<T, Bf16>)
        return C(__builtin_bit_cast(float, uint32_t(x.bits) << 16));
    else
        return C(x);
}
template <class T, class C>
T narrow(C x) {
    if constexpr (std::is_same_v<T, Bf16>) {
        const uint32_t u = __builtin_bit_cast(uint32_t, float(x));
        const uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
        return {uint16_t((u & 0x7fffffff) > 0x7f800000 ? (u >> 16) | 0x40 : rounded)};
    } else {
        return T(x);
    }
}

template <class Body>
void with_element(DType dtype, const Body& body) {
    if (dtype == DType::f64) return body(double{});
    if (dtype == DType::bf16) return body(Bf16{});
    body(float{});
}

// to (rows padded to `unit`, W) = factor * rows [row, row + rows) of one head; the padding is 0.
template <class C>
void load(C* __restrict to, int64_t W, const Heads& from, int64_t row, int64_t rows, int64_t unit, int64_t head,
          int64_t D, C factor = 1) {
    with_element(from.dtype, [&]<class T>(T) {
        for (int64_t r = 0; r < rows; ++r) {
            const T* in = static_cast<const T*>(from.data) + (row + r) * from.cols + head * D;
            for (int64_t d = 0; d < D; ++d) to[r * W + d] = widen<C>(in[d]) * factor;
            for (int64_t d = D; d < W; ++d) to[r * W + d] = 0;
        }
    });
    for (int64_t i = rows * W; i < round_up(rows, unit) * W; ++i) to[i] = 0;
}

// to (T / kKeyTile, D, kKeyTile) = the same rows, transposed tile by tile; the padding is 0.
template <class C>
void load_transposed(C* __restrict to, const Heads& from, int64_t row, int64_t rows, int64_t head, int64_t D) {
    with_element(from.dtype, [&]<class T>(T) {
        for (int64_t tile = 0; tile < rows; tile += kKeyTile, to += D * kKeyTile) {
            const int64_t keys = smaller(kKeyTile, rows - tile);
            const T* in = static_cast<const T*>(from.data) + (row + tile) * from.cols + head * D;
            for (int64_t d = 0; d < D; ++d) {
                for (int64_t c = 0; c < keys; ++c) to[d * kKeyTile + c] = widen<C>(in[c * from.cols + d]);
                for (int64_t c = keys; c < kKeyTile; ++c) to[d * kKeyTile + c] = 0;
            }
        }
    });
}

template <class C>
void store(const Heads& to, const C* __restrict from, int64_t W, int64_t row, int64_t rows, int64_t head, int64_t D,
           C factor = 1) {
    with_element(to.dtype, [&]<class T>(T) {
        for (int64_t r = 0; r < rows; ++r) {
            T* out = static_cast<T*>(to.data) + (row + r) * to.cols + head * D;
            for (int64_t d = 0; d < D; ++d) out[d] = narrow<T>(from[r * W + d] * factor);
        }
    });
}

// The columns of a vector that begins at column c, as numbers to compare with how many keys a row sees.
template <class C>
Vector<C> columns(int64_t c) {
    Vector<C> number;
    for (int i = 0; i < Simd<C>::lanes; ++i) number[i] = C(i);
    return number + C(c);
}

struct Tile {
    int64_t i, queries, row0, j, keys;  // queries [i, i + queries) by keys [j, j + keys); row0: the first query's row
};

// What the kBlockRows rows from r0 on see of a tile: the columns [unseen, seen), in whole vectors from column begin on;
// and what each row sees, counted from there.
template <bool kDocuments, class C>
struct Sight {
    int64_t unseen, seen, begin, width;
    C row_unseen[kBlockRows], row_seen[kBlockRows];

    Sight(const AttentionArgs& t, const Tile& tile, int64_t r0) {
        const int64_t last = smaller(r0 + kBlockRows, tile.queries) - 1;
        seen = visible(t.shape, tile.i + last, tile.j, tile.keys);
        unseen = hidden<kDocuments>(t, tile.row0 + r0, tile.j, tile.keys);
        begin = unseen / kPad * kPad, width = round_up(seen, kPad) - begin;
        for (int r = 0; r < kBlockRows && unseen < seen; ++r) {
            row_unseen[r] = C(hidden<kDocuments>(t, tile.row0 + smaller(r0 + r, last), tile.j, tile.keys) - begin);
            row_seen[r] = C(visible(t.shape, tile.i + r0 + r, tile.j, tile.keys) - begin);
        }
    }
    // Which columns of a vector from column c on row r sees.
    auto of_row(int r, int64_t c) const {
        const auto before_end = columns<C>(c) < row_seen[r];
        return kDocuments ? before_end & (columns<C>(c) >= row_unseen[r]) : before_end;
    }
};

// A block of scores (kBlockRows, width) into probabilities, unnormalised. max and sum are the rows' so far, and out
// (kBlockRows, W) what they have collected. The three passes go over all rows, because one row is a long chain of
// dependent steps.
template <bool kDocuments, class C>
void online_softmax(C* p, const Sight<kDocuments, C>& sight, C* max, C* sum, C* out, int64_t W) {
    constexpr int lanes = Simd<C>::lanes;
    C shift[kBlockRows], shrink[kPad] = {};
    for (int r = 0; r < kBlockRows; ++r) {
        Vector<C> row_max = Simd<C>::all(max[r]);
        for (int64_t c = 0; c < sight.width; c += lanes) {
            const Vector<C> x = Simd<C>::load(p + r * kKeyTile + c);  // a NaN comes back from the exponential, not here
            row_max = Simd<C>::larger(sight.of_row(r, c) ? x : row_max, row_max);
        }
        const C next = Simd<C>::max(row_max);
        shift[r] = next == C(-kInf) ? 0 : next;
        shrink[r] = max[r] - shift[r];
        max[r] = next;
    }
    for (int r = 0; r < kBlockRows; r += lanes) Simd<C>::store(shrink + r, exp_of(Simd<C>::load(shrink + r)));
    for (int r = 0; r < kBlockRows; ++r) {
        Vector<C> e_sum = {};
        for (int64_t c = 0; c < sight.width; c += lanes) {
            C* x = p + r * kKeyTile + c;
            const Vector<C> e = sight.of_row(r, c) ? exp_of(Simd<C>::load(x) - shift[r]) : Vector<C>{};
            Simd<C>::store(x, e);
            e_sum += e;
        }
        sum[r] = sum[r] * shrink[r] + Simd<C>::sum(e_sum);
        for (int64_t d = 0; d < W; d += lanes)
            Simd<C>::store(out + r * W + d, Simd<C>::load(out + r * W + d) * shrink[r]);
    }
}

template <bool kDocuments, class C>
void forward_head(const AttentionArgs& t, int64_t unit, C* scratch, int64_t& packed) {
    const AttentionShape& s = t.shape;
    const Scratch<C> m(s, Direction::forward, scratch);
    const int64_t D = s.head_dim, W = m.W, group = s.heads / s.kv_heads;
    const int64_t sequence = unit / s.heads, head = unit % s.heads;
    if (packed != unit / group) {
        packed = unit / group;
        load_transposed(m.k_t, t.k, sequence * s.key_len, s.key_len, head / group, D);
        load(m.v, W, t.v, sequence * s.key_len, s.key_len, 1, head / group, D);
    }
    for (int64_t i = 0; i < s.query_len; i += kQueryTile) {
        const int64_t queries = smaller(kQueryTile, s.query_len - i), row0 = sequence * s.query_len + i;
        load(m.q, W, t.q, row0, queries, kBlockRows, head, D, C(1 / __builtin_sqrt(double(D))));
        for (int64_t x = 0; x < kQueryTile * W; ++x) m.out[x] = 0;  // unnormalised
        C max[kQueryTile], sum[kQueryTile];
        for (int64_t r = 0; r < kQueryTile; ++r) max[r] = C(-kInf), sum[r] = 0;
        const int64_t first = hidden<kDocuments>(t, row0, 0, s.key_len) / kKeyTile * kKeyTile;
        for (int64_t j = first; j < s.key_len; j += kKeyTile)
            for (int64_t r0 = 0; r0 < queries; r0 += kBlockRows) {
                const Sight<kDocuments, C> sight(t, {i, queries, row0, j, smaller(kKeyTile, s.key_len - j)}, r0);
                if (sight.seen <= sight.unseen) continue;
                const C *k_t = m.k_t + j * D + sight.begin, *v = m.v + (j + sight.begin) * W;
                multiply_rows<C>({m.p, kKeyTile}, {m.q + r0 * W, W}, {k_t, kKeyTile}, sight.width, D, Into::set);
                online_softmax(m.p, sight, max + r0, sum + r0, m.out + r0 * W, W);
                multiply_rows<C>({m.out + r0 * W, W}, {m.p, kKeyTile}, {v, W}, W, sight.seen - sight.begin, Into::add);
            }
        for (int64_t r = 0; r < queries; ++r) {
            const bool blind = visible(s, i + r, 0, s.key_len) <= hidden<kDocuments>(t, row0 + r, 0, s.key_len);
            const C normalise = blind ? 0 : 1 / sum[r];
            for (int64_t d = 0; d < D; ++d) m.out[r * W + d] *= normalise;
            static_cast<C*>(t.lse.data)[(row0 + r) * s.heads + head] =
                blind ? C(-kInf) : C(max[r] + __builtin_log(double(sum[r])));
        }
        store(t.out, m.out, W, row0, queries, head, D);
    }
}

template <class C>
C dot(const C* a, const C* b, int64_t n) {
    Vector<C> sum = {};
    for (int64_t i = 0; i < n; i += Simd<C>::lanes) sum += Simd<C>::load(a + i) * Simd<C>::load(b + i);
    return Simd<C>::sum(sum);
}

// A block of scores into probabilities, and of dP into dS.
template <bool kDocuments, class C>
void score_gradients(C* p, C* ds, const Sight<kDocuments, C>& sight, const C* delta, const C* lse) {
    for (int64_t c = 0; c < sight.width; c += Simd<C>::lanes)
        for (int r = 0; r < kBlockRows; ++r) {
            C *p_at = p + r * kKeyTile + c, *ds_at = ds + r * kKeyTile + c;
            const Vector<C> e = sight.of_row(r, c) ? exp_of(Simd<C>::load(p_at) - lse[r]) : Vector<C>{};
            Simd<C>::store(p_at, e);
            Simd<C>::store(ds_at, e * (Simd<C>::load(ds_at) - delta[r]));
        }
}

// P, dS and dq += dS k of a tile, block by block of its rows.
template <bool kDocuments, class C>
void add_dq(const AttentionArgs& t, const Scratch<C>& m, const Tile& tile, const C* delta, const C* lse) {
    const int64_t D = t.shape.head_dim, W = m.W;
    for (int64_t r0 = 0; r0 < tile.queries; r0 += kBlockRows) {
        const Sight<kDocuments, C> sight(t, tile, r0);
        if (sight.seen > sight.unseen) {
            const int64_t block = r0 * kKeyTile + sight.begin, keys = tile.j * D + sight.begin;
            const Matrix<C> p{m.p + block, kKeyTile}, ds{m.ds + block, kKeyTile};
            multiply_rows<C>(p, {m.q + r0 * W, W}, {m.k_t + keys, kKeyTile}, sight.width, D, Into::set);
            multiply_rows<C>(ds, {m.dout + r0 * W, W}, {m.v_t + keys, kKeyTile}, sight.width, D, Into::set);
            score_gradients(p.data, ds.data, sight, delta + r0, lse + r0);
            const C* k = m.k + (tile.j + sight.begin) * W;
            multiply_rows<C>({m.dq + r0 * W, W}, {ds.data, kKeyTile}, {k, W}, W, sight.seen - sight.begin, Into::add);
        } else if (sight.unseen > 0 && sight.unseen < tile.keys) {
            // Documents that begin behind the last visible key: the sums in add_dk_dv() read these rows.
            for (int64_t x = r0 * kKeyTile; x < (r0 + kBlockRows) * kKeyTile; ++x) m.p[x] = m.ds[x] = 0;
        }
    }
}

// dk += dS^T q and dv += P^T dout of a tile, block by block of its keys, over the rows [r0, end) that see the block.
template <bool kDocuments, class C>
void add_dk_dv(const AttentionArgs& t, const Scratch<C>& m, const Tile& tile) {
    const int64_t W = m.W, diagonal = tile.j - tile.i - (t.shape.key_len - t.shape.query_len);
    int64_t end = kDocuments ? 0 : tile.queries;  // of the queries whose document begins before the block's end
    for (int64_t c = 0; c < tile.keys; c += kBlockRows) {
        const int64_t block_end = smaller(c + kBlockRows, tile.keys);
        while (end < tile.queries && hidden<kDocuments>(t, tile.row0 + end, tile.j, tile.keys) < block_end) ++end;
        // From the block of the first query that sees key j + c.
        const int64_t first = t.shape.causal ? diagonal + c : 0, r0 = first < 0 ? 0 : first / kBlockRows * kBlockRows;
        if (r0 >= tile.queries) break;
        if (r0 >= end) continue;
        const int64_t from = r0 * kKeyTile + c, to = (tile.j + c) * W;
        multiply_rows<C>({m.dk + to, W}, {m.ds + from, 1, kKeyTile}, {m.q + r0 * W, W}, W, end - r0, Into::add);
        multiply_rows<C>({m.dv + to, W}, {m.p + from, 1, kKeyTile}, {m.dout + r0 * W, W}, W, end - r0, Into::add);
    }
}

template <bool kDocuments, class C>
void backward_kv_head(const AttentionArgs& t, int64_t unit, C* scratch) {
    const AttentionShape& s = t.shape;
    const Scratch<C> m(s, Direction::backward, scratch);
    const int64_t D = s.head_dim, W = m.W, group = s.heads / s.kv_heads;
    const int64_t sequence = unit / s.kv_heads, kv_head = unit % s.kv_heads, key_row0 = sequence * s.key_len;
    const C inv_sqrt_d = C(1 / __builtin_sqrt(double(D)));
    load_transposed(m.k_t, t.k, key_row0, s.key_len, kv_head, D);
    load_transposed(m.v_t, t.v, key_row0, s.key_len, kv_head, D);
    load(m.k, W, t.k, key_row0, s.key_len, 1, kv_head, D);
    for (int64_t x = 0; x < round_up(s.key_len, kKeyTile) * W; ++x) m.dk[x] = m.dv[x] = 0;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head)
        for (int64_t i = 0; i < s.query_len; i += kQueryTile) {
            const int64_t queries = smaller(kQueryTile, s.query_len - i), row0 = sequence * s.query_len + i;
            load(m.q, W, t.q, row0, queries, kBlockRows, head, D, inv_sqrt_d);  // for dk = dS^T q / sqrt(D)
            load(m.out, W, t.out, row0, queries, kBlockRows, head, D);
            load(m.dout, W, t.dout, row0, queries, kBlockRows, head, D);
            C delta[kQueryTile] = {}, lse[kQueryTile] = {};
            for (int64_t r = 0; r < queries; ++r) {
                delta[r] = dot(m.dout + r * W, m.out + r * W, W);
                lse[r] = static_cast<const C*>(t.lse.data)[(row0 + r) * s.heads + head];
            }
            for (int64_t x = 0; x < kQueryTile * W; ++x) m.dq[x] = 0;
            const int64_t first = hidden<kDocuments>(t, row0, 0, s.key_len) / kKeyTile * kKeyTile;
            for (int64_t j = first; j < s.key_len; j += kKeyTile) {
                const Tile tile{i, queries, row0, j, smaller(kKeyTile, s.key_len - j)};
                add_dq<kDocuments>(t, m, tile, delta, lse);
                add_dk_dv<kDocuments>(t, m, tile);
            }
            store(t.dq, m.dq, W, row0, queries, head, D, inv_sqrt_d);
        }
    store(t.dk, m.dk, W, key_row0, s.key_len, kv_head, D);
    store(t.dv, m.dv, W, key_row0, s.key_len, kv_head, D);
}

int64_t scratch_elements(const AttentionShape& s, Direction direction) {
    return Scratch<float>(s, direction, nullptr).elements;
}

void compute(const AttentionArgs& args, Direction direction, int64_t head, void* scratch, int64_t& packed) {
    const auto run = [&]<class Documents, class C>(Documents, C) {
        if (direction == Direction::forward)
            forward_head<Documents::value>(args, head, static_cast<C*>(scratch), packed);
        else
            backward_kv_head<Documents::value>(args, head, static_cast<C*>(scratch));
    };
    const auto with_documents = [&](auto zero) {
        args.starts ? run(std::true_type(), zero) : run(std::false_type(), zero);
    };
    args.q.dtype == DType::f64 ? with_documents(double()) : with_documents(float());
}

}  // namespace

extern const AttentionKernels ATTENTION_KERNELS;  // const alone would be internal
const AttentionKernels ATTENTION_KERNELS = {scratch_elements, compute};

}  // namespace train70b::cpu
