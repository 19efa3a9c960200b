// One device: loss = mean over tokens of -log softmax(Llama(tokens))[next token], minimized by AdamW.
//
// Run:   build/bin/01_single_gpu                             (a byte model on the repository's own text)
//        build/bin/01_single_gpu --recompute full --dtype bf16 --metrics run.jsonl
// Watch: the loss falls from ln 256 = 5.5; the closing table compares each kind of memory with its formula; --recompute
//        changes the activation memory only, not one bit of the loss.
#include "01_single_gpu/core/cpu_setup.h"
#include "01_single_gpu/io/bench.h"
#include "01_single_gpu/io/generate.h"

using namespace train70b;

namespace {

void program(int argc, char** argv) {
    TrainOptions options;
    CommandLine command_line("Chapter 01: a Llama on one device", options);
    int64_t tokens_to_generate = 0;
    bool run_bench = false;
    std::string bench_csv;
    command_line.group("Output");
    command_line.add("--generate", tokens_to_generate, "generate this many tokens after training", integer_from(0));
    command_line.add_flag("--bench", run_bench, "time every op and a training step instead of training");
    command_line.add_output("--bench-csv", bench_csv, "FILE.csv: write the table of --bench (implies --bench)");
    command_line.parse(argc, argv);
    command_line.check_batches(1);
    set_cpu_threads(1);

    TrainingRun run(options, command_line.values());
    run.allocate();
    if (run_bench || !bench_csv.empty()) return bench(options, run, bench_csv);

    run.trainer.run();
    if (options.steps > 0)
        fmt::print("\n{}", memory_table(options.model, run.model.options, options.micro_batch, options.seq_len,
                                        run.trainer.peak()));
    if (tokens_to_generate > 0) {
        const std::vector<int32_t> prompt = run.data.read(0, std::min<int64_t>(run.data.tokens(), 16));
        const auto text = generate(run.model, prompt, tokens_to_generate, options.seq_len, options.seed);
        fmt::print("\n{}\n", printable(text, run.data.is_text()));
    }
}

}  // namespace

int main(int argc, char** argv) { return run_program(argc, argv, program); }
