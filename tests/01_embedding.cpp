#include "tests/ops.h"

using namespace train70b;
using namespace train70b::test;

TEST_CASE("embedding: rows of this rank's part, zeros outside; gradient sums repeated tokens") {
    for (const auto& [dtype, forward, gradient] : kAccuracies) {
        const int64_t V = 5, E = 7;
        const std::vector<int32_t> ids = {3, 0, 3, 4, 9};
        const Doubles table = randoms(V * E, 1, dtype), dy = randoms(5 * E, 2, dtype);
        const Tensor tokens = upload(ids, {5}, Device::cpu);
        for (int64_t first : {0, 2}) {
            INFO("embedding " << name_of(dtype) << ", first_row " << first);
            const auto lookup = [&](const Doubles& t) {
                Doubles y(5 * E);
                for (size_t r = 0; r < ids.size(); ++r)
                    if (ids[r] >= first && ids[r] - first < V)
                        for (int64_t e = 0; e < E; ++e) y[r * E + e] = t[(ids[r] - first) * E + e];
                return y;
            };
            Tensor y = empty({5, E}, dtype), dtable = zeros({V, E}, dtype);
            embedding(y, tokens, tensor(table, {V, E}, dtype), first);
            EXPECT(values(y) == lookup(table));
            embedding_backward(dtable, tokens, tensor(dy, {5, E}, dtype), first);
            embedding_backward(dtable, tokens, tensor(dy, {5, E}, dtype), first);  // gradients add up
            Doubles expected = differentiate([&](const Doubles& t) { return 2 * dot(lookup(t), dy); }, table);
            EXPECT(distance(dtable, expected) <= gradient);
        }
    }
}

TEST_CASE("rows sorted by token: a stable sort") {
    for (const auto& [rows, most] :
         {std::pair(0, 1), {1, 1}, {300, 3}, {1000, 511}, {1000, 512}, {5000, 200'000}, {64, 2'000'000'000}}) {
        std::vector<int32_t> tokens, order;
        for (int i = 0; i < rows; ++i) {
            tokens.push_back(int32_t(random_bits(7, uint64_t(i)) % uint64_t(most)));
            order.push_back(i);
        }
        std::stable_sort(order.begin(), order.end(),
                         [&](int32_t a, int32_t b) { return tokens[size_t(a)] < tokens[size_t(b)]; });
        INFO(rows, " rows of tokens below ", most);
        EXPECT(rows_by_token(tokens) == order);
    }
    EXPECT_CHECK_FAILS(rows_by_token({3, -1}));
}
