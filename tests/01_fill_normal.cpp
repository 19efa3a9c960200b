#include "tests/ops.h"

using namespace train70b;
using namespace train70b::test;

TEST_CASE("fill_normal: any shard of a matrix has the values of the whole; every dtype starts from the same") {
    const int64_t rows = 12, cols = 20;
    const float std = 0.02f;
    Tensor whole = empty({rows, cols});
    fill_normal(whole, 42, {.cols = cols, .global_cols = cols}, std);
    const Doubles all = values(whole);
    for (DType dtype : {DType::f32, DType::f64, DType::bf16})
        for (auto [r, c, width, offset, count] : {std::array<int64_t, 5>{0, 0, 20, 0, 240},  // all
                                                  {3, 0, 20, 0, 60},                         // three rows
                                                  {0, 5, 7, 0, 84},                          // seven columns
                                                  {2, 10, 10, 13, 31}}) {  // a run that begins mid-row
            INFO("fill_normal " << name_of(dtype) << ", from (" << r << ", " << c << "), " << width << " columns, "
                                << count << " elements from " << offset);
            Tensor shard = empty({count}, dtype);
            const GlobalIndex index{
                .row_begin = r, .col_begin = c, .cols = width, .global_cols = cols, .offset = offset};
            fill_normal(shard, 42, index, std);
            Doubles expected;
            for (int64_t i = offset; i < offset + count; ++i)
                expected.push_back(all[(r + i / width) * cols + c + i % width]);
            EXPECT(values(shard) == values(tensor(expected, {count}, dtype)));
        }
}

TEST_CASE("fill_normal: mean 0, the given standard deviation, another key other values") {
    const int64_t n = 100000;
    Tensor a = empty({n}), b = empty({n});
    fill_normal(a, 1, {.cols = n, .global_cols = n}, 0.5f);
    fill_normal(b, 2, {.cols = n, .global_cols = n}, 0.5f);
    const Doubles x = values(a), y = values(b);
    double sum = 0;
    for (double v : x) sum += v;
    EXPECT(std::abs(sum / n) <= 0.01);  // 6 standard errors
    EXPECT(std::abs(std::sqrt(dot(x, x) / n) - 0.5) <= 0.01);
    EXPECT(std::abs(dot(x, y) / n) <= 0.01);
}
