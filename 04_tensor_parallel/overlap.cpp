#include "04_tensor_parallel/overlap.h"

#include "04_tensor_parallel/tensor_parallel.h"

namespace train70b {

namespace {
// Chunk i (any integer, modulo N) of n equal stretches of rows.
Tensor chunk(const Tensor& x, int64_t i, int64_t n) {
    const int64_t rows = x.rows() / n, at = ((i % n) + n) % n;
    return x.row_slice(at * rows, (at + 1) * rows);
}
}  // namespace

Tensor all_gather_matmul(const Comm& ranks, const Tensor& part, const Tensor& weight, Transpose transpose,
                         Tensor& gathered) {
    const int64_t N = ranks.size(), r = ranks.rank();
    gathered = Tensor({part.rows() * N, part.cols()}, part.dtype(), part.device(), Memory::comm);
    Tensor own = chunk(gathered, r, N);
    copy(own, part);
    Tensor y({gathered.rows(), transpose == Transpose::b ? weight.rows() : weight.cols()}, part.dtype(), part.device());
    for (int64_t k = 0; k < N; ++k) {
        Work next;
        if (k + 1 < N) next = ranks.ring_shift(chunk(gathered, r - k, N), chunk(gathered, r - k - 1, N));
        Tensor rows = chunk(y, r - k, N);
        matmul_into(rows, chunk(gathered, r - k, N), weight, transpose);
        next.wait();
    }
    return y;
}

Tensor matmul_reduce_scatter(const Comm& ranks, const Tensor& x, const Tensor& weight) {
    const int64_t N = ranks.size(), r = ranks.rank();
    Tensor sum, arriving;
    Work passing;
    for (int64_t k = 0; k < N; ++k) {
        const Memory kind = k + 1 < N ? Memory::comm : Memory::activations;
        Tensor share = matmul(chunk(x, r - 1 - k, N), weight, Transpose::b, kind);
        passing.wait();  // of the sums before this one: mine to the right, the left neighbour's to me
        if (arriving) add(share, share, arriving);
        sum = share;
        if (k + 1 == N) break;
        arriving = Tensor::like(sum, Memory::comm);
        passing = ranks.ring_shift(sum, arriving);
    }
    return sum;
}

Var column_parallel_linear(Tape& tape, const Var& x, Linear& linear, const Comm& ranks, bool sequence) {
    Tensor gathered;  // not kept: the backward pass gathers again
    Var y{.data = sequence ? all_gather_matmul(ranks, x.data, linear.weight(), Transpose::b, gathered)
                           : matmul(x.data, linear.weight(), Transpose::b, linear.y_kind)};
    tape.record([ranks, sequence, x = Saved(x), dx = x.grad, dy = y.grad, &linear, deferred = tape.deferred_wgrads] {
        const auto wgrad = [dy, &linear](const Tensor& whole_x) {
            Tensor dw = linear.grad();
            matmul_into(dw, *dy, whole_x, Transpose::a, 1);
        };
        Tensor whole_x;
        Work gathering;
        if (!sequence) {
            whole_x = x.get();
        } else if (!deferred) {  // behind dX = dY W
            whole_x = Tensor({dy->rows(), x.get().cols()}, dy->dtype(), dy->device(), Memory::comm);
            gathering = ranks.all_gather(whole_x, x.get());
        }
        const Tensor whole_dx = matmul(*dy, linear.weight(), Transpose::none, linear.dx_kind);
        gathering.wait();
        Tensor part = whole_dx;
        Work reducing;  // behind dW += dY^T X
        if (sequence) {
            part = Tensor({whole_dx.rows() / ranks.size(), whole_dx.cols()}, whole_dx.dtype(), whole_dx.device());
            reducing = ranks.reduce_scatter(part, whole_dx);
        } else {
            reducing = ranks.all_reduce(part);
        }
        if (!deferred)
            wgrad(whole_x);
        else
            deferred->push_back([=] { wgrad(sequence ? gather_rows(ranks, x.get()) : x.get()); });
        reducing.wait();
        accumulate(*dx, part);
    });
    return y;
}

Var row_parallel_linear(Tape& tape, const Var& x, Linear& linear, const Comm& ranks) {
    Var y{.data = matmul_reduce_scatter(ranks, x.data, linear.weight())};
    const auto whole_dy = std::make_shared<Tensor>();
    tape.record_wgrad([x = Saved(x), whole_dy, &linear] {
        Tensor dw = linear.grad();
        matmul_into(dw, *whole_dy, x.get(), Transpose::a, 1);
    });
    tape.record([ranks, whole_dy, dx = x.grad, dy = y.grad, &linear] {
        accumulate(*dx, all_gather_matmul(ranks, *dy, linear.weight(), Transpose::none, *whole_dy));
    });
    return y;
}

}  // namespace train70b
