// Attention on the CPU, tile by tile:
//   forward    S = q k^T / sqrt(D) for one tile; m, l: running maximum and sum of a row;  out <- out e^(m - m') + P v
//   backward   P = exp(S - lse);  dP = dout v^T;  dS = P (dP - delta),  delta = sum(dout * out) per row
//              dq = dS k / sqrt(D),  dk = dS^T q / sqrt(D),  dv = P^T dout
// A tile is kTile queries by as many keys. Scores are kept transposed, (keys, queries): a vector holds the scores of
// one key, so that the maximum and the sum of each query's are taken lane by lane. Such a vector of queries stops at
// the last key that its last query sees, so almost no work is done above the diagonal; with documents it begins at the
// first key that its first query sees. Products: micro_kernel.h. Attention's definition: attention.cpp.
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

constexpr int kTile = 64;
constexpr double kInf = __builtin_inf();

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t round_up(int64_t a, int64_t unit) { return (a + unit - 1) / unit * unit; }

// Before which of the keys from `key` on query `row` stops, which may be a negative number; without a mask, `keys`.
int64_t limit(const AttentionShape& s, int64_t row, int64_t key, int64_t keys) {
    return s.causal ? row + 1 + s.key_len - s.query_len - key : keys;
}
// How many of the keys [key, key + keys) query `row` sees.
int64_t visible(const AttentionShape& s, int64_t row, int64_t key, int64_t keys) {
    const int64_t seen = limit(s, row, key, keys);
    return seen < 0 ? 0 : smaller(seen, keys);
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
    C *k, *v, *dk, *dv;      // (T, W)
    C *k_t, *v_t;            // (T / kTile, W, kTile): transposed, tile by tile
    C *q, *out, *dout, *dq;  // (kTile, W)
    C *q_t, *dout_t;         // (W, kTile)
    C *p, *ds;               // (kTile, kTile)
    int64_t W, elements = 0;

    Scratch(const AttentionShape& s, Direction direction, C* base) : W(round_up(s.head_dim, kPad)) {
        const auto take = [&](int64_t rows, int64_t cols, bool needed = true) {
            C* begin = base ? base + elements : nullptr;
            if (needed) elements += rows * cols;
            return begin;
        };
        const bool backward = direction == Direction::backward;
        const int64_t T = round_up(s.key_len, kTile);
        k = take(T, W, backward), v = take(T, W), dk = take(T, W, backward), dv = take(T, W, backward);
        k_t = take(T, W), v_t = take(T, W, backward);
        q = take(kTile, W), out = take(kTile, W), dout = take(kTile, W, backward), dq = take(kTile, W, backward);
        q_t = take(kTile, W), dout_t = take(kTile, W, backward);
        p = take(kTile, kTile), ds = take(kTile, kTile, backward);
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

// to (rows, D) = factor * from (rows, D); to_cols, from_cols: elements from one row to the next. All by value: a store
// of a vector may change what a reference refers to, which would be read again for each row. The next head's row is
// asked for: rows are too far apart for the processor to guess.
template <class C, class To, class From>
void copy_rows(To* to, int64_t to_cols, const From* from, int64_t from_cols, int64_t rows, int64_t D, C factor) {
    for (int64_t r = 0; r < rows; ++r, to += to_cols, from += from_cols) {
        int64_t d = 0;
        __builtin_prefetch(from + D, 0, 2);
        if constexpr (std::is_same_v<To, From>)
            for (; d + Simd<C>::lanes <= D; d += Simd<C>::lanes)
                Simd<C>::store(to + d, Simd<C>::load(from + d) * factor);
        for (; d < D; ++d) to[d] = narrow<To>(widen<C>(from[d]) * factor);
    }
}

// to (rows padded to whole tiles, W) = factor * rows [row, row + rows) of one head; the padding is 0. to_t
// (tiles, W, kTile), where it is wanted: the same, transposed tile by tile.
template <class C>
void load(C* to, C* to_t, int64_t W, const Heads& from, int64_t row, int64_t rows, int64_t head, int64_t D,
          C factor = 1) {
    with_element(from.dtype, [&]<class T>(T) {
        copy_rows(to, W, static_cast<const T*>(from.data) + row * from.cols + head * D, from.cols, rows, D, factor);
    });
    for (int64_t r = 0; D < W && r < rows; ++r) __builtin_memset(to + r * W + D, 0, (W - D) * sizeof(C));
    __builtin_memset(to + rows * W, 0, (round_up(rows, kTile) - rows) * W * sizeof(C));
    for (int64_t tile = 0; to_t && tile < rows; tile += kTile)
        transpose<C>({to_t + tile * W, kTile}, {to + tile * W, W}, kTile, W);
}

template <class C>
void store(const Heads& to, const C* from, int64_t W, int64_t row, int64_t rows, int64_t head, int64_t D,
           C factor = 1) {
    with_element(to.dtype, [&]<class T>(T) {
        copy_rows(static_cast<T*>(to.data) + row * to.cols + head * D, to.cols, from, W, rows, D, factor);
    });
}

struct Tile {
    int64_t i, queries, row0, j, keys;  // queries [i, i + queries) by keys [j, j + keys); row0: the first query's row
};

// What the queries from q0 on, as many as a vector has lanes, see of a tile: the keys [unseen, seen), and of them all
// queries [all_from, all_to). [begin, end) are the same in whole blocks of keys.
template <bool kDocuments, class C>
struct Sight {
    static constexpr int kUnroll = 4;  // keys; all_from and all_to are multiples of it
    int64_t unseen = 0, seen = 0, begin = 0, end = 0, all_from = 0, all_to = 0;
    Vector<C> from, to;  // what each query sees

    Sight(const AttentionArgs& t, const Tile& tile, int64_t q0) {
        constexpr int lanes = Simd<C>::lanes;
        const int64_t last = smaller(q0 + lanes, tile.queries) - 1;
        if (last < q0) return;
        seen = visible(t.shape, tile.i + last, tile.j, tile.keys);
        unseen = hidden<kDocuments>(t, tile.row0 + q0, tile.j, tile.keys);
        begin = unseen / kPad * kPad, end = round_up(seen, kPad);
        if (none()) return;
        const int64_t of_first = limit(t.shape, tile.i + q0, tile.j, tile.keys);
        to = t.shape.causal ? Simd<C>::count_from(C(of_first)) : Vector<C>{} + C(tile.keys);
        to = to < C(tile.keys) ? to : Vector<C>{} + C(tile.keys);
        all_to = of_first < begin ? begin : smaller(of_first, tile.keys) / kUnroll * kUnroll;
        for (int q = 0; kDocuments && q < lanes; ++q)
            from[q] = C(hidden<kDocuments>(t, tile.row0 + smaller(q0 + q, last), tile.j, tile.keys));
        all_from = kDocuments ? smaller(round_up(int64_t(from[lanes - 1]), kUnroll), all_to) : 0;
    }
    bool none() const { return seen <= unseen; }

    // body(key, unroll, show) for every key of [begin, end); show(x, y) is x in the lanes that see the key, else y.
    // unroll counts 0 to kUnroll - 1.
    template <class Body>
    void each_key(const Body& body) const {
        const auto range = [&](int64_t key, int64_t stop, const auto& shown) {
            for (; key < stop; key += kUnroll)
                for (int u = 0; u < kUnroll; ++u) body(key + u, u, shown(C(key + u)));
        };
        const auto some = [this](C key) {
            return [this, key](Vector<C> x, Vector<C> y) {
                x = key < to ? x : y;
                return kDocuments ? (key < from ? y : x) : x;
            };
        };
        if (kDocuments) range(begin, all_from, some);
        range(kDocuments ? all_from : begin, all_to, [](C) { return [](Vector<C> x, Vector<C>) { return x; }; });
        range(all_to, end, some);
    }
};

// The scores of a vector of queries, p (keys, kStride), into probabilities, unnormalised. max and sum are the queries'
// so far, and out (lanes, W) what they have collected.
template <int kStride, bool kDocuments, class C>
void online_softmax(C* p, const Sight<kDocuments, C>& sight, C* max, C* sum, C* out, int64_t W) {
    constexpr int lanes = Simd<C>::lanes;
    const Vector<C> before = Simd<C>::load(max);
    Vector<C> part[sight.kUnroll] = {before, before, before, before}, total = {};  // a chain of maxima each
    sight.each_key([&](int64_t key, int u, const auto& show) {
        part[u] = Simd<C>::larger(show(Simd<C>::load(p + key * kStride), part[u]), part[u]);  // not a NaN
    });
    const Vector<C> next = Simd<C>::larger(Simd<C>::larger(part[0], part[1]), Simd<C>::larger(part[2], part[3]));
    const Vector<C> shift = next == C(-kInf) ? Vector<C>{} : next, shrink = Simd<C>::exp(before - shift);
    sight.each_key([&](int64_t key, int, const auto& show) {
        C* x = p + key * kStride;
        const Vector<C> e = show(Simd<C>::exp(Simd<C>::load(x) - shift), Vector<C>{});  // a NaN comes back here
        Simd<C>::store(x, e);
        total += e;
    });
    Simd<C>::store(max, next);
    Simd<C>::store(sum, Simd<C>::load(sum) * shrink + total);
    for (int q = 0; q < lanes; ++q)
        for (int64_t d = 0; d < W; d += lanes)
            Simd<C>::store(out + q * W + d, Simd<C>::load(out + q * W + d) * shrink[q]);
}

template <bool kDocuments, class C>
void forward_head(const AttentionArgs& t, int64_t unit, C* scratch, int64_t& packed) {
    constexpr int lanes = Simd<C>::lanes, wide = Simd<C>::wide;
    const AttentionShape& s = t.shape;
    const Scratch<C> m(s, Direction::forward, scratch);
    const int64_t D = s.head_dim, W = m.W, group = s.heads / s.kv_heads;
    const int64_t sequence = unit / s.heads, head = unit % s.heads;
    if (packed != unit / group) {
        packed = unit / group;
        load(m.v, m.k_t, W, t.k, sequence * s.key_len, s.key_len, head / group, D);  // k itself is not needed
        load<C>(m.v, nullptr, W, t.v, sequence * s.key_len, s.key_len, head / group, D);
    }
    for (int64_t i = 0; i < s.query_len; i += kTile) {
        const int64_t queries = smaller(kTile, s.query_len - i), row0 = sequence * s.query_len + i;
        load(m.q, m.q_t, W, t.q, row0, queries, head, D, C(1 / __builtin_sqrt(double(D))));
        for (int64_t x = 0; x < kTile * W; ++x) m.out[x] = 0;  // unnormalised
        C max[kTile], sum[kTile];
        for (int64_t r = 0; r < kTile; ++r) max[r] = C(-kInf), sum[r] = 0;
        const int64_t first = hidden<kDocuments>(t, row0, 0, s.key_len) / kTile * kTile;
        for (int64_t j = first; j < s.key_len; j += kTile)
            for (int64_t q0 = 0; q0 < queries; q0 += wide) {
                const Tile tile{i, queries, row0, j, smaller(kTile, s.key_len - j)};
                const Sight<kDocuments, C> sights[] = {{t, tile, q0}, {t, tile, q0 + lanes}};
                const int64_t begin = sights[0].begin, keys = sights[sights[1].none() ? 0 : 1].end - begin;
                multiply<1, kTile, C>({m.p + begin * wide, wide}, m.k_t + j * W + begin, {m.q_t + q0, kTile}, keys,
                                      wide, D, Into::set);
                for (int64_t q = q0; const auto& sight : sights) {
                    C *p = m.p + (q - q0), *out = m.out + q * W;
                    if (!sight.none()) {
                        online_softmax<wide>(p, sight, max + q, sum + q, out, W);
                        multiply<1, wide, C>({out, W}, p + sight.begin * wide, {m.v + (j + sight.begin) * W, W}, lanes,
                                             W, sight.seen - sight.begin, Into::add);
                    }
                    q += lanes;
                }
            }
        C log[kTile];
        for (int r = 0; r < kTile; r += lanes) Simd<C>::store(log + r, Simd<C>::log(Simd<C>::load(sum + r)));
        for (int64_t r = 0; r < queries; ++r) {
            const bool blind = visible(s, i + r, 0, s.key_len) <= hidden<kDocuments>(t, row0 + r, 0, s.key_len);
            const C normalise = blind ? 0 : 1 / sum[r];
            for (C *out = m.out + r * W, *end = out + W; out < end; out += lanes)
                Simd<C>::store(out, Simd<C>::load(out) * normalise);
            static_cast<C*>(t.lse.data)[(row0 + r) * s.heads + head] = blind ? C(-kInf) : max[r] + log[r];
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

// The scores of a vector of queries into probabilities, and dP into dS.
template <bool kDocuments, class C>
void score_gradients(C* p, C* ds, const Sight<kDocuments, C>& sight, const C* delta, const C* lse) {
    const Vector<C> lses = Simd<C>::load(lse), deltas = Simd<C>::load(delta);
    sight.each_key([&](int64_t key, int, const auto& show) {
        C *p_at = p + key * kTile, *ds_at = ds + key * kTile;
        const Vector<C> e = show(Simd<C>::exp(Simd<C>::load(p_at) - lses), Vector<C>{});
        Simd<C>::store(p_at, e);
        Simd<C>::store(ds_at, e * (Simd<C>::load(ds_at) - deltas));
    });
}

// P, dS and dq += dS k of a tile, block by block of its queries.
template <bool kDocuments, class C>
void add_dq(const AttentionArgs& t, const Scratch<C>& m, const Tile& tile, const C* delta, const C* lse) {
    constexpr int lanes = Simd<C>::lanes, wide = Simd<C>::wide;
    const int64_t D = t.shape.head_dim, W = m.W;
    for (int64_t q0 = 0; q0 < tile.queries; q0 += wide) {
        const Sight<kDocuments, C> sights[] = {{t, tile, q0}, {t, tile, q0 + lanes}};
        const int64_t begin = sights[0].begin, end = sights[sights[1].none() ? 0 : 1].end;
        const int64_t block = begin * kTile + q0, keys = tile.j * W + begin;
        const Matrix<C> p{m.p + block, kTile}, ds{m.ds + block, kTile};
        multiply<1, kTile, C>(p, m.k_t + keys, {m.q_t + q0, kTile}, end - begin, wide, D, Into::set);
        multiply<1, kTile, C>(ds, m.v_t + keys, {m.dout_t + q0, kTile}, end - begin, wide, D, Into::set);
        for (int64_t q = q0; const auto& sight : sights) {
            if (!sight.none()) {
                score_gradients(m.p + q, m.ds + q, sight, delta + q, lse + q);
                multiply<1, kTile, C>({m.dq + q * W, W}, m.ds + sight.begin * kTile + q,
                                      {m.k + (tile.j + sight.begin) * W, W}, lanes, W, sight.seen - sight.begin,
                                      Into::add);
            } else if (sight.unseen > 0 && sight.unseen < tile.keys) {
                // Documents that begin behind the last visible key: the sums in add_dk_dv() read these columns.
                for (int64_t at = q; at < kTile * kTile; at += kTile)
                    Simd<C>::store(m.p + at, Vector<C>{}), Simd<C>::store(m.ds + at, Vector<C>{});
            }
            q += lanes;
        }
    }
}

// dk += dS^T q and dv += P^T dout of a tile, block by block of its keys, over the queries [q0, end) that see the block.
template <bool kDocuments, class C>
void add_dk_dv(const AttentionArgs& t, const Scratch<C>& m, const Tile& tile) {
    constexpr int lanes = Simd<C>::lanes;
    const int64_t W = m.W, diagonal = tile.j - tile.i - (t.shape.key_len - t.shape.query_len);
    int64_t end = kDocuments ? 0 : tile.queries;  // of the queries whose document begins before the block's end
    for (int64_t c = 0; c < tile.keys; c += kPad) {
        const int64_t block_end = smaller(c + kPad, tile.keys);
        while (end < tile.queries && hidden<kDocuments>(t, tile.row0 + end, tile.j, tile.keys) < block_end) ++end;
        // From the vector of the first query that sees key j + c.
        const int64_t first = t.shape.causal ? diagonal + c : 0, q0 = first < 0 ? 0 : first / lanes * lanes;
        if (q0 >= tile.queries) break;
        if (q0 >= end) continue;
        const int64_t from = c * kTile + q0, to = (tile.j + c) * W;
        multiply<kTile, 1, C>({m.dk + to, W}, m.ds + from, {m.q + q0 * W, W}, kPad, W, end - q0, Into::add);
        multiply<kTile, 1, C>({m.dv + to, W}, m.p + from, {m.dout + q0 * W, W}, kPad, W, end - q0, Into::add);
    }
}

template <bool kDocuments, class C>
void backward_kv_head(const AttentionArgs& t, int64_t unit, C* scratch) {
    const AttentionShape& s = t.shape;
    const Scratch<C> m(s, Direction::backward, scratch);
    const int64_t D = s.head_dim, W = m.W, group = s.heads / s.kv_heads;
    const int64_t sequence = unit / s.kv_heads, kv_head = unit % s.kv_heads, key_row0 = sequence * s.key_len;
    const C inv_sqrt_d = C(1 / __builtin_sqrt(double(D)));
    load(m.k, m.k_t, W, t.k, key_row0, s.key_len, kv_head, D);
    load(m.v, m.v_t, W, t.v, key_row0, s.key_len, kv_head, D);
    for (int64_t x = 0; x < round_up(s.key_len, kTile) * W; ++x) m.dk[x] = m.dv[x] = 0;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head)
        for (int64_t i = 0; i < s.query_len; i += kTile) {
            const int64_t queries = smaller(kTile, s.query_len - i), row0 = sequence * s.query_len + i;
            load(m.q, m.q_t, W, t.q, row0, queries, head, D, inv_sqrt_d);  // for dk = dS^T q / sqrt(D)
            load<C>(m.out, nullptr, W, t.out, row0, queries, head, D);
            load(m.dout, m.dout_t, W, t.dout, row0, queries, head, D);
            C delta[kTile] = {}, lse[kTile] = {};
            for (int64_t r = 0; r < queries; ++r) {
                delta[r] = dot(m.dout + r * W, m.out + r * W, W);
                lse[r] = static_cast<const C*>(t.lse.data)[(row0 + r) * s.heads + head];
            }
            for (int64_t x = 0; x < kTile * W; ++x) m.dq[x] = 0;
            const int64_t first = hidden<kDocuments>(t, row0, 0, s.key_len) / kTile * kTile;
            for (int64_t j = first; j < s.key_len; j += kTile) {
                const Tile tile{i, queries, row0, j, smaller(kTile, s.key_len - j)};
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
