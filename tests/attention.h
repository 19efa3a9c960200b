#pragma once
// Attention by its definition, in double precision, and shapes to compare kernels with it.
#include <array>

#include "01_single_gpu/ops/attention.h"
#include "01_single_gpu/ops/attention_tiled.h"
#include "tests/ops.h"

namespace train70b::test {

inline Tensor doubles(const Doubles& values, Shape shape) {
    Tensor x(std::move(shape), DType::f64, Device::cpu);
    REQUIRE(x.size() == int64_t(values.size()));
    std::copy(values.begin(), values.end(), x.data<double>());
    return x;
}
inline Doubles numbers(const Tensor& x) {
    Tensor wide(x.shape(), DType::f64, Device::cpu);
    copy(wide, x);
    return {wide.data<double>(), wide.data<double>() + wide.size()};
}

// The definition in double. Rows: (B*Tq, H*D) of out, then (B*Tq, H) of lse.
inline Doubles attention_double(const Doubles& q, const Doubles& k, const Doubles& v, const AttentionShape& s) {
    const Shape queries{s.batch * s.query_len, s.heads * s.head_dim},
        keys{s.batch * s.key_len, s.kv_heads * s.head_dim};
    Tensor out(queries, DType::f64, Device::cpu), lse({s.batch * s.query_len, s.heads}, DType::f64, Device::cpu);
    naive_attention(out, lse, doubles(q, queries), doubles(k, keys), doubles(v, keys), s);
    Doubles both = numbers(out);
    for (double x : numbers(lse)) both.push_back(x);
    return both;
}

struct Case {
    AttentionShape shape;
    Doubles q, k, v, dout;
    Tensor tq, tk, tv, tdout, out, lse;

    explicit Case(const AttentionShape& s, DType dtype = DType::f32, double size = 2) : shape(s) {
        const int64_t rows = s.batch * s.query_len, keys = s.batch * s.key_len, E = s.heads * s.head_dim,
                      K = s.kv_heads * s.head_dim;
        const auto make = [&](int64_t r, int64_t c, uint64_t key, Doubles& doubles) {
            doubles = randoms(r * c, key, stats_dtype(dtype));
            for (double& x : doubles) x *= size;
            Tensor t = tensor(doubles, {r, c}, dtype);
            doubles = values(t);
            return t;
        };
        tq = make(rows, E, 1, q);
        tk = make(keys, K, 2, k);
        tv = make(keys, K, 3, v);
        tdout = make(rows, E, 4, dout);
        out = Tensor::like(tq);
        lse = Tensor({rows, s.heads}, stats_dtype(dtype), Device::cpu);
        attention(out, lse, tq, tk, tv, s);
    }
    Doubles both() const {
        Doubles got = values(out);
        for (double x : values(lse)) got.push_back(x);
        return got;
    }
};

}  // namespace train70b::test
