// All-reduce by every algorithm, and the ring's halves, against the definition on 1 to 8 ranks; bytes that are sent.
#include "02_data_parallel/complete/across_nodes.h"
#include "02_data_parallel/complete/all_reduce.h"
#include "tests/collectives.h"
#include "tests/counting.h"

using namespace train70b;
using namespace train70b::test;

namespace {

constexpr int64_t kSizes[] = {1, 2, 3, 5, 7, 8, 13, 64, 257, 1000, 4099};  // fewer than ranks, odd, prime, whole

}  // namespace

TEST_CASE("all-reduce, every algorithm: exact sums of every dtype, any size, 1 to 8 ranks") {
    for (int ranks = 1; ranks <= world().size(); ++ranks) {
        Failures failures;
        on_first_ranks(ranks, [&](const Comm& comm) {
            for (const std::string& algorithm : all_reduce_names()) {
                comm.use(algorithm);
                for (const DType dtype : {DType::f32, DType::bf16, DType::f64, DType::i32})
                    for (const int64_t size : kSizes) {
                        Tensor x = numbers(dtype, size, [&](int64_t i) { return element(comm.rank(), i); });
                        comm.all_reduce(x).wait();
                        const std::string wrong = difference(x, [&](int64_t i) { return sum_of(ranks, i); });
                        failures.expect(wrong.empty(), fmt::format("{} over {} ranks, {} {}: {}", algorithm, ranks,
                                                                   size, name_of(dtype), wrong));
                    }
            }
        });
        EXPECT_NONE(failures);
    }
    world().use("library");
}

TEST_CASE("an unknown algorithm is a usage error that lists the known ones") {
    EXPECT_USAGE_ERROR(world().use("star"), "--all-reduce star: unknown; must be one of library naive ring");
    EXPECT_USAGE_ERROR(make_comm(make_fake_backend(0, 4), {.all_reduce = "rings"}), "--all-reduce rings: unknown");
}

TEST_CASE("the pipelined ring in pieces of every size, 1 to 8 ranks") {
    for (int ranks = 1; ranks <= world().size(); ++ranks) {
        Failures failures;
        const auto backend = make_mpi_backend();
        std::vector<int> colors;
        for (int r = 0; r < world().size(); ++r) colors.push_back(r < ranks ? 0 : 1);
        const auto group = backend->split(colors, GroupLoad::heavy);
        if (world().rank() < ranks)
            for (const int64_t piece_bytes : {4, 12, 40, 400, 1 << 20})
                for (const int64_t size : kSizes) {
                    Tensor x = numbers(DType::f32, size, [&](int64_t i) { return element(group->rank(), i); });
                    pipelined_ring_all_reduce(*group, x, piece_bytes);
                    const std::string wrong = difference(x, [&](int64_t i) { return sum_of(ranks, i); });
                    failures.expect(wrong.empty(), fmt::format("{} ranks, pieces of {} bytes, {} elements: {}", ranks,
                                                               piece_bytes, size, wrong));
                }
        EXPECT_NONE(failures);
    }
}

TEST_CASE("real numbers: all ranks end with the same bits, and algorithms agree within rounding") {
    const int64_t size = 10007;
    std::vector<double> whole(size);
    for (int r = 0; r < world().size(); ++r) {
        const std::vector<double> part = randoms(size, 100 + r);
        for (int64_t i = 0; i < size; ++i) whole[i] += part[i];
    }
    for (const std::string& algorithm : all_reduce_names()) {
        world().use(algorithm);
        for (const DType dtype : {DType::f32, DType::bf16, DType::f64}) {
            Tensor x = tensor(randoms(size, 100 + world().rank()), {size}, dtype);
            world().all_reduce(x).wait();
            Tensor first = Tensor::like(x);
            copy(first, x);
            world().broadcast(first, 0).wait();
            INFO(algorithm, " ", name_of(dtype));
            EXPECT_EVERYWHERE(values(first) == values(x));
            EXPECT_EVERYWHERE(distance(x, whole) <= (dtype == DType::f32 ? 5e-7 : 1e-2));
        }
    }
    world().use("library");
}

TEST_CASE("maximum, whatever --all-reduce says") {
    world().use("ring");
    for (const DType dtype : {DType::f32, DType::bf16, DType::f64, DType::i32}) {
        Tensor x = numbers(dtype, 100, [&](int64_t i) { return element(world().rank(), i); });
        world().all_reduce(x, Reduce::max).wait();
        INFO(name_of(dtype));
        EXPECT_EVERYWHERE(equals(x, [&](int64_t i) {
            int64_t most = element(0, i);
            for (int r = 1; r < world().size(); ++r) most = std::max(most, element(r, i));
            return most;
        }));
    }
    world().use("library");
}

TEST_CASE("what a ring sends: 2 n (N-1)/N bytes; over all ranks exactly, per rank where N divides n") {
    const auto backend = make_mpi_backend();
    const int N = world().size();
    const auto total = [](int64_t mine) { return int64_t(world().sum(double(mine))); };
    for (const int64_t size : {int64_t(1), int64_t(7), int64_t(40 * N), int64_t(1001)}) {
        Tensor x = numbers(DType::f32, size, [](int64_t) { return 1; });
        for (const std::string algorithm : {"ring", "pipelined"}) {
            Counting counting(*backend);
            find_all_reduce(algorithm).all_reduce(counting, x);
            INFO(algorithm, ", ", size, " elements");
            EXPECT(total(counting.sent) == 2 * 4 * size * (N - 1));
            if (size % N == 0) EXPECT_EVERYWHERE(counting.sent == 2 * 4 * size * (N - 1) / N);
        }
        INFO(size, " elements");
        Counting naive(*backend);
        naive_all_reduce(naive, x);
        EXPECT_EVERYWHERE(naive.sent == (naive.rank() == 0 ? 4 * size * (N - 1) : 4 * size));
        Counting halving(*backend);
        halving_doubling_all_reduce(halving, x);
        if ((N & (N - 1)) == 0) {
            EXPECT(total(halving.sent) == 2 * 4 * size * (N - 1));
            int steps = 0;
            while ((1 << steps) < N) ++steps;
            if (size % N == 0) EXPECT_EVERYWHERE(halving.messages == 2 * steps);
        }
    }
    // More pieces, not more bytes; and really in pieces.
    Tensor x = numbers(DType::f32, 1000 * N, [](int64_t) { return 1; });
    Counting pieces(*backend);
    pipelined_ring_all_reduce(pieces, x, 400);
    EXPECT_EVERYWHERE(pieces.sent == 2 * 4 * 1000 * (N - 1) && pieces.messages == 2 * 10 * (N - 1));
}

TEST_CASE("reduce-scatter and all-gather, by every algorithm, apart and in place, 1 to 8 ranks") {
    for (int ranks = 1; ranks <= world().size(); ++ranks) {
        Failures failures;
        on_first_ranks(ranks, [&](const Comm& comm) {
            const auto sum = [&](int64_t i) { return sum_of(ranks, i); };
            for (const std::string& algorithm : all_reduce_names())
                for (const DType dtype : {DType::f32, DType::bf16})
                    for (const int64_t part_size : {1, 3, 130})
                        for (const bool in_place : {false, true}) {
                            comm.use(algorithm);
                            const int64_t begin = comm.rank() * part_size;
                            Tensor whole =
                                numbers(dtype, part_size * ranks, [&](int64_t i) { return element(comm.rank(), i); });
                            Tensor part = in_place ? whole.row_slice(begin, begin + part_size)
                                                   : Tensor({part_size}, dtype, Device::cpu);
                            const std::string layout =
                                fmt::format("{} over {} ranks, parts of {} {}, {}: ", algorithm, ranks, part_size,
                                            name_of(dtype), in_place ? "in place" : "apart");
                            comm.reduce_scatter(part, whole).wait();
                            std::string wrong = difference(part, [&](int64_t i) { return sum(begin + i); });
                            failures.expect(wrong.empty(), "reduce-scatter, " + layout + wrong);
                            comm.all_gather(whole, part).wait();
                            wrong = difference(whole, sum);
                            failures.expect(wrong.empty(), "all-gather, " + layout + wrong);
                        }
        });
        EXPECT_NONE(failures);
    }
    world().use("library");
}

TEST_CASE("reduce-scatter and all-gather: a part elsewhere in the block of the whole; the halves of the ring") {
    for (const std::string algorithm : {"ring", "library"}) {
        INFO(algorithm);
        world().use(algorithm);
        const int N = world().size(), r = world().rank();
        Tensor block = numbers(DType::f32, 5 * (N + 1), [&](int64_t i) { return element(r, i); });
        Tensor whole = block.row_slice(0, 5 * N), part = block.row_slice(5 * N, 5 * N + 5);
        world().reduce_scatter(part, whole).wait();
        EXPECT_EVERYWHERE(equals(part, [&](int64_t i) { return sum_of(N, 5 * r + i); }));
        world().all_gather(whole, part).wait();
        EXPECT_EVERYWHERE(equals(whole, [&](int64_t i) { return sum_of(N, i); }));
    }
    // On a ring the two halves give the all-reduce, bit for bit.
    Tensor at_once = tensor(randoms(40 * world().size(), world().rank()), {40 * world().size()}),
           in_halves = Tensor::like(at_once);
    copy(in_halves, at_once);
    for (const std::string algorithm : {"ring", "pipelined"}) {
        INFO(algorithm);
        world().use(algorithm);
        world().all_reduce(at_once).wait();
        Tensor part = in_halves.row_slice(40 * world().rank(), 40 * (world().rank() + 1));
        world().reduce_scatter(part, in_halves).wait();
        world().all_gather(in_halves, part).wait();
        EXPECT_EVERYWHERE(values(at_once) == values(in_halves));
    }
    world().use("library");
    const auto backend = make_mpi_backend();
    const int N = world().size(), r = world().rank();
    const int64_t size = 3 * N + 1;
    Tensor x = numbers(DType::f32, size, [&](int64_t i) { return element(r, i); });
    ring_reduce_scatter(*backend, x);
    const int64_t begin = size * r / N, end = size * (r + 1) / N;
    EXPECT_EVERYWHERE(equals(x.row_slice(begin, end), [&](int64_t i) { return sum_of(N, begin + i); }));
    ring_all_gather(*backend, x);
    EXPECT_EVERYWHERE(equals(x, [&](int64_t i) { return sum_of(N, i); }));
}

// ---- ranks on several nodes -----------------------------------------------------------------------------------------

TEST_CASE("all-reduce across nodes: exact sums, any size, any nodes; by trees also of unequal or mixed ones") {
    const auto backend = make_mpi_backend();
    const auto check = [&](int ranks, const std::vector<int>& nodes, bool equal) {
        std::vector<int> colors;
        for (int r = 0; r < world().size(); ++r) colors.push_back(r < ranks ? 0 : 1);
        const auto ranks_of = backend->split(colors, GroupLoad::heavy);
        Failures failures;
        if (world().rank() < ranks) {
            Counting group(*ranks_of);
            group.given_nodes = nodes;
            for (const DType dtype : {DType::f32, DType::bf16})
                for (const int64_t size : {1, 5, 64, 257})
                    for (const int64_t piece_bytes : {0, 48, 1 << 20}) {  // 0: hierarchical
                        if (piece_bytes == 0 && !equal) continue;
                        Tensor x = numbers(dtype, size, [&](int64_t i) { return element(group.rank(), i); });
                        piece_bytes ? tree_all_reduce(group, x, piece_bytes) : hierarchical_all_reduce(group, x);
                        const std::string wrong = difference(x, [&](int64_t i) { return sum_of(ranks, i); });
                        failures.expect(wrong.empty(), fmt::format("{} ranks, pieces of {} bytes, {} {}: {}", ranks,
                                                                   piece_bytes, size, name_of(dtype), wrong));
                    }
        }
        EXPECT_NONE(failures);
    };
    for (int ranks = 2; ranks <= world().size(); ++ranks)
        for (int each = 1; each <= ranks; ++each) {
            std::vector<int> nodes, mixed;
            for (int r = 0; r < ranks; ++r) nodes.push_back(r / each), mixed.push_back(r * r % 3);
            check(ranks, nodes, ranks % each == 0);
            if (each == ranks) check(ranks, mixed, false);
        }
}

TEST_CASE("a group's nodes are those of its ranks; reduce-scatter and all-gather across them") {
    const int N = world().size();  // on two nodes
    const Comm all = make_comm(make_mpi_backend(), {.all_reduce = "hierarchical", .ranks_per_node = (N + 1) / 2});
    const Comm half = all.split([](int rank) { return rank % 2; }, "half");  // every other rank
    for (const Comm& comm : {all, half}) {
        if (N % 4 != 0 && N > 1) break;
        for (const DType dtype : {DType::f32, DType::bf16})
            for (const int64_t n : {1, 3, 130}) {
                const int ranks = comm.size(), rank = comm.rank();
                Tensor whole = numbers(dtype, n * ranks, [&](int64_t i) { return element(rank, i); }),
                       part({n}, dtype, Device::cpu);
                comm.reduce_scatter(part, whole).wait();
                EXPECT_EVERYWHERE(equals(part, [&](int64_t i) { return sum_of(ranks, rank * n + i); }));
                comm.all_gather(whole, part).wait();
                EXPECT_EVERYWHERE(equals(whole, [&](int64_t i) { return sum_of(ranks, i); }));
            }
    }
}

TEST_CASE("what crosses the nodes: rings inside and across send n/L (M-1)/M each way from every rank; trees as much") {
    const auto backend = make_mpi_backend();
    const int N = world().size(), L = N % 2 == 0 ? 2 : 1, M = N / L;
    backend->ranks_per_node = L;
    const int64_t n = 4 * 240 * N;  // bytes
    Tensor x = numbers(DType::f32, n / 4, [](int64_t) { return 1; });
    Counting both(*backend), scattered(*backend), gathered(*backend), trees(*backend);
    hierarchical_all_reduce(both, x);
    EXPECT_EVERYWHERE(both.crossed(L) == 2 * n / L * (M - 1) / M);
    EXPECT_EVERYWHERE(both.sent - both.crossed(L) == 2 * n * (L - 1) / L);
    hierarchical_reduce_scatter(scattered, x);
    hierarchical_all_gather(gathered, x);
    for (const Counting* each : {&scattered, &gathered}) {
        EXPECT_EVERYWHERE(each->crossed(L) == n / L * (M - 1) / M);
        EXPECT_EVERYWHERE(each->sent - each->crossed(L) == n * (L - 1) / L);
    }
    tree_all_reduce(trees, x, 4 * 60);
    EXPECT(int64_t(world().sum(double(trees.crossed(L)))) == 2 * n * (M - 1));
    EXPECT(int64_t(world().sum(double(trees.sent))) == 2 * n * (N - 1));
    EXPECT_EVERYWHERE(trees.crossed(L) <= 2 * n);  // as a parent of two in one tree and a leaf of the other
}

TEST_CASE("two trees: every node has children in one of them at most, two or fewer, and the root is near") {
    for (int M = 1; M <= 70; ++M) {
        std::vector<int> nodes;
        for (int m = 0; m < M; ++m) nodes.push_back(m);
        std::vector<int> inner(size_t(M), 0);
        for (const int tree : {0, 1}) {
            int roots = 0;
            for (int m = 0; m < M; ++m) {
                const TreePlace place = tree_place(nodes, m, tree);
                roots += place.parent < 0;
                inner[size_t(m)] += !place.children.empty();
                CHECK(place.children.size() <= 2);
                CHECK((1 << place.depth) <= M);
            }
            CHECK(roots == 1);
        }
        for (const int count : inner) CHECK(count <= 1);
    }
}

TEST_CASE("rings across nodes need equally many neighbouring ranks on each") {
    const auto backend = make_mpi_backend();
    Counting group(*backend);
    Tensor x({4}, DType::f32, Device::cpu);
    if (group.size() < 3) return;
    for (int r = 0; r < group.size(); ++r) group.given_nodes.push_back(r > 0);
    EXPECT_USAGE_ERROR(hierarchical_all_reduce(group, x), "one node has 1 of a group's ranks and another");
    if (group.size() % 2 == 1) return;
    for (int r = 0; r < group.size(); ++r) group.given_nodes[size_t(r)] = r % 2;
    EXPECT_USAGE_ERROR(hierarchical_all_reduce(group, x), "share a node, and others are between them");
}
