// The composed trainer: data, ZeRO, tensor, sequence, pipeline and context parallelism and FP8, in any mix.
//
// Run:   mpirun --oversubscribe -np 8 build/bin/08_3d_full --dp 2 --tp 2 --pp 2
//        mpirun --oversubscribe -np 8 build/bin/08_3d_full --tp 2 --cp 2 --pp 2 --sequence-parallel on --zero 3
//        build/bin/08_3d_full --model 70b --comm fake --fake-world 64 --tp 8 --pp 4 --zero 1 --seq-len 4096 --dry-run ...
// Watch: the loss is chapter 01's, whatever the layout; one rank of it, bit for bit.
#include "08_3d_full/dry_run.h"
#include "08_3d_full/probe.h"

using namespace train70b;

namespace {

struct Extras {
    bool dry_run = false, probe = false;
};

// One step of every rank, or of the one that was asked for, with nothing allocated. Files are of --fake-rank.
void print_dry_run(const TrainOptions& options, const CommandLine& command_line, int64_t fake_rank, const Plan& plan) {
    const bool one_rank = command_line.given("--fake-rank");
    const Dataset data(options.data, options.model.vocab, options.seq_len, options.val_fraction);
    std::vector<RankMemory> ranks;
    for (int64_t rank = 0; rank < plan.mesh.size(); ++rank)
        if (!one_rank || rank == fake_rank)
            ranks.push_back(book_rank(rank == fake_rank ? options : options.without_files(), command_line.values(),
                                      data, plan, rank));
    CHECK(!ranks.empty(), "rank {} of {}", fake_rank, plan.mesh.size());
    const auto larger = [](const RankMemory& a, const RankMemory& b) { return a.peak.total < b.peak.total; };
    say("\n{}", rank_table(*std::max_element(ranks.begin(), ranks.end(), larger), options));
    if (!one_rank) say("\n{}", ranks_table(ranks, plan));
}

void program(int argc, char** argv) {
    TrainOptions options;
    CommOptions comm_options;
    Plan plan;
    Extras extras;
    CommandLine command_line("Chapter 08: everything together", options);
    add_comm_flags(command_line, comm_options);
    add_plan_flags(command_line, plan);
    command_line.group("Output");
    command_line.add_flag("--dry-run", extras.dry_run,
                          "book one step of --comm fake's ranks, all or --fake-rank; compute nothing");
    command_line.add_switch("--probe", extras.probe, "time products and links of all ranks before training");
    command_line.parse(argc, argv);
    if (extras.dry_run && comm_options.backend != "fake")
        usage_error("--dry-run: books ranks of a world that is not there; add --comm fake --fake-world N");
    if (extras.probe && comm_options.backend == "fake")
        usage_error("--probe on: with --comm fake there are no links to time; leave it out");
    options.dry_run = extras.dry_run;

    const Comm world = connect(comm_options, options);
    plan.mesh = mesh_of(plan.mesh, world.size());
    if (options.micro_batch == 0 && plan.mesh.pp > 1) options.micro_batch = 1;  // many small ones fill a pipeline
    command_line.check_batches(plan.mesh.dp);
    if (extras.dry_run) {
        settle(plan, options, world.size());
        say("{}: {} parameters; a step is {} sequences of {}, {} at a time\n{}", options.model.name,
            human_count(double(options.model.parameters())), options.global_batch, options.seq_len, options.micro_batch,
            picture(plan.mesh));
        return print_dry_run(options, command_line, comm_options.fake_rank, plan);
    }

    std::optional<TrainingRun> run;
    together([&] {
        settle(plan, options, world.size());
        run.emplace(options, command_line.values(), stage_of(plan, options.model, world.rank()));
    });
    {
        Composed composed(run->model, run->trainer, options, plan, world);
        report_communication(run->trainer, world);
        run->materialise();
        say("{}", picture(plan.mesh));
        for (const std::string& why : composed.fp8.left_out()) say("stays in {}: {}\n", options.dtype, why);
        if (extras.probe) {
            const std::string table = probe(world, plan, options.device_kind(), options.llama().dtype);
            say("{}", table);
        }
        run->trainer.run();
        RankMemory memory = rank_formula(options, plan, world.rank());
        memory.peak = run->trainer.peak();
        if (options.steps > 0) say("\n{}", rank_table(memory, options));
    }
    world.finish();
}

}  // namespace

int main(int argc, char** argv) { return run_ranks(argc, argv, program); }
