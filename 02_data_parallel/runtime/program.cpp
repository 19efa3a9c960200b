#include "02_data_parallel/runtime/program.h"

namespace train70b {

namespace {
// --comm fake: usage error for outputs that need the whole model.
void check_outputs_of_one_rank(const TrainOptions& o) {
    const auto refuse = [](const std::string& flag) {
        usage_error("{}: with --comm fake there is only one rank's part of the model; leave it out", flag);
    };
    if (!o.save_hf.empty()) refuse("--save-hf " + o.save_hf);
    if (!o.save_reference.empty()) refuse("--save-reference " + o.save_reference);
    if (o.sample_every > 0) refuse(fmt::format("--sample-every {}", o.sample_every));
}
}  // namespace

Program::Program(const std::string& title, const std::string& tables_text) : flags(title, options) {
    add_comm_flags(flags, comm);
    flags.group("Output");
    flags.add_switch("--tables", tables, tables_text);
}

void Program::connect(int argc, char** argv) {
    flags.parse(argc, argv);
    if (options.dry_run && comm.backend != "fake")
        usage_error("--dry-run: needs simulated ranks (try --comm fake --fake-world N)");
    if (comm.backend == "fake") check_outputs_of_one_rank(options);
    world = train70b::connect(comm, options.device_kind());
    runtime_.emplace(world);
}

void Program::divide(int64_t ranks_per_copy, int64_t micro_batch, const std::string& flag) {
    if (options.micro_batch == 0) options.micro_batch = micro_batch;
    dp = data_parallel_ranks(dp, world, ranks_per_copy, flag);
    flags.check_batches(dp);
}

void Program::prepare(const std::function<void()>& checks, const std::function<Stage()>& stage) {
    // A simulated rank holds its part only: as if it were alone on its machine.
    const double ranks = double(world.size()), nodes = world.has_peers() ? ranks / double(ranks_on_this_node()) : ranks;
    together([&] {
        if (checks) checks();
        check_memory(options, flags, ranks, nodes);
        run_.emplace(options, flags.values(), stage ? std::make_optional(stage()) : std::nullopt);
    });
    run_->trainer.runtime = &*runtime_;
}

const Dataset& Program::data() {
    if (run_) return run_->data;
    if (!data_ && !flags.given("--data")) text_.emplace(20 * (options.seq_len + 1));  // with a validation split
    const std::string path = text_ ? text_->path() : options.data;
    if (!data_) data_.emplace(path, options.model.vocab, options.seq_len, options.val_fraction);
    return *data_;
}

void Program::use(ParamStore& store, const Comm& dp_cp) {
    trainer().store = &store;
    trainer().groups.dp = trainer().groups.dp_cp = group_of(dp_cp);
}

void Program::use(ParamStore& store, const Comm& dp_cp, const Comm& cp) {
    use(store, dp_cp);
    trainer().groups.dp = std::make_shared<Coordinate>(dp_cp.rank() / cp.size(), dp_cp.size() / cp.size());
    trainer().groups.cp = group_of(cp);
}

void Program::use(MicroBatchLoop& loop, const Comm& pp) {
    trainer().loop = &loop;
    trainer().groups.pp = group_of(pp);
}

MemoryPeak Program::train() {
    trainer().controls.push_back(&last_);
    trainer().run();
    return trainer().peak();
}

}  // namespace train70b
