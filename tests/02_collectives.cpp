#include <utility>
// Every collective against its definition, on 1 to 8 ranks, with small integers: any order of a sum is exact.
#include "01_single_gpu/core/bf16.h"
#include "01_single_gpu/ops/ops.h"
#include "02_data_parallel/all_reduce.h"
#include "02_data_parallel/runtime/mpi_group.h"
#include "tests/ranks.h"

using namespace train70b;
using namespace train70b::test;

namespace {

constexpr AllReduce kAll[] = {AllReduce::naive, AllReduce::ring, AllReduce::pipelined, AllReduce::halving,
                              AllReduce::library};
constexpr int64_t kSizes[] = {1, 2, 3, 5, 7, 8, 13, 64, 257, 1000, 4099};  // fewer than ranks, odd, prime, whole

// Element i of rank r: small enough to be exact in bf16 (8 bits) even when 8 ranks are summed.
int64_t element(int rank, int64_t i) { return (i * 5 + rank * 3) % 16 - 8; }

Tensor numbers(DType dtype, int64_t count, const std::function<int64_t(int64_t)>& value) {
    std::vector<int32_t> list;
    for (int64_t i = 0; i < count; ++i) list.push_back(int32_t(value(i)));
    Tensor integers = upload(list, {count}, Device::cpu);
    if (dtype == DType::i32) return integers;
    std::vector<double> floats(list.begin(), list.end());
    return tensor(floats, {count}, dtype);
}

bool equals(const Tensor& x, const std::function<int64_t(int64_t)>& value) {
    for (int64_t i = 0; i < x.size(); ++i) {
        const double found = x.dtype() == DType::i32    ? double(x.data<int32_t>()[i])
                             : x.dtype() == DType::bf16 ? double(float(x.data<bf16>()[i]))
                             : x.dtype() == DType::f64  ? x.data<double>()[i]
                                                        : double(x.data<float>()[i]);
        if (found != double(value(i))) {
            fmt::print(stderr, "rank {}: element {} of {} {} is {}, not {}\n", this_rank, i, x.size(),
                       name_of(x.dtype()), found, value(i));
            return false;
        }
    }
    return true;
}

int64_t sum_of(int ranks, int64_t i) {
    int64_t sum = 0;
    for (int r = 0; r < ranks; ++r) sum += element(r, i);
    return sum;
}

// Counts what passes through.
class Counting : public Transport {
  public:
    explicit Counting(Transport& inner) : inner_(inner) {}
    const char* name() const override { return inner_.name(); }
    int rank() const override { return inner_.rank(); }
    int size() const override { return inner_.size(); }
    std::unique_ptr<Transport> split(const std::vector<int>& colours) const override { return inner_.split(colours); }
    Handle aside(const std::function<void()>& body) override { return inner_.aside(body); }
    Handle exchange(const Tensor& out, int to, const Tensor& in, int from, Channel channel) override {
        if (out) sent += out.bytes();
        messages += out && out.size() > 0;
        return inner_.exchange(out, to, in, from, channel);
    }
    Handle all_reduce(const Tensor& x, Reduce reduce) override { return inner_.all_reduce(x, reduce); }
    Handle reduce_scatter(const Tensor& a, const Tensor& b) override { return inner_.reduce_scatter(a, b); }
    Handle all_gather(const Tensor& a, const Tensor& b) override { return inner_.all_gather(a, b); }
    Handle broadcast(const Tensor& x, int root) override { return inner_.broadcast(x, root); }
    Handle all_to_all(const Tensor& a, const Tensor& b) override { return inner_.all_to_all(a, b); }
    void barrier() override { inner_.barrier(); }
    std::vector<double> gather(const std::vector<double>& mine) override { return inner_.gather(mine); }
    std::vector<std::string> gather_text(const std::string& mine) override { return inner_.gather_text(mine); }

    int64_t sent = 0, messages = 0;

  private:
    Transport& inner_;
};

}  // namespace

TEST_CASE("all-reduce, every algorithm: exact sums of fp32, bf16 and fp64, any size, 1 to 8 ranks") {
    for (int ranks = 1; ranks <= world().size(); ++ranks) {
        bool good = true;
        on_first_ranks(ranks, [&](const Comm& comm) {
            for (const AllReduce algorithm : kAll) {
                comm.use(algorithm);
                for (const DType dtype : {DType::f32, DType::bf16, DType::f64, DType::i32})
                    for (const int64_t size : kSizes) {
                        Tensor x = numbers(dtype, size, [&](int64_t i) { return element(comm.rank(), i); });
                        comm.all_reduce(x).wait();
                        good = good && equals(x, [&](int64_t i) { return sum_of(ranks, i); });
                    }
            }
        });
        INFO(ranks, " ranks");
        EXPECT_EVERYWHERE(good);
    }
}

TEST_CASE("the pipelined ring in pieces of every size, 1 to 8 ranks") {
    for (int ranks = 1; ranks <= world().size(); ++ranks) {
        bool good = true;
        const auto transport = make_mpi_transport();
        std::vector<int> colours;
        for (int r = 0; r < world().size(); ++r) colours.push_back(r < ranks ? 0 : 1);
        const auto group = transport->split(colours);
        if (world().rank() < ranks)
            for (const int64_t piece_bytes : {4, 12, 40, 400, 1 << 20})
                for (const int64_t size : kSizes) {
                    Tensor x = numbers(DType::f32, size, [&](int64_t i) { return element(group->rank(), i); });
                    pipelined_ring_all_reduce(*group, x, piece_bytes);
                    good = good && equals(x, [&](int64_t i) { return sum_of(ranks, i); });
                }
        EXPECT_EVERYWHERE(good);
    }
}

TEST_CASE("real numbers: all ranks end with the same bits, and algorithms agree within rounding") {
    const int64_t size = 10007;
    std::vector<double> whole(size);
    for (int r = 0; r < world().size(); ++r) {
        const std::vector<double> part = randoms(size, 100 + r);
        for (int64_t i = 0; i < size; ++i) whole[i] += part[i];
    }
    for (const AllReduce algorithm : kAll) {
        world().use(algorithm);
        for (const DType dtype : {DType::f32, DType::bf16, DType::f64}) {
            Tensor x = tensor(randoms(size, 100 + world().rank()), {size}, dtype);
            world().all_reduce(x).wait();
            Tensor first = Tensor::like(x);
            copy(first, x);
            world().broadcast(first, 0).wait();
            EXPECT_EVERYWHERE(values(first) == values(x));
            INFO(name_of(algorithm), " ", name_of(dtype));
            EXPECT_EVERYWHERE(distance(x, whole) <= (dtype == DType::f32 ? 5e-7 : 1e-2));
        }
    }
    world().use(AllReduce::library);
}

TEST_CASE("maximum, whatever --all-reduce says") {
    world().use(AllReduce::ring);
    for (const DType dtype : {DType::f32, DType::bf16, DType::f64, DType::i32}) {
        Tensor x = numbers(dtype, 100, [&](int64_t i) { return element(world().rank(), i); });
        world().all_reduce(x, Reduce::max).wait();
        EXPECT_EVERYWHERE(equals(x, [&](int64_t i) {
            int64_t most = element(0, i);
            for (int r = 1; r < world().size(); ++r) most = std::max(most, element(r, i));
            return most;
        }));
    }
    world().use(AllReduce::library);
}

TEST_CASE("what a ring sends: 2 n (N-1)/N bytes; over all ranks exactly, per rank where N divides n") {
    const auto transport = make_mpi_transport();
    const int N = world().size();
    const auto total = [](int64_t mine) { return int64_t(world().sum(double(mine))); };
    for (const int64_t size : {int64_t(1), int64_t(7), int64_t(40 * N), int64_t(1001)}) {
        Tensor x = numbers(DType::f32, size, [](int64_t) { return 1; });
        for (const AllReduce algorithm : {AllReduce::ring, AllReduce::pipelined}) {
            Counting counting(*transport);
            all_reduce_by_hand(algorithm, counting, x);
            EXPECT(total(counting.sent) == 2 * 4 * size * (N - 1));
            if (size % N == 0) EXPECT_EVERYWHERE(counting.sent == 2 * 4 * size * (N - 1) / N);
        }
        Counting naive(*transport);
        naive_all_reduce(naive, x);
        EXPECT_EVERYWHERE(naive.sent == (naive.rank() == 0 ? 4 * size * (N - 1) : 4 * size));
        Counting halving(*transport);
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
    Counting pieces(*transport);
    pipelined_ring_all_reduce(pieces, x, 400);
    EXPECT_EVERYWHERE(pieces.sent == 2 * 4 * 1000 * (N - 1) && pieces.messages == 2 * 10 * (N - 1));
}

TEST_CASE("reduce-scatter and all-gather, apart and in place; the ring's halves") {
    for (int ranks = 1; ranks <= world().size(); ++ranks) {
        bool good = true;
        on_first_ranks(ranks, [&](const Comm& comm) {
            for (const auto& [algorithm, dtype] :
                 std::vector<std::pair<AllReduce, DType>>{{AllReduce::library, DType::f32},
                                                          {AllReduce::library, DType::bf16},
                                                          {AllReduce::ring, DType::f32},
                                                          {AllReduce::ring, DType::bf16}})
                for (const int64_t part_size : {int64_t(1), int64_t(3), int64_t(130)})
                    for (const bool in_place : {false, true}) {
                        comm.use(algorithm);
                        const int64_t begin = comm.rank() * part_size;
                        Tensor whole =
                            numbers(dtype, part_size * ranks, [&](int64_t i) { return element(comm.rank(), i); });
                        Tensor part = in_place ? whole.row_slice(begin, begin + part_size)
                                               : Tensor({part_size}, dtype, Device::cpu);
                        comm.reduce_scatter(part, whole).wait();
                        const auto sum = [&](int64_t i) { return sum_of(ranks, i); };
                        good = good && equals(part, [&](int64_t i) { return sum(begin + i); });
                        comm.all_gather(whole, part).wait();
                        good = good && equals(whole, sum);
                    }
        });
        world().use(AllReduce::library);
        EXPECT_EVERYWHERE(good);
    }
    // A part elsewhere in the block of the whole is not in its place.
    for (const AllReduce algorithm : {AllReduce::ring, AllReduce::library}) {
        world().use(algorithm);
        const int N = world().size(), r = world().rank();
        Tensor block = numbers(DType::f32, 5 * (N + 1), [&](int64_t i) { return element(r, i); });
        Tensor whole = block.row_slice(0, 5 * N), part = block.row_slice(5 * N, 5 * N + 5);
        world().reduce_scatter(part, whole).wait();
        EXPECT_EVERYWHERE(equals(part, [&](int64_t i) { return sum_of(N, 5 * r + i); }));
        world().all_gather(whole, part).wait();
        EXPECT_EVERYWHERE(equals(whole, [&](int64_t i) { return sum_of(N, i); }));
    }
    // On a ring the two halves make the whole, bit for bit.
    Tensor at_once = tensor(randoms(40 * world().size(), world().rank()), {40 * world().size()}),
           in_halves = Tensor::like(at_once);
    copy(in_halves, at_once);
    for (const AllReduce algorithm : {AllReduce::ring, AllReduce::pipelined}) {
        world().use(algorithm);
        world().all_reduce(at_once).wait();
        Tensor part = in_halves.row_slice(40 * world().rank(), 40 * (world().rank() + 1));
        world().reduce_scatter(part, in_halves).wait();
        world().all_gather(in_halves, part).wait();
        EXPECT_EVERYWHERE(values(at_once) == values(in_halves));
    }
    world().use(AllReduce::library);
    const auto transport = make_mpi_transport();
    const int N = world().size(), r = world().rank();
    const int64_t size = 3 * N + 1;
    Tensor x = numbers(DType::f32, size, [&](int64_t i) { return element(r, i); });
    ring_reduce_scatter(*transport, x);
    const int64_t begin = size * r / N, end = size * (r + 1) / N;
    EXPECT_EVERYWHERE(equals(x.row_slice(begin, end), [&](int64_t i) { return sum_of(N, begin + i); }));
    ring_all_gather(*transport, x);
    EXPECT_EVERYWHERE(equals(x, [&](int64_t i) { return sum_of(N, i); }));
}

TEST_CASE("all-gather, broadcast and all-to-all move any dtype; messages; numbers of the host") {
    for (int ranks = 1; ranks <= world().size(); ++ranks) {
        bool good = true;
        on_first_ranks(ranks, [&](const Comm& comm) {
            const int r = comm.rank();
            for (const DType dtype : {DType::e4m3, DType::i32}) {
                const int64_t bytes = 24 * ranks;
                const auto fill_with = [](const Tensor& x, int first) {
                    for (int64_t i = 0; i < x.bytes(); ++i) x.data<uint8_t>()[i] = uint8_t(first + i * 7);
                };
                const auto holds = [](const Tensor& x, int first, int64_t from = 0) {
                    for (int64_t i = 0; i < x.bytes(); ++i)
                        if (x.data<uint8_t>()[i] != uint8_t(first + (from + i) * 7)) return false;
                    return true;
                };
                const int64_t count = bytes / size_of(dtype), each = count / ranks;
                Tensor part({each}, dtype, Device::cpu), whole({count}, dtype, Device::cpu);
                fill_with(part, r);
                comm.all_gather(whole, part).wait();
                for (int p = 0; p < ranks; ++p) good = good && holds(whole.row_slice(p * each, (p + 1) * each), p);
                for (int root = 0; root < ranks; ++root) {
                    fill_with(part, r);
                    comm.broadcast(part, root).wait();
                    good = good && holds(part, root);
                }
                Tensor from({count}, dtype, Device::cpu);
                fill_with(from, r);
                comm.all_to_all(whole, from).wait();
                for (int p = 0; p < ranks; ++p)
                    good = good && holds(whole.row_slice(p * each, (p + 1) * each), p, r * 24);
                if (ranks > 1) {
                    fill_with(part, r);
                    Tensor arrives = Tensor::like(part);
                    comm.send_recv(part, (r + 1) % ranks, arrives, (r + ranks - 1) % ranks).wait();
                    good = good && holds(arrives, (r + ranks - 1) % ranks);
                    if (r == 0) comm.send(part, ranks - 1).wait();
                    if (r == ranks - 1) {
                        comm.recv(arrives, 0).wait();
                        good = good && holds(arrives, 0);
                    }
                }
            }
            good = good && comm.sum(r + 0.5) == ranks * (ranks - 1) / 2 + 0.5 * ranks && comm.max(-r) == 0;
            good = good && std::isnan(comm.max(r == 0 ? NAN : 1.0)) && std::isnan(comm.sum(r == 0 ? NAN : 1.0));
            const std::vector<double> all = comm.gather({double(r), 7});
            for (int p = 0; p < ranks; ++p) good = good && all[2 * p] == p && all[2 * p + 1] == 7;
            comm.barrier().wait();
        });
        EXPECT_EVERYWHERE(good);
    }
}

TEST_CASE("shifts round the ring, both ways, beside messages and collectives that are still to be executed") {
    const int N = world().size(), r = world().rank();
    const auto from = [&](int by) { return ((r - by) % N + N) % N; };
    for (const int64_t count : {int64_t(1), int64_t(100), int64_t(1) << 18}) {
        const Tensor mine = numbers(DType::f32, count, [&](int64_t i) { return element(r, i); });
        Tensor sum = numbers(DType::f32, count, [&](int64_t i) { return element(r, i); });
        std::vector<Tensor> shifted;
        std::vector<Work> works;
        Work summing = world().all_reduce(sum);  // in the queue until the first wait
        for (const int by : {1, -1, 3, N, 2 * N + 1}) {
            shifted.push_back(Tensor::like(mine));
            works.push_back(world().ring_shift(mine, shifted.back(), by));
        }
        Tensor message = Tensor::like(mine);
        world().send_recv(mine, (r + 1) % N, message, (r + N - 1) % N).wait();
        for (size_t i = works.size(); i-- > 0;) works[i].wait();  // the latest first
        summing.wait();
        bool good = equals(sum, [&](int64_t i) { return sum_of(N, i); });
        good = good && equals(message, [&](int64_t i) { return element(from(1), i); });
        const int by[] = {1, -1, 3, N, 2 * N + 1};
        for (size_t k = 0; k < shifted.size(); ++k)
            good = good && equals(shifted[k], [&](int64_t i) { return element(from(by[k]), i); });
        EXPECT_EVERYWHERE(good);
    }
    world().take_stats();
    world().ring_shift(Tensor({10}, DType::f32, Device::cpu), Tensor({10}, DType::f32, Device::cpu)).wait();
    const CommStats stats = world().take_stats();
    EXPECT_EVERYWHERE(stats.operations.at("world.send_recv").bytes == 40);
    EXPECT_EVERYWHERE(stats.operations.at("world.send_recv").calls == 1);
}

TEST_CASE("counts beyond what MPI takes in one call go in pieces") {
    const int64_t before = std::exchange(MpiGroup::largest_count, 10);  // as if an int ended at 10
    const int N = world().size(), r = world().rank();
    Tensor x = numbers(DType::f32, 33 * N, [&](int64_t i) { return element(r, i); });
    Tensor y = numbers(DType::f32, 33 * N, [&](int64_t i) { return element(r, i); });
    const auto sum = [&](int64_t i) { return sum_of(N, i); };
    world().all_reduce(x).wait();
    const bool reduced = equals(x, sum);
    Tensor part({33}, DType::f32, Device::cpu);
    world().reduce_scatter(part, y).wait();
    const bool scattered = equals(part, [&](int64_t i) { return sum(33 * r + i); });
    world().all_gather(y, part).wait();
    const bool gathered = equals(y, sum);
    Tensor from = numbers(DType::f32, 33 * N, [&](int64_t i) { return 100 * r + i / 33; });
    world().all_to_all(y, from).wait();
    const bool exchanged = equals(y, [&](int64_t i) { return 100 * (i / 33) + r; });
    if (r == 0) y = numbers(DType::f32, 33 * N, [&](int64_t i) { return i; });
    world().broadcast(y, 0).wait();
    const bool broadcast = equals(y, [&](int64_t i) { return i; });
    world().send_recv(from, (r + 1) % N, y, (r + N - 1) % N).wait();
    const bool passed = equals(y, [&](int64_t i) { return 100 * ((r + N - 1) % N) + i / 33; });
    MpiGroup::largest_count = before;
    EXPECT_EVERYWHERE(reduced);
    EXPECT_EVERYWHERE(scattered);
    EXPECT_EVERYWHERE(gathered);
    EXPECT_EVERYWHERE(exchanged);
    EXPECT_EVERYWHERE(broadcast);
    EXPECT_EVERYWHERE(passed);
}

TEST_CASE("asynchronous: nothing has happened before a wait; one wait brings all that was begun before it, in order") {
    const int N = world().size();
    Tensor x = numbers(DType::f32, 10, [](int64_t) { return 1; });
    Work first = world().all_reduce(x);
    Work second = world().all_reduce(x);
    EXPECT_EVERYWHERE(first.pending() && equals(x, [](int64_t) { return 1; }));
    second.wait();
    EXPECT_EVERYWHERE(!second.pending() && equals(x, [&](int64_t) { return N * N; }));
    first.wait();
    first.wait();
    EXPECT_EVERYWHERE(equals(x, [&](int64_t) { return N * N; }));
    std::vector<Tensor> many;
    std::vector<Work> works;
    for (int64_t i = 0; i < 6; ++i) {
        many.push_back(numbers(DType::f32, 10, [&](int64_t) { return i + 1; }));
        works.push_back(world().all_reduce(many.back()));
    }
    works[3].wait();
    for (Work& work : works) work.wait();
    for (int64_t i = 0; i < 6; ++i) EXPECT_EVERYWHERE(equals(many[i], [&](int64_t) { return N * (i + 1); }));
    { Work forgotten = world().all_reduce(x); }
    world().barrier().wait();
    EXPECT_EVERYWHERE(equals(x, [&](int64_t) { return N * N * N; }));
}

TEST_CASE("large messages that cross do not stand still; a message and a ring do not take each other's data") {
    const int N = world().size(), r = world().rank(), next = (r + 1) % N, previous = (r + N - 1) % N;
    const int64_t large = 1 << 20;  // far beyond MPI's eager limit
    Tensor out = numbers(DType::f32, large, [&](int64_t) { return r; });
    Tensor in({large}, DType::f32, Device::cpu);
    Work sent = world().send(out, next);
    world().recv(in, previous).wait();
    sent.wait();
    EXPECT_EVERYWHERE(equals(in, [&](int64_t) { return previous; }));

    fill(in, -1);
    Work arrives = world().recv(in, previous);  // posted, with nothing sent yet
    Tensor x = numbers(DType::f32, 1000, [](int64_t) { return 1; });
    world().use(AllReduce::ring);
    world().all_reduce(x).wait();
    world().use(AllReduce::library);
    world().send(out, next).wait();
    arrives.wait();
    EXPECT_EVERYWHERE(equals(x, [&](int64_t) { return N; }) && equals(in, [&](int64_t) { return previous; }));
}

TEST_CASE("split: groups by colour, in rank order, under their own name; a group of a group") {
    const Comm parity = world().split([](int r) { return r % 2; }, "parity");
    const int N = world().size(), r = world().rank();
    EXPECT_EVERYWHERE(parity.rank() == r / 2 && parity.size() == (N + 1 - r % 2) / 2 && parity.name() == "parity");
    EXPECT_EVERYWHERE(parity.sum(r) == [&] {
        double sum = 0;
        for (int p = r % 2; p < N; p += 2) sum += p;
        return sum;
    }());
    const Comm half = parity.split([&](int p) { return p < parity.size() / 2 ? 0 : 1; }, "half");
    EXPECT_EVERYWHERE(half.sum(1) == half.size());
    const Comm alone = world().split([](int p) { return p; }, "alone");
    Tensor x = numbers(DType::f32, 3, [](int64_t i) { return i; });
    alone.all_reduce(x).wait();
    EXPECT_EVERYWHERE(alone.size() == 1 && equals(x, [](int64_t i) { return i; }));
}

TEST_CASE("books: bytes by the formula, remainders dropped once per sum; calls; a second reading is empty") {
    const int64_t N = world().size();
    const Comm comm = world().split([](int) { return 0; }, "dp");
    world().take_stats();
    Tensor x({1001}, DType::f32, Device::cpu), even({10 * N}, DType::bf16, Device::cpu),
        part({10}, DType::bf16, Device::cpu);
    fill(x, 0);
    fill(even, 0);
    for (int i = 0; i < 5; ++i) comm.all_reduce(x).wait();
    comm.reduce_scatter(part, even).wait();
    comm.all_gather(even, part).wait();
    Tensor other = Tensor::like(even);
    comm.all_to_all(other, even).wait();
    comm.broadcast(even, 0).wait();
    comm.send_recv(x, int(comm.rank() + 1) % int(N), Tensor::like(x), int(comm.rank() + N - 1) % int(N)).wait();
    comm.sum(1);
    comm.gather({1, 2, 3});
    CommStats stats = world().take_stats();
    const auto is = [&](const std::string& name, int64_t bytes, int64_t calls) {
        const CommStats::Entry& entry = stats.operations[name];
        return entry.bytes == bytes && entry.calls == calls && entry.seconds > 0;
    };
    EXPECT_EVERYWHERE(is("dp.all_reduce", 5 * 2 * 4004 * (N - 1) / N, 5));
    EXPECT_EVERYWHERE(is("dp.reduce_scatter", 20 * (N - 1), 1));
    EXPECT_EVERYWHERE(is("dp.all_gather", 20 * (N - 1), 1));
    EXPECT_EVERYWHERE(is("dp.all_to_all", 20 * (N - 1), 1));
    EXPECT_EVERYWHERE(is("dp.broadcast", 20 * (N - 1), 1));
    EXPECT_EVERYWHERE(is("dp.send_recv", 4004, 1));
    EXPECT_EVERYWHERE(is("dp.scalar", (16 + 8 * 3 * N) * (N - 1) / N, 2));
    EXPECT_EVERYWHERE(stats.operations.size() == 7 && stats.waited > 0);
    EXPECT_EVERYWHERE(world().take_stats().operations.empty());
}

TEST_CASE("fake: every peer holds a copy of this rank's data; host and meta tensors") {
    const int N = 6;
    const Comm fake = make_comm(make_fake_transport(2, N), {});
    const auto value = [](int64_t i) { return element(2, i); };
    Tensor x = numbers(DType::f32, 60, value), part({10}, DType::f32, Device::cpu),
           whole({60}, DType::f32, Device::cpu);
    for (const AllReduce algorithm : kAll) {
        fake.use(algorithm);
        Tensor sum = numbers(DType::f32, 60, value);
        fake.all_reduce(sum).wait();
        EXPECT(equals(sum, [&](int64_t i) { return N * value(i); }));
    }
    Tensor whole_numbers = numbers(DType::i32, 60, value);
    fake.all_reduce(whole_numbers).wait();
    EXPECT(equals(whole_numbers, [&](int64_t i) { return N * value(i); }));
    fake.reduce_scatter(part, x).wait();
    EXPECT(equals(part, [&](int64_t i) { return N * value(20 + i); }));
    fake.all_gather(whole, part).wait();
    EXPECT(equals(whole, [&](int64_t i) { return N * value(20 + i % 10); }));
    fake.all_to_all(whole, x).wait();
    EXPECT(equals(whole, [&](int64_t i) { return value(20 + i % 10); }));
    fake.recv(whole, 1).wait();
    for (const double received : values(whole)) EXPECT(std::abs(received) < 10);
    EXPECT(fake.sum(3) == 18);
    const Comm pairs = fake.split([](int r) { return r / 3; }, "tp");
    EXPECT(pairs.rank() == 2);
    EXPECT(pairs.size() == 3);
    Tensor meta({60}, DType::f32, Device::meta), meta_part({10}, DType::f32, Device::meta);
    fake.all_reduce(meta).wait();
    fake.reduce_scatter(meta_part, meta).wait();
    fake.all_gather(meta, meta_part).wait();
    const CommStats stats = fake.take_stats();
    EXPECT(stats.operations.at("world.all_reduce").bytes == 7 * 2 * 240 * 5 / 6);
}

TEST_CASE("what cannot be is caught before it is sent") {
    const Comm fake = make_comm(make_fake_transport(0, 4), {});
    Tensor x({10}, DType::f32, Device::cpu), y({40}, DType::bf16, Device::cpu), z({39}, DType::f32, Device::cpu);
    EXPECT_CHECK_FAILS(fake.all_gather(y, x).wait());
    EXPECT_CHECK_FAILS(fake.reduce_scatter(x, z).wait());
    EXPECT_CHECK_FAILS(fake.all_to_all(z, z).wait());
    EXPECT_CHECK_FAILS(fake.send(x, 4).wait());
    EXPECT_CHECK_FAILS(fake.send(x, 0).wait());
    EXPECT_CHECK_FAILS(fake.broadcast(x, -1).wait());
}
