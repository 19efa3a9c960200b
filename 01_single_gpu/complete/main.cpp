// One device: loss = mean over tokens of -log softmax(Llama(tokens))[next token], minimized by AdamW.
//
// Run:   build/bin/01_single_gpu                             (a byte model on the repository's own text)
//        build/bin/01_single_gpu --recompute full --dtype bf16 --metrics run.jsonl
// Watch: the loss falls from ln 256 = 5.5; the closing table compares each kind of memory with its formula; --recompute
//        changes the activation memory only, not one bit of the loss.
#include "01_single_gpu/complete/muon.h"
#include "01_single_gpu/complete/run/bench.h"
#include "01_single_gpu/core/cpu_threads.h"

using namespace train70b;

static void program(int argc, char** argv) {
    TrainOptions options;
    CommandLine flags("Chapter 01: a Llama on one device", options);
    int64_t tokens_to_generate = 0;
    Bench bench;
    flags.group("Output");
    flags.add("--generate", tokens_to_generate, "generate this many tokens after training", integer_from(0));
    bench.add_flags(flags);
    flags.group("Training");
    flags.add("--optimizer", options.optimizer, "optimizer; muon: orthogonal updates of the matrices in blocks",
              one_of({"adamw", "muon"}));

    flags.parse(argc, argv);
    flags.check_batches(1);
    set_cpu_threads(1);
    if (options.optimizer == "muon") check_muon(options.mup.has_value());
    check_memory(options, flags);
    bench.open(options, flags);

    TrainingRun run(options, flags.values());
    run.allocate();
    if (bench.asked()) return bench.run(options, run);

    run.trainer.run();
    if (options.steps > 0)
        say(memory_table(options.model, run.model.options, options.micro_batch, options.seq_len, run.trainer.peak(),
                         options.optimizer));
    if (tokens_to_generate > 0) say("\n{}\n", printable(generate(run.trainer, tokens_to_generate), run.data.is_text()));
}

int main(int argc, char** argv) { return run_program(argc, argv, program); }
