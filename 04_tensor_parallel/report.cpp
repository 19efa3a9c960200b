#include "04_tensor_parallel/report.h"

#include <numeric>

#include "01_single_gpu/io/json.h"
#include "02_data_parallel/runtime/measure.h"
#include "04_tensor_parallel/flags.h"

namespace train70b {

namespace {
int64_t kv_ranks(const LlamaConfig& c, int64_t tp) { return std::gcd(c.kv_heads, tp); }  // that hold different heads
int64_t kv_elements(const LlamaConfig& c, int64_t tp) { return c.kv_width() / kv_ranks(c, tp) * c.hidden; }
}  // namespace

int64_t tensor_parallel_elements(const LlamaConfig& c, int64_t tp) {
    const int64_t block =
        2 * c.hidden + 2 * c.hidden * c.hidden / tp + 2 * kv_elements(c, tp) + 3 * c.ffn * c.hidden / tp;
    return c.layers * block + c.hidden + 2 * ((c.vocab + tp - 1) / tp) * c.hidden;
}

// ---- what is sent ---------------------------------------------------------------------------------------------------

void Traffic::add(const CommStats& stats) {
    for (const auto& [name, entry] : stats.operations) {
        if (name.ends_with(".scalar") || name.ends_with(".split")) continue;
        operations[name].calls += entry.calls;
        operations[name].bytes += entry.bytes;
    }
}

int64_t Traffic::calls() const {
    int64_t sum = 0;
    for (const auto& [name, entry] : operations) sum += entry.calls;
    return sum;
}

int64_t Traffic::bytes() const {
    int64_t sum = 0;
    for (const auto& [name, entry] : operations) sum += entry.bytes;
    return sum;
}

std::string Traffic::text() const {
    std::string text;
    for (const auto& [name, entry] : operations)
        text += fmt::format("{}{} {}", text.empty() ? "" : ", ", entry.calls, name.substr(name.find('.') + 1));
    return text;
}

namespace {

// Counts collectives of whole tensors of n bytes; (N-1)/N is applied once per operation, to the sum.
class Counter {
  public:
    Counter(const TrafficShape& s) : N_(s.tp) {}
    void all_reduce(int64_t times, int64_t n) { count("all_reduce", times, 2 * n * times); }
    void all_gather(int64_t times, int64_t n) { count("all_gather", times, n * times); }
    void reduce_scatter(int64_t times, int64_t n) { count("reduce_scatter", times, n * times); }
    void ring(int64_t times, int64_t n) { count("send_recv", times * (N_ - 1), n * times); }
    Traffic traffic() const {
        Traffic result;
        for (const auto& [name, entry] : sums_)
            result.operations["tp." + name] = {entry.calls, entry.bytes * (N_ - 1) / N_};
        return result;
    }

  private:
    void count(const std::string& name, int64_t calls, int64_t bytes) {
        if (calls == 0 || N_ == 1) return;
        sums_[name].calls += calls;
        sums_[name].bytes += bytes;
    }
    int64_t N_;
    std::map<std::string, Traffic::Entry> sums_;
};

void count_layer(Counter& counter, const LlamaConfig& c, const TrafficShape& s) {
    const int64_t n = s.rows * c.hidden * size_of(s.dtype), forwards = s.recompute == Recompute::full ? 2 : 1;
    if (!s.options.sequence_parallel) return counter.all_reduce(2 * forwards + 2, n);
    if (!s.options.overlap) {
        counter.all_gather(2 * forwards + 2 + 2, n);
        counter.reduce_scatter(2 * forwards + 2, n);
        return;
    }
    counter.ring(4 * forwards + 2, n);  // f and g forward, g backward
    counter.all_gather(2, n);           // f, for the weight gradient
    counter.reduce_scatter(2, n);       // f backward
}

}  // namespace

Traffic layer_traffic(const LlamaConfig& c, const TrafficShape& s) {
    Counter counter(s);
    count_layer(counter, c, s);
    return counter.traffic();
}

Traffic step_traffic(const LlamaConfig& c, const TrafficShape& s, int64_t micro_batches) {
    const int64_t n = s.rows * c.hidden * size_of(s.dtype), copies = s.tp / kv_ranks(c, s.tp);
    const int64_t wide = size_of(stats_dtype(s.dtype));
    const bool sequence = s.options.sequence_parallel;
    Counter counter(s);
    for (int64_t m = 0; m < micro_batches; ++m) {
        for (int64_t layer = 0; layer < c.layers; ++layer) count_layer(counter, c, s);
        if (!sequence) {
            counter.all_reduce(2, n);  // the embedding's g; backward the head's f
        } else {
            counter.reduce_scatter(2, n);  // the same,
            counter.all_gather(2, n);      // g backward; the head's f again, for the weight gradient
            s.options.overlap ? counter.ring(1, n) : counter.all_gather(1, n);  // and f forward
        }
        counter.all_reduce(1, wide * s.rows);      // the loss: maxima
        counter.all_reduce(1, 2 * wide * s.rows);  // sums of exponentials and the targets' logits
    }
    if (sequence) counter.all_reduce(1, (2 * c.layers + 1) * c.hidden * size_of(s.grad_dtype));
    Traffic traffic = counter.traffic();
    if (copies > 1) {
        const int64_t bytes = 2 * c.layers * kv_elements(c, s.tp) * size_of(s.grad_dtype);
        traffic.operations["tp_kv.all_reduce"] = {1, 2 * bytes * (copies - 1) / copies};
    }
    return traffic;
}

// ---- runs -----------------------------------------------------------------------------------------------------------

TensorParallelRun run_tensor_parallel(const TrainOptions& options, const Dataset& data, const Comm& world, int64_t tp,
                                      const TensorParallelOptions& tp_options) {
    TrainOptions o = options.without_files();
    o.global_batch = o.micro_batch;
    const Comm ranks = world.split([tp](int rank) { return int(rank / tp); }, "tp");
    const MemoryBytes before = ledger().now();
    Llama model(o.model, o.llama());
    Trainer trainer(o, model, data);
    const TensorParallel tensor_parallel(model, ranks, tp_options);
    trainer.groups.tp = group_of(ranks);

    // Counts what the first block sends: the tape's order is the hook. Only in the last step, because counting waits
    // for the device.
    TensorParallelRun run{.tp = tp, .options = tp_options};
    bool counting = false;
    const auto count = [&](Traffic* traffic) {
        if (!counting) return;
        const CommStats stats = world.take_stats();
        run.step.add(stats);
        if (traffic) traffic->add(stats);
    };
    auto& wrappers = model.blocks.front().unit.wrappers;
    wrappers.insert(wrappers.begin(), [&](Tape& tape, const Var& x, const Unit::Body& body) {
        count(nullptr);
        tape.record([&] { count(&run.layer); });
        Var y = body(tape, x);
        count(&run.layer);
        tape.record([&] { count(nullptr); });
        return y;
    });

    trainer.allocate();
    const MeasuredStep timed = measure_steps(trainer, world, 2).back();
    run.step_s = timed.report.step_s;
    run.waiting_s = timed.comm.waited;
    counting = true;
    const MeasuredStep counted = measure_steps(trainer, world, 1, 3).front();
    counting = false;
    run.step.add(counted.comm);
    run.peak = counted.report.peak;
    for (int i = 0; i < kMemoryKinds; ++i) {
        run.peak.kind[i] -= before[i];
        if (i < kDeviceMemoryKinds) run.peak.total -= before[i];
    }
    run.elements = tensor_parallel_elements(o.model, tp);
    run.activations = activation_formula(o.model, o.micro_batch, o.seq_len, model.options.dtype,
                                         model.options.recompute, {tp, tp_options.sequence_parallel});
    const TrafficShape shape{o.micro_batch * o.seq_len, tp,         model.options.dtype,
                             model.options.grad_dtype,  tp_options, model.options.recompute};
    run.layer_formula = layer_traffic(o.model, shape);
    run.step_formula = step_traffic(o.model, shape, 1);
    return run;
}

namespace {
std::string name_of(const TensorParallelRun& run) {
    return fmt::format("tp {}{}{}", run.tp, run.options.sequence_parallel ? ", sequence" : "",
                       run.options.overlap ? ", overlap" : "");
}
}  // namespace

std::string memory_table(const std::vector<TensorParallelRun>& runs, const Llama::Options& types) {
    const int64_t a = size_of(types.dtype), g = size_of(types.grad_dtype);
    const int64_t o = AdamW::state_bytes(types.dtype);
    std::string text =
        fmt::format("bytes of rank 0: peak of a step with one micro-batch; below it the formula\n{:<18}", "");
    for (int i = 0; i < kDeviceMemoryKinds; ++i) text += fmt::format("{:>13}", kMemoryNames[i]);
    text += fmt::format("{:>13}\n", "total");
    for (const TensorParallelRun& run : runs) {
        text += fmt::format("{:<18}", name_of(run));
        for (int i = 0; i < kDeviceMemoryKinds; ++i) text += fmt::format("{:>13}", run.peak.kind[i]);
        text += fmt::format("{:>13}\n{:<18}{:>13}{:>13}{:>13}{:>13}\n", run.peak.total, "", a * run.elements,
                            g * run.elements, o * run.elements, run.activations.total);
    }
    return text;
}

std::string traffic_table(const std::vector<TensorParallelRun>& runs) {
    std::string text = fmt::format(
        "what a rank sends for one block, forward and backward, and in a whole step\n{:<27}{:>13}{:>13}{:>13}{:>13}   "
        "a block's collectives\n",
        "", "block", "formula", "step", "formula");
    for (const TensorParallelRun& run : runs)
        if (run.tp > 1)
            text +=
                fmt::format("{:<27}{:>13}{:>13}{:>13}{:>13}   {}\n", name_of(run), run.layer.bytes(),
                            run.layer_formula.bytes(), run.step.bytes(), run.step_formula.bytes(), run.layer.text());
    return text;
}

std::string time_table(const std::vector<TensorParallelRun>& runs) {
    std::string text = fmt::format("one micro-batch on tp ranks\n{:<27}{:>13}{:>13}\n", "", "step", "waiting");
    for (const TensorParallelRun& run : runs)
        text += fmt::format("{:<27}{:>10.1f} ms{:>10.1f} ms\n", name_of(run), run.step_s * 1e3, run.waiting_s * 1e3);
    return text;
}

// ---- what a link makes of it ----------------------------------------------------------------------------------------

Links read_links(const std::string& path) {
    const nlohmann::json file = read_json(path, "--links " + path, "04_tensor_parallel/links.json shows the form");
    if (!file.is_object())
        usage_error("--links {}: is no JSON object; 04_tensor_parallel/links.json shows the form", path);
    const auto positive = [&](const nlohmann::json& entry, const std::string& where, const char* key) {
        const nlohmann::json value = entry.is_object() ? entry.value(key, nlohmann::json()) : nlohmann::json();
        if (!value.is_number() || !(value.get<double>() > 0))
            usage_error("--links {}: {}: \"{}\" must be a number above 0", path, where, key);
        return value.get<double>();
    };
    const auto name = [](const nlohmann::json& entry) {
        const auto found = entry.find("name");
        return found != entry.end() && found->is_string() ? found->get<std::string>() : std::string("?");
    };
    Links links;
    const nlohmann::json device = file.value("device", nlohmann::json::object());
    links.flops_per_s = positive(device, "\"device\"", "flops_per_s");
    links.device = name(device);
    const nlohmann::json list = file.value("links", nlohmann::json());
    if (!list.is_array() || list.empty()) usage_error("--links {}: \"links\" must be a list of links", path);
    for (size_t i = 0; i < list.size(); ++i) {
        const std::string where = fmt::format("links[{}]", i);
        const double bytes_per_s = positive(list[i], where, "bytes_per_s");
        links.links.push_back({name(list[i]), bytes_per_s, positive(list[i], where, "seconds")});
    }
    return links;
}

double efficiency(const LlamaConfig& c, int64_t seq_len, int64_t tp, const Links& links, const Links::Link& link) {
    const double products = 6.0 * double(c.block_parameters() - 2 * c.hidden),
                 attention = 6.0 * double(c.hidden * seq_len);
    const double compute = (products + attention) * double(seq_len) / (double(tp) * links.flops_per_s);
    const Traffic traffic =
        layer_traffic(c, {.rows = seq_len, .tp = tp, .dtype = DType::bf16, .grad_dtype = DType::f32});
    const double messages = 4 * 2 * double(tp - 1);  // of 4 ring all-reduces
    return compute / (compute + double(traffic.bytes()) / link.bytes_per_s + messages * link.seconds);
}

namespace {
struct Estimate {
    const char* model;
    int64_t seq_len, tp;
};
std::vector<Estimate> estimates() {
    std::vector<Estimate> list;
    for (const auto& [model, seq_len] : {std::pair<const char*, int64_t>{"8b", 8192}, {"70b", 8192}, {"405b", 8192}})
        for (const int64_t tp : {2, 4, 8, 16}) list.push_back({model, seq_len, tp});
    return list;
}
}  // namespace

std::string efficiency_table(const Links& links) {
    std::string text = fmt::format(
        "estimated: share of the time in which a rank computes ({} at {:.0f} TFLOP/s, one sequence of 8192, nothing "
        "hidden)\n{:<14}",
        links.device, links.flops_per_s / 1e12, "");
    for (const Links::Link& link : links.links) text += fmt::format("{:>18}", link.name);
    text += fmt::format("{:>18}\n", "often quoted");
    const std::map<int64_t, const char*> quoted = {{2, "95-98%"}, {4, "90-95%"}, {8, "80-90%"}, {16, "60-75%"}};
    for (const auto& [model, seq_len, tp] : estimates()) {
        text += fmt::format("{:<14}", fmt::format("{}, tp {}", model, tp));
        for (const Links::Link& link : links.links)
            text += fmt::format("{:>17.0f}%", 100 * efficiency(preset(model), seq_len, tp, links, link));
        text += fmt::format("{:>18}\n", quoted.at(tp));
    }
    return text +
           "often quoted: for large models over NVLink, part of the communication hidden; no source is known. Most "
           "nodes have 8 GPUs\n";
}

std::string efficiency_csv(const Links& links) {
    std::string text = "model,seq_len,tp,link,efficiency\n";
    for (const auto& [model, seq_len, tp] : estimates())
        for (const Links::Link& link : links.links)
            text += fmt::format("{},{},{},{},{:.4f}\n", model, seq_len, tp, link.name,
                                efficiency(preset(model), seq_len, tp, links, link));
    return text;
}

namespace {

// Layouts of fewer ranks than the chosen one hold more of the model; of a large one they might not fit.
constexpr int64_t kSmallModel = 500'000'000;  // parameters

void print_tables(Program& p, int64_t chosen) {
    const TrainOptions& options = p.options;
    std::vector<TensorParallelRun> runs, plain;
    for (int64_t tp = options.model.parameters() > kSmallModel ? chosen : 1; tp <= p.world.size(); ++tp)
        for (const TensorParallelOptions& how :
             {TensorParallelOptions{false, false}, {false, true}, {true, false}, {true, true}}) {
            const bool power = (tp & (tp - 1)) == 0, changes = tp > 1 || !(how.sequence_parallel || how.overlap);
            if (p.world.size() % tp != 0 || !(power || tp == chosen) || !changes) continue;
            try {
                check_tensor_parallel(options.model, options.seq_len, tp, how);
            } catch (const UsageError&) { continue; }
            runs.push_back(run_tensor_parallel(options, p.data(), p.world, tp, how));
            if (!how.overlap) plain.push_back(runs.back());
        }
    say("\n{}\n{}\n{}", memory_table(plain, options.llama()), traffic_table(runs), time_table(runs));
}

}  // namespace

void TensorParallelReport::add_flags(CommandLine& flags) {
    flags.group("Output");
    flags.add_input("--links", links_path_,
                    "FILE.json: links for the estimated table [default: 04_tensor_parallel/links.json]");
    flags.add_output("--efficiency-csv", efficiency_csv_, "FILE.csv: write the estimated table");
}

void TensorParallelReport::open(const Program& p) {
    if (!p.tables && !(links_path_.empty() && efficiency_csv_.empty()))
        usage_error("--links, --efficiency-csv: belong to the tables; leave out --tables off");
    if (p.tables)
        links_ = read_links(links_path_.empty() ? repository_file("04_tensor_parallel/links.json") : links_path_);
    if (this_rank == 0 && !efficiency_csv_.empty()) efficiency_file_.emplace("--efficiency-csv", efficiency_csv_);
}

void TensorParallelReport::print(Program& p, int64_t tp) {
    if (efficiency_file_) {
        efficiency_file_->write(efficiency_csv(links_));
        efficiency_file_->commit();
    }
    if (p.compares(p.world.size())) print_tables(p, tp);
    if (p.tables) say("\n{}", efficiency_table(links_));
}

}  // namespace train70b
