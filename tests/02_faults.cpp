// What test_failures.py starts under mpirun: ranks that disagree, each in its own way.
//   test_02_faults WAY [--comm-check on|off] [--comm-timeout S]
#include <signal.h>

#include <chrono>
#include <thread>

#include "01_single_gpu/ops/ops.h"
#include "02_data_parallel/complete/flags.h"
#include "02_data_parallel/runtime/comm_roles.h"
#include "02_data_parallel/runtime/connect.h"

using namespace train70b;

namespace {

void program(int argc, char** argv) {
    Flags flags("ranks that disagree");
    CommOptions options{.timeout = 5, .check = true};
    std::string way;
    flags.add("way", way, "how");
    add_comm_flags(flags, options);
    flags.parse(argc, argv);
    const Comm world = connect(options, Device::cpu);
    const Comm dp = world.split([](int) { return 0; }, "dp");
    const bool odd_one = world.rank() == 1;
    Tensor x({1000}, DType::f32, Device::cpu), shorter = x.row_slice(0, 500);
    fill(x, 1);
    for (int i = 0; i < 100; ++i) dp.all_reduce(x, Reduce::max).wait();

    if (way == "skip") {
        if (!odd_one) dp.all_reduce(x).wait();
        dp.barrier().wait();
    } else if (way == "skip-one-of-many") {  // all calls alike: it shows when the numbers part
        for (int i = 0; i < (odd_one ? 4 : 5); ++i) dp.all_reduce(x).wait();
    } else if (way == "size") {
        dp.all_reduce(odd_one ? shorter : x).wait();
    } else if (way == "dtype") {
        Tensor other({1000}, DType::bf16, Device::cpu);
        dp.all_reduce(odd_one ? other : x).wait();
    } else if (way == "reduction") {
        dp.all_reduce(x, odd_one ? Reduce::max : Reduce::sum).wait();
    } else if (way == "root") {
        dp.broadcast(x, odd_one ? 1 : 0).wait();
    } else if (way == "counts") {
        const std::vector<int64_t> received = {10, 10, 10}, sent = {10, 10, odd_one ? 11 : 10};
        const Tensor from = x.row_slice(0, odd_one ? 31 : 30);
        dp.all_to_all(x.row_slice(100, 130), received, from, sent).wait();
    } else if (way == "scalar") {
        odd_one ? dp.barrier().wait() : void(dp.sum(1));
    } else if (way == "message-too-long") {
        if (world.rank() == 0) dp.send(x, 1).wait();
        if (odd_one) dp.recv(shorter, 0).wait();
        dp.barrier().wait();
    } else if (way == "message-too-short") {
        if (world.rank() == 0) dp.send(shorter, 1).wait();
        if (odd_one) dp.recv(x, 0).wait();
        dp.barrier().wait();
    } else if (way == "silence") {
        if (odd_one) std::this_thread::sleep_for(std::chrono::minutes(2));
        dp.all_reduce(x).wait();
    } else if (way == "stop-while-writing") {
        write_files(world, [&] {
            if (odd_one) raise(SIGSTOP);
            dp.all_reduce(x).wait();
        });
    } else if (way == "stop-in-setup") {
        together([&] {
            if (odd_one) raise(SIGSTOP);
        });
    } else if (way == "write-for-long") {  // beyond any --comm-timeout, and rightly so
        const auto slow = [&] {
            if (odd_one) std::this_thread::sleep_for(std::chrono::seconds(2));
        };
        write_files(world, slow);
        together(slow);
    } else if (way == "usage") {
        together([&] {
            if (odd_one) usage_error("--here: rank 1 has no such disk; --there works");
        });
        dp.all_reduce(x).wait();
    } else if (way == "lone-usage") {
        if (odd_one) usage_error("--here: not foreseen");
        dp.all_reduce(x).wait();
    } else if (way == "check") {
        CHECK(!odd_one, "{} is not {}", 1, 2);
        dp.all_reduce(x).wait();
    } else if (way == "throw") {
        if (odd_one) throw std::runtime_error("a disk is full");
        dp.all_reduce(x).wait();
    } else {
        usage_error("{}: unknown way", way);
    }
    world.finish();
}

}  // namespace

int main(int argc, char** argv) {
    const char* rank = std::getenv("OMPI_COMM_WORLD_RANK");
    if (argc > 1 && argv[1] == std::string("stop-at-start") && rank && rank == std::string("1")) raise(SIGSTOP);
    return run_ranks(argc, argv, program);
}
