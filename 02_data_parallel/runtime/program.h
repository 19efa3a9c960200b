#pragma once
// What the programs of chapters 02 to 08 have in common, step by step: a main() makes a Program, adds its flags, and
// calls connect(), divide(), prepare(), gives the trainer its roles, train(), and finish().
#include "01_single_gpu/complete/run/training_run.h"
#include "02_data_parallel/complete/flags.h"
#include "02_data_parallel/runtime/comm_roles.h"
#include "02_data_parallel/runtime/connect.h"

namespace train70b {

class Program {
  public:
    // tables: what --tables does, in the help.
    Program(const std::string& title, const std::string& tables);
    Program(const Program&) = delete;

    TrainOptions options;
    CommOptions comm;
    CommandLine flags;  // the shared ones and those of communication; the chapter's are added before connect()
    int64_t dp = 0;     // data-parallel ranks, after divide()
    bool tables = true;
    Comm world;

    void connect(int argc, char** argv);  // parses the flags; then `world` is all ranks
    // Determines dp where a model copy takes so many ranks, and the micro-batches; usage error where they do not
    // divide. micro_batch: the default of --micro-batch; 0: all sequences of a rank. flag: the one that says how many
    // ranks a copy takes, if there is one.
    void divide(int64_t ranks_per_copy, int64_t micro_batch = 0, const std::string& flag = "");
    // On all ranks together: the checks, which may end in a usage error on some of them, then data, model (all of it,
    // or a pipeline stage) and trainer.
    void prepare(const std::function<void()>& checks = {}, const std::function<Stage()>& stage = {});
    // Whether the tables of the run are printed: there are some, and it has done a step.
    bool prints_tables() const { return tables && last_.report.step > 0; }

    Llama& model() { return run_->model; }
    const Llama& model() const { return run_->model; }
    Trainer& trainer() { return run_->trainer; }
    const Dataset& data();                           // of the run; for a dry run, which has none, its own
    void use(ParamStore& store, const Comm& dp_cp);  // data parallelism in some form
    void use(ParamStore& store, const Comm& dp_cp, const Comm& cp);  // the same beside context parallelism
    void use(MicroBatchLoop& loop, const Comm& pp);                  // a pipeline
    void allocate() { run_->allocate(); }                            // prints what will be trained
    MemoryPeak train();                                              // the peak of this rank
    const StepReport& last_step() const { return last_.report; }     // that has been trained
    void finish() { world.finish(); }

  private:
    struct LastStep : RunControl {
        bool after_step(const StepReport& step) override { return report = step, true; }
        StepReport report;
    };
    std::optional<CommRuntime> runtime_;
    std::optional<TrainingRun> run_;
    LastStep last_;
    std::optional<EmptyText> text_;  // of a dry run without --data
    std::optional<Dataset> data_;
};

}  // namespace train70b
