#pragma once
// The tables of chapter 04: what a rank keeps and sends, measured and computed; and what a link makes of it, estimated.
#include "02_data_parallel/runtime/program.h"
#include "04_tensor_parallel/tensor_parallel.h"

namespace train70b {

// Parameters that one rank holds: sharded ones divided by tp, norm weights whole, at least one key/value head, and the
// vocabulary's rows rounded up.
int64_t tensor_parallel_elements(const LlamaConfig& config, int64_t tp);

// Collectives of one rank: calls and bytes sent by operation, as Comm books them.
struct Traffic {
    struct Entry {
        int64_t calls = 0, bytes = 0;
        bool operator==(const Entry&) const = default;
    };
    std::map<std::string, Entry> operations;  // "tp.all_reduce"

    void add(const CommStats& stats);
    int64_t calls() const;
    int64_t bytes() const;
    std::string text() const;  // "4 all_reduce"
};
struct TrafficShape {
    int64_t rows, tp;  // R = B*T of a micro-batch
    DType dtype, grad_dtype;
    TensorParallelOptions options;
    Recompute recompute = Recompute::none;
};
// Of one block, forward and backward, for n = R*E*size bytes:
//   without sequence parallelism   4 all-reduces, each 2 n (N-1)/N          (full recomputation: 6)
//   with it                        4 all-gathers, 4 reduce-scatters, each n (N-1)/N, and 2 all-gathers for the weight
//                                  gradients                                (full recomputation: 8 and 6)
//   with overlap                   forward, and for the gradient of g's input, N - 1 shifts in the place of each
Traffic layer_traffic(const LlamaConfig& config, const TrafficShape& shape);
// Of a whole step of m micro-batches: the layers, the embedding, the head, the loss, the gradients of copied
// parameters.
Traffic step_traffic(const LlamaConfig& config, const TrafficShape& shape, int64_t micro_batches);

struct TensorParallelRun {
    int64_t tp;
    TensorParallelOptions options;
    MemoryPeak peak;       // of a step, this rank
    int64_t elements = 0;  // formula: parameters it holds
    ActivationFormula activations{};
    Traffic layer, layer_formula, step, step_formula;
    double step_s = 0, waiting_s = 0;
};
// Trains a fresh model for three steps with one micro-batch of options.micro_batch sequences each, on tp ranks of world
// (the other groups of tp ranks do the same), and reports the last. Collective.
TensorParallelRun run_tensor_parallel(const TrainOptions& options, const Dataset& data, const Comm& world, int64_t tp,
                                      const TensorParallelOptions& tp_options);

std::string memory_table(const std::vector<TensorParallelRun>& runs, const Llama::Options& types);
std::string traffic_table(const std::vector<TensorParallelRun>& runs);
std::string time_table(const std::vector<TensorParallelRun>& runs);

// A table that the reader can edit: 04_tensor_parallel/links.json.
struct Links {
    struct Link {
        std::string name;
        double bytes_per_s, seconds;
    };
    std::string device;
    double flops_per_s = 0;
    std::vector<Link> links;
};
Links read_links(const std::string& path);  // usage error, naming file and entry
// Of a block: computation / (computation + communication), nothing hidden. No measurement.
double efficiency(const LlamaConfig& config, int64_t seq_len, int64_t tp, const Links& links, const Links::Link& link);
std::string efficiency_table(const Links& links);
std::string efficiency_csv(const Links& links);

class TensorParallelReport {
  public:
    void add_flags(CommandLine& flags);  // --links, --efficiency-csv
    void open(const Program& program);   // the files; usage errors
    void print(Program& program, int64_t tp);

  private:
    std::string links_path_, efficiency_csv_;
    Links links_;
    std::optional<OutputFile> efficiency_file_;
};

}  // namespace train70b
