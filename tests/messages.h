#pragma once
// Orders of messages and collectives that MPI allows, so no rank may wait forever on any backend. Messages are larger
// than what MPI sends before the receiver asks for it.
#include "02_data_parallel/complete/all_reduce.h"
#include "tests/ranks.h"

namespace train70b::test {

inline const int64_t kLarge = kSmall ? 1 << 15 : 1 << 20;  // elements

inline void expect_messages_in_any_order(const Comm& comm, Device device) {
    const int N = comm.size(), r = comm.rank(), next = (r + 1) % N, previous = (r + N - 1) % N;
    if (N == 1) return;
    const auto filled = [device](double value, int64_t size = kLarge) {
        Tensor x({size}, DType::f32, device);
        fill(x, value);
        return x;
    };
    const auto is = [](const Tensor& x, double value) {
        const std::vector<double> all = values(x);
        return std::all_of(all.begin(), all.end(), [value](double each) { return each == value; });
    };
    INFO(comm.backend());
    {  // polling alone completes a message
        Tensor out = filled(r), in = filled(-1);
        Work sent = comm.send(out, next), arrives = comm.recv(in, previous);
        for (bool gone = false, here = false; !gone || !here;) gone = sent.done(), here = arrives.done();
        EXPECT_EVERYWHERE(is(in, previous));
    }
    {  // the send is waited for after the collective, received before it
        Tensor out = filled(3), in = filled(-1), x = filled(1);
        if (r == 0) {
            Work sent = comm.send(out, 1);
            comm.all_reduce(x).wait();
            sent.wait();
        } else {
            if (r == 1) comm.recv(in, 0).wait();
            comm.all_reduce(x).wait();
        }
        EXPECT_EVERYWHERE(is(x, N) && (r != 1 || is(in, 3)));
    }
    {  // of two sends, one is received before the collective, one after it
        Tensor first = filled(10), second = filled(20), in = filled(-1), last = filled(-1), x = filled(1);
        if (r == 0) {
            Work sent = comm.send(first, 1), other = comm.send(second, 1);
            sent.wait();
            comm.all_reduce(x).wait();
            other.wait();
        } else {
            if (r == 1) comm.recv(in, 0).wait();
            comm.all_reduce(x).wait();
            if (r == 1) comm.recv(last, 0).wait();
        }
        EXPECT_EVERYWHERE(is(x, N) && (r != 1 || (is(in, 10) && is(last, 20))));
    }
    {  // a channel's receive is pending while collectives run, need larger buffers than before, and the ranks meet
        const Comm channel = comm.p2p_channel(0, 1);
        const std::string before = comm.use("library");
        for (const std::string& algorithm : all_reduce_names()) {
            comm.use(algorithm);
            Tensor small = filled(1, 1000), large = filled(2, 100'000), message = filled(5), in = filled(-1);
            comm.all_reduce(small).wait();
            Work pending = r == 1 ? channel.recv(in, 0) : Work();
            comm.all_reduce(large).wait();
            comm.barrier().wait();
            if (r == 0) pending = channel.send(message, 1);
            comm.all_reduce(large).wait();
            pending.wait();
            INFO(algorithm);
            EXPECT_EVERYWHERE(is(small, N) && is(large, 2.0 * N * N) && (r != 1 || is(in, 5)));
        }
        comm.use(before);
    }
}

}  // namespace train70b::test
