#pragma once
// The all-to-all with counts against its definition, on host and device tensors.
#include "tests/ranks.h"

namespace train70b::test {

// Every rank calls this; what fails is collected, so that `comm` may have fewer ranks than the world.
inline void expect_unequal_slices(const Comm& comm, Device device, Failures& failures) {
    const int N = comm.size(), r = comm.rank();
    struct Case {
        const char* name;
        std::function<int64_t(int from, int to)> count;
    };
    const std::vector<Case> cases = {{"all different", [](int from, int to) { return 5 * from + 3 * to + 1; }},
                                     {"every second slice", [](int from, int to) { return (from + to) % 2 * 7; }},
                                     {"rank 0 sends nothing", [](int from, int) { return from == 0 ? 0 : 33; }},
                                     {"all to rank 0", [](int from, int to) { return to == 0 ? 1001 + from : 0; }},
                                     {"nothing to itself", [](int from, int to) { return from == to ? 0 : 9; }},
                                     {"nothing", [](int, int) { return 0; }}};
    const auto byte = [](int from, int to, int64_t i) { return uint8_t(from * 67 + to * 29 + i * 7 + 1); };
    for (const Case& c : cases) {
        std::vector<int64_t> sent, received;
        int64_t out = 0, in = 0, to_others = 0;
        for (int peer = 0; peer < N; ++peer) {
            sent.push_back(c.count(r, peer));
            received.push_back(c.count(peer, r));
            out += sent.back();
            in += received.back();
            to_others += peer == r ? 0 : sent.back();
        }
        comm.take_stats();
        std::vector<Work> works;
        std::vector<Tensor> arrived;
        int64_t bytes = 0;
        for (const DType dtype : {DType::f32, DType::bf16, DType::i32, DType::u8}) {
            const int64_t size = size_of(dtype);
            Tensor mine({out}, dtype, Device::cpu), from({out}, dtype, device);
            auto* next = mine.data<uint8_t>();
            for (int peer = 0; peer < N; ++peer)
                for (int64_t i = 0; i < sent[size_t(peer)] * size; ++i) *next++ = byte(r, peer, i);
            copy(from, mine);
            arrived.emplace_back(in > 0 ? Shape{in} : Shape{0, 5}, dtype, device);
            fill(arrived.back(), 0);
            works.push_back(comm.all_to_all(arrived.back(), received, from, sent));
            bytes += to_others * size;
        }  // the Work keeps `from`
        for (size_t i = 0; i < works.size(); ++i) {
            works[i].wait();
            Tensor host = Tensor(arrived[i].shape(), arrived[i].dtype(), Device::cpu);
            copy(host, arrived[i]);
            const auto* next = host.data<uint8_t>();
            for (int peer = 0; peer < N; ++peer)
                for (int64_t k = 0; k < received[size_t(peer)] * size_of(host.dtype()); ++k, ++next)
                    failures.expect(*next == byte(peer, r, k),
                                    fmt::format("{}, {} over {} ranks, {}: byte {} from rank {} is {}", comm.backend(),
                                                c.name, N, name_of(host.dtype()), k, peer, *next));
        }
        const auto booked = comm.take_stats().operations;
        const auto entry = booked.find(comm.name() + ".all_to_all");
        if (N == 1)
            failures.expect(entry == booked.end(), "one rank books an all-to-all");
        else
            failures.expect(
                entry != booked.end() && entry->second.calls == 4 && entry->second.bytes == bytes,
                fmt::format("{}, {} over {} ranks: not 4 calls and {} bytes", comm.backend(), c.name, N, bytes));
    }
}

}  // namespace train70b::test
