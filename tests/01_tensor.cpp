// Tensors, views, the ledger, and parameters in flat buffers.
#include "01_single_gpu/complete/param.h"
#include "tests/support.h"

using namespace train70b;
using namespace train70b::test;

TEST_CASE("the ledger books bytes under their kind until the last reference goes") {
    const MemoryBytes before = ledger().now();
    const auto booked = [&](Memory kind) { return ledger().now()[int(kind)] - before[int(kind)]; };
    {
        Tensor a({3, 5}, DType::f32, Device::cpu, Memory::params);
        Tensor b({7}, DType::bf16, Device::cpu, Memory::grads);
        EXPECT(booked(Memory::params) == 60);
        EXPECT(booked(Memory::grads) == 14);
        const Tensor view = a.row_slice(1, 2);
        a = Tensor();
        EXPECT(booked(Memory::params) == 60);                                         // the view still holds it
        Tensor far({1 << 20, 1 << 20}, DType::f32, Device::meta, Memory::optimizer);  // 4 TiB that nobody allocates
        EXPECT(booked(Memory::optimizer) == int64_t(1) << 42);
        EXPECT_CHECK_FAILS(far.raw());
        EXPECT(read(Tensor({2}, DType::f32, Device::meta)) == std::vector<double>{1, 1});
    }
    for (int i = 0; i < kMemoryKinds; ++i) EXPECT(ledger().now()[i] == before[i]);
}

TEST_CASE("peaks: per kind, and of the sum, since the last reset") {
    ledger().reset_peak();
    const MemoryPeak start = ledger().peak();
    { Tensor a({100}, DType::f32, Device::cpu, Memory::comm); }
    { Tensor b({50}, DType::f32, Device::cpu, Memory::workspace); }
    EXPECT(ledger().peak().kind[int(Memory::comm)] - start.kind[int(Memory::comm)] == 400);
    EXPECT(ledger().peak().kind[int(Memory::workspace)] - start.kind[int(Memory::workspace)] == 200);
    EXPECT(ledger().peak().total - start.total == 400);  // not 600: they never lived together
    ledger().reset_peak();
    EXPECT(ledger().peak().total == start.total);
}

TEST_CASE("views share memory; neighbours stack into one") {
    Tensor flat({12}, DType::f32, Device::cpu);
    for (int i = 0; i < 12; ++i) flat.data<float>()[i] = float(i);
    const Tensor a = flat.element_slice(0, {2, 3}), b = flat.element_slice(6, {1, 3}),
                 c = flat.element_slice(9, {1, 3});
    EXPECT(a.row_slice(1, 2).data<float>()[0] == 3);
    const Tensor stacked = Tensor::stack_neighbors({a, b, c});
    EXPECT(stacked.shape() == Shape{4, 3});
    EXPECT(stacked.data<float>() == flat.data<float>());
    EXPECT(!flat.sole_owner());
    EXPECT(Tensor({1}, DType::f32, Device::cpu).sole_owner());
    EXPECT_CHECK_FAILS(Tensor::stack_neighbors({a, c}));                // a gap between them
    EXPECT_CHECK_FAILS(Tensor::stack_neighbors({a, Tensor::like(b)}));  // another block
    EXPECT_CHECK_FAILS(flat.element_slice(10, {3}));
    EXPECT_CHECK_FAILS(a.row_slice(1, 3));
    EXPECT_CHECK_FAILS(a.view({5}));
}

TEST_CASE("parameters lie one behind another in a flat buffer") {
    Param a = make_param("a", {4, 6}, 0.1), b = make_param("b", {5}, 0);
    a.local = {.row_begin = 2, .rows = 2, .col_begin = 3, .cols = 3};  // a shard: rows 2..3, columns 3..5
    EXPECT(total_size(std::vector{&a, &b}) == 11);
    Tensor flat({11}, DType::f32, Device::cpu, Memory::params);
    bind_data({&a, &b}, flat);
    EXPECT(a.data.shape() == Shape{2, 3});
    EXPECT(b.data.data<float>() == flat.data<float>() + 6);
    bind_data({&a, &b}, Tensor());
    EXPECT(!a.data);
}

TEST_CASE("shapes and bytes that 64 bits cannot count are no small tensors") {
    const auto make = [](Shape shape) { return Tensor(std::move(shape), DType::f32, Device::meta); };
    EXPECT(make({int64_t(1) << 40, 1 << 20}).size() == int64_t(1) << 60);
    EXPECT_CHECK_FAILS(make({int64_t(1) << 57, 32}));       // 2^64 bytes: 0
    EXPECT_CHECK_FAILS(make({int64_t(1) << 57, 256}));      // 2^65 elements
    EXPECT_CHECK_FAILS(make({int64_t(1) << 62, 4, 1, 3}));  // elements
}

TEST_CASE("a check that fails names the expression and the values, and ends all ranks with 1") {
    int code = 0;
    const auto before = end_all_ranks;
    end_all_ranks = [&](int exit_code) {
        code = exit_code;
        throw CheckFailed();
    };
    EXPECT_THROWS_AS(CHECK(1 + 1 == 3, "one is {}", 1), CheckFailed);
    end_all_ranks = before;
    EXPECT(code == 1);
}
