#include "04_tensor_parallel/complete/overlap.h"

#include <vector>

#include "04_tensor_parallel/complete/tensor_parallel.h"

namespace train70b {

namespace {
// Chunk i (any integer, modulo n) of n equal chunks of rows.
Tensor chunk(const Tensor& x, int64_t i, int64_t n) {
    const int64_t rows = x.rows() / n, index = ((i % n) + n) % n;
    return x.row_slice(index * rows, (index + 1) * rows);
}
}  // namespace

Tensor all_gather_matmul(const Comm& ranks, const Tensor& shard, const Tensor& weight, Transpose transpose,
                         Tensor& gathered) {
    const int64_t N = ranks.size(), r = ranks.rank();
    gathered = Tensor({shard.rows() * N, shard.cols()}, shard.dtype(), shard.device(), Memory::comm);
    Tensor own = chunk(gathered, r, N);
    copy(own, shard);
    Tensor y({gathered.rows(), transpose == Transpose::b ? weight.rows() : weight.cols()}, shard.dtype(),
             shard.device());
    std::vector<Work> arrivals(static_cast<size_t>(N));  // [k]: of chunk r - k
    const auto shift = [&](int64_t k) {                  // sends chunk r - k on and receives the next
        arrivals[size_t(k + 1)] = ranks.ring_shift(chunk(gathered, r - k, N), chunk(gathered, r - k - 1, N));
    };
    // Issued before the first product, no shift waits for one. None writes what a product or another shift still uses:
    // every chunk has a place of its own in `gathered`.
    const bool all_at_once = ranks.shifts_in_order();
    for (int64_t k = 0; all_at_once && k + 1 < N; ++k) shift(k);
    for (int64_t k = 0; k < N; ++k) {
        arrivals[size_t(k)].wait();
        if (!all_at_once && k + 1 < N) shift(k);
        Tensor rows = chunk(y, r - k, N);
        matmul_into(rows, chunk(gathered, r - k, N), weight, transpose);
    }
    return y;
}

namespace {

// Products, additions and shifts, each kind in a stream of its own:
//   product k   after shift k - kAhead - 1, which has sent what was where the product's result goes
//   addition k  after product k and shift k - 1
//   shift k     after addition k, and so after every earlier shift; it receives into what addition k has read
// So a slow shift delays no product before the ring is kAhead sums behind. The price is memory: kAhead + 2 chunks.
Tensor matmul_reduce_scatter_on_streams(const Comm& ranks, const Tensor& x, const Tensor& weight) {
    constexpr int64_t kAhead = 2;
    const int64_t N = ranks.size(), r = ranks.rank();
    std::vector<Work> shifts(static_cast<size_t>(N));  // [k] holds the sum of step k until the compute stream waits
    Tensor sum, received;
    for (int64_t k = 0; k < N; ++k) {
        if (k > kAhead) shifts[size_t(k - kAhead - 1)].wait();
        const Memory kind = k + 1 < N ? Memory::comm : Memory::activations;
        sum = matmul(chunk(x, r - 1 - k, N), weight, Transpose::b, kind);
        if (k == 0) received = Tensor::like(sum, Memory::comm);
        if (k + 1 < N)
            shifts[size_t(k)] = k == 0 ? ranks.ring_shift(sum, received) : ranks.add_and_shift(sum, received);
    }
    for (Work& shift : shifts) shift.wait();
    add(sum, sum, received);
    return sum;
}

}  // namespace

Tensor matmul_reduce_scatter(const Comm& ranks, const Tensor& x, const Tensor& weight) {
    if (ranks.size() > 1 && ranks.shifts_in_order()) return matmul_reduce_scatter_on_streams(ranks, x, weight);
    const int64_t N = ranks.size(), r = ranks.rank();
    Tensor sum, received;
    Work shift;
    for (int64_t k = 0; k < N; ++k) {
        const Memory kind = k + 1 < N ? Memory::comm : Memory::activations;
        Tensor partial = matmul(chunk(x, r - 1 - k, N), weight, Transpose::b, kind);
        shift.wait();  // the previous partial sums: this rank's to the right, the left neighbour's to this rank
        if (received) add(partial, partial, received);
        sum = partial;
        if (k + 1 == N) break;
        received = Tensor::like(sum, Memory::comm);
        shift = ranks.ring_shift(sum, received);
    }
    return sum;
}

Var column_parallel_linear(Tape& tape, const Var& x, Linear& linear, const Comm& ranks, bool sequence) {
    Tensor gathered;  // not kept: the backward pass gathers again
    Var y{.data = sequence ? all_gather_matmul(ranks, x.data, linear.weight(), Transpose::b, gathered)
                           : matmul(x.data, linear.weight(), Transpose::b, linear.y_kind)};
    tape.record([ranks, sequence, x = Saved(x), dx = x.grad, dy = y.grad, &linear, deferred = tape.deferred_wgrads] {
        const auto wgrad = [dy, &linear](const Tensor& full_x) {
            Tensor dw = linear.grad();
            matmul_into(dw, *dy, full_x, Transpose::a, 1);
        };
        Tensor full_x;
        Work gathering;
        if (!sequence) {
            full_x = x.get();
        } else if (!deferred) {  // overlaps dX = dY W
            full_x = Tensor({dy->rows(), x.get().cols()}, dy->dtype(), dy->device(), Memory::comm);
            gathering = ranks.all_gather(full_x, x.get());
        }
        const Tensor full_dx = matmul(*dy, linear.weight(), Transpose::none, linear.dx_kind);
        gathering.wait();
        Tensor own_dx = full_dx;
        Work reduction;  // overlaps dW += dY^T X
        if (sequence) {
            own_dx = Tensor({full_dx.rows() / ranks.size(), full_dx.cols()}, full_dx.dtype(), full_dx.device());
            reduction = ranks.reduce_scatter(own_dx, full_dx);
        } else {
            reduction = ranks.all_reduce(own_dx);
        }
        if (!deferred)
            wgrad(full_x);
        else
            deferred->push_back([=] { wgrad(sequence ? gather_rows(ranks, x.get()) : x.get()); });
        reduction.wait();
        accumulate(*dx, own_dx);
    });
    return y;
}

Var row_parallel_linear(Tape& tape, const Var& x, Linear& linear, const Comm& ranks) {
    Var y{.data = matmul_reduce_scatter(ranks, x.data, linear.weight())};
    const auto full_dy = std::make_shared<Tensor>();
    tape.record_wgrad([x = Saved(x), full_dy, &linear] {
        Tensor dw = linear.grad();
        matmul_into(dw, *full_dy, x.get(), Transpose::a, 1);
    });
    tape.record([ranks, full_dy, dx = x.grad, dy = y.grad, &linear] {
        accumulate(*dx, all_gather_matmul(ranks, *dy, linear.weight(), Transpose::none, *full_dy));
    });
    return y;
}

}  // namespace train70b
