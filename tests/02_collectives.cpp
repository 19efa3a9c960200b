// The other collectives, messages and groups against their definitions, on 1 to 8 ranks; what Comm books and refuses.
#include <utility>

#include "01_single_gpu/core/recorder.h"
#include "02_data_parallel/complete/all_reduce.h"
#include "02_data_parallel/runtime/mpi_group.h"
#include "02_data_parallel/runtime/watchdog.h"
#include "02_data_parallel/runtime/work_queue.h"
#include "tests/collectives.h"
#include "tests/counting.h"
#include "tests/messages.h"
#include "tests/unequal_slices.h"

using namespace train70b;
using namespace train70b::test;

TEST_CASE("all-gather, broadcast, all-to-all and messages of any dtype, 1 to 8 ranks") {
    const auto fill_with = [](const Tensor& x, int first) {
        for (int64_t i = 0; i < x.bytes(); ++i) x.data<uint8_t>()[i] = uint8_t(first + i * 7);
    };
    const auto holds = [](const Tensor& x, int first, int64_t from = 0) {
        for (int64_t i = 0; i < x.bytes(); ++i)
            if (x.data<uint8_t>()[i] != uint8_t(first + (from + i) * 7)) return false;
        return true;
    };
    for (int ranks = 1; ranks <= world().size(); ++ranks) {
        Failures failures;
        on_first_ranks(ranks, [&](const Comm& comm) {
            const int r = comm.rank(), next = (r + 1) % ranks, previous = (r + ranks - 1) % ranks;
            for (const DType dtype : {DType::e4m3, DType::i32}) {
                const int64_t each = 24 / size_of(dtype), count = each * ranks;
                const auto expect = [&](bool good, const char* operation, int peer) {
                    failures.expect(good, fmt::format("{} over {} ranks, {} {}, rank {}", operation, ranks, count,
                                                      name_of(dtype), peer));
                };
                Tensor part({each}, dtype, Device::cpu), whole({count}, dtype, Device::cpu);
                fill_with(part, r);
                comm.all_gather(whole, part).wait();
                for (int p = 0; p < ranks; ++p)
                    expect(holds(whole.row_slice(p * each, (p + 1) * each), p), "all-gather", p);
                for (int root = 0; root < ranks; ++root) {
                    fill_with(part, r);
                    comm.broadcast(part, root).wait();
                    expect(holds(part, root), "broadcast", root);
                }
                Tensor from({count}, dtype, Device::cpu);
                fill_with(from, r);
                comm.all_to_all(whole, from).wait();
                for (int p = 0; p < ranks; ++p)
                    expect(holds(whole.row_slice(p * each, (p + 1) * each), p, r * 24), "all-to-all", p);
                if (ranks == 1) continue;
                fill_with(part, r);
                Tensor received = Tensor::like(part);
                comm.send_recv(part, next, received, previous).wait();
                expect(holds(received, previous), "send_recv", previous);
                if (r == 0) comm.send(part, ranks - 1).wait();
                if (r == ranks - 1) {
                    comm.recv(received, 0).wait();
                    expect(holds(received, 0), "send and recv", 0);
                }
            }
        });
        EXPECT_NONE(failures);
    }
}

TEST_CASE("all-to-all with counts: the library's and by hand, in one MPI call or in pieces, 1 to 8 ranks") {
    for (const int64_t largest : {MpiGroup::largest_count, int64_t(7)}) {
        const int64_t before = std::exchange(MpiGroup::largest_count, largest);
        for (const std::string algorithm : {"library", "ring"}) {
            const std::string used = world().use(algorithm);
            for (int ranks = 1; ranks <= world().size(); ++ranks) {
                Failures failures;
                on_first_ranks(ranks, [&](const Comm& comm) { expect_unequal_slices(comm, Device::cpu, failures); });
                INFO(algorithm, ", at most ", largest, " bytes");
                EXPECT_NONE(failures);
            }
            world().use(used);
        }
        MpiGroup::largest_count = before;
    }
}

TEST_CASE("pairwise all-to-all sends every slice once, straight to its rank") {
    const auto ranks = make_mpi_backend();
    Counting counting(*ranks);
    const int N = counting.size(), r = counting.rank();
    std::vector<Tensor> to, from;
    int64_t bytes = 0, messages = 0;
    for (int peer = 0; peer < N; ++peer) {
        const auto count = [](int sender, int receiver) { return int64_t(sender * 3 + receiver) % 4; };
        from.push_back(numbers(DType::i32, count(r, peer), [&](int64_t i) { return 100 * r + 10 * peer + i; }));
        to.push_back(numbers(DType::i32, count(peer, r), [](int64_t) { return -1; }));
        if (peer == r) continue;
        bytes += from.back().bytes();
        messages += from.back().size() > 0;
    }
    pairwise_all_to_all(counting, to, from);
    bool good = counting.sent == bytes && counting.messages == messages;
    for (int peer = 0; peer < N; ++peer)
        good = equals(to[size_t(peer)], [&](int64_t i) { return 100 * peer + 10 * r + i; }) && good;
    EXPECT_EVERYWHERE(good);
}

TEST_CASE("host numbers: sum, maximum and gather, a NaN included; a barrier; 1 to 8 ranks") {
    for (int ranks = 1; ranks <= world().size(); ++ranks) {
        Failures failures;
        on_first_ranks(ranks, [&](const Comm& comm) {
            const int r = comm.rank();
            const auto expect = [&](bool good, const char* operation) {
                failures.expect(good, fmt::format("{} over {} ranks", operation, ranks));
            };
            expect(comm.sum(r + 0.5) == ranks * (ranks - 1) / 2 + 0.5 * ranks, "sum");
            expect(comm.max(-r) == 0, "max");
            expect(std::isnan(comm.max(r == 0 ? NAN : 1.0)), "max with a NaN");
            expect(std::isnan(comm.sum(r == 0 ? NAN : 1.0)), "sum with a NaN");
            const std::vector<double> all = comm.gather({double(r), 7});
            for (int p = 0; p < ranks; ++p) expect(all[2 * p] == p && all[2 * p + 1] == 7, "gather");
            comm.barrier().wait();
        });
        EXPECT_NONE(failures);
    }
}

TEST_CASE("ring shifts in both directions, beside messages and collectives that have not been launched yet") {
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
        for (size_t i = works.size(); i-- > 0;) works[i].wait();  // newest first
        summing.wait();
        INFO(count, " elements");
        EXPECT_EVERYWHERE(equals(sum, [&](int64_t i) { return sum_of(N, i); }));
        EXPECT_EVERYWHERE(equals(message, [&](int64_t i) { return element(from(1), i); }));
        const int by[] = {1, -1, 3, N, 2 * N + 1};
        for (size_t k = 0; k < shifted.size(); ++k) {
            INFO("by ", by[k]);
            EXPECT_EVERYWHERE(equals(shifted[k], [&](int64_t i) { return element(from(by[k]), i); }));
        }
    }
    if (N > 1) {
        Tensor sum = numbers(DType::f32, 100, [&](int64_t i) { return element(r, i); }), received = Tensor::like(sum);
        world().ring_shift(sum, received).wait();
        world().add_and_shift(sum, received).wait();
        EXPECT_EVERYWHERE(equals(sum, [&](int64_t i) { return element(r, i) + element(from(1), i); }));
        EXPECT_EVERYWHERE(equals(received, [&](int64_t i) { return element(from(1), i) + element(from(2), i); }));
    }
    world().take_stats();
    world().ring_shift(Tensor({10}, DType::f32, Device::cpu), Tensor({10}, DType::f32, Device::cpu)).wait();
    const CommStats stats = world().take_stats();
    EXPECT_EVERYWHERE(stats.operations.at("world.send_recv").bytes == 40);
    EXPECT_EVERYWHERE(stats.operations.at("world.send_recv").calls == 1);
}

TEST_CASE("counts beyond the limit of one MPI call are sent in pieces") {
    const int64_t before = std::exchange(MpiGroup::largest_count, 7);  // as if an int ended there; sums 7 apart differ
    const int N = world().size(), r = world().rank();
    Tensor x = numbers(DType::f32, 33 * N, [&](int64_t i) { return element(r, i); });
    Tensor y = numbers(DType::f32, 33 * N, [&](int64_t i) { return element(r, i); });
    const auto sum = [&](int64_t i) { return sum_of(N, i); };
    const std::string algorithm = world().use("library");  // MPI's own; rings send messages
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
    world().use(algorithm);
    EXPECT_EVERYWHERE(reduced);
    EXPECT_EVERYWHERE(scattered);
    EXPECT_EVERYWHERE(gathered);
    EXPECT_EVERYWHERE(exchanged);
    EXPECT_EVERYWHERE(broadcast);
    EXPECT_EVERYWHERE(passed);
}

TEST_CASE("--comm-check: a tensor of a call of another group that nobody has waited for") {
    const Comm other = world().split([](int) { return 0; }, "other");
    Tensor whole = numbers(DType::f32, 10 * world().size(), [](int64_t i) { return i; });
    Tensor part = numbers(DType::f32, 10, [](int64_t i) { return i; }), apart = Tensor::like(whole);
    {
        Work reads = world().all_gather(whole, part);
        EXPECT_CHECK_FAILS(other.all_reduce(part));                                      // writes what is read
        EXPECT_CHECK_FAILS(other.all_gather(apart, whole.row_slice(0, 10)));             // reads what is written
        EXPECT_CHECK_FAILS(world().send(whole, (world().rank() + 1) % world().size()));  // a message is sent at once
        Work reads_too = other.all_gather(apart, part);
        reads_too.wait();
    }
    {
        Work reduces = world().all_reduce(part);
        Tensor beside = Tensor::like(part);
        fill(beside, 1);
        world().all_reduce(beside).wait();  // launches both
        EXPECT_CHECK_FAILS(other.all_reduce(part));
        reduces.wait();
    }
    {
        Tensor received = Tensor::like(part), next = Tensor::like(part);
        Work shift = world().ring_shift(part, received);
        EXPECT_CHECK_FAILS(world().ring_shift(received, next));  // without streams, only wait() orders them
        EXPECT_CHECK_FAILS(world().add_and_shift(next, received));
        shift.wait();
    }
    other.all_reduce(part).wait();
    Work first = world().all_reduce(part), second = world().all_reduce(part);  // a group's calls keep their order
    second.wait();
    first.wait();
    other.all_reduce(whole).wait();
}

TEST_CASE("asynchronous: nothing has happened before a wait; one wait launches all earlier calls, in order") {
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

TEST_CASE("large messages that cross do not deadlock; a message and a ring do not receive each other's data") {
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
    world().use("ring");
    world().all_reduce(x).wait();
    world().use("library");
    world().send(out, next).wait();
    arrives.wait();
    EXPECT_EVERYWHERE(equals(x, [&](int64_t) { return N; }) && equals(in, [&](int64_t) { return previous; }));
}

TEST_CASE("messages and collectives in any order that MPI allows") {
    expect_messages_in_any_order(world(), Device::cpu);
}

TEST_CASE("an operation that has failed on the device is named, with the reason; one that has completed is not") {
    struct OnDevice : Request {
        bool done = false;
        std::string reason;
        void wait() override {}
        bool on_stream() const override { return true; }
        bool finished() override { return done; }
        std::string failure() override { return reason; }
    };
    CollectiveLog log;
    const auto add = [&](const char* what) {
        auto request = std::make_shared<OnDevice>();
        log.set(log.add(what, std::source_location::current()), CollectiveLog::State::running, request);
        return request;
    };
    const auto first = add("dp.all_reduce #1"), second = add("pp.send #1");
    EXPECT_EVERYWHERE(log.poll_device() == "");
    first->done = true;
    first->reason = "too late";
    EXPECT_EVERYWHERE(log.poll_device() == "");
    second->reason = "the peer died";
    EXPECT_EVERYWHERE(log.poll_device() == "pp.send #1 has failed: the peer died");
}

TEST_CASE("split: groups by color, in rank order, under their own name; a group of a group") {
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

TEST_CASE("fake process group: every peer holds a copy of this rank's data; host and meta tensors") {
    const int N = 6;
    const Comm fake = make_comm(make_fake_backend(2, N), {});
    const auto value = [](int64_t i) { return element(2, i); };
    Tensor x = numbers(DType::f32, 60, value), part({10}, DType::f32, Device::cpu),
           whole({60}, DType::f32, Device::cpu);
    for (const std::string& algorithm : all_reduce_names()) {
        fake.use(algorithm);
        Tensor sum = numbers(DType::f32, 60, value);
        fake.all_reduce(sum).wait();
        INFO(algorithm);
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
    EXPECT(stats.operations.at("world.all_reduce").bytes == int64_t(all_reduce_names().size() + 2) * 2 * 240 * 5 / 6);
}

TEST_CASE("fake process group, all-to-all with counts: this rank's data for every peer, repeated; never undefined") {
    const Comm fake = make_comm(make_fake_backend(2, 4), {.all_reduce = "ring"});
    const Tensor from = numbers(DType::f32, 9, [](int64_t i) { return i; });  // 0 1 2 | | 3 4 | 5 6 7 8
    const std::vector<int64_t> sent = {3, 0, 2, 4}, received = {1, 20, 2, 0};
    Tensor to = numbers(DType::f32, 23, [](int64_t) { return -1; });
    fake.all_to_all(to, received, from, sent).wait();
    EXPECT(values(to) == std::vector<double>{3, 3, 4, 5, 6, 7, 8, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2, 3, 4, 3, 4});
    EXPECT(fake.take_stats().operations.at("world.all_to_all").bytes == 28);
    for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::i32, DType::u8}) {
        Tensor unsent({6}, dtype, Device::cpu);  // a rank that sends nothing
        fill(unsent, 1);
        fake.all_to_all(unsent, {1, 2, 0, 3}, Tensor({0, 3}, dtype, Device::cpu), {0, 0, 0, 0}).wait();
        for (int64_t i = 0; i < unsent.bytes(); ++i) EXPECT(unsent.data<uint8_t>()[i] == 0);
        for (const int64_t rows : {0, 3}) {
            Tensor meta({23}, dtype, Device::meta), meta_from({rows, 3}, dtype, Device::meta);
            const std::vector<int64_t> none = {0, 0, 0, 0};
            fake.all_to_all(meta, rows > 0 ? received : std::vector<int64_t>{20, 1, 0, 2}, meta_from,
                            rows > 0 ? sent : none)
                .wait();
            fake.all_to_all(Tensor({0}, dtype, Device::meta), none, Tensor({3}, dtype, Device::meta), {1, 2, 0, 0})
                .wait();
        }
    }
}

TEST_CASE("a recorder sees an all-to-all with counts as equal slices of the bytes that it sends") {
    struct Calls : Recorder {
        std::vector<Operation> operations;
        int64_t ops = 0, transport = 0;
        void op(const char*, const std::vector<int64_t>&, DType, double, double) override { ops += transport == 0; }
        void book(Memory, int64_t) override {}
        void phase(const std::string&) override {}
        int split(int, const std::vector<int>&, const std::string&) override { return 0; }
        uint64_t call(const RecordedCall& call) override {
            operations.push_back(call.operation);
            return operations.size();
        }
        void wait(uint64_t) override {}
        void begin_transport() override { ++transport; }
        void end_transport() override { --transport; }
    } calls;
    const Comm fake = make_comm(make_fake_backend(2, 4), {});
    const Tensor from({12}, DType::bf16, Device::meta), to({20}, DType::bf16, Device::meta);
    recorder = &calls;
    fake.all_to_all(to, {5, 5, 3, 7}, from, {3, 6, 3, 0}).wait();
    fake.all_to_all(Tensor({12}, DType::bf16, Device::meta), {3, 3, 3, 3}, from, {3, 3, 3, 3}).wait();
    recorder = nullptr;
    REQUIRE(calls.operations.size() == 2);
    for (const Operation& operation : calls.operations) {
        EXPECT(std::string(operation.name) == "all_to_all");
        EXPECT(operation.details == ", bf16 by counts");
        EXPECT(operation.wire_bytes == 3 * operation.bytes);  // as of an equal one of 12 bf16
        EXPECT(operation.bytes == 24);
        EXPECT(operation.sent.size() == 4);
    }
    EXPECT(calls.ops == 0);
}

TEST_CASE("invalid calls are caught before anything is sent") {
    const Comm fake = make_comm(make_fake_backend(0, 4), {});
    {
        const Tensor from({10}, DType::f32, Device::cpu), to({6}, DType::f32, Device::cpu);
        const std::vector<int64_t> sent = {1, 2, 3, 4}, received = {1, 0, 0, 5};
        fake.all_to_all(to, received, from, sent).wait();
        EXPECT_CHECK_FAILS(fake.all_to_all(to, {1, 0, 0, 4}, from, sent).wait());
        EXPECT_CHECK_FAILS(fake.all_to_all(to, {1, 0, 0, 6}, from, sent).wait());
        EXPECT_CHECK_FAILS(fake.all_to_all(to, {1, 5}, from, sent).wait());
        EXPECT_CHECK_FAILS(fake.all_to_all(to, {1, -1, 0, 6}, from, sent).wait());
        EXPECT_CHECK_FAILS(fake.all_to_all(to, {2, 0, 0, 4}, from, sent).wait());  // of itself it expects 2
        EXPECT_CHECK_FAILS(fake.all_to_all(Tensor({6}, DType::i32, Device::cpu), received, from, sent).wait());
        EXPECT_CHECK_FAILS(fake.all_to_all(from.row_slice(0, 6), received, from, sent).wait());
    }
    Tensor x({10}, DType::f32, Device::cpu), y({40}, DType::bf16, Device::cpu), z({39}, DType::f32, Device::cpu);
    EXPECT_CHECK_FAILS(fake.all_gather(y, x).wait());
    EXPECT_CHECK_FAILS(fake.reduce_scatter(x, z).wait());
    EXPECT_CHECK_FAILS(fake.all_to_all(z, z).wait());
    EXPECT_CHECK_FAILS(fake.send(x, 4).wait());
    EXPECT_CHECK_FAILS(fake.send(x, 0).wait());
    EXPECT_CHECK_FAILS(fake.broadcast(x, -1).wait());
}
