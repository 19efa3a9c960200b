// What no training run shows, measured by itself: docs/measure.py and docs/measure_node.py run it.
//
//     mpirun -np 2 test_measure all-reduce    every algorithm by the size of the message (--largest-mb, --csv FILE)
//     test_measure simulated --cluster FILE   the same on a cluster file's idle links, as --simulate has them
//     mpirun -np 4 test_measure attention     what rounding does to attention over several ranks
//     test_measure rounding                   what rounding to 8 bits does to one product
//     test_measure products --fp8 current     TFLOP/s of a layer's products in bf16 and in 8 bits: on a GPU
#include "01_single_gpu/complete/run/bench.h"
#include "01_single_gpu/core/registry.h"
#include "02_data_parallel/complete/all_reduce.h"
#include "02_data_parallel/runtime/connect.h"
#include "02_data_parallel/runtime/median.h"
#include "02_data_parallel/runtime/program.h"
#include "07_fp8/complete/compose.h"
#include "07_fp8/complete/flags.h"
#include "08_3d_full/plan/network.h"
#include "tests/attention_error.h"
#include "tests/product_errors.h"

using namespace train70b;
using namespace train70b::test;

namespace {

// ---- all-reduce ----

// Times of `forms` (0, 1, ...) in alternating rounds, so that a machine that slows down slows all of them down; each
// round begins with another form. time(form): seconds of one, the same number on all ranks. The first round does not
// count; as many rounds follow as `budget` seconds hold, within least to most. Returns [form][round].
std::vector<std::vector<double>> alternate(size_t forms, double budget, const std::function<double(size_t)>& time,
                                           int least, int most) {
    std::vector<std::vector<double>> seconds(forms);
    int rounds = least;
    for (int round = -1; round < rounds; ++round) {
        double all = 0;
        for (size_t i = 0; i < forms; ++i) {
            const size_t form = (i + size_t(round + 1)) % forms;
            const double one = time(form);
            all += one;
            if (round >= 0) seconds[form].push_back(one);
        }
        if (round < 0) rounds = std::clamp(int(budget / all), least, most);
    }
    return seconds;
}

// The test values are small integers, so any order of the sum is exact.
void check_result(const Comm& ranks, Tensor x, const std::string& algorithm) {
    const int N = ranks.size();
    Tensor host(x.shape(), DType::f32, Device::cpu, Memory::workspace);
    for (int64_t i = 0; i < x.size(); ++i) host.data<float>()[i] = float(i % 13) * float(ranks.rank() + 1);
    copy(x, host);
    ranks.use(algorithm);
    ranks.all_reduce(x).wait();
    const std::vector<double> sums = read(x);
    for (int64_t i = 0; i < x.size(); ++i)
        CHECK(sums[i] == double(i % 13) * double(N * (N + 1) / 2), "{}: element {} of {} is {}", algorithm, i, x.size(),
              sums[i]);
}

// Seconds of one all-reduce on the slowest rank. Small ones are repeated within one measurement.
double time_once(const Comm& ranks, const Tensor& x, const std::string& algorithm) {
    const int repeats = x.bytes() <= (64 << 10) ? 20 : 1;
    ranks.use(algorithm);
    ranks.barrier().wait();
    const double begin = now_seconds();
    for (int i = 0; i < repeats; ++i) ranks.all_reduce(x).wait();
    synchronize(x.device());
    return ranks.max((now_seconds() - begin) / repeats);
}

// Times every all-reduce algorithm; its result is checked first. Definitions of nccl-tests: algorithm bandwidth = bytes
// of x / time; bus bandwidth = algorithm bandwidth x 2 (N-1)/N, the rate on each rank's link if only the minimum number
// of bytes is sent. The time is that of the slowest rank, the median of alternating rounds; "x library" is the median
// of each round's ratio to the library's own all-reduce.
Table all_reduce_table(const Comm& ranks, Device device, const std::vector<int64_t>& sizes) {
    constexpr double kBudget = 0.5;  // seconds per size
    const int N = ranks.size();
    Table table(fmt::format("all-reduce over {} ranks", N),
                {Column("ranks").csv_only(), Column("size", "bytes"), Column("algorithm").left(),
                 Column("time", "seconds"), Column("algbw", "algorithm_bytes_per_s"),
                 Column("busbw", "bus_bytes_per_s"), Column("x library", "times_library")});
    const auto bandwidth = [](double bytes_per_s) {
        return Cell(fmt::format("{:.2f} GB/s", bytes_per_s / 1e9), bytes_per_s);
    };
    const std::vector<std::string> algorithms = all_reduce_names();
    const size_t library = size_t(std::find(algorithms.begin(), algorithms.end(), "library") - algorithms.begin());
    const std::string before = ranks.use("library");
    for (const int64_t bytes : sizes) {
        Tensor x({bytes / 4}, DType::f32, device, Memory::workspace);
        for (const std::string& algorithm : algorithms) check_result(ranks, x, algorithm);
        fill(x, 0);
        const auto rounds = alternate(
            algorithms.size(), kBudget, [&](size_t i) { return time_once(ranks, x, algorithms[i]); }, 5, 51);
        for (size_t i = 0; i < algorithms.size(); ++i) {
            std::vector<double> ratios;
            for (size_t r = 0; r < rounds[i].size(); ++r) ratios.push_back(rounds[i][r] / rounds[library][r]);
            const double seconds = median(rounds[i]), rate = double(bytes) / seconds;
            table.row({N, Cell(i == 0 ? human_bytes(double(bytes)) : "", std::to_string(bytes)), algorithms[i],
                       Cell(fmt::format("{:.1f} us", 1e6 * seconds), seconds), bandwidth(rate),
                       bandwidth(rate * 2 * (N - 1) / N), fixed(median(ratios), 2)});
        }
    }
    ranks.use(before);
    return table;
}

Table simulated_table(ClusterModel cluster, const std::vector<int64_t>& sizes) {
    Table table("all-reduce on " + cluster.name, {"bytes", Column("algorithm").left(), "seconds"});
    std::vector<int64_t> ranks(size_t(cluster.devices()));
    std::iota(ranks.begin(), ranks.end(), 0);
    for (const int64_t bytes : sizes)
        for (const char* algorithm : {"ring", "hierarchical", "tree"}) {
            cluster.all_reduce = algorithm;
            const Network network(cluster, cluster.devices());
            const Transfer transfer = network.transfer({.operation = "all_reduce", .bytes = bytes}, ranks, 0);
            table.row({bytes, algorithm, fmt::format("{:.6g}", network.seconds_alone(transfer))});
        }
    return table;
}

// ---- rounding ----

// As the lessons have it: the first column to the left, the others to the right.
struct Markdown {
    std::string text;

    void line(const std::vector<Cell>& cells) {
        for (const Cell& cell : cells) text += "| " + cell.text + " ";
        text += "|\n";
    }
    Markdown(const std::string& caption, const std::vector<Cell>& names) : text(caption + "\n\n") {
        line(names);
        std::vector<Cell> rule(names.size(), "--:");
        rule[0] = "---";
        line(rule);
    }
};

std::string attention_table(const Comm& world) {
    Markdown table("error of attention and its gradients against one device in fp32: median of five seeds",
                   {"", "ranks", "fp32", "bf16"});
    for (int n = 1; n <= std::min(world.size(), 8); n *= 2) {  // as many as there are heads
        const Comm ranks = world.split([n](int rank) { return rank < n ? 0 : -1; }, "cp");
        if (world.rank() >= n) continue;
        for (const std::string& name : names_of(context_algorithms())) {
            if (n == 1 && name != "ring") continue;
            const auto error = [&](DType dtype) {
                std::vector<double> errors;
                for (uint64_t seed = 1; seed <= 5; ++seed)
                    errors.push_back(attention_error(ranks, {name}, dtype, seed));
                return scientific(median(errors));
            };
            const Cell fp32 = error(DType::f32), bf16 = error(DType::bf16);
            table.line({n == 1 ? "one device" : name, n, fp32, bf16});
        }
    }
    world.barrier().wait();
    return table.text;
}

std::string rounding_table() {
    Markdown table("error of one product against double: mean over rows of |difference| / |row|",
                   {"", "normal", "rows x 100", "columns x 100", "tiny gradients"});
    for (const ProductErrors& e : product_errors(256, 512, 512, 1))
        table.line({e.recipe, percent(e.normal, 2), percent(e.outlier_rows, 2), percent(e.outlier_cols, 2),
                    percent(e.tiny, 2)});
    return table.text;
}

// ---- products ----

struct ProductTimes {
    int64_t rows, in, out;
    double bf16_s, fp8_s;  // of the three products of a layer
    double cast_s;         // casts of X, dY, W with their transposes
};

ProductTimes time_products(Device device, const Fp8Options& options, int64_t rows, int64_t in, int64_t out) {
    const auto random = [&](Shape shape, uint64_t key, float size) {
        Tensor x(shape, DType::bf16, device, Memory::workspace);
        fill_normal(x, key, {.cols = x.size(), .global_cols = x.size()}, size);
        return x;
    };
    const Tensor x = random({rows, in}, 1, 1), w = random({out, in}, 2, 0.02f), dy = random({rows, out}, 3, 1e-6f);
    Tensor y({rows, out}, DType::bf16, device, Memory::workspace), dx = Tensor::like(x, Memory::workspace);
    Tensor dw({out, in}, DType::f32, device, Memory::workspace);
    fill(dw, 0);
    const auto recipe = make_recipe(options, 3, device, Comm());
    const auto seconds = [&](const std::function<void()>& body) { return median_seconds(device, 9, body); };
    QuantizedPair of_x, of_w, of_dy;
    const auto quantize_all = [&] {
        of_x = recipe->quantize({Operand::input, 0}, x, Usage::both, true);
        of_w.rowwise = recipe->quantize({Operand::weight, 1}, w, Usage::rowwise, true).rowwise;
        of_w.columnwise = recipe->quantize({Operand::weight, 1}, w, Usage::columnwise, false).columnwise;
        of_dy = recipe->quantize({Operand::gradient, 2}, dy, Usage::both, true);
    };
    quantize_all();
    recipe->next_step();
    ProductTimes times{rows, in, out, 0, 0, 0};
    times.bf16_s = seconds([&] {
        matmul_into(y, x, w, Transpose::b);
        matmul_into(dx, dy, w);
        matmul_into(dw, dy, x, Transpose::a, 1);
    });
    times.cast_s = seconds(quantize_all);
    times.fp8_s = seconds([&] {
        scaled_matmul_into(y, of_x.rowwise, of_w.rowwise);
        scaled_matmul_into(dx, of_dy.rowwise, of_w.columnwise);
        scaled_matmul_into(dw, of_dy.columnwise, of_x.columnwise, 1);
    });
    return times;
}

Table time_table(const std::vector<ProductTimes>& times, const std::string& recipe) {
    Table table(fmt::format("a layer's three products, {}: TFLOP/s, and milliseconds of the casts", recipe),
                {"rows", "in", "out", "bf16", "fp8", "casts, ms", "net speedup"});
    const ProductTimes* even = nullptr;  // the smallest shape from which on 8 bits are faster
    for (const ProductTimes& t : times) {
        const double flops = 6.0 * double(t.rows) * double(t.in) * double(t.out), all = t.fp8_s + t.cast_s;
        table.row({t.rows, t.in, t.out, fixed(flops / t.bf16_s / 1e12, 1), fixed(flops / t.fp8_s / 1e12, 1),
                   fixed(1e3 * t.cast_s, 3), fixed(t.bf16_s / all, 2, " x")});
        if (t.bf16_s <= all) even = nullptr;
        if (t.bf16_s > all && !even) even = &t;
    }
    table.note(even ? fmt::format("8 bits pay from {} rows of {} to {} on", even->rows, even->in, even->out)
                    : "8 bits do not pay at the largest of these shapes");
    return table;
}

void program(int argc, char** argv) {
    if (argc < 2) usage_error("test_measure: all-reduce, simulated, attention, rounding or products?");
    const std::string what = argv[1];
    Program p("Measurements that no training run makes", "");
    OptionalOutput csv{"--csv"};
    std::string cluster;
    int64_t largest_mb = 64;
    Precision precision;
    p.flags.group("Output");
    p.flags.add_output(csv, "FILE.csv: write the table of all-reduce algorithms");
    p.flags.add_input("--cluster", cluster, "FILE.json: of `simulated`");
    p.flags.add("--largest-mb", largest_mb, "largest message of the table of all-reduce algorithms, in MiB",
                integer_from(1, 1 << 14));
    add_fp8_flags(p.flags, precision.fp8, precision.optimizer);
    p.connect(argc - 1, argv + 1);
    csv.open();
    const Device device = p.options.device_kind();
    if (what == "all-reduce" || what == "simulated") {
        std::vector<int64_t> sizes;
        for (int64_t bytes = 1 << 10; bytes <= largest_mb << 20; bytes *= 4) sizes.push_back(bytes);
        const Table table = what == "simulated"
                                ? simulated_table(read_cluster(cluster_path(cluster), "--cluster"), sizes)
                                : all_reduce_table(p.world.split([](int) { return 0; }, "dp"), device, sizes);
        say(table);
        csv.write(table.csv());
    } else if (what == "attention") {
        say("\n{}", attention_table(p.world));
    } else if (what == "rounding") {
        say("\n{}", rounding_table());
    } else if (what == "products" && device == Device::cuda && precision.fp8.recipe != "off") {
        std::vector<ProductTimes> times;
        for (const int64_t size : {1024, 2048, 4096, 8192})
            for (const int64_t rows : {1024, 4096, 16384})
                times.push_back(time_products(device, precision.fp8, rows, size, size));
        say(time_table(times, precision.fp8.recipe));
    } else {
        usage_error("test_measure {}: is none of all-reduce, simulated, attention, rounding, products (on a GPU)",
                    what);
    }
    p.finish();
}

}  // namespace

int main(int argc, char** argv) { return run_ranks(argc, argv, program); }
