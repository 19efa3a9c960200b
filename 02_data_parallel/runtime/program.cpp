#include "02_data_parallel/runtime/program.h"

namespace train70b {

Program::Program(const std::string& title, const std::string& tables_text) : flags(title, options) {
    add_comm_flags(flags, comm);
    if (tables_text.empty()) return;
    flags.group("Output");
    flags.add_switch("--tables", tables, tables_text);
}

void Program::connect(int argc, char** argv) {
    flags.parse(argc, argv);
    world = train70b::connect(comm, options);
    runtime_.emplace(world);
}

void Program::divide(int64_t ranks_per_copy) {
    dp = data_parallel_ranks(dp, world, ranks_per_copy);
    flags.check_batches(dp);
}

void Program::prepare(const std::function<void()>& checks, const std::function<Stage()>& stage) {
    together([&] {
        if (checks) checks();
        run_.emplace(options, flags.values(), stage ? std::make_optional(stage()) : std::nullopt);
    });
    run_->trainer.runtime = &*runtime_;
}

const Dataset& Program::data() {
    if (run_) return run_->data;
    if (!data_) data_.emplace(options.data, options.model.vocab, options.seq_len, options.val_fraction);
    return *data_;
}

void Program::use(ParamStore& store, const Comm& dp_cp) {
    trainer().store = &store;
    trainer().groups.dp = trainer().groups.dp_cp = group_of(dp_cp);
}

MemoryPeak Program::train() {
    trainer().run();
    return trainer().peak();
}

}  // namespace train70b
