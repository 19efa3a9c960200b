#include "08_3d_full/experts/expert_parallel.h"

#include <numeric>
#include <utility>

#include "01_single_gpu/complete/data/batches.h"
#include "02_data_parallel/runtime/comm_roles.h"

namespace train70b {

namespace {

// How the rows of a micro-batch are exchanged.
struct Exchange {
    std::vector<int64_t> sent, received;  // rows, by rank
    Tensor order, inverse;                // received rows -> sorted by expert, and back; empty: they are sorted
};

// y_i = x_order[i]: a permutation; inverse[order[i]] = i.
Var reorder(Tape& tape, const Var& x, const Tensor& order, const Tensor& inverse) {
    if (!order) return x;
    Var y{.data = Tensor::like(x.data)};
    gather_slots(y.data, x.data, order, 1);
    tape.record([dx = x.grad, dy = y.grad, inverse] {
        Tensor part = Tensor::like(*dy);
        gather_slots(part, *dy, inverse, 1);
        accumulate(*dx, part);
    });
    return y;
}

// Rows on their way.
struct RowsSent {
    Tensor rows;
    Work work;

    RowsSent() = default;
    RowsSent(const Tensor& x, const std::vector<int64_t>& sent, const std::vector<int64_t>& received, const Comm& ranks)
        : rows({std::accumulate(received.begin(), received.end(), int64_t(0)), x.cols()}, x.dtype(), x.device(),
               Memory::comm) {
        const auto elements = [&](std::vector<int64_t> counts) {
            for (int64_t& count : counts) count *= x.cols();
            return counts;
        };
        work = ranks.all_to_all(rows, elements(received), x, elements(sent));
    }
    Tensor wait() {
        work.wait();
        return std::exchange(rows, {});
    }
};

// Sends the rows of the other ranks' slices to them: (S, E) -> (S', E). sent, received: rows, by rank. Calls
// `meanwhile` while they are on their way; its backward pass runs while the gradients are.
// tag::exchange[]
Var exchange_rows(Tape& tape, const Var& x, const std::vector<int64_t>& sent, const std::vector<int64_t>& received,
                  const Comm& ranks, const std::function<void()>& meanwhile) {
    // tag::lab-dispatch-rows[]
    RowsSent there(x.data, sent, received, ranks);
    const auto back = std::make_shared<RowsSent>();
    tape.record([back, dx = x.grad] { accumulate(*dx, back->wait()); });
    meanwhile();
    Var y{.data = there.wait()};
    tape.record([=, dy = y.grad] { *back = RowsSent(*dy, received, sent, ranks); });
    return y;
    // end::lab-dispatch-rows[]
}
// end::exchange[]

}  // namespace

int64_t expert_traffic(const LlamaConfig& c, int64_t ep, int64_t rows, DType dtype, Recompute recompute) {
    const int64_t exchanges = recompute == Recompute::full ? 6 : 4;
    return exchanges * rows * c.experts.top_k * c.hidden * size_of(dtype) / ep * (ep - 1);
}

ExpertParallel::ExpertParallel(Llama& model, const ExpertComms& ranks, const ContextLayout& context)
    : ranks_(ranks), context_(context) {
    const int64_t N = ranks_.ep.size();
    for (Block& block : model.blocks) {
        Experts* experts = experts_of(block);
        if (!experts) continue;
        experts->ranks = this;
        for (Param* param : {&experts->expert_gate_up, &experts->expert_down}) {
            CHECK(model.config.experts.count % N == 0, "{} experts over {}", model.config.experts.count, N);
            param->local.rows /= N;
            param->local.row_begin += ranks_.ep.rank() * param->local.rows;
        }
    }
}

// The rows of a context-parallel rank are ordered by range of tokens, then by sequence; sequence parallelism gives each
// tensor-parallel rank consecutive ones.
std::vector<RowPiece> ExpertParallel::pieces(const Batch& batch, int part) const {
    const int tp = ranks_.tp.size();
    const std::vector<TokenRange> ranges = context_.tokens_of(part / tp, batch.whole_len);
    int64_t rows = 0, length = 0;
    for (const TokenRange& range : ranges) {
        rows += batch.sequences * range.count;
        length = std::gcd(length, range.count);
    }
    const int64_t begin = part % tp * (rows / tp), end = begin + rows / tp;
    length = std::gcd(length, rows / tp);
    std::vector<RowPiece> list;
    int64_t row = 0;
    for (const TokenRange& range : ranges)
        for (int64_t sequence = 0; sequence < batch.sequences; ++sequence)
            for (int64_t token = 0; token < range.count; token += length, row += length)
                if (begin <= row && row < end) list.push_back({sequence, range.begin + token});
    return list;
}

// tag::plan[]
void ExpertParallel::plan(Routing& routing, const Tensor& logits) const {
    const Comm& ep = ranks_.ep;
    routing.rows = routing.sent;
    if (ep.size() == 1) return;
    // tag::lab-dispatch-plan[]
    const size_t N = size_t(ep.size()), experts = routing.sent.size(), share = experts / N;
    // counts[r][e]: rows of rank r for expert e.
    std::vector<double> counts = ep.gather({routing.sent.begin(), routing.sent.end()});
    auto exchange = std::make_shared<Exchange>();
    exchange->sent.assign(N, 0);
    exchange->received.assign(N, 0);
    routing.rows.assign(share, 0);
    const size_t first = size_t(ep.rank()) * share;  // of this rank's experts
    std::vector<int64_t> begin(N * share);           // of rank r's rows for expert j here, sorted by expert
    int64_t row = 0;
    for (size_t e = 0; e < experts; ++e) exchange->sent[e / share] += routing.sent[e];
    for (size_t j = 0; j < share; ++j)
        for (size_t r = 0; r < N; ++r) {
            const int64_t count = int64_t(counts[r * experts + first + j]);
            begin[r * share + j] = row;
            row += count;
            exchange->received[r] += count;
            routing.rows[j] += count;
        }
    if (share > 1) {
        std::vector<int32_t> order = std::vector<int32_t>(size_t(row)), inverse;
        for (size_t r = 0; r < N; ++r)
            for (size_t j = 0; j < share; ++j)
                for (int64_t i = 0; i < int64_t(counts[r * experts + first + j]); ++i) {
                    order[size_t(begin[r * share + j] + i)] = int32_t(inverse.size());
                    inverse.push_back(int32_t(begin[r * share + j] + i));
                }
        exchange->order = upload(order, {row}, logits.device());
        exchange->inverse = upload(inverse, {row}, logits.device());
    }
    routing.exchange = exchange;
    // end::lab-dispatch-plan[]
}
// end::plan[]

Var ExpertParallel::dispatch(Tape& tape, const Var& sorted, const Routing& routing,
                             const std::function<void()>& meanwhile) const {
    if (!routing.exchange) return ExpertRanks::dispatch(tape, sorted, routing, meanwhile);
    const auto& planned = *static_cast<const Exchange*>(routing.exchange.get());
    // tag::lab-dispatch-dispatch[]
    const Var here = exchange_rows(tape, sorted, planned.sent, planned.received, ranks_.ep, meanwhile);
    return reorder(tape, here, planned.order, planned.inverse);
    // end::lab-dispatch-dispatch[]
}

Var ExpertParallel::combine(Tape& tape, const Var& out, const Routing& routing) const {
    if (!routing.exchange) return out;
    const auto& planned = *static_cast<const Exchange*>(routing.exchange.get());
    // tag::lab-dispatch-combine[]
    const Var there = reorder(tape, out, planned.inverse, planned.order);
    return exchange_rows(tape, there, planned.received, planned.sent, ranks_.ep, [] {});
    // end::lab-dispatch-combine[]
}

}  // namespace train70b
