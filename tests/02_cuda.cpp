// The backends of device tensors against definitions. Without a GPU nothing is tested, and the output says so.
//   2 or 4 ranks on one GPU:  mpirun --oversubscribe -np 4 build/bin/test_02 -sf='*/02_cuda.cpp'          (staged)
//   the same through NCCL, which has to be told that they are different hosts (see docs/results/gpu.md):
//     mpirun --oversubscribe -np 2 bash -c 'NCCL_HOSTID=$OMPI_COMM_WORLD_RANK exec build/bin/test_02 -sf=*/02_cuda.cpp'
//   one GPU per rank:         mpirun -np 8 build/bin/test_02 -sf='*/02_cuda.cpp'                     (staged and nccl)
#include "01_single_gpu/ops/ops.h"
#include "02_data_parallel/complete/all_reduce.h"
#include "02_data_parallel/complete/data_parallel.h"
#include "02_data_parallel/complete/outer_steps.h"
#include "tests/device_comms.h"
#include "tests/messages.h"
#include "tests/unequal_slices.h"

using namespace train70b;
using namespace train70b::test;

namespace {

Tensor numbers(DType dtype, int64_t size, int rank) {
    std::vector<double> list;
    for (int64_t i = 0; i < size; ++i) list.push_back(double((i * 5 + rank * 3) % 16 - 8));
    return tensor(list, {size}, dtype, Device::cuda);
}
bool equals(const Tensor& x, const std::function<double(int64_t)>& value) {
    const std::vector<double> list = values(x);
    for (size_t i = 0; i < list.size(); ++i)
        if (list[i] != value(int64_t(i))) {
            fmt::print(stderr, "rank {}: element {} of {} {} is {}, not {}\n", this_rank, i, list.size(),
                       name_of(x.dtype()), list[i], value(int64_t(i)));
            return false;
        }
    return true;
}
double element(int rank, int64_t i) { return double((i * 5 + rank * 3) % 16 - 8); }

}  // namespace

TEST_CASE("device tensors: all-reduce by every algorithm, and every other collective, exact on small integers") {
    if (!has_gpu()) return;
    int64_t number = 0;
    for (const Comm& comm : device_comms()) {
        const int N = comm.size(), r = comm.rank();
        const auto sum = [N](int64_t i) {
            double total = 0;
            for (int p = 0; p < N; ++p) total += element(p, i);
            return total;
        };
        const int64_t large = kSmall ? 1 << 15 : 1 << 20, long_one = kSmall ? 10'000 : 100'000;
        for (const std::string& algorithm : all_reduce_names()) {
            comm.use(algorithm);
            for (const DType dtype : {DType::f32, DType::bf16})
                for (const int64_t size : {1, 3, 64, 1001, 1 << 20}) {
                    if (size == 1 << 20 && !in_gpu_slice(number++)) continue;
                    Tensor x = numbers(dtype, size, r);
                    comm.all_reduce(x).wait();
                    INFO(comm.backend(), " ", algorithm, " ", name_of(dtype), " ", size);
                    EXPECT_EVERYWHERE(equals(x, sum));
                }
            // Several in progress at once, while the compute stream is busy with what they wait for.
            std::vector<Tensor> tensors;
            std::vector<Work> works;
            for (int i = 0; i < 8; ++i) {
                tensors.push_back(numbers(DType::f32, long_one, r));
                scale(tensors.back(), 2);
                works.push_back(comm.all_reduce(tensors.back()));
            }
            bool good = true;
            for (int i = 0; i < 8; ++i) {
                works[i].wait();
                scale(tensors[i], 0.5f);
                good = good && equals(tensors[i], sum);
            }
            EXPECT_EVERYWHERE(good);
        }
        comm.use("hierarchical");  // reduce-scatters and all-gathers by hand, too
        const int64_t each = 1000;
        Tensor whole = numbers(DType::f32, each * N, r), part({each}, DType::f32, Device::cuda);
        comm.reduce_scatter(part, whole).wait();
        EXPECT_EVERYWHERE(equals(part, [&](int64_t i) { return sum(r * each + i); }));
        comm.all_gather(whole, part).wait();
        EXPECT_EVERYWHERE(equals(whole, sum));
        whole = numbers(DType::f32, each * N, r);
        Tensor slice = whole.row_slice(r * each, (r + 1) * each);
        comm.reduce_scatter(slice, whole).wait();
        comm.all_gather(whole, slice).wait();
        EXPECT_EVERYWHERE(equals(whole, sum));
        Tensor from = numbers(DType::f32, each * N, r);
        comm.all_to_all(whole, from).wait();
        EXPECT_EVERYWHERE(equals(whole, [&](int64_t i) { return element(int(i / each), r * each + i % each); }));
        comm.broadcast(from, N - 1).wait();
        EXPECT_EVERYWHERE(equals(from, [&](int64_t i) { return element(N - 1, i); }));
        Tensor mine = numbers(DType::bf16, 1001, r), theirs = Tensor::like(mine);
        comm.send_recv(mine, (r + 1) % N, theirs, (r + N - 1) % N).wait();
        EXPECT_EVERYWHERE(equals(theirs, [&](int64_t i) { return element((r + N - 1) % N, i); }));
        Work shifting = comm.ring_shift(mine, theirs, -1);
        Tensor beside = numbers(DType::f32, 1000, r);
        comm.all_reduce(beside).wait();
        shifting.wait();
        EXPECT_EVERYWHERE(equals(theirs, [&](int64_t i) { return element((r + 1) % N, i); }));
        if (N > 1) {  // a sum that is sent behind the shift that brings a part of it
            Tensor total = numbers(DType::f32, 1000, r), received = Tensor::like(total);
            Work first = comm.ring_shift(numbers(DType::f32, 1000, r), received);
            if (!comm.shifts_in_order()) first.wait();
            comm.add_and_shift(total, received).wait();
            first.wait();
            const auto two = [&](int to) {
                return [=](int64_t i) { return element(to % N, i) + element((to + N - 1) % N, i); };
            };
            EXPECT_EVERYWHERE(equals(total, two(r + N)) && equals(received, two(r + N - 1)));
        }
        if (N > 1 && r == 0) comm.send(mine, N - 1).wait();
        if (N > 1 && r == N - 1) comm.recv(theirs, 0).wait();
        EXPECT_EVERYWHERE(r != N - 1 || N == 1 || equals(theirs, [&](int64_t i) { return element(0, i); }));
        Tensor highest = numbers(DType::f32, 100, r);
        comm.all_reduce(highest, Reduce::max).wait();
        EXPECT_EVERYWHERE(equals(highest, [&](int64_t i) {
            double most = element(0, i);
            for (int p = 1; p < N; ++p) most = std::max(most, element(p, i));
            return most;
        }));
        EXPECT_EVERYWHERE(comm.sum(1) == N);
        if (N > 1) {  // large messages that cross, and one that is posted before a collective
            Tensor out = numbers(DType::f32, large, r), in = Tensor::like(out), other = Tensor::like(out);
            Work arrives = comm.recv(other, (r + N - 1) % N);
            Work sent = comm.send(out, (r + 1) % N);
            Tensor x = numbers(DType::f32, 1000, r);
            comm.all_reduce(x).wait();
            Work again = comm.send(out, (r + 1) % N);
            comm.recv(in, (r + N - 1) % N).wait();
            sent.wait();
            again.wait();
            arrives.wait();
            const auto theirs_is = [&](int64_t i) { return element((r + N - 1) % N, i); };
            EXPECT_EVERYWHERE(equals(x, sum) && equals(in, theirs_is) && equals(other, theirs_is));
        }
        {  // what has been waited for is no longer held
            const int64_t before = ledger().now()[int(Memory::workspace)];
            Tensor x({large}, DType::f32, Device::cuda, Memory::workspace);
            fill(x, 0);
            comm.all_reduce(x).wait();
            x = Tensor();
            EXPECT_EVERYWHERE(ledger().now()[int(Memory::workspace)] == before);
        }
        const CommStats stats = comm.take_stats();
        EXPECT_EVERYWHERE(N == 1 || stats.operations.at("world.all_reduce").seconds > 0);
    }
    world().use("library");
}

TEST_CASE("device tensors: all-to-all with counts, the library's and by hand") {
    if (!has_gpu()) return;
    for (const Comm& comm : device_comms())
        for (const std::string algorithm : {"library", "ring"}) {
            comm.use(algorithm);
            Failures failures;
            expect_unequal_slices(comm, Device::cuda, failures);
            INFO(std::string(comm.backend()), ", ", algorithm);
            EXPECT_NONE(failures);
        }
    Tensor to({5}, DType::f32, Device::cuda);
    const Comm fake = make_comm(make_fake_backend(1, 2), {});
    fake.all_to_all(to, {3, 2}, numbers(DType::f32, 2, 0), {0, 2}).wait();
    EXPECT_EVERYWHERE(equals(to, [](int64_t i) { return element(0, i < 3 ? i % 2 : i - 3); }));
    fake.all_to_all(to, {5, 0}, Tensor({0}, DType::f32, Device::cuda), {0, 0}).wait();
    EXPECT_EVERYWHERE(equals(to, [](int64_t) { return 0; }));
}

TEST_CASE("device tensors: a Work keeps what it reads and writes, whoever else lets go of it") {
    if (!has_gpu()) return;
    for (const Comm& comm : device_comms()) {
        const int N = comm.size(), r = comm.rank();
        const int64_t each = kSmall ? 5'000 : 200'000;
        std::vector<Tensor> others;
        const auto reuse = [&](int64_t size) {  // the memory of a tensor that nobody holds, if there is one
            others.emplace_back(Shape{size}, DType::f32, Device::cuda);
            fill(others.back(), 99);
        };
        Tensor sums({each}, DType::f32, Device::cuda), all({each * N}, DType::f32, Device::cuda);
        Tensor theirs({each}, DType::f32, Device::cuda), before({each}, DType::f32, Device::cuda);
        std::vector<Work> works;
        works.push_back(comm.reduce_scatter(sums, numbers(DType::f32, each * N, r)));
        reuse(each * N);
        works.push_back(comm.all_gather(all, numbers(DType::f32, each, r)));
        reuse(each);
        works.push_back(comm.send_recv(numbers(DType::f32, each, r), (r + 1) % N, before, (r + N - 1) % N));
        reuse(each);
        if (N > 1) {
            Work arrives = comm.recv(theirs, (r + N - 1) % N);
            works.push_back(comm.send(numbers(DType::f32, each, r), (r + 1) % N));
            reuse(each);
            arrives.wait();
        }
        for (Work& work : works) work.wait();
        INFO(comm.backend());
        EXPECT_EVERYWHERE(equals(sums, [&](int64_t i) {
            double total = 0;
            for (int p = 0; p < N; ++p) total += element(p, r * each + i);
            return total;
        }));
        EXPECT_EVERYWHERE(equals(all, [&](int64_t i) { return element(int(i / each), i % each); }));
        const auto neighbour = [&](int64_t i) { return element((r + N - 1) % N, i); };
        EXPECT_EVERYWHERE(equals(before, neighbour) && (N == 1 || equals(theirs, neighbour)));
    }
}

TEST_CASE("device tensors: messages and collectives in any order that MPI allows") {
    if (!has_gpu()) return;
    for (const Comm& comm : device_comms()) expect_messages_in_any_order(comm, Device::cuda);
}

#if TRAIN70B_CUDA
TEST_CASE("nccl: collectives of several groups in progress at once, on a stream for each group and on one for all") {
    if (!has_gpu() || !nccl_works()) return;
    for (const CommStreams streams : {CommStreams::group, CommStreams::one}) {
        const Comm comm = nccl_comm(streams);
        const int N = comm.size(), r = comm.rank();
        // All ranks; the even and the odd; neighbours. With NCCL's default of 32 blocks each they would not all fit.
        const std::vector<std::function<int(int)>> color = {[](int) { return 0; }, [](int rank) { return rank % 2; },
                                                            [](int rank) { return rank / 2; }};
        const std::vector<size_t> kinds = {0, 1, 2, 0, 2, 0};
        std::vector<Comm> groups;
        for (const size_t kind : kinds) groups.push_back(comm.split(color[kind], "group"));
        const auto same_group = [&](size_t kind, int p) { return color[kind](p) == color[kind](r); };
        std::vector<Tensor> tensors;
        std::vector<Work> works;
        for (int i = 0; i < 12; ++i) {
            tensors.push_back(numbers(DType::f32, i % 2 == 0 ? (kSmall ? 10'000 : 100'000) : 17, r));
            scale(tensors.back(), 2);
            works.push_back(groups[size_t(i) % 6].all_reduce(tensors.back()));
        }
        bool good = true;
        for (size_t i = works.size(); i-- > 0;) {
            works[i].wait();
            scale(tensors[i], 0.5f);
            good = good && equals(tensors[i], [&](int64_t k) {
                       double total = 0;
                       for (int p = 0; p < N; ++p) total += same_group(kinds[i % 6], p) ? element(p, k) : 0;
                       return total;
                   });
        }
        INFO((streams == CommStreams::group ? "a stream for each group" : "one stream"));
        EXPECT_EVERYWHERE(good);
    }
}

TEST_CASE("nccl: with a stream for each group, a collective does not wait for another group's") {
    if (!has_gpu() || !nccl_works() || world().size() < 2) return;
    const Comm comm = make_comm(make_nccl_backend(CommStreams::group), {});  // --comm-check would wait on the host
    const Comm one = comm.split([](int) { return 0; }, "one"), other = comm.split([](int) { return 0; }, "other");
    Tensor x = numbers(DType::f32, 1000, comm.rank()), y = numbers(DType::f32, 1000, comm.rank());
    one.all_reduce(x).wait();  // the first call of a group connects its ranks, and blocks the host
    other.all_reduce(y).wait();
    x = numbers(DType::f32, 1000, comm.rank());
    y = numbers(DType::f32, 1000, comm.rank());
    std::vector<Work> works;  // in opposite orders: on one stream each would wait for the other's first, for ever
    for (int i = 0; i < 2; ++i) {
        const bool first = (i == 0) == (comm.rank() % 2 == 0);
        works.push_back((first ? one : other).all_reduce(first ? x : y));
    }
    for (Work& work : works) work.wait();
    const auto sum = [&](int64_t i) {
        double total = 0;
        for (int p = 0; p < comm.size(); ++p) total += element(p, i);
        return total;
    };
    EXPECT_EVERYWHERE(equals(x, sum) && equals(y, sum));
}

TEST_CASE("nccl: the kernels of all groups leave multiprocessors to computation, or the run ends with a message") {
    if (!has_gpu() || !nccl_works() || world().size() < 2) return;
    const std::vector<int> all(size_t(world().size()), 0);
    const int room = cuda_info().multiprocessors - 8 - 2;  // 2: of all ranks
    for (const auto& [load, each] : {std::pair(GroupLoad::heavy, 16), {GroupLoad::light, 2}, {GroupLoad::channel, 4}}) {
        const auto ranks = make_nccl_backend(CommStreams::group);
        std::vector<std::unique_ptr<Backend>> groups;
        const bool few = load == GroupLoad::light;  // 61 groups take a while
        const int most = few ? 3 : room / each;
        for (int i = 0; i < most; ++i) groups.push_back(ranks->split(all, load));
        INFO(most, " groups of ", each);
        if (!few) EXPECT_CHECK_FAILS(ranks->split(all, load));
        groups.pop_back();  // a group that is gone gives back what it took
        groups.push_back(ranks->split(all, load));
    }
    // On one stream collectives run one after another, beside messages.
    const auto ranks = make_nccl_backend(CommStreams::one);
    std::vector<std::unique_ptr<Backend>> groups;
    for (int i = 0; i < 2 + room / 16; ++i) groups.push_back(ranks->split(all, GroupLoad::heavy));
    for (int i = 0; i < (room + 2 - 16) / 4; ++i) groups.push_back(ranks->split(all, GroupLoad::channel));
    EXPECT_CHECK_FAILS(ranks->split(all, GroupLoad::channel));
}

TEST_CASE("nccl: a group's first collective of each kind returns while the device is busy: its ranks are connected") {
    if (!has_gpu() || !nccl_works() || world().size() < 2) return;
    const Comm comm = make_comm(make_nccl_backend(CommStreams::group), {});
    const int64_t N = comm.size();
    Tensor whole = numbers(DType::f32, 10 * N, 0), part({10}, DType::f32, Device::cuda),
           busy = numbers(DType::f32, 1, 0);
    cuda_synchronize();
    if (kEmulated) emulated_hold("launch");
    scale(busy, 2);
    std::vector<Work> works;
    works.push_back(comm.all_reduce(whole));
    works.push_back(comm.reduce_scatter(part, whole));
    works.push_back(comm.all_gather(whole, part));
    works.push_back(comm.broadcast(whole, 0));
    if (kEmulated) emulated_hold(nullptr);
    for (Work& work : works) work.wait();
    EXPECT_EVERYWHERE(equals(whole, [&](int64_t i) { return double(N * N) * element(0, i); }));
}

TEST_CASE("nccl: a communicator goes when its collectives have ended, although nobody has waited for them") {
    if (!has_gpu() || !nccl_works()) return;
    std::unique_ptr<Backend> ranks = make_nccl_backend(CommStreams::group);
    Tensor x = numbers(DType::f32, 1000, world().rank());
    ranks->all_reduce(x, Reduce::sum)->wait();
    for (int i = 0; i < 4; ++i) ranks->all_reduce(x, Reduce::max);
    ranks.reset();
    EXPECT_EVERYWHERE(equals(x, [](int64_t i) {
        double total = 0;
        for (int p = 0; p < world().size(); ++p) total += element(p, i);
        return total;
    }));
}

TEST_CASE("nccl: an operation's seconds do not include those of the one before it") {
    if (!has_gpu() || !nccl_works()) return;
    const std::unique_ptr<Backend> ranks = make_nccl_backend(CommStreams::group);
    Tensor x = numbers(DType::f32, 1000, 0);
    ranks->all_reduce(x, Reduce::max)->wait();
    cuda_synchronize();
    const double begin = now_seconds();
    if (world().rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(30));  // the others' first one waits
    const RequestPtr first = ranks->all_reduce(x, Reduce::max), second = ranks->all_reduce(x, Reduce::max);
    first->wait();
    second->wait();
    const double busy = first->times()->busy + second->times()->busy;
    EXPECT_EVERYWHERE(busy > 0 && busy <= now_seconds() - begin);
}

TEST_CASE("connect: on a GPU, as test_emulator.py has set it up") {
    const char* timeout = std::getenv("TRAIN70B_TEST_TIMEOUT");
    if (!timeout) return;
    const Comm comm = connect({.backend = "nccl", .timeout = std::atof(timeout)}, Device::cuda);
    Tensor x = numbers(DType::f32, 10, 0);
    comm.all_reduce(x).wait();
    EXPECT_EVERYWHERE(equals(x, [&](int64_t i) { return comm.size() * element(0, i); }));
}

TEST_CASE("a group of one rank has no communicator: its tensors are copied, its numbers are there") {
    if (!has_gpu() || !nccl_works()) return;
    const Comm comm = nccl_comm(CommStreams::group), alone = comm.split([](int rank) { return rank; }, "alone");
    std::vector<Comm> many;  // they would take 32 times 16 multiprocessors
    for (int i = 0; i < 32; ++i) many.push_back(comm.split([](int rank) { return rank; }, "alone"));
    Tensor x = numbers(DType::f32, 100, comm.rank()), whole = Tensor::like(x);
    alone.all_reduce(x).wait();
    alone.all_gather(whole, x).wait();
    alone.broadcast(x, 0).wait();
    alone.barrier().wait();
    EXPECT_EVERYWHERE(equals(whole, [&](int64_t i) { return element(comm.rank(), i); }) && alone.sum(3) == 3);
}

TEST_CASE("a rank's GPU cannot change once it has streams or memory on one") {
    if (!has_gpu()) return;
    Tensor x({1}, DType::f32, Device::cuda);
    select_gpu();  // the same one again
    const int gpus = cuda_device_count();
    if (gpus > 1)
        EXPECT_CHECK_FAILS([&] {
            for (int device = 0; device < 2; ++device) cuda_use_device(device);  // one of them is another
        }());
}
#endif

TEST_CASE("data parallelism on device tensors: one rank's run, overlapped or not, by every algorithm") {
    if (!has_gpu()) return;
    const Text text;
    const TrainOptions o = tiny_on_gpu(text);
    Session one(reference_of(o));
    one.run();
    int64_t number = 0;
    for (const Comm& comm : device_comms())
        for (const std::string& algorithm : all_reduce_names())
            for (const bool overlap : {false, true}) {
                if (!in_gpu_slice(number++ * 2)) continue;  // a quarter
                comm.use(algorithm);
                TrainOptions part = o;
                part.micro_batch = 1;
                std::unique_ptr<DataParallel> data_parallel;
                Session session(part, [&](Session& s) {
                    data_parallel = std::make_unique<DataParallel>(s.model, comm, DataParallelOptions{0.05, overlap},
                                                                   AdamW::maker(s.options.adamw()));
                    use_store(s.trainer, *data_parallel, comm);
                });
                session.run();
                INFO(comm.backend(), " ", algorithm, ", overlap ", overlap);
                EXPECT_EVERYWHERE(worst_deviation(session, one) <= 5e-6);
                const Batch batch = session.trainer.micro_batch(part.steps, 0);  // sorted for the embedding's gradient
                EXPECT_EVERYWHERE(batch.order && batch.order.size() == batch.tokens.size());
            }
}

TEST_CASE("outer steps on device tensors, in fragments: the CPU's run") {
    if (!has_gpu()) return;
    const Text text;
    std::vector<std::unique_ptr<OuterSteps>> stores;
    const auto run = [&](const Comm& comm, const char* device) {
        TrainOptions o = tiny_on_gpu(text);
        o.device = device;
        o.micro_batch = 1;
        auto session = std::make_unique<Session>(o, [&](Session& s) {
            stores.push_back(std::make_unique<OuterSteps>(s.model, comm, OuterOptions{.every = 2, .fragments = 2},
                                                          o.steps, AdamW::maker(s.options.adamw())));
            use_store(s.trainer, *stores.back(), comm);
            s.trainer.step_states.push_back(stores.back().get());
        });
        session->run();
        return session;
    };
    const auto on_cpu = run(world(), "cpu");
    for (const Comm& comm : device_comms()) {
        INFO(comm.backend());
        EXPECT_EVERYWHERE(worst_deviation(*run(comm, "cuda"), *on_cpu) <= 5e-6);
    }
}
