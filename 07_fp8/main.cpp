// FP8 training: the products of the linear layers in 8 bits, Y = s_x s_w (codes of X)(codes of W)^T; moments in 8 bits.
//
// Run:   build/bin/07_fp8 --dtype bf16                      (--fp8 current)
//        build/bin/07_fp8 --dtype bf16 --fp8 blockwise --optimizer adamw8bit
//        mpirun -np 2 build/bin/07_fp8 --zero 3             (weights are gathered as codes)
// Watch: the loss is near chapter 01's, never equal to it; activations and, with adamw8bit, optimizer states shrink; a
//        product's error follows its scales, not its size.
#include "07_fp8/tables.h"

using namespace train70b;

namespace {

struct Tables {
    bool on = true;
    int64_t compare_steps = 0;
    std::string compare_csv;
};

std::string describe(const Precision& p, const std::string& dtype) {
    return (p.fp8.recipe == "off" ? dtype : p.fp8.recipe) + (p.optimizer == "adamw" ? "" : ", " + p.optimizer);
}

void print_tables(const TrainOptions& options, const Dataset& data, const Layout& layout, const ZeroOptions& zero,
                  const Precision& chosen, const Tables& tables, std::optional<OutputFile>& csv) {
    if (this_rank == 0) say("\n{}", error_table(product_errors(256, 512, 512, 1)));
    std::vector<PrecisionRun> runs;
    for (const char* recipe : {"off", "current", "delayed", "rowwise", "blockwise"})
        for (const char* optimizer : {"adamw", "adamw8bit"}) {
            Precision precision = chosen;
            precision.fp8.recipe = recipe;
            precision.fp8.strict = false;
            precision.optimizer = optimizer;
            if (options.dtype == "fp64" && (recipe != std::string("off") || optimizer != std::string("adamw")))
                continue;
            if (optimizer != std::string("adamw") && recipe != std::string("off") && recipe != chosen.fp8.recipe)
                continue;
            runs.push_back(run_precision(options, data, layout, zero, precision));
            runs.back().name = describe(precision, options.dtype);
        }
    say("\n{}", memory_table(runs, layout.data_ranks.size() == 1));
    if (tables.compare_steps > 0) {
        const std::vector<LossCurve> curves = loss_curves(options, data, layout, zero, chosen, tables.compare_steps);
        say("\n{}", curve_table(curves));
        if (csv) {
            csv->write(curve_csv(curves));
            csv->commit();
        }
    }
    if (options.device_kind() == Device::cuda && chosen.fp8.recipe != "off" && this_rank == 0) {
        std::vector<ProductTimes> times;
        for (const int64_t size : {1024, 2048, 4096, 8192})
            for (const int64_t rows : {1024, 4096, 16384})
                times.push_back(time_products(Device::cuda, chosen.fp8, rows, size, size));
        say("\n{}", time_table(times, chosen.fp8.recipe));
    }
    say("\n{}", projection_table());
}

void program(int argc, char** argv) {
    TrainOptions options;
    CommOptions comm_options;
    ZeroOptions zero_options{.stage = 0};
    Precision precision;
    Tables tables;
    int64_t dp = 0, tp = 1;
    CommandLine command_line("Chapter 07: FP8", options);
    add_comm_flags(command_line, comm_options);
    add_zero_flags(command_line, dp, zero_options);
    command_line.add("--tp", tp, "tensor-parallel ranks of a model copy", whole_number_from(1));
    add_fp8_flags(command_line, precision.fp8, precision.optimizer);
    command_line.group("Output");
    command_line.add_switch("--tables", tables.on, "compare precisions after training");
    command_line.add("--compare", tables.compare_steps,
                     "steps that every recipe trains for the table of losses; 0: no such table", whole_number_from(0));
    command_line.add_output("--compare-csv", tables.compare_csv, "FILE.csv: the losses of --compare");
    command_line.parse(argc, argv);
    if (!tables.compare_csv.empty() && (tables.compare_steps == 0 || !tables.on))
        usage_error("--compare-csv: holds the losses of --compare N; add --compare 60, and leave out --tables off");

    if (tables.compare_steps > 0 && options.dtype == "fp64")
        usage_error("--compare: trains in FP8, too, which does not go with --dtype fp64; leave one of them out");

    const Comm world = connect(comm_options, options);
    dp = data_parallel_ranks(dp, world, tp);
    command_line.check_batches(dp);
    check_tensor_parallel(options.model, options.seq_len, tp, {});
    zero_options.micro_batches = options.accumulation(dp);

    const int64_t node_ranks = ranks_on_this_node();
    std::optional<TrainingRun> run;
    std::optional<OutputFile> csv;
    together([&] {
        check_precision(precision.fp8, precision.optimizer, options.dtype);
        check_zero(zero_options, options, dp, node_ranks, moment_bytes(precision.optimizer, options.llama().dtype));
        check_fp8(precision.fp8, options.model, options.micro_batch * options.seq_len, tp);
        if (this_rank == 0 && !tables.compare_csv.empty()) csv.emplace("--compare-csv", tables.compare_csv);
        run.emplace(options, command_line.values());
    });
    const Layout layout{world.split([tp](int rank) { return int(rank / tp); }, "tp"),
                        world.split([tp](int rank) { return int(rank % tp); }, "dp")};
    {
        const Composition composition(run->model, run->trainer, options, layout, zero_options, precision);
        report_communication(run->trainer, world);
        run->materialise();
        for (const std::string& why : composition.fp8.left_out()) say("stays in {}: {}\n", options.dtype, why);
        say("{} of {} linear layers of the blocks in 8 bits ({}); {}; {} tensor-parallel x {} data-parallel ranks "
            "({}), "
            "ZeRO stage {}\n",
            composition.fp8.layers(), 4 * options.model.layers, precision.fp8.recipe, precision.optimizer, tp, dp,
            world.backend(), zero_options.stage);
        run->trainer.run();
    }
    run.reset();
    if (tables.on && comm_options.backend != "fake")
        print_tables(options, Dataset(options.data, options.model.vocab, options.seq_len, options.val_fraction), layout,
                     zero_options, precision, tables, csv);
    world.finish();
}

}  // namespace

int main(int argc, char** argv) { return run_ranks(argc, argv, program); }
